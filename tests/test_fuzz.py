"""Two thousand random caches: each runs and keeps its promises, or is refused in one sentence. And garbage, everywhere
where nobody may look."""

import random

import pytest
import torch
from conftest import caches_of, decode, garbage, rarely, tiny_model, tokens

from cache import FORMATS, POLICIES, SpecError, arguments_and_defaults, build
from generate import DecodeStep

SHARDS, SPECS = 8, 2000
SHAPES = [(3, 1, 20), (7, 1, 24), (1, 2, 20), (16, 1, 8), (3, 2, 64), (2, 1, 96), (2, 1, 128), (9, 3, 20)]


class Draw(random.Random):
    """What somebody could type: mostly sensible, sometimes not."""

    def some(self, *sensible, wrong=()):
        return self.choice(wrong) if wrong and self.random() < 0.02 else self.choice(sensible)

    def arguments(self, part: type) -> str:
        known = arguments_and_defaults(part)
        if not known or self.random() < 0.6:
            return ""
        values = {"solver": ["minmax", "mse", "hqq"], "pool": ["avg", "max"], "reference": ["true", "false"]}
        values |= {"kernel": [1, 3, 7], "group": [8, 16, 20, 32, 64], "beta": [1, 2.5, 20], "floor": [0, 0.5, 1]}
        values |= {"future": [1, 100], "window": [1, 2, 8, 64]}
        values["recent"] = [0, 1, 8, 0.25] if isinstance(known.get("recent"), float) else [0, 1, 8]
        keys = self.sample(sorted(known), self.randrange(1, len(known) + 1))
        given = [(key, self.some(*values.get(key, [0, 1, 2, 8]), wrong=[-1, "x", 10**12, 4, 5])) for key in keys]
        return ":" + ",".join(f"{key}={value}" for key, value in given)

    def form(self) -> tuple[str, int | None]:
        """A format and bits that it has, mostly."""
        name = self.choice(["auto", *FORMATS])
        bits = self.some(*(FORMATS[name].widths if name in FORMATS else (16, 8, 4, 2)), wrong=[16, 8, 4, 2, 3])
        return name + (self.arguments(FORMATS[name]) if name in FORMATS else ""), bits

    def spec(self) -> dict:
        name = self.choice(list(POLICIES))
        (form, bits), (other, others) = self.form(), self.form()
        if self.random() < 0.3:
            form, bits, others = f"k={form},v={other}", f"k={bits},v={others}", f"{bits},{others}"
        exact = bits in (16, "k=16,v=16")
        evicts = not POLICIES[name].appends
        return dict(
            cache=name + self.arguments(POLICIES[name]),
            budget=None
            if name == "full"
            else self.some(None, 16, 40, 64, 96, 130, 200, 0.1, 0.5, 1.0, wrong=[0, 1.5, 3]),
            bits=bits,
            format=form,
            residual=self.some(None, wrong=[8]) if exact else self.some(None, 0, 1, 7, 32, 200, wrong=[-1]),
            page_size=self.some(0, 0, 0, 32, 64, 128, wrong=[-1]) if "kivi" in form else self.some(0, 0, 1, 3, 16, 48),
            select=self.some(None, None, 96, 128, 0.5, wrong=[64, 2.0]) if not evicts else self.some(None, wrong=[96]),
            offload=self.some("none", "none", "disk", wrong=["cpu", "tape"]),
        )


def promises(model, seen: int, stepped: bool, spec) -> None:
    for cache in caches_of(model):
        held = cache.slot_pos.sort(-1).values
        if stepped or cache.policy.newest(int(cache.policy.capacity.max())):
            assert (held.amax(-1) == seen - 1).all()  # what was read last has a slot
        assert ((held[..., 1:] != held[..., :-1]) | (held[..., 1:] < 0)).all()  # and nothing has two
        count = (held >= 0).sum(-1)
        if cache.policy.everything:
            assert (count == seen).all()
        elif not cache.policy.appends and isinstance(spec.budget, int):
            assert (count <= spec.budget).all()
        first = min(cache.policy.sink, int(count.min()))
        assert ((cache.slot_pos >= 0) & (cache.slot_pos < first)).sum(-1).min() == first  # sinks stay


def run(model, ids, prompt, dirty=False):
    """Logits [B,n,V] of a prompt and of what follows it, one by one; dirty: with garbage before every step."""
    first = model.prefill(ids[:, :prompt], room=ids.shape[1] - prompt)
    return torch.stack([first, *follow(model, ids, prompt, dirty)], 1)


def follow(model, ids, start, dirty):
    for t in range(start, ids.shape[1]):
        if dirty:
            garbage(caches_of(model))
        yield model(ids[:, t : t + 1], torch.full((len(ids), 1), t))[:, 0]


@pytest.fixture(scope="module")
def models():
    made = {}
    for group, heads, dim in SHAPES:
        sizes = dict(n_layer=3, n_head=group * heads, n_kv_head=heads, head_dim=dim, max_seq_len=512)
        made[group, heads, dim] = tiny_model(dim=24, hidden_dim=24, vocab_size=40, **sizes)
    return made


@pytest.mark.parametrize("shard", rarely([*range(SHARDS)], lambda shard: shard < 2))
def test_whatever_is_accepted_works(shard, models):
    ran = refused = garbled = 0
    for number in range(shard, SPECS, SHARDS):
        draw = Draw(number)
        flags, shape = draw.spec(), draw.choice(SHAPES)
        prompt, new = draw.choice([1, 2, 5, 31, 32, 33, 63, 64, 65, 100, 150]), draw.choice([0, 1, 2, 5])
        batch, what = draw.choice([1, 1, 2, 3]), f"{number}: {flags} {shape}"
        model = models[shape]
        try:
            spec = build(**flags)
            model.setup_caches(spec, batch, prompt + new)
        except (SpecError, ValueError) as error:
            assert isinstance(error, SpecError), what
            assert "--" in str(error) and "\n" not in str(error) and len(str(error)) < 400, (what, error)
            refused += 1
            continue
        ids = tokens(prompt + new, batch=batch, vocab=40, seed=number)
        try:
            logits = run(model, ids, prompt)
            assert logits.isfinite().all()
            promises(model, prompt + new, new > 0, spec)
            if number % 4 == 0:
                assert torch.equal(run(model, ids, prompt), logits)  # nothing of it is left
            assert torch.equal(run(model, ids, prompt, dirty=True), logits)
            garbled += garbage(caches_of(model))
        except Exception as error:
            raise AssertionError(what) from error
        ran += 1
    assert ran > 80 and refused > 30 and garbled > 1000, (ran, refused, garbled)


@pytest.mark.parametrize("page", [0, 16, 128])
@pytest.mark.parametrize("name", ["full", "snapkv", "streaming", "keydiff"])
def test_garbage_in_empty_slots_is_never_seen(name, page, model):
    """By later turns neither: what is read on top of a cache attends to all of it."""
    for bits, form in ((16, "auto"), (8, "fp8"), (4, "int"), (4, "nvfp4"), (2, "kivi")):
        if (form == "kivi" and name == "keydiff") or (form == "kivi" and page == 16):
            continue
        spec = build(name, budget=None if name == "full" else 96, bits=bits, format=form, page_size=page)
        found = []
        for dirty in (False, True):
            model.setup_caches(spec, 2, 200)
            ids = tokens(100, batch=2)
            model.prefill(ids[:, :70], room=130)
            if dirty:
                assert garbage(caches_of(model)) > 2 * 3 * 3 * 8 or name != "full"
            turn = model.prefill(ids[:, 70:80], 70, room=120)
            found.append(torch.stack([turn, *follow(model, ids, 80, dirty)], 1))
        assert torch.equal(*found), (bits, form)


def test_garbage_is_not_seen_by_compiled_code():
    """Nor by attention in C++, which a bf16 model with heads of 32 channels has; a record is replayed."""
    torch._dynamo.reset()
    model, ids = tiny_model(torch.bfloat16, head_dim=32), tokens(90)
    model.compile()
    found = []
    for dirty in (False, True):
        model.setup_caches(build("full"), 1, 130)
        out, step = [model.prefill(ids[:, :70], room=60)], DecodeStep(model)
        for t in range(70, 90):
            if dirty:
                assert garbage(caches_of(model))
            out.append(step(ids[:, t : t + 1], torch.full((1, 1), t))[:, 0].clone())
        found.append(torch.stack(out))
    assert found[0].isfinite().all() and torch.equal(*found)


def test_decode_helper_agrees(model):
    """`run` is conftest's `decode`, whose room is all there is."""
    model.setup_caches(build("full"), 1, 12)
    assert torch.equal(run(model, tokens(12), 9), decode(model, tokens(12), 9, room=3))
