"""Selection: a step reads the chunks whose keys could matter, and nothing else; everything stays."""

from dataclasses import replace

import pytest
import torch
from conftest import decode, tiny_args, tiny_model, tokens

import cache as caches
import kernels
from cache import CHUNK

FORMATS = [dict(), dict(bits=8), dict(bits=4), dict(bits=4, format="kivi"), dict(bits=4, format="nvfp4", residual=16)]


def one_layer(select, heads=3, group=3, dim=20, by=None, **options) -> caches.KVCache:
    spec = replace(caches.build("full", select=select, **options), dense=0)
    args = tiny_args(n_layer=1, n_kv_head=heads, n_head=heads * group, head_dim=dim, max_seq_len=2048)
    cache = spec(args, torch.rand(dim // 2), 1, 2048, torch.float32, "cpu")[0]
    if by is not None:
        cache.selection = by(select, cache.layout, dim, torch.float32, "cpu")
    return cache


def drawn(T: int, heads=3, group=3, dim=20, seed=0):
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, n, T, dim, generator=draw) for n in (heads * group, heads, heads))
    k = k + 2 * torch.randn(1, heads, T // 16 + 1, dim, generator=draw).repeat_interleave(16, 2)[:, :, :T]
    return q, k, v


def fed(cache, q, k, v, prompt: int):
    """Outputs of the steps after a prompt [1,H*G,T-prompt,D]."""
    T = q.shape[2]
    cache.fit([prompt], [0], T + 1 - prompt, 2048)
    pos = torch.arange(T)[None]
    cache(q[:, :, :prompt], k[:, :, :prompt], v[:, :, :prompt], pos[:, :prompt])
    steps = [cache(*(x[:, :, t : t + 1] for x in (q, k, v)), pos[:, t : t + 1]) for t in range(prompt, T)]
    return torch.cat(steps, 2)


def by_channels(x, keys, rows):
    """What keys [n,D] promise queries x [G,D], in these channels alone."""
    return float((x[:, rows] @ keys[:, rows].T).max())


def by_bounds(x, keys, rows):
    ends = [(span.amin(0), span.amax(0)) for span in keys.split(16)]
    return max(float(torch.maximum(y * low, y * high).sum()) for y in x for low, high in ends)


@pytest.mark.parametrize("heads, group, dim", [(3, 3, 20), (1, 1, 64), (2, 7, 96), (1, 16, 128)])
@pytest.mark.parametrize("prompt", [300, 320, 321])
@pytest.mark.parametrize("by", [by_channels, by_bounds])
def test_equals_attention_to_the_chunks_that_a_search_over_all_keys_picks(heads, group, dim, prompt, by):
    T, m = 400, 4
    q, k, v = drawn(T, heads, group, dim)
    cache = one_layer(m * CHUNK, heads, group, dim, None if by is by_channels else caches.Bounds)
    assert isinstance(cache.selection, caches.Channels if by is by_channels else caches.Bounds)
    ours, missed = fed(cache, q, k, v, prompt), 0
    spread = k[0, :, :prompt].std(1, correction=0)  # [H,D]
    for t in range(prompt, T):
        x = q[0, :, t].unflatten(0, (heads, group)) * dim**-0.5
        for h in range(heads):
            chunks = [slice(s, min(s + CHUNK, t + 1)) for s in range(0, t + 1, CHUNK)]
            rows = (x[h].abs().sum(0) * spread[h]).topk(dim // 4).indices
            promise = [by(x[h], k[0, h, where], rows) for where in chunks]
            middle = sorted(range(1, len(chunks) - 1), key=lambda c: -promise[c])[: m - 2]
            seen = torch.cat([torch.arange(t + 1)[chunks[c]] for c in [0, *middle, len(chunks) - 1]])
            missed += t + 1 - len(seen)
            y = (x[h] @ k[0, h, seen].T).softmax(-1) @ v[0, h, seen]
            torch.testing.assert_close(ours[0, h * group : (h + 1) * group, t - prompt], y, atol=2e-5, rtol=1e-4)
    assert missed > 0


@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("select", [400, 1.0])
def test_to_select_everything_is_the_full_cache_exactly(options, page, select):
    page = 32 if page and options.get("format") == "kivi" else page
    q, k, v = drawn(400)
    twin = fed(one_layer(None, page_size=page, **options), q, k, v, 333)
    assert torch.equal(fed(one_layer(select, page_size=page, **options), q, k, v, 333), twin)


@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("select", [128, 0.4])
def test_reads_what_it_says_and_nothing_else(options, select):
    """Whatever is in the other chunks does not matter; what is in those that are read does."""
    q, k, v = drawn(401)
    cache = one_layer(select, **options)
    fed(cache, *(x[:, :, :400] for x in (q, k, v)), 333)
    last = [x[:, :, 400:] for x in (q, k, v)] + [torch.tensor([[400]])]
    state = [b.clone() for b in cache.buffers()]
    ours = cache(*last).clone()
    chosen = cache.selection.chosen[0].sort().values  # [H,m]
    assert 3 <= chosen.shape[1] < 13 and (chosen[:, 0] == 0).all() and (chosen[:, -1] == 400 // CHUNK).all()
    assert (chosen.diff(dim=-1) > 0).all()
    for others in (True, False):
        for buffer, old in zip(cache.buffers(), state, strict=True):
            buffer.copy_(old)
        for part in cache.v_store.stored:
            for h in range(3):
                n = part.shape[2]
                touched = torch.ones(n, dtype=torch.bool)
                touched[chosen[h]] = False
                touched = touched if others else ~touched & (torch.arange(n) != 400 // CHUNK)
                part[0, h, touched] = 0
        assert torch.equal(cache(*last), ours) == others


def test_paged_and_dense_select_the_same():
    q, k, v = drawn(400)
    twin = fed(one_layer(128), q, k, v, 333)
    for page in (1, 2, 16, 32, 96):
        assert torch.equal(fed(one_layer(128, page_size=page), q, k, v, 333), twin), page


@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_bounds_follow_every_token(options):
    """After steps as after one prompt: bounds hold for every key, and are as tight as keys are exact."""
    q, k, v = drawn(200)
    cache = one_layer(96, by=caches.Bounds, **options)
    fed(cache, q, k, v, 70)
    high, low = cache.selection.bounds.mT.flatten(2, 3).chunk(2, -1)  # [1,H,n,D]
    exact = k[:, :, :192].unflatten(2, (-1, 16))
    wide = (exact.amax(3) - exact.amin(3)).amax()
    near = dict(atol=0.5 * float(wide) if options else 1e-6, rtol=0)
    torch.testing.assert_close(low[:, :, :12], exact.amin(3), **near)
    torch.testing.assert_close(high[:, :, :12], exact.amax(3), **near)
    torch.testing.assert_close(high[:, :, 12], k[:, :, 192:].amax(2), atol=1e-6, rtol=0)  # a chunk that steps filled
    cache.reset()
    fresh = one_layer(96, by=caches.Bounds, **options)
    fresh.fit([200], [0], 0, 2048)
    cache.fit([200], [0], 0, 2048)
    assert all(map(torch.equal, cache.buffers(), fresh.buffers()))


@pytest.mark.parametrize(
    "cache, options",
    [("full", form) for form in FORMATS]
    + [(name, FORMATS[2]) for name in ("snapkv:window=8", "pyramid:window=8", "adakv:window=8", "expected")],
    ids=str,
)
def test_every_policy_that_appends_in_a_whole_model(cache, options):
    """Two dense layers and one that selects; batch rows as each alone; a second turn; and it does select."""
    budget = None if cache == "full" else 0.8
    spec = caches.build(cache, budget=budget, select=96, **options)
    assert spec.dense == 2
    model, ids = tiny_model(max_seq_len=700), tokens(330, batch=2)
    model.setup_caches(spec, 2, 600)
    both = decode(model, ids, 300)
    layers = [layer.attention.cache for layer in model.layers]
    assert [c.selection is not None for c in layers] == [False, False, True]
    assert layers[2].selection.chosen.shape[2] == 3
    model.setup_caches(spec, 1, 600)
    for row in (0, 1, 0):
        torch.testing.assert_close(decode(model, ids[row : row + 1], 300), both[row : row + 1], atol=2e-4, rtol=1e-4)
    again = model.prefill(ids[:1, :250], 330)
    assert torch.isfinite(again).all()
    model.setup_caches(replace(spec, select=None), 1, 600)
    full = decode(model, ids[:1], 300)
    assert torch.equal(full[:, 0], decode_first(model, spec, ids))
    assert not torch.allclose(full[:, 1:], both[:1, 1:], atol=1e-3)


def decode_first(model, spec, ids):
    model.setup_caches(spec, 1, 600)
    return model.prefill(ids[:1, :300])


@pytest.mark.parametrize("options, page", [(FORMATS[2], 64)], ids=str)
def test_compiled_equals_eager_with_a_graph_for_layers_that_select_and_one_for_those_that_do_not(options, page):
    from generate import DecodeStep, graphs

    torch._dynamo.reset()
    spec = caches.build("pyramid:window=8", budget=0.5, select=0.5, page_size=page, **options)
    model, ids = tiny_model(n_layer=5), tokens(380)
    model.setup_caches(spec, 1, 400)
    eager = decode(model, ids, 320)
    chosen = [layer.attention.cache.selection.chosen.clone() for layer in model.layers[2:]]
    assert len({c.shape[2] for c in chosen}) > 1
    model.compile()
    model.prefill(ids[:, :320])
    step = DecodeStep(model)
    ours = [step(ids[:, t : t + 1], torch.full((1, 1), t))[:, 0].clone() for t in range(320, 380)]
    assert step.again is not None, "steps are replayed"
    torch.testing.assert_close(torch.stack(ours, 1), eager[:, 1:], atol=1e-3, rtol=1e-3)
    assert graphs() == 2
    found = [layer.attention.cache.selection.chosen for layer in model.layers[2:]]
    assert all(torch.equal(a.sort().values, b.sort().values) for a, b in zip(chosen, found, strict=True))


def test_largest():
    x = torch.randn(2, 3, 50)
    found = kernels.largest(x, 7)
    assert torch.equal(found.sort().values, x.argsort(descending=True)[..., :7].sort().values)


@pytest.mark.parametrize(
    "arguments, named",
    [
        (dict(select=0), "--select 0"),
        (dict(select=95), "at least 96"),
        (dict(select=1.5), "fraction"),
        (dict(select=-0.5), "--select -0.5"),
        (dict(select=128, page_size=3), "--page-size 3"),
        (dict(cache="h2o", select=128), "--cache h2o"),
        (dict(cache="streaming", select=128), "full, snapkv"),
    ],
)
def test_refused(arguments, named):
    with pytest.raises(caches.SpecError, match=named):
        caches.build(**arguments)
