"""Where a slot lives: pages, their allocator, and prefixes that are met again."""

import random

import pytest
import torch
from conftest import decode, tiny_model, tokens

import cache as caches
from cache import OutOfPages, Paged, Pool, SpecError, build

POLICIES = ["full", *(name for name in caches.POLICIES if name != "full")]
FORMATS = [("float", 16), ("int", 8), ("int", 4), ("int", 2), ("kivi", 4), ("fp8", 8), ("nvfp4", 4), ("mxfp4", 4)]


def scattered(model, seed: int = 0) -> Pool:
    """The pool of a model's caches, with many free pages in random order."""
    pool = model.layers[0].attention.cache.layout.pool
    pool.enlarge(3 * sum(pool.expected.values()))
    order = list(pool.free)
    random.Random(seed).shuffle(order)
    pool.free.clear()
    pool.free.update(dict.fromkeys(order))
    return pool


@pytest.mark.parametrize(("form", "bits"), FORMATS)
@pytest.mark.parametrize("name", POLICIES)
def test_paged_is_dense_bitwise(name, form, bits, model):
    """Two sequences, prompts beyond the budget, evictions, a second chunk: under a random permutation of pages."""
    if name == "keydiff" and form == "kivi":
        pytest.skip("refused, and tested where that is")
    options = dict(bits=bits, format=form, residual=None if bits == 16 else 8)
    if name != "full":
        options["budget"] = 160 if form == "kivi" else 96
    ids = tokens(190, 2)
    want = None
    for page in (0, 1, 3, 16, 32, 128):
        if page % 32 and form == "kivi":
            continue
        model.setup_caches(build(name, page_size=page, **options), 2, 200)
        if page:
            pool = scattered(model, page)
        logits = decode(model, ids[:, :174], 165)
        chunk = model.prefill(ids[:, 174:182], start=174, room=10)
        later = model(ids[:, 182:183], torch.full((2, 1), 182))[:, 0]
        got = torch.cat([logits, chunk[:, None], later[:, None]], 1)
        want = got if want is None else want
        assert torch.equal(got, want), (page, (got - want).abs().max())
        if page:
            tables = [layer.attention.cache.layout.table for layer in model.layers]
            assert page > 60 or any((t.diff(dim=-1) < 0).any() for t in tables)  # it was scattered indeed
            assert pool.used == sum(len(h) for x in model.layers for b in x.attention.cache.layout.pages for h in b)
            held = sum(int((layer.attention.cache.slot_pos >= 0).sum()) for layer in model.layers)
            heads = 3 * 2 * 3
            room = 35 if build(name).policy().appends else 0  # that was asked for
            assert held <= pool.used * page < held + heads * (page + room + (32 if form == "kivi" else 0))


def test_pages_between_prompts(model):
    """A, B, A on one cache equals fresh runs, and nothing is left in the pool."""
    spec = build("snapkv:window=8", budget=40, bits=4, residual=8, page_size=16)
    a, b = tokens(90), tokens(60, seed=2)
    model.setup_caches(spec, 1, 120)
    runs = [decode(model, x, 50) for x in (a, b, a)]
    assert torch.equal(runs[0], runs[2])
    model.setup_caches(spec, 1, 120)
    assert torch.equal(decode(model, b, 50), runs[1])
    layers = [layer.attention.cache for layer in model.layers]
    for cache in layers:
        cache.reset()
    pool = layers[0].layout.pool
    assert pool.used == 0
    assert not any(pool.refs)
    assert sorted(pool.free) == list(range(len(pool.refs)))


@pytest.mark.parametrize("page", [1, 16])
def test_ragged_heads_free_real_pages(page):
    """adakv: what heads keep is what the pool holds, in bytes."""
    model = tiny_model()
    budget, prompt = 48, 200
    model.setup_caches(build("adakv:window=8", budget=budget, page_size=page), 1, prompt)
    model.prefill(tokens(prompt))
    layers = [layer.attention.cache for layer in model.layers]
    kept = torch.stack([(cache.slot_pos >= 0).sum(-1)[0] for cache in layers])
    assert (kept.sum(1) == 3 * budget).all()
    assert len(set(kept.flatten().tolist())) > 3
    pool = layers[0].layout.pool
    assert pool.used == int((-(-kept // page)).sum())
    assert sum(part.nbytes for part in pool.parts.values()) == len(pool.refs) * page * 20 * 4 * 2
    if page == 1:
        assert len(pool.refs) == pool.used == 3 * 3 * budget
    dense = build("adakv:window=8", budget=budget)
    model.setup_caches(dense, 1, prompt)
    model.prefill(tokens(prompt))
    largest = [layer.attention.cache for layer in model.layers]
    assert sum(part.nbytes for part in pool.parts.values()) < sum(
        x.nbytes for cache in largest for store in (cache.k_store, cache.v_store) for x in store.stored
    )


def test_pyramid_layers_hold_different_numbers_of_pages(model):
    spec = build("pyramid:window=8", budget=64, page_size=16)
    model.setup_caches(spec, 1, 200)
    model.prefill(tokens(200), room=0)
    held = [sum(map(len, layer.attention.cache.layout.pages[0])) for layer in model.layers]
    assert held == [3 * -(-n // 16) for n in spec.slots(200, 3)]
    assert held[0] > held[-1]


def test_memory_counts_a_pool_once(model):
    model.setup_caches(build(page_size=32), 1, 64)
    model.prefill(tokens(64))
    layers = [layer.attention.cache for layer in model.layers]
    pool = layers[0].layout.pool
    parts = sum(part.nbytes for part in pool.parts.values())
    assert parts == 64 * 3 * 3 * 2 * 20 * 4
    rows = sum(x.nbytes for cache in layers for x in cache.rows().values())
    assert caches.memory(layers) == parts + rows


@pytest.mark.parametrize("size", [-1, 2**20, 1.5])
def test_page_sizes_that_are_refused(size):
    with pytest.raises(SpecError, match="--page-size"):
        build(page_size=size)


def test_a_unit_is_not_torn_apart():
    with pytest.raises(SpecError, match="a multiple of 32"):
        build(bits=4, format="kivi", page_size=16)
    build(bits=4, format="kivi", page_size=64)


# ---------------------------------------------------------------------------------------------------------------------
# The allocator


class Sequences:
    """Texts in the pages of a pool, written and read as caches do it, beside plain lists that say what is right."""

    HEADS, LANES = 2, 6

    def __init__(self, page: int, pages: int, seed: int):
        self.pool, self.page, self.random = Pool(page, pages, "cpu"), page, random.Random(seed)
        self.layout = Paged(self.LANES, self.HEADS, self.pool, "cpu")
        self.layout.allocate(512)
        self.part = self.pool.part(("tokens",), torch.zeros(self.pool.chunk, 1, dtype=torch.int64))
        self.texts: list[list[int] | None] = [None] * self.LANES

    def write(self, lane: int, first: int) -> None:
        """What a step or a prompt does: a text's tokens from the first-th on. Head h writes token * 2 + h."""
        text = self.texts[lane]
        slot = torch.arange(first, len(text))
        for h in range(self.HEADS):
            row, at = self.layout.locate(torch.tensor(lane), torch.tensor(h), slot)
            self.part[row, at, 0] = torch.tensor(text[first:]) * 2 + h

    def read(self, lane: int, h: int) -> list[int]:
        row, at = self.layout.locate(torch.tensor(lane), torch.tensor(h), torch.arange(len(self.texts[lane])))
        return ((self.part[row, at, 0] - h) // 2).tolist()

    def grow(self, lane: int, n: int) -> bool:
        """Pages for n slots, and none of those that are written to is another's. False: there are not enough."""
        held, start = self.layout.pages[lane], len(self.texts[lane] or [])
        missing = sum(max(-(-n // self.page) - len(h), 0) for h in held)
        shared = [h for h in range(self.HEADS) if start % self.page and self.pool.refs[held[h][start // self.page]] > 1]
        if missing + len(shared) > len(self.pool.free):
            return False
        for h in range(self.HEADS):
            self.layout.grow(lane, h, n)
        for h in shared:
            self.layout.unshare(lane, h, start // self.page)
        return True

    def admit(self) -> None:
        if None not in self.texts:
            return
        lane, r = self.texts.index(None), self.random
        known = [t for t in self.texts if t] or [[]]
        text = r.choice(known)[: r.randrange(40)] + [r.randrange(3) for _ in range(r.randrange(1, 30))]
        found = self.pool.prefixes.find(text)
        for block in found:
            self.pool.share(block.pages)
        for h in range(self.HEADS):
            self.layout.pages[lane][h] += [block.pages[h] for block in found]
            self.layout.enter(lane, h)
        hit = len(found) * self.page
        assert hit < len(text)
        if not self.grow(lane, len(text)):
            self.layout.release(lane)
            return
        self.texts[lane] = text
        self.write(lane, hit)
        assert self.read(lane, 0) == self.read(lane, 1) == text  # what was found is what it says
        if r.random() < 0.8:
            self.pool.prefixes.publish(text, self.layout.pages[lane])

    def append(self) -> None:
        lane = self.running()
        if lane is None or len(self.texts[lane]) >= 500 or not self.grow(lane, len(self.texts[lane]) + 1):
            return
        self.texts[lane].append(self.random.randrange(3))
        self.write(lane, len(self.texts[lane]) - 1)

    def fork(self) -> None:
        lane = self.running()
        if lane is None or None not in self.texts:
            return
        to = self.texts.index(None)
        theirs = Paged(1, self.HEADS, self.pool, "cpu")
        theirs.pages = self.layout.pages[lane : lane + 1]
        self.layout.take_over(to, theirs, share=True)
        self.texts[to] = list(self.texts[lane])

    def leave(self) -> None:
        lane = self.running()
        if lane is not None:
            if self.random.random() < 0.5:
                self.pool.prefixes.publish(self.texts[lane], self.layout.pages[lane])
            self.layout.release(lane)
            self.texts[lane] = None

    def running(self) -> int | None:
        lanes = [i for i, text in enumerate(self.texts) if text is not None]
        return self.random.choice(lanes) if lanes else None

    def check(self, everything: bool) -> None:
        pool, held = self.pool, [page for lane in self.layout.pages for h in lane for page in h]
        assert sum(pool.refs) == len(held)
        assert pool.used + len(pool.free) == len(pool.refs)
        assert all((pool.refs[page] == 0) == (page in pool.free) for page in range(len(pool.refs)))
        if not everything:
            return
        assert [pool.refs[page] for page in range(len(pool.refs))] == [held.count(p) for p in range(len(pool.refs))]
        for lane, text in enumerate(self.texts):
            if text is not None:
                assert all(self.read(lane, h) == text for h in range(self.HEADS))
        content = self.part.view(len(pool.refs), self.page)
        for block in pool.prefixes.blocks.values():
            for h, page in enumerate(block.pages):
                assert ((content[page] - h) // 2).tolist() == list(block.tokens)


HASHES = {"good": caches.chained, "constant": lambda parent, tokens: 0, "forgetful": lambda parent, tokens: tokens}


@pytest.mark.parametrize(("seed", "kind"), [(0, "good"), (1, "good"), (2, "good"), (3, "constant"), (4, "forgetful")])
@pytest.mark.parametrize("page", [1, 3, 16, 64])
def test_random_operations(seed, page, kind):
    """10,000 of them: counts add up, nothing is written to that others read, no hash leads to other content."""
    s = Sequences(page, 400 // page + 8, seed)
    s.pool.prefixes.hash = HASHES[kind]
    ways = [s.admit, s.append, s.append, s.append, s.append, s.fork, s.leave]
    for i in range(10_000):
        s.random.choice(ways)()
        s.check(i % 97 == 0)
    while s.running() is not None:
        s.leave()
    s.check(True)
    assert s.pool.used == sum(s.pool.refs) == 0
    assert kind == "constant" or page > 16 or s.pool.prefixes.blocks


def test_pages_come_back_oldest_first_and_tails_before_heads():
    pool = Pool(4, 6, "cpu")
    a, b = pool.claim(3), pool.claim(2)
    assert a + b == [0, 1, 2, 3, 4]
    pool.release(a)
    pool.release(b)
    assert pool.claim(6) == [5, 2, 1, 0, 4, 3]
    with pytest.raises(OutOfPages):
        pool.claim(1)


def test_a_block_is_lost_with_any_of_its_pages():
    pool = Pool(2, 6, "cpu")
    pages = [pool.claim(2), pool.claim(2)]  # of two heads
    pool.prefixes.publish([5, 6, 7, 8], pages)
    first, second = pool.prefixes.find([5, 6, 7, 8, 9])
    assert first.pages == [0, 2]
    assert second.pages == [1, 3]
    assert len(pool.prefixes.find([5, 6, 7, 8])) == 1  # the last token is always computed
    for held in pages:
        pool.release(held)
    assert len(pool.prefixes.find([5, 6, 7, 8, 9])) == 2  # not when it is freed,
    assert pool.claim(3) == [4, 5, 1]
    assert pool.prefixes.find([5, 6, 7, 8, 9]) == [first]  # but when it is used again
    assert second not in pool.prefixes.of_page.values()


def test_a_hash_only_says_where_to_look():
    pool = Pool(2, 8, "cpu")
    pool.prefixes.hash = lambda parent, tokens: 0
    pool.prefixes.publish([1, 2], [pool.claim(1)])
    assert len(pool.prefixes.find([1, 2, 3])) == 1
    assert pool.prefixes.find([2, 1, 3]) == []
    pool.prefixes.publish([3, 4], [pool.claim(1)])
    assert pool.prefixes.find([1, 2, 3]) == []
    assert len(pool.prefixes.find([3, 4, 5])) == 1


def test_a_block_follows_its_own_parent_only():
    """A hash that forgets what came before: the same tokens after others are not taken for it."""
    pool = Pool(2, 8, "cpu")
    pool.prefixes.hash = lambda parent, tokens: tokens
    pool.prefixes.publish([1, 2, 7, 7], [pool.claim(2)])
    pool.prefixes.publish([3, 4], [pool.claim(1)])
    assert len(pool.prefixes.find([3, 4, 7, 7, 9])) == 1
    assert len(pool.prefixes.find([1, 2, 7, 7, 9])) == 2


def test_the_same_tokens_after_others_are_another_block():
    pool = Pool(2, 8, "cpu")
    pool.prefixes.publish([1, 2, 7, 7], [pool.claim(2)])
    pool.prefixes.publish([3, 4], [pool.claim(1)])
    assert len(pool.prefixes.find([3, 4, 7, 7, 9])) == 1
    salted = Pool(2, 8, "cpu")
    salted.prefixes.salt = b"another model"
    assert salted.prefixes.key(None, (1, 2)) != pool.prefixes.key(None, (1, 2))


def test_what_could_be_mistaken_is_told_apart():
    """Neither a token's digits nor a block's beginning can be read in two ways."""
    assert caches.chained(b"", (1, 23)) != caches.chained(b"", (12, 3))
    parent = caches.chained(b"", (1,))
    assert caches.chained(parent, (2,)) != caches.chained(b"", (1, 2))
