"""Offload: codes live one tier down, and nothing else changes."""

import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import decode, tiny_model, tokens

import cache as caches
from generate import DecodeStep, Engine, Params

FORMATS = [dict(), dict(bits=8), dict(bits=4), dict(bits=2, format="kivi"), dict(bits=4, format="nvfp4", residual=16)]
POLICIES = ["full", "h2o", "snapkv:window=8", "pyramid:window=8", "adakv:window=8", "streaming", "keydiff"]


def spec(cache, tmp_path, staged=False, away=None, **options) -> caches.CacheSpec:
    budget = None if cache == "full" else 0.5
    made = caches.build(cache, budget=budget, offload=f"disk:{tmp_path}", **options)
    return replace(made, staged=staged, away=away)


def near(spec: caches.CacheSpec) -> caches.CacheSpec:
    return replace(spec, offload="none", staged=False, away=None)


def story(model, spec, batch=1):
    """Logits of a prompt, steps and a second turn, of sequences of different lengths where there are two, and of
    another prompt in the same buffers."""
    ids = tokens(220, batch=batch)
    model.setup_caches(spec, batch, 220)
    out = []
    for _ in range(2):
        prompts = [row[: 80 + 30 * i] for i, row in enumerate(ids)]
        lengths = torch.tensor([len(p) for p in prompts])
        out.append(model.prefill(prompts))
        for t in range(24):
            out.append(model(ids[:, 110 + t : 111 + t], lengths[:, None] + t)[:, 0])
        out.append(model.prefill([row[140:180] for row in ids], (lengths + 24).tolist()))
        for t in range(10):
            out.append(model(ids[:, 180 + t : 181 + t], lengths[:, None] + 64 + t)[:, 0])
        ids = ids.flip(1)
    return torch.stack(out)


ALL = [(cache, {}) for cache in POLICIES] + [(cache, form) for cache in ("full",) for form in FORMATS[1:]]


@pytest.mark.parametrize("cache, options", ALL, ids=str)
@pytest.mark.parametrize("staged, away", [(False, None), (True, None), (True, (0, 2))])
def test_bitwise_equal_to_none(cache, options, staged, away, tmp_path):
    """Three layers in two places, all of them and two of them; in two lanes, over several turns."""
    model, ours = tiny_model(), spec(cache, tmp_path, staged, away, **options)
    assert torch.equal(story(model, ours, 2), story(model, near(ours), 2))


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("delayed", ["up", "both"])
def test_a_slow_copy_changes_nothing(layers, delayed, tmp_path, monkeypatch):
    for name in ("up", "down"):
        if delayed in (name, "both"):
            copy = getattr(caches.Staged, name)

            def slow(self, *args, copy=copy):
                if threading.current_thread() is not threading.main_thread():
                    time.sleep(0.003)
                copy(self, *args)

            monkeypatch.setattr(caches.Staged, name, slow)
    model, ours = tiny_model(n_layer=layers), spec("h2o", tmp_path, staged=True)
    ids = tokens(120)
    model.setup_caches(ours, 1, 120)
    slowly = decode(model, ids, 90)
    model.setup_caches(near(ours), 1, 120)
    assert torch.equal(slowly, decode(model, ids, 90))


def test_layers_come_up_ahead_and_only_what_is_new_goes_home(tmp_path, monkeypatch):
    model, ids = tiny_model(n_layer=5), tokens(120)
    model.setup_caches(spec("full", tmp_path, staged=True), 1, 120)
    model.prefill(ids[:, :100])
    seen, written = [], []
    up, down = caches.Staged.up, caches.Staged.down

    def note(self):
        seen.append((threading.current_thread() is threading.main_thread(), self.number))
        up(self)

    def home(self, slot=None):
        written.append(slot.clone())
        before = [part.clone() for part in self.held.values()]
        down(self, slot)
        changed = [(new != old).sum().item() for new, old in zip(self.held.values(), before, strict=True)]
        assert all(0 < n <= 3 * 20 for n in changed), "one token of three heads"

    monkeypatch.setattr(caches.Staged, "up", note)
    monkeypatch.setattr(caches.Staged, "down", home)
    for t in range(100, 104):
        model(ids[:, t : t + 1], torch.full((1, 1), t))
    layers = model.layers[0].attention.cache.layout.stage.layers
    model.layers[0].attention.cache.layout.stage.worker.submit(int).result()
    ahead = [number for main, number in seen if not main]
    assert sorted(number for main, number in seen if main) in ([0, 1], [0, 1, 2]), "only what nothing could foresee"
    assert ahead[:6] == [2, 3, 4, 1, 0, 2] or ahead[:6] == [2, 3, 4, 0, 1, 2], ahead
    assert len(written) == 20 and all(slot.tolist() == [[[100 + n // 5]] * 3] for n, slot in enumerate(written))
    assert len(layers) == 5


def test_a_file_is_asked_for_a_layer_ahead_while_the_disk_is_waited_for(tmp_path, monkeypatch):
    """And never for a layer that reads what it selects."""
    import resource
    import types

    model, ids = tiny_model(n_layer=4), tokens(130)
    model.setup_caches(spec("full", tmp_path, select=96), 1, 130)
    model.prefill(ids[:, :120])
    layouts = [layer.attention.cache.layout for layer in model.layers]
    assert [layout.reads_all for layout in layouts] == [True, True, False, False]
    asked, faults = [], iter(range(100, 200))
    maps = layouts[0].memory.maps
    for layout in layouts:
        for part in layout.held.values():
            known = types.SimpleNamespace(madvise=lambda advice, n=layout.number: asked.append(n))
            maps[part.data_ptr()] = lambda known=known: known
    monkeypatch.setattr(resource, "getrusage", lambda who: types.SimpleNamespace(ru_majflt=next(faults)))
    model(ids[:, 120:121], torch.full((1, 1), 120))
    assert asked == [1, 1, 0, 0]
    monkeypatch.setattr(resource, "getrusage", lambda who: types.SimpleNamespace(ru_majflt=7))
    model(ids[:, 121:122], torch.full((1, 1), 121))
    model(ids[:, 122:123], torch.full((1, 1), 122))
    assert len(asked) <= 6, "once, and not again while nobody waits"


def test_the_lower_tier_is_authoritative(tmp_path):
    """What is up can be lost at any time between steps."""
    model, ids = tiny_model(), tokens(120)
    ours = spec("h2o", tmp_path, staged=True, bits=4)
    model.setup_caches(near(ours), 1, 120)
    twin = decode(model, ids, 90)
    model.setup_caches(ours, 1, 120)
    out = [model.prefill(ids[:, :90])]
    stage = model.layers[0].attention.cache.layout.stage
    for t in range(90, 120):
        stage.worker.submit(int).result()
        stage.holds, stage.coming = [None, None], [None, None]
        for place in stage.places:
            for storage in place.values():
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)
        out.append(model(ids[:, t : t + 1], torch.full((1, 1), t))[:, 0])
    assert torch.equal(torch.stack(out, 1), twin)


@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("staged", [False, True])
def test_saved_and_restored_through_another_memory(options, staged, tmp_path):
    model, ids = tiny_model(), tokens(130)
    ours = spec("full", tmp_path, staged, **options)
    model.setup_caches(ours, 1, 130)
    decode(model, ids[:, :110], 90)
    states = [layer.attention.cache.state() for layer in model.layers]
    for other in (ours, near(ours)):
        model.setup_caches(other, 1, 130)
        for layer, state in zip(model.layers, states, strict=True):
            layer.attention.cache.restore(state)
        again = [layer.attention.cache.state() for layer in model.layers]
        assert all(torch.equal(a[k], b[k]) for a, b in zip(states, again, strict=True) for k in a)


@pytest.mark.parametrize("page, select", [(0, None), pytest.param(32, 96, marks=pytest.mark.slow)])
def test_compiled_and_replayed_from_a_file(page, select, tmp_path):
    torch._dynamo.reset()
    ours = spec("full", tmp_path, page_size=page, select=select, bits=4)
    model, ids = tiny_model(), tokens(240)
    model.compile()

    def run(spec):
        model.setup_caches(spec, 1, 240)
        step, out = DecodeStep(model), [model.prefill(ids[:, :200])]
        out += [step(ids[:, t : t + 1], torch.full((1, 1), t))[:, 0].clone() for t in range(200, 240)]
        assert step.again is not None
        return torch.stack(out)

    assert torch.equal(run(ours), run(near(ours)))


def test_an_engine_whose_pages_are_in_a_file(tmp_path):
    prompts = [tokens(n, seed=n)[0].tolist() for n in (70, 9, 150, 33)]

    def answers(spec):
        engine = Engine(tiny_model(), replace(spec, page=8), max_batch=2, max_seq_len=200)
        return engine.generate(prompts, Params(20)), caches.offloaded(engine.caches)

    ours = spec("snapkv:window=8", tmp_path, bits=8)
    (theirs, none), (found, away) = answers(near(ours)), answers(ours)
    assert found == theirs and none == 0 < away


def test_bytes_are_where_they_are_said_to_be(tmp_path):
    model = tiny_model(n_layer=4, max_seq_len=4096)
    sizes = {}
    for name, ours in {
        "none": caches.build("full"),
        "disk": spec("full", tmp_path),
        "staged": spec("full", tmp_path, staged=True),
    }.items():
        model.setup_caches(ours, 1, 4096)
        model.prefill(tokens(4000))
        layers = [layer.attention.cache for layer in model.layers]
        sizes[name] = caches.memory(layers), caches.offloaded(layers)
    codes = 4 * 3 * 4096 * 20 * 2 * 4
    rest = sizes["none"][0] - codes
    assert sizes == {"none": (codes + rest, 0), "disk": (rest, codes), "staged": (rest + codes // 2 + 4 * 24, codes)}


def test_anonymous_memory_shrinks_by_what_is_in_files(tmp_path):
    """In fresh processes: what cannot be given back to the system is less by the cache's size."""
    code = """
import sys, torch
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from conftest import tiny_model, tokens
import cache as caches
model = tiny_model(n_layer=8, max_seq_len=40000, head_dim=64)
model.setup_caches(caches.build("full", offload={offload!r}), 1, 40000)
print([int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")][0])
"""
    root = str(Path(__file__).parent.parent)
    used = []
    for offload in ("none", f"disk:{tmp_path}"):
        text = code.format(root=root, offload=offload)
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
        used.append(int(done.stdout) * 1024)
    codes = 8 * 3 * 40000 * 64 * 2 * 4
    assert used[0] - used[1] > 0.9 * codes


def test_files_have_no_name_and_nobody_else_can_read_them(tmp_path):
    model = tiny_model()
    model.setup_caches(spec("full", tmp_path), 1, 200)
    model.prefill(tokens(100))
    assert not list(tmp_path.iterdir())
    maps = Path("/proc/self/maps").read_text()
    assert re.search(re.escape(str(tmp_path)), maps), "and yet they are there"
    disk = caches.Disk(str(tmp_path))
    with disk.file() as file:
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600
    del model


@pytest.mark.parametrize(
    "offload, named",
    [
        ("disc", "none, cpu, disk or disk:DIR"),
        ("disk:", "disk:DIR"),
        ("cpu", "on the CPU"),
        ("disk:/nowhere/at/all", "/nowhere/at/all: No such file"),
        ("disk:/proc", "disk:/proc"),
    ],
)
def test_refused(offload, named):
    with pytest.raises(caches.SpecError, match=re.escape(named)):
        caches.build("full", offload=offload).memory("cpu")


@pytest.mark.parametrize("options", [dict(page_size=8), dict(select=96)])
def test_what_a_gpu_cannot_do_is_said(options):
    with pytest.raises(caches.SpecError, match="layers come up whole"):
        caches.build("full", offload="cpu", **options).memory("cuda")


def test_what_does_not_fit_is_said_with_numbers(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(caches.SpecError, match=r"245,760 bytes more do not fit \(No space left on device; [\d,]+ are"):
        caches.Disk(str(tmp_path)).zeros((3, 4096, 20), torch.uint8)


def test_reset_equals_new(tmp_path):
    for staged in (False, True):
        ours = spec("h2o", tmp_path, staged, bits=4)
        model = tiny_model()
        model.setup_caches(ours, 1, 120)
        fresh = [layer.attention.cache for layer in model.layers]
        model.setup_caches(ours, 1, 120)
        decode(model, tokens(110), 90)
        for layer, new in zip(model.layers, fresh, strict=True):
            old = layer.attention.cache
            old.fit([120], [0], 0, 120)
            new.fit([120], [0], 0, 120)
            old.reset()
            for cache in (old, new):
                cache.layout.begin()
            named = dict(new.named_buffers())
            for name, buffer in old.named_buffers():
                assert name in caches.SCRATCH or torch.equal(buffer, named[name]), name
            assert all(map(torch.equal, old.layout.home, new.layout.home))
