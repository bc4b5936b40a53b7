"""cache.py: which token occupies a slot, how a slot is written down, where a slot lives. Attention reads slots.

    KVCache    owns attention. Decode is four verbs: place -> put -> attend -> observe.
    Policy     which token: full, window, snapkv, pyramid. A policy is a `score`; the base class is "newest wins".
    Store      how: a number format is a pair of pure functions on the last dim, `encode` and `decode`.
    Residual   the newest R tokens and the first few, exact, laid over any store.
    Dense      where: one page per sequence.
    build      the only place where names are strings.

Conventions, since public implementations differ. A budget counts slots per KV head averaged over layers, sinks and
observation window included. Scores are float32, a mean over the query group, per KV head; keys and values are never
repeated. Kept tokens stay sorted by position and keep their original rotation; a query's position is the number of
tokens seen, never the number of slots in use. The first token generated after a prompt sees all of it; what comes
later, a second turn included, sees what was kept.

Shapes: B sequences, H KV heads, G query heads per KV head, T new tokens, S slots, D head dim, L layers. `pos` [B,T] is
a token's true position; `slot_pos` [B,H,S] is the position held by each slot, -1 where empty, and the only mask.

Every buffer is mutated in place and keeps its address while a sequence decodes; nothing raises inside `forward`.
"""

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from kernels import CHUNK

RESIDUAL = 128  # newest tokens that a quantized cache also holds exactly, unless told otherwise (KIVI's, 2402.02750)
SINK = 4  # first tokens that it also holds exactly: their keys are unlike all others and take much of the attention


class SpecError(ValueError):
    """A cache that cannot be built: one sentence that names the flag, what was given and what would work."""


# ---------------------------------------------------------------------------------------------------------------------
# The cache


class KVCache(nn.Module):
    """One layer's keys and values. `cache(q, k, v, pos)` is all that a model needs to know of it.

    Buffers: slot_pos int32 [B,H,S], and whatever policy, stores and residual hold. `fit` sizes them for a prompt,
    outside of any graph; from then on shapes and addresses stand still.
    """

    slot_pos: Tensor

    def __init__(
        self,
        policy: "Policy",
        k_store: "Store",
        v_store: "Store",
        layout: "Dense",
        residual: "Residual | None",
        plan: Callable[[int], int],
    ):
        """plan: length of a prompt -> how many slots this layer may give to it."""
        super().__init__()
        self.policy, self.k_store, self.v_store = policy, k_store, v_store
        self.layout, self.residual, self.plan = layout, residual, plan
        empty = torch.empty(layout.batch, layout.heads, 0, dtype=torch.int32, device=k_store.device)
        self.register_buffer("slot_pos", empty, persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """q [B,H*G,T,D], k and v [B,H,T,D], pos [B,T] -> what attention reads, [B,H*G,T,D]."""
        if q.shape[2] > 1:
            return self.prefill(q, k, v, pos)
        slot = self.policy.place(self.slot_pos, 1)
        self.put(slot, k, v, pos)
        y, mass = self.attend(q.unflatten(1, (k.shape[1], -1)).squeeze(3), pos[:, 0])
        self.policy.observe(mass)
        return y.to(q.dtype).flatten(1, 2).unsqueeze(2)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """A whole prompt, or a later chunk on top of what is cached: attend first, then store what earns a slot."""
        T, S = k.shape[2], self.slot_pos.shape[2]
        if not (self.slot_pos >= 0).any():
            y = kernels.causal_attention(q, k, v)
            index = self.policy.keep(q, k, v, min(self.plan(T), T, S))  # [B,H,n]
            self.put(self.policy.place(self.slot_pos, index.shape[-1]), k, v, pos, index)
            return y
        old_k, old_v = self.read(pos[:, 0] - 1)  # what is new is not stored yet
        y = kernels.attend_chunk(q, torch.cat([old_k, k], 2), torch.cat([old_v, v], 2), self.slot_pos >= 0)
        for t in range(0, T, self.policy.stride(S)):  # the tokens of one `place` get slots of their own
            part = slice(t, t + self.policy.stride(S))
            slot = self.policy.place(self.slot_pos, k[:, :, part].shape[2])
            self.put(slot, k[:, :, part], v[:, :, part], pos[:, part])
        return y

    def put(self, slot: Tensor, k: Tensor, v: Tensor, pos: Tensor, index: Tensor | None = None) -> None:
        """Write tokens: k and v [B,H,T,D], pos [B,T]; slot [B,H,T], or [B,H,n] with index [B,H,n], the kept ones."""
        pos = pos[:, None].expand(k.shape[:3])
        if self.residual is not None:
            slot_of = slot if index is None else torch.full_like(pos, -1).scatter(2, index, slot)
            self.residual.put(slot_of, k, v, pos)
        if index is not None:
            k, v, pos = take(k, index), take(v, index), pos.gather(2, index)
        where = self.layout.locate(slot)
        self.k_store.put(where, k.float())
        self.v_store.put(where, v.float())
        self.slot_pos[(*rows(slot), slot)] = pos.to(torch.int32)

    def attend(self, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor | None]:
        """One query a head over all slots: q [B,H,G,D], pos [B] -> y [B,H,G,D] float32, mass [B,H,S] or None."""
        q = q.float() * q.shape[-1] ** -0.5
        live = self.slot_pos >= 0
        scores = []
        if self.residual is not None:  # a token that is held exactly is read there, not from its codes
            live = live & ~self.residual.covers(self.slot_pos, pos)
            scores = [self.residual.dot(q)]
        weights, total = kernels.softmax([self.k_store.dot(q, live), *scores])
        y = self.v_store.mix(weights[0])
        if self.residual is not None:
            y = y + self.residual.mix(weights[1])
        if not self.policy.learns:
            return y / total, None
        mass = (weights[0] / total).sum(2)[..., : self.slot_pos.shape[2]]
        if self.residual is not None:
            mass = mass.scatter_add(2, self.residual.slot.clamp(min=0).long(), (weights[1] / total).sum(2))
        return y / total, mass

    def read(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """What attention sees at position pos [B]: k and v [B,H,S,D], decoded, or exact where held exactly."""
        S = self.slot_pos.shape[2]
        k, v = self.k_store.read()[:, :, :S], self.v_store.read()[:, :, :S]
        return (k, v) if self.residual is None else self.residual.overlay(k, v, self.slot_pos, pos)

    def fit(self, prompt: int, start: int, room: int, limit: int) -> None:
        """Size the buffers for `prompt` tokens from position `start` on and `room` tokens after them.

        A new sequence (start 0) empties the cache. A policy that appends gets room for what comes, and more of it when
        the sequence is continued; one that evicts while decoding has what its budget says from the start, at most
        `limit`, the longest that the sequence can become.
        """
        slots = self.slot_pos.shape[2]
        if not self.policy.appends:
            slots = slots if start else min(self.plan(prompt), limit)
        elif start == 0:
            slots = self.plan(prompt) + room
        else:
            slots = max(slots, int((self.slot_pos >= 0).sum(-1).max()) + prompt + room)
        if slots != self.slot_pos.shape[2]:
            self.allocate(slots)
        if start == 0:
            self.reset()

    def allocate(self, slots: int) -> None:
        """Buffers for `slots` slots a head. Slots that were there before keep their content."""
        self.policy.allocate(self.layout, self.slot_pos.shape[2], slots, self.slot_pos.device)
        self.slot_pos = resized(self.slot_pos, 2, slots, -1)
        for store in (self.k_store, self.v_store):
            store.allocate(self.layout, slots)

    def reset(self) -> None:
        """Empty: buffer by buffer what a new cache of this size holds."""
        for buffer in self.buffers():
            buffer.zero_()
        self.slot_pos.fill_(-1)
        if self.residual is not None:
            self.residual.slot.fill_(-1)

    def bookkeeping(self) -> list[Tensor]:
        """The buffers that say what is where. With these put back, a step done again does the same again."""
        residual = [] if self.residual is None else [self.residual.slot]
        return [self.slot_pos, *residual, *self.policy.buffers()]

    def nbytes(self) -> int:
        """Bytes of all live buffers: codes, scales, zeros, residual, slot_pos, and what the policy remembers."""
        return sum(b.numel() * b.element_size() for b in self.buffers())


def rows(index: Tensor) -> tuple[Tensor, Tensor]:
    """Indices that go with index [B,H,n] to address buffer[b, h, index]. (Inductor writes those in place, but copies
    the whole buffer for a scatter.)"""
    B, H, _ = index.shape
    return torch.arange(B, device=index.device)[:, None, None], torch.arange(H, device=index.device)[:, None]


def take(x: Tensor, index: Tensor) -> Tensor:
    """x [B,H,T,D], index [B,H,n] -> [B,H,n,D]."""
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[-1]))


def resized(old: Tensor, dim: int, size: int, fill: int = 0) -> Tensor:
    """A copy of `old` with `size` entries along dim, new ones set to `fill`: never garbage, 0 * NaN is NaN.

    The size is marked dynamic: layers differ in it, and one graph must serve them all and the next prompt too.
    """
    new = old.new_full((*old.shape[:dim], size, *old.shape[dim + 1 :]), fill)
    n = min(size, old.shape[dim])
    new.narrow(dim, 0, n).copy_(old.narrow(dim, 0, n))
    torch._dynamo.maybe_mark_dynamic(new, dim)
    return new


# ---------------------------------------------------------------------------------------------------------------------
# Policies: which token occupies a slot. A new one is a class with a `score`, and a line in POLICIES.


class Policy(nn.Module):
    """Newest wins: the first `sink` tokens stay, the others leave in order of age.

    A subclass overrides `score(q, k, v) -> [B,H,T]`: what each token of a prompt is worth to each KV head. Whatever the
    scores, the first `sink` and the last `recent` tokens stay. A policy that learns while it decodes sets `learns` and
    overrides `observe(mass)`, mass [B,H,S] being the attention that each slot has just received, and `place`.
    """

    appends = False  # True: the prompt is compressed once, and later tokens are appended in room kept free for them
    learns = False  # True: `observe` is given mass, which costs a pass over the scores

    def __init__(self, sink: int = 4, recent: int = 32):
        super().__init__()
        self.sink, self.recent = sink, recent

    def allocate(self, layout: "Dense", slots_before: int, slots: int, device: torch.device) -> None:
        """Buffers of the policy's own, for more or fewer slots than before. `count` [B]: tokens placed so far."""
        if hasattr(self, "count"):
            self.count.clamp_(max=slots_before)  # tokens beyond that went over older ones
        else:
            self.register_buffer("count", torch.zeros(layout.batch, dtype=torch.int64, device=device), persistent=False)

    def score(self, q, k, v):
        return torch.arange(k.shape[2], device=k.device, dtype=torch.float32).expand(k.shape[:3])

    def observe(self, mass):
        pass

    def budgets(self, budget: int, prompt: int, n_layer: int) -> list[int]:
        """Slots for a prompt, layer by layer. Their sum is n_layer * budget, and never more than the prompt has."""
        return [min(budget, prompt) if self.appends else budget] * n_layer

    def protect(self, T: int, device: torch.device) -> Tensor:
        """bool [T]: sinks and recent tokens are never victims."""
        t = torch.arange(T, device=device)
        return (t < self.sink) | (t >= T - self.recent)

    def keep(self, q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        """The n tokens of a prompt that get a slot: q [B,H*G,T,D], k and v [B,H,T,D] -> index [B,H,n], ascending."""
        T = k.shape[2]
        if n >= T:
            return torch.arange(T, device=k.device).expand(k.shape[:3])
        score = self.score(q, k, v).masked_fill(self.protect(T, k.device), float("inf"))
        return score.topk(n, -1).indices.sort(-1).values

    def place(self, slot_pos: Tensor, T: int) -> Tensor:
        """The slots [B,H,T] of the next T tokens, at most `stride` of them: free ones, then the oldest but the sinks.

        Slots are filled in order, so a counter finds the oldest: no search over S, whatever its size.
        """
        S = slot_pos.shape[2]
        n = self.count[:, None] + torch.arange(T, device=slot_pos.device)  # [B,T]
        self.count.add_(T)  # in place: += would rebind the attribute
        slot = torch.where(n < S, n, S - self.stride(S) + (n - S) % self.stride(S))
        return slot[:, None].expand(-1, slot_pos.shape[1], -1)

    def stride(self, slots: int) -> int:
        """How many tokens can be placed before one falls on another."""
        return max(slots - self.sink, 1)


class Full(Policy):
    """Every token stays."""

    appends = True

    def __init__(self):
        super().__init__(sink=0, recent=0)

    def budgets(self, budget, prompt, n_layer):
        return [prompt] * n_layer


class Window(Policy):
    """The first `sink` tokens and the newest ones (StreamingLLM's cache, 2309.17453, at original positions)."""

    def __init__(self, sink: int = 4):
        super().__init__(sink, recent=0)


class SnapKV(Policy):
    """What the last `window` queries of the prompt look at, smoothed over neighbours (2404.14469).

    Pooling covers the tokens before the window and, at their edges, averages over the neighbours that exist.
    """

    appends = True

    def __init__(self, window: int = 64, kernel: int = 5, pool: str = "avg", sink: int = 0):
        super().__init__(sink, recent=window)
        if kernel % 2 == 0 or kernel > 999 or pool not in ("avg", "max") or window < 1:
            raise SpecError(
                f"kernel={kernel}, pool={pool}, window={window}: kernel must be odd and below 1000, pool avg or max, "
                "window at least 1"
            )
        self.kernel, self.pool = kernel, pool

    def score(self, q, k, v):
        mass = kernels.window_mass(q, k, self.recent)[..., : -self.recent]
        if self.pool == "avg":
            mass = F.avg_pool1d(mass, self.kernel, 1, self.kernel // 2, count_include_pad=False)
        else:
            mass = F.max_pool1d(mass, self.kernel, 1, self.kernel // 2)
        return F.pad(mass, (0, self.recent))


class PyramidKV(SnapKV):
    """SnapKV with more slots for the lower layers, fewer for the upper ones, and the same total (2406.02069).

    Beyond the window, layer budgets fall linearly from 2B - B/beta to B/beta, where B is their mean.
    """

    def __init__(self, window: int = 16, kernel: int = 5, pool: str = "avg", sink: int = 0, beta: float = 4.0):
        super().__init__(window, kernel, pool, sink)
        if not 1 <= beta < float("inf"):
            raise SpecError(f"beta={beta:g}: must be a number from 1 (all layers alike) up")
        self.beta = beta

    def budgets(self, budget, prompt, n_layer):
        if budget >= prompt or n_layer == 1:
            return [min(budget, prompt)] * n_layer
        mean = Fraction(budget - self.recent)
        bottom = max(mean / Fraction(self.beta), Fraction(self.sink + 1))
        top = min(2 * mean - bottom, Fraction(prompt - self.recent))  # a layer cannot keep more than there is
        step = 2 * (top - mean) / (n_layer - 1)
        # Exact total: round the sum of the first n layers, n * top - step * (0 + 1 + .. + n-1), not each layer.
        ends = [int(n * top - step * (n * (n - 1) // 2) + Fraction(1, 2)) for n in range(n_layer + 1)]
        return [self.recent + b - a for a, b in itertools.pairwise(ends)]


POLICIES: dict[str, type[Policy]] = {"full": Full, "window": Window, "snapkv": SnapKV, "pyramid": PyramidKV}


# ---------------------------------------------------------------------------------------------------------------------
# Stores: how a slot is written down. A new format is an `encode` and its `decode`, and a line in FORMATS.


class Store(nn.Module):
    """Keys or values as they are: a number format is `encode(x) -> parts` and `decode(*parts) -> x` on the last dim.

    Each part is a buffer, chunk by chunk of C slots. The first part is [B,H,n,d,C] for keys, where a query meets all
    channels of a slot, and [B,H,n,C,d] for values, where a channel meets all slots. Further parts (scales and the like,
    few numbers a slot) are always [B,H,n,d,C], so that those of many slots fill a vector register. `dot` and `mix` may
    read parts without decoding them; those of the base class decode.
    """

    def __init__(self, is_key: bool, dim: int, dtype: torch.dtype, device, bits: int = 16, group: int = 0):
        """dim: head dim; dtype: the model's; group: channels that share a scale, where a format has any."""
        super().__init__()
        self.is_key, self.dtype, self.bits, self.group = is_key, dtype, bits, group
        self.names = []
        self.dim, self.device = dim, torch.device(device)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [..,D] float32 -> parts [..,d]."""
        return (x.to(self.dtype),)

    def decode(self, *parts: Tensor) -> Tensor:
        return parts[0]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.names)

    def allocate(self, layout: "Dense", slots: int) -> None:
        """Buffers for `slots` slots: their widths and dtypes are whatever `encode` makes of one vector."""
        sample = self.encode(torch.zeros(self.dim, device=self.device))
        for i, part in enumerate(sample):
            shape = (part.shape[-1], CHUNK) if self.slots_last(i) else (CHUNK, part.shape[-1])
            old = self.parts[i] if len(self.names) > i else part.new_zeros(layout.batch, layout.heads, 0, *shape)
            # At least two chunks: to the compiler a size of 1 is a constant, and would get a graph of its own.
            self.register_buffer(f"part{i}", resized(old, 2, max(-(-slots // CHUNK), 2)), persistent=False)
        self.names = [f"part{i}" for i in range(len(sample))]

    def slots_last(self, i: int) -> bool:
        """Is part i [B,H,n,d,C]?"""
        return self.is_key or i > 0

    def put(self, where: tuple[Tensor, ...], x: Tensor) -> None:
        """x [B,H,T,D] float32 to the places `where` that the layout located."""
        b, h, chunk, lane = where
        for i, (part, code) in enumerate(zip(self.parts, self.encode(x), strict=True)):
            part[(b, h, chunk, slice(None), lane) if self.slots_last(i) else (b, h, chunk, lane)] = code

    def decoded(self) -> Tensor:
        """All slots, [B,H,n,C,D]."""
        return self.decode(*(part.mT if self.slots_last(i) else part for i, part in enumerate(self.parts)))

    def read(self) -> Tensor:
        """All slots, [B,H,n*C,D], in the model's dtype."""
        return self.decoded().flatten(2, 3).to(self.dtype)

    def dot(self, q: Tensor, live: Tensor) -> Tensor:
        """q [B,H,G,D] float32, live [B,H,S] -> scores [B,H,G,n*C], -inf where a slot is not live."""
        return kernels.dot(q, (self.decoded().mT,), live)

    def mix(self, p: Tensor) -> Tensor:
        """p [B,H,G,n*C] float32 -> weighted sum of the values [B,H,G,D]."""
        return kernels.mix(p, (self.decoded(),))


class IntStore(Store):
    """Integers of 8, 4 or 2 bits, packed; each token has a scale and a minimum for every `group` channels.

    Vectors are rotated first (2404.00456): that spreads a key's outlier channels over all, and makes per-token groups
    as accurate as the per-channel ones that would have to wait for a group of tokens to fill.
    """

    def __init__(self, is_key, dim, dtype, device, bits, group):
        super().__init__(is_key, dim, dtype, device, bits, group)
        fits = [g for g in range(1, min(group, dim) + 1) if dim % g == 0 and g % (8 // bits) == 0]
        if not fits:
            raise SpecError(f"--bits {bits}: head_dim {dim} is not a multiple of {8 // bits}; use more bits")
        self.group = fits[-1]
        self.rotation = kernels.rotation(dim, self.device)

    def encode(self, x):
        x = kernels.rotate(x, self.rotation).unflatten(-1, (-1, self.group))  # [..,D/group,group]
        low, high = x.aminmax(dim=-1)
        # The codes are for the scale and minimum as they are stored: rounding those first costs no accuracy later.
        scale = ((high - low) / (2**self.bits - 1)).clamp(max=65504).half()
        zero = low.clamp(-65504, 65504).half()
        step = torch.where(scale > 0, scale, 1).float()  # a constant group is its minimum
        codes = ((x - zero.float()[..., None]) / step[..., None]).round().clamp(0, 2**self.bits - 1)
        return kernels.pack(codes, self.bits).flatten(-2), torch.cat([scale, zero], -1)

    def decode(self, codes, scale_zero):
        scale, zero = scale_zero.float().chunk(2, -1)
        planes = kernels.unpack(codes.unflatten(-1, (scale.shape[-1], -1)), self.bits)
        x = torch.cat(planes, -1) * scale[..., None] + zero[..., None]
        return kernels.rotate(x.flatten(-2), self.rotation)  # its own inverse

    def dot(self, q, live):
        return kernels.dot(kernels.rotate(q, self.rotation), self.parts, live, self.bits, self.group)

    def mix(self, p):  # the sum of rotated values is the rotated sum: undo it once
        return kernels.rotate(kernels.mix(p, self.parts, self.bits, self.group), self.rotation)


FORMATS: dict[str, type[Store]] = {"int": IntStore}
AUTO = {8: "int", 4: "int", 2: "int"}


class Residual(nn.Module):
    """The newest `length` tokens and the first `sink`, exact, laid over any pair of stores.

    Token p lives in row p while p < sink, else in row sink + p % length: no queue, nothing to flush. Every token also
    has its codes in a slot, so growing out of the ring costs nothing. A row counts only while its token still holds a
    slot of that head (`slot` [B,H,rows], else -1), so that eviction means the same with and without a residual.
    """

    def __init__(self, length: int, sink: int, layout: "Dense", dim: int, dtype: torch.dtype, device):
        super().__init__()
        self.length, self.sink = length, sink
        B, H, rows = layout.batch, layout.heads, sink + length
        self.register_buffer("k", torch.zeros(B, H, dim, rows, dtype=dtype, device=device), persistent=False)
        self.register_buffer("v", torch.zeros(B, H, rows, dim, dtype=dtype, device=device), persistent=False)
        self.register_buffer("slot", torch.full((B, H, rows), -1, dtype=torch.int32, device=device), persistent=False)

    def row(self, pos: Tensor) -> Tensor:
        return torch.where(pos < self.sink, pos, self.sink + pos % self.length)

    def put(self, slot: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Tokens k and v [B,H,T,D] at pos [B,H,T] with their slots [B,H,T], -1 for a token that got none."""
        T = k.shape[2]
        evicted = (self.slot[..., None] == slot[:, :, None]).any(-1)  # whose slot is taken now
        self.slot.masked_fill_(evicted, -1)
        # Two tokens of one call must not meet in a row: of a long prompt, the first ones, then the last ones over them.
        for part in [slice(0, T)] if T <= self.length else [slice(0, self.sink), slice(T - self.length, T)]:
            row = self.row(pos[:, :, part])
            b, h = rows(row)
            self.k[b, h, :, row] = k[:, :, part]
            self.v[b, h, row] = v[:, :, part]
            self.slot[b, h, row] = slot[:, :, part].to(torch.int32)

    def covers(self, slot_pos: Tensor, pos: Tensor) -> Tensor:
        """bool like slot_pos [B,H,S]: is that token held here when the newest one is at pos [B]?"""
        return (slot_pos < self.sink) | (slot_pos > (pos[:, None, None] - self.length).to(torch.int32))

    def dot(self, q: Tensor) -> Tensor:
        """q [B,H,G,D] float32 -> scores [B,H,G,rows], -inf where a row's token has been evicted."""
        score = (q.unsqueeze(-1) * self.k.float().unsqueeze(2)).sum(-2)
        return score.masked_fill((self.slot < 0)[:, :, None], float("-inf"))

    def mix(self, p: Tensor) -> Tensor:
        """p [B,H,G,rows] float32 -> weighted sum of the values [B,H,G,D]."""
        return (p.unsqueeze(-1) * self.v.float().unsqueeze(2)).sum(-2)

    def overlay(self, k: Tensor, v: Tensor, slot_pos: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [B,H,S,D] with every token that is held here replaced by its exact form."""
        row = self.row(slot_pos.clamp(min=0).long())
        held = ((slot_pos >= 0) & self.covers(slot_pos, pos))[..., None]
        exact_k, exact_v = take(self.k.mT, row), take(self.v, row)
        return torch.where(held, exact_k, k), torch.where(held, exact_v, v)


# ---------------------------------------------------------------------------------------------------------------------
# Layout: where slot s of sequence b lives


class Dense:
    """One page per sequence: slot s of sequence b is lane s % C of chunk s // C of page b."""

    def __init__(self, batch: int, heads: int):
        self.batch, self.heads = batch, heads

    def locate(self, slot: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """slot [B,H,T] -> indices (page, head, chunk, lane) into a store's buffers."""
        page, head = rows(slot)
        return page, head, slot // CHUNK, slot % CHUNK


# ---------------------------------------------------------------------------------------------------------------------
# Names


@dataclass(frozen=True)
class CacheSpec:
    """What `build` returns: a recipe for one KVCache a layer, for `model.setup_caches(spec, batch, max_seq_len)`."""

    name: str
    policy: Callable[[], Policy]
    budget: int | float
    bits: int
    format: str
    residual: int
    group: int
    layout: str = "dense"

    def slots(self, prompt: int, n_layer: int) -> list[int]:
        """Slots per KV head that each layer may give to a prompt of that many tokens."""
        policy, budget = self.policy(), self.budget
        if isinstance(budget, float):  # a fraction of a short prompt never falls below what the policy needs
            budget = max(round(budget * prompt), policy.sink + policy.recent + 1)
        return policy.budgets(budget, prompt, n_layer)

    def __call__(
        self, n_layer: int, batch: int, heads: int, dim: int, max_seq_len: int, dtype: torch.dtype, device
    ) -> list[KVCache]:
        """heads: KV heads; dim: head dim; dtype: what 16 bits means, the model's own."""
        length = min(self.residual, max_seq_len)
        slots = functools.lru_cache(lambda prompt: self.slots(prompt, n_layer))  # every layer asks for the same plan

        def layer(i: int) -> KVCache:
            layout = Dense(batch, heads)
            k_store, v_store = (self.store(is_key, dim, dtype, device) for is_key in (True, False))
            residual = Residual(length, SINK, layout, dim, dtype, device) if length else None
            return KVCache(self.policy(), k_store, v_store, layout, residual, lambda T: slots(T)[i])

        return [layer(i) for i in range(n_layer)]

    def store(self, is_key: bool, dim: int, dtype: torch.dtype, device) -> Store:
        if self.bits == 16:
            return Store(is_key, dim, dtype, device)
        return FORMATS[self.format](is_key, dim, dtype, device, self.bits, self.group)


def build(
    cache: str = "full",
    *,
    budget: int | float | None = None,
    bits: int = 16,
    format: str = "auto",
    residual: int | None = None,
    group: int | None = None,
) -> CacheSpec:
    """A cache from names.

    cache: `full`, or `NAME[:key=value,..]` with the arguments of the policy's class, as in `snapkv:window=32,pool=max`.
    budget: slots per KV head, averaged over layers, sinks and window included: a count (int), or a fraction of the
    prompt (float up to 1.0). Default 0.2. bits: 16 (the model's dtype), 8, 4 or 2; format: auto or one of FORMATS.
    residual: how many of the newest tokens are also kept exactly, and the first 4; default 128 below 16 bits.
    group: channels that share a scale. Raises SpecError, which names the flag, what was given and what would work.
    """
    name, _, rest = cache.partition(":")
    if name not in POLICIES:
        raise SpecError(f"--cache {name}: no such policy; choose from {', '.join(POLICIES)}")
    arguments = parse_arguments(name, rest)
    try:
        policy = POLICIES[name](**arguments)
    except SpecError as error:
        raise SpecError(f"--cache {cache}: {error}") from None
    if not isinstance(bits, int) or bits not in (16, 8, 4, 2):
        raise SpecError(f"--bits {bits}: choose 16, 8, 4 or 2")
    if format not in ("auto", *FORMATS):
        raise SpecError(f"--format {format}: no such format; choose from auto, {', '.join(FORMATS)}")
    if bits == 16:
        for flag, value in {"format": format, "residual": residual, "group": group}.items():
            if value not in (None, "auto"):
                raise SpecError(f"--{flag} {value}: means nothing at 16 bits; give --bits 8, 4 or 2 as well")
    if residual is not None and (not isinstance(residual, int) or residual < 0):
        raise SpecError(f"--residual {residual}: give a number of tokens, 0 or more")
    if group is not None and group < 8:
        raise SpecError(f"group {group}: give a number of channels, 8 or more")
    if budget is not None and name == "full":
        raise SpecError(f"--budget {budget}: full keeps every token; choose --cache {', '.join(list(POLICIES)[1:])}")
    return CacheSpec(
        name,
        lambda: POLICIES[name](**arguments),
        check_budget(name, policy, 0.2 if budget is None else budget),
        bits,
        "float" if bits == 16 else AUTO[bits] if format == "auto" else format,
        0 if bits == 16 else RESIDUAL if residual is None else residual,
        group or 32,
    )


def check_budget(name: str, policy: Policy, budget: int | float) -> int | float:
    least = policy.sink + policy.recent + 1
    if not isinstance(budget, (int, float)):
        raise SpecError(f"--budget {budget}: give a number")
    if isinstance(budget, float) and budget > 1 and budget.is_integer():
        budget = int(budget)
    if not (budget >= 1 if isinstance(budget, int) else 0 < budget <= 1):
        raise SpecError(
            f"--budget {budget}: give a number of slots, 1 or more, or a fraction of the prompt such as 0.2"
        )
    if isinstance(budget, int) and budget < least:
        raise SpecError(
            f"--budget {budget}: {name} always keeps {policy.sink} sinks and {policy.recent} recent tokens; "
            f"give at least {least}, or 1.0 for everything"
        )
    return budget


def parse_arguments(name: str, text: str) -> dict[str, int | float | str]:
    """`key=value,..` with the types of the policy's defaults."""
    known = {p.name: p.default for p in inspect.signature(POLICIES[name]).parameters.values()}
    assert inspect.Parameter.empty not in known.values(), f"{name}: every argument of a policy needs a default"
    arguments = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key in arguments:
            raise SpecError(f"--cache {name}:{text}: {key} is given twice")
        if key not in known:
            raise SpecError(f"--cache {name}:{item}: unknown key; {name} takes {', '.join(known) or 'none'}")
        try:
            convert = {"true": True, "false": False}.__getitem__ if isinstance(known[key], bool) else type(known[key])
            arguments[key] = convert(value)
        except (ValueError, KeyError):
            raise SpecError(f"--cache {name}:{item}: {key} takes a value like {known[key]}") from None
        if not isinstance(arguments[key], str) and arguments[key] < 0:
            raise SpecError(f"--cache {name}:{item}: {key} cannot be negative")
    return arguments
