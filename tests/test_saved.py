"""Caches that outlive the process: a file holds what the cache held, or is refused."""

import io
import itertools
import json
import os
import random

import pytest
import torch
from conftest import decode, tiny_model, tokens

import cache as caches
import generate as g
from cache import SpecError, build

POLICIES = [f"{name}:window=8" if name in ("snapkv", "pyramid", "adakv") else name for name in caches.POLICIES]
FORMATS = [
    ("auto", 16, None),
    ("int", 4, 8),
    ("int", 2, 0),
    ("kivi", 4, 8),
    ("fp8", 8, 150),
    ("nvfp4", 4, 8),
    ("mxfp4", 4, 8),
]
LAYOUTS = [(0, 0), (0, 16), (64, 0), (3, 32), (32, 1)]


@pytest.mark.parametrize(("form", "bits", "residual"), FORMATS)
@pytest.mark.parametrize("name", POLICIES)
def test_restored_is_never_saved(name, form, bits, residual):
    """Bit for bit, whatever the layouts: logits of a second turn and of steps, and what is held afterwards."""
    model, ids = tiny_model(n_layer=2), tokens(150)
    budget = None if name == "full" else 160 if form == "kivi" else 64
    layouts = [(0, 64), (64, 32)] if form == "kivi" else LAYOUTS
    turn = POLICIES.index(name) + len(form)  # two of them here, all of them among the formats and policies
    for before, after in (layouts[turn % len(layouts)], layouts[(turn + 2) % len(layouts)]):
        try:
            old, new = (
                build(name, budget=budget, bits=bits, format=form, residual=residual, page_size=page)
                for page in (before, after)
            )
        except SpecError:
            pytest.skip("refused, and tested where that is")
        model.setup_caches(old, 1, 200)
        decode(model, ids[:, :110], 100)
        states = [{k: x.clone() for k, x in layer.attention.cache.state().items()} for layer in model.layers]

        def more():
            out = [model.prefill(ids[:, 110:115], start=110, room=20)]
            out += [model(ids[:, t : t + 1], torch.tensor([[t]]))[:, 0] for t in range(115, 130)]
            return torch.stack(out), [layer.attention.cache.state() for layer in model.layers]

        want, held = more()
        model.setup_caches(new, 1, 220)
        for layer, state in zip(model.layers, states, strict=True):
            layer.attention.cache.restore(state)
        got, now = more()
        assert torch.equal(got, want)
        for a, b in zip(held, now, strict=True):
            assert torch.equal(a["slot_pos"], b["slot_pos"])
        pool = model.layers[0].attention.cache.layout.pool
        assert pool is None or pool.used == sum(pool.refs) > 0


PROMPT = "The quick brown fox jumps over the lazy dog, and then it does so again. And again it jumps over the dog."


@pytest.fixture
def cli(checkpoint, capsys):
    def run(*flags):
        code = g.main(["--checkpoint", str(checkpoint), "--dtype", "float32", "--no-compile", *flags])
        return (code, *capsys.readouterr())

    return run


@pytest.mark.parametrize("cache", ["full", "pyramid:window=8", "h2o", "adakv:window=8"])
@pytest.mark.parametrize("new", ["0", "12"])
def test_a_second_process_goes_on_as_the_same_one(cli, tmp_path, monkeypatch, cache, new):
    file = str(tmp_path / "doc.kv")
    flags = ["--cache", cache, "--bits", "4", "--residual", "16"] + ([] if cache == "full" else ["--budget", "60"])
    if new != "0":
        flags += ["--max-new-tokens", new]
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\nAnd then?\nWhy?\n"))
        code, want, _ = cli("--interactive", *flags)
        assert code == 0
    code, first, _ = cli("--prompt", PROMPT, *flags, "--max-new-tokens", new, "--save-cache", file)
    assert code == 0
    code, second, _ = cli("--load-cache", file, "--prompt", "And then?", "--max-new-tokens", "12", "--save-cache", file)
    assert code == 0
    code, third, _ = cli("--load-cache", file, "--prompt", "Why?", "--max-new-tokens", "12", "--page-size", "16")
    assert code == 0
    assert second.strip()
    if new != "0":
        assert first + second + third == want


def test_plain_text_goes_on(cli, tmp_path):
    """Without a template, the next prompt is simply what follows; so two halves are one text."""
    file = str(tmp_path / "doc.kv")
    _, want, _ = cli("--raw", "--prompt", PROMPT, "--max-new-tokens", "20")
    assert cli("--raw", "--prompt", PROMPT[:70], "--max-new-tokens", "0", "--save-cache", file)[0] == 0
    assert cli("--load-cache", file, "--prompt", PROMPT[70:], "--max-new-tokens", "20")[1] == want


def test_a_chat_saves_and_loads(cli, tmp_path, monkeypatch):
    file = str(tmp_path / "doc.kv")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\nAnd then?\nWhy?\n"))
    _, want, _ = cli("--interactive", "--max-new-tokens", "9", "--system", "Be brief.")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\nAnd then?\n"))
    _, first, _ = cli("--interactive", "--max-new-tokens", "9", "--system", "Be brief.", "--save-cache", file)
    monkeypatch.setattr("sys.stdin", io.StringIO("Why?\n"))
    _, rest, _ = cli("--interactive", "--load-cache", file, "--max-new-tokens", "9")
    assert first + rest == want


@pytest.fixture
def saved(cli, tmp_path):
    file = tmp_path / "doc.kv"
    assert cli("--prompt", "Hello there", "--bits", "4", "--max-new-tokens", "3", "--save-cache", str(file))[0] == 0
    return file


def test_a_damaged_file_is_refused(cli, saved, tmp_path):
    """Cut anywhere, or any bit flipped: one sentence."""
    raw, other, draw = saved.read_bytes(), tmp_path / "other.kv", random.Random(0)
    places = [*range(0, 40, 3), *(draw.randrange(len(raw)) for _ in range(40)), len(raw) - 1]
    for at, cut in itertools.product(places, (False, True)):
        other.write_bytes(raw[:at] if cut else raw[:at] + bytes([raw[at] ^ 1 << draw.randrange(8)]) + raw[at + 1 :])
        code, out, err = cli("--load-cache", str(other), "--prompt", "Hi")
        assert code == 2, at
        assert not out
        assert len(err.splitlines()) == 1
        assert "damaged, or not what --save-cache writes" in err


def test_a_file_of_something_else_is_refused(cli, saved, tmp_path, checkpoint):
    def refused(*flags, says):
        code, out, err = cli("--prompt", "Hi", *flags)
        assert code == 2
        assert not out
        assert len(err.splitlines()) == 1
        assert says in err, err

    load = ["--load-cache", str(saved)]
    refused("--load-cache", str(tmp_path / "none.kv"), says="No such file")
    refused("--load-cache", str(tmp_path), says="--load-cache")
    refused(*load, "--dtype", "bfloat16", says="of another model")
    refused(*load, "--weights", "int8", says="of another model")
    refused(*load, "--bits", "8", says="--bits 8: --load-cache")
    refused(*load, "--cache", "h2o", says="--cache h2o: --load-cache")
    refused(*load, "--budget", "50", says="has None; drop one of them")
    refused(*load, "--raw", says="is a chat; drop it")
    refused(*load, "--system", "x", says="--system: the conversation")
    refused(*load, "--prompt", "b", says="give one prompt")
    refused("--save-cache", str(tmp_path / "a" / "b"), says="--save-cache")
    refused("--save-cache", str(saved), "--num-samples", "2", "--temperature", "1", says="give one prompt")
    assert cli("--prompt", "Hi", *load, "--bits", "4", "--max-new-tokens", "2")[0] == 0


def test_another_version_is_refused(cli, saved, monkeypatch):
    monkeypatch.setattr(g.Conversation, "VERSION", 2)
    code, _, err = cli("--load-cache", str(saved), "--prompt", "Hi")
    assert code == 2
    assert "of format 1, and this program reads 2" in err


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_file_is_old_or_new(cli, saved, monkeypatch, where):
    """Interrupted while it is written, the file that was there is still there, and nothing else."""
    before = saved.read_bytes()

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(*((os, "fsync") if where == "fsync" else (type(saved), "replace")), interrupt)
    assert cli("--prompt", "Another text", "--max-new-tokens", "3", "--save-cache", str(saved))[0] == 130
    assert saved.read_bytes() == before
    assert [x.name for x in saved.parent.iterdir()] == [saved.name]


def test_what_a_file_says_of_itself(saved):
    """A safetensors that other programs can read, with all that is needed to go on."""
    from safetensors import safe_open

    with safe_open(saved, "pt") as file:
        header = json.loads(file.metadata()["kv-fast"])
        names = set(file.keys())
    assert header["cache"] == ["full", None, "4", "auto", None]
    assert header["said"]["messages"][0] == {"role": "user", "content": "Hello there"}
    assert header["said"]["seen"] > 11
    assert {f"{i}.slot_pos" for i in range(3)} < names
    assert not any("table" in name for name in names)


def test_a_file_without_what_it_should_say(cli, saved):
    """A right checksum is no proof of a right content."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(saved)
    for text in ("", "[]", "{}", '{"version": 1}'):
        save_file(tensors, saved, {"kv-fast": text, "checksum": g.Saved.checksum(text, tensors)})
        code, out, err = cli("--load-cache", str(saved), "--prompt", "Hi")
        assert code == 2
        assert not out
        assert len(err.splitlines()) == 1
