"""The cache: identities that hold for every policy and format, an oracle, and each policy's own definition."""

import weakref

import pytest
import torch
from conftest import decode, tiny_model, tokens

import cache as caches
import kernels
from cache import build

POLICIES = [
    "full",
    "window:sink=2",
    "streaming:sink=2",
    "h2o",
    "h2o:recent=9,sink=3",
    "tova",
    "snapkv:window=8,kernel=3",
    "pyramid:window=8,kernel=3",
    "adakv:window=8,kernel=3",
    "expected:future=40",
    "keynorm:recent=2",
    "keydiff:sink=2",
    "random:recent=1",
]
COMPRESSING = POLICIES[1:]


def spec(name: str, budget=40, **options):
    return build(name, **({} if name == "full" else {"budget": budget}), **options)


def full_forward(model, ids):
    """Logits of the model without any cache: the oracle."""
    model = tiny_model_like(model)
    return model(ids, torch.arange(ids.shape[1]).expand(ids.shape))


def tiny_model_like(model):
    import copy

    import model as llama

    model = copy.deepcopy(model)
    for layer in model.layers:
        layer.attention.cache = llama.NoCache()
    return model


def state(model):
    return [b.clone() for layer in model.layers for b in layer.attention.cache.buffers()]


def same(a, b):
    return len(a) == len(b) and all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Identities


@pytest.mark.parametrize("head_dim", [20, 64, 96, 128])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (7, 1), (16, 1)])
def test_cached_decode_is_the_full_forward(heads, head_dim):
    model = tiny_model(n_head=heads[0], n_kv_head=heads[1], head_dim=head_dim, n_layer=2)
    ids = tokens(70, batch=2)
    model.setup_caches(build("full"), 2, 70)
    expected = full_forward(model, ids)[:, 39:]
    torch.testing.assert_close(decode(model, ids, 40), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("prompt", [1, 2, 31, 32, 33, 69])
def test_any_prompt_length(model, prompt):
    ids = tokens(70)
    model.setup_caches(build("full"), 1, 70)
    expected = full_forward(model, ids)[:, prompt - 1 :]
    torch.testing.assert_close(decode(model, ids, prompt), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", COMPRESSING)
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("budget", [60, 500, 1.0])
def test_budget_of_everything_is_the_full_cache(model, name, bits, budget):
    ids = tokens(60)
    model.setup_caches(build("full", bits=bits), 1, 60)
    full = decode(model, ids, 50)
    model.setup_caches(build(name, budget=budget, bits=bits), 1, 60)
    whole = budget == 1.0 and not build(name).policy().appends  # all of the prompt, and no more while decoding
    got = decode(model, ids, 60 if whole else 50)
    assert torch.equal(got, full[:, -got.shape[1] :]) or torch.allclose(got[:, 0], full[:, -got.shape[1]], atol=2e-4)
    if got.shape == full.shape:
        assert torch.equal(got, full)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_residual_of_everything_is_exact(model, name, bits):
    if "keydiff" in name:
        pytest.skip("looks at keys as they are written down, exact copies or not")
    ids = tokens(120)
    model.setup_caches(spec(name), 1, 120)
    exact = decode(model, ids, 90)
    model.setup_caches(spec(name, bits=bits, residual=128), 1, 120)
    torch.testing.assert_close(decode(model, ids, 90), exact, atol=2e-4, rtol=1e-4)


def test_first_token_sees_the_whole_prompt(model):
    ids = tokens(100)
    expected = full_forward(model, ids)[:, -1]
    for name in COMPRESSING:
        model.setup_caches(spec(name, bits=2, residual=0), 1, 110)
        torch.testing.assert_close(model.prefill(ids), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("bits", [16, 4])
def test_a_row_of_a_batch_is_that_prompt_alone(model, name, bits):
    # No token twice: in the first layer its keys would have one norm, and rounding would decide between them.
    ids = torch.stack([torch.randperm(97, generator=torch.Generator().manual_seed(s))[:80] for s in (1, 2, 3)])
    # Not auto: one of its codes lies on a rounding edge here, and a step of it is more than the bound below.
    recipe = spec(name, bits=bits, format="auto" if bits == 16 else "int", residual=None if bits == 16 else 16)
    model.setup_caches(recipe, 3, 80)
    together = decode(model, ids, 60)
    model.setup_caches(recipe, 1, 80)
    for row in range(3):
        alone = decode(model, ids[row : row + 1], 60)
        # codes on a rounding edge may fall either way
        torch.testing.assert_close(together[row : row + 1], alone, atol=3e-4 if bits == 16 else 3e-3, rtol=1e-4)


@pytest.mark.parametrize("bits", [16, 4])
def test_rows_at_positions_of_their_own(model, bits):
    """Two sequences of different length decode in one step, ring and eviction included, as each does alone."""
    recipe = spec("window:sink=2", bits=bits, residual=None if bits == 16 else 16)
    ids, prompts, alone, states = torch.cat([tokens(90, seed=1), tokens(90, seed=2)]), (25, 60), [], []
    for row, prompt in enumerate(prompts):
        model.setup_caches(recipe, 1, 120)
        model.prefill(ids[row : row + 1, :prompt])
        states.append(state(model))
        alone.append(decode(model, ids[row : row + 1, : prompt + 30], prompt)[:, 1:])
    model.setup_caches(recipe, 2, 120)
    buffers = [b for layer in model.layers for b in layer.attention.cache.buffers()]
    for buffer, *parts in zip(buffers, *states, strict=True):
        buffer.copy_(torch.cat(parts))
    together = []
    for t in range(30):
        pos = torch.tensor(prompts)[:, None] + t
        together.append(model(ids.gather(1, pos), pos))
    apart = (torch.cat(together, 1) - torch.cat(alone)).abs()
    # codes and scales on a rounding edge may fall either way, seldom
    assert apart.median() < 1e-5 and apart.max() < (3e-4 if bits == 16 else 3e-3)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("bits", [16, 2])
def test_a_b_a_equals_fresh(model, name, bits):
    a, b = tokens(90, seed=5), tokens(60, seed=6)
    model.setup_caches(spec(name, bits=bits), 1, 90)
    first = decode(model, a, 70)
    after_first = state(model)
    decode(model, b, 50)
    assert torch.equal(decode(model, a, 70), first)
    assert same(state(model), after_first)


@pytest.mark.parametrize("name", POLICIES)
def test_reset_is_a_new_cache_buffer_by_buffer(model, name):
    model.setup_caches(spec(name, bits=4), 1, 90)
    used = [layer.attention.cache for layer in model.layers]
    decode(model, tokens(90), 80)
    before = state(model)
    model.setup_caches(spec(name, bits=4), 1, 90)
    for cache, layer in zip(used, model.layers, strict=True):
        layer.attention.cache.allocate(cache.slot_pos.shape[2])
        cache.reset()
    new = state(model)
    assert not same(before, new)
    assert same([b for cache in used for b in cache.buffers()], new)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("bits", [16, 4])
def test_prefill_chunks_agree(model, name, bits):
    ids = tokens(100)
    model.setup_caches(spec(name, bits=bits), 1, 110)
    whole = model.prefill(ids)
    kept = [layer.attention.cache.slot_pos.clone() for layer in model.layers]
    codes = [layer.attention.cache.k_store.parts()[0].clone() for layer in model.layers]
    for chunk in (1, 3, 7):
        torch.testing.assert_close(model.prefill(ids, chunk=chunk), whole, atol=2e-4, rtol=1e-4)
        for layer, slot_pos, code in zip(model.layers, kept, codes, strict=True):
            assert torch.equal(layer.attention.cache.slot_pos, slot_pos)
            different = (layer.attention.cache.k_store.parts()[0] != code).float().mean()
            assert bits == 16 or different < 0.01  # a code may sit on a rounding edge


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("bits", [16, 4])
def test_addresses_stand_still(name, bits):
    model = tiny_model(n_layer=2)
    model.setup_caches(spec(name, bits=bits), 1, 200)
    ids = tokens(200)
    model.prefill(ids[:, :90])
    before = [b.data_ptr() for layer in model.layers for b in layer.attention.cache.buffers()]
    for t in range(90, 190):
        model(ids[:, t : t + 1], torch.full((1, 1), t))
    assert before == [b.data_ptr() for layer in model.layers for b in layer.attention.cache.buffers()]


# ---------------------------------------------------------------------------------------------------------------------
# Oracle: attention over everything ever seen, masked to what the slots say


class Recorder(torch.nn.Module):
    """Stands before a cache and keeps all keys and values that pass."""

    def enter(self):
        pass

    def leave(self, step):
        pass

    def __init__(self, cache):
        super().__init__()
        self.cache, self.k, self.v, self.errors = cache, [], [], []

    def fit(self, *args):
        self.k, self.v = [], []
        return self.cache.fit(*args)

    def forward(self, q, k, v, pos):
        self.k.append(k)
        self.v.append(v)
        y = self.cache(q, k, v, pos)
        if q.shape[2] == 1:
            keys, values = torch.cat(self.k, 2), torch.cat(self.v, 2)
            B, H, T, D = keys.shape
            held = torch.zeros(B, H, T, dtype=torch.bool)
            for b in range(B):
                for h in range(H):
                    where = self.cache.slot_pos[b, h]
                    where = where[where >= 0].long()
                    assert len(where.unique()) == len(where)
                    held[b, h, where] = True
            query = q.view(B, H, -1, D)
            score = torch.einsum("bhgd,bhtd->bhgt", query, keys) * D**-0.5
            score = score.masked_fill(~held[:, :, None], float("-inf"))
            expected = torch.einsum("bhgt,bhtd->bhgd", score.softmax(-1), values).flatten(1, 2)
            self.errors.append(((y.squeeze(2) - expected).norm() / expected.norm()).item())
        return y

    prefill = forward  # prompts of these tests have more than one token


APPENDING = ["snapkv:window=16", "pyramid:window=16", "adakv:window=16", "expected"]


@pytest.mark.parametrize("name", ["window:sink=4", "h2o", "tova", "keynorm", "keydiff", "random"] + APPENDING)
@pytest.mark.parametrize("bits", [16, 8, 4, 2])
def test_oracle(name, bits):
    model = tiny_model(n_layer=4)
    ids = tokens(300, batch=2)
    model.setup_caches(build(name, budget=128, bits=bits, residual=None if bits == 16 else 48), 2, 300)
    for layer in model.layers:
        layer.attention.cache = Recorder(layer.attention.cache)
    decode(model, ids, 220)
    slots = [layer.attention.cache.cache.slot_pos.shape[2] for layer in model.layers]
    live = torch.stack([(layer.attention.cache.cache.slot_pos >= 0).sum(-1) for layer in model.layers])  # [L,B,H]
    if name not in APPENDING:
        assert slots == [128] * 4 and (live == 128).all()  # evicting in decode never grows
    else:
        assert live.sum((0, 2)).tolist() == [4 * 3 * (128 + 80)] * 2
        assert sum(slots) == 4 * (128 + 80) or name.startswith("adakv")
        assert (len(set(slots)) == 4) == name.startswith(("pyramid", "adakv"))
    errors = torch.tensor([layer.attention.cache.errors for layer in model.layers])
    assert errors.shape == (4, 80)
    low, high = {16: (0, 1e-6), 8: (0.002, 0.012), 4: (0.04, 0.2), 2: (0.3, 0.9)}[bits]
    assert low <= errors.median() < high  # 20 channels and sharp attention; the low bound: really quantized
    assert errors.max() < 2 * high + 1e-5


@pytest.mark.parametrize("bits", [16, 8, 4, 2])
def test_what_is_read_is_what_attention_uses(bits):
    """dot and mix on codes, and the ring as further columns, equal plain attention over the decoded cache."""
    model = tiny_model(n_layer=2)
    ids = tokens(150)
    options = {} if bits == 16 else {"residual": 32}
    model.setup_caches(spec("pyramid:window=8,kernel=3", budget=60, bits=bits, **options), 1, 150)
    decode(model, ids, 120)
    for layer in model.layers:
        c = layer.attention.cache
        q = torch.randn(1, 3, 3, 20)
        pos = torch.tensor([149])
        y, _ = c.attend(q, pos)
        k, v = c.read(pos)
        score = (q @ k.mT * 20**-0.5).masked_fill((c.slot_pos < 0)[:, :, None], float("-inf"))
        torch.testing.assert_close(y, score.softmax(-1) @ v, atol=1e-4, rtol=1e-4)


def test_mass_goes_to_the_slot_of_its_token():
    """What a policy learns is the attention each slot received, ring or not, summed over the query group."""

    class Learner(caches.Window):
        learns = True

        def observe(self, mass):
            self.mass = mass

    caches.POLICIES["learner"] = Learner
    try:
        model = tiny_model(n_layer=1)
        ids = tokens(100)
        found = []
        for options in ({}, {"bits": 8, "residual": 24}):
            model.setup_caches(build("learner", budget=60, **options), 1, 100)
            decode(model, ids, 80)
            found.append(model.layers[0].attention.cache.policy.mass)
        assert found[0].shape == (1, 3, 60)
        torch.testing.assert_close(found[0].sum(-1), torch.full((1, 3), 3.0))
        torch.testing.assert_close(found[1], found[0], atol=0.02, rtol=0.05)
    finally:
        del caches.POLICIES["learner"]


# ---------------------------------------------------------------------------------------------------------------------
# A prompt that goes on where a cache left off


@pytest.mark.parametrize("split", [1, 5, 30, 59])
def test_second_turn_on_a_full_cache_is_one_prompt(model, split):
    ids = tokens(80)
    model.setup_caches(build("full"), 1, 80)
    expected = full_forward(model, ids)
    model.prefill(ids[:, :split], room=0)
    torch.testing.assert_close(model.prefill(ids[:, split:60], start=split), expected[:, 59], atol=2e-4, rtol=1e-4)
    for t in range(60, 80):
        got = model(ids[:, t : t + 1], torch.full((1, 1), t))[:, 0]
        torch.testing.assert_close(got, expected[:, t], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [n for n in POLICIES if not isinstance(build(n).policy(), caches.Ranked)])
@pytest.mark.parametrize("prompt", [2, 50])
@pytest.mark.parametrize("turn", [3, 45])
def test_second_turn_leaves_what_token_by_token_leaves(model, name, prompt, turn):
    """The slots and ring after a second turn are those after feeding its tokens one at a time."""
    ids = tokens(prompt + turn)
    model.setup_caches(spec(name, budget=30, bits=4, residual=16), 1, 200)
    model.prefill(ids[:, :prompt], room=turn)
    model.prefill(ids[:, prompt:], start=prompt, room=0)
    together = [(c.slot_pos.clone(), c.residual.slot.clone()) for c in (la.attention.cache for la in model.layers)]
    decode(model, ids, prompt, room=turn)
    for layer, (slot_pos, live) in zip(model.layers, together, strict=True):
        c = layer.attention.cache
        assert torch.equal(c.slot_pos, slot_pos)
        assert torch.equal(c.residual.slot, live)


@pytest.mark.parametrize("sink", [0, 4, 7])
def test_window_keeps_its_budget_over_short_turns(model, sink):
    """The first turn is shorter than the budget, and than the sinks: later turns still get all of it."""
    ids = tokens(60)
    model.setup_caches(build(f"window:sink={sink}", budget=300), 1, 400)
    expected = full_forward(model, ids)
    model.prefill(ids[:, :2], 0, 3)
    for t in range(2, 5):
        model(ids[:, t : t + 1], torch.full((1, 1), t))
    model.prefill(ids[:, 5:40], 5, 20)
    for t in range(40, 60):
        got = model(ids[:, t : t + 1], torch.full((1, 1), t))[:, 0]
        torch.testing.assert_close(got, expected[:, t], atol=2e-4, rtol=1e-4)


def test_decoding_past_the_room_drops_the_oldest_and_a_later_turn_loses_nothing_more(model):
    ids = tokens(60)
    model.setup_caches(build("full"), 1, 100)
    decode(model, ids[:, :20], 15, room=2)
    held = sorted(model.layers[0].attention.cache.slot_pos[0, 0].tolist())
    assert held == list(range(3, 20))
    model.prefill(ids[:, 20:30], start=20, room=10)
    held = sorted(model.layers[0].attention.cache.slot_pos[0, 0].tolist())
    assert held == [-1] * 10 + list(range(3, 30))


def test_one_token_prompt_is_exact_at_any_bits(model):
    ids = tokens(30)
    expected = full_forward(model, ids)
    model.setup_caches(build("full", bits=2, residual=0), 1, 30)
    torch.testing.assert_close(model.prefill(ids[:, :1]), expected[:, 0], atol=2e-4, rtol=1e-4)


def test_residual_is_never_longer_than_the_sequence():
    model = tiny_model(n_layer=1)
    model.setup_caches(build("full", bits=4, residual=10**12), 1, 50)
    assert model.layers[0].attention.cache.residual.length == 50


def test_second_turn_grows_an_appending_cache_and_keeps_what_it_holds(model):
    ids = tokens(160)
    model.setup_caches(spec("pyramid:window=8,kernel=3", budget=30), 1, 300)
    model.prefill(ids[:, :100], room=5)
    before = [layer.attention.cache.slot_pos.clone() for layer in model.layers]
    model.prefill(ids[:, 100:], start=100, room=7)
    for layer, old in zip(model.layers, before, strict=True):
        new = layer.attention.cache.slot_pos
        n = int((old >= 0).sum(-1)[0, 0])
        assert torch.equal(new[..., :n], old[..., :n])
        assert new.shape[2] == n + 60 + 7 and (new >= 0).sum(-1).eq(n + 60).all()


# ---------------------------------------------------------------------------------------------------------------------
# Formats


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_pack_roundtrip(bits):
    codes = torch.randint(0, 2**bits, (3, 5, 32))
    packed = kernels.pack(codes.float(), bits)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 5, 32 * bits // 8)
    assert torch.equal(torch.cat(kernels.unpack(packed, bits), -1), codes)


def int_store(bits, dim=64, group=32):
    return caches.IntStore(True, dim, torch.float32, "cpu", bits, group)


@pytest.mark.parametrize("dim", [20, 64, 80, 96, 128])
@pytest.mark.parametrize("bits,low,high", [(8, 0.001, 0.008), (4, 0.04, 0.11), (2, 0.2, 0.55)])
def test_quantization_error(bits, low, high, dim):
    """Neither lossless, which would mean that nothing was quantized, nor worse than its bits."""
    x = torch.randn(500, dim, generator=torch.Generator().manual_seed(0))
    store = int_store(bits, dim)
    error = (store.decode(*store.encode(x)) - x).norm() / x.norm()
    assert low < error < high


def test_rotation_helps_keys_with_outlier_channels():
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    x[:, 3] += 30
    x[:, 40] -= 20
    store = int_store(4)
    plain = int_store(4)
    plain.rotation = torch.eye(64)
    error = [(s.decode(*s.encode(x)) - x).norm() / x.norm() for s in (store, plain)]
    assert error[0] < 0.6 * error[1]


@pytest.mark.parametrize("dim", [20, 64, 80, 96, 128])
def test_rotation_is_orthogonal_and_signed(dim):
    r = kernels.rotation(dim, torch.device("cpu"))
    torch.testing.assert_close(r @ r.mT, torch.eye(dim), atol=1e-6, rtol=0)
    assert torch.equal(r, r.mT)
    assert (torch.ones(dim) @ r).abs().max() < dim**0.5 / 2  # a constant vector is no spike
    x = torch.randn(100, dim)
    torch.testing.assert_close(
        kernels.rotate(x, r), kernels.rotate(x[:1], r).new_tensor((x @ r).tolist()), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(kernels.rotate(x[:2], r), x[:2] @ r, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_degenerate_vectors(bits):
    store = int_store(bits)
    store.rotation = torch.eye(64)  # so that groups are what they look like
    x = torch.zeros(6, 64)
    x[1] = 7.25
    x[2, 5] = 1e4
    x[3] = 1e-9
    x[4] = -3.5
    x[5, ::2] = 1e6  # beyond float16: saturates, stays finite
    y = store.decode(*store.encode(x))
    assert y.isfinite().all()
    torch.testing.assert_close(y[[0, 1, 4]], x[[0, 1, 4]])
    torch.testing.assert_close(y[2], x[2], atol=25.0, rtol=0)
    torch.testing.assert_close(y[3], x[3], atol=1e-6, rtol=0)


def test_bytes_are_the_sum_of_live_buffers_and_shrink_with_bits():
    model = tiny_model(head_dim=64, n_layer=2)
    size = {}
    for bits in (16, 8, 4, 2):
        model.setup_caches(build("full", bits=bits, residual=None if bits == 16 else 0), 1, 512)
        c = model.layers[0].attention.cache
        codes = 2 * 3 * 512 * (64 * bits // 8 + (0 if bits == 16 else 2 * 2 * 2))
        codes *= 2 if bits == 16 else 1  # float32 model: 16 bits means the model's own dtype
        assert c.nbytes() == codes + 3 * 512 * 4 + (3 + 1) * 8  # and slot_pos, a count for each head, the capacity
        size[bits] = c.nbytes()
    assert size[2] < size[4] < size[8] < size[16]


def test_four_bits_with_residual_fit_in_0_38_of_bf16():
    """The default model's shape, one layer, 4,096 tokens."""
    model = tiny_model(head_dim=64, n_layer=1, dtype=torch.bfloat16, max_seq_len=4096)
    model.setup_caches(build("full", bits=4, residual=128), 1, 4096)
    assert model.layers[0].attention.cache.nbytes() / (4096 * 3 * 64 * 2 * 2) <= 0.38


def test_fewer_bits_cost_more(model):
    """Nothing is silently skipped: the distance to the exact cache grows from 8 to 2 bits, and is never zero."""
    ids = tokens(120)
    model.setup_caches(build("full"), 1, 120)
    exact = decode(model, ids, 80).log_softmax(-1)
    kl = []
    for bits in (8, 4, 2):
        model.setup_caches(build("full", bits=bits, residual=8), 1, 120)
        got = decode(model, ids, 80).log_softmax(-1)
        kl.append((exact.exp() * (exact - got)).sum(-1)[:, 1:].mean().item())
    assert 0 < kl[0] < kl[1] / 10 < kl[2] / 50


def test_a_row_with_nothing_to_attend_to_gives_zero():
    model = tiny_model(n_layer=1)
    for bits in (16, 4):
        model.setup_caches(build("full", bits=bits), 1, 40)
        y, _ = model.layers[0].attention.cache.attend(torch.randn(1, 3, 3, 20), torch.tensor([0]))
        assert torch.equal(y, torch.zeros_like(y))


def test_a_format_needs_only_encode_and_decode(model):
    """The base class reads what encode and decode make, so that a new format is right before it is fast."""

    class Half(caches.Store):
        widths = (8,)

        def encode(self, x):
            return x.half(), x.abs().amax(-1, keepdim=True)

        def decode(self, x, _):
            return x.float()

    caches.FORMATS["half"] = Half
    try:
        ids = tokens(60)
        model.setup_caches(build("full"), 1, 60)
        expected = decode(model, ids, 40)
        model.setup_caches(build("full", bits=8, format="half"), 1, 60)
        torch.testing.assert_close(decode(model, ids, 40), expected, atol=0.05, rtol=0.01)
    finally:
        del caches.FORMATS["half"]


# ---------------------------------------------------------------------------------------------------------------------
# Prefill, layer by layer


def test_one_layer_of_full_keys_lives_at_a_time(model, monkeypatch):
    alive, most = [], []
    attend = kernels.causal_attention

    def spy(q, k, v):
        alive.append(weakref.ref(k))
        most.append(sum(r() is not None for r in alive))
        return attend(q, k, v)

    monkeypatch.setattr(kernels, "causal_attention", spy)
    model.setup_caches(spec("pyramid:window=8,kernel=3", budget=30), 1, 200)
    model.prefill(tokens(190), chunk=50)
    assert most == [1, 1, 1]


@pytest.mark.parametrize("ids,start,room", [(300, 0, 300), (10, 500, 10), (10, 0, -1), (10, -1, 0)])
def test_prefill_refuses_what_does_not_fit(model, ids, start, room):
    model.setup_caches(build("full"), 1, 512)
    with pytest.raises(ValueError, match="tokens"):
        model.prefill(tokens(ids), start=start, room=room)


# ---------------------------------------------------------------------------------------------------------------------
# Names


@pytest.mark.parametrize(
    "arguments,words",
    [
        (dict(cache="h3o"), ["--cache h3o", "pyramid", "snapkv"]),
        (dict(cache="snapkv:windw=3"), ["windw", "window"]),
        (dict(cache="snapkv:window=x"), ["window=x"]),
        (dict(cache="snapkv:kernel=4"), ["kernel=4", "odd"]),
        (dict(cache="snapkv:pool=min"), ["pool=min", "avg"]),
        (dict(cache="window:sink=-1"), ["sink=-1", "negative"]),
        (dict(cache="pyramid:beta=0.5"), ["--cache pyramid", "beta=0.5"]),
        (dict(cache="pyramid:beta=nan"), ["beta=nan"]),
        (dict(cache="pyramid:beta=inf"), ["beta=inf"]),
        (dict(cache="h2o:recent=nan"), ["recent=nan"]),
        (dict(cache="h2o:recent=1e400"), ["recent=1e400"]),
        (dict(cache="h2o:recent=1.5"), ["recent=1.5"]),
        (dict(cache="tova:recent=99999999999999999999"), ["recent", "2^31"]),
        (dict(cache="snapkv:window=4,sink=99999999999999999999"), ["sink", "2^31"]),
        (dict(cache="expected:future=0"), ["future=0"]),
        (dict(cache="expected:future=100000000"), ["future=100000000"]),
        (dict(cache="adakv:floor=nan"), ["floor=nan"]),
        (dict(cache="adakv:floor=2"), ["floor=2", "0 to 1"]),
        (dict(cache="pyramid:reference=yes"), ["reference=yes", "false"]),
        (dict(cache="snapkv:kernel=1001"), ["kernel=1001", "1000"]),
        (dict(cache="window:sink=1,sink=2"), ["sink", "twice"]),
        (dict(bits=4.0), ["--bits 4.0"]),
        (dict(bits=4, residual=1.5), ["--residual 1.5"]),
        (dict(cache="window", budget="5"), ["--budget 5"]),
        (dict(bits=5), ["--bits 5", "2"]),
        (dict(bits=4, format="kiwi"), ["--format kiwi", "int"]),
        (dict(format="int"), ["--format int", "--bits"]),
        (dict(residual=64), ["--residual 64", "--bits"]),
        (dict(bits=4, residual=-1), ["--residual -1"]),
        (dict(cache="full", budget=100), ["--budget 100", "full"]),
        (dict(cache="snapkv", budget=64), ["--budget 64", "65"]),
        (dict(cache="window:sink=4", budget=4), ["--budget 4", "5"]),
        (dict(cache="window", budget=0), ["--budget 0"]),
        (dict(cache="window", budget=-0.5), ["--budget -0.5"]),
        (dict(cache="window", budget=1.5), ["--budget 1.5"]),
        (dict(cache="window", budget=float("nan")), ["--budget nan"]),
    ],
)
def test_wrong_names_are_refused_in_one_sentence(arguments, words):
    with pytest.raises(caches.SpecError) as error:
        build(**arguments)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_every_argument_changes_the_live_object():
    policy = build("pyramid:window=8,kernel=3,pool=max,sink=2,beta=7.5", budget=100).policy()
    assert (policy.recent, policy.kernel, policy.pool, policy.sink, policy.beta) == (8, 3, "max", 2, 7.5)
    assert build("window:sink=0").policy().sink == 0
    model = tiny_model(head_dim=64)
    model.setup_caches(build("window", budget=30, bits=4, format="int:group=16", residual=10), 2, 50)
    c = model.layers[0].attention.cache
    assert c.k_store.group == 16 and c.residual.length == 10 and c.slot_pos.shape == (2, 3, 30)


@pytest.mark.parametrize("budget,prompt,expected", [(0.25, 200, 50), (0.25, 30, 17), (50, 200, 50), (1.0, 200, 200)])
def test_budget_is_a_count_or_a_fraction(budget, prompt, expected):
    assert sum(build("pyramid", budget=budget).slots(prompt, 10)) == 10 * expected
