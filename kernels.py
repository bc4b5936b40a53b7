"""kernels.py: what the hardware does. Tensors in, tensors out; nothing here knows a policy, a store or a layer.

    linear             one matrix product of the model
    few_rows           the same for several sequences' tokens on a CPU with bf16 products
    attend_native      a step's attention on such a CPU, and `choose`, the chunks that are worth it
    causal_attention   the prompt attends to itself (prefill)
    attend_chunk       a later chunk attends to cached slots and causally to itself (second turn of a chat)
    column_mass        what attention every key of a prompt receives, exactly, without T x T (H2O's evidence)
    window_mass        the same of the last queries only (SnapKV's evidence)
    expected_mass      the same of queries that are still to come (ExpectedAttention's evidence)
    rotary, apply_rope rotary positions
    dot, mix           q . K and p . V straight from the written-down form of a cache, one query per sequence
    softmax            one softmax over several pieces of a cache
    pack, unpack       small integers in bytes
    between            integers for the numbers of a range; minmax, mse and hqq say which range
    e2m1, minifloat    floats of four and eight bits, to and from codes
    rotation           the signed Hadamard matrix that spreads outlier channels
    attend, merge      a GPU's dot, softmax and mix in one Triton kernel, in pieces, and what puts them together
    all_sum            what processes that share a model compute, together
    recorded, ready    the kernels of a compiled CPU step, called again without the Python between them

On a GPU Triton kernels attend to a cache and weigh a prompt; everything else, on a CPU everything, is plain PyTorch.
There that *is* the implementation: `dot` and `mix` are products and sums over a dim that is not the innermost one, so
Inductor makes one vector loop of unpacking, scaling and multiplying, and no dequantized tensor exists. Anything of size
T x T is left out on purpose.

Shapes: B sequences, H KV heads, G query heads per KV head, T tokens, S slots, D head dim; n chunks of C = CHUNK slots.
"""

import collections
import contextlib
import ctypes
import functools
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # as on a Mac: plain PyTorch does everything
    triton, tl, jit = None, types.SimpleNamespace(constexpr=None), lambda kernel: kernel

# Slots that lie side by side in memory, and so in vector registers. Keys are stored [.., n, d, C] and values
# [.., n, C, d]. 32 was as fast as 64 for keys (8,192 slots, 4 bits) and wastes half as much on rounding S up.
CHUNK = 32
PROGRAMS = 512  # that the attention of one step is split into: about four for each processor of a large GPU

# Triton's interpreter runs kernels on a CPU, for tests: slowly, and wrongly in bf16.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def free_memory(device: torch.device) -> float:
    """Bytes that could be allocated; of a system that does not say, any number."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        with contextlib.suppress(OSError, ValueError):  # a container has less than its machine; ValueError: "max"
            limit, used = (int(Path(f"/sys/fs/cgroup/memory.{n}").read_text()) for n in ("max", "current"))
            free = min(free, limit - used)
        return free / int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # the processes of torchrun share it
    except (OSError, StopIteration, ValueError, IndexError):
        return float("inf")


def has_kernel(x: Tensor) -> bool:
    """Is this a tensor that Triton kernels are for?"""
    return triton is not None and (x.is_cuda or INTERPRETED)


def written(x: Tensor) -> Tensor:
    """x, but computed once and written out.

    Inductor computes what is cheap anew wherever it is read, be that for every slot of a cache or for every row of a
    matrix. What it does write out is a concatenation, here with something it cannot see to be x as well. (Two halves of
    x would do, but half of an odd number of heads, 288 of 9 x 64 channels, was compiled into a loop over 256.)
    """
    return torch.stack([x, -x])[0] if torch.compiler.is_compiling() and not x.is_cuda else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """x [..,I], weight [O,I], bias [O] -> [..,O]. With a scale [O,I/g], weight is int8, and g of a row share a scale.

    One row against a matrix is a read of the matrix and nothing else. oneDNN gets under half of the memory bandwidth
    there; the same product written as multiply + sum, which Inductor vectorises, about all of it. x is written out in
    float32, because a loop that also reads bf16 takes 32 numbers at a time, and int8 has a fast load for 16 only. Two
    rows at a time have two sums that do not wait for each other.
    """
    rows = x.numel() // x.shape[-1]
    if torch.compiler.is_compiling() and scale is None and 1 < rows <= 16 and NATIVE and x.dtype == torch.bfloat16:
        y = torch.ops.kv_fast.few_rows(x.flatten(0, -2).contiguous(), weight).unflatten(0, x.shape[:-1])
    elif rows != 1 or x.is_cuda or not torch.compiler.is_compiling():
        return F.linear(x, weight if scale is None else scaled(weight, scale).to(x.dtype), bias)
    else:
        row = written(x.float()).unsqueeze(-2)
        if scale is None:
            y = torch.cat([(row * part.float()).sum(-1) for part in weight.chunk(2)], -1)
        else:
            groups = row.unflatten(-1, (scale.shape[1], -1))
            parts = zip(weight.unflatten(1, (scale.shape[1], -1)).chunk(2), scale[..., None].chunk(2), strict=True)
            y = torch.cat([(groups * (part.float() * each)).sum((-1, -2)) for part, each in parts], -1)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def scaled(weight: Tensor, scale: Tensor) -> Tensor:
    """What int8 weights [O,I] with scales [O,I/g] mean, float32."""
    return (weight.unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B,H*G,T,D], k and v [B,H,T,D] -> [B,H*G,T,D]; query head j reads KV head j // G. O(T) memory."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def attend_chunk(q: Tensor, k: Tensor, v: Tensor, live: Tensor, near: Tensor | None = None, sink: int = 0) -> Tensor:
    """T queries over S cached slots and causally over their own T tokens; arguments as for `rows_of_attention`,
    v [B,H,S+T,D] -> [B,H*G,T,D]."""
    if has_kernel(q):
        return flash(q, k, v, live, near=near, sink=sink)[0]
    y, H, T = torch.empty_like(q), k.shape[1], q.shape[2]
    if near is None:  # 64 queries a time of each head of a group, one under the other
        for t in range(0, T, 64):
            x = q[:, :, t : t + 64].unflatten(1, (H, -1))  # [B,H,G,R,D]
            G, R, end = *x.shape[2:4], k.shape[2] - T + t + x.shape[3]
            past = torch.ones(R, end, dtype=torch.bool, device=q.device).tril(end - R).repeat(G, 1)
            seen = past & F.pad(live, (0, t + R), value=True)[:, :, None]
            part = F.scaled_dot_product_attention(x.flatten(2, 3), k[:, :, :end], v[:, :, :end], attn_mask=seen)
            y[:, :, t : t + R] = part.unflatten(2, (G, R)).flatten(1, 2)
        return y
    v = v.float()
    for t, weights, total in rows_of_attention(q, k, live, near=near, sink=sink):
        rows = weights.flatten(2, 3) @ v[:, :, : weights.shape[-1]] / total.flatten(2, 3)[..., None]
        y[:, :, t : t + weights.shape[3]] = rows.unflatten(2, weights.shape[2:4]).flatten(1, 2).to(y.dtype)
    return y


def window_mass(q: Tensor, k: Tensor, window: int, live: Tensor | None = None) -> Tensor:
    """Mean attention of the last `window` queries, and of the query group, on every key: [B,H,S+T].

    Causal inside the window: a key of the window is seen by the rows at and after it only.
    """
    return column_mass(q, k, live, window) / (window * q.shape[1] // k.shape[1])


def column_mass(q: Tensor, k: Tensor, live: Tensor | None = None, window: int | None = None) -> Tensor:
    """Attention that every key receives from all queries, or the last `window`, summed over them and the query group.

    Arguments as for `rows_of_attention` -> [B,H,S+T], float32. The sum over keys is the number of queries times G.
    """
    mass = k.new_zeros(k.shape[:3], dtype=torch.float32)
    window = q.shape[2] if window is None else window
    if has_kernel(q):
        _, lse = flash(q, k, None, live, q.shape[2] - window)
        size = blocks(q.shape[3], q.dtype)
        if size["num_warps"] == 8:
            size["num_stages"] = 3  # with two, Triton 3.6 spills on sm_100
        columns_kernel[k.shape[0] * k.shape[1], -(-k.shape[2] // size["BLOCK_S"])](
            *chunk_arguments(q, k, None, live, q.shape[2] - window), lse, mass, LIVE=live is not None, **size
        )
        return mass
    for _, weights, total in rows_of_attention(q, k, live, q.shape[2] - window, rows=min(64, -(-window // 2))):
        share = (1 / total).flatten(2, 3)[:, :, None] @ weights.flatten(2, 3)  # normalises and sums in one product
        mass[:, :, : weights.shape[-1]] += share[:, :, 0]
    return mass


def rows_of_attention(
    q: Tensor,
    k: Tensor,
    live: Tensor | None = None,
    first: int = 0,
    rows: int = 32,
    near: Tensor | None = None,
    sink: int = 0,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Attention weights from query `first` on, `rows` queries at a time, so that T x T never exists.

    q [B,H*G,T,D], k [B,H,S+T,D]: S cached slots, live [B,H,S] where one holds a token, then the queries' own T tokens,
    which are masked causally. near [B,H*G,T,D]: what the first `sink` slots are asked instead of q. Yields (t, weights
    [B,H,G,R,S+t+R], their sums over keys [B,H,G,R]) for queries t to t+R, float32: bf16 sums would decide near ties by
    rounding. Weights are not normalised: they are up to each row's exp(-maximum).
    """
    B, H, C, D = k.shape
    T, S = q.shape[2], C - q.shape[2]
    space = q.new_empty(B * q.shape[1] * min(rows, T - first) * C, dtype=torch.float32)
    for t in range(first, T, rows):
        R = min(rows, T - t)
        end = S + t + R
        x = q[:, :, t : t + R].unflatten(1, (H, -1)).float() * D**-0.5  # [B,H,G,R,D]
        score = space[: x[..., 0].numel() * end].view(B, H, -1, end)
        for j in range(0, end, 512):  # a float32 copy of all keys would be larger than the scores
            score[..., j : j + 512] = x.flatten(2, 3) @ k[:, :, j : min(j + 512, end)].float().mT
        if near is not None:
            x = near[:, :, t : t + R].unflatten(1, (H, -1)).float() * D**-0.5
            score[..., :sink] = x.flatten(2, 3) @ k[:, :, :sink].float().mT
        if live is not None:
            score[..., :S].masked_fill_(~live[:, :, None], float("-inf"))
        score = score.unflatten(2, (-1, R))
        future = torch.ones(R, R, dtype=torch.bool, device=q.device).triu(1)
        score[..., S + t :].masked_fill_(future, float("-inf"))
        weights = score.sub_(score.amax(-1, keepdim=True)).exp_()  # in place: one block of scores, not three
        yield t, weights, weights.sum(-1)


def chunk_arguments(q: Tensor, k: Tensor, v: Tensor | None, live: Tensor | None, first: int) -> tuple:
    """What the two kernels below are both told."""
    _, heads, T, D = q.shape
    H, S = k.shape[1], k.shape[2] - T
    assert q.stride(3) == k.stride(3) == 1 and (v is None or v.stride(3) == 1)
    v, live = k if v is None else v, q if live is None else live.contiguous()
    return q, k, v, live, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], S, T, first, H, heads // H, D**-0.5


def blocks(dim: int, dtype: torch.dtype) -> dict:
    """What one program of these works on at a time, and with how many threads."""
    if dtype == torch.float32:  # takes twice the registers, and no tensor cores
        few = dict(BLOCK_T=16, BLOCK_S=32 if dim <= 128 else 16, num_warps=4, num_stages=1)
        return dict(D=dim, BLOCK_D=max(16, power_of_two(dim)), **few)
    return dict(
        D=dim,
        BLOCK_D=max(16, power_of_two(dim)),
        BLOCK_T=64 if dim <= 128 else 32,
        BLOCK_S=64 if dim <= 128 else 32,
        num_warps=8 if 64 < dim <= 128 else 4,
        num_stages=2,
    )


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    live: Tensor | None,
    first: int = 0,
    near: Tensor | None = None,
    sink: int = 0,
) -> tuple[Tensor | None, Tensor]:
    """`attend_chunk` and its log-sum-exp [B,H*G,T-first] by one kernel, or without v the latter alone."""
    B, heads, T, D = q.shape
    y, lse = None if v is None else q.new_empty(q.shape), q.new_empty(B, heads, T - first, dtype=torch.float32)
    size = blocks(D, q.dtype)
    flash_kernel[B * heads, -(-(T - first) // size["BLOCK_T"])](
        *chunk_arguments(q, k, v, live, first),
        q if near is None else near.contiguous(),
        *(sink, lse, lse if y is None else y),
        LIVE=live is not None,
        NEAR=near is not None,
        VALUES=v is not None,
        **size,
    )
    return y, lse


@jit
def chunk_scores(
    x, k, live, row, key, head, b, h, k_b, k_h, k_t, S, T, H, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, LIVE: tl.constexpr,
):  # fmt: skip
    """Queries x [t,d] of a head at rows t of a chunk, keys [s] -> scores [t,s], -inf where one is not to be seen."""
    channel = tl.arange(0, BLOCK_D)
    there = (key < S + T)[None, :] & (channel < D)[:, None]
    keys = tl.load(k + b * k_b + h * k_h + key.to(tl.int64)[None, :] * k_t + channel[:, None], there, 0)
    seen = key[None, :] - S <= row[:, None]
    if LIVE:
        held = tl.load(live + (b * H + h) * S + key, key < S, 1) != 0
        seen = seen & held[None, :]
    return tl.where(seen, tl.dot(x, keys, input_precision="ieee") * scale, float("-inf"))


@jit
def flash_kernel(
    q, k, v, live, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, S, T, first, H, G, scale, near, sink, lse, y,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, D: tl.constexpr,
    LIVE: tl.constexpr, NEAR: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """One program: some rows of one query head, over all keys that they see."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // (H * G), head % (H * G) // G
    row, channel = first + tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    there = (row < T)[:, None] & (channel < D)[None, :]
    x = tl.load(q + b * q_b + head % (H * G) * q_h + row.to(tl.int64)[:, None] * q_t + channel[None, :], there, 0)
    if NEAR:
        nearer = tl.load(near + (head * T + row[:, None]) * D + channel[None, :], there, 0)
    top, total = tl.full([BLOCK_T], float("-inf"), tl.float32), tl.zeros([BLOCK_T], tl.float32)
    out = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for start in range(0, tl.minimum(S + T, S + first + (tl.program_id(1) + 1) * BLOCK_T), BLOCK_S):
        key = start + tl.arange(0, BLOCK_S)
        score = chunk_scores(x, k, live, row, key, head, b, h, k_b, k_h, k_t, S, T, H, scale, D, BLOCK_D, LIVE)
        if NEAR:
            near_score = chunk_scores(
                nearer, k, live, row, key, head, b, h, k_b, k_h, k_t, S, T, H, scale, D, BLOCK_D, LIVE
            )
            score = tl.where((key < sink)[None, :], near_score, score)
        higher = tl.maximum(top, tl.max(score, 1))
        safe = tl.maximum(higher, -1e30)
        weight, fade = tl.exp(score - safe[:, None]), tl.exp(top - safe)
        top, total = higher, total * fade + tl.sum(weight, 1)
        if VALUES:
            at = v + b * v_b + h * v_h + key.to(tl.int64)[:, None] * v_t + channel[None, :]
            values = tl.load(at, (key < S + T)[:, None] & (channel < D)[None, :], 0)
            out = tl.dot(weight.to(values.dtype), values, out * fade[:, None], input_precision="ieee")
    tl.store(lse + head * (T - first) + row - first, top + tl.log(total), row < T)
    if VALUES:
        tl.store(y + (head * T + row[:, None]) * D + channel[None, :], out / total[:, None], there)


@jit
def columns_kernel(
    q, k, v, live, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, S, T, first, H, G, scale, lse, mass,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, D: tl.constexpr, LIVE: tl.constexpr,
):  # fmt: skip
    """One program: some keys of one KV head, and all queries that see them, in the same order whatever runs beside."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // H, head % H
    key, channel = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_S], tl.float32)
    for g in range(G):
        for start in range(tl.maximum(first, tl.program_id(1) * BLOCK_S - S), T, BLOCK_T):
            row = start + tl.arange(0, BLOCK_T)
            there = (row < T)[:, None] & (channel < D)[None, :]
            x = tl.load(q + b * q_b + (h * G + g) * q_h + row.to(tl.int64)[:, None] * q_t + channel[None, :], there, 0)
            score = chunk_scores(x, k, live, row, key, head, b, h, k_b, k_h, k_t, S, T, H, scale, D, BLOCK_D, LIVE)
            whole = tl.load(lse + (head * G + g) * (T - first) + row - first, row < T, float("inf"))
            total += tl.sum(tl.exp(score - whole[:, None]), 0)
    tl.store(mass + head * (S + T) + key, total, key < S + T)


def expected_mass(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, frequencies: Tensor, sink: int, future: int) -> Tensor:
    """Attention that keys can expect from queries of the next `future` positions, times what they would add.

    q [B,H*G,T,D], k and v [B,H,T,D] at pos [B,T], frequencies [D/2] -> [B,H,T] float32. Queries before rotation are
    taken for Gaussian, like the prompt's own without the first `sink`: log E exp(q . k) = mean . k + k . cov . k / 2.
    """
    (B, H, T, D), heads = k.shape, q.shape[1]
    total, square = q.new_zeros(B, heads, D).double(), q.new_zeros(B, heads, D, D).double()
    for t in range(sink, T, 1024):
        plain = apply_rope(q[:, :, t : t + 1024].float(), rotary(-pos[:, None, t : t + 1024], frequencies))
        total += plain.sum(2)
        square += plain.mT @ plain
    n = max(T - sink, 1)
    mean = total / n
    covariance = square / n - mean[..., None] * mean[..., None, :]
    ahead = rotary(pos[:, None, -1:] + 1 + torch.arange(future, device=q.device), frequencies)
    ahead = ahead.mean(2, keepdim=True)  # of cos and sin: an average of rotation matrices
    mean = apply_rope(mean[:, :, None].float(), ahead) * D**-0.5
    covariance = apply_rope(apply_rope(covariance.float(), ahead).mT, ahead) / (2 * D)
    mass = k.new_zeros(B, H, T, dtype=torch.float32)
    for g in range(heads // H):  # one query head of each group at a time
        mu, sigma = (x.unflatten(1, (H, -1))[:, :, g] for x in (mean, covariance))
        parts = [
            (part @ mu.mT)[..., 0] + ((part @ sigma) * part).sum(-1) for part in map(Tensor.float, k.split(1024, 2))
        ]
        logit = torch.cat(parts, -1)
        logit[..., :sink] = float("-inf")
        mass += logit.softmax(-1)
    return mass * torch.linalg.vector_norm(v, dim=-1, dtype=torch.float32)


def rotary(pos: Tensor, frequencies: Tensor) -> Tensor:
    """pos [..], frequencies [D/2] float32 -> cos and sin of their products, float32 [..,2,D/2].

    The product is taken in float64, for texts without end: in float32 it is off by 0.03 at position 10^6.
    """
    angle = (pos[..., None].double() * frequencies.double() % (2 * torch.pi)).float()
    return torch.stack([angle.cos(), angle.sin()], -2)


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """x [..,D], cos and sin rope [..,2,D/2], the rest as it broadcasts; channel i turns with channel i + D/2."""
    cos, sin = rope.unbind(-2)
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def turned(x: Tensor, by: Tensor, frequencies: Tensor) -> Tensor:
    """x [B,H,T,D], rotated to some position, as it would be `by` [B] positions later. frequencies: [D/2]."""
    return apply_rope(x, rotary(by[:, None, None], frequencies))


def between(x: Tensor, low: Tensor, high: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [..,g] in a range [..] -> codes 0 to top, their scale and zero in fp16; what lies outside is clipped.

    The codes are for scale and zero as they are stored: rounding those first costs no accuracy later.
    """
    scale, zero = ((high - low) / top).clamp(max=65504).half(), low.clamp(-65504, 65504).half()
    step = torch.where(scale > 0, scale, 1).float()  # a constant group is its minimum
    return ((x - zero.float()[..., None]) / step[..., None]).round().clamp(0, top), scale, zero


def minmax(x: Tensor, low: Tensor, high: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The range of numbers x [..,g] that lie from low to high [..]: all of it."""
    return low, high


def mse(x: Tensor, low: Tensor, high: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Of ranges from all of it to 70 % of it, the one with the least squared error, group by group."""
    best, least = (low, high), torch.full_like(low, float("inf"))
    for cut in (0.0, 0.03, 0.06, 0.1, 0.15):
        tried = low + cut * (high - low), high - cut * (high - low)
        codes, scale, zero = between(x, *tried, top)
        error = (codes * scale.float()[..., None] + zero.float()[..., None] - x).square().sum(-1)
        best = [torch.where(error < least, new, old) for new, old in zip(tried, best, strict=True)]
        least = torch.minimum(error, least)
    return tuple(best)


def hqq(x: Tensor, low: Tensor, high: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """A range as wide, but where HQQ's half-quadratic steps move it: they make the errors sparse (p 0.7, beta 10)."""
    step = ((high - low) / top).clamp(min=1e-8)[..., None]
    zero, best, least = low, low, torch.full_like(low, float("inf"))
    for _ in range(20):
        steps = ((x - zero[..., None]) / step).round().clamp(0, top) * step
        off = x - steps - zero[..., None]
        error = off.abs().mean(-1)
        best, least = torch.where(error < least, zero, best), torch.minimum(error, least)
        sparse = off.sign() * (off.abs() - off.abs().clamp(min=1e-4) ** -0.3 / 10).clamp(min=0)
        zero = (x - sparse - steps).mean(-1)
    return best, best + (high - low)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Integers below 2^bits [..,g] -> uint8 [..,g*bits/8]; field j of byte c is element j*(g*bits/8) + c.

    Planar, so that unpacking is a shift and a mask on whole vectors, never a shuffle. Widened before the shift:
    compiled CPU code saturates where eager code wraps.
    """
    planes = codes.int().unflatten(-1, (8 // bits, -1)).unbind(-2)
    return functools.reduce(torch.bitwise_or, [p << (bits * j) for j, p in enumerate(planes)]).to(torch.uint8)


def unpack(packed: Tensor, bits: int) -> list[Tensor]:
    """The inverse of `pack`, as its 8/bits planes of int32. Widened first: vectors of bytes have no cheap shift."""
    wide = packed.int()
    last = 8 // bits - 1
    return [*((wide >> (bits * j)) & (2**bits - 1) for j in range(last)), wide >> (bits * last)]


def e2m1(x: Tensor) -> Tensor:
    """float32 -> codes of E2M1, sign and 0 0.5 1 1.5 2 3 4 6: to the nearest, halfway to the even code, at most 6."""
    size = x.abs()
    up = [size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5]
    return functools.reduce(torch.add, [u.int() for u in up]) + 8 * (x < 0).int()


def minifloat(code: Tensor, exponent: int, mantissa: int) -> Tensor:
    """Floats of a sign, `exponent` and `mantissa` bits, subnormals included, from their codes int32 -> float32.

    The bits go where a float32 has them, and a bias of its own makes x = 2^(e - bias) (1 + m) of them. That is right
    but for a subnormal, e = 0, worth 2^(1 - bias) m = 2 x - 2^(1 - bias), which is always the smaller one. (Under its
    own exponent, e = 0, a float32 would be subnormal too, and slow.)
    """
    bias, width = 2 ** (exponent - 1) - 1, exponent + mantissa
    x = (((code & (2**width - 1)) << (23 - mantissa)) + ((127 - bias) << 23)).view(torch.float32)
    x = torch.minimum(2 * x - 2.0 ** (1 - bias), x)
    return (x.view(torch.int32) | ((code << (31 - width)) & -(2**31))).view(torch.float32)


def dot(
    q: Tensor, planes: list[Tensor], live: Tensor, scale: Tensor | None = None, zero: Tensor | None = None
) -> Tensor:
    """q . k for every slot. q [B,H,G,D] float32, or [B,H,G,n,D] if each chunk has its own, live bool [B,H,S], S <= n*C
    -> [B,H,G,n*C] float32, -inf where not live.

    k is number * scale + zero. Numbers come as they are packed, U units of channels in P planes [B,H,n,U,c,C]: plane j
    has the j-th c of every unit. scale and zero [B,H,n,U*r,C] are for r groups of each. The scale is taken out of the
    sum over a group, and zero meets the sum of q's group: the inner loop only unpacks and multiplies. The G heads are
    unrolled so that one unpacking serves all.
    """
    n, U, chunk = planes[0].shape[2], planes[0].shape[3], planes[0].shape[5]
    dead = ~F.pad(live, (0, n * chunk - live.shape[2]))  # chunks are whole, S need not be
    r = 1 if scale is None else scale.shape[3] // U
    step = len(planes) // r  # planes of a group
    scale, zero = (x if x is None else x.unflatten(3, (U, r)) for x in (scale, zero))
    q = (q.unsqueeze(3) if q.dim() == 4 else q).unflatten(-1, (U, r, step, -1))  # [B,H,G,1 or n,U,r,plane,channel]
    total = q.sum((-2, -1))[..., None]  # [B,H,G,1 or n,U,r,1]
    score = []
    for g, i in itertools.product(range(q.shape[2]), range(r)):
        qg = q[:, :, g, :, :, i, ..., None]  # [B,H,1 or n,U,plane,channel,1]
        own = enumerate(planes[i * step : (i + 1) * step])
        inner = functools.reduce(torch.add, [qg[:, :, :, :, j] * plane for j, plane in own]).sum(-2)  # [B,H,n,U,C]
        inner = inner if scale is None else inner * scale[:, :, :, :, i]
        inner = inner if zero is None else inner + total[:, :, g, :, :, i] * zero[:, :, :, :, i]
        score.append(inner.sum(-2).flatten(2))
    score = [functools.reduce(torch.add, score[g : g + r]) for g in range(0, len(score), r)]
    return torch.stack([s.masked_fill(dead, float("-inf")) for s in score], 2)


def mix(p: Tensor, planes: list[Tensor], scale: Tensor | None = None, zero: Tensor | None = None) -> Tensor:
    """sum of p . v over the slots. p [B,H,G,n*C] float32 -> [B,H,G,D] float32.

    v as k in `dot`, but for planes [B,H,n,C,U,c]. Sums run down a chunk first, then over chunks: the partial results
    of a chunk stay in registers. What has no weight is not looked at: in an empty slot may be anything, and 0 * NaN is
    NaN.
    """
    heads, chunk, U = p.shape[2], planes[0].shape[3], planes[0].shape[4]
    r = 1 if scale is None else scale.shape[3] // U
    p = p.unflatten(-1, (-1, chunk))  # [B,H,G,n,C]
    times = lambda p, x: torch.where(p != 0, p * x, 0.0)  # noqa: E731
    if scale is None:
        some = p.amax(2)[..., None, None] != 0  # [B,H,n,C,1,1]
        planes = [torch.where(some, plane, 0.0) for plane in planes]
    if scale is None:
        weight = p[..., None, None].unbind(2)  # G of [B,H,n,C,1,1]
    else:
        # Stacked, p * scale is written out once, for vectors of slots; else every channel would multiply it anew. (One
        # alone is not: see `written`.)
        weight = [times(p[:, :, g, :, None], scale) for g in range(heads)]
        weight = torch.stack(weight if heads > 1 else [weight[0], -weight[0]], 2).mT
        weight = weight.unflatten(-1, (U, r)).unbind(2)[:heads]  # G of [B,H,n,C,U,r]
    group = [j * r // len(planes) for j in range(len(planes))]
    sums = [(w[..., i : i + 1] * plane).sum(-3).sum(2) for w in weight for i, plane in zip(group, planes, strict=True)]
    y = torch.stack(sums, 2).unflatten(2, (heads, r, -1)).movedim(5, 3)  # [B,H,G,U,r,plane,channel]
    if zero is not None:
        rest = times(p[:, :, :, :, None], zero[:, :, None]).sum((3, 5))  # [B,H,G,U*r]
        y = y + rest.unflatten(-1, (U, r))[..., None, None]
    return y.flatten(3)


def softmax(scores: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """One softmax over pieces: scores [B,H,G,*] -> weights [B,H,G,*] and their sum [B,H,G,1], to divide by at the end.

    A row of nothing but -inf has weights 0 and, so that the division gives 0 and not NaN, sum 1.
    """
    top = functools.reduce(torch.maximum, [s.amax(-1, keepdim=True) for s in scores]).clamp(min=-1e30)
    weights = [(s - top).exp() for s in scores]
    total = functools.reduce(torch.add, [w.sum(-1, keepdim=True) for w in weights])
    return weights, torch.where(total > 0, total, 1.0)


def largest(x: Tensor, n: int) -> Tensor:
    """The places [..,n] of the n largest of each row of x, in any order."""
    if torch.compiler.is_compiling() and not x.is_cuda:
        return torch.ops.kv_fast.topk(x, n)[1]  # Inductor has no code of its own for it, and `recorded` would miss it
    return x.topk(n, sorted=False).indices


def power_of_two(n: int) -> int:
    """n, or the next power of two."""
    return 1 << (n - 1).bit_length()


@functools.lru_cache
def rotation(dim: int, device: torch.device) -> Tensor:
    """A fixed orthogonal matrix [dim,dim], float32: signs, Hadamard in power-of-two blocks, signs (2404.00456).

    Rotated vectors have no outlier channels, and q R . k R = q . k. The signs are random: without them a constant
    vector would become one spike. They stand on both sides, which makes R symmetric and thus its own inverse.
    head_dim 80 is a block of 64 and one of 16.
    """
    blocks, left = [], dim
    while left:
        h = torch.ones(1, 1, dtype=torch.float64)
        while 2 * len(h) <= left:
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)]) * 0.5**0.5
        blocks.append(h)
        left -= len(h)
    signs = torch.randint(0, 2, (dim, 1), generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    return (signs * torch.block_diag(*blocks) * signs.mT).float().to(device)


def rotate(x: Tensor, matrix: Tensor) -> Tensor:
    """x [..,D] float32 times matrix [D,D]. A few rows: multiply + sum fuses with what follows, a matmul call cannot."""
    if x.numel() > 64 * x.shape[-1]:
        return x @ matrix
    return (x.unsqueeze(-1) * matrix).sum(-2)


# ---------------------------------------------------------------------------------------------------------------------
# GPU: attention straight from what is written down. One kernel for all formats, which only `tile` knows.


class Written(NamedTuple):
    """A store as `attend` reads it: its buffers, and what their bytes mean.

    codes [B,H,n,d,C] of keys or [B,H,n,C,d] of values, shared [B,H,n,rows,C] of scales, then zeros; a pool's begin
    with one dim only, of its chunks. Channels come in units of `span`, each packed as `pack` does, in `groups` with a
    scale each.
    """

    codes: Tensor
    shared: Tensor | None = None
    number: str = "float"  # what a code is: float, int, e2m1 or e4m3
    bits: int = 0  # of a code; 0 where numbers are no codes
    span: int = 0  # 0: all channels
    groups: int = 1
    scale: str = ""  # range: scale and zero, fp16; channel: one each for a channel of a chunk; power: of two; e4m3
    opened: Tensor | None = None  # bool [N,H,n]: chunks that are read from exact [N,H,C,D] instead
    exact: Tensor | None = None
    wide: bool = False  # is it to be computed with in float32?

    def picked(self, opened: Tensor | None, is_pool: bool) -> "Written":
        """With some chunks to be read, which a table names: buffers as a pool's, `opened` of those chunks."""
        flat = [x if x is None or is_pool else x.flatten(0, 2) for x in (self.codes, self.shared)]
        return self._replace(codes=flat[0], shared=flat[1], opened=opened)

    def form(self, dim: int) -> tuple:
        """What a kernel must know when it is compiled: the above, then units and a plane's bytes of one, both rounded
        up to powers of two, and to 16 channels for a matrix product; and whether to compute in float32."""
        span, planes = self.span or dim, 8 // self.bits if self.bits else 1
        units = power_of_two(dim // span)
        return (
            self.number,
            self.bits,
            span,
            self.groups,
            self.scale,
            units,
            max(power_of_two(span // planes), 16 // units),
            self.wide,
        )


@jit
def small_float(code, sign: tl.constexpr, shift: tl.constexpr, unit: tl.constexpr, T: tl.constexpr):
    """A float of a few bits from its code, in dtype T: the bits go where an fp16 has them, whose bias is another."""
    code = code.to(tl.int32)
    bits = ((code & sign) * (32768 // sign)) | ((code & (sign - 1)) << shift)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(T) * unit


@jit
def tile(
    codes, shared, opened, exact, at, own, head, lane, real, unit, byte, chunk, step, stride,
    D: tl.constexpr, FORM: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Slots as numbers: a tuple of planes, [d,slots] of keys or [slots,d] of values, d channels each.

    A slot is lane `lane` of chunk `at`, which is the `own`-th of all sequences', if that is real; unit and byte say
    which channels; `step` and `stride` are bytes of a chunk from one channel, and from one slot, to the next. In fp16 a
    product of a code and a scale, plus a zero, is as good as in float32 and then rounded; but powers of two may be
    beyond it.
    """
    NUMBER: tl.constexpr = FORM[0]
    BITS: tl.constexpr = FORM[1]
    SPAN: tl.constexpr = FORM[2]
    GROUPS: tl.constexpr = FORM[3]
    SCALE: tl.constexpr = FORM[4]
    PLANES: tl.constexpr = 8 // BITS if BITS else 1
    WIDTH: tl.constexpr = SPAN // PLANES
    ROWS: tl.constexpr = D // SPAN * GROUPS  # of scales
    T: tl.constexpr = tl.float32 if FORM[7] or SCALE == "power" else tl.float16
    known = real & (unit < D // SPAN)
    there = known & (byte < WIDTH)
    word = tl.load(codes + at * chunk * (D // PLANES) + (unit * WIDTH + byte) * step + lane * stride, there, 0)
    planes = ()
    for j in tl.static_range(PLANES):
        group = unit * GROUPS + j * GROUPS // PLANES
        code = (word.to(tl.int16) >> (BITS * j)) & (2**BITS - 1)
        if NUMBER == "float":
            x = word
        elif NUMBER == "e2m1":
            x = small_float(code, 8, 9, 16384.0, T)
        elif NUMBER == "e4m3":
            x = small_float(code, 128, 7, 256.0, T)
        else:
            x = code.to(T)
        if SCALE == "range":
            where = shared + (at * 2 * ROWS + group) * chunk + lane
            x = tl.fma(x, tl.load(where, known, 0).to(T), tl.load(where + ROWS * chunk, known, 0).to(T))
        elif SCALE == "channel":
            channel = unit * SPAN + j * WIDTH + byte
            where = shared + at * 2 * D + channel
            x = tl.fma(x, tl.load(where, there, 0).to(T), tl.load(where + D, there, 0).to(T))
            is_open = tl.load(opened + own, real, 0) != 0
            plain = tl.load(exact + (head * chunk + lane) * D + channel, there & is_open, 0).to(tl.float32)
            x = tl.where(is_open, tl.minimum(tl.maximum(plain, -65504.0), 65504.0).to(T), x)
        elif SCALE == "power":
            power = tl.load(shared + (at * ROWS + group) * chunk + lane, known, 0).to(tl.int32)
            x = x * (power << 23).to(tl.float32, bitcast=True)
            x = x if FORM[7] else x.to(tl.bfloat16)
        elif SCALE == "e4m3":
            x = x * small_float(tl.load(shared + (at * ROWS + group) * chunk + lane, known, 0), 128, 7, 256.0, T)
        planes = planes + (tl.reshape(x, SHAPE),)
    return planes


@jit
def channels(j, FORM: tl.constexpr, D: tl.constexpr):
    """The channels of plane j, as `tile` orders them; D for what only fills up to powers of two."""
    PLANES: tl.constexpr = 8 // FORM[1] if FORM[1] else 1
    WIDTH: tl.constexpr = FORM[2] // PLANES
    i = tl.arange(0, FORM[5] * FORM[6])
    unit, byte = i // FORM[6], i % FORM[6]
    return tl.where((unit < D // FORM[2]) & (byte < WIDTH), unit * FORM[2] + j * WIDTH + byte, D)


@jit
def scan(
    q, near, k, k_shared, k_opened, k_exact, v, v_shared, slots, table, logits, y, lse,
    head, low, high, end, heads, rows, n, held_from, held_below, sinks, chunk,
    D: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    RING: tl.constexpr, NEAR: tl.constexpr, LOGITS: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Attention of a KV head's queries over slots low to high, of `end`: running maximum, sum and weighted values."""
    K_PLANES: tl.constexpr = 8 // K[1] if K[1] else 1
    V_PLANES: tl.constexpr = 8 // V[1] if V[1] else 1
    KU: tl.constexpr = K[5]
    KB: tl.constexpr = K[6]
    VU: tl.constexpr = V[5]
    VB: tl.constexpr = V[6]
    row = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    asked, asked_near, y_planes = (), (), ()
    for j in tl.static_range(K_PLANES):
        channel = channels(j, K, D)
        where, there = row[:, None] * D + channel[None, :], (row < rows)[:, None] & (channel < D)[None, :]
        asked = asked + (tl.load(q + head * rows * D + where, there, 0),)
        if NEAR:
            asked_near = asked_near + (tl.load(near + head * rows * D + where, there, 0),)
    for _ in tl.static_range(V_PLANES):
        y_planes = y_planes + (tl.zeros([BLOCK_R, VU * VB], tl.float32),)
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    for start in range(low, high, BLOCK_S):
        slot = start + tl.arange(0, BLOCK_S)
        held = tl.load(slots + head * end + slot, slot < high, -1)
        live = held >= 0
        if not RING:  # those outside are read in the ring
            live = live & (held >= held_from) & (held < held_below)
        own, lane = head * n + slot // chunk, slot % chunk
        at = tl.load(table + own, slot < high, 0).to(tl.int64) if PAGED else own
        if PAGED and chunk % 16 == 0:
            at = tl.max_constancy(at, chunk)  # else there would be an address for every slot, and no vector loads
        real = slot // chunk * chunk < end  # of a chunk all slots are read or none: a mask of slots allows no vectors
        numbers = tile(
            k, k_shared, k_opened, k_exact, at[None, None, :], own[None, None, :], head, lane[None, None, :],
            real[None, None, :], tl.arange(0, KU)[:, None, None], tl.arange(0, KB)[None, :, None], chunk, chunk, 1,
            D, K, (KU * KB, BLOCK_S),
        )  # fmt: skip
        score = tl.zeros([BLOCK_R, BLOCK_S], tl.float32)
        for j in tl.static_range(K_PLANES):
            score = tl.dot(asked[j].to(numbers[j].dtype), numbers[j], score, input_precision="ieee")
        if NEAR:
            nearer = tl.zeros([BLOCK_R, BLOCK_S], tl.float32)
            for j in tl.static_range(K_PLANES):
                nearer = tl.dot(asked_near[j].to(numbers[j].dtype), numbers[j], nearer, input_precision="ieee")
            score = tl.where(((held if RING else slot) < sinks)[None, :], nearer, score)
        score = tl.where(live[None, :], score, float("-inf"))
        if LOGITS:
            to = logits + (head * rows + row[:, None]) * end + slot[None, :]
            tl.store(to, score, (row < rows)[:, None] & (slot < high)[None, :])
        higher = tl.maximum(top, tl.max(score, 1))
        safe = tl.maximum(higher, -1e30)  # nothing live so far: -inf minus -inf would be NaN
        weight, fade = tl.exp(score - safe[:, None]), tl.exp(top - safe)
        top, total = higher, total * fade + tl.sum(weight, 1)
        numbers = tile(
            v, v_shared, v, v, at[:, None, None], own[:, None, None], head, lane[:, None, None], real[:, None, None],
            tl.arange(0, VU)[None, :, None], tl.arange(0, VB)[None, None, :], chunk, 1, D // V_PLANES,
            D, V, (BLOCK_S, VU * VB),
        )  # fmt: skip
        summed = ()
        for j in tl.static_range(V_PLANES):
            x = tl.where(live[:, None], numbers[j], 0.0)  # in an empty slot may be anything, and 0 * NaN is NaN
            part = tl.dot(weight.to(x.dtype), x, y_planes[j] * fade[:, None], input_precision="ieee")
            summed = summed + (part,)
        y_planes = summed
    piece = (head * tl.num_programs(1) + tl.program_id(1)) * rows + row
    share = 1 / tl.where(total > 0, total, 1)
    tl.store(lse + piece, tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1)), float("-inf")), row < rows)
    for j in tl.static_range(V_PLANES):
        channel = channels(j, V, D)
        there = (row < rows)[:, None] & (channel < D)[None, :]
        tl.store(y + piece[:, None] * D + channel[None, :], y_planes[j] * share[:, None], there)


@jit
def attend_kernel(
    q, near, k, k_shared, k_opened, k_exact, v, v_shared, slots, table, pos,
    ring_q, ring_near, ring_k, ring_v, ring_slots, y, lse, logits, ring_logits,
    heads, rows, end, n, split, length, sink, sinks,
    D: tl.constexpr, K: tl.constexpr, V: tl.constexpr, EXACT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr, RING: tl.constexpr, NEAR: tl.constexpr, LOGITS: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """One program: one KV head's queries, one part of its slots, or the ring."""
    head = tl.program_id(0).to(tl.int64)
    low = tl.program_id(1) * split * BLOCK_S  # as the compiler sees: whole chunks, and so whole vectors
    held_from, held_below = 0, 2147483647
    if RING:
        held_from, held_below = sink, (tl.load(pos + head // heads) - length + 1).to(tl.int32)
    if RING and tl.program_id(1) == tl.num_programs(1) - 1:
        scan(
            ring_q, ring_near, ring_k, ring_k, ring_k, ring_k, ring_v, ring_v, ring_slots, table, ring_logits, y, lse,
            head, 0, RING, RING, heads, rows, 1, 0, 0, sinks, RING,
            D, EXACT, EXACT, BLOCK_R, BLOCK_S, True, NEAR, LOGITS, False,
        )  # fmt: skip
    else:
        scan(
            q, near, k, k_shared, k_opened, k_exact, v, v_shared, slots, table, logits, y, lse,
            head, low, tl.minimum(low + split * BLOCK_S, end), end, heads, rows, n, held_from, held_below, sinks,
            CHUNK, D, K, V, BLOCK_R, BLOCK_S, False, NEAR, LOGITS, PAGED,
        )  # fmt: skip


class Ring(NamedTuple):
    """Slots that are also held exactly, as `attend` reads them: what `Residual` holds, and the queries as they were."""

    q: Tensor  # [B,H,R,D] float32
    near: Tensor | None
    k: Tensor  # [B,H,D,rows]
    v: Tensor  # [B,H,rows,D]
    slot: Tensor  # int32 [B,H,rows]
    length: int
    sink: int


def attend(
    q: Tensor,
    k: Written,
    v: Written,
    slot_pos: Tensor,
    pos: Tensor,
    ring: Ring | None = None,
    near: Tensor | None = None,
    sinks: int = 0,
    logits: bool = False,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Attention of R queries a KV head over slots, none of which holds a token that comes after any of the queries.

    q [B,H,R,D] float32, as keys are written (rotated) and scaled; slot_pos int32 [B,H,S], -1 where empty; pos [B] the
    newest token's. With a ring, tokens below ring.sink and the newest ring.length are read there. near: what the first
    `sinks` slots are asked instead of q. table int32 [B,H,n]: k and v are pools, and this their chunks for each head.
    -> y [B,H,N,R,D] and log-sum-exp [B,H,N,R] of N pieces, float32, the ring's last, to be merged (`merge`), as values
    are written; and if `logits`, the scores [B,H,R,S] and the ring's [B,H,R,rows], -inf where a slot was not read.
    """
    (B, H, R, D), S = q.shape, slot_pos.shape[2]
    buffers = [x for x in (k.codes, k.shared, k.opened, k.exact, v.codes, v.shared, slot_pos, table) if x is not None]
    assert all(x.is_contiguous() for x in buffers)
    q, pos = q.contiguous(), pos.contiguous()
    wide = torch.float32 in (k.codes.dtype, v.codes.dtype) or k.wide or v.wide
    block_r = min(64, max(16, power_of_two(R)))  # a matrix product has 16 rows or more
    block_s = 64 if not wide else 32 if D <= 64 else 16  # float32 takes twice the registers
    split_in = max(1, min(64, PROGRAMS // (B * H)))  # the same for all S, so that layers that differ share a graph
    split = -(-S // (split_in * block_s))  # blocks of a program
    pieces = split_in + (ring is not None)
    y, lse = q.new_empty(B, H, pieces, R, D), q.new_empty(B, H, pieces, R)
    scores = q.new_empty(B, H, R, S) if logits else None
    ring_scores = q.new_empty(B, H, R, ring.slot.shape[2]) if logits and ring else None
    rows = ring or Ring(q, None, v.codes, v.codes, slot_pos, 0, 0)  # what is not there is not read

    def given(*tensors: Tensor | None) -> list[Tensor]:
        return [q if x is None else x for x in tensors]

    attend_kernel[B * H, pieces, -(-R // block_r)](
        *given(q, near, k.codes, k.shared, k.opened, k.exact, v.codes, v.shared, slot_pos, table, pos),
        *given(rows.q.contiguous(), rows.near, rows.k, rows.v, rows.slot, y, lse, scores, ring_scores),
        *(H, R, S, (k.codes if table is None else table).shape[2], split),
        *(rows.length, rows.sink, sinks),
        D=D,
        K=k.form(D),
        V=v.form(D),
        EXACT=Written(rows.k).form(D),
        CHUNK=v.codes.shape[-2],
        BLOCK_R=block_r,
        BLOCK_S=block_s,
        RING=rows.slot.shape[2] if ring else 0,
        NEAR=near is not None,
        LOGITS=logits,
        PAGED=table is not None,
        # What tests/test_kernels.py finds to fit into registers and shared memory, on all that it compiles for, by
        # Triton 3.6 and the newest.
        num_warps=4 if D <= 128 else 8,
        num_stages=1 if wide else 3 if 64 < D <= 128 and k.number != "e4m3" else 2,
    )
    return y, lse, scores, ring_scores


def merge(lse: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of pieces of attention in the whole, and its log-sum-exp: lse [B,H,N,R] -> [B,H,N,R], [B,H,R].

    A query that nothing was read for has shares of 0.
    """
    top = lse.amax(2).clamp(min=-1e30)
    weight = (lse - top[:, :, None]).exp()
    total = weight.sum(2)
    total = torch.where(total > 0, total, 1)
    return weight / total[:, :, None], top + total.log()


# ---------------------------------------------------------------------------------------------------------------------
# A CPU with products of bf16 pairs (AVX512-BF16): two multiply-adds at once, and numbers need not be widened first.
# Inductor has no loops with them.
#
# `few_rows`: Inductor's own loops would do as many multiply-adds as a core can, 16 at a time, and oneDNN packs the
# matrix anew for every product. Here a row of the matrix meets all rows of x, 32 products at a time, while the hardware
# fetches what comes 9 KB later: it does not do so by itself when a core is that busy.
#
# `attend_native`: chunks are anywhere, so that the hardware cannot guess the next; it is asked for while one is in use.
# Chunks without a token are not read at all: those of short sequences beside a long one. Integer codes stay bytes, 64
# to a multiplication, where Inductor's loops make floats of them first.

NATIVE, CORES = False, 1  # are they there, and for how many threads? Set by `build_native`

COMMON = r"""
#include <immintrin.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define CPU __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni")))
"""

ROWS = r"""
CPU static inline __m512bh load(const uint16_t* at, __mmask32 mask) {
    return (__m512bh)_mm512_maskz_loadu_epi16(mask, at);
}

// Two rows of w, so that sums need not wait for each other: x [R,I], w [O,I] -> y [R,O].
template <int R>
CPU static void rows(const uint16_t* x, const uint16_t* w, float* y, int64_t O, int64_t I) {
    #pragma omp parallel for schedule(static)
    for (int64_t o = 0; o < O; o += 2) {
        const bool both = o + 1 < O;
        const uint16_t *u = w + o * I, *v = both ? u + I : u;
        __m512 a[R], b[R];
        for (int r = 0; r < R; r++) a[r] = b[r] = _mm512_setzero_ps();
        for (int64_t i = 0; i < I; i += 32) {
            const __mmask32 mask = I - i >= 32 ? ~0u : (1u << (I - i)) - 1;
            _mm_prefetch((const char*)(u + i) + 9216, _MM_HINT_T0);
            _mm_prefetch((const char*)(v + i) + 9216, _MM_HINT_T0);
            const __m512bh p = load(u + i, mask), q = load(v + i, mask);
            for (int r = 0; r < R; r++) {
                const __m512bh z = load(x + r * I + i, mask);
                a[r] = _mm512_dpbf16_ps(a[r], z, p);
                b[r] = _mm512_dpbf16_ps(b[r], z, q);
            }
        }
        for (int r = 0; r < R; r++) {
            y[r * O + o] = _mm512_reduce_add_ps(a[r]);
            if (both) y[r * O + o + 1] = _mm512_reduce_add_ps(b[r]);
        }
    }
}

extern "C" void few_rows(const uint16_t* x, const uint16_t* w, float* y, int64_t R, int64_t O, int64_t I) {
    static const decltype(&rows<1>) of[] = {rows<1>, rows<2>, rows<3>, rows<4>, rows<5>, rows<6>, rows<7>, rows<8>};
    for (; R > 0; R -= 8, x += 8 * I, y += 8 * O) of[(R < 8 ? R : 8) - 1](x, w, y, O, I);
}
"""

# For G, K_BITS and V_BITS, which `attention_of` defines.
ATTENTION = r"""
constexpr int C = 32;  // slots of a chunk

// e^x for x <= 0: 2^n, and a polynomial for the rest.
CPU static inline __m512 exponential(__m512 x) {
    const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_mul_ps(_mm512_sub_ps(t, n), _mm512_set1_ps(0.69314718f));
    __m512 p = _mm512_set1_ps(1.f / 720);
    for (float c : {1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f}) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
    return _mm512_scalef_ps(p, n);
}

// Two rows of 32 numbers as pairs, one of each, and two lines of the next chunk asked for.
CPU static inline void pairs(const uint16_t* a, const uint16_t* b, const uint16_t* next, const uint16_t* other,
                              __m512bh* low, __m512bh* high) {
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    _mm_prefetch((const char*)next, _MM_HINT_T0);
    _mm_prefetch((const char*)other, _MM_HINT_T0);
    *low = (__m512bh)_mm512_unpacklo_epi16(x, y);
    *high = (__m512bh)_mm512_unpackhi_epi16(x, y);
}

// Sums for the numbers of `low` and `high`, back in order.
CPU static inline void in_order(__m512 low, __m512 high, float* to) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    _mm512_storeu_ps(to, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(low, second, high));
}

static inline float as_float(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

// Which of a chunk's slots, of which `left` are there, hold a token at a position from `first` to `last`.
CPU static inline uint32_t alive(const int32_t* slot_pos, int64_t left, int64_t first = 0, int64_t last = INT32_MAX) {
    const __m512i low = _mm512_set1_epi32(first), high = _mm512_set1_epi32(std::max<int64_t>(last, -1));
    const uint32_t there = left >= C ? ~0u : left > 0 ? (1u << left) - 1 : 0;
    uint32_t live = 0;
    for (int h = 0; h < 2; h++) {
        const __mmask16 some = there >> 16 * h;
        const __m512i pos = _mm512_maskz_loadu_epi32(some, slot_pos + 16 * h);
        const __mmask16 late = _mm512_mask_cmpge_epi32_mask(some, pos, low);
        live |= (uint32_t)_mm512_mask_cmple_epi32_mask(late, pos, high) << 16 * h;
    }
    return live;
}

CPU static inline __m512bh both(const uint16_t* pair) { return (__m512bh)_mm512_set1_epi32(*(const int32_t*)pair); }

// Keys or values as they are written down, chunk by chunk: C slots of bf16 numbers, or of codes, then scales and zeros
// (fp16) of units of `span` channels, each in `groups`, which are packed as `pack` does.
struct Store { const uint8_t *codes, *shared; int64_t span, groups; };

// Where a chunk is, in a store and among the scores, and which of its slots hold a token that is to be read.
struct Chunk { int64_t at, to; uint32_t live; };

// What G query heads meet: chunks with such tokens, and scores [G,*], one row `stride` after the other.
struct Part {
    std::vector<Chunk> chunks;
    int64_t D, stride;
    float* scores;
    const Chunk& after(size_t c, size_t few) const { return chunks[std::min(c + few, chunks.size() - 1)]; }
};

struct alignas(64) Line { union { float f[16]; int8_t b[64]; }; };

// q [G,D] -> scores, of all slots of these chunks.
template <int BITS>
static void keys(const float* q, const Store& k, const Part& part, float scale);

// Weights e^(score - top) of values -> their sums [G], and what they come to, y [G,D].
template <int BITS>
static void values(const Store& v, const Part& part, const float* top, float* sum, float* y);

// Keys of bf16: [D,C] a chunk.
template <>
CPU void keys<16>(const float* q, const Store& k, const Part& part, float scale) {
    const int64_t D = part.D;
    std::vector<uint16_t> small(G * D);
    for (int64_t i = 0; i < G * D; i++) std::memcpy(&small[i], (const char*)(q + i) + 2, 2);  // they were bf16
    for (size_t c = 0; c < part.chunks.size(); c++) {
        const uint16_t* key = (const uint16_t*)k.codes + part.chunks[c].at * D * C;
        const uint16_t* next = (const uint16_t*)k.codes + part.after(c, 1).at * D * C;
        __m512 a[G], b[G];
        for (int g = 0; g < G; g++) a[g] = b[g] = _mm512_setzero_ps();
        for (int64_t d = 0; d < D; d += 2) {
            __m512bh low, high;
            pairs(key + d * C, key + (d + 1) * C, next + d * C, next + (d + 1) * C, &low, &high);
            for (int g = 0; g < G; g++) {
                a[g] = _mm512_dpbf16_ps(a[g], low, both(&small[g * D + d]));
                b[g] = _mm512_dpbf16_ps(b[g], high, both(&small[g * D + d]));
            }
        }
        const __m512 by = _mm512_set1_ps(scale);
        float* to = part.scores + part.chunks[c].to;
        for (int g = 0; g < G; g++)
            in_order(_mm512_mul_ps(a[g], by), _mm512_mul_ps(b[g], by), to + g * part.stride);
    }
}

// The weights of a chunk's slots in query head g, before the division by their sum, to which they are added.
CPU static inline void weigh(const Part& part, const float* top, int g, size_t c, __m512* p, __m512* total) {
    for (int h = 0; h < 2; h++) {
        const __m512 score = _mm512_loadu_ps(part.scores + g * part.stride + part.chunks[c].to + 16 * h);
        p[h] = exponential(_mm512_sub_ps(score, _mm512_set1_ps(top[g])));
        *total = _mm512_add_ps(*total, p[h]);
    }
}

// Values of bf16: [C,D] a chunk. Weights are rounded to bf16.
template <>
CPU void values<16>(const Store& v, const Part& part, const float* top, float* sum, float* y) {
    const int64_t D = part.D;
    std::vector<uint16_t> share(G * C), nothing(D);
    std::vector<float> sums(G * D);
    __m512 total[G], a[G], b[G];
    for (int g = 0; g < G; g++) total[g] = _mm512_setzero_ps();
    for (size_t c = 0; c < part.chunks.size(); c++) {
        for (int g = 0; g < G; g++) {
            __m512 p[2];
            weigh(part, top, g, c, p, &total[g]);
            _mm512_storeu_si512(share.data() + g * C, (__m512i)_mm512_cvtne2ps_pbh(p[1], p[0]));
        }
        const uint16_t* value = (const uint16_t*)v.codes + part.chunks[c].at * C * D;
        const uint16_t* next = (const uint16_t*)v.codes + part.after(c, 1).at * C * D;
        const uint16_t* row[C];  // in an empty slot may be anything, and 0 * NaN is NaN
        for (int i = 0; i < C; i++) row[i] = part.chunks[c].live >> i & 1 ? value + i * D : nothing.data();
        for (int64_t e = 0; e < D; e += 32) {
            for (int g = 0; g < G; g++) {
                a[g] = _mm512_loadu_ps(&sums[g * D + e]);
                b[g] = _mm512_loadu_ps(&sums[g * D + e + 16]);
            }
            for (int i = 0; i < C; i += 2) {
                __m512bh low, high;
                const uint16_t* ahead = next + e * C + i * 32;
                pairs(row[i] + e, row[i + 1] + e, ahead, ahead + 32, &low, &high);
                for (int g = 0; g < G; g++) {
                    a[g] = _mm512_dpbf16_ps(a[g], low, both(&share[g * C + i]));
                    b[g] = _mm512_dpbf16_ps(b[g], high, both(&share[g * C + i]));
                }
            }
            for (int g = 0; g < G; g++) {
                _mm512_storeu_ps(&sums[g * D + e], a[g]);
                _mm512_storeu_ps(&sums[g * D + e + 16], b[g]);
            }
        }
    }
    for (int g = 0; g < G; g++) {
        sum[g] = _mm512_reduce_add_ps(total[g]);
        for (int64_t e = 0; e < D; e += 32)
            in_order(_mm512_loadu_ps(&sums[g * D + e]), _mm512_loadu_ps(&sums[g * D + e + 16]), y + g * D + e);
    }
}

// Codes are bytes without a sign, of which four at once meet four bytes with one. What they are multiplied with has two
// such digits, 256 a + b, 15 bits and a sign, of what is largest.
constexpr int DIGITS = 127 * 256;
CPU static inline __m512 digits(__m512i a, __m512i b) {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(a, 8), b));
}

// The bytes of four vectors, `apart` bytes from each other, so that four of one place lie side by side.
CPU static inline void side_by_side(const uint8_t* x, int64_t apart, __m512i* z) {
    const __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(x + apart);
    const __m512i c = _mm512_loadu_si512(x + 2 * apart), d = _mm512_loadu_si512(x + 3 * apart);
    const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
    const __m512i AB = _mm512_unpackhi_epi8(a, b), CD = _mm512_unpackhi_epi8(c, d);
    z[0] = _mm512_unpacklo_epi16(ab, cd), z[1] = _mm512_unpackhi_epi16(ab, cd);
    z[2] = _mm512_unpacklo_epi16(AB, CD), z[3] = _mm512_unpackhi_epi16(AB, CD);
}

// The codes of plane j.
template <int BITS>
CPU static inline __m512i unpacked(__m512i z, int j) {
    if (BITS == 8) return z;
    return _mm512_and_si512(j ? _mm512_srli_epi16(z, BITS * j) : z, _mm512_set1_epi8((1 << BITS) - 1));
}

// 32 numbers of fp16.
CPU static inline void halves(const uint8_t* x, __m512* two) {
    for (int h = 0; h < 2; h++) two[h] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x + h));
}

CPU static inline __m512i two_lines(const Line* x, __m512i at) {
    return _mm512_permutex2var_epi32(_mm512_load_si512(x), at, _mm512_load_si512(x + 1));
}

CPU static inline void fetch(const uint8_t* x, int64_t lines) {
    for (int64_t i = 0; i < lines; i++) _mm_prefetch((const char*)x + 64 * i, _MM_HINT_T0);
}

// Keys of codes: [D*BITS/8,C] bytes a chunk. A score is the sum over groups of scale * (q . codes) + zero * (sum of q),
// the first by bytes (`score`), the second in floats (`rest`). Four vectors are eight rows: even ones in the lower
// half, odd ones in the upper, and in z[v] slots 4 v to 4 v + 3 and 16 more than that.
template <int BITS>
CPU static void keys(const float* q, const Store& k, const Part& part, float scale) {
    constexpr int P = 8 / BITS;
    const int64_t r = k.groups, bytes = k.span / P, rows = part.D / P, groups = part.D / k.span * r, blocks = rows / 8;
    std::vector<Line> query(2 * P * blocks * G);
    std::vector<int8_t> digit(query.size() * 8);  // of four even rows, and of four odd ones
    std::vector<float> sum(G * groups);
    float unit[G];
    for (int g = 0; g < G; g++) {
        float top = 1e-30f, none = 0;  // or NaN, of a query with one
        for (int64_t d = 0; d < part.D; d++) {
            top = std::max(top, std::abs(q[g * part.D + d]));
            none += 0 * q[g * part.D + d];
        }
        unit[g] = top / DIGITS + none;
        for (int64_t d = 0; d < part.D; d++) {
            const int64_t u = d / k.span, j = d % k.span / bytes, row = u * bytes + d % bytes;
            const int number = std::lrint(q[g * part.D + d] / unit[g]), a = (number + 128) >> 8;
            sum[g * groups + u * r + j * r / P] += number;
            int8_t* to = &digit[((j * blocks + row / 8) * G + g) * 16 + row % 2 * 4 + row % 8 / 2];
            to[0] = a, to[8] = number - 256 * a;
        }
    }
    for (size_t i = 0; i < query.size(); i++) {
        int32_t even, odd;
        std::memcpy(&even, &digit[i * 8], 4), std::memcpy(&odd, &digit[i * 8 + 4], 4);
        _mm512_store_si512(&query[i], _mm512_mask_set1_epi32(_mm512_set1_epi32(even), 0xff00, odd));
    }
    __m512i lanes[4];  // a scale for every slot of z[v]
    for (int v = 0; v < 4; v++)
        lanes[v] = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 0, 1, 2, 3, 16, 17, 18, 19),
                                    _mm512_set1_epi32(4 * v));
    for (size_t c = 0; c < part.chunks.size(); c++) {
        const int64_t at = part.chunks[c].at, ahead = part.after(c, 4).at;
        const uint8_t *code = k.codes + at * rows * C, *next = k.codes + ahead * rows * C;
        const uint8_t* shared = k.shared + at * groups * 4 * C;
        fetch(k.shared + ahead * groups * 4 * C, groups * 2);
        __m512 score[G][4], rest[G][2], two[2];
        for (int g = 0; g < G; g++)
            for (int v = 0; v < 4; v++) score[g][v] = rest[g][v / 2] = _mm512_setzero_ps();
        for (int64_t i = 0; i < groups; i++) {
            __m512i a[G][4], b[G][4];
            for (int g = 0; g < G; g++)
                for (int v = 0; v < 4; v++) a[g][v] = b[g][v] = _mm512_setzero_si512();
            for (int64_t block = i / r * bytes / 8; block < (i / r + 1) * bytes / 8; block++) {
                __m512i z[4];
                side_by_side(code + block * 256, 64, z);
                fetch(next + block * 256, i % r ? 0 : 4);
                for (int j = 0; j < P; j++) {
                    if (j * r / P != i % r) continue;
                    for (int v = 0; v < 4; v++) {
                        const __m512i x = unpacked<BITS>(z[v], j);
                        for (int g = 0; g < G; g++) {
                            const Line* asked = &query[((j * blocks + block) * G + g) * 2];
                            a[g][v] = _mm512_dpbusd_epi32(a[g][v], x, _mm512_load_si512(asked));
                            b[g][v] = _mm512_dpbusd_epi32(b[g][v], x, _mm512_load_si512(asked + 1));
                        }
                    }
                }
            }
            halves(shared + i * 2 * C, two);
            for (int v = 0; v < 4; v++) {
                const __m512 by = _mm512_permutex2var_ps(two[0], lanes[v], two[1]);
                for (int g = 0; g < G; g++)
                    score[g][v] = _mm512_fmadd_ps(digits(a[g][v], b[g][v]), by, score[g][v]);
            }
            halves(shared + (groups + i) * 2 * C, two);
            for (int g = 0; g < G; g++)
                for (int h = 0; h < 2; h++)
                    rest[g][h] = _mm512_fmadd_ps(_mm512_set1_ps(sum[g * groups + i]), two[h], rest[g][h]);
        }
        for (int g = 0; g < G; g++) {
            __m512 whole[2];  // the halves put together: slots 0, 16, 4, 20 and the three after each; 8, 24, 12, 28
            for (int h = 0; h < 2; h++) {
                const __m512 x = score[g][2 * h], y = score[g][2 * h + 1];
                whole[h] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
            }
            const __m512 by = _mm512_set1_ps(unit[g] * scale);
            float* to = part.scores + g * part.stride + part.chunks[c].to;
            const __m512 low = _mm512_shuffle_f32x4(whole[0], whole[1], 0x88);
            const __m512 high = _mm512_shuffle_f32x4(whole[0], whole[1], 0xdd);
            _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_add_ps(low, rest[g][0]), by));
            _mm512_storeu_ps(to + 16, _mm512_mul_ps(_mm512_add_ps(high, rest[g][1]), by));
        }
    }
}

// Values of codes: [C,D*BITS/8] bytes a chunk. A number is the sum over slots of (weight * scale) * code, by bytes
// (`sums`), and of weight * zero, in floats (`rest`). A vector is R slots, or one of the columns of a slot. Products of
// weights and scales are in units of the largest of a few chunks.
template <int BITS>
CPU void values(const Store& v, const Part& part, const float* top, float* sum, float* y) {
    constexpr int P = 8 / BITS, FEW = 4;
    const int64_t r = v.groups, bytes = v.span / P, row = part.D / P, units = part.D / v.span, groups = units * r;
    const int64_t R = std::max<int64_t>(1, 64 / row), columns = std::max<int64_t>(1, row / 64), blocks = C / (4 * R);
    std::vector<Line> sums(G * columns * P * 4), rest(groups * G), code(P * FEW * blocks * 4);
    std::vector<Line> weight(FEW * G * groups + 3);  // of each group: b and a of slots 0, 16, 4, 20, .. and three after
    int32_t slots[16];  // so that the four that side_by_side puts together are next to each other
    for (int i = 0; i < 16; i++) slots[i] = i / (4 * R) * 4 * R + i % (4 * R) / 4 + i % 4 * R;
    const __m512i order = _mm512_loadu_si512(slots);
    const bool more = bytes * 4 <= std::min<int64_t>(row, 64);  // are there four units in a vector?
    __m512i lanes[C / 4][2];  // where two lines of weights have those of a block: b, and a
    for (int64_t i = 0; i < blocks * 2; i++) {
        int32_t at[16];
        for (int64_t j = 0; j < 16; j++) {
            const int64_t byte = j / 4 * 16, four = i / 2 * R + byte / row;
            at[j] = byte % row / bytes % 2 * 16 + four % 4 * 4 + i % 2 * 2 + four / 4;
        }
        lanes[i / 2][i % 2] = _mm512_loadu_si512(at);
    }
    __m512 total[G];
    for (int g = 0; g < G; g++) total[g] = _mm512_setzero_ps();
    for (size_t first = 0; first < part.chunks.size(); first += FEW) {
        const Chunk* chunk = &part.chunks[first];
        const int n = std::min<size_t>(FEW, part.chunks.size() - first);
        __m512 p[FEW][G][2], unit[G], most[G], two[2];
        for (int g = 0; g < G; g++) most[g] = _mm512_setzero_ps();
        for (int c = 0; c < n; c++) {
            const uint8_t* shared = v.shared + chunk[c].at * groups * 4 * C;
            const uint32_t live = chunk[c].live;
            fetch(v.shared + part.after(first + c, FEW).at * groups * 4 * C, groups * 2);
            for (int g = 0; g < G; g++) weigh(part, top, g, first + c, p[c][g], &total[g]);
            for (int64_t i = 0; i < groups; i++) {
                halves(shared + i * 2 * C, two);
                for (int g = 0; g < G; g++)
                    for (int h = 0; h < 2; h++) {
                        const __m512 x = _mm512_mul_ps(p[c][g][h], two[h]);
                        most[g] = _mm512_mask_max_ps(most[g], live >> 16 * h, most[g], x);
                    }
                halves(shared + (groups + i) * 2 * C, two);
                for (int g = 0; g < G; g++) {
                    float* to = rest[i * G + g].f;
                    __m512 x = _mm512_load_ps(to);
                    for (int h = 0; h < 2; h++) x = _mm512_mask3_fmadd_ps(p[c][g][h], two[h], x, live >> 16 * h);
                    _mm512_store_ps(to, x);
                }
            }
        }
        for (int g = 0; g < G; g++) {
            const float largest = std::max(_mm512_reduce_max_ps(most[g]), 1e-30f);
            unit[g] = _mm512_set1_ps(largest / DIGITS);
            most[g] = _mm512_set1_ps(DIGITS / largest);
        }
        for (int c = 0; c < n; c++) {
            const uint8_t* shared = v.shared + chunk[c].at * groups * 4 * C;
            const uint32_t live = chunk[c].live;
            for (int g = 0; g < G; g++)
                for (int h = 0; h < 2; h++) p[c][g][h] = _mm512_mul_ps(p[c][g][h], most[g]);
            for (int64_t i = 0; i < groups; i++) {
                halves(shared + i * 2 * C, two);
                for (int g = 0; g < G; g++) {
                    __m512i number[2];  // + 128, so that it begins with a, and b is what is left, + 128
                    for (int h = 0; h < 2; h++) {
                        const __m512 x = _mm512_mask3_fmadd_ps(p[c][g][h], two[h], _mm512_set1_ps(128), live >> 16 * h);
                        number[h] = _mm512_cvtps_epi32(_mm512_permutexvar_ps(order, x));
                    }
                    const __m512i both = _mm512_packs_epi32(number[0], number[1]);
                    const __m512i b = _mm512_xor_si512(both, _mm512_set1_epi16(128));
                    Line* to = &weight[(c * G + g) * groups + i % r * units + i / r];
                    _mm512_store_si512(to, _mm512_packus_epi16(_mm512_and_si512(b, _mm512_set1_epi16(255)),
                                                               _mm512_srli_epi16(both, 8)));
                }
            }
        }
        for (int64_t column = 0; column < columns; column++) {
            for (int c = 0; c < n; c++) {
                const uint8_t* from = v.codes + chunk[c].at * row * C + column * 64;
                const uint8_t* next = v.codes + part.after(first + c, FEW).at * row * C + column * 64;
                for (int64_t block = 0; block < blocks; block++) {
                    __m512i z[4];
                    side_by_side(from + block * 4 * R * row, R * row, z);
                    for (int i = 0; i < 4; i++) fetch(next + (4 * block + i) * R * row, 1);
                    for (int i = 0; i < 4 * P; i++)
                        _mm512_store_si512(&code[(i / 4 * FEW + c) * blocks * 4 + block * 4 + i % 4],
                                           unpacked<BITS>(z[i % 4], i / 4));
                }
            }
            for (int64_t j = 0; j < P; j++) {
                __m512i a[G][4], b[G][4];
                for (int g = 0; g < G; g++)
                    for (int x = 0; x < 4; x++) a[g][x] = b[g][x] = _mm512_setzero_si512();
                for (int c = 0; c < n; c++)
                    for (int64_t block = 0; block < blocks; block++) {
                        const Line* number = &code[((j * FEW + c) * blocks + block) * 4];
                        for (int g = 0; g < G; g++) {
                            const Line* w = &weight[(c * G + g) * groups + j * r / P * units + column * 64 / bytes];
                            __m512i by[2];
                            for (int h = 0; h < 2; h++) by[h] = two_lines(w, lanes[block][h]);
                            if (more)
                                for (int h = 0; h < 2; h++)
                                    by[h] = _mm512_mask_mov_epi32(by[h], 0xff00, two_lines(w + 2, lanes[block][h]));
                            for (int x = 0; x < 4; x++) {
                                const __m512i of = _mm512_load_si512(number + x);
                                a[g][x] = _mm512_dpbusd_epi32(a[g][x], of, by[1]);
                                b[g][x] = _mm512_dpbusd_epi32(b[g][x], of, by[0]);
                            }
                        }
                    }
                for (int g = 0; g < G; g++)
                    for (int x = 0; x < 4; x++) {
                        float* to = sums[((g * columns + column) * P + j) * 4 + x].f;
                        _mm512_store_ps(to, _mm512_fmadd_ps(digits(a[g][x], b[g][x]), unit[g], _mm512_load_ps(to)));
                    }
            }
        }
    }
    for (int g = 0; g < G; g++) {
        sum[g] = _mm512_reduce_add_ps(total[g]);
        for (int64_t i = 0; i < groups; i++)
            rest[i * G + g].f[0] = _mm512_reduce_add_ps(_mm512_load_ps(rest[i * G + g].f));
        for (int64_t d = 0; d < part.D; d++) {
            const int64_t j = d % v.span / bytes, byte = d / v.span * bytes + d % bytes, i = d / v.span * r + j * r / P;
            const Line* of = &sums[((g * columns + byte / 64) * P + j) * 4 + byte % 16 / 4];
            y[g * part.D + d] = rest[i * G + g].f[0];
            for (int64_t at = byte % 64; at < 64; at += row) y[g * part.D + d] += of->f[at / 16 * 4 + at % 4];
        }
    }
}

// What each of n chunks promises G queries by r of their channels, an even number: those where |q| times spread [D] is
// largest. -inf where no token is.
CPU static void promise(const uint16_t* q, const uint16_t* k, const int32_t* slot_pos, const int32_t* at,
                         const float* spread, int64_t n, int64_t slots, int64_t D, int64_t r, float* best) {
    std::vector<float> weight(D);
    std::vector<int64_t> row(D);
    std::vector<uint16_t> few(G * r);
    for (int64_t d = 0; d < D; d++) {
        for (int g = 0; g < G; g++) weight[d] += std::abs(as_float(q[g * D + d])) * spread[d];
        row[d] = d;
    }
    std::nth_element(row.begin(), row.begin() + r, row.end(),
                     [&](int64_t x, int64_t y) { return weight[x] > weight[y]; });
    std::sort(row.begin(), row.begin() + r);
    for (int64_t i = 0; i < G * r; i++) few[i] = q[i / r * D + row[i % r]];
    for (int64_t c = 0; c < n; c++) {
        const uint32_t live = alive(slot_pos + c * C, slots - c * C);
        const uint16_t *key = k + at[c] * D * C, *next = k + at[std::min(c + 4, n - 1)] * D * C;
        __m512 a[G], b[G];
        for (int g = 0; g < G; g++) a[g] = b[g] = _mm512_setzero_ps();
        for (int64_t i = 0; i < (live ? r : 0); i += 2) {
            __m512bh low, high;
            pairs(key + row[i] * C, key + row[i + 1] * C, next + row[i] * C, next + row[i + 1] * C, &low, &high);
            for (int g = 0; g < G; g++) {
                a[g] = _mm512_dpbf16_ps(a[g], low, both(&few[g * r + i]));
                b[g] = _mm512_dpbf16_ps(b[g], high, both(&few[g * r + i]));
            }
        }
        for (int g = 1; g < G; g++) a[0] = _mm512_max_ps(a[0], a[g]), b[0] = _mm512_max_ps(b[0], b[g]);
        float top[C];
        in_order(a[0], b[0], top);
        const __m512 never = _mm512_set1_ps(-INFINITY);
        best[c] = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_mask_loadu_ps(never, live, top),
                                                     _mm512_mask_loadu_ps(never, live >> 16, top + 16)));
    }
}

// The m of n chunks of each of H heads that promise most, the first and the newest among them, in order: chosen [H,m],
// and the positions in their slots, picked [H,m*C].
extern "C" void choose(const uint16_t* q, const uint16_t* k, const int32_t* slot_pos, const int32_t* at,
                       const float* spread, int64_t* chosen, int32_t* picked, int64_t H, int64_t D, int64_t S,
                       int64_t n, int64_t r, int64_t m) {
    const int64_t N = H < 8 ? 4 : 1;  // pieces of a head, so that few heads give work to all cores
    std::vector<float> promises(H * n);
    #pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < H * N; i++) {
        const int64_t h = i / N, from = n * (i % N) / N, to = n * (i % N + 1) / N, slot = from * C;
        promise(q + h * G * D, k, slot_pos + h * S + slot, at + h * n + from, spread + h * D, to - from, S - slot, D, r,
                promises.data() + h * n + from);
    }
    #pragma omp parallel for schedule(dynamic)
    for (int64_t h = 0; h < H; h++) {
        const int32_t* pos = slot_pos + h * S;
        float* best = promises.data() + h * n;
        std::vector<int64_t> chunk(n);
        int64_t newest = 0;
        for (int64_t c = 0; c < n; c++) {
            chunk[c] = c;
            if (c * C < S && pos[c * C] > pos[newest * C]) newest = c;
        }
        best[0] = best[newest] = INFINITY;
        std::nth_element(chunk.begin(), chunk.begin() + m, chunk.end(),
                         [&](int64_t x, int64_t y) { return best[x] > best[y]; });
        std::sort(chunk.begin(), chunk.begin() + m);
        for (int64_t i = 0; i < m * C; i++) {
            const int64_t slot = chunk[i / C] * C + i % C;
            picked[h * m * C + i] = slot < S ? pos[slot] : -1;
        }
        std::copy(chunk.begin(), chunk.begin() + m, chosen + h * m);
    }
}

// Each of B*H heads in N pieces: q [B*H,G,D], at [B*H,n], slot_pos [B*H,S], pos [B] -> y [B*H,N,G,D], lse [B*H,N,G],
// scores [B*H,G,n*C], -inf where no token is, or one below `sink` or of the newest `length`, which is read elsewhere.
extern "C" CPU void attend(const float* q, const uint8_t* k, const uint8_t* k_shared, const uint8_t* v,
                       const uint8_t* v_shared, const int32_t* slot_pos, const int64_t* pos, const int32_t* at,
                       float* y, float* lse, float* scores, const int64_t* form, int64_t B, int64_t H, int64_t D,
                       int64_t S, int64_t n, int64_t N, float scale) {
    const Store key{k, k_shared, form[0], form[1]}, value{v, v_shared, form[2], form[3]};
    #pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < B * H * N; i++) {
        const int64_t h = i / N, from = n * (i % N) / N, to = n * (i % N + 1) / N;
        std::vector<float> top(G), sum(G);
        Part part{{}, D, n * C, scores + h * G * n * C};
        for (int64_t c = from; c < to; c++) {
            const uint32_t live = alive(slot_pos + h * S + c * C, S - c * C, form[5], pos[h / H] - form[4]);
            if (live)
                part.chunks.push_back({at[h * n + c], c * C, live});
            else
                for (int64_t g = 0; g < G; g++) std::fill_n(part.scores + g * part.stride + c * C, C, -INFINITY);
        }
        keys<K_BITS>(q + h * G * D, key, part, scale);
        for (int64_t g = 0; g < G; g++) {
            __m512 most = _mm512_set1_ps(-1e30f);
            for (const Chunk& chunk : part.chunks)
                for (int half = 0; half < 2; half++) {
                    float* row = part.scores + g * part.stride + chunk.to + half * 16;
                    const __m512 x = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), chunk.live >> half * 16, row);
                    _mm512_storeu_ps(row, x);
                    most = _mm512_max_ps(most, x);
                }
            top[g] = _mm512_reduce_max_ps(most);
        }
        values<V_BITS>(value, part, top.data(), sum.data(), y + i * G * D);
        for (int64_t g = 0; g < G; g++) {
            lse[i * G + g] = sum[g] > 0 ? top[g] + std::log(sum[g]) : -INFINITY;
            for (int64_t d = 0; d < D; d++) y[(i * G + g) * D + d] *= sum[g] > 0 ? 1 / sum[g] : 0;
        }
    }
}
"""


def build_native() -> None:
    """Compiles them, where the CPU can and there is a compiler; otherwise there is another way for everything."""
    global NATIVE, CORES
    NATIVE, CORES = compile_native(), torch.get_num_threads()


@functools.cache
def compile_native() -> bool:
    needs = ("_is_avx512_bf16_supported", "_is_vnni_supported")
    try:
        if not all(getattr(torch.cpu, name, lambda: False)() for name in needs):
            return False
        from torch._inductor.codecache import CppCodeCache

        rows_of = CppCodeCache.load(COMMON + ROWS).few_rows
    except Exception:  # no compiler, or an old one
        return False
    rows_of.argtypes, rows_of.restype = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 3, None

    def few_rows(x: Tensor, weight: Tensor, y: Tensor) -> Callable:
        return bound(rows_of, [x, weight, y], x.shape[0], *weight.shape)

    def attention(q, k, k_shared, v, v_shared, slot_pos, pos, table, form, pieces, y, lse, scores) -> Callable:
        (B, H, G, D), n = q.shape, table.shape[2]
        k_bits, v_bits, *form = form
        tensors = [q, k, k_shared, v, v_shared, slot_pos, pos, table, y, lse, scores]
        sizes = (ctypes.c_int64 * len(form))(*form), B, H, D, slot_pos.shape[2], n, pieces, D**-0.5
        return bound(attention_of(G, k_bits, v_bits).attend, tensors, *sizes)

    def choice(q, k, slot_pos, table, spread, r, m, chosen, picked) -> Callable:
        (B, H, G, D), n = q.shape, table.shape[2]
        tensors = [q, k, slot_pos, table, spread, chosen, picked]
        return bound(attention_of(G, 16, 16).choose, tensors, B * H, D, slot_pos.shape[2], n, r, m)

    native("few_rows(Tensor x, Tensor weight) -> Tensor", few_rows, few_rows_shape)
    native(
        "choose(Tensor q, Tensor k, Tensor slot_pos, Tensor table, Tensor spread, int r, SymInt m) -> (Tensor, Tensor)",
        choice,
        choose_shape,
    )
    native(
        "attend(Tensor q, Tensor k, Tensor k_shared, Tensor v, Tensor v_shared, Tensor slot_pos, Tensor pos, "
        "Tensor table, int[] form, int pieces) -> (Tensor, Tensor, Tensor)",
        attention,
        attend_shape,
    )
    return True


@torch.compiler.assume_constant_result
def has_attention(heads: int, k_bits: int, v_bits: int) -> bool:
    """Does ATTENTION compile for them? Asked while a step is traced, when there still is another way."""
    try:
        return bool(attention_of(heads, k_bits, v_bits))
    except Exception:  # a compiler that runs out of memory, or does not know the instructions
        return False


@functools.cache
def attention_of(heads: int, k_bits: int, v_bits: int) -> ctypes.CDLL:
    """ATTENTION for so many query heads of a KV head, and keys and values of so many bits."""
    from torch._inductor.codecache import CppCodeCache

    given = f"constexpr int G = {heads}, K_BITS = {k_bits}, V_BITS = {v_bits};\n"
    library = CppCodeCache.load(COMMON + given + ATTENTION)
    library.attend.argtypes = [ctypes.c_void_p] * 12 + [ctypes.c_int64] * 6 + [ctypes.c_float]
    library.choose.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int64] * 6
    library.attend.restype = library.choose.restype = None
    return library


def bound(function: Callable, tensors: list[Tensor], *sizes) -> Callable:
    """C++ with where tensors are, and they with it."""
    call = functools.partial(function, *(x.data_ptr() for x in tensors), *sizes)
    call.tensors = tensors
    return call


def native(schema: str, prepare: Callable, shape: Callable, devices: tuple[str, ...] = ("CPU",)) -> None:
    """An operator that `recorded` knows of: prepare(*inputs, *outputs) -> what does it, where shape(*inputs) makes
    outputs."""

    def run(*inputs: Tensor):
        outputs = shape(*inputs)
        call = [*inputs, *(outputs if isinstance(outputs, tuple) else [outputs])]
        prepare(*call)()
        for calls in RECORDING:
            calls.append((prepare, call))
        return outputs

    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    for device in devices:
        LIBRARY.impl(name, run, device)
    torch.library.register_fake(f"kv_fast::{name}", shape)


def topk_shape(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], n), x.new_empty(*x.shape[:-1], n, dtype=torch.int64)


def few_rows_shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


def choose_shape(q, k, slot_pos, table, spread, r: int, m: int) -> tuple[Tensor, Tensor]:
    B, H = q.shape[:2]
    return slot_pos.new_empty(B, H, m, dtype=torch.int64), slot_pos.new_empty(B, H, m * CHUNK)


def attend_shape(q, k, k_shared, v, v_shared, slot_pos, pos, table, form, pieces) -> tuple[Tensor, Tensor, Tensor]:
    (B, H, G, D), n = q.shape, table.shape[2]
    return q.new_empty(B, H, pieces, G, D), q.new_empty(B, H, pieces, G), q.new_empty(B, H, G, n * CHUNK)


def has_native(q: Tensor, k: "Written | None", v: "Written | None") -> bool:
    """Is `attend_native` for such queries [B,H,G,D] and such a cache?"""

    def fits(store: "Written | None", dim: int) -> bool:
        if store is None or store.codes.shape[dim] != CHUNK:  # smaller pages have smaller chunks
            return False
        # Bytes of a slot's codes, and of a unit's: vectors of 64 hold whole ones, or they vectors.
        row, unit = q.shape[3] * store.bits // 8, store.span * store.bits // 8
        return store.number == "float" or (
            (store.number, store.scale) == ("int", "range")
            and unit % 16 == 0
            and store.span // store.groups <= 256  # sums of 32 bits
            and (unit % 64 == 0 or 64 % unit == 0)
            and (row % 64 == 0 or 64 % row == 0)
        )

    if not NATIVE or not torch.compiler.is_compiling() or q.dtype != torch.bfloat16:
        return False
    if q.shape[2] > 8 or q.shape[3] % 32 or not (fits(k, -1) and fits(v, -2)):
        return False
    return has_attention(q.shape[2], k.bits or 16, v.bits or 16)


def in_order(q: Tensor, k: "Written") -> Tensor:
    """The table [B,H,n] of chunks that lie one after the other."""
    B, H, n = *q.shape[:2], k.codes.shape[2]
    return torch.arange(B * H * n, dtype=torch.int32, device=q.device).view(B, H, n)


def choose(
    q: Tensor, k: "Written", slot_pos: Tensor, table: Tensor | None, spread: Tensor, r: int, m: int
) -> tuple[Tensor, Tensor]:
    """The m chunks that promise most by r channels of their keys, [B,H,m], and the positions in their slots, [B,H,m*C]:
    q [B,H,G,D] in bf16, slot_pos [B,H,S], spread [B,H,D] float32, what a channel counts."""
    table = in_order(q, k) if table is None else table
    return torch.ops.kv_fast.choose(q.contiguous(), k.codes, slot_pos.contiguous(), table.contiguous(), spread, r, m)


def attend_native(
    q: Tensor,
    k: "Written",
    v: "Written",
    slot_pos: Tensor,
    pos: Tensor,
    table: Tensor | None,
    length: int = 0,
    sink: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of one query a head, as `attend`, but not over tokens of a ring, those below `sink` and the newest
    `length`: q [B,H,G,D] float32, as keys are written but not scaled, slot_pos [B,H,S], pos [B]
    -> y [B,H,N,G,D], log-sum-exp [B,H,N,G] of N pieces and scores [B,H,G,n*C]. Weights that meet bf16 values are
    rounded to bf16; what meets codes has 15 bits and a sign: of a head's largest number, or of the
    largest weight times scale of four chunks."""
    B, H = q.shape[:2]
    table = in_order(q, k) if table is None else table
    pieces = min(4, -(-2 * CORES // (B * H))) if CORES > 1 else 1  # work for all cores, where heads are few
    stores = [x for store in (k, v) for x in (store.codes, store.codes if store.shared is None else store.shared)]
    form = [k.bits or 16, v.bits or 16, k.span, k.groups, v.span, v.groups, length, sink]
    return torch.ops.kv_fast.attend(
        q.contiguous(), *stores, slot_pos.contiguous(), pos.contiguous(), table.contiguous(), form, pieces
    )


LIBRARY = torch.library.Library("kv_fast", "DEF")  # it lives as long as this does
native(
    "topk(Tensor x, SymInt n) -> (Tensor, Tensor)",
    lambda x, n, *found: functools.partial(torch.topk, x, n, sorted=False, out=found),
    topk_shape,
)


# ---------------------------------------------------------------------------------------------------------------------
# Processes that share a model (tensor parallel, 1909.08053): each has some heads of every layer and their cache, and a
# part of every MLP. What they compute is summed twice a layer; a policy that weighs heads against each other asks, too.

RANK, RANKS = 0, 1  # which of how many this process is


class LostRank(RuntimeError):
    """One of the processes that share the model has ended, and the others cannot go on."""


def started() -> tuple[int, int]:
    """Which of how many processes torchrun has started this one as; 0 of 1 without it."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    return int(os.environ.get("RANK", 0)) if ranks > 1 else 0, ranks


def join_ranks(device: torch.device) -> None:
    """Finds the other processes, where torchrun has started several; all of them call this."""
    global RANK, RANKS
    if started()[1] == 1:
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    RANK, RANKS = started()


def leave_ranks(code: int) -> None:
    """Ends this process with an exit code, if it is one of several: when all have come to their end, or at once."""
    if RANKS == 1:
        return
    if code == 0:
        with contextlib.suppress(RuntimeError):  # one that has ended with an error has said so
            dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads outlive the group, and abort when they find the interpreter gone


@contextlib.contextmanager
def together() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())[-200:]
        raise LostRank(f"rank {RANK} of {RANKS}: another process has ended, or cannot be reached ({reason})") from None


def all_sum(x: Tensor) -> Tensor:
    """x, summed over all processes: the same bits in each. In float32, as every long sum."""
    return x if RANKS == 1 else torch.ops.kv_fast.all_sum(x.float().contiguous()).to(x.dtype)


def all_heads(x: Tensor) -> Tensor:
    """x [B,H,..] of this process's heads -> of all, in their order."""
    if RANKS == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(RANKS)]
    with together():
        dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def own_heads(x: Tensor) -> Tensor:
    """Of x [B,H,..] of all heads, what is of this process's."""
    return x.chunk(RANKS, 1)[RANK]


def all_agree(yes: bool) -> bool:
    """Does every process say yes? Where one did something else than the others, they would wait for each other."""
    return bool(all_sum(torch.tensor(float(yes))) == RANKS)


def summed(x: Tensor, y: Tensor) -> None:
    y.copy_(x)
    with together():
        dist.all_reduce(y)


native("all_sum(Tensor x) -> Tensor", functools.partial(functools.partial, summed), torch.empty_like, ("CPU", "CUDA"))


# ---------------------------------------------------------------------------------------------------------------------
# A CPU's answer to a CUDA graph. Between two kernels of a compiled step lie guards, wrappers and allocations, a third
# of the time of a small model. Addresses stand still while a sequence decodes, so kernels can simply be called again.

Calls = list[tuple[Callable, list]]
RECORDING: list[Calls] = []  # where native operators note their calls, too


@contextlib.contextmanager
def recorded() -> Iterator[Calls]:
    """Collects every call of a compiled CPU kernel made inside, as (what prepares it, arguments): see `ready`.

    Reaches into Inductor's modules for what it compiled. Whoever uses the result must `spoil` it and compare one replay
    with the real thing: work that is done outside of such kernels is not recorded.
    """
    from torch._inductor.codecache import PyCodeCache

    calls: Calls = []

    def recorder(kernel: Callable) -> Callable:
        prepare = functools.partial(functools.partial, kernel)

        def call(*args):
            calls.append((prepare, list(args)))
            return kernel(*args)

        return call

    found = [(m, n, k) for m in PyCodeCache.modules for n, k in vars(m).items() if n.startswith("cpp_fused")]
    for module, name, kernel in found:
        setattr(module, name, recorder(kernel))
    RECORDING.append(calls)
    try:
        yield calls
    finally:
        RECORDING.remove(calls)
        for module, name, kernel in found:
            setattr(module, name, kernel)


def share_scratch(calls: Calls, keep: Iterable[Tensor]) -> None:
    """Lets all calls of one kernel use the same temporaries, the largest of any: one layer's working set, not all.

    keep: tensors that live on, such as weights, caches and inputs. What two calls have in common, the result of one
    layer and the input of the next, stays as it is.
    """

    def address(x) -> int | None:
        return x.untyped_storage().data_ptr() if isinstance(x, Tensor) else None

    kept = {address(x) for x in keep} | {None}
    owned = [list(dict.fromkeys(address(x) for x in args)) for _, args in calls]
    uses = collections.Counter(a for addresses in owned for a in addresses)
    owned = [[a for a in addresses if a not in kept and uses[a] == 1] for addresses in owned]
    storage = {address(x): x.untyped_storage() for _, args in calls for x in args if isinstance(x, Tensor)}
    largest: dict[tuple, torch.UntypedStorage] = {}
    for (prepare, _), addresses in zip(calls, owned, strict=True):
        for i, a in enumerate(addresses):
            largest[prepare, i] = max(largest.get((prepare, i), storage[a]), storage[a], key=lambda s: s.nbytes())
    for (prepare, args), addresses in zip(calls, owned, strict=True):
        index = {a: i for i, a in enumerate(addresses)}
        for j, x in enumerate(args):
            if address(x) in index:
                shared = largest[prepare, index[address(x)]]
                args[j] = torch.empty(0, dtype=x.dtype).set_(shared, x.storage_offset(), x.shape, x.stride())


def spoil(calls: Calls, keep: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Overwrites everything that calls read and write, but for `keep`: what a replay does not compute is seen then.
    Returns the tensors with what was in them: of a constant of the compiled code, nothing else knows."""
    kept = {x.untyped_storage().data_ptr() for x in keep}
    found = {id(x): x for _, args in calls for x in args if isinstance(x, Tensor)}.values()
    found = [(x, x.clone()) for x in found if x.untyped_storage().data_ptr() not in kept]
    for x, _ in found:
        x.fill_(3 if x.is_floating_point() else 0)  # not NaN, which masked slots would keep: 0 * NaN is NaN
    return found


def ready(calls: Calls) -> list[Callable]:
    """All that was recorded, in order, to be called without arguments, on what the recorded tensors hold then."""
    return [prepare(*args) for prepare, args in calls]
