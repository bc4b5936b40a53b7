"""Policies: each is what its paper says, by an independent, slow implementation; and what they have in common."""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from conftest import decode, tiny_model, tokens

import cache as caches
import kernels
from cache import build

ROOT = Path(__file__).parent.parent


# ---------------------------------------------------------------------------------------------------------------------
# Definitions. Loops over everything ever seen, float64; nothing here is shared with the code under test.


def rotated(x, pos, frequencies=None):
    """x [D], rotated by pos positions; frequencies: [D/2], to base 10,000 unless given."""
    half = len(x) // 2
    frequencies = [10000 ** (-i / half) for i in range(half)] if frequencies is None else frequencies
    angle = pos * torch.tensor(frequencies, dtype=torch.float64)
    a, b = x[:half], x[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def pooled(mass, kernel, pool):
    near = [mass[max(t - kernel // 2, 0) : t + kernel // 2 + 1] for t in range(len(mass))]
    return torch.stack([x.mean() if pool == "avg" else x.max() for x in near])


class Definition:
    """One layer of one sequence. q [H,G,T,D], k and v [H,T,D] of all tokens; held[h]: positions that a head still has.

    Told what the code holds, it checks that this is what the paper keeps. Values that differ by rounding alone may be
    decided either way.
    """

    def __init__(self, spec, slots, prompt_slots):
        self.name, self.policy, self.slots, self.prompt_slots = spec.name, spec.policy(), slots, prompt_slots
        self.sink = self.policy.sink
        recent = self.policy.recent
        self.recent = int(recent * slots) if 0 < recent < 1 else recent
        self.evicts = self.name not in ("full", "snapkv", "pyramid", "adakv", "expected")

    def prompt(self, q, k, v, kept):
        """kept[h]: sorted positions that the code keeps of a prompt."""
        self.q, self.k, self.v = q, k, v
        H, _, T, _ = q.shape
        n = min(self.prompt_slots, T)
        value = self.prompt_value()  # [H,T]
        self.mass = value.clone() if self.name in ("h2o", "tova") else None
        protected = set(range(self.sink)) | set(range(max(T - self.recent, 0), T))
        if n == T:
            assert all(x == list(range(T)) for x in kept)
        elif self.name == "random":
            assert all(len(x) == n and protected <= set(x) for x in kept)
        else:
            part = int(self.policy.floor * (n - len(protected))) if self.name == "adakv" else n - len(protected)
            rest = []  # what heads share
            for h in range(H):
                order = sorted((t for t in range(T) if t not in protected), key=lambda t: -value[h, t])
                assert protected <= set(kept[h])
                own = [t for t in order if t in set(kept[h])]
                self.best(value[h], own[:part], [t for t in order if t not in own[:part]])
                rest += [(float(value[h, t]), t in own) for t in order if t not in own[:part]]
            assert sum(map(len, kept)) == H * n
            if self.name == "adakv":
                assert min(x for x, taken in rest if taken) >= max(x for x, taken in rest if not taken) - 1e-7
        self.held = [list(x) for x in kept]

    def best(self, value, taken, left):
        if taken and left:
            assert value[taken].min() >= value[left].max() - 1e-6 * value.abs().max()

    def prompt_value(self):
        q, k, v, p = self.q, self.k, self.v, self.policy
        H, G, T, D = q.shape
        row = lambda h, g, t: (k[h, : t + 1] @ q[h, g, t] / math.sqrt(D)).softmax(-1)  # noqa: E731
        value = torch.zeros(H, T, dtype=torch.float64)
        if self.name in ("window", "streaming"):
            value += torch.arange(T)
        elif self.name == "h2o":
            for h, g, t in itertools.product(range(H), range(G), range(T)):
                value[h, : t + 1] += row(h, g, t)
        elif self.name == "tova":
            value += sum(row(h, g, T - 1) for h in range(H) for g in range(G)) / H / G
        elif self.name in ("snapkv", "pyramid", "adakv"):
            before = T - p.recent
            for h in range(H):
                mass = torch.zeros(before, dtype=torch.float64)
                for g, t in itertools.product(range(G), range(before, T)):
                    mass += row(h, g, t)[:before] / p.recent / G
                value[h, :before] = pooled(mass, p.kernel, p.pool)
        elif self.name == "expected":
            turn = torch.zeros(D, D, dtype=torch.float64)
            for t in range(T, T + p.future):
                turn += torch.stack([rotated(x, t) for x in torch.eye(D, dtype=torch.float64)], 1) / p.future
            for h, g in itertools.product(range(H), range(G)):
                plain = torch.stack([rotated(q[h, g, t], -t) for t in range(p.sink, T)])
                mean, covariance = turn @ plain.mean(0), turn @ torch.cov(plain.T, correction=0) @ turn.T
                logit = torch.stack([mean @ x / math.sqrt(D) + x @ covariance @ x / (2 * D) for x in k[h, p.sink :]])
                value[h, p.sink :] += logit.softmax(-1) / G
            value *= v.norm(dim=-1)
        elif self.name == "keynorm":
            value -= k.norm(dim=-1)
        elif self.name == "keydiff":
            for h in range(H):
                value[h] = self.unlike(k[h])
        return value

    def unlike(self, k):
        anchor = torch.stack([x / x.norm() for x in k]).mean(0)
        return torch.stack([-(x @ anchor) / x.norm() / anchor.norm() for x in k])

    def step(self, q, k, v, holds):
        """The next token, q [H,G,1,D]; holds[h]: set of positions that the code holds now. -> what is read [H,G,D]."""
        self.q, self.k, self.v = torch.cat([self.q, q], 2), torch.cat([self.k, k], 1), torch.cat([self.v, v], 1)
        p, (H, G, _, D) = self.k.shape[1] - 1, q.shape
        for h in range(H):
            gone = set(self.held[h]) - holds[h]
            assert holds[h] - set(self.held[h]) == {p}
            assert len(gone) == int(self.evicts and len(self.held[h]) == self.slots)
            for victim in gone:
                allowed = [j for j in self.held[h] if self.sink <= j <= p - self.recent]
                assert victim in allowed
                value = self.value(h)
                left = [j for j in allowed if j != victim]
                if left and self.name != "random":
                    assert value[victim] <= min(value[j] for j in left) + 2e-5 * max(map(abs, value.values()))
                self.held[h].remove(victim)
            self.held[h].append(p)
        y = torch.zeros(H, G, D, dtype=torch.float64)
        received = torch.zeros(H, p + 1, dtype=torch.float64)
        for h, g in itertools.product(range(H), range(G)):
            held, keys, query = self.held[h], self.k[h, self.held[h]], self.q[h, g, p]
            if self.name == "streaming":  # everything at its place in the cache
                order = sorted(held)
                keys = torch.stack([rotated(self.k[h, j], order.index(j) - j) for j in held])
                query = rotated(query, len(held) - 1 - p)
            weight = (keys @ query / math.sqrt(D)).softmax(-1)
            y[h, g] = weight @ self.v[h, held]
            received[h, held] += weight
        if self.name == "h2o":
            self.mass = torch.cat([self.mass, torch.zeros(H, 1)], 1) + received
        elif self.name == "tova":
            self.mass = (received.sum(0) / H / G).expand(H, -1)
        return y

    def value(self, h):
        """Of everything that head h holds, before a token comes: position -> value."""
        held = self.held[h]
        if self.name in ("h2o", "tova"):
            return {j: float(self.mass[h, j]) for j in held}
        if self.name == "keynorm":
            return {j: -float(self.k[h, j].norm()) for j in held}
        if self.name == "keydiff":
            return dict(zip(held, self.unlike(self.k[h, held]).tolist(), strict=True))
        return {j: float(j) for j in held}


class Checked(torch.nn.Module):
    """A cache under the eyes of one Definition for each sequence."""

    def enter(self):
        pass

    def leave(self, step):
        pass

    def __init__(self, cache, spec):
        super().__init__()
        self.cache, self.spec, self.errors = cache, spec, []

    def fit(self, *args):
        return self.cache.fit(*args)

    def holds(self, b):
        return [[int(p) for p in head if p >= 0] for head in self.cache.slot_pos[b]]

    def prefill(self, q, k, v, pos):
        y = self.cache.prefill(q, k, v, pos)
        T, slots = k.shape[2], self.cache.slot_pos.shape[2]
        n = self.cache.plan(T)
        self.rows = [Definition(self.spec, slots, n) for _ in range(len(k))]
        for b, row in enumerate(self.rows):
            holds = self.holds(b)
            assert all(x == sorted(x) for x in holds)
            row.prompt(q[b].double().unflatten(0, (k.shape[1], -1)), k[b].double(), v[b].double(), holds)
        return y

    def forward(self, q, k, v, pos):
        y = self.cache(q, k, v, pos)
        for b, row in enumerate(self.rows):
            query = q[b].double().unflatten(0, (k.shape[1], -1))
            expected = row.step(query, k[b].double(), v[b].double(), [set(x) for x in self.holds(b)]).flatten(0, 1)
            self.errors.append(float((y[b, :, 0] - expected).norm() / expected.norm()))
        return y


DEFINED = [
    "full",
    "window:sink=4",
    "streaming:sink=4",
    "h2o",
    "h2o:recent=20,sink=3",
    "tova",
    "tova:sink=2,recent=10",
    "snapkv:window=16",
    "snapkv:window=16,kernel=7,pool=max,sink=4",
    "pyramid:window=16",
    "adakv:window=16",
    "adakv:window=16,sink=2,floor=0.5",
    "expected",
    "keynorm",
    "keynorm:sink=2,recent=8",
    "keydiff",
    "keydiff:sink=4,recent=16",
    "random",
    "random:sink=4,recent=16",
]


@pytest.mark.parametrize("name", DEFINED)
def test_every_step_is_the_papers(name):
    """300 tokens, two sequences, 9/3 heads of 20 channels, 128 slots, layers of different size: what is kept and what
    is read at every step is what the definition says, over all keys and values ever seen."""
    model = tiny_model(n_layer=3)
    ids = torch.cat([tokens(300, seed=3), tokens(300, seed=4)])
    spec = build(name, budget=None if name == "full" else 128)
    model.setup_caches(spec, 2, 300)
    for layer in model.layers:
        layer.attention.cache = Checked(layer.attention.cache, spec)
    decode(model, ids, 220)
    errors = torch.tensor([layer.attention.cache.errors for layer in model.layers])
    assert errors.shape == (3, 160) and errors.max() < 1e-5
    for layer in model.layers:
        for row in layer.attention.cache.rows:
            evicted = [300 - len(held) for held in row.held]
            assert (sum(evicted) == 0) == (name == "full")


# ---------------------------------------------------------------------------------------------------------------------
# Scores and budgets


def kept(policy, q, k, n):
    """Positions [B,H,n] of the n tokens of a prompt that stay, ascending."""
    pos = torch.arange(k.shape[2]).expand(k.shape[0], -1)
    score = policy.score(q, k, k, pos) if n < k.shape[2] else torch.zeros(k.shape[:3])
    mask = policy.keep(score, pos[:, None].expand_as(score), n, policy.newest(n))
    return mask.nonzero()[:, 2].view(*k.shape[:2], n)


def naive_snapkv(q, k, window, kernel, pool):
    """From the definition, entry by entry."""
    B, H, T, D = k.shape
    q = q.view(B, H, -1, T, D)
    out = torch.zeros(B, H, T - window)
    for b in range(B):
        for h in range(H):
            mass = torch.zeros(T - window)
            for g in range(q.shape[2]):
                for t in range(T - window, T):
                    p = (k[b, h, : t + 1] @ q[b, h, g, t] * D**-0.5).softmax(-1)
                    mass += p[: T - window] / window / q.shape[2]
            for t in range(T - window):
                near = mass[max(t - kernel // 2, 0) : t + kernel // 2 + 1]
                out[b, h, t] = near.mean() if pool == "avg" else near.max()
    return out


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_snapkv_scores(pool):
    torch.manual_seed(0)
    q, k = torch.randn(2, 6, 30, 16) * 2, torch.randn(2, 2, 30, 16)
    policy = caches.SnapKV(window=6, kernel=5, pool=pool)
    expected = naive_snapkv(q, k, 6, 5, pool)
    torch.testing.assert_close(policy.score(q, k, k, None)[..., :24], expected)
    index = kept(policy, q, k, 14)
    assert torch.equal(index, index.sort(-1).values)
    for b in range(2):
        for h in range(2):
            mine, best = expected[b, h][index[b, h, :-6]].sort().values, expected[b, h].topk(8).values.sort().values
            torch.testing.assert_close(mine, best)  # by value: max pooling makes ties
            assert index[b, h, -6:].tolist() == list(range(24, 30))


def test_window_is_causal_inside_only():
    """Changing the last query changes only its own row's share: row T-2 does not see key T-1."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    a = kernels.window_mass(q, k, 4)
    k2 = k.clone()
    k2[:, :, -1] = 100.0  # seen by the last row alone
    b = kernels.window_mass(q[:, :, :-1], k2[:, :, :-1], 3)
    c = kernels.window_mass(q[:, :, :-1], k[:, :, :-1], 3)
    assert torch.equal(b, c)
    torch.testing.assert_close(a.sum(-1), torch.ones(1, 2))


def test_groups_with_equal_queries_are_one_head():
    torch.manual_seed(0)
    q, k = torch.randn(1, 3, 40, 16), torch.randn(1, 3, 40, 16)
    policy = caches.SnapKV(window=8)
    assert torch.equal(kept(policy, q, k, 20), kept(policy, q.repeat_interleave(3, 1), k, 20))


@pytest.mark.parametrize("policy", [caches.SnapKV(window=8, kernel=3), caches.PyramidKV(window=8, kernel=3)])
@pytest.mark.parametrize("layers", [1, 2, 3, 30])
def test_lengths_around_every_edge(policy, layers):
    w, budget = 8, 24
    lengths = {
        1,
        w - 1,
        w,
        w + 1,
        budget - 1,
        budget,
        budget + 1,
        2 * (budget - w) - 1,
        2 * (budget - w) + 1,
        100,
        1000,
    }
    for T in sorted(lengths):
        slots = policy.budgets(budget, T, layers)
        assert sum(slots) == layers * min(budget, T), T
        assert all(min(T, w + 1) <= n <= T for n in slots), T
        assert all(a >= b - 1 for a, b in itertools.pairwise(slots)), T  # falling, but for the rounding
        if T <= 100:
            torch.manual_seed(T)
            q, k = torch.randn(1, 6, T, 8), torch.randn(1, 2, T, 8)
            for n in set(slots):
                index = kept(policy, q, k, n)
                assert index.shape == (1, 2, n)
                assert (index[..., 1:] > index[..., :-1]).all()
                recent = min(w, T)
                assert torch.equal(index[..., -recent:], torch.arange(T - recent, T).expand(1, 2, -1))


@pytest.mark.parametrize("prompt", [7, 8, 9, 23, 24, 25, 31, 33])
@pytest.mark.parametrize("name", ["snapkv:window=8,kernel=3", "pyramid:window=8,kernel=3", "window:sink=4"])
def test_lengths_through_the_model(model, name, prompt):
    ids = tokens(prompt + 10)
    model.setup_caches(build(name, budget=24, bits=4, residual=8), 1, prompt + 10)
    model.prefill(ids[:, :prompt])
    live = [(layer.attention.cache.slot_pos >= 0).sum(-1) for layer in model.layers]
    assert sum(int(n[0, 0]) for n in live) == 3 * min(prompt, 24)
    assert decode(model, ids, prompt).isfinite().all()


def test_pyramid_vector():
    """PyramidKV's own setting, 128 slots, window 8, beta 20, 32 layers, with the total conserved."""
    slots = caches.PyramidKV(window=8, beta=20.0).budgets(128, 8000, 32)
    assert slots == [
        *(242, 235, 227, 220, 212, 206, 198, 190, 183, 176, 168, 162, 153, 147, 139, 131, 125, 117, 109, 103, 94, 88),
        *(80, 73, 66, 58, 50, 44, 36, 29, 21, 14),
    ]
    assert sum(slots) == 32 * 128
    assert len(set(caches.PyramidKV(window=8, beta=1.0).budgets(128, 8000, 32))) == 1


def test_pyramid_gives_back_what_a_short_prompt_cannot_use():
    slots = caches.PyramidKV(window=8, beta=20.0).budgets(128, 150, 32)
    assert slots[0] == 150 and sum(slots) == 32 * 128 and slots[-1] > 14


def test_window_keeps_sinks_and_the_newest(model):
    ids = tokens(100)
    model.setup_caches(build("window:sink=3", budget=20), 1, 100)
    decode(model, ids, 50)
    for layer in model.layers:
        held = layer.attention.cache.slot_pos.sort(-1).values
        assert held[0, 0].tolist() == [0, 1, 2, *range(83, 100)]


def test_query_position_is_tokens_seen():
    """Evict most of a prompt; the next query is rotated to its true position, not to the number of slots in use."""
    model = tiny_model(n_layer=1)
    ids = tokens(101)
    model.setup_caches(build("window:sink=0", budget=1.0), 1, 101)
    model.prefill(ids[:, :100], room=1)
    expected = model(ids[:, 100:], torch.tensor([[100]]))
    model.setup_caches(build("window:sink=0", budget=10), 1, 101)
    model.prefill(ids[:, :100], room=1)
    cache = model.layers[0].attention.cache
    evicted = model(ids[:, 100:], torch.tensor([[100]]))
    assert cache.slot_pos.max() == 100 and (cache.slot_pos >= 0).sum() == 30
    assert not torch.allclose(evicted, expected, atol=1e-3)  # something was evicted, and it mattered


@pytest.mark.parametrize("name", [n for n in DEFINED if n.count("=") < 2])
@pytest.mark.parametrize("heads,dim", [((4, 4), 20), ((6, 2), 64), ((7, 1), 96), ((16, 1), 128)])
def test_any_group_and_head_dim(name, heads, dim):
    model = tiny_model(n_head=heads[0], n_kv_head=heads[1], head_dim=dim, n_layer=1)
    spec = build(name, budget=None if name == "full" else 24)
    model.setup_caches(spec, 1, 70)
    model.layers[0].attention.cache = Checked(model.layers[0].attention.cache, spec)
    decode(model, tokens(70), 50)
    assert max(model.layers[0].attention.cache.errors) < 1e-5


def test_random_is_seeded_and_even():
    model = tiny_model(n_layer=2)
    kept = []
    for seed in (0, 0, 1):
        model.setup_caches(build(f"random:seed={seed}", budget=100), 1, 512)
        model.prefill(tokens(400), room=0)
        kept.append(torch.stack([layer.attention.cache.slot_pos[0] for layer in model.layers]))
    assert torch.equal(kept[0], kept[1]) and not torch.equal(kept[0], kept[2])
    sets = [set(head.tolist()) for head in torch.cat([kept[0], kept[2]]).flatten(0, 1)]
    for a, b in itertools.combinations(sets, 2):  # layers, heads and seeds are independent: 25 of 100 are shared
        assert 8 < len(a & b) < 45
    counts = torch.tensor([sum(100 * i <= p < 100 * i + 100 for s in sets for p in s) for i in range(4)])
    assert counts.sum() == 1200 and (counts - 300).abs().max() < 75


def test_column_sums_are_the_dense_ones():
    torch.manual_seed(0)
    q, k = torch.randn(2, 6, 150, 16) * 2, torch.randn(2, 2, 190, 16)
    live = torch.rand(2, 2, 40) < 0.7
    seen = torch.cat([live, torch.ones(2, 2, 150, dtype=torch.bool)], -1)
    seen = seen[:, :, None, None] & (torch.arange(190) <= 40 + torch.arange(150)[:, None])
    score = (q.unflatten(1, (2, 3)) @ k[:, :, None].mT / 4).double().masked_fill(~seen, float("-inf")).softmax(-1)
    mass = kernels.column_mass(q, k, live)
    torch.testing.assert_close(mass.double(), score.sum((2, 3)), atol=1e-5, rtol=0)
    torch.testing.assert_close(mass.sum(-1), torch.full((2, 2), 450.0), atol=1e-3, rtol=0)
    torch.testing.assert_close(kernels.window_mass(q, k, 9, live).double(), score[..., -9:, :].mean((2, 3)))
    mass = kernels.column_mass(q[:, :2, -64:], k[:, :, -64:])  # one head a group, no slots: as many as queries
    torch.testing.assert_close(mass.sum(-1), torch.full((2, 2), 64.0), atol=1e-4, rtol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Positions without end


@pytest.mark.parametrize("bits,residual", [(16, None), (4, 0), (4, 24), (4, 200)])
@pytest.mark.parametrize("sink", [0, 3, 40])
def test_streaming_is_rotating_everything_to_its_place(bits, residual, sink):
    """At true position 5,000, far beyond the model's 512: all keys rotated to 0 .. n-1, the query to n-1."""
    model = tiny_model(n_layer=1)
    model.setup_caches(build(f"streaming:sink={sink}", budget=60, bits=bits, residual=residual), 1, 6000)
    ids = tokens(5001)
    model.prefill(ids[:, :5000])
    model(ids[:, 5000:], torch.tensor([[5000]]))
    cache, q = model.layers[0].attention.cache, torch.randn(1, 3, 3, 20) * 3
    y, _ = cache.attend(q, torch.tensor([5000]))
    f = model.rope.frequencies.tolist()  # float32 numbers: the last bit makes 3e-4 radians here
    keys, values = (x[0].double() for x in cache.read(torch.tensor([5000])))
    for h in range(3):
        pos = cache.slot_pos[0, h].tolist()
        assert sorted(pos) == [*range(sink), *range(5001 - 60 + sink, 5001)]
        place = {p: i for i, p in enumerate(sorted(pos))}
        turned = torch.stack([rotated(x, place[p] - p, f) for x, p in zip(keys[h], pos, strict=True)])
        for g in range(3):
            weight = (turned @ rotated(q[0, h, g].double(), 59 - 5000, f) / math.sqrt(20)).softmax(-1)
            assert (y[0, h, g] - weight @ values[h]).norm() < 1e-5 * (weight @ values[h]).norm()


def test_streaming_has_no_end_and_window_has_one():
    model = tiny_model(n_layer=2, max_seq_len=64)
    model.setup_caches(build("streaming:sink=2", budget=30), 1, 10**6)
    ids = tokens(900)
    model.prefill(ids[:, :500])  # longer than the model's positions, in pieces
    first = model.layers[0].attention.cache
    before = [b.data_ptr() for b in first.buffers()]
    for t in range(500, 700):
        assert model(ids[:, t : t + 1], torch.full((1, 1), t)).isfinite().all()
    assert before == [b.data_ptr() for b in first.buffers()] and first.slot_pos.shape[2] == 30
    assert model.prefill(ids[:, 700:], start=700).isfinite().all()  # a second turn, longer than the positions
    assert sorted(first.slot_pos[0, 0].tolist()) == [0, 1, *range(872, 900)]
    with pytest.raises(ValueError, match="64 positions"):
        model.setup_caches(build("window:sink=2", budget=30), 1, 65)


def test_no_position_in_the_cache_passes_the_models(monkeypatch):
    """Whatever the budget: slots and the tokens that are read together stay within the positions that it knows."""
    model, seen = tiny_model(n_layer=2, max_seq_len=64), []
    attend = kernels.attend_chunk
    monkeypatch.setattr(kernels, "attend_chunk", lambda q, k, *rest: seen.append(k.shape[2]) or attend(q, k, *rest))
    for budget in (10, 60, 64, 1000, 0.9):
        model.setup_caches(build("streaming:sink=2", budget=budget), 1, 400)
        model.prefill(tokens(300))
        assert model.layers[0].attention.cache.slot_pos.shape[2] == min(56, 10 if budget == 10 else 56)
    assert 50 < max(seen) <= 64


def test_rotation_far_out_is_still_a_rotation():
    """At position 10^8 the difference of two positions is what counts, to 1e-4; in float32 it would be noise."""
    model = tiny_model()
    x, far = torch.randn(1, 1, 1, 20), torch.tensor([[10**8]])
    near = [kernels.apply_rope(x, model.rope(torch.tensor([[p]]))[:, None]) for p in (0, 7)]
    away = [kernels.apply_rope(x, model.rope(far + p)[:, None]) for p in (0, 7)]
    torch.testing.assert_close((near[0] * near[1]).sum(), (away[0] * away[1]).sum(), atol=1e-4, rtol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Budgets


@pytest.mark.parametrize("name", [n for n in DEFINED if n != "full"])
def test_totals_are_conserved(name):
    """Over layers and heads together, from a prompt of one token to one longer than anything."""
    model = tiny_model(n_layer=3)
    spec = build(name, budget=40)
    for T in (1, 2, 15, 16, 17, 39, 40, 41, 47, 48, 49, 79, 80, 81, 200):
        model.setup_caches(spec, 1, T + 2)
        model.prefill(tokens(T), room=2)
        total = sum(int((layer.attention.cache.slot_pos >= 0).sum()) for layer in model.layers)
        assert total == 3 * 3 * min(40, T), T


@pytest.mark.parametrize("name", [n for n in DEFINED if n != "full"])
def test_no_budget_is_too_small_to_run(name):
    """The smallest budget that is accepted works, and one less is refused with both numbers in the sentence."""
    least = build(name, budget=1.0).policy().least()
    model = tiny_model(n_layer=2)
    model.setup_caches(build(name, budget=least), 1, 120)
    assert decode(model, tokens(120), 90).isfinite().all()
    if least > 1:
        with pytest.raises(caches.SpecError, match=f"--budget {least - 1}.*{least}"):
            build(name, budget=least - 1)


def test_adakv_shares_one_budget_among_heads():
    """Total exact, floor kept, heads differ, and the memory is what the largest head needs, no more."""
    model = tiny_model(n_layer=3)
    spread = []
    for floor in (0.0, 0.2, 1.0):
        model.setup_caches(build(f"adakv:window=8,floor={floor}", budget=58), 1, 200)
        model.prefill(tokens(180), room=20)
        for layer in model.layers:
            kept = (layer.attention.cache.slot_pos >= 0).sum(-1)[0]
            assert kept.sum() == 3 * 58 and kept.min() >= 8 + int(floor * 50)
            assert layer.attention.cache.slot_pos.shape[2] == kept.max() + 20
            spread.append(int(kept.max() - kept.min()))
    assert min(spread[:6]) > 0 and max(spread[6:]) == 0 and sum(spread[:3]) >= sum(spread[3:6])


def test_pyramid_reference_budgets():
    """The authors' floor division: step 7 from 242 down, and 4272 slots where 4096 were asked for."""
    policy = caches.PyramidKV(window=8, beta=20.0, reference=True)
    assert policy.budgets(128, 8000, 32) == [242 - 7 * i for i in range(32)]
    assert sum(caches.PyramidKV(window=8, beta=20.0, reference=True).budgets(512, 8000, 16)) / 16 == 518.5
    assert policy.budgets(128, 200, 32) == [128] * 32 and policy.budgets(128, 100, 32) == [100] * 32
    assert sum(policy.budgets(64, 8000, 32)) / 32 == 71.5 and policy.budgets(128, 8000, 1) == [128]


# ---------------------------------------------------------------------------------------------------------------------
# Several sequences, several turns

RAGGED = ["full", "window:sink=2", "streaming:sink=2", "h2o", "tova", "snapkv:window=8", "pyramid:window=8"]
RAGGED += ["adakv:window=8", "expected", "keynorm", "keydiff", "random"]


def unique(n, seed):
    """No token twice: in the first layer its keys would have one norm, and rounding would decide between them."""
    return torch.randperm(97, generator=torch.Generator().manual_seed(seed))[:n]


@pytest.mark.parametrize("budget", [30, 0.4])
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("name", RAGGED)
def test_prompts_of_different_lengths_are_each_as_if_alone(name, bits, budget):
    """Two turns: what a row of a ragged batch answers, and holds, is what that sequence alone does."""
    spec = build(name, budget=None if name == "full" else budget, bits=bits, residual=None if bits == 16 else 12)
    model, rows = tiny_model(n_layer=2), [unique(97, s) for s in (1, 2, 3)]
    first, second, steps = (50, 9, 33), (7, 30, 1), 8

    def run(which):
        model.setup_caches(spec, len(which), 200)
        seen, out = [0] * len(which), []
        for lengths in (first, second):
            parts = [rows[i][s : s + lengths[i]] for i, s in zip(which, seen, strict=True)]
            out.append(model.prefill(parts, seen, room=steps))
            seen = [s + len(p) for s, p in zip(seen, parts, strict=True)]
            for _ in range(steps):
                tok = torch.stack([rows[i][s % 97] for i, s in zip(which, seen, strict=True)])[:, None]
                out.append(model(tok, torch.tensor(seen)[:, None])[:, 0])
                seen = [s + 1 for s in seen]
        return torch.stack(out, 1), [layer.attention.cache.slot_pos for layer in model.layers]

    together, held = run([0, 1, 2])
    for i in range(3):
        alone, kept = run([i])
        error = (together[i] - alone[0]).norm() / alone.norm()
        assert error < (1e-5 if bits == 16 else 5e-3)  # 4 bits: a code on a rounding edge may fall either way
        for a, b in zip(held, kept, strict=True):
            n = b.shape[2]
            assert torch.equal(a[i, :, :n], b[0]) and (a[i, :, n:] == -1).all()


@pytest.mark.parametrize(
    "name", ["h2o:recent=6,sink=2", "tova:recent=3", "keynorm:recent=4", "keydiff:sink=2", "random"]
)
@pytest.mark.parametrize("turn", [1, 5, 70])
def test_a_second_turn_is_judged_together_with_what_is_held(name, turn):
    """Values by definition, over cached slots and new tokens together; the best 30 stay, the last token always."""
    model = tiny_model(n_layer=1)
    ids = unique(97, 5)[None]
    spec = build(name, budget=30)
    model.setup_caches(spec, 1, 200)
    seen = []
    cache = model.layers[0].attention.cache
    model.prefill(ids[:, :20], room=100)  # with slots to spare
    before, rank = cache.slot_pos.clone(), cache.policy.rank.clone()
    old = cache.read(torch.tensor([19]))[0][0].double()
    forward = cache.prefill
    cache.prefill = lambda q, k, v, pos: seen.append((q[0].double(), k[0].double())) or forward(q, k, v, pos)
    model.prefill(ids[:, 20 : 20 + turn], start=20)
    (q, k), policy = seen[0], cache.policy
    for h in range(3):
        held = [int(p) for p in before[0, h] if p >= 0]
        keys = torch.cat([old[h, : len(held)], k[h]])
        where = torch.tensor(held + list(range(20, 20 + turn)))
        mass = torch.zeros(len(held), dtype=torch.float64)
        mass = torch.cat([mass, torch.zeros(turn)])
        every = torch.zeros_like(mass)
        for j, t in itertools.product(range(9), range(turn)):
            n = len(held) + t + 1
            group = keys if j // 3 == h else torch.cat([old[j // 3, : len(held)], k[j // 3]])
            weight = (group[:n] @ q[j, t] / math.sqrt(20)).softmax(-1)
            mass[:n] += weight * (j // 3 == h)
            every[:n] += weight / 9 * (t == turn - 1)
        if spec.name == "h2o":
            value = mass + torch.cat([rank[0, h, : len(held)], torch.zeros(turn)])
        elif spec.name == "tova":
            value = every
        elif spec.name == "keynorm":
            value = -keys.norm(dim=-1)
        elif spec.name == "keydiff":
            value = Definition.unlike(None, keys)
        else:
            value = torch.cat([rank[0, h, : len(held)], policy.score(None, k[None], None, where[None, -turn:])[0, h]])
        last = 20 + turn - 1
        sure = (where < policy.sink) | (where > last - max(policy.recent, 1))
        best = value.masked_fill(sure, math.inf).topk(min(30, len(where))).indices
        got = cache.slot_pos[0, h]
        assert set(got[got >= 0].tolist()) == set(where[best].tolist())


# ---------------------------------------------------------------------------------------------------------------------
# Memory


class Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of what was allocated inside and still lived, at their highest."""

    def __init__(self):
        super().__init__()
        self.storages, self.bytes = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {x.untyped_storage()._cdata for x in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(x)}
        out = function(*args, **(kwargs or {}))
        self.storages = {key: s for key, s in self.storages.items() if not s[0].expired()}
        for x in torch.utils._pytree.tree_leaves(out):
            if torch.is_tensor(x) and (storage := x.untyped_storage())._cdata not in known:
                from torch.multiprocessing.reductions import StorageWeakRef

                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.bytes = max(self.bytes, sum(n for _, n in self.storages.values()))
        return out


@pytest.mark.parametrize("name,window", [("snapkv", 64), ("pyramid", 16), ("adakv", 64), ("tova", 1), ("h2o", 96)])
def test_scoring_needs_little_memory(name, window):
    """At most H * G * window * T floats, for h2o one block of queries; for tova, whose window is one query, also the
    result, twice, and a float32 copy of 512 keys."""
    B, H, G, T, D = 1, 3, 3, 6000, 64
    q, k = torch.randn(B, H * G, T, D, dtype=torch.bfloat16), torch.randn(B, H, T, D, dtype=torch.bfloat16)
    policy = build(name).policy()
    judge = policy.score if isinstance(policy, caches.SnapKV) else lambda *x: policy.weigh(*x, None)
    pos = torch.arange(T)[None]
    with Peak() as peak:
        judge(q, k, k, pos)
    more = 2 * H * T + H * 512 * (D + 2 * G) if name == "tova" else 0  # numbers, of four bytes each
    assert 4 * H * T < peak.bytes <= 4 * (H * G * window * T + more)


@pytest.mark.parametrize("name", ["expected", "keynorm", "keydiff"])
def test_scoring_by_keys_needs_little_memory(name):
    """Less than the float32 keys of the layer."""
    q, k = torch.randn(1, 9, 6000, 64, dtype=torch.bfloat16), torch.randn(1, 3, 6000, 64, dtype=torch.bfloat16)
    policy = build(name).policy().attach(0, torch.arange(32) / 32.0, 8192)
    with Peak() as peak:
        (policy.weigh if name == "keydiff" else policy.score)(
            q, k, k, torch.arange(6000)[None], *[None] * (name == "keydiff")
        )
    assert 0 < peak.bytes < 4 * k.numel() * (3 if name == "expected" else 1.5)


# ---------------------------------------------------------------------------------------------------------------------
# What is written about them


def test_help_explains_every_policy_and_argument(capsys):
    import inspect

    import generate

    with pytest.raises(SystemExit) as stop:
        generate.main(["--cache", "help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name, policy in caches.POLICIES.items():
        lines = text.split(f"\n{name} ")[1].splitlines()
        assert name in ("full", "random") or re.search(r"\d{4}\.\d{5}", lines[0])
        for p in inspect.signature(policy).parameters.values():
            assert f"{p.name}={str(p.default).lower()}" in lines[1]
            assert f"\n{p.name} " in text


@pytest.mark.parametrize(
    "name",
    ["snapkv:window=64,kernel=5,pool=avg,sink=0", "pyramid:window=16,beta=4", "window:sink=4", "tova:sink=0,recent=1"]
    + ["keynorm:sink=0,recent=0", "h2o:recent=64,sink=4", "h2o:recent=0", "streaming:sink=0", "expected:sink=0"],
)
def test_arguments_have_one_name_everywhere(name):
    policy = build(name).policy()
    for key, value in (item.split("=") for item in name.split(":")[1].split(",")):
        have = getattr(policy, "recent" if key == "window" else key)
        assert have == type(have)(value)


def test_the_readmes_table_is_true():
    """Every policy has its row, with its paper and its number of lines of code."""
    import ast
    import inspect
    import textwrap

    def code_lines(cls):
        source = textwrap.dedent(inspect.getsource(cls))
        text = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                text |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        lines = enumerate(source.splitlines(), 1)
        return sum(i not in text and bool(line.strip()) and line.strip()[0] != "#" for i, line in lines)

    rows = re.findall(r"^\| `(\w+)`.*\| (\d+) \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert rows == [(name, str(code_lines(cls))) for name, cls in caches.POLICIES.items()]
    for name, cls in caches.POLICIES.items():
        row = next(
            x for x in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if x.startswith(f"| `{name}`")
        )
        assert set(re.findall(r"\d{4}\.\d{5}", inspect.getdoc(cls).splitlines()[0])) == set(
            re.findall(r"\d{4}\.\d{5}", row)
        )
        assert ("at every step" in row) == (not cls.appends)
