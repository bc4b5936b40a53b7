"""cache.py: which token occupies a slot, how a slot is written down, where a slot lives. Attention reads slots.

    KVCache    owns attention. Decode is four verbs: place -> put -> attend -> observe.
    Policy     which token. A policy is a `score`; the base class is "newest wins", `Ranked` evicts at every step.
    Store      how: a number format is a pair of pure functions on the last dim, `encode` and `decode`.
    Codes      what all formats of few bits share, int, fp8, nvfp4, mxfp4 and kivi.
    Residual   the newest R tokens and the first few, exact, laid over any store.
    Dense      where: a place of its own for every sequence.
    Paged      where: pages of one pool that all sequences and layers share, on demand, by a block table.
    Selection  which chunks a step reads, where it does not read all.
    Memory     in which memory: the device's, or below it `Disk` and `Host`, from where `Staged` layers come up.
    Pool       the allocator, on the host: claim, share, release; `Paged.unshare` copies a page that others refer to.
    Prefixes   full pages by what they hold, for texts that begin alike.
    build      the only place where names are strings.

Conventions, since public implementations differ. A budget counts slots per KV head averaged over layers, sinks and
observation window included. Scores are float32, a mean over the query group, per KV head; keys and values are never
repeated. Kept tokens stay sorted by position and keep their original rotation; a query's position is the number of
tokens seen, never the number of slots in use (but for `streaming`, which counts in the cache). The first token
generated after a prompt sees all of it; what comes later, a second turn included, sees what was kept.

Shapes: B sequences, H KV heads, G query heads per KV head, T new tokens, S slots, D head dim, L layers. `pos` [B,T] is
a token's true position; `slot_pos` [B,H,S] is the position held by each slot, -1 where empty, and the only mask.

Every buffer is mutated in place and keeps its address while a sequence decodes; nothing raises inside `forward`.
"""

import contextlib
import copy
import difflib
import functools
import hashlib
import inspect
import itertools
import math
import mmap
import os
import re
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from kernels import CHUNK

RESIDUAL = 128  # newest tokens that a quantized cache also holds exactly, unless told otherwise (KIVI's, 2402.02750)
SCRATCH = ("layout.table", "layout.newest", "selection.chosen")  # buffers of a cache that say nothing of what it holds
SINK = 4  # first tokens that it also holds exactly: their keys are unlike all others and take much of the attention
LONGEST = 2**31 - 1  # tokens of a text: `slot_pos` is int32


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
        selection: "Selection | None" = None,
    ):
        """plan: length of a prompt -> how many slots this layer may give to it."""
        super().__init__()
        self.layout, self.policy, self.k_store, self.v_store = layout, policy, k_store, v_store
        self.residual, self.plan, self.selection = residual, plan, selection
        self.room, self.origin = 0, None
        self.unit = policy.unit = layout.unit = max(k_store.unit, v_store.unit)
        layout.reads_all = selection is None
        self.whole = self.unit if selection is None else CHUNK  # slots are allocated in multiples of that
        # For whoever measures: watch(cache, q, k, v, pos), arguments as for `Policy.admit`, is called after a prompt or
        # a chunk of one was stored, while its full keys and values are still there.
        self.watch: Callable | None = None
        empty = torch.empty(layout.batch, layout.heads, 0, dtype=torch.int32, device=k_store.device)
        self.register_buffer("slot_pos", empty, persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """q [B,H*G,T,D], k and v [B,H,T,D], pos [B,T] -> what attention reads, [B,H*G,T,D]. In between `enter` and
        `leave`."""
        if q.shape[2] > 1:
            return self.prefill(q, k, v, pos)
        self.k_store.begin(k, pos == 0)
        self.v_store.begin(v, pos == 0)
        slot = self.policy.place(self, q, k, v, pos)
        if self.selection is not None:
            self.selection.add(slot, k, self.policy.count)
        self.layout.wrote(slot)
        self.put(slot, k, v, pos)
        self.policy.measure(self, slot)
        y, mass = self.attend(q.unflatten(1, (k.shape[1], -1)).squeeze(3), pos[:, 0])
        if self.policy.learns:
            self.policy.observe(mass)
        return y.to(q.dtype).flatten(1, 2).unsqueeze(2)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """A whole prompt, or a later chunk on top of what is cached: attend first, then store what earns a slot."""
        live, keys = self.slot_pos >= 0, k
        if not live.any():
            y, live = kernels.causal_attention(q, k, v), None
        else:
            old_k, old_v = (
                x.masked_fill(~live[..., None], 0) for x in self.read(pos[:, 0] - 1)
            )  # new is not stored yet
            keys, values = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
            near = self.nearer(q, pos[:, 0]) if self.policy.relative else None
            y = kernels.attend_chunk(q, keys, values, live, near, self.policy.sink)
        self.store(q, keys, v, pos, live)
        return y

    def store(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, live: Tensor | None = None) -> None:
        """Keep what earns a slot of tokens that are read together; arguments as for `Policy.admit`."""
        if live is None:
            self.k_store.begin(k)
            self.v_store.begin(v)
        slot = self.policy.admit(self, q, k, v, pos, live)
        need = -(-(int(slot.max()) + 1 + self.room) // self.whole) * self.whole
        if need > self.slot_pos.shape[2] and self.policy.appends:
            self.allocate(need)  # heads that share a budget: only now is it known what the largest wants
        if self.policy.appends:
            self.layout.hold((slot.amax(-1) + 1 + self.room).clamp(max=self.slot_pos.shape[2]))
        else:
            self.layout.hold(self.policy.capacity[:, None].expand(slot.shape[:2]))
        self.put(slot, k[:, :, -q.shape[2] :], v, pos)
        self.policy.measure(self)
        if self.selection is not None:
            self.selection.measure(self.k_store, self.slot_pos)
        if self.watch is not None:
            self.watch(self, q, k, v, pos)

    def put(self, slot: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Write tokens k and v [B,H,T,D] at pos [B,T] to their slots [B,H,T]; with T > 1, -1 for one that gets none."""
        pos = pos[:, None].expand(k.shape[:3])
        if self.residual is not None:
            self.residual.put(slot, k, v, pos, self.unit)
        b, h = rows(slot)
        if slot.shape[2] > 1:  # heads may keep different numbers of tokens
            b, h, t = (slot >= 0).nonzero(as_tuple=True)
            slot, k, v, pos = (x[b, h, t] for x in (slot, k, v, pos))
        if self.unit > 1:  # the first token of a unit finds the unit's former tokens gone
            vacate(self.slot_pos, slot, self.unit, b, h)
        self.k_store.put((b, h, slot), k.float())
        self.v_store.put((b, h, slot), v.float())
        self.slot_pos[b, h, slot] = pos.to(torch.int32)

    def attend(self, q: Tensor, pos: Tensor) -> tuple[Tensor, Tensor | None]:
        """One query a head over all slots: q [B,H,G,D], pos [B] -> y [B,H,G,D] float32, mass [B,H,S] or None."""
        plain, chunks, slot_pos = q, None, self.slot_pos
        q = kernels.written(q.float() * q.shape[-1] ** -0.5)
        stores = self.k_store.written(), self.v_store.written()
        native = kernels.has_native(plain, *stores)
        if self.selection is not None and self.selection.chosen.shape[2]:
            chunks, slot_pos = self.selection(q, slot_pos, self.k_store, plain if native else None)
        if native and not self.policy.relative:
            return self.attend_written(q, pos, *stores, slot_pos, chunks, plain)
        if kernels.has_kernel(q) and None not in stores:
            return self.attend_written(q, pos, *stores, slot_pos, chunks)
        live = slot_pos >= 0
        if self.residual is not None:  # a token that is held exactly is read there, not from its codes
            live = live & ~self.residual.covers(slot_pos, pos)
        scores = [self.k_store.dot(q, live, chunks)]
        if self.residual is not None:
            scores.append(self.residual.dot(q))
        if self.policy.relative and self.policy.sink:
            scores = self.ask_sinks(self.nearer(q, pos + 1), live, scores)
        weights, total = kernels.softmax(scores)
        y = self.v_store.mix(weights[0], chunks)
        if self.residual is not None:
            y = y + self.residual.mix(weights[1])
        y = kernels.written(y / total)
        if not self.policy.learns:
            return y, None
        mass = (weights[0] / total).sum(2)[..., : self.slot_pos.shape[2]]
        if self.residual is not None:
            mass = self.residual.spread((weights[1] / total).sum(2), mass, self.slot_pos, pos)
        return y, mass

    def attend_written(
        self,
        q: Tensor,
        pos: Tensor,
        k: kernels.Written,
        v: kernels.Written,
        slot_pos: Tensor,
        chunks: Tensor | None = None,
        plain: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`attend` by one kernel: q [B,H,G,D] float32, scaled; slot_pos of all slots, or of those of some chunks.
        plain: q as it was, which the one for a CPU wants."""
        ring, near, sinks = self.residual, None, 0
        table = self.layout.places(chunks, k.codes.shape[2])
        if chunks is not None:
            k, v = (
                w.picked(pick(w.opened, chunks) if w.opened is not None else None, self.layout.pool) for w in (k, v)
            )
        if self.policy.relative and self.policy.sink:
            near, sinks = self.nearer(q, pos + 1).contiguous(), self.policy.sink
        if ring is not None:
            ring = kernels.Ring(q, near, ring.k, ring.v, ring.slot, ring.length, ring.sink)
        if plain is not None:
            held = (ring.length, ring.sink) if ring else (0, 0)
            y, lse, logits = kernels.attend_native(self.k_store.query(plain.float()), k, v, slot_pos, pos, table, *held)
            logits = logits[..., : slot_pos.shape[2]]
            if ring is not None:
                *own, rest = self.residual.attend(q)
                y, lse = torch.cat([y, own[0]], 2), torch.cat([lse, own[1]], 2)
        else:
            asked = [x if x is None else self.k_store.query(x).contiguous() for x in (q, near)]
            y, lse, logits, rest = kernels.attend(
                asked[0], k, v, slot_pos, pos, ring, asked[1], sinks, self.policy.learns, table
            )
        share, whole = kernels.merge(lse)
        y = y * share[..., None]
        ours = y[:, :, -1] if ring else 0
        y = self.v_store.value(y[:, :, : y.shape[2] - (ring is not None)].sum(2)) + ours
        if not self.policy.learns:
            return y, None
        mass = (logits - whole[..., None]).exp().sum(2)
        if ring is not None:
            mass = self.residual.spread((rest - whole[..., None]).exp().sum(2), mass, self.slot_pos, pos)
        return y, mass

    def ask_sinks(self, q: Tensor, live: Tensor, scores: list[Tensor]) -> list[Tensor]:
        """scores, with those of the sinks, which are in the first slots, by a query q [B,H,G,D] of their own."""
        sink = self.policy.sink
        first = self.k_store.dot(q, live, chunks=-(-sink // CHUNK))[..., :sink]
        scores[0] = torch.cat([first, scores[0][..., sink:]], -1)
        if self.residual is not None:
            is_sink = (self.residual.slot >= 0) & (self.residual.slot < sink)
            scores[1] = torch.where(is_sink[:, :, None], self.residual.dot(q), scores[1])
        return scores

    def nearer(self, q: Tensor, seen: Tensor) -> Tensor:
        """q [B,*,T,D] as its positions would be if the `seen` [B] tokens so far were only those that are held."""
        held = (self.slot_pos[:, 0] >= 0).sum(-1)
        return kernels.turned(q, held - seen, self.policy.frequencies)

    def read(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """What attention sees at position pos [B]: k and v [B,H,S,D], decoded, or exact where held exactly."""
        S = self.slot_pos.shape[2]
        k, v = self.k_store.read()[:, :, :S], self.v_store.read()[:, :, :S]
        return (k, v) if self.residual is None else self.residual.overlay(k, v, self.slot_pos, pos)

    def fit(self, prompts: list[int], starts: list[int], room: int, limit: int) -> list[int]:
        """Size the buffers for prompts of these lengths, one a sequence, from positions `starts` on, and `room` tokens
        after them; `limit` is the longest that a sequence can become. Returns how many tokens of each may be
        read at once.

        A sequence that begins (start 0) is emptied. A policy that appends gets room for what comes, and more of it when
        a sequence goes on; one that evicts while decoding has what its budget says from the start.
        """
        policy, slots, begins = self.policy, self.slot_pos.shape[2], [start == 0 for start in starts]
        self.room, most = room, -(-limit // self.whole) * self.whole
        endless = policy.relative and limit > policy.positions
        if endless:
            most = longest_window(policy.positions)
        if policy.appends:
            held = (self.slot_pos >= 0).sum(-1).amax(-1).tolist()
            need = [room + (self.plan(T) if new else n + T) for T, new, n in zip(prompts, begins, held, strict=True)]
        else:
            size = policy.capacity.tolist() if slots else prompts
            need = [min(self.plan(T), most) if new else n for T, new, n in zip(prompts, begins, size, strict=True)]
        # Whole units: a policy that evicts has at most as many slots as it was given, one that appends at least.
        up = self.whole - 1 if policy.appends else 0
        need = [(n + up) // self.whole * self.whole for n in need]
        wanted = max(need) if all(begins) else max(slots, *need)
        self.layout.expect(wanted if policy.appends else max(need), len(need))
        if wanted != slots:
            if slots and policy.appends:
                self.k_store.close(policy.count > slots)  # tokens beyond that went over older ones
                policy.count.clamp_(max=slots)
            self.allocate(wanted)
        self.reset([b for b, new in enumerate(begins) if new])
        policy.capacity.copy_(torch.tensor([wanted] * len(need) if policy.appends else need))
        fits = [not endless or start + T <= policy.positions for T, start in zip(prompts, starts, strict=True)]
        return [T if fit else policy.positions - n for T, fit, n in zip(prompts, fits, need, strict=True)]

    def allocate(self, slots: int) -> None:
        """Buffers for `slots` slots a head. Slots that were there before keep their content."""
        if self.origin is not None:  # a lane: the memory is the whole cache's
            whole, row = self.origin
            whole.allocate(slots)
            narrow(self, whole, row)
            return
        self.policy.allocate(self.layout, slots, self.slot_pos.device)
        self.layout.allocate(slots)
        self.slot_pos = resized(self.slot_pos, 2, slots, -1)
        for store in (self.k_store, self.v_store):
            store.allocate(self.layout, slots)
        if self.selection is not None:
            self.selection.allocate(self.layout, slots)

    def enter(self) -> None:
        """Before the layer reads or is read: what it holds is where it can be computed with. For the model, around
        `forward`, since a compiled graph cannot wait."""
        self.layout.begin()
        for calls in kernels.RECORDING if self.layout.memory.away else ():
            calls.append((lambda: self.layout.begin, []))

    def leave(self, step: bool) -> None:
        """After that; step: it was a step, not a prompt."""
        self.layout.end(step)

    def lane(self, row: int) -> "KVCache":
        """Sequence `row` alone: a cache of one sequence in the same memory. State is only ever mutated in place."""
        view = narrow(copy.copy(self), self, row)
        view.origin = self, row
        return view

    def resize(self, slots: int) -> None:
        """Room for as many slots a head, while sequences go on: at least what the longest of them holds."""
        own = None if self.policy.appends else getattr(self.policy, "capacity", None)
        own = None if own is None else own.clone()
        self.allocate(slots)
        if own is not None:
            self.policy.capacity.copy_(own)

    def adopt(self, row: int, other: "KVCache", share: bool = False) -> None:
        """Sequence `row` becomes what `other`, a cache of one sequence in the same pool, holds, and takes over its
        pages, or shares them. Room for it has to be there (`resize`)."""
        self.reset([row])
        mine = self.rows()
        for name, theirs in other.rows().items():
            if name not in SCRATCH:
                part = mine[name][row]
                part[tuple(map(slice, theirs.shape[1:]))] = theirs[0]
        if self.policy.appends:
            self.policy.capacity[row] = self.slot_pos.shape[2]
        self.layout.take_over(row, other.layout, share)

    def resume(self, pages: list[list[int]], tokens: int) -> None:
        """A cache of one sequence begins with `tokens` tokens that each head's pages hold already."""
        self.allocate(-(-tokens // self.whole) * self.whole)
        self.reset([0])
        for h, held in enumerate(pages):
            self.layout.pages[0][h] += held
            self.layout.enter(0, h)
        self.slot_pos[0, :, :tokens] = torch.arange(tokens, dtype=torch.int32, device=self.slot_pos.device)
        self.policy.count.fill_(tokens)
        if self.selection is not None:
            self.selection.measure(self.k_store, self.slot_pos)

    def state(self) -> dict[str, Tensor]:
        """All that a cache of one sequence holds, as tensors that do not depend on the layout. (A policy that appends
        gives back the room that it has not used.)"""
        if self.policy.appends:
            used = int(filled(self.slot_pos).max())
            self.allocate(-(-max(used, 1) // CHUNK) * CHUNK)
        self.layout.begin()
        stored = self.parts()
        own = {name: x[0] for name, x in self.rows().items() if name not in SCRATCH and name not in stored}
        return own | {name: store.parts()[i][0] for name, (store, i) in stored.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """A cache of one sequence holds what `state` says. Raises ValueError or KeyError where that does not fit."""
        self.allocate(state["slot_pos"].shape[-1])
        self.reset([0])
        stored = self.parts()
        for name, x in self.rows().items():
            if name not in SCRATCH and name not in stored and (name in state or not name.startswith("selection.")):
                mine, theirs = x[0], state[name]
                ring = name.startswith("residual.")  # a longer or shorter one has the same tokens in its first rows
                if (
                    mine.dtype != theirs.dtype
                    or mine.dim() != theirs.dim()
                    or (mine.shape != theirs.shape and not ring)
                ):
                    raise ValueError(name)
                part = tuple(slice(min(a, b)) for a, b in zip(mine.shape, theirs.shape, strict=True))
                mine[part] = theirs[part]
        used = filled(self.slot_pos)
        self.layout.hold(used if self.policy.appends else self.policy.capacity[:, None].expand_as(used))
        for name, (store, i) in stored.items():
            mine, theirs = store.parts()[i][0], state[name]
            if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
                raise ValueError(name)
            self.layout.fill(store.stored[i], theirs, store.slots_last(i))
        own = {name for name in self.rows() if name.startswith("selection.") and name not in SCRATCH}
        if self.selection is not None and not own <= set(state):
            self.selection.measure(self.k_store, self.slot_pos)
        self.layout.end(step=False)

    def parts(self) -> "dict[str, tuple[Store, int]]":
        """Names of the stores' parts, and which those are."""
        both = ("k_store", self.k_store), ("v_store", self.v_store)
        return {f"{name}.{part}": (store, i) for name, store in both for i, part in enumerate(store.names)}

    def reset(self, sequences: list[int] | None = None) -> None:
        """Empty, all or some of the sequences: buffer by buffer what a new cache of this size holds."""
        sequences = range(len(self.slot_pos)) if sequences is None else sequences
        self.layout.begin()
        for b in sequences:
            self.layout.release(b)
        fill = {"slot_pos": -1, "residual.slot": -1, "policy.capacity": self.slot_pos.shape[2]}
        fill |= {"k_store.whole": 1, "v_store.whole": 1}
        for name, buffer in self.rows().items():
            for b in sequences:
                buffer[b] = fill.get(name, 0)
        self.layout.end(step=False)

    def rows(self) -> dict[str, Tensor]:
        """The buffers [B,..] that have a part for every sequence: all, but for a pool's, which its pages are in."""
        shared = {f"{name}.{part}" for name in ("k_store", "v_store") for part in getattr(self, name).pooled}
        return {name: buffer for name, buffer in self.named_buffers() if name not in shared}

    def bookkeeping(self) -> list[Tensor]:
        """The buffers that say what is where. With these put back, a step done again does the same again."""
        residual = [] if self.residual is None else [self.residual.slot]
        stored = self.k_store.stored if self.policy.rereads else []
        return [self.slot_pos, *residual, *self.policy.buffers(), *stored]

    def nbytes(self) -> int:
        """Bytes of all live buffers: codes, scales, zeros, residual, slot_pos, and what the policy remembers; of a
        pool, all of it."""
        return memory([self])


def memory(layers: "list[KVCache]") -> int:
    """Bytes of all live buffers of these caches; of a pool that they share, once."""
    held = {b.untyped_storage().data_ptr(): b for cache in layers for b in cache.buffers()}
    homes = {b.data_ptr() for cache in layers for b in cache.layout.home}
    return sum(b.untyped_storage().nbytes() for at, b in held.items() if at not in homes)


def offloaded(layers: "list[KVCache]") -> int:
    """Bytes of those that live in another memory than the device's."""
    return sum({b.data_ptr(): b.nbytes for cache in layers for b in cache.layout.home}.values())


def read_bytes(layers: "list[KVCache]") -> int:
    """Bytes that a step of these caches reads, wherever they are: all, but of chunks that are not selected only what
    decides about them."""
    skipped = 0.0
    for cache in layers:
        if cache.selection is not None and (m := cache.selection.chosen.shape[2]):
            layout = cache.layout
            B, H, n = *cache.slot_pos.shape[:2], layout.number_of(cache.k_store.stored[0])
            for store, unseen in ((cache.k_store, 1 - cache.selection.seen), (cache.v_store, 1)):
                for part in store.stored:
                    chunks = len(part) if layout.pool else B * H * n
                    skipped += B * H * (n - m) * (part.nbytes // chunks * CHUNK // layout.chunk) * unseen
    return memory(layers) + offloaded(layers) - int(skipped)


def longest_window(positions: int) -> int:
    """The most slots where positions are counted in the cache and text goes on beyond the model's: those must cover the
    slots and the tokens that are read together, for which an eighth is left."""
    return positions - max(positions // 8, 1)


def narrow(view: nn.Module, whole: nn.Module, row: int) -> nn.Module:
    """view, a shallow copy of whole, with every buffer [B,..] narrowed to one row of the same memory."""
    kept = {name for name, buffer in whole._buffers.items() if buffer is None} | {*getattr(whole, "pooled", ())}
    view._buffers = {name: x if name in kept else x[row : row + 1] for name, x in whole._buffers.items()}
    if hasattr(whole, "pages"):
        view.pages = whole.pages[row : row + 1]
    view._modules = {name: m and narrow(copy.copy(m), m, row) for name, m in whole._modules.items()}
    return view


def rows(index: Tensor) -> tuple[Tensor, Tensor]:
    """Indices that go with index [B,H,n] to address buffer[b, h, index]. (Inductor writes those in place, but copies
    the whole buffer for a scatter.)"""
    B, H, _ = index.shape
    return torch.arange(B, device=index.device)[:, None, None], torch.arange(H, device=index.device)[:, None]


def filled(slot_pos: Tensor) -> Tensor:
    """slot_pos [..,S] -> how many slots [..], from the first on, there are up to the last that holds a token."""
    return ((slot_pos >= 0) * torch.arange(1, slot_pos.shape[-1] + 1, device=slot_pos.device)).amax(-1)


def vacate(slot_pos: Tensor, slot: Tensor, unit: int, b: Tensor | None = None, h: Tensor | None = None) -> None:
    """Empty those units of slot_pos [B,H,S] of which the first slot is among `slot` [B,H,n], or [n] of rows b, h."""
    b, h = rows(slot) if b is None else (b, h)
    own = slot[..., None]  # any other slot only empties itself, and is written next
    emptied = torch.where(own % unit == 0, own + torch.arange(unit, device=slot.device), own)
    slot_pos[b[..., None], h[..., None], emptied] = -1


def pick(x: Tensor, chunks: int | Tensor | None) -> Tensor:
    """Of x [B,H,n,..] those entries that chunks [B,H,m] names, or the first so many, or all."""
    return x[(*rows(chunks), chunks)] if isinstance(chunks, Tensor) else x[:, :, :chunks]


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

    A subclass overrides `score(q, k, v, pos) -> [B,H,T]`, float32: what each token of a prompt is worth to each KV
    head. Whatever the scores, the first `sink` tokens and the newest `recent` stay, the one being read included.
    """

    appends = False  # True: the prompt is compressed once, and later tokens are appended in room kept free for them
    learns = False  # True: `observe` is given mass, which costs a pass over the scores
    relative = False  # True: positions are counted in the cache, not in the text
    rereads = False  # True: `place` looks at the key that it evicts
    everything = False  # True: token t is in slot t, whatever follows, so that texts that begin alike can share pages
    ragged = False  # True: heads may keep different numbers of tokens
    unit = 1  # slots that are filled in order and given up together, because a format says so; of KVCache

    def __init__(self, sink: int = 4, recent: int = 32):
        super().__init__()
        self.sink, self.recent = sink, recent

    def attach(self, layer: int, frequencies: Tensor, positions: int) -> "Policy":
        """Told once where it works: the layer's number, the model's rotary frequencies [D/2], its longest text."""
        self.frequencies, self.positions = frequencies, positions
        return self

    def allocate(self, layout: "Dense", slots: int, device: torch.device) -> None:
        """Buffers of the policy's own, for more or fewer slots than before. count [B,H]: tokens placed so far, by which
        slots are filled in order; capacity [B]: slots that a sequence may use, S unless its prompt was shorter."""
        B, H = layout.batch, layout.heads
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.zeros(B, H, dtype=torch.int64, device=device), persistent=False)
            self.register_buffer("capacity", torch.zeros(B, dtype=torch.int64, device=device), persistent=False)
        self.capacity.fill_(slots)

    def score(self, q, k, v, pos):
        age = pos[:, -1:] - pos  # float32 tells ages below 2^24 apart, and positions may be beyond
        return -age[:, None].expand(k.shape[:3]).float()

    def budgets(self, budget: int, prompt: int, n_layer: int) -> list[int]:
        """Slots for a prompt, layer by layer. Their sum is n_layer * budget, and never more than the prompt has."""
        return [min(budget, prompt) if self.appends else budget] * n_layer

    def newest(self, slots):
        """How many of `slots` (int, or tensor [B]) are for the newest tokens: `recent`, or that part of them."""
        if self.recent >= 1 or self.recent == 0:
            return self.recent
        return (slots.double() * self.recent).long() if isinstance(slots, Tensor) else int(slots * self.recent)

    def least(self) -> int:
        """The fewest slots that leave one to decide about, or two units of them."""
        if self.unit > 1 and not self.appends:
            units = lambda n: -(-n // self.unit)  # noqa: E731
            enough = lambda n: units(n) >= units(self.sink) + units(self.newest(n)) + 2  # noqa: E731
            return next(n for n in itertools.count(self.unit, self.unit) if enough(n))
        if self.recent >= 1:
            return self.sink + self.recent + 1
        return next(n for n in itertools.count(int(self.sink / (1 - self.recent))) if n - self.newest(n) > self.sink)

    def start(self) -> int:
        """The first slot that may be given up: those of the sinks are not, nor what shares a unit with them."""
        return -(-self.sink // self.unit) * self.unit

    def keep(self, score: Tensor, where: Tensor, n: int, newest: int) -> Tensor:
        """The n of C tokens that stay: score [B,H,C], positions where [B,H,C], -1 for none -> bool [B,H,C]."""
        if n >= score.shape[-1]:
            return torch.ones_like(score, dtype=torch.bool)
        protected = (where < self.sink) | (where > where.amax(-1, keepdim=True) - newest)
        best = score.masked_fill(protected & (where >= 0), float("inf")).topk(n, -1).indices
        return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, best, True)

    def admit(self, cache: KVCache, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, live: Tensor | None) -> Tensor:
        """The slots [B,H,T] of T tokens that are read together, -1 for those that get none.

        q [B,H*G,T,D], v [B,H,T,D], pos [B,T]. A prompt has live = None and k [B,H,T,D]: of what is kept, position and
        slot ascend together. A chunk that follows has live [B,H,S], and k [B,H,S+T,D] with the cached slots' keys.
        """
        T = q.shape[2]
        if live is not None:
            return self.append(T)
        size = int(self.capacity.max())
        n = min(T, size, cache.plan(T) if self.appends else size)
        score = torch.zeros(v.shape[:3], device=v.device) if n == T else self.score(q, k, v, pos)
        kept = self.keep(score, pos[:, None].expand_as(score), n, self.newest(n))
        self.count.copy_(kept.sum(-1))
        return torch.where(kept, kept.cumsum(-1) - 1, -1)

    def place(self, cache: KVCache, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """The slot [B,H,1] of the next token: q [B,H*G,1,D], k and v [B,H,1,D], pos [B,1]."""
        return self.append(1)

    def append(self, T: int) -> Tensor:
        """The slots [B,H,T] of the next T tokens: free ones, then the oldest but the sinks; -1 for a token that another
        one of them would overwrite. Slots are filled in order, so a counter finds the oldest: no search over S."""
        size = self.capacity[:, None, None]
        cycle = (size - self.start()).clamp(min=1)
        n = self.count[..., None] + torch.arange(T, device=size.device)
        # Tokens from here on are not overwritten by another one of these; a unit is begun with its first slot.
        whole = -(-(self.count[..., None] + T - cycle) // self.unit) * self.unit
        self.count.add_(T)  # in place: += would rebind the attribute
        slot = torch.where(n < size, n, size - cycle + (n - size) % cycle)
        return torch.where((n < size - cycle) | (n >= whole), slot, -1)

    def measure(self, cache: KVCache, slot: Tensor | None = None) -> None:
        """Called after a step wrote to slot [B,H,1], or a prompt to any: for a policy that looks at stored keys."""

    def observe(self, mass: Tensor) -> None:
        """Only if `learns`: the attention [B,H,S] that each slot has just received, summed over the query group."""


class Full(Policy):
    """Every token stays."""

    appends = everything = True

    def __init__(self):
        super().__init__(sink=0, recent=0)

    def budgets(self, budget, prompt, n_layer):
        return [prompt] * n_layer


class Window(Policy):
    """The first `sink` tokens and the newest, at the positions they had in the text (2309.17453, without its trick)."""

    def __init__(self, sink: int = 4):
        super().__init__(sink, recent=0)


class Streaming(Window):
    """The same tokens, at positions counted in the cache: text without end (StreamingLLM, 2309.17453).

    Rotary attention knows differences only, and between recent tokens those are right as they are. So nothing is
    rotated anew but the query that the sinks get, as if nothing had been evicted between them and the rest.
    """

    relative = True


class SnapKV(Policy):
    """What the last `window` queries of the prompt look at, smoothed over neighbours (2404.14469).

    Pooling covers the tokens before the window and, at their edges, averages over the neighbours that exist.
    """

    appends = True

    def __init__(self, window: int = 64, kernel: int = 5, pool: str = "avg", sink: int = 0):
        super().__init__(sink, recent=window)
        if kernel % 2 == 0 or kernel > 999:
            raise SpecError(f"kernel={kernel}: must be odd and below 1000")
        if pool not in ("avg", "max"):
            raise SpecError(f"pool={pool}: choose avg or max")
        if window < 1:
            raise SpecError(f"window={window}: must be at least 1")
        self.kernel, self.pool = kernel, pool

    def score(self, q, k, v, pos):
        mass = kernels.window_mass(q, k, self.recent)[..., : -self.recent]
        if self.pool == "avg":
            mass = F.avg_pool1d(mass, self.kernel, 1, self.kernel // 2, count_include_pad=False)
        else:
            mass = F.max_pool1d(mass, self.kernel, 1, self.kernel // 2)
        return F.pad(mass, (0, self.recent))


class PyramidKV(SnapKV):
    """SnapKV with more slots for the lower layers, fewer for the upper ones, and the same total (2406.02069).

    Beyond the window, layer budgets fall linearly from 2B - B/beta to B/beta, where B is their mean. `reference` gives
    the authors' own numbers instead, whose floor division allots more than was asked for.
    """

    def __init__(
        self,
        window: int = 16,
        kernel: int = 5,
        pool: str = "avg",
        sink: int = 0,
        beta: float = 4.0,
        reference: bool = False,
    ):
        super().__init__(window, kernel, pool, sink)
        if not 1 <= beta < float("inf"):
            raise SpecError(f"beta={beta:g}: must be a number from 1 (all layers alike) up")
        self.beta, self.reference = beta, reference

    def budgets(self, budget, prompt, n_layer):
        if budget >= prompt or n_layer == 1:
            return [min(budget, prompt)] * n_layer
        if self.reference:
            return self.reference_budgets(budget - self.recent, prompt, n_layer)
        mean = Fraction(budget - self.recent)
        bottom = max(mean / Fraction(self.beta), Fraction(self.sink + 1))
        top = min(2 * mean - bottom, Fraction(prompt - self.recent))  # a layer cannot keep more than there is
        step = 2 * (top - mean) / (n_layer - 1)
        # Exact total: round the sum of the first n layers, n * top - step * (0 + 1 + .. + n-1), not each layer.
        ends = [int(n * top - step * (n * (n - 1) // 2) + Fraction(1, 2)) for n in range(n_layer + 1)]
        return [self.recent + b - a for a, b in itertools.pairwise(ends)]

    def reference_budgets(self, mean: int, prompt: int, n_layer: int) -> list[int]:
        if prompt < 2 * mean:
            return [self.recent + mean] * n_layer
        bottom = int(mean // self.beta)
        top = min(2 * mean - bottom, prompt - self.recent)
        step = (top - (2 * mean - top)) // (n_layer - 1)
        return [self.recent + max(top - i * step, self.sink + 1) for i in range(n_layer)]


class AdaKV(SnapKV):
    """SnapKV whose heads share one budget a layer: a head whose attention is spread keeps more (2407.11550).

    The best H * budget tokens of all heads together stay, and at least a part `floor` of an even share in each head.
    All heads get as many slots as the largest needs, unless there are pages; what each keeps is in the report.
    """

    ragged = True

    def __init__(self, window: int = 64, kernel: int = 5, pool: str = "avg", sink: int = 0, floor: float = 0.2):
        super().__init__(window, kernel, pool, sink)
        if not 0 <= floor <= 1:
            raise SpecError(f"floor={floor:g}: must be from 0 to 1 (all heads alike)")
        self.floor = floor

    def keep(self, score, where, n, newest):
        if n >= score.shape[-1]:
            return super().keep(score, where, n, newest)
        score = kernels.all_heads(score)
        always, where = self.sink + newest, where[:, :1].expand_as(score)
        sure = super().keep(score, where, always + int(self.floor * (n - always)), newest)
        best = score.masked_fill(sure, float("inf")).flatten(1).topk(n * score.shape[1], -1).indices
        return kernels.own_heads(torch.zeros_like(sure).flatten(1).scatter_(-1, best, True).view_as(sure))


class Expected(Policy):
    """What queries of the next `future` positions can be expected to look at (ExpectedAttention, 2510.00636).

    Queries before rotation are taken for Gaussian; the mean and covariance of the prompt's own, sinks excluded, are
    turned by the average rotation of the positions to come. Weighted with the norm of what would be read.
    """

    appends = True

    def __init__(self, sink: int = 4, recent: int = 0, future: int = 512):
        super().__init__(sink, recent)
        if not 1 <= future <= 10**5:
            raise SpecError(f"future={future}: give 1 to 100000 positions to come")
        self.future = future

    def score(self, q, k, v, pos):
        return kernels.expected_mass(q, k, v, pos, self.frequencies, self.sink, self.future)


class Ranked(Policy):
    """At every step, the token that ranks lowest makes way. rank [B,H,S]: what each slot's token is worth, float32.

    With `score` alone a token's rank is what it was worth when it came. A policy that learns overrides `weigh`, for a
    prompt, and `observe`, for a step, where a new token starts from 0.
    """

    rank: Tensor

    def allocate(self, layout, slots, device):
        super().allocate(layout, slots, device)
        if not hasattr(self, "rank"):
            self.register_buffer("rank", torch.empty(layout.batch, layout.heads, 0, device=device), persistent=False)
            if self.unit > 1:
                self.register_buffer("filling", torch.zeros_like(self.count), persistent=False)
        self.rank = resized(self.rank, 2, slots)

    def score(self, q, k, v, pos):
        return torch.zeros(k.shape[:3], device=k.device)

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, live: Tensor | None) -> Tensor:
        """What the cached slots and the new tokens are worth, [B,H,S+T]; arguments as for `admit`."""
        new = self.score(q, k[:, :, -v.shape[2] :], v, pos)
        return new if live is None else torch.cat([self.rank, new], -1)

    def admit(self, cache, q, k, v, pos, live):
        T, size = v.shape[2], int(self.capacity.max())
        worth, where, newest = self.weigh(q, k, v, pos, live), pos[:, None].expand(v.shape[:3]), self.newest(size)
        held = 0
        if live is not None and self.unit > 1:
            return self.join(cache, worth, pos, live)
        if live is not None:  # what was read last always has a slot, as after a step
            held, newest = int(self.count.max()), max(newest, 1)
            worth[..., :-T].masked_fill_(~live, float("-inf"))
            where = torch.cat([cache.slot_pos, where], -1)
        kept = self.keep(worth, where, min(held + T, size), newest)
        stays = F.pad(kept[..., :-T], (0, cache.slot_pos.shape[2] - (kept.shape[2] - T)))
        free = stays.byte().argsort(dim=-1, stable=True)  # the slots that are free, or now become so, in order
        new = kept[..., -T:]
        slot = torch.where(new, free.gather(-1, (new.cumsum(-1) - 1).clamp(min=0)), -1)
        self.count.copy_(kept.sum(-1))
        if self.unit > 1:
            self.filling.copy_((self.count - 1).clamp(min=0) // self.unit)
        if live is not None:
            self.rank.copy_(torch.where(live, worth[..., :-T], self.rank))
        b, h, t = new.nonzero(as_tuple=True)
        self.rank[b, h, slot[b, h, t]] = worth[..., -T:][b, h, t]
        return slot

    def place(self, cache, q, k, v, pos):
        size, p = self.capacity[:, None], pos[..., None].to(torch.int32)
        newest = self.newest(self.capacity)
        newest = newest[:, None, None].to(torch.int32) if isinstance(newest, Tensor) else newest
        evictable = (cache.slot_pos >= self.sink) & (cache.slot_pos <= p - newest)
        worth = self.rank.masked_fill(~evictable, float("inf"))
        if self.unit == 1:
            slot = torch.where(self.count < size, self.count, worth.argmin(-1))[..., None]
            self.count.copy_(torch.minimum(self.count + 1, size))
        else:
            slot = self.by_units(worth, 1)
        self.rank[(*rows(slot), slot)] = self.score(q, k, v, pos)
        return slot

    def by_units(self, worth: Tensor, T: int) -> Tensor:
        """The slots [B,H,T] of the next tokens, at most a unit of them: the rest of `filling` [B,H], the unit that
        fills, then one that is free, or the one of the least mean worth [B,H,S], infinite where a token must stay."""
        U, seen = self.unit, self.count[..., None]
        n = seen + torch.arange(T, device=worth.device)  # the n-th token of all; in a full cache, too, in lane n % U
        lane = n % U
        least = worth.unflatten(-1, (-1, U)).mean(-1).argmin(-1, keepdim=True)
        begun = torch.where(n - lane < self.capacity[:, None, None], (n - lane) // U, least)
        unit = torch.where(n - lane < seen, self.filling[..., None], begun)
        self.filling.copy_(unit[..., -1])
        self.count.add_(T)
        return unit * U + lane

    def join(self, cache: KVCache, worth: Tensor, pos: Tensor, live: Tensor) -> Tensor:
        """`admit` where whole units make way for tokens that are read on top of others, worth [B,H,S+T]: as many at a
        time as a unit has."""
        S, held, slots, where = live.shape[2], cache.slot_pos.clone(), [], pos[:, None].expand(*live.shape[:2], -1)
        self.rank.copy_(torch.where(live, worth[..., :S], self.rank))
        for new, at in zip(worth[..., S:].split(self.unit, -1), where.split(self.unit, -1), strict=True):
            newest = self.newest(int(self.capacity.max()))
            evictable = (held >= self.sink) & (held <= at[..., -1:] - max(newest, 1))
            slot = self.by_units(self.rank.masked_fill(~evictable, float("inf")), new.shape[-1])
            vacate(held, slot, self.unit)
            held[(*rows(slot), slot)] = at.to(held.dtype)
            self.rank[(*rows(slot), slot)] = new
            slots.append(slot)
        slot = torch.cat(slots, -1)
        return torch.where(held.gather(-1, slot) == where, slot, -1)


class H2O(Ranked):
    """Tokens that have received most attention from all queries so far, and the newest (2306.14048).

    `recent`: a number of tokens or, below 1, a part of the budget. Sums are exact and causal, and never divided by age.
    """

    learns = True

    def __init__(self, recent: float = 0.5, sink: int = 0):
        if recent >= 1 and recent != int(recent):
            raise SpecError(f"recent={recent:g}: give a number of tokens, or a part of the budget below 1")
        super().__init__(sink, recent if 0 < recent < 1 else int(recent))

    def weigh(self, q, k, v, pos, live):
        mass = kernels.column_mass(q, k, live)
        return mass if live is None else mass + F.pad(self.rank, (0, v.shape[2]))

    def observe(self, mass):
        self.rank.add_(mass)


class TOVA(Ranked):
    """Tokens that the last query looks at, the same ones in all heads of a layer (2401.06104)."""

    learns = True

    def __init__(self, sink: int = 0, recent: int = 1):
        super().__init__(sink, recent)

    def weigh(self, q, k, v, pos, live):
        return self.in_all_heads(kernels.window_mass(q, k, 1, live)).clone()

    def observe(self, mass):
        self.rank.copy_(self.in_all_heads(mass))

    def in_all_heads(self, mass):
        return (kernels.all_sum(mass.mean(1, keepdim=True)) / kernels.RANKS).expand_as(mass)


class KeyNorm(Ranked):
    """Tokens with small keys: those get much attention (2406.11430)."""

    def __init__(self, sink: int = 0, recent: int = 0):
        super().__init__(sink, recent)

    def score(self, q, k, v, pos):
        return -torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32)


class KeyDiff(Ranked):
    """Tokens whose keys point away from the average direction of all that are held (2504.15364).

    The average changes with every token, so all ranks do: one more query over the keys, as they are stored. anchor
    [B,H,D] is the sum of their directions, kept up to date, and scale [B,H,S] one over their lengths.
    """

    rereads = True

    def __init__(self, sink: int = 0, recent: int = 0):
        super().__init__(sink, recent)

    def allocate(self, layout, slots, device):
        super().allocate(layout, slots, device)
        if not hasattr(self, "scale"):
            empty = torch.empty(layout.batch, layout.heads, 0, device=device)
            self.register_buffer("scale", empty, persistent=False)
            self.register_buffer(
                "anchor", empty.new_zeros(*empty.shape[:2], 2 * len(self.frequencies)), persistent=False
            )
        self.scale = resized(self.scale, 2, slots)

    def weigh(self, q, k, v, pos, live):
        scale = 1 / torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).clamp(min=1e-30)  # [B,H,S+T]
        if live is not None:
            scale[..., : live.shape[2]] *= live
        parts = [(s[:, :, None], part.float()) for s, part in zip(scale.split(1024, 2), k.split(1024, 2), strict=True)]
        anchor = sum(s @ part for s, part in parts)  # [B,H,1,D]
        return -torch.cat([s * (anchor @ part.mT) for s, part in parts], -1)[:, :, 0]

    def place(self, cache, q, k, v, pos):
        slot = super().place(cache, q, k, v, pos)
        self.anchor.sub_(self.direction(cache, slot))
        return slot

    def direction(self, cache, slot):
        """Of the key that is stored in slot [B,H,1]: [B,H,D], 0 if there is none."""
        b, h = rows(slot)
        key, scale = cache.k_store.at((b, h, slot)), self.scale[b, h, slot][..., None]
        return torch.where(scale > 0, key * scale, 0.0)[:, :, 0]

    def measure(self, cache, slot=None):
        S, live = self.scale.shape[2], cache.slot_pos >= 0
        if slot is None:
            key = cache.k_store.decoded().flatten(2, 3)[:, :, :S].float().masked_fill(~live[..., None], 0)
            self.scale.copy_(live / key.norm(dim=-1).clamp(min=1e-30))
            self.anchor.copy_((self.scale[:, :, None] @ key)[:, :, 0])
        else:
            b, h = rows(slot)
            key = cache.k_store.at((b, h, slot))
            self.scale[b, h, slot] = 1 / key.norm(dim=-1).clamp(min=1e-30)
            self.anchor.add_(self.direction(cache, slot))
        along = cache.k_store.dot(self.anchor[:, :, None], torch.ones_like(live))[:, :, 0, :S]
        self.rank.copy_(-along * self.scale)


class Random(Ranked):
    """Any tokens, drawn with `seed`: what a policy has to beat.

    A draw depends on layer, head and position alone, so that neither chunks nor neighbours in a batch change it.
    """

    def __init__(self, seed: int = 0, sink: int = 0, recent: int = 0):
        super().__init__(sink, recent)
        self.seed = seed

    def attach(self, layer, frequencies, positions):
        self.layer = torch.tensor(layer, device=frequencies.device)
        return super().attach(layer, frequencies, positions)

    def score(self, q, k, v, pos):
        head = kernels.RANK * k.shape[1] + torch.arange(k.shape[1], device=k.device)[:, None]
        # Every product stays below 2^63, where eager and compiled code agree.
        x = (
            (pos[:, None] & 0x3FFFFFFF) * 0x9E3779B1
            + head * 0x85EBCA6B
            + self.layer * 0xC2B2AE35
            + self.seed * 0x27D4EB2F
        )
        for _ in range(3):
            x = x & 0xFFFFFFFF
            x = (x ^ (x >> 16)) * 0x45D9F3B
        return ((x >> 8) & 0xFFFFFF).float()


POLICIES: dict[str, type[Policy]] = {
    "full": Full,
    "window": Window,
    "streaming": Streaming,
    "h2o": H2O,
    "tova": TOVA,
    "snapkv": SnapKV,
    "pyramid": PyramidKV,
    "adakv": AdaKV,
    "expected": Expected,
    "keynorm": KeyNorm,
    "keydiff": KeyDiff,
    "random": Random,
}
SMALL = ("snapkv", 0.1)  # what is advised where memory is short: a policy and its budget


# ---------------------------------------------------------------------------------------------------------------------
# Stores: how a slot is written down. A new format is an `encode` and its `decode`, and a line in FORMATS.


class Store(nn.Module):
    """Keys or values as they are: a number format is `encode(x) -> parts` and `decode(*parts) -> x` on the last dim.

    Each part is a buffer, chunk by chunk of C slots. The first part is [B,H,n,d,C] for keys, where a query meets all
    channels of a slot, and [B,H,n,C,d] for values, where a channel meets all slots. Further parts (scales and the like,
    few numbers a slot) are always [B,H,n,d,C], so that those of many slots fill a vector register. `dot` and `mix` may
    read parts without decoding them; those of the base class decode.
    """

    widths: tuple[int, ...] = (16,)  # bits of one number
    group = 0  # channels that share a scale, where a format has any
    unit = 1  # slots that share something, so that they are filled in order and given up together
    alone = True  # what is written for a token depends on what came before it, and on nothing that follows
    of_keys: "type[Store] | None" = None  # the class for keys, where they are written down in another way than values

    def __init__(self, is_key: bool, dim: int, dtype: torch.dtype, device, bits: int = 16):
        """dim: head dim; dtype: the model's."""
        super().__init__()
        self.is_key, self.dtype, self.bits = is_key, dtype, bits
        self.names = []
        self.dim, self.device = dim, torch.device(device)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [..,D] float32 -> parts [..,d]."""
        return (x.to(self.dtype),)

    def decode(self, *parts: Tensor) -> Tensor:
        return parts[0]

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The buffers, in which the layout says where a slot is."""
        return tuple(getattr(self, name) for name in self.names)

    def parts(self, chunks: int | Tensor | None = None) -> tuple[Tensor, ...]:
        """The same as if every sequence had its own, [B,H,n,d,C] or [B,H,n,C,d]: all chunks or some, as in `pick`."""
        return tuple(self.layout.view(part, self.slots_last(i), chunks) for i, part in enumerate(self.stored))

    @property
    def pooled(self) -> list[str]:
        """The names of buffers that are not a sequence's own."""
        return self.names if self.layout.pool else []

    def allocate(self, layout: "Dense", slots: int) -> None:
        """Buffers for `slots` slots: their widths and dtypes are whatever `encode` makes of the vectors of a chunk."""
        self.layout = layout
        sample = self.encode(torch.zeros(layout.chunk, self.dim, device=self.device))
        for i, part in enumerate(sample):
            shape = part.mT if self.slots_last(i) else part
            old = self.stored[i] if len(self.names) > i else None
            self.register_buffer(f"part{i}", layout.buffer((self.is_key, i), shape, old, slots), persistent=False)
        self.names = [f"part{i}" for i in range(len(sample))]

    def begin(self, x: Tensor, begins: Tensor | None = None) -> None:
        """Told of all keys or values [B,H,T,D] of a new prompt, before some of them are put; of single tokens, too, and
        which of them [B,1] are a prompt of their own."""

    def close(self, done: Tensor) -> None:
        """Told of heads [B,H] whose last token is not going to be followed by one in the next slot."""

    def slots_last(self, i: int) -> bool:
        """Is part i [B,H,n,d,C]?"""
        return self.is_key or i > 0

    def put(self, where: tuple[Tensor, ...], x: Tensor) -> None:
        """x [B,H,T,D] float32 to `where`, indices (sequence, head, slot) that broadcast to [B,H,T]."""
        *chunk, lane = self.layout.locate(*where)
        for i, (part, code) in enumerate(zip(self.stored, self.encode(x), strict=True)):
            part[(*chunk, slice(None), lane) if self.slots_last(i) else (*chunk, lane)] = code

    def decoded(self, chunks: int | Tensor | None = None) -> Tensor:
        """All slots, [B,H,n,C,D], or those of some chunks."""
        return self.decode(*(part.mT if self.slots_last(i) else part for i, part in enumerate(self.parts(chunks))))

    def read(self) -> Tensor:
        """All slots, [B,H,n*C,D], in the model's dtype."""
        return self.decoded().flatten(2, 3).to(self.dtype)

    def at(self, where: tuple[Tensor, ...]) -> Tensor:
        """What is stored at `where`, as in `put`: [B,H,T,D] float32."""
        *chunk, lane = self.layout.locate(*where)
        last = [self.slots_last(i) for i in range(len(self.names))]
        parts = zip(self.stored, last, strict=True)
        return self.decode(*(p[(*chunk, slice(None), lane) if end else (*chunk, lane)] for p, end in parts)).float()

    def written(self) -> kernels.Written | None:
        """How a GPU's kernel reads this store; None: it knows no such format, so that `dot` and `mix` do it."""
        return kernels.Written(self.part0) if type(self) is Store else None

    def query(self, q: Tensor) -> Tensor:
        """q [B,H,R,D] as it meets keys as they are written."""
        return q

    def value(self, y: Tensor) -> Tensor:
        """A sum y [B,H,R,D] of values as they are written, as one of values."""
        return y

    def dot(self, q: Tensor, live: Tensor, chunks: int | Tensor | None = None) -> Tensor:
        """q [B,H,G,D] float32, live [B,H,S] -> scores [B,H,G,n*C], -inf where not live: of all chunks, or of some, as
        in `pick`, whose slots `live` then is of."""
        return kernels.dot(q, [self.decoded(chunks).mT[:, :, :, None].float()], live)

    def mix(self, p: Tensor, chunks: Tensor | None = None) -> Tensor:
        """p [B,H,G,n*C] float32 -> weighted sum of the values [B,H,G,D], of all chunks or some."""
        return kernels.mix(p, [self.decoded(chunks).unsqueeze(4).float()])


class Codes(Store):
    """What all formats of few bits share: packed codes, each for a number, times what every `group` channels share.

    A format says what to write (`encode`), what number a code is (`number`) and how what is shared was written
    (`shared`); numbers are multiplied as they are unpacked, and nothing that was decoded is ever stored. Vectors are
    rotated first, where `rotated` (2404.00456): that spreads a key's outlier channels over all, and makes per-token
    groups as accurate as the per-channel ones that have to wait for a group of tokens to fill.
    """

    rotated = True
    tile: tuple[str, str] | None = None  # what a GPU's kernel calls such codes and scales, where it knows them

    def __init__(self, is_key, dim, dtype, device, bits, group=32):
        super().__init__(is_key, dim, dtype, device, bits)
        if group < 8:
            raise SpecError(f"group={group}: give a number of channels, 8 or more")
        pack = 8 // bits  # codes that fill whole bytes
        fits = [g for g in range(1, min(group, dim) + 1) if dim % g == 0 and g % pack == 0]
        if not fits:
            raise SpecError(f"--bits {bits}: head_dim {dim} is not a multiple of {pack}; use more bits")
        self.group = fits[-1]
        # Channels whose codes are packed together: one group or more, until a plane has 16 bytes, a vector's worth.
        spans = [r * self.group for r in (1, 2, 4) if dim % (r * self.group) == 0 and (8 // bits) % r == 0]
        self.span = next((s for s in spans if s * bits >= 16 * 8), spans[-1])
        self.rotation = kernels.rotation(dim, self.device) if self.rotated else None

    def number(self, code: Tensor) -> Tensor:
        """Codes int32 -> the numbers they stand for, float32."""
        return code.float()

    def shared(self, *parts: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The parts after the codes -> scale and zero [..,D/group] float32, of their last dim; None is 1 and 0."""
        raise NotImplementedError

    def grouped(self, x: Tensor) -> Tensor:
        """x [..,D] -> rotated, [..,D/group,group]."""
        x = kernels.rotate(x, self.rotation) if self.rotated else x
        return x.unflatten(-1, (-1, self.group))

    def packed(self, codes: Tensor) -> Tensor:
        """Codes [..,D/group,group] -> bytes [..,D*bits/8]."""
        return kernels.pack(codes.flatten(-2).unflatten(-1, (-1, self.span)), self.bits).flatten(-2)

    def planes(self, codes: Tensor, dim: int) -> list[Tensor]:
        """Bytes, D*bits/8 of them along dim, -> numbers in planes [..,D/span,span/P,..], float32."""
        codes = codes.unflatten(dim, (-1, self.span * self.bits // 8))
        return [self.number(plane) for plane in kernels.unpack(codes, self.bits)]

    def decode(self, codes, *rest):
        scale, zero = self.shared(*rest)
        x = torch.cat(self.planes(codes, -1), -1).flatten(-2)
        if scale is not None:
            x = x.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]
            x = (x if zero is None else x + zero[..., None]).flatten(-2)
        return kernels.rotate(x, self.rotation) if self.rotated else x  # its own inverse

    def across(self, rest: tuple[Tensor, ...]) -> list[Tensor | None]:
        """scale and zero [B,H,n,D/group,C] of parts [B,H,n,d,C]."""
        return [x if x is None else x.mT for x in self.shared(*(part.mT for part in rest))]

    def dot(self, q, live, chunks=None):
        codes, *rest = self.parts(chunks)
        return kernels.dot(self.query(q), self.planes(codes, -2), live, *self.across(rest))

    def mix(self, p, chunks=None):
        codes, *rest = self.parts(chunks)
        return self.value(kernels.mix(p, self.planes(codes, -1), *self.across(rest)))

    def query(self, q):
        return kernels.rotate(q, self.rotation) if self.rotated else q

    value = query  # the sum of rotated values is the rotated sum: undone once, by the same matrix

    def written(self):
        if vars(type(self)).get("tile") is None:  # a subclass may mean other numbers by the same codes: it has to say
            return None
        codes, *shared = self.stored
        number, scale = self.tile
        return kernels.Written(
            codes, *shared, number=number, scale=scale, bits=self.bits, span=self.span, groups=self.span // self.group,
            wide=self.dtype == torch.float32,
        )  # fmt: skip


class IntStore(Codes):
    """Integers, with a scale and a minimum in fp16 for every 32 channels of a token, after a rotation (2404.00456)."""

    widths, tile = (8, 4, 2), ("int", "range")

    def __init__(self, is_key, dim, dtype, device, bits, group=32, solver="minmax"):
        super().__init__(is_key, dim, dtype, device, bits, group)
        self.solve = choice("solver", solver, SOLVERS)

    def integers(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..,g] -> codes [..,g], and the scale and zero [..] that its range is given."""
        top = 2**self.bits - 1
        return kernels.between(x, *self.solve(x, *x.aminmax(dim=-1), top), top)

    def encode(self, x):
        codes, scale, zero = self.integers(self.grouped(x))
        return self.packed(codes), torch.cat([scale, zero], -1)

    def shared(self, scale_zero):
        return scale_zero.float().chunk(2, -1)


SOLVERS = {"minmax": kernels.minmax, "mse": kernels.mse, "hqq": kernels.hqq}


class Scaled(Codes):
    """Codes of numbers that are measured in `whole` [B,H], float32: one unit for each head, which its prompt sets."""

    alone = False

    def measured(self, largest: Tensor) -> Tensor:
        """The unit for numbers up to `largest` [B,H], after rotation."""
        raise NotImplementedError

    def allocate(self, layout, slots):
        super().allocate(layout, slots)
        if not hasattr(self, "whole"):
            ones = torch.ones(layout.batch, layout.heads, device=self.device)
            self.register_buffer("whole", ones, persistent=False)

    def begin(self, x, begins=None):
        whole = self.measured(self.grouped(x.float()).abs().amax((2, 3, 4)))
        self.whole.copy_(whole if begins is None else torch.where(begins, whole, self.whole))

    def put(self, where, x):
        super().put(where, x / self.whole[where[0], where[1]][..., None])

    def decoded(self, chunks=None):
        return super().decoded(chunks) * self.whole[:, :, None, None, None]

    def at(self, where):
        return super().at(where) * self.whole[where[0], where[1]][..., None]

    def query(self, q):
        return super().query(q * self.whole[:, :, None, None])

    def value(self, y):
        return super().value(y) * self.whole[:, :, None, None]


class FP8Store(Scaled):
    """E4M3 of 8 bits; a head's scale is 1 unless its prompt has numbers beyond 448, the largest that there is."""

    widths, rotated, tile = (8,), False, ("e4m3", "")

    def __init__(self, is_key, dim, dtype, device, bits=8):
        super().__init__(is_key, dim, dtype, device, bits, group=dim)

    def measured(self, largest):
        return (largest / 448).clamp(min=1)

    def encode(self, x):
        return (x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8),)  # clamped: a cast may give NaN

    def number(self, code):
        return kernels.minifloat(code, 4, 3)

    def shared(self):
        return None, None


class MXFP4Store(Codes):
    """E2M1 of 4 bits with a power of two for every 32 channels: OCP's MX (2310.10537), after a rotation.

    Its exponent is that of the largest number, minus 2, as the standard says: from 6 to 8 times it, numbers clip to 6.
    """

    widths, tile = (4,), ("e2m1", "power")

    def encode(self, x):
        x = self.grouped(x)
        largest = x.abs().amax(-1).contiguous().view(torch.int32)  # a float's bits: its exponent begins at bit 23
        power = ((largest >> 23) - 2).clamp(min=1)
        codes = kernels.e2m1(x / (power << 23).view(torch.float32)[..., None])
        return self.packed(codes), power.to(torch.uint8)

    def number(self, code):
        return kernels.minifloat(code, 2, 1)

    def shared(self, power):
        return (power.int() << 23).view(torch.float32), None


class NVFP4Store(Scaled):
    """E2M1 of 4 bits with an E4M3 scale for every 16 channels and a float32 for every head, after a rotation.

    That float is from the largest number of the prompt, and stands: later blocks' scales clip at 448.
    """

    widths, tile = (4,), ("e2m1", "e4m3")

    def __init__(self, is_key, dim, dtype, device, bits=4, group=16):
        super().__init__(is_key, dim, dtype, device, bits, group)

    def measured(self, largest):
        return torch.where(largest > 0, largest / (6 * 448), 1)

    def encode(self, x):
        x = self.grouped(x)
        scale = (x.abs().amax(-1) / 6).clamp(max=448).to(torch.float8_e4m3fn)
        divisor = torch.where(scale.float() > 0, scale.float(), 1)  # of a block that underflows, after the cast
        return self.packed(kernels.e2m1(x / divisor[..., None])), scale.view(torch.uint8)

    number = MXFP4Store.number

    def shared(self, scale):
        return kernels.minifloat(scale.int(), 4, 3), None


class KIVIStore(IntStore):
    """Keys: a scale and a minimum for every channel of 32 tokens; values: for every 32 channels of one (2402.02750).

    An outlier channel of keys has scales of its own, so nothing is rotated. This class writes values down.
    """

    widths, rotated, tile = (4, 2), False, ("int", "range")


class KIVIKeys(KIVIStore):
    """Keys: the 32 slots of a chunk are a unit, filled in order and given up together.

    While a unit fills, which open [B,H,n] says, its keys are held and read exactly, exact [B,H,C,D], and its codes are
    written anew with every token; once full it is left alone.
    """

    unit, tile = CHUNK, ("int", "channel")

    def written(self):
        return super().written()._replace(opened=self.open, exact=self.exact)

    def allocate(self, layout, slots):
        super().allocate(layout, slots)
        B, H, n, device = layout.batch, layout.heads, layout.chunks(slots), self.device
        old = self.open if hasattr(self, "open") else torch.zeros(B, H, 0, dtype=torch.bool, device=device)
        self.register_buffer("open", resized(old, 2, n), persistent=False)
        if not hasattr(self, "exact"):
            exact = torch.zeros(B, H, CHUNK, self.dim, dtype=self.dtype, device=device)
            self.register_buffer("exact", exact, persistent=False)

    def encode(self, x):  # [..,C,D], a whole unit
        codes, scale, zero = self.integers(x.mT)
        return self.packed(codes.mT.unflatten(-1, (-1, self.group))), torch.cat([scale, zero], -1).unsqueeze(-2)

    def decode(self, codes, scale_zero):
        scale, zero = self.shared(scale_zero)  # [..,1,D]
        return torch.cat(self.planes(codes, -1), -1).flatten(-2) * scale + zero

    def put(self, where, x):
        if x.dim() < 4:
            return self.put_many(where, x)
        (b, h, slot), (*chunk, lane) = where, self.layout.locate(*where)
        self.exact[b, h, lane] = x.to(self.dtype)
        filled = torch.arange(CHUNK, device=x.device) <= lane  # [B,H,C]
        unit = torch.where(filled[..., None], self.exact.float(), x)  # what is not there yet must not count
        codes, scale_zero = self.encode(unit)
        self.part0[tuple(chunk)] = codes.mT.unsqueeze(2)
        self.part1[tuple(chunk)] = scale_zero.mT.unsqueeze(2)
        self.open[b, h, slot // CHUNK] = lane < CHUNK - 1

    def put_many(self, where: tuple[Tensor, ...], x: Tensor) -> None:
        """x [N,D] to places [N]: of every unit that gets some, what it has held so far comes first."""
        b, h, slot = where
        chunk, lane = slot // CHUNK, slot % CHUNK
        units = self.exact.new_zeros(*self.open.shape, CHUNK, self.dim, dtype=torch.float32)
        fresh = torch.zeros(units.shape[:4], dtype=torch.bool, device=x.device)  # [B,H,n,C]
        units[b, h, chunk, lane] = x
        fresh[b, h, chunk, lane] = True
        touched, first = fresh.any(-1), fresh.byte().argmax(-1)
        before = (torch.arange(CHUNK, device=x.device) < first[..., None]) & touched[..., None]
        units = torch.where(before[..., None], self.exact[:, :, None].float(), units)
        filled = fresh | before
        b, h, chunk = touched.nonzero(as_tuple=True)
        new = torch.where(filled[..., None], units, units[..., :1, :])[b, h, chunk]
        *at, _ = self.layout.locate(b, h, chunk * CHUNK)
        for part, code in zip(self.stored, self.encode(new), strict=True):
            part[tuple(at)] = code.mT
        self.open.copy_(torch.where(touched, ~filled.all(-1), self.open))
        # At most one of a head fills: what was open before is full, or still that one.
        fills = (touched & self.open).nonzero()
        self.exact[fills[:, 0], fills[:, 1]] = units[tuple(fills.T)].to(self.dtype)

    def close(self, done):
        self.open.masked_fill_(done[..., None], False)

    def decoded(self, chunks=None):
        is_open = pick(self.open, chunks)[..., None, None]
        return torch.where(is_open, self.exact[:, :, None].float(), super().decoded(chunks))

    def dot(self, q, live, chunks=None):
        codes, scale_zero, is_open = *self.parts(chunks), pick(self.open, chunks)
        scale, zero = scale_zero[..., 0].float().chunk(2, -1)  # [B,H,n,D]
        scaled = kernels.written(q.unsqueeze(3) * scale.unsqueeze(2))  # [B,H,G,n,D]: scales go into the query
        everywhere = live.new_ones(*live.shape[:2], codes.shape[2] * CHUNK)
        score = kernels.dot(scaled, self.planes(codes, -2), everywhere).unflatten(-1, (-1, CHUNK))
        score = score + (q.unsqueeze(3) * zero[:, :, None]).sum(-1)[..., None]
        exact = (q.unsqueeze(3) * self.exact[:, :, None].float()).sum(-1)  # [B,H,G,C]
        score = torch.where(is_open[:, :, None, :, None], exact.unsqueeze(3), score).flatten(3)
        live = F.pad(live, (0, max(score.shape[3] - live.shape[2], 0)))[..., : score.shape[3]]
        return score.masked_fill(~live[:, :, None], float("-inf"))


KIVIStore.of_keys = KIVIKeys


def choice(name: str, value: str, known: dict):
    if value not in known:
        raise SpecError(f"{name}={value}: choose {', '.join(known)}")
    return known[value]


FORMATS: dict[str, type[Store]] = {
    "float": Store,
    "int": IntStore,
    "fp8": FP8Store,
    "kivi": KIVIStore,
    "nvfp4": NVFP4Store,
    "mxfp4": MXFP4Store,
}
# Of keys and of values, what measures best at each width and is not slower than 16 bits; the README has the figures of
# all. A range search pays for keys; values are only averaged, and lose by it.
AUTO = {16: ("float", "float"), 8: ("int", "int"), 4: ("int:solver=mse", "int"), 2: ("int:solver=mse", "int")}


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

    def put(self, slot: Tensor, k: Tensor, v: Tensor, pos: Tensor, unit: int = 1) -> None:
        """Tokens k and v [B,H,T,D] at pos [B,H,T] with their slots [B,H,T], -1 for a token that got none."""
        T, ours, taken = k.shape[2], self.slot[..., None], slot[:, :, None]
        gone = torch.where(taken % unit == 0, unit, 1)  # the first slot of a unit takes all of it
        self.slot.masked_fill_(((ours >= taken) & (ours < taken + gone)).any(-1), -1)
        # Two tokens of one call must not meet in a row: of a long prompt, the first ones, then the last ones over them.
        for part in [slice(0, T)] if T <= self.length else [slice(0, self.sink), slice(T - self.length, T)]:
            row = self.row(pos[:, :, part])
            b, h = rows(row)
            self.k[b, h, :, row] = k[:, :, part]
            self.v[b, h, row] = v[:, :, part]
            self.slot[b, h, row] = slot[:, :, part].to(torch.int32)

    def first(self, row: int) -> tuple[Tensor, Tensor]:
        """A copy of what is held of the first tokens of sequence row: k [H,D,sink], v [H,sink,D]."""
        return self.k[row, :, :, : self.sink].clone(), self.v[row, :, : self.sink].clone()

    def restore(self, k: Tensor, v: Tensor) -> None:
        """A cache of one sequence, which holds all its tokens, begins with those first ones."""
        self.k[0, :, :, : self.sink], self.v[0, :, : self.sink] = k, v
        self.slot[0, :, : self.sink] = torch.arange(self.sink, dtype=torch.int32, device=k.device)

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

    def attend(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B,H,G,D] float32, scaled -> a piece of attention y [B,H,1,G,D], its log-sum-exp [B,H,1,G], and scores."""
        scores = self.dot(q)
        (weights,), total = kernels.softmax([scores])
        return (self.mix(weights) / total).unsqueeze(2), scores.logsumexp(-1).unsqueeze(2), scores

    def spread(self, ours: Tensor, mass: Tensor, slot_pos: Tensor, pos: Tensor) -> Tensor:
        """mass [B,H,S], with that of the tokens that are held here, ours [B,H,rows], where their slots are.

        Read from the slots' side, because a scatter leaves the compiled step; and without a remainder for every slot.
        """
        newest = (pos % self.length)[:, None, None]
        row = newest - (pos[:, None, None] - slot_pos)  # of a token less than `length` old
        row = torch.where(row < 0, row + self.length, row) + self.sink
        row = torch.where(slot_pos < self.sink, slot_pos, row).clamp(0, ours.shape[2] - 1)
        held = (slot_pos >= 0) & self.covers(slot_pos, pos)
        return torch.where(held, ours.gather(2, row.long()), mass)

    def overlay(self, k: Tensor, v: Tensor, slot_pos: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [B,H,S,D] with every token that is held here replaced by its exact form."""
        row = self.row(slot_pos.clamp(min=0).long())
        ours = self.slot.gather(2, row) == torch.arange(slot_pos.shape[2], device=row.device)
        held = ((slot_pos >= 0) & self.covers(slot_pos, pos) & ours)[..., None]
        exact_k, exact_v = take(self.k.mT, row), take(self.v, row)
        return torch.where(held, exact_k, k), torch.where(held, exact_v, v)


class Selection(nn.Module):
    """Of all chunks, a step reads those that promise the largest scores; nothing is evicted.

    The chunks of the sinks and of the newest token are always read. All queries of a group read the same ones, those of
    which any of them expects most. A subclass says what a chunk promises, from few bytes of its keys.
    """

    LEAST = 3 * CHUNK  # tokens: the sinks' chunk, the newest, and one to decide about
    seen = 0.0  # the part of each chunk's keys that is read to decide

    def __init__(self, tokens: int | float, layout: "Dense", dim: int, dtype: torch.dtype, device):
        """tokens: how many of each head's are read, rounded up to chunks, or a fraction of its slots."""
        super().__init__()
        self.tokens = tokens
        chosen = torch.zeros(layout.batch, layout.heads, 0, dtype=torch.int64, device=device)
        self.register_buffer("chosen", chosen, persistent=False)

    def allocate(self, layout: "Dense", slots: int) -> None:
        """chosen [B,H,m]: the chunks that a step reads; none where those would be all."""
        n = layout.chunks(slots)
        tokens = self.tokens if isinstance(self.tokens, int) else max(round(self.tokens * slots), self.LEAST)
        m = -(-tokens // CHUNK)
        self.chosen = resized(self.chosen, 2, m if m < n else 0)

    def forward(
        self, q: Tensor, slot_pos: Tensor, store: "Store", plain: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """q [B,H,G,D] float32, slot_pos [B,H,n*C], filled in order -> the chunks [B,H,m] to read, in any order, and
        the positions in their slots [B,H,m*C]. plain: q as it was, where C++ could choose."""
        first = kernels.written(slot_pos[:, :, ::CHUNK])  # the position of each chunk's first token
        always = (first == 0) | (first == first.amax(-1, keepdim=True))
        promise = self.promise(q, slot_pos, store).masked_fill(always, float("inf"))
        chunks = self.chosen.copy_(kernels.largest(promise, self.chosen.shape[2]))
        return chunks, kernels.written(pick(slot_pos.unflatten(2, (-1, CHUNK)), chunks)).flatten(2)

    def promise(self, q: Tensor, slot_pos: Tensor, store: "Store") -> Tensor:
        """What each chunk's keys in store promise the queries, [B,H,n]; -inf where there are none."""
        raise NotImplementedError

    def add(self, slot: Tensor, k: Tensor, count: Tensor) -> None:
        """A token k [B,H,1,D] gets slot [B,H,1], and is the count-th [B,H] of all."""

    def measure(self, store: "Store", slot_pos: Tensor) -> None:
        """After many were put."""


class Channels(Selection):
    """By a quarter of their channels, those in which a query tells keys apart: where it is large, and keys differ
    (SparQ, 2312.04985). Keys lie channel by channel, so that a quarter of them is a quarter of the bytes.

    spread [B,H,D]: how far keys lie apart in each channel, measured after a prompt.
    """

    PART = 4

    def __init__(self, tokens, layout, dim, dtype, device):
        super().__init__(tokens, layout, dim, dtype, device)
        spread = torch.zeros(layout.batch, layout.heads, dim, device=device)
        self.register_buffer("spread", spread, persistent=False)
        self.rows = max(dim // self.PART, 1)
        self.seen = self.rows / dim

    def forward(self, q, slot_pos, store, plain=None):
        if plain is None:
            return super().forward(q, slot_pos, store)
        table, m = store.layout.places(None, 0), self.chosen.shape[2]
        chunks, slot_pos = kernels.choose(plain, store.written(), slot_pos, table, self.spread, self.rows, m)
        return self.chosen.copy_(chunks), slot_pos

    def promise(self, q, slot_pos, store):
        """The largest product, over those channels, of any query with any key of the chunk."""
        keys, G = store.parts()[0], q.shape[2]
        rows = kernels.largest(q.abs().sum(2) * self.spread, self.rows)  # [B,H,r]
        few = q.gather(3, rows[:, :, None].expand(-1, -1, G, -1))
        keys = keys.gather(3, rows[:, :, None, :, None].expand(-1, -1, keys.shape[2], -1, CHUNK))  # [B,H,n,r,C]
        score = kernels.dot(few, [keys.unsqueeze(3).float()], slot_pos >= 0)
        return score.amax(2).unflatten(-1, (-1, CHUNK)).amax(-1)

    def measure(self, store, slot_pos):
        live = (slot_pos >= 0)[..., None]
        keys = store.decoded().flatten(2, 3)[:, :, : live.shape[2]].float().masked_fill(~live, 0)
        number = live.sum(2).clamp(min=1)
        mean = keys.sum(2) / number  # [B,H,D]
        self.spread.copy_(((keys - mean[:, :, None]).square() * live).sum(2).div(number).sqrt())


class Bounds(Selection):
    """By the largest and the least number in every channel of SPAN slots' keys: a score cannot be larger than with
    those (Quest, 2406.10774). For formats whose rotation spreads what a key says over all channels.

    bounds [B,H,N,2*D,C] are written down as keys are, those of the j-th span in slot j: one product gets all.
    """

    SPAN = 16  # as the paper's pages. A chunk has two: bounds of all 32 missed twice as often what a query looks at

    def __init__(self, tokens, layout, dim, dtype, device):
        super().__init__(tokens, layout, dim, dtype, device)
        bounds = torch.zeros(layout.batch, layout.heads, 0, 2 * dim, CHUNK, dtype=dtype, device=device)
        self.register_buffer("bounds", bounds, persistent=False)

    def allocate(self, layout, slots):
        super().allocate(layout, slots)
        self.bounds = resized(self.bounds, 2, layout.chunks(layout.chunks(slots) * CHUNK // self.SPAN))

    def promise(self, q, slot_pos, store):
        """q . k is at most the sum of each channel's product with one bound or the other."""
        first = kernels.written(slot_pos[:, :, :: self.SPAN])
        q = kernels.written(torch.cat([q.clamp(min=0), q.clamp(max=0)], -1))
        bound = kernels.dot(q, [self.bounds.unsqueeze(3).float()], first >= 0).amax(2)[..., : first.shape[2]]
        return bound.unflatten(-1, (-1, CHUNK // self.SPAN)).amax(-1)

    def add(self, slot, k, count):
        """It widens its span's bounds, or is the first there. (Where slots are used again, what was there before still
        counts.)"""
        (b, h), span = rows(slot), slot // self.SPAN
        at = b, h, span // CHUNK, slice(None), span % CHUNK
        fresh = ((slot % self.SPAN == 0) & (slot == count[..., None] - 1))[..., None]
        high, low = self.bounds[at].chunk(2, -1)  # [B,H,1,D]
        wider = torch.cat([torch.maximum(high, k), torch.minimum(low, k)], -1)
        self.bounds[at] = torch.where(fresh, torch.cat([k, k], -1), wider)

    def measure(self, store, slot_pos):
        """Bounds of all spans, of keys as they are stored."""
        live = slot_pos.unflatten(2, (-1, self.SPAN))[..., None] >= 0  # [B,H,spans,SPAN,1]
        keys = (
            store.decoded().flatten(2, 3)[:, :, : slot_pos.shape[2]].to(self.bounds.dtype).unflatten(2, live.shape[2:4])
        )
        high, low = keys.masked_fill(~live, -math.inf).amax(3), keys.masked_fill(~live, math.inf).amin(3)
        both = torch.cat([high, low], -1).masked_fill(~live.any(3), 0)  # [B,H,spans,2*D]
        rest = self.bounds.shape[2] * CHUNK - both.shape[2]
        self.bounds.copy_(F.pad(both, (0, 0, 0, rest)).unflatten(2, (-1, CHUNK)).mT)


# ---------------------------------------------------------------------------------------------------------------------
# Layout: where slot s of sequence b lives


class Dense(nn.Module):
    """A place of its own for every sequence: slot s is number s % C of chunk s // C."""

    chunk, pool = CHUNK, None  # slots of a chunk; where pages come from
    unit, reads_all = 1, True  # of KVCache: slots whose keys share something; does a step read all of them?

    def __init__(self, batch: int, heads: int, memory: "Memory"):
        super().__init__()
        self.batch, self.heads, self.memory = batch, heads, memory
        self.held: dict[tuple, Tensor] = {}  # the buffers of the stores
        self.register_buffer("table", None, persistent=False)

    def chunks(self, slots: int) -> int:
        """Chunks that a head's slots are read as. At least two: to the compiler a size of 1 is a constant, and would
        get a graph of its own."""
        return max(-(-slots // CHUNK), 2)

    def buffer(self, key: tuple, sample: Tensor, old: Tensor | None, slots: int) -> Tensor:
        """A part of a store, of chunks that look like `sample`: with what was in it before, if it is not a new one."""
        new = self.memory.zeros((self.batch, self.heads, self.chunks(slots), *sample.shape), sample.dtype)
        if old is not None:
            n = min(old.shape[2], new.shape[2])
            new[:, :, :n] = old[:, :, :n]
        torch._dynamo.maybe_mark_dynamic(new, 2)
        self.held[key] = new
        return new

    def locate(self, sequence: Tensor, head: Tensor, slot: Tensor) -> tuple[Tensor, ...]:
        """Slots of sequences and heads, tensors that broadcast -> indices of chunks in a store's buffers, and of
        slots in a chunk."""
        return sequence, head, slot // CHUNK, slot % CHUNK

    def view(self, part: Tensor, slots_last: bool, chunks: int | Tensor | None = None) -> Tensor:
        """A buffer of a store as [B,H,n,..]: all chunks of all sequences, or some, as in `pick`."""
        return pick(part, chunks)

    def number_of(self, part: Tensor) -> int:
        """How many chunks a head has in a buffer of a store."""
        return part.shape[2]

    def places(self, chunks: Tensor | None, n: int) -> Tensor | None:
        """Where a kernel finds chunks [B,H,m] of n, or all, if buffers [B,H,n,..] are taken for a pool's [B*H*n,..];
        None: all, and where they are."""
        if chunks is None:
            return None
        b, h = rows(chunks)
        return ((b * self.heads + h) * n + chunks).int()

    def fill(self, part: Tensor, chunks: Tensor, slots_last: bool) -> None:
        """The inverse of `view`, for one sequence: chunks [H,n,..] of what is held."""
        part[0] = chunks

    def allocate(self, slots: int) -> None:
        """Told of how many slots a head may use."""

    def expect(self, slots: int, sequences: int) -> None:
        """Told of how many slots that many sequences are going to hold."""

    def hold(self, slots: Tensor) -> None:
        """From now on sequences write to so many slots [B,H], the first ones of each head."""

    def release(self, sequence: int) -> None:
        """A sequence needs none of its slots any more."""

    @property
    def home(self) -> list[Tensor]:
        """What is kept in another memory than the device's."""
        return [*(self.pool.parts if self.pool else self.held).values()] if self.memory.away else []

    def begin(self) -> None:
        """This layer is next."""
        self.memory.expect(self)

    def end(self, step: bool) -> None:
        """This layer has been; step: it wrote to one slot of each head, as `wrote` was told, else to any."""

    def wrote(self, slot: Tensor) -> None:
        """Told inside of a step that it writes to slot [B,H,1]."""


class Paged(Dense):
    """Pages of one pool, claimed when a head's slots need them (PagedAttention, 2309.06180).

    A page is P slots of one head of one layer, so that layers and heads that keep different numbers of tokens share
    the pool without waste. It is one chunk, slots that lie side by side, or more. table [B,H,m] says which chunk of the
    pool is a head's j-th; what it says of a page that was never claimed is never written to, and masked.
    """

    def __init__(self, batch: int, heads: int, pool: "Pool", device):
        super().__init__(batch, heads, pool.memory)
        self.pool, self.chunk = pool, pool.chunk
        self.pages: list[list[list[int]]] = [[[] for _ in range(heads)] for _ in range(batch)]
        self.table = torch.zeros(batch, heads, 0, dtype=torch.int32, device=device)

    def buffer(self, key, sample, old, slots):
        return self.pool.part(key, sample)

    def locate(self, sequence, head, slot):
        return self.table[sequence, head, slot // self.chunk], slot % self.chunk

    def view(self, part, slots_last, chunks=None):
        some = isinstance(chunks, Tensor)
        x = part[self.places(chunks if some else None, 0)]
        if self.chunk < CHUNK and not (self.chunk == 16 and torch.compiler.is_compiling()):
            x = (x.mT if slots_last else x).flatten(2, 3)  # few slots: they are put side by side
            x = x[:, :, : x.shape[2] // CHUNK * CHUNK].unflatten(2, (-1, CHUNK)).contiguous()
            x = x.mT.contiguous() if slots_last else x
        return x if some else pick(x, chunks)

    def number_of(self, part):
        return self.table.shape[2] * self.chunk // CHUNK

    def places(self, chunks, n):
        if chunks is None:
            return self.table
        return pick(self.table.unflatten(2, (-1, CHUNK // self.chunk)), chunks).flatten(2)

    def fill(self, part, chunks, slots_last):
        if self.chunk != CHUNK:
            x = (chunks.mT if slots_last else chunks).flatten(1, 2)
            x = F.pad(x, (0, 0, 0, -x.shape[1] % self.chunk)).unflatten(1, (-1, self.chunk))
            chunks = x.mT if slots_last else x
        for h, held in enumerate(self.pages[0]):
            rows = self.table[0, h, : len(held) * self.pool.per_page]
            part[rows] = chunks[h, : len(rows)]

    def allocate(self, slots):
        old = self.table.shape[2]
        self.table = resized(self.table, 2, -(-self.chunks(slots) * CHUNK // self.chunk))
        for b, h in itertools.product(range(self.batch), range(self.heads)):
            if len(self.pages[b][h]) * self.pool.per_page > old:  # not all chunks had a place in the table
                self.enter(b, h, old // self.pool.per_page)

    def expect(self, slots, sequences):
        self.pool.expected[id(self)] = sequences * self.heads * -(-slots // self.pool.page)

    def hold(self, slots):
        for b, row in enumerate(slots.tolist()):
            for h, n in enumerate(row):
                self.grow(b, h, n)

    def grow(self, b: int, h: int, slots: int) -> None:
        held = self.pages[b][h]
        missing = -(-slots // self.pool.page) - len(held)
        if missing > 0:
            held += self.pool.claim(missing)
            self.enter(b, h, len(held) - missing)

    def enter(self, b: int, h: int, first: int = 0, n: int | None = None) -> None:
        """Writes pages of a head into the table, n of them from the first-th on."""
        end = None if n is None else first + n
        chunks, per_page = self.pool.chunks_of(self.pages[b][h][first:end]), self.pool.per_page
        entries = self.table[b, h, first * per_page :][: len(chunks)]
        entries.copy_(chunks[: len(entries)])

    def take_over(self, row: int, other: "Paged", share: bool) -> None:
        """The pages of `other`, of one sequence, become sequence row's, or its too."""
        for h, theirs in enumerate(other.pages[0]):
            self.pages[row][h] += theirs
            self.enter(row, h)
            if share:
                self.pool.share(theirs)
            else:
                theirs.clear()

    def unshare(self, row: int, head: int, index: int) -> None:
        """Before a page is written to: one that others refer to, too, is copied."""
        held = self.pages[row][head]
        if self.pool.refs[held[index]] > 1:
            old, [held[index]] = held[index], self.pool.claim(1)
            self.pool.copy(old, held[index])
            self.pool.release([old])
            self.enter(row, head, index, 1)

    def idle(self, row: int, page: int) -> None:
        """Whatever sequence row writes from now on, of which nothing is kept, goes to this page."""
        self.table[row] = page * self.pool.per_page

    def release(self, sequence):
        for held in self.pages[sequence]:
            self.pool.release(held)
            held.clear()
        self.table[sequence] = 0


class Pool:
    """Memory for pages, and who has which: all on the host, and never inside a graph. Everything in O(1) a page.

    Every page has a count of the heads that refer to it. Free ones are handed out again in the order in which they were
    freed, and until then a prefix that they hold can be found (`Prefixes`). pages: how many there are; None: as many as
    are claimed, for sequences whose lengths are known.
    """

    def __init__(self, page: int, pages: int | None, device, memory: "Memory | None" = None):
        self.prefixes, self.memory = Prefixes(self), memory or Memory(device)
        self.page, self.fixed, self.device = page, pages is not None, torch.device(device)
        # Slots that lie side by side; more than a vector's worth has no use.
        self.chunk = page if page < CHUNK else math.gcd(page, CHUNK)
        self.per_page = page // self.chunk
        self.parts: dict[tuple, Tensor] = {}
        self.refs: list[int] = []
        self.free: OrderedDict[int, None] = OrderedDict()
        self.expected: dict[int, int] = {}  # pages, of each layer, that are going to be claimed
        self.enlarge(pages or 0)

    def part(self, key: tuple, sample: Tensor) -> Tensor:
        """The buffer [pages * per_page, ..] of parts that look like `sample`, a chunk. All layers have the same one."""
        if key not in self.parts:
            shape = len(self.refs) * self.per_page, *sample.shape
            self.parts[key] = self.memory.zeros(shape, sample.dtype)
            torch._dynamo.maybe_mark_dynamic(self.parts[key], 0)
        return self.parts[key]

    def enlarge(self, pages: int) -> None:
        """So many pages in all, new ones free. In place: every layer's buffer is the same tensor."""
        old = len(self.refs)
        for part in self.parts.values():
            larger = self.memory.zeros((pages * self.per_page, *part.shape[1:]), part.dtype)
            larger[: len(part)] = part
            part.set_(larger)
        self.free.update(dict.fromkeys(range(old, pages)))
        self.refs += [0] * (pages - old)

    @property
    def used(self) -> int:
        return len(self.refs) - len(self.free)

    def claim(self, n: int) -> list[int]:
        """n free pages, those first that have been free for longest."""
        missing = n - len(self.free)
        if missing > 0 and self.fixed:
            raise OutOfPages(n, len(self.free))
        if missing > 0:
            self.enlarge(max(len(self.refs) + missing, sum(self.expected.values())))
        pages = [self.free.popitem(last=False)[0] for _ in range(n)]
        for page in pages:
            self.refs[page] = 1
            self.prefixes.forget(page)
        return pages

    def share(self, pages: list[int]) -> None:
        """One reference more to each, be it in use or only not yet used again."""
        for page in pages:
            if not self.refs[page]:
                del self.free[page]
            self.refs[page] += 1

    def release(self, pages: list[int]) -> None:
        """One reference less to each; the tail of a sequence is free first, so that its beginning is longest found."""
        for page in reversed(pages):
            self.refs[page] -= 1
            if not self.refs[page]:
                self.free[page] = None

    def copy(self, old: int, new: int) -> None:
        for part in self.parts.values():
            part.unflatten(0, (-1, self.per_page))[new] = part.unflatten(0, (-1, self.per_page))[old]

    def chunks_of(self, pages: list[int]) -> Tensor:
        """The chunks [n * per_page] of n pages, in order."""
        return (torch.tensor(pages)[:, None] * self.per_page + torch.arange(self.per_page)).flatten()

    @property
    def named(self) -> dict[str, Tensor]:
        return {f"{'k' if is_key else 'v'}{i}": part for (is_key, i), part in self.parts.items()}

    def content(self, block: "Block") -> dict[str, Tensor]:
        """What a block holds, on the host: of its n pages each part, [n * per_page, ..], and what it has exactly."""
        at = self.chunks_of(block.pages).to(self.device)
        held = {name: part[at] for name, part in self.named.items()} | block.exact
        return {name: x.cpu() for name, x in held.items()}

    def shapes(self, block: "Block", pages: int) -> dict[str, tuple]:
        """Dtypes and shapes of `content`, once the block has so many pages."""
        held = {name: (part.dtype, (pages * self.per_page, *part.shape[1:])) for name, part in self.named.items()}
        return held | {name: (x.dtype, (*x.shape,)) for name, x in block.exact.items()}

    def fill(self, block: "Block", content: dict[str, Tensor]) -> None:
        """The inverse of `content`."""
        at = self.chunks_of(block.pages).to(self.device)
        for name, part in self.named.items():
            part[at] = content[name].to(self.device)
        block.exact = {name: content[name].to(self.device) for name in block.exact}


class Memory:
    """Where stores keep what they write down: on the device. Another kind is another `zeros`."""

    away = False  # is it another one than the device's?

    def __init__(self, device):
        self.device = torch.device(device)
        self.layers: list[Dense] = []  # dense ones that are read where they are, in order

    def zeros(self, shape: tuple, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def expect(self, layout: Dense) -> None:
        """Told which layer is next, before it reads."""


class Disk(Memory):
    """Files that are mapped into memory: what is read comes up, page by page, and may leave again when memory is short.

    A file has no name: nobody else can open it, and it is gone when the process is, however that ends. Dense layers
    are asked for one ahead, so that the disk reads one while another computes.
    """

    away = True

    def __init__(self, path: str):
        """path: a directory. Raises SpecError if no file can be made there."""
        super().__init__("cpu")
        self.path, self.maps, self.waited = path, {}, 0
        with self.file():
            pass

    def file(self):
        try:
            return tempfile.TemporaryFile(dir=self.path, prefix="kv-fast-")
        except OSError as error:
            raise SpecError(f"--offload disk:{self.path}: {error.strerror}; give a directory to write to") from None

    def zeros(self, shape, dtype):
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.zeros(shape, dtype=dtype)
        with self.file() as file:
            try:
                allocate = getattr(os, "posix_fallocate", lambda file, start, n: os.ftruncate(file, n))  # as on a Mac
                allocate(file.fileno(), 0, nbytes)
            except OSError as error:
                free = shutil.disk_usage(self.path).free
                raise SpecError(
                    f"--offload disk:{self.path}: {nbytes:,} bytes more do not fit ({error.strerror}; {free:,} are "
                    f"free); give another directory, or fewer --bits or --budget"
                ) from None
            mapped = mmap.mmap(file.fileno(), nbytes)
        part = torch.frombuffer(mapped, dtype=dtype).view(shape)
        self.maps = {at: known for at, known in self.maps.items() if known() is not None}
        self.maps[part.data_ptr()] = weakref.ref(mapped)
        return part

    def expect(self, layout):
        """Of dense layers, the one after this comes up, if it reads all that it has. (Pages are anywhere in their
        files.) Only if the disk was waited for since: asking for what is there takes a quarter of a step."""
        import resource  # which Windows has not

        waited = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        if layout.pool is not None or waited == self.waited:
            return
        self.waited, following = waited, self.layers[(layout.number + 1) % len(self.layers)]
        for part in following.held.values() if following.reads_all else ():
            self.maps[part.data_ptr()]().madvise(mmap.MADV_WILLNEED)


class Host(Memory):
    """The host's memory, from which a GPU copies without waiting."""

    away = True

    def __init__(self):
        super().__init__("cpu")

    def zeros(self, shape, dtype):
        return torch.zeros(shape, dtype=dtype, pin_memory=torch.cuda.is_available())


class Stage:
    """Two places on the device for layers whose home is elsewhere, which take turns: a layer's is free for the next but
    one once its step is computed and its new tokens are home.

    One worker does all copies, in order. It starts when the layer that used the place is done, and a layer waits for
    its own, so that no place is written while it is read. Homes are the truth: a place can be filled again at any time.
    """

    def __init__(self, device):
        self.device, self.layers = torch.device(device), []
        self.worker = ThreadPoolExecutor(1)
        self.places: tuple[dict, dict] = {}, {}
        self.holds: list[int | None] = [None, None]  # the layer whose content is in each place, or on its way
        self.coming: list[Future | None] = [None, None]
        self.stream = torch.cuda.Stream(device) if self.device.type == "cuda" else None

    def place(self, number: int, key: tuple, home: Tensor) -> Tensor:
        """A part of a layer, with what its home holds, in the memory that it shares with every other layer's."""
        place = self.places[number % 2]
        if key not in place:
            place[key] = torch.zeros(0, dtype=torch.uint8, device=self.device).untyped_storage()
        if place[key].nbytes() < home.nbytes:
            place[key].resize_(home.nbytes)  # for all that refer to it
        self.holds[number % 2] = number
        return torch.empty(0, dtype=home.dtype, device=self.device).set_(place[key], 0, home.shape).copy_(home)

    def enter(self, number: int) -> None:
        self.wait(number % 2)
        if self.holds[number % 2] != number:
            self.copy(number)

    def wait(self, i: int) -> None:
        coming, self.coming[i] = self.coming[i], None
        if coming is not None:
            coming.result()

    def copy(self, number: int) -> None:
        """A layer comes up."""
        self.layers[number].up()
        self.holds[number % 2] = number

    def leave(self, number: int, slot: Tensor) -> None:
        """After a step that wrote to slot [B,H,1]: that goes home, and the next layer of this place comes up."""
        following = number + 2 if number + 2 < len(self.layers) else number % 2
        done = torch.cuda.Event() if self.stream else None
        if done:
            done.record()

        def work() -> None:
            with torch.no_grad(), torch.cuda.stream(self.stream) if done else contextlib.nullcontext():
                if done:
                    self.stream.wait_event(done)
                self.layers[number].down(slot)
                if following != number:
                    self.layers[following].up()
                if done:
                    self.stream.synchronize()

        self.holds[number % 2] = following
        self.coming[number % 2] = self.worker.submit(work)


class Staged(Dense):
    """A place of its own for every sequence in another memory, from where a layer comes up in time (`Stage`)."""

    def __init__(self, batch: int, heads: int, memory: Memory, stage: Stage):
        super().__init__(batch, heads, memory)
        self.stage, self.number = stage, len(stage.layers)
        self.shown: dict[tuple, Tensor] = {}  # what is held, on the device
        newest = torch.zeros(batch, heads, 1, dtype=torch.int64, device=stage.device)
        self.register_buffer("newest", newest, persistent=False)
        stage.layers.append(self)

    def buffer(self, key, sample, old, slots):
        """Stores see the place on the device."""
        self.stage.wait(self.number % 2)
        home = super().buffer(key, sample, self.held.get(key), slots)
        self.shown[key] = self.stage.place(self.number, key, home)
        torch._dynamo.maybe_mark_dynamic(self.shown[key], 2)
        return self.shown[key]

    def up(self) -> None:
        for key, part in self.shown.items():
            part.copy_(self.held[key], non_blocking=True)

    def down(self, slot: Tensor | None = None) -> None:
        """Home goes all, or what is in slot [B,H,1]; of keys whose unit is a chunk, that."""
        for (is_key, i), part in self.shown.items():
            home = self.held[is_key, i]
            if slot is None:
                home.copy_(part)
                continue
            at = *rows(slot), slot // CHUNK
            if not (is_key and self.unit > 1):
                at = (*at, slice(None), slot % CHUNK) if is_key or i else (*at, slot % CHUNK)
            home[tuple(x.cpu() if isinstance(x, Tensor) else x for x in at)] = part[at].cpu()

    def begin(self):
        self.stage.enter(self.number)

    def end(self, step):
        if step:
            self.stage.leave(self.number, self.newest)
        else:
            self.down()

    def wrote(self, slot):
        self.newest.copy_(slot)


class OutOfPages(Exception):
    """A pool of a fixed size has no more free pages."""


@dataclass(eq=False, repr=False)
class Block:
    """As many tokens of a text as a page has slots, and the pages that hold them: head by head of the first layer, then
    of the next. The block that completes the first tokens has those exactly, too, for rings: k [L,H,D,sink] and v
    [L,H,sink,D]."""

    key: object
    parent: "Block | None"
    tokens: tuple[int, ...]
    pages: list[int]
    exact: dict[str, Tensor]


def chained(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(parent + repr(tokens).encode(), digest_size=16).digest()


class Prefixes:
    """Full pages by what they hold: a hash of a block's tokens and of the block before it.

    A hash only says where to look: a block is found if its tokens are the same, and follow the same block. It can be
    found until one of its pages is claimed again, and never before it was computed.
    """

    def __init__(self, pool: "Pool"):
        self.pool, self.salt, self.hash = pool, b"", chained
        self.blocks: dict[object, Block] = {}
        self.of_page: dict[int, Block] = {}

    def find(self, tokens: list[int]) -> list[Block]:
        """The blocks that a text begins with, as far as they are known; never all of it: its last token is computed."""
        found, parent = [], None
        for block in self.split(tokens[:-1]):
            parent = self.known(parent, block)
            if parent is None:
                break
            found.append(parent)
        return found

    def known(self, parent: Block | None, tokens: tuple[int, ...]) -> Block | None:
        block = self.blocks.get(self.key(parent, tokens))
        return block if block and block.parent is parent and block.tokens == tokens else None

    def publish(self, tokens: list[int], pages: list[list[int]], exact: Callable[[], dict] = dict) -> list[Block]:
        """The blocks of a text that was computed: pages of each head of all layers. exact: what rings hold of the first
        tokens, for the first block that has all of those."""
        found: list[Block] = []
        for j, block in enumerate(self.split(tokens)):
            known = self.known(found[-1] if found else None, block)
            if known is None:
                known = self.block(found, block, [held[j] for held in pages], exact)
                self.blocks[known.key] = known
                self.of_page.update(dict.fromkeys(known.pages, known))
            found.append(known)
        return found

    def block(self, before: list[Block], tokens: tuple[int, ...], pages: list[int], exact: Callable[[], dict]) -> Block:
        """The one that comes after those `before` it; exact as in `publish`."""
        parent, first = before[-1] if before else None, len(before) * self.pool.page
        completes = first < SINK <= first + self.pool.page
        return Block(self.key(parent, tokens), parent, tokens, pages, exact() if completes else {})

    def split(self, tokens: list[int]) -> list[tuple[int, ...]]:
        page = self.pool.page
        return [tuple(tokens[i : i + page]) for i in range(0, len(tokens) - page + 1, page)]

    def key(self, parent: Block | None, tokens: tuple[int, ...]):
        return self.hash(self.salt if parent is None else parent.key, tokens)

    def clear(self) -> None:
        self.blocks.clear()
        self.of_page.clear()

    def forget(self, page: int) -> None:
        """A page gets other content."""
        block = self.of_page.pop(page, None)
        if block is None:
            return
        for other in block.pages:
            if self.of_page.get(other) is block:
                del self.of_page[other]
        if self.blocks.get(block.key) is block:
            del self.blocks[block.key]


def findable(layers: list[KVCache], tokens: int) -> int:
    """How many blocks of a text may be found: its last token is computed, and what a ring holds of its end."""
    ring = layers[0].residual
    return max(tokens - (1 if ring is None else ring.length), 0) // layers[0].layout.pool.page


def begin(layers: list[KVCache], found: list[Block]) -> int:
    """Caches of one sequence begin with what these blocks hold, and take over a reference to each page. Returns how
    many tokens that is: none, if a ring needs more of the first ones."""
    pool, H, ring = layers[0].layout.pool, layers[0].layout.heads, layers[0].residual
    hit = len(found) * pool.page
    if hit < (1 if ring is None else ring.sink):
        pool.release([page for block in found for page in block.pages])
        return 0
    for i, cache in enumerate(layers):
        cache.resume([[block.pages[i * H + h] for block in found] for h in range(H)], hit)
        if ring is not None:
            exact = found[-(-SINK // pool.page) - 1].exact
            cache.residual.restore(exact["exact_k"][i], exact["exact_v"][i])
    return hit


def first_tokens(layers: list[KVCache], row: int) -> dict[str, Tensor]:
    """What rings hold of the first tokens of sequence row, as in `Block`; nothing where there are none."""
    if layers[0].residual is None:
        return {}
    pairs = [cache.residual.first(row) for cache in layers]
    return dict(zip(("exact_k", "exact_v"), map(torch.stack, zip(*pairs, strict=True)), strict=True))


def publish(layers: list[KVCache], row: int, tokens: list[int]) -> list[Block]:
    """The blocks of a text that sequence row holds, which from now on can be found."""
    pages = [held for cache in layers for held in cache.layout.pages[row]]
    return layers[0].layout.pool.prefixes.publish(tokens, pages, lambda: first_tokens(layers, row))


# ---------------------------------------------------------------------------------------------------------------------
# Names


@dataclass(frozen=True)
class Form:
    """How keys or values are written down: the name of a format, bits of a number, further arguments."""

    name: str
    bits: int
    arguments: tuple[tuple[str, int | str], ...] = ()

    def __str__(self) -> str:
        return self.name + "".join(f"{',' if i else ':'}{k}={v}" for i, (k, v) in enumerate(self.arguments))

    @property
    def unit(self) -> int:
        """Slots whose keys share something."""
        return self.store(True, 64, torch.float32, "meta").unit

    def effective(self, dim: int) -> float:
        """Bits that one element of a head of `dim` channels takes, scales and the like included; 16 mean bf16."""
        stores = [self.store(is_key, dim, torch.bfloat16, "cpu") for is_key in (True, False)]
        parts = [part for store in stores for part in store.encode(torch.zeros(CHUNK, dim))]
        return sum(part.nbytes for part in parts) * 8 / (2 * CHUNK * dim)

    def store(self, is_key: bool, dim: int, dtype: torch.dtype, device) -> Store:
        kind = FORMATS[self.name]
        kind = kind.of_keys if is_key and kind.of_keys else kind
        return kind(is_key, dim, dtype, device, self.bits, **dict(self.arguments))


@dataclass(frozen=True)
class CacheSpec:
    """What `build` returns: a recipe for one KVCache a layer, for `model.setup_caches(spec, batch, max_seq_len)`."""

    name: str
    policy: Callable[[], Policy]
    budget: int | float
    k: Form
    v: Form
    residual: int
    page: int = 0  # slots of a page; 0: no pages
    select: int | float | None = None  # tokens that a step reads, or a fraction; None: all
    offload: str = "none"  # none, cpu, or disk:DIR
    away: tuple[int, ...] | None = None  # the layers that are offloaded; None: all
    staged: bool = False  # do layers come up whole? Always where the device is not the CPU
    dense: int = 2  # layers, from the first on, that read all nevertheless: their attention is spread (2406.10774)
    given: tuple = ()  # what `build` was told, but for pages

    @property
    def layout(self) -> str:
        return f"paged by {self.page}" if self.page else "dense"

    @property
    def where(self) -> str:
        """Of what is offloaded, for a report."""
        return "in the host's memory" if self.offload == "cpu" else "on disk"

    @property
    def bits(self) -> int | str:
        return self.k.bits if self.k.bits == self.v.bits else f"k={self.k.bits},v={self.v.bits}"

    @property
    def format(self) -> str:
        return str(self.k) if str(self.k) == str(self.v) else f"k={self.k},v={self.v}"

    @property
    def identity(self) -> str:
        """What decides how a text that is kept whole is written down, the same in every process."""
        forms = (f"{which}={form},{form.bits}" for which, form in (("k", self.k), ("v", self.v)))
        return " ".join([self.name, *forms, f"residual={self.residual}", f"page={self.page}"])

    def why_no_prefix(self) -> str | None:
        """Why two texts that begin alike cannot share pages, if they cannot."""
        if not self.policy().everything:
            return f"{self.name} keeps what the end of a prompt looks at"
        kinds = {str(f): f.store(True, 64, torch.float32, "meta").alone for f in (self.k, self.v)}
        scaled = [name for name, alone in kinds.items() if not alone]
        return f"{scaled[0]} has a scale that a whole prompt sets" if scaled else None

    @property
    def endless(self) -> bool:
        """May a text be longer than the model's positions?"""
        return self.policy().relative

    def page_bytes(self, dim: int, dtype: torch.dtype) -> int:
        """Bytes of a page of one head: keys and values, scales included."""
        stores = [form.store(is_key, dim, dtype, "cpu") for form, is_key in ((self.k, True), (self.v, False))]
        return (
            sum(part.nbytes for store in stores for part in store.encode(torch.zeros(CHUNK, dim))) * self.page // CHUNK
        )

    def nbytes(self, args, prompt: int, new: int, dtype: torch.dtype) -> int:
        """Bytes that the caches of one sequence are going to have: of every KV head of every layer, with S slots,

            ceil(S/32) * (codes and scales of 32 slots, keys and values)
            + S * (4 for a position, 4 for a rank, if the policy has some, 4 for a length, if it is keydiff)
            + (4 + residual) * (2 * head_dim numbers of the model's own dtype, 4 for a slot)
            + 32 * head_dim such numbers if the keys' format fills units (kivi)

        args: the model's shape. S is the layer's part of the budget and, where the policy appends, room for what
        follows. Where heads of a layer share a budget (adakv) it is their mean, which is what they take in pages.
        """
        policy, D, e = self.policy(), args.head_dim, dtype.itemsize
        stores = [self.k.store(True, D, dtype, "cpu"), self.v.store(False, D, dtype, "cpu")]
        chunk = sum(part.nbytes for store in stores for part in store.encode(torch.zeros(CHUNK, D)))
        slot = 4 + 4 * isinstance(policy, Ranked) + 4 * isinstance(policy, KeyDiff)
        ring = min(self.residual, prompt + new)
        exact = (SINK + ring) * (2 * D * e + 4) if ring else 0
        exact += CHUNK * D * e if self.k.unit > 1 else 0
        slots = [S + new if policy.appends else min(S, prompt + new) for S in self.slots(prompt, args.n_layer)]
        return args.n_kv_head * sum(-(-S // CHUNK) * chunk + S * slot + exact for S in slots)

    def slots(self, prompt: int, n_layer: int) -> list[int]:
        """Slots per KV head that each layer may give to a prompt of that many tokens."""
        policy, budget = self.policy(), self.budget
        if isinstance(budget, float):  # a fraction of a short prompt never falls below what the policy needs
            budget = max(round(budget * prompt), policy.least())
        return policy.budgets(budget, prompt, n_layer)

    def __call__(
        self,
        args,
        rope: Tensor,
        batch: int,
        max_seq_len: int,
        dtype: torch.dtype,
        device,
        pool: "Pool | None" = None,
    ) -> list[KVCache]:
        """args: the model's shape (n_layer, n_kv_head, head_dim, max_seq_len); rope: its rotary frequencies [D/2];
        dtype: what 16 bits means, the model's own; pool: pages that other caches claim from, too."""
        if max_seq_len > LONGEST:
            raise SpecError(
                f"a text of {max_seq_len:,} tokens: positions are int32, so that at most {LONGEST:,} fit; "
                "lower --max-new-tokens"
            )
        most = longest_window(args.max_seq_len)
        if self.endless and max_seq_len > args.max_seq_len and self.policy().least() > most:
            raise SpecError(
                f"--cache {self.name}: {self.policy().sink} sinks; for text beyond the model's {args.max_seq_len} "
                f"positions there are at most {most} slots, so give at most {most - 1} sinks"
            )
        length, dim = min(self.residual, max_seq_len), args.head_dim
        slots = functools.lru_cache(lambda prompt: self.slots(prompt, args.n_layer))  # one plan, for all layers
        memory, near = self.memory(device), Memory(device)
        staged = memory.away and (self.staged or torch.device(device).type != "cpu")
        stage = Stage(device) if staged else None
        pool = Pool(self.page, None, device, memory) if self.page and pool is None else pool

        def place(i: int) -> Dense:
            if pool is not None:
                return Paged(batch, args.n_kv_head, pool, device)
            if self.away is not None and i not in self.away:
                return Dense(batch, args.n_kv_head, near)
            if stage is not None:
                return Staged(batch, args.n_kv_head, memory, stage)
            layout = Dense(batch, args.n_kv_head, memory)
            layout.number = len(memory.layers)
            memory.layers.append(layout)
            return layout

        def layer(i: int) -> KVCache:
            layout = place(i)
            k_store, v_store = self.k.store(True, dim, dtype, device), self.v.store(False, dim, dtype, device)
            residual = Residual(length, SINK, layout, dim, dtype, device) if length else None
            policy = self.policy().attach(i, rope, args.max_seq_len)
            selects = self.select is not None and i >= self.dense
            by = Channels if type(k_store) is Store else Bounds
            selection = by(self.select, layout, dim, dtype, device) if selects else None
            return KVCache(policy, k_store, v_store, layout, residual, lambda T: slots(T)[i], selection)

        return [layer(i) for i in range(args.n_layer)]

    def memory(self, device) -> Memory:
        """Where codes live, for a model on that device. Raises SpecError where that cannot be."""
        kind, _, path = self.offload.partition(":")
        if kind == "none":
            return Memory(device)
        if torch.device(device).type == "cpu" and kind == "cpu":
            raise SpecError("--offload cpu: the model is on the CPU, and so in its memory already; choose disk")
        wrong = "--page-size" if self.page else "--select" if self.select is not None else None
        if wrong and torch.device(device).type != "cpu":
            raise SpecError(f"--offload {self.offload} {wrong}: on a GPU layers come up whole; drop one of them")
        return (
            Host()
            if kind == "cpu"
            else Disk(path or ("/var/tmp" if os.path.isdir("/var/tmp") else tempfile.gettempdir()))
        )


def build(
    cache: str = "full",
    *,
    budget: int | float | None = None,
    bits: int | str | None = None,
    format: str = "auto",
    residual: int | None = None,
    page_size: int = 0,
    select: int | float | None = None,
    offload: str = "none",
) -> CacheSpec:
    """A cache from names.

    cache: `full`, or `NAME[:key=value,..]` with the arguments of the policy's class, as in `snapkv:window=32,pool=max`.
    budget: slots per KV head, averaged over layers, sinks and window included: a count (int), or a fraction of the
    prompt (float up to 1.0). Default 0.2. bits: 16 (the model's dtype, the default), 8, 4 or 2, or of keys and
    values apart, `k=4,v=2`. format: auto or one of FORMATS, as `NAME[:key=value,..]`, also apart: `k=int,v=nvfp4`.
    residual: how many of the newest tokens are also kept exactly, and the first 4; default 128 below 16 bits.
    page_size: slots of a page, any number; 0: no pages. select: how many tokens a step reads of all that a head holds,
    as a count or a fraction; default all. offload: where what is written down lives: none (the device), cpu (the
    host's memory, for a GPU), or disk, also `disk:DIR`.
    Raises SpecError, which names the flag, what was given and what would work.
    """
    name, _, rest = cache.partition(":")
    if name not in POLICIES:
        raise SpecError(
            f"--cache {name}: no such policy{near(name, POLICIES)}; choose from {', '.join(POLICIES)} (--cache help "
            "explains them)"
        )
    arguments = parse_arguments("--cache", name, POLICIES[name], rest)
    forms = [form(*given) for given in zip(apart("--format", format), apart("--bits", bits), (0, 1), strict=True)]
    exact, unit = all(f.bits == 16 for f in forms), forms[0].unit

    def make() -> Policy:
        policy = POLICIES[name](**arguments)
        policy.unit = unit
        return policy

    try:
        policy = make()
    except SpecError as error:
        raise SpecError(f"--cache {cache}: {error}") from None
    if policy.rereads and unit > 1:
        raise SpecError(
            f"--cache {name} --format {forms[0].name}: {name} weighs the keys as they are stored, and those of "
            f"{forms[0].name} change while their unit of {unit} tokens fills; choose --format int, or another policy"
        )
    if exact and residual is not None:
        raise SpecError(f"--residual {residual}: means nothing at 16 bits; give --bits 8, 4 or 2 as well")
    if residual is not None and (not isinstance(residual, int) or residual < 0):
        raise SpecError(f"--residual {residual}: give a number of tokens, 0 or more")
    if not isinstance(page_size, int) or not 0 <= page_size < 2**20:
        raise SpecError(f"--page-size {page_size}: give the slots of a page, 1 to {2**20 - 1}, or 0 for no pages")
    if page_size % unit:
        raise SpecError(
            f"--page-size {page_size}: {unit} tokens of --format {forms[0].name} share the scales of their keys; give "
            f"a multiple of {unit}, or choose --format int"
        )
    if offload not in ("none", "cpu", "disk") and not re.match("disk:.", offload):
        raise SpecError(f"--offload {offload}: choose none, cpu, disk or disk:DIR")
    if select is not None:
        check_select(select, name, policy, page_size)
    if budget is not None and name == "full":
        raise SpecError(f"--budget {budget}: full keeps every token; choose --cache {', '.join(list(POLICIES)[1:])}")
    return CacheSpec(
        name,
        make,
        check_budget(name, policy, 0.2 if budget is None else budget),
        *forms,
        0 if exact else RESIDUAL if residual is None else residual,
        page_size,
        select,
        offload,
        given=(cache, budget, bits, format, residual),
    )


def apart(flag: str, value: int | str | None) -> tuple[int | str | None, int | str | None]:
    """What a flag says of keys and of values: `X` is for both, `k=X,v=Y` for each."""
    text = str(value)
    if "k=" not in text and "v=" not in text:
        return value, value
    parts = re.fullmatch(r"k=(.+),v=(.+)|v=(.+),k=(.+)", text)
    if parts is None or "k=" in text.split("k=", 1)[1] or "v=" in text.split("v=", 1)[1]:
        raise SpecError(f"{flag} {text}: give one value, or one for keys and one for values, as in k=4,v=2")
    return parts[1] or parts[4], parts[2] or parts[3]


def form(text: str, bits: int | str | None, which: int) -> Form:
    """A format by its name, `NAME[:key=value,..]` or auto, and a number of bits, or None: the name decides. Of keys (0)
    or values (1), which is what auto depends on."""
    name, _, rest = str(text).partition(":")
    if name not in ("auto", *FORMATS):
        raise SpecError(
            f"--format {name}: no such format{near(name, FORMATS)}; choose from auto, {', '.join(FORMATS)} (--format "
            "help explains them)"
        )
    if bits is None:
        widths = (16,) if name == "auto" else FORMATS[name].widths
        if len(widths) > 1:
            raise SpecError(f"--format {name}: give --bits {either(widths)} as well")
        bits = widths[0]
    offered = [*AUTO] if name == "auto" else FORMATS[name].widths
    if str(bits) not in map(str, offered):
        why = "choose" if name == "auto" else f"{name} has"
        raise SpecError(f"--bits {bits}: {why} {either(offered)}")
    if name == "auto":
        if rest:
            raise SpecError(f"--format {text}: auto takes no arguments; name a format, as in int:{rest}")
        name, _, rest = AUTO[int(bits)][which].partition(":")
    arguments = tuple(parse_arguments("--format", name, FORMATS[name], rest).items())
    made = Form(name, int(bits), arguments)
    try:
        made.unit  # noqa: B018  a store can be made
    except SpecError as error:
        raise SpecError(f"--format {text}: {error}") from None
    return made


def near(name: str, known) -> str:
    """Which of the known names was probably meant, to be added to what is said of that one; nothing if none was."""
    found = difflib.get_close_matches(name.lower(), known, 1)
    return f" (did you mean {found[0]}?)" if found else ""


def either(items) -> str:
    *first, last = map(str, items)
    return f"{', '.join(first)} or {last}" if first else last


def describe() -> str:
    """What `--cache help` prints: every policy with its paper, and its arguments with their defaults."""
    lines = ["--cache NAME, or NAME:key=value,key=value", ""]
    for name, policy in POLICIES.items():
        when = "never evicts" if policy is Full else "once, after the prompt" if policy.appends else "at every step"
        lines += [f"{name:10} {inspect.getdoc(policy).splitlines()[0]}"]
        lines += [" " * 11 + "; ".join([when, *arguments_of(policy)]), ""]
    return "\n".join(lines + [ARGUMENTS])


def describe_formats(dim: int = 64) -> str:
    """What `--format help` prints: every format, what an element of a cache takes with it, and its arguments."""
    lines = ["--format NAME, or NAME:key=value,key=value; of keys and values apart: k=NAME,v=NAME", ""]
    for name, store in FORMATS.items():
        lines += [f"{name:10} {inspect.getdoc(store).splitlines()[0]}"]
        sizes = [f"--bits {b}: {Form(name, b).effective(dim):g} bits an element" for b in store.widths]
        lines += [" " * 11 + "; ".join([*sizes, *arguments_of(store)]), ""]
    auto = [f"auto       --bits {b}: {build(bits=b).format}" for b in AUTO]
    return "\n".join([*lines, *auto, "", FORMAT_ARGUMENTS])


def arguments_of(part: type) -> list[str]:
    """The arguments that a name takes after a colon, with their defaults, in one text; none if there are none."""
    known = [f"{key}={value}".lower() for key, value in arguments_and_defaults(part).items()]
    return [", ".join(known)] if known else []


def arguments_and_defaults(part: type) -> dict:
    positional = ("is_key", "dim", "dtype", "device", "bits")  # what every store is told
    return {p.name: p.default for p in inspect.signature(part).parameters.values() if p.name not in positional}


FORMAT_ARGUMENTS = """\
group      channels that share a scale; kivi: of values, keys share one over 32 tokens
solver     how the range of a group is found: minmax, mse (least squares) or hqq"""

ARGUMENTS = """\
sink       first tokens that always stay
recent     newest tokens that always stay; h2o: below 1, a part of the budget
window     last tokens of the prompt, whose attention decides; they always stay
kernel     neighbours that are smoothed over, an odd number
pool       how they are smoothed: avg or max
beta       pyramid: the top layer gets 1/beta of the average beyond the window
reference  pyramid: true for the authors' own layer budgets, which overshoot
floor      adakv: part of an even share that every head has for certain
future     expected: positions to come that are averaged over
seed       random: which draw"""


def check_budget(name: str, policy: Policy, budget: int | float) -> int | float:
    least = policy.least()
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
            f"--budget {budget}: {name} always keeps the first {policy.sink} tokens (sink) and the last "
            f"{policy.newest(budget)} ({'window' if isinstance(policy, SnapKV) else 'recent'})"
            + (f", in whole units of {policy.unit}" if policy.unit > 1 and not policy.appends else "")
            + f"; give at least {least}, or 1.0 for everything"
        )
    return budget


def check_select(select: int | float, name: str, policy: Policy, page: int) -> None:
    if isinstance(select, bool) or not isinstance(select, (int, float)) or not 0 < select < 2**31:
        raise SpecError(f"--select {select}: give a number of tokens, or a fraction such as 0.1")
    if isinstance(select, float) and select > 1:
        raise SpecError(f"--select {select}: give a whole number of tokens, or a fraction up to 1.0")
    if isinstance(select, int) and select < Selection.LEAST:
        raise SpecError(
            f"--select {select}: it picks {CHUNK} tokens at a time, and always the first and the newest; give at least "
            f"{Selection.LEAST}"
        )
    if not policy.appends:
        appending = [n for n, p in POLICIES.items() if p.appends]
        raise SpecError(
            f"--select {select} --cache {name}: {name} puts new tokens where old ones were, and it takes slots for "
            f"tokens in order; choose --cache {either(appending)}"
        )
    if page and page < CHUNK and CHUNK % page:
        raise SpecError(
            f"--select {select} --page-size {page}: it picks {CHUNK} slots at a time; give a page of 1, 2, 4, 8, 16 or "
            f"{CHUNK} slots, or a larger one"
        )


def parse_arguments(flag: str, name: str, part: type, text: str) -> dict[str, int | float | str]:
    """`key=value,..` with the types of the part's defaults."""
    known = arguments_and_defaults(part)
    assert inspect.Parameter.empty not in known.values(), f"{name}: every argument needs a default"
    arguments = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key in arguments:
            raise SpecError(f"{flag} {name}:{text}: {key} is given twice")
        if key not in known:
            takes = ", ".join(known) or "none"
            raise SpecError(f"{flag} {name}:{item}: unknown key{near(key, known)}; {name} takes {takes}")
        try:
            convert = {"true": True, "false": False}.__getitem__ if isinstance(known[key], bool) else type(known[key])
            arguments[key] = convert(value)
        except (ValueError, KeyError):
            raise SpecError(f"{flag} {name}:{item}: {key} takes a value like {str(known[key]).lower()}") from None
        if not isinstance(arguments[key], str) and arguments[key] < 0:
            raise SpecError(f"{flag} {name}:{item}: {key} cannot be negative")
        if not isinstance(arguments[key], str) and not arguments[key] < 2**31:
            raise SpecError(f"{flag} {name}:{item}: {key} must be below 2^31")
    return arguments
