"""Number formats: exact in their bytes and values, never NaN, and the same under every policy."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import decode, tiny_model, tokens

import cache as caches
import kernels
from cache import SpecError, build

EVERY = [(name, bits) for name, store in caches.FORMATS.items() for bits in store.widths if name != "float"]


def store(name, bits, dim=64, is_key=True, **arguments):
    return caches.Form(name, bits, tuple(arguments.items())).store(is_key, dim, torch.float32, "cpu")


def through(s, x):
    return s.decode(*s.encode(x))


def normal(tokens=480, dim=64):
    """N(0,1) [units,32,dim], as kivi's keys come 32 tokens at a time; other formats see single tokens."""
    return torch.randn(tokens // 32, 32, dim, generator=torch.Generator().manual_seed(0))


def error(s, x):
    return float((through(s, x) - x).norm() / x.norm())


def test_minifloats_are_pytorchs_and_the_standards():
    codes = torch.arange(256).to(torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float()
    good = expected.isfinite()
    assert int((~good).sum()) == 2 and torch.equal(kernels.minifloat(codes.int(), 4, 3)[good], expected[good])
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = torch.tensor([*sizes, *(-x for x in sizes)])
    assert torch.equal(kernels.minifloat(torch.arange(16).int(), 2, 1), values)
    assert torch.equal(kernels.e2m1(values), torch.tensor([*range(8), 0, *range(9, 16)]))  # -0 is 0


def test_e2m1_rounds_to_nearest_and_ties_to_even():
    x = torch.tensor([0.25, 0.26, 0.74, 0.75, 1.25, 1.26, 1.74, 1.75, 2.5, 2.51, 3.49, 3.5, 5, 5.01, 7, 1e30])
    y = [0, 0.5, 0.5, 1, 1, 1.5, 1.5, 2, 2, 3, 3, 4, 4, 6, 6, 6]
    for sign in (1, -1):
        assert kernels.minifloat(kernels.e2m1(sign * x), 2, 1).tolist() == [sign * v for v in y]


def test_nvfp4_worked_by_hand():
    """A block of 16 in a tensor whose largest number is 7: its scale is 211.2, stored as 208."""
    s = store("nvfp4", 4, 16)
    s.rotation = torch.eye(16)
    s.whole = torch.tensor(7 / (6 * 448))
    x = 3.3 * torch.linspace(-1, 1, 16)
    codes, scale = s.encode(x / s.whole)
    assert scale.view(torch.float8_e4m3fn).tolist() == [208]
    numbers = kernels.minifloat(torch.cat(kernels.unpack(codes, 4)), 2, 1)
    half = [6, 6, 4, 4, 3, 2, 1, 0.5]
    assert numbers.tolist() == [*(-n for n in half), *reversed(half)]
    assert float((s.decode(codes, scale) * s.whole).max()) == pytest.approx(3.25)


@pytest.mark.parametrize("largest,power,top", [(6.5, 0, 6), (8, 1, 8), (6, 0, 6), (0.7, -3, 0.75), (0, -126, 0)])
def test_mxfp4_powers_are_the_standards(largest, power, top):
    s = store("mxfp4", 4, 32)
    s.rotation = torch.eye(32)
    x = torch.zeros(32)
    x[5] = largest
    codes, stored = s.encode(x)
    assert stored.tolist() == [127 + power] and float(s.decode(codes, stored).max()) == top


@pytest.mark.parametrize("dim", [20, 64, 80, 96, 128])
@pytest.mark.parametrize("name,bits", EVERY)
def test_round_trip(name, bits, dim):
    """On N(0,1) neither lossless nor worse than a number of its width can be."""
    s = store(name, bits, dim)
    low, high = {8: (0.001, 0.03), 4: (0.05, 0.14), 2: (0.2, 0.6)}[bits]
    assert low < error(s, normal(dim=dim)) < high


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name,bits", EVERY)
def test_nothing_makes_nan(name, bits, dtype):
    x = torch.zeros(9, 64)
    x[1] = 7.25
    x[2, 5] = 1e4
    x[3] = 1e-9
    x[4] = -3.5
    x[5, ::2] = 1e6
    x[6] = 1e-40  # a subnormal
    x[7, 3] = 3e38
    x[8] = torch.linspace(-1, 1, 64)
    for is_key in (True, False):
        s = store(name, bits, is_key=is_key)
        # One token at a time, or a unit of 32 that are alike, then all of them in one unit.
        x[5, ::2], x[7, 3] = (1e6, 3e38) if name != "fp8" else (400, 440)  # its scale is set by the prompt, see below
        x[2, 5] = 1e4 if name != "fp8" else 400
        y = torch.stack([through(s, row.to(dtype).float().expand(32, 64))[5] for row in x])
        assert y.isfinite().all()
        assert torch.equal(y[0], x[0]) and y[3].abs().max() < 1e-6
        assert ((y - x).norm(dim=-1) <= 0.7 * x.norm(dim=-1))[[1, 2, 4, 8]].all()
        assert through(s, F.pad(x, (0, 0, 0, 23)).to(dtype).float()).isfinite().all()


def test_outlier_keys():
    """Two channels at +600 and -600: half of what tells tokens apart is left by 8 bits after a rotation, and by 4 and 2
    bits with a range for each channel; not by what has neither. 4 bits after a rotation are not enough for that."""
    x = normal()
    x[..., 3] += 600
    x[..., 40] -= 600
    told = float((x - x.mean((0, 1))).norm() / x.norm())

    def lost(s, rotated=True):
        s.rotation = s.rotation if rotated else torch.eye(64)
        return error(s, x) / told

    assert lost(store("int", 8)) < 0.5 and lost(store("kivi", 4)) < 0.1 and lost(store("kivi", 2)) < 0.5
    assert lost(store("int", 8), rotated=False) > 0.6 and lost(store("int", 4), rotated=False) > 1
    assert lost(store("int", 4)) > 1


@pytest.mark.parametrize("bits", [4, 2])
def test_solvers_do_what_they_are_for(bits):
    """mse: a smaller squared error than the whole range has; hqq: a smaller mean of absolute errors."""
    x = normal(1920) ** 3
    off = {name: (through(store("int", bits, solver=name), x) - x) for name in caches.SOLVERS}
    squared, absolute = (
        {n: float(f(e)) for n, e in off.items()} for f in (lambda e: e.square().mean(), lambda e: e.abs().mean())
    )
    assert squared["mse"] < 0.97 * squared["minmax"] and absolute["hqq"] < 0.99 * absolute["minmax"]


@pytest.mark.parametrize("name,bits", EVERY)
def test_effective_bits_are_what_is_stored(name, bits):
    """Bytes of all buffers of a cache of 512 tokens, and the width that --format help prints."""
    model = tiny_model(head_dim=64, n_layer=1, dtype=torch.bfloat16)
    model.setup_caches(build("full", bits=bits, format=name, residual=0), 1, 512)
    c = model.layers[0].attention.cache
    elements = 3 * 512 * 64
    expected = {"int": bits + 1, "kivi": bits + 1, "fp8": 8, "nvfp4": 4.5, "mxfp4": 4.25}[name]
    assert caches.Form(name, bits).effective(64) == expected
    for s in (c.k_store, c.v_store):
        assert sum(part.nbytes for part in s.parts()) * 8 / elements == expected
        assert s.parts()[0].dtype == torch.uint8
    others = 3 * 512 * 4 + (3 + 1) * 8  # slot_pos, counts, capacity
    others += {"nvfp4": 2 * 3 * 4, "fp8": 2 * 3 * 4, "kivi": 3 * 32 * 64 * 2 + 3 * 512 // 32}.get(
        name, 0
    )  # a float a head; the unit that fills
    assert c.nbytes() == 2 * elements * expected / 8 + others


@pytest.mark.parametrize("name,bits", EVERY)
def test_dot_and_mix_read_what_decode_says(name, bits):
    torch.manual_seed(0)
    model = tiny_model(n_layer=1, head_dim=20)
    model.setup_caches(build("full", bits=bits, format=name, residual=0), 2, 90)
    c = model.layers[0].attention.cache
    model.prefill(tokens(70, batch=2), room=20)
    D = c.k_store.dim
    q, live = torch.randn(2, 3, 3, D), c.slot_pos >= 0
    k, v = c.k_store.decoded().flatten(2, 3), c.v_store.decoded().flatten(2, 3)
    expected = (q @ k.mT)[..., : live.shape[2]].masked_fill(~live[:, :, None], float("-inf"))
    torch.testing.assert_close(c.k_store.dot(q, live)[..., : live.shape[2]], expected, atol=2e-4, rtol=1e-4)
    p = torch.rand(2, 3, 3, k.shape[2])
    torch.testing.assert_close(c.v_store.mix(p), p @ v, atol=2e-3, rtol=1e-4)
    if name == "kivi":
        return  # the one policy that reads single keys is refused
    b, h = caches.rows(torch.zeros(2, 3, 4))
    slot = torch.tensor([3, 31, 32, 69]).expand(2, 3, 4)
    torch.testing.assert_close(c.k_store.at((b, h, slot)), caches.take(k, slot), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name,bits", EVERY)
def test_a_format_costs_more_than_nothing_and_less_than_its_width_allows(name, bits):
    model, ids = tiny_model(head_dim=24), tokens(120)
    model.setup_caches(build("full"), 1, 120)
    exact = decode(model, ids, 80).log_softmax(-1)
    model.setup_caches(build("full", bits=bits, format=name, residual=8), 1, 120)
    got = decode(model, ids, 80).log_softmax(-1)
    kl = (exact.exp() * (exact - got)).sum(-1)[:, 1:].mean().item()
    assert 0 < kl < {8: 0.1, 4: 0.6, 2: 3.0}[bits]
    model.setup_caches(build("full", bits=bits, format=name, residual=120), 1, 120)
    torch.testing.assert_close(decode(model, ids, 80).log_softmax(-1), exact, atol=1e-4, rtol=0)


@pytest.mark.parametrize("policy", ["full", "h2o:recent=8", "pyramid:window=8"])
@pytest.mark.parametrize("name,bits", EVERY)
def test_all_state_is_in_the_buffers(name, bits, policy):
    """A, then B, then A again is A; and buffers saved in the middle of A go on as A in a model that had read B."""
    budget = None if policy == "full" else 128
    spec = build(policy, budget=budget, bits=bits, format=name, residual=16)
    ids, other = tokens(230), tokens(230, seed=5)

    def made():
        model = tiny_model(n_layer=2)
        model.setup_caches(spec, 1, 230)
        return model, [layer.attention.cache for layer in model.layers]

    def go_on(model, start):
        return torch.stack([model(ids[:, t : t + 1], torch.full((1, 1), t)) for t in range(start, 230)])

    model, layers = made()
    model.prefill(ids[:, :160], room=70)
    expected = go_on(model, 160)
    decode(model, other, 160, room=70)
    model.prefill(ids[:, :160], room=70)
    assert torch.equal(go_on(model, 160), expected)
    model.prefill(ids[:, :160], room=70)
    for t in range(160, 190):
        model(ids[:, t : t + 1], torch.full((1, 1), t))
    saved = [{n: b.clone() for n, b in c.named_buffers()} for c in layers]
    fresh, empty = made()
    decode(fresh, other, 160, room=70)
    for c, buffers in zip(empty, saved, strict=True):
        assert dict(c.named_buffers()).keys() == buffers.keys()
        for n, buffer in c.named_buffers():
            buffer.copy_(buffers[n])
    assert torch.equal(go_on(fresh, 190), expected[30:])


def test_fp8_beyond_its_largest_number():
    """A prompt's keys of 600 set the scale of their head; what comes later clips; nothing is NaN."""
    model = tiny_model(n_layer=1)
    model.setup_caches(build("full", format="fp8", residual=0), 1, 64)
    c = model.layers[0].attention.cache
    x = torch.randn(1, 3, 40, 20)
    x[:, 1] *= 600 / x[:, 1].abs().amax()
    c.fit([40], [0], 20, 64)
    c.prefill(torch.randn(1, 9, 40, 20), x, x, torch.arange(40)[None])
    assert c.k_store.whole.tolist() == [[1, pytest.approx(600 / 448), 1]]
    got = c.k_store.read()[:, :, :40]
    assert float((got - x).norm() / x.norm()) < 0.04
    late = torch.full((1, 3, 1, 20), 1e6)
    c(torch.randn(1, 9, 1, 20), late, late, torch.tensor([[40]]))
    assert c.k_store.read()[0, :, 40, 0].tolist() == [448, pytest.approx(600), 448]


@pytest.mark.parametrize("name,bits", [("nvfp4", 4), ("fp8", 8)])
def test_a_prompt_of_one_token_sets_the_unit(name, bits):
    model = tiny_model(n_layer=1, head_dim=64)
    model.setup_caches(build("full", bits=bits, format=name, residual=0), 2, 64)
    c, generator = model.layers[0].attention.cache, torch.Generator().manual_seed(1)
    k, v, q = (torch.randn(2, h, 2, 64, generator=generator) for h in (3, 3, 9))
    scale = {"nvfp4": 0.001, "fp8": 1000}[name]
    for n in (1, 2):
        c.fit([n, n], [0, 0], 8, 64)
        c(q[:, :, :n], k[:, :, :n] * scale, v[:, :, :n] * scale, torch.arange(n).expand(2, n))
        whole = c.v_store.whole.clone()
        assert (whole < 0.01).all() if name == "nvfp4" else (whole > 1).all()
        for x, s in ((k, c.k_store), (v, c.v_store)):
            assert (s.read()[:, :, :n] / scale - x[:, :, :n]).norm() < 0.15 * x[:, :, :n].norm()
        c(q[:, :, :1], k[:, :, :1], v[:, :, :1], torch.full((2, 1), n))
        assert torch.equal(c.v_store.whole, whole)  # and it stands


def test_nvfp4_keeps_the_prompts_unit():
    """It is from the prompt's largest number, a new prompt sets it anew, and what is larger later on clips."""
    model = tiny_model(n_layer=1)
    model.setup_caches(build("full", bits=4, format="nvfp4"), 1, 200)
    c = model.layers[0].attention.cache
    assert torch.equal(c.k_store.whole, torch.ones(1, 3))
    model.prefill(tokens(60), room=100)
    first = c.k_store.whole.clone()
    assert (first != 1).all()
    model(tokens(1), torch.tensor([[60]]))
    model.prefill(tokens(20, seed=5), start=61, room=20)
    assert torch.equal(c.k_store.whole, first)
    model.prefill(tokens(60, seed=9), room=100)
    assert not torch.equal(c.k_store.whole, first)
    c.reset()
    assert torch.equal(c.k_store.whole, torch.ones(1, 3))
    huge = torch.full((1, 3, 1, 20), 1e4)
    c.k_store.put((*caches.rows(torch.zeros(1, 3, 1)), torch.zeros(1, 3, 1, dtype=torch.long)), huge)
    assert c.k_store.decoded().isfinite().all() and c.k_store.decoded().max() < 1e4


def test_keys_and_values_apart():
    model = tiny_model(n_layer=1, head_dim=64)
    model.setup_caches(build("full", bits="k=4,v=2", format="k=nvfp4,v=int:group=16,solver=mse"), 1, 100)
    c = model.layers[0].attention.cache
    assert (type(c.k_store), c.k_store.bits) == (caches.NVFP4Store, 4)
    assert (type(c.v_store), c.v_store.bits, c.v_store.group) == (caches.IntStore, 2, 16)
    assert c.v_store.solve is kernels.mse
    spec = build("full", bits="v=2,k=16")
    assert (spec.k, spec.v, spec.residual) == (caches.Form("float", 16), caches.Form("int", 2), caches.RESIDUAL)
    assert (spec.bits, spec.format) == ("k=16,v=2", "k=float,v=int")
    auto = build("full", bits=4)
    assert auto.k == caches.Form("int", 4, (("solver", "mse"),)) and auto.v == caches.Form("int", 4)
    assert build("full", bits=auto.bits, format=auto.format).k == auto.k  # what a report says can be asked for
    assert build("full", format="fp8").bits == 8 and build("full", bits="8").k == caches.Form("int", 8)


@pytest.mark.parametrize(
    "flags,words",
    [
        (dict(bits=5), ["--bits 5", "16, 8, 4 or 2"]),
        (dict(bits="k=4"), ["--bits k=4", "k=4,v=2"]),
        (dict(bits="k=4,k=2"), ["--bits k=4,k=2"]),
        (dict(bits="k=4,v=x"), ["--bits x"]),
        (dict(bits=8, format="nvfp4"), ["--bits 8", "nvfp4 has 4"]),
        (dict(format="int"), ["--format int", "--bits 8, 4 or 2"]),
        (dict(bits="1" * 5000), ["--bits 1", "choose 16, 8, 4 or 2"]),
        (dict(bits="٤"), ["--bits ٤", "choose 16, 8, 4 or 2"]),
        (dict(bits=4, format=None), ["--format None", "no such format"]),
        (dict(bits=4, format="fp7"), ["--format fp7", "nvfp4"]),
        (dict(bits=4, format="int:solver=best"), ["solver=best", "minmax, mse, hqq"]),
        (dict(bits=4, format="int:group=4"), ["group=4", "8"]),
        (dict(bits=4, format="int:size=4"), ["size", "group, solver"]),
        (dict(bits=4, format="auto:group=16"), ["auto takes no arguments", "int:group=16"]),
        (dict(bits=16, format="float", residual=4), ["--residual 4", "16 bits"]),
        (dict(bits=4, format="k=int,v=nofp"), ["--format nofp"]),
    ],
)
def test_refusals(flags, words):
    with pytest.raises(SpecError) as refused:
        build("full", **flags)
    assert all(word in str(refused.value) for word in words), refused.value


def test_help_lists_every_format_with_its_width():
    text = caches.describe_formats()
    for name, store in caches.FORMATS.items():
        assert f"\n{name} " in text and all(f"--bits {b}: " in text for b in store.widths)
    assert "nvfp4" in text and "4.5 bits an element" in text and "solver=minmax" in text


# ---------------------------------------------------------------------------------------------------------------------
# KIVI: units of 32 slots


def kivi_cache(policy="full", budget=None, bits=2, residual=0, length=512, batch=1, n_layer=1, **model):
    model = tiny_model(n_layer=n_layer, **model)
    model.setup_caches(build(policy, budget=budget, bits=bits, format="kivi", residual=residual), batch, length)
    return model, model.layers[0].attention.cache


def reference(keys, bits):
    """Keys of one unit [32,D] as KIVI (2402.02750) writes and reads them: a range for each channel, in fp16."""
    low, high = keys.min(0).values, keys.max(0).values
    scale, low = ((high - low) / (2**bits - 1)).half().float(), low.half().float()
    return ((keys - low) / scale).round().clamp(0, 2**bits - 1) * scale + low


@pytest.mark.parametrize("at_once", [0, 1, 2])
@pytest.mark.parametrize("n", [31, 32, 33, 63, 64, 65, 500])
def test_kivi_golden_table(n, at_once):
    """Which of n keys are exact, what the others are, whether they came one by one, at once, or in two pieces."""
    _, c = kivi_cache()
    generator = torch.Generator().manual_seed(n)
    k, v, q = (torch.randn(1, h, n, 20, generator=generator) for h in (3, 3, 9))
    pos = torch.arange(n)[None]
    pieces = {0: [1] * n, 1: [n], 2: [n - 20, 20]}[at_once]
    c.fit([pieces[0]], [0], n - pieces[0], 512)
    for i, part in enumerate(torch.arange(n).split(pieces)):
        step = c if len(part) == 1 and i else c.prefill
        step(q[:, :, part], k[:, :, part], v[:, :, part], pos[:, part])
    got, closed = c.k_store.read()[0, :, :n], n // 32 * 32
    assert c.slot_pos[0, :, :n].tolist() == [list(range(n))] * 3
    assert torch.equal(got[:, closed:], k[0, :, closed:])  # the unit that fills is exact
    for h in range(3):
        for unit in range(closed // 32):
            own = slice(32 * unit, 32 * unit + 32)
            torch.testing.assert_close(got[h, own], reference(k[0, h, own], 2), atol=1e-6, rtol=0)
    if closed:
        off = (got[:, :closed] - k[0, :, :closed]).norm() / k[0, :, :closed].norm()
        assert 0.05 < off < 0.45  # really two bits, and no worse than they are
    assert [units.nonzero().flatten().tolist() for units in c.k_store.open[0]] == [[n // 32] if n % 32 else []] * 3


@pytest.mark.parametrize("policy", [name for name in caches.POLICIES if name != "keydiff"])
@pytest.mark.parametrize("residual", [0, 40])
def test_kivi_under_every_policy(policy, residual):
    """Prompt, 200 steps, a second turn, more steps: what is in a slot is the key of its position, as KIVI writes the
    keys of its unit; units are given up whole; the newest token and the sinks are there, and never too many."""
    name = policy + (
        ":window=8"
        if policy in ("snapkv", "pyramid", "adakv")
        else ":recent=8"
        if policy in ("keynorm", "random", "expected")
        else ""
    )
    budget = None if policy == "full" else 224
    _, c = kivi_cache(name, budget, residual=residual, length=720, max_seq_len=720)
    generator = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(1, h, 700, 20, generator=generator) for h in (3, 3, 9))
    evicted, before = 0, None

    def check(now):
        nonlocal evicted, before
        held = c.slot_pos[0]
        S = held.shape[1]
        assert S % 32 == 0 and ((held >= 0).sum(-1) <= (S if c.policy.appends else 224)).all()
        got = c.k_store.read()[0, :, :S]
        for h in range(3):
            live = held[h] >= 0
            where = held[h, live]
            assert now in where.tolist() and len(set(where.tolist())) == len(where)
            assert set(range(c.policy.sink)) <= set(where.tolist())
            open_units = c.k_store.open[0, h].nonzero().flatten().tolist()
            assert len(open_units) <= 1
            for unit in range(S // 32):
                own = slice(32 * unit, 32 * unit + 32)
                there = live[own]
                if not there.any():
                    continue
                true = k[0, h, held[h, own].clamp(min=0)]
                if unit in open_units:
                    assert torch.equal(got[h, own][there], true[there])
                    assert there.long().diff().le(0).all()  # filled in order
                else:
                    assert there.all()
                    torch.testing.assert_close(got[h, own], reference(true, 2), atol=1e-6, rtol=0)
        if before is not None and before.shape == held.shape:
            lost = (before >= 0) & (before != held)
            evicted += int(lost.sum())
            assert set(lost.unflatten(-1, (-1, 32)).sum(-1).flatten().tolist()) <= {0, 32}
        before = held.clone()

    def read(start, end):
        part = slice(start, end)
        c.fit([end - start], [start], 300 if start == 0 else 100, 720)
        c.prefill(q[:, :, part], k[:, :, part], v[:, :, part], torch.arange(start, end)[None])

    with torch.no_grad():
        read(0, 330)
        check(329)
        for t in range(330, 530):
            c(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], torch.tensor([[t]]))
            check(t)
        before = None
        read(530, 600)
        check(599)
        for t in range(600, 690):
            c(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], torch.tensor([[t]]))
            check(t)
    assert evicted > 500 or c.policy.appends


@pytest.mark.parametrize("policy", ["window", "streaming", "h2o:recent=8", "tova"])
def test_kivi_gives_up_a_unit_in_the_residual_too(policy):
    """Attention while decoding is attention over what is held, as `read` says it is, with and without a residual."""
    for residual in (0, 48):
        _, c = kivi_cache(policy, 128, bits=4, residual=residual, length=400)
        generator = torch.Generator().manual_seed(0)
        k, v, q = (torch.randn(1, h, 300, 20, generator=generator) for h in (3, 3, 9))
        c.fit([150], [0], 150, 400)
        c.prefill(q[:, :, :150], k[:, :, :150], v[:, :, :150], torch.arange(150)[None])
        for t in range(150, 300):
            got = c(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], torch.tensor([[t]]))
            live = c.slot_pos >= 0
            if residual:
                ring = c.residual.slot[0]
                assert all(live[0, h, ring[h, ring[h] >= 0].long()].all() for h in range(3))
            keys, values = c.read(torch.tensor([t]))
            asked = q[:, :, t].view(1, 3, 3, 20) * 20**-0.5
            score = asked @ keys.mT
            if c.policy.relative:  # the sinks are as far away as there are tokens held
                near = kernels.turned(asked, live[:, 0].sum(-1) - t - 1, c.policy.frequencies)
                score[..., : c.policy.sink] = near @ keys[:, :, : c.policy.sink].mT
            expected = score.masked_fill(~live[:, :, None], -math.inf).softmax(-1) @ values
            torch.testing.assert_close(got.view(1, 3, 3, 20), expected, atol=1e-4, rtol=1e-4)


def test_kivi_beyond_its_room_and_then_a_second_turn():
    """Tokens beyond the room go over the oldest; the unit that they were filling is closed by a new turn."""
    _, c = kivi_cache(bits=4, length=400)
    generator = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(1, h, 300, 20, generator=generator) for h in (3, 3, 9))
    c.fit([64], [0], 10, 400)
    for a, b in [(0, 64), *((t, t + 1) for t in range(64, 109)), (109, 129)]:
        if b == 129:
            c.fit([20], [109], 50, 400)
        c(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], torch.arange(a, b)[None])
    live, stored = c.slot_pos >= 0, c.k_store.read()[:, :, : c.slot_pos.shape[2]]
    off = (stored - caches.take(k, c.slot_pos.clamp(min=0).long())).abs().amax(-1)[live]
    assert off.max() < 0.3 and (c.k_store.open.sum(-1) == 1).all()


def test_kivi_gives_up_the_unit_of_the_least_worth():
    """keynorm's ranks are plain numbers: the unit with the largest mean norm of keys leaves, but not the sinks'."""
    _, c = kivi_cache("keynorm:sink=2,recent=4", 160, length=400)
    generator = torch.Generator().manual_seed(3)
    k = torch.randn(1, 3, 300, 20, generator=generator) * (1 + torch.rand(1, 3, 300, 1, generator=generator))
    units = [[list(range(32 * u, 32 * u + 32)) for u in range(5)] for _ in range(3)]  # after a prompt of 160, all slots
    c.fit([160], [0], 100, 400)
    c.prefill(torch.randn(1, 9, 160, 20), k[:, :, :160], k[:, :, :160], torch.arange(160)[None])
    for t in range(160, 300):
        c(torch.randn(1, 9, 1, 20), k[:, :, t : t + 1], k[:, :, t : t + 1], torch.tensor([[t]]))
        for h in range(3):
            if t % 32 == 0:
                may = [u for u in range(5) if min(units[h][u]) >= 2 and max(units[h][u]) <= t - 4]
                worst = max(may, key=lambda u: sum(float(k[0, h, p].norm()) for p in units[h][u]))
                units[h][worst] = []
                filling = worst
            filling = next(u for u in range(5) if len(units[h][u]) < 32)
            units[h][filling].append(t)
            assert c.slot_pos[0, h].tolist() == [p for u in units[h] for p in [*u, *[-1] * (32 - len(u))]], t


def test_kivi_rows_of_a_batch_are_as_if_alone():
    model, _ = kivi_cache("h2o", 192, batch=2, residual=16, n_layer=2)
    ids = [tokens(250)[0], tokens(210, seed=7)[0]]
    model.prefill(ids, room=100)
    steps = torch.cat([tokens(60, seed=8), tokens(60, seed=9)])
    together = [model(steps[:, t : t + 1], torch.tensor([[250 + t], [210 + t]])) for t in range(60)]
    alone, _ = kivi_cache("h2o", 192, residual=16, n_layer=2)
    for b, n in enumerate((250, 210)):
        alone.prefill(ids[b][None], room=100)
        for t in range(60):
            got = alone(steps[b : b + 1, t : t + 1], torch.tensor([[n + t]]))
            torch.testing.assert_close(got[0], together[t][b], atol=1e-3, rtol=1e-3)


def test_kivi_refuses_what_looks_at_stored_keys_and_too_few_units():
    with pytest.raises(SpecError, match=r"keydiff.*kivi.*--format int"):
        build("keydiff", budget=300, bits=2, format="kivi")
    with pytest.raises(SpecError, match=r"--budget 100: h2o .* at least 128"):
        build("h2o", budget=100, bits=2, format="kivi")
    assert build("snapkv", budget=100, bits=4, format="kivi").policy().unit == 32
    assert build("h2o", budget=100, bits="k=16,v=4", format="k=float,v=kivi").policy().unit == 1
    assert math.isclose(caches.Form("kivi", 2).effective(128), 3)
