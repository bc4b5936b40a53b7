"""Continuous batching: whatever its neighbours do, a request's tokens are those it would get alone."""

import random
from dataclasses import replace

import pytest
import torch
from conftest import tiny_model, tokens

from cache import build
from generate import Engine, Params, UsageError, generate, graphs

KINDS = [
    ("full", 16, "auto"),
    ("full", 4, "int"),
    ("full", 4, "kivi"),
    ("full", 4, "nvfp4"),
    ("window", 16, "auto"),
    ("streaming", 4, "int"),
    ("h2o", 16, "auto"),
    ("h2o", 4, "kivi"),
    ("tova", 8, "int"),
    ("snapkv:window=8", 4, "int"),
    ("snapkv:window=8", 4, "kivi"),
    ("pyramid:window=8", 2, "int"),
    ("adakv:window=8", 16, "auto"),
    ("adakv:window=8", 4, "mxfp4"),
    ("expected", 8, "fp8"),
    ("keynorm", 16, "auto"),
    ("keydiff", 4, "int"),
    ("random", 16, "auto"),
]


def spec(name: str, bits: int = 16, form: str = "auto", page: int = 16):
    budget = None if name == "full" else 160 if form == "kivi" else 56
    page = 32 if form == "kivi" else page
    return build(name, budget=budget, bits=bits, format=form, residual=None if bits == 16 else 8, page_size=page)


def text(n: int, seed: int) -> list[int]:
    return tokens(n, seed=seed)[0].tolist()


def run(engine: Engine, requests: list[tuple[list[int], Params]], after=None) -> list[list[int]]:
    out = {engine.submit(prompt, params, after=after): [] for prompt, params in requests}
    while engine.unfinished:
        for id, new in engine.step().items():
            out[id] += new
    return list(out.values())


def alone(model, kind, requests, lanes: int = 4) -> list[list[int]]:
    """Each of the requests in an engine of its own, of as many lanes."""
    return [run(Engine(model, kind, lanes, 512), [request])[0] for request in requests]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def requests():
    """Prompts of one token to many more than a budget, one that ends at once, greedy ones and sampled ones."""
    draw = random.Random(1)
    lengths = [1, 5, 200, 57, 56, 55, 120, 64, 3]
    params = [Params(draw.randrange(1, 25), draw.choice([0.0, 0.8]), seed=i) for i in range(len(lengths))]
    return [(text(n, n), p) for n, p in zip(lengths, params, strict=True)]


@pytest.mark.parametrize(("name", "bits", "form"), KINDS)
def test_neighbours_do_not_matter(name, bits, form, model, requests):
    """Bit for bit, in float32: nine requests through four lanes, then through a pool that is too small for four."""
    kind = spec(name, bits, form)
    want = alone(model, kind, requests)
    engine = Engine(model, replace(kind, page=64), 4, 512, prefix=False)  # two chunks a page
    assert run(engine, requests) == want
    assert [len(x) for x in want] == [p.max_new_tokens for _, p in requests]
    assert engine.pool.used == sum(engine.pool.refs) == 1  # where lanes without a request write
    sizes = Engine(model, kind, 4, 512)
    largest = max(sizes.need(len(prompt), params.max_new_tokens) for prompt, params in requests)
    small = Engine(model, kind, 4, 512, pages=largest + 12, prefill_layers=1, prefix=False)
    assert run(small, requests) == want
    assert small.pool.used == 1
    assert 0 < small.peak <= largest + 12


def test_logits_are_the_same_bits(model):
    """Not only tokens: a lane's logits, with neighbours of all lengths and without."""
    seen = {}

    def record(neighbours: int):
        engine = Engine(model, build(page_size=16), 4, 512)
        engine.submit(text(60, 1), Params(30))
        for i in range(neighbours):
            engine.submit(text([300, 9, 130][i], i + 5), Params([25, 10, 3][i]))
        kept, forward = [], type(model).forward

        def spy(self, *args):
            logits = forward(self, *args)
            if args[0].shape[0] == 4 and engine.lanes[0] is not None:
                kept.append(logits[0].clone())
            return logits

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(model), "forward", spy)
            while 0 in engine.live:
                engine.step()
        seen[neighbours] = kept

    record(0)
    record(3)
    assert len(seen[0]) == len(seen[3]) == 29
    assert all(map(torch.equal, seen[0], seen[3]))


def test_the_loop_for_one_sequence_says_the_same(model):
    for name in ("full", "snapkv:window=8", "h2o"):
        kind = spec(name)
        prompts = [text(n, n) for n in (70, 20, 57)]
        got = Engine(model, kind, 2, 512).generate(prompts, Params(20))
        for prompt, new in zip(prompts, got, strict=True):
            model.setup_caches(spec(name, page=0), 1, 512)
            assert [*generate(model, prompt, 20)] == new


@pytest.mark.parametrize(
    ("name", "bits", "form"), [k for k in KINDS if k[0] in ("full", "adakv:window=8", "pyramid:window=8")]
)
def test_a_pool_for_two_and_a_half_of_four(name, bits, form, model):
    """The latest make way, and come back with the same text."""
    kind = spec(name, bits, form)
    requests = [(text(30, i), Params(70, 0.7, seed=i)) for i in range(4)]
    want = alone(model, kind, requests)
    engine = Engine(model, kind, 4, 512, pages=int(2.5 * Engine(model, kind, 4, 512).need(30, 69)), prefix=False)
    assert run(engine, requests) == want
    assert engine.preempted > 0
    assert engine.pool.used == 1


def test_codes_that_were_left_behind_are_not_read_instead(model):
    """Few bits, and prefixes are looked for: who makes way reads its prompt anew, and says the same."""
    kind = build("full", bits=2, residual=0, page_size=16)
    requests = [(text(60, i), Params(70, 0.7, seed=i)) for i in range(4)]
    want = [run(Engine(model, kind, 4, 512, prefix=False), [request])[0] for request in requests]
    engine = Engine(model, kind, 4, 512, pages=int(2.5 * Engine(model, kind, 4, 512).need(60, 69)))
    assert run(engine, requests) == want
    assert engine.preempted > 0


def test_a_prompt_is_read_while_lanes_take_the_last_pages(model):
    """What was promised to the prompt that is being read, nobody else takes; else it would find nothing at its end."""
    kind = build(page_size=4)
    requests = [(text(10, 1), Params(90)), (text(120, 2), Params(3)), (text(11, 3), Params(60))]
    sizes = Engine(model, kind, 2, 512)
    engine = Engine(model, kind, 2, 512, pages=sizes.need(10, 6) + sizes.need(120, 3), prefill_layers=1, prefix=False)
    assert run(engine, requests) == alone(model, kind, requests, 2)


def test_endless_text_has_as_many_pages_as_its_window(model):
    """Ten million tokens to come, of which a model of 512 positions holds 448 at a time."""
    engine = Engine(model, build("streaming", page_size=16), 2, 10**7)
    assert len(engine.pool.refs) == 1 + 2 * 3 * 3 * 448 // 16
    assert engine.submit(text(20, 1), Params(10**6)) == 0
    for _ in range(600):
        engine.step()
    assert engine.pool.used == 1 + 3 * 3 * -(-build("streaming").policy().least() // 16)


def test_more_pages_than_memory_are_refused(model):
    with pytest.raises(
        UsageError, match=r"--pages 1000000000000: pages take .* GB, and .* GB are free; give --pages \d+ or fewer"
    ):
        Engine(model, build(), pages=10**12)


# ---------------------------------------------------------------------------------------------------------------------
# Prefixes


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("page", [1, 3, 16])
def test_the_stale_hash(page, constant, model):
    """Keep P1; P1+T; free; P2+Q+T; free; P1+T. And full hits: of whole pages, too, the last token is computed."""
    kind, params = build(page_size=page), Params(12)
    engine = Engine(model, kind, 3, 512, pages=Engine(model, kind, 3, 512).need(90, 12))
    if constant:
        engine.pool.prefixes.hash = lambda parent, tokens: 0
    p1, p2, t, q = text(48, 1), text(48, 2), text(20, 3), text(16, 4)
    hits = []
    for prompt in (p1, p1 + t, p2 + q + t, p1 + t, p1, p1, p1[: 2 * page]):
        before = engine.hit_tokens
        got = run(engine, [(prompt, params)])
        hits.append(engine.hit_tokens - before)
        assert got == alone(model, kind, [(prompt, params)], 3)
        assert hits[-1] < len(prompt)
        assert engine.pool.used == 1
    if not constant:
        assert hits[0] == hits[2] == hits[3] == 0  # of P1 nothing is left once P2+Q+T has taken its pages
        assert hits[1] == 48
        assert hits[4] == hits[5] == 47 // page * page
        assert hits[6] == (2 * page - 1) // page * page


def test_prefixes_are_found_while_they_run_and_afterwards(model):
    kind, shared = build(page_size=16), text(100, 1)
    requests = [(shared + text(10 + i, i), Params(20)) for i in range(5)]
    engine = Engine(model, kind, 3, 512)
    assert run(engine, requests) == alone(model, kind, requests, 3)
    assert engine.hit_tokens == 4 * 96
    plain = Engine(model, kind, 3, 512, prefix=False)
    run(plain, requests)
    assert plain.hit_tokens == 0
    assert plain.peak > engine.peak  # shared pages are there once
    engine.reset()
    assert not engine.pool.prefixes.blocks
    assert run(engine, requests[:1]) == alone(model, kind, requests[:1], 3)
    assert engine.hit_tokens == 0


def test_requests_that_part_inside_a_page(model):
    """No page is shared that both would write to."""
    kind, shared = build(page_size=16), text(40, 1)
    requests = [(shared + text(3, i), Params(30)) for i in range(2)]
    engine = Engine(model, kind, 2, 512)
    assert run(engine, requests) == alone(model, kind, requests, 2)
    assert engine.hit_tokens == 32


def test_an_answer_is_a_prefix_too(model):
    """A second turn finds the first one's tokens, generated ones included."""
    kind, first = build(page_size=16), text(40, 1)
    engine = Engine(model, kind, 2, 512)
    (answer,) = run(engine, [(first, Params(40))])
    second = first + answer + text(9, 7)
    got = run(engine, [(second, Params(10))])
    assert engine.hit_tokens == 79 // 16 * 16  # the last token of the answer was never read
    assert got == alone(model, kind, [(second, Params(10))], 2)


@pytest.mark.parametrize(("bits", "form", "residual"), [(8, "int", 0), (4, "int", 8), (4, "kivi", 8), (2, "kivi", 0)])
def test_few_bits_go_on_from_the_codes(bits, form, residual, model):
    """After a hit the rest is read as a second turn that finds codes, and only the first tokens exact."""
    kind = build(bits=bits, format=form, residual=residual, page_size=32)
    engine = Engine(model, kind, 2, 512)
    first = text(128, 1)
    run(engine, [(first, Params(3))])
    prompt = first[:100] + text(50, 9)
    (got,) = run(engine, [(prompt, Params(12))])
    assert engine.hit_tokens == 96
    model.setup_caches(build(bits=bits, format=form, residual=residual), 1, 512)
    model.prefill(torch.tensor([prompt[:96]]))
    for layer in model.layers:
        if residual:
            layer.attention.cache.residual.slot[:, :, 4:] = -1
    want = [*generate(model, prompt[96:], 12, start=96)]
    assert got == want


def test_what_a_ring_holds_of_the_end_is_computed(model):
    kind = build(bits=4, residual=64, page_size=16)
    engine = Engine(model, kind, 2, 512)
    run(engine, [(text(100, 1), Params(3))])
    run(engine, [(text(100, 1), Params(3))])
    assert engine.hit_tokens == 32  # of 100 tokens the last 64 have to be in the ring
    run(engine, [(text(70, 1), Params(3))])
    assert engine.hit_tokens == 32  # and the first 4 of 6 are no whole page


@pytest.mark.parametrize(
    ("name", "bits", "form", "why"),
    [("snapkv:window=8", 16, "auto", "snapkv"), ("full", 4, "nvfp4", "nvfp4"), ("h2o", 4, "int", "h2o")],
)
def test_where_prefixes_cannot_help(name, bits, form, why, model):
    engine = Engine(model, spec(name, bits, form), 2, 512)
    run(engine, [(text(100, 1), Params(3))] * 3)
    assert engine.hit_tokens == 0
    assert not engine.pool.prefixes.blocks  # nothing compressed is ever published
    assert why in engine.spec.why_no_prefix()


# ---------------------------------------------------------------------------------------------------------------------
# Samples


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize(
    ("name", "bits"), [("full", 16), ("full", 4), ("snapkv:window=8", 4), ("h2o", 16), ("adakv:window=8", 4)]
)
def test_samples_part_inside_a_page(name, bits, page, model):
    """Copied when one of them writes: each equals that sample alone."""
    kind, prompt = spec(name, bits, page=page), text(50, 5)
    engine = Engine(model, kind, 4, 512)
    ids = engine.submit(prompt, Params(20, 1.0, seed=3), samples=3)
    out = {id: [] for id in ids}
    while engine.unfinished:
        for id, new in engine.step().items():
            out[id] += new
        refs = engine.pool.refs
        for cache in engine.caches:
            held = [page for lane in cache.layout.pages for head in lane for page in head]
            assert all(refs[p] == held.count(p) for p in held)
    want = alone(model, kind, [(prompt, Params(20, 1.0, seed=3 + i)) for i in range(3)])
    assert list(out.values()) == want
    assert len(set(map(tuple, want))) == 3
    assert engine.pool.used == 1


def test_samples_share_what_they_do_not_write(model):
    kind = build(page_size=16)
    engine = Engine(model, kind, 4, 512)
    engine.submit(text(100, 1), Params(10, 1.0), samples=4)
    while engine.waiting or engine.reading:
        engine.step()
    heads = 3 * 3
    assert engine.pool.used - 1 <= heads * (7 + 3)  # six full pages once, the seventh once for each


# ---------------------------------------------------------------------------------------------------------------------
# Coming and going


def test_cancel_wherever_it_is(model):
    kind = spec("full", 4, "int")
    engine = Engine(model, kind, 2, 512, prefill_layers=1)
    requests = [(text(40 + i, i), Params(30)) for i in range(5)]
    ids = [engine.submit(*request) for request in requests]
    out = {id: [] for id in ids}
    cancelled = {}
    while engine.unfinished:
        for id, new in engine.step().items():
            out[id] += new
        if not cancelled and engine.reading and engine.waiting and any(engine.lanes):
            running = next(r.id for r in engine.lanes if r is not None)
            for id in (running, engine.reading[0].id, engine.waiting[-1][0].id):
                cancelled[id] = len(out[id])
                engine.cancel(id)
            engine.cancel(999)
    assert len(cancelled) == 3
    for i, (id, want) in enumerate(zip(ids, alone(model, kind, requests, 2), strict=True)):
        assert out[id] == (want[: cancelled[id]] if id in cancelled else want), i
    assert engine.pool.used == 1


def test_a_sample_is_cancelled_and_the_others_are_not(model):
    kind = spec("full")
    for when in (0, 1):
        engine = Engine(model, kind, 4, 512, prefill_layers=1)
        engine.submit(text(9, 9), Params(30))
        ids = engine.submit(text(50, 5), Params(10, 1.0), samples=3)
        out = {id: [] for id in range(4)}
        for _ in range(when):
            engine.step()
        engine.cancel(ids[0])
        assert ids[0] not in engine.live
        assert ids[1] in engine.live
        while engine.unfinished:
            for id, new in engine.step().items():
                out[id] += new
        want = alone(model, kind, [(text(50, 5), Params(10, 1.0, seed=i)) for i in range(3)])
        assert [out[id] for id in ids] == [[], *want[1:]]
        assert engine.pool.used == 1


def test_lanes_are_not_starved_while_a_prompt_is_read(model):
    engine = Engine(model, build(page_size=16), 2, 512, prefill_layers=1)
    engine.submit(text(10, 1), Params(50))
    engine.step()
    engine.submit(text(200, 2), Params(5))
    told = 0
    while engine.reading or engine.waiting:
        told += len(engine.step().get(0, []))
    assert told >= 3  # one for each layer


def test_a_free_lane_is_filled_at_once(model):
    engine = Engine(model, build(page_size=16), 2, 512)
    for i in range(6):
        engine.submit(text(10, i), Params(4 + i))
    steps = 0
    while engine.unfinished:
        engine.step()
        steps += 1
        if engine.waiting:
            assert None not in engine.lanes or engine.lanes.count(None) == 1
    assert steps <= sum(4 + i for i in range(6)) / 2 + 9


def test_stop_ids_and_lengths(model):
    kind = spec("full")
    (long,) = alone(model, kind, [(text(20, 1), Params(20))])
    stop = long[7]
    first = long.index(stop)
    assert run(Engine(model, kind, 2, 512), [(text(20, 1), Params(20, stop_ids=(stop,)))]) == [long[: first + 1]]
    assert run(Engine(model, kind, 2, 512), [(text(20, 1), Params(1))]) == [long[:1]]
    assert run(Engine(model, kind, 2, 512), [(text(20, 1), Params(0))]) == [[]]
    assert run(Engine(model, spec("full", page=64), 1, 64), [(text(64, 1), Params(0))]) == [[]]
    assert Engine(model, kind, 2, 512).generate([text(20, 1)] * 2, Params(3)) == [long[:3]] * 2


def test_unused_slots_are_at_most_a_page_a_head(model):
    engine = Engine(model, spec("adakv:window=8"), 3, 512)
    for i in range(3):
        engine.submit(text(100 + i, i), Params(20))
    while engine.unfinished:
        engine.step()
        for r in filter(None, engine.lanes):
            held = torch.tensor([[len(h) for h in cache.layout.pages[r.lane]] for cache in engine.caches]) * 16
            unused = held - torch.from_numpy(r.held)
            assert unused.min() >= 0
            assert unused.max() < 16
    assert 0 < engine.unused < 16 / 48


def test_two_engines_on_one_model(model):
    kinds = spec("full"), spec("snapkv:window=8", 4, "int")
    engines = [Engine(model, kind, 2, 512) for kind in kinds]
    out = [[], []]
    for engine in engines:
        engine.submit(text(60, 1), Params(15))
    while any(engine.unfinished for engine in engines):
        for engine, tokens_ in zip(engines, out, strict=True):
            tokens_ += engine.step().get(0, [])
    assert out == [alone(model, kind, [(text(60, 1), Params(15))], 2)[0] for kind in kinds]


@pytest.mark.parametrize(
    ("prompt", "new", "samples", "says"),
    [
        ([], 1, 1, "the prompt is empty"),
        (500, 20, 1, "500 tokens in the prompt and 20 new ones are more than 512"),
        (300, 20, 1, "--pages 100: .* need 180 pages of 16 slots"),
        (10, 20, 5, "--num-samples 5: there are 4 lanes"),
    ],
)
def test_what_never_fits_is_refused_when_it_comes(prompt, new, samples, says, model):
    engine = Engine(model, build(page_size=16), 4, 512, pages=100)
    with pytest.raises(UsageError, match=says):
        engine.submit(text(prompt, 1) if prompt else [], Params(new), samples)
    assert engine.unfinished == 0
    assert engine.submit(text(160, 1), Params(10)) == 0


def test_one_graph_for_the_life_of_an_engine(tmp_path):
    """Lanes come and go, the longest changes, requests make way, a document is loaded between two steps: the step is
    compiled once, and tokens are the same."""
    requests = [(text(n, n), Params(new)) for n, new in [(30, 40), (300, 5), (5, 20), (200, 60), (90, 70), (1, 3)]]
    for name, bits, lanes in (("full", 4, 3), ("pyramid:window=8", 16, 3), ("h2o", 16, 1)):
        kind = spec(name, bits)
        model = tiny_model(seed=3)
        eager = run(Engine(model, kind, lanes, 512, prefix=False), requests)
        torch._dynamo.reset()
        model.compile()
        want = alone(model, kind, requests, lanes)
        assert [x[:5] for x in want] == [x[:5] for x in eager]
        engine = Engine(model, kind, lanes, 512, pages=460, prefix=False)
        assert run(engine, requests) == want
        assert graphs() == 1
        again = Engine(model, kind, lanes, 512, prefix=False)
        again.save(tmp_path / "doc.kv", requests[1][0])
        ids, out = [again.submit(*requests[3])], {}
        while again.unfinished:
            for id, new in again.step().items():
                out.setdefault(id, []).extend(new)
            if len(ids) == 1 and len(out[ids[0]]) == 5:
                ids.append(again.submit(*requests[0], after=again.load(tmp_path / "doc.kv")))
        other = Engine(model, kind, lanes, 512)
        (want_after,) = run(other, requests[:1], other.load(tmp_path / "doc.kv"))
        assert [out[id] for id in ids] == [want[3], want_after]
        assert graphs() == 1
