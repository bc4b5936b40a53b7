"""kernels.py: what the hardware does. Tensors in, tensors out; nothing here knows a policy, a store or a layer.

    linear             one matrix product of the model
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
    recorded, replay   the kernels of a compiled CPU step, called again without the Python between them

Every function is plain PyTorch. On a CPU that *is* the implementation: `dot` and `mix` are products and sums over a
dim that is not the innermost one, so Inductor makes one vector loop of unpacking, scaling and multiplying, and no
dequantized tensor exists. Anything of size T x T is left out on purpose.

Shapes: B sequences, H KV heads, G query heads per KV head, T tokens, S slots, D head dim; n chunks of C = CHUNK slots.
"""

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

# Slots that lie side by side in memory, and so in vector registers. Keys are stored [.., n, d, C] and values
# [.., n, C, d]. 32 was as fast as 64 for keys (8,192 slots, 4 bits) and wastes half as much on rounding S up.
CHUNK = 32


def written(x: Tensor) -> Tensor:
    """x, but computed once and written out.

    Inductor computes what is cheap anew wherever it is read, be that for every slot of a cache or for every row of a
    matrix. What it does write out is a concatenation, here with something it cannot see to be x as well. (Two halves of
    x would do, but half of an odd number of heads, 288 of 9 x 64 channels, was compiled into a loop over 256.)
    """
    return torch.stack([x, -x])[0] if torch.compiler.is_compiling() and not x.is_cuda else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..,I], weight [O,I], bias [O] -> [..,O].

    One row against a bf16 matrix is a read of the matrix and nothing else. oneDNN gets under half of the memory
    bandwidth there; the same product written as multiply + sum, which Inductor vectorises, about three quarters.
    """
    if x.numel() != x.shape[-1] or x.is_cuda or not torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    y = (x.float().unsqueeze(-2) * weight.float()).sum(-1)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B,H*G,T,D], k and v [B,H,T,D] -> [B,H*G,T,D]; query head j reads KV head j // G. O(T) memory."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def attend_chunk(q: Tensor, k: Tensor, v: Tensor, live: Tensor, near: Tensor | None = None, sink: int = 0) -> Tensor:
    """T queries over S cached slots and causally over their own T tokens; arguments as for `rows_of_attention`,
    v [B,H,S+T,D] -> [B,H*G,T,D]."""
    y = torch.empty_like(q)
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
    of a chunk stay in registers.
    """
    heads, chunk, U = p.shape[2], planes[0].shape[3], planes[0].shape[4]
    r = 1 if scale is None else scale.shape[3] // U
    p = p.unflatten(-1, (-1, chunk))  # [B,H,G,n,C]
    if scale is None:
        weight = p[..., None, None].unbind(2)  # G of [B,H,n,C,1,1]
    else:
        # Stacked, p * scale is written out once, for vectors of slots; else every channel would multiply it anew.
        weight = torch.stack([p[:, :, g, :, None] * scale for g in range(heads)], 2).mT
        weight = weight.unflatten(-1, (U, r)).unbind(2)  # G of [B,H,n,C,U,r]
    group = [j * r // len(planes) for j in range(len(planes))]
    sums = [(w[..., i : i + 1] * plane).sum(-3).sum(2) for w in weight for i, plane in zip(group, planes, strict=True)]
    y = torch.stack(sums, 2).unflatten(2, (heads, r, -1)).movedim(5, 3)  # [B,H,G,U,r,plane,channel]
    if zero is not None:
        rest = (p[:, :, :, :, None] * zero[:, :, None]).sum((3, 5))  # [B,H,G,U*r]
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
# A CPU's answer to a CUDA graph. Between two kernels of a compiled step lie guards, wrappers and allocations, a third
# of the time of a small model. Addresses stand still while a sequence decodes, so kernels can simply be called again.

Calls = list[tuple[Callable, list]]


@contextlib.contextmanager
def recorded() -> Iterator[Calls]:
    """Collects every call of a compiled CPU kernel made inside, as (kernel, arguments), and keeps the arguments alive.

    Reaches into Inductor's modules for what it compiled. Whoever uses the result must compare one replay with the real
    thing: work that is done outside of such kernels is not recorded.
    """
    from torch._inductor.codecache import PyCodeCache

    calls: Calls = []

    def recorder(kernel: Callable) -> Callable:
        def call(*args):
            calls.append((kernel, list(args)))
            return kernel(*args)

        return call

    found = [(m, n, k) for m in PyCodeCache.modules for n, k in vars(m).items() if n.startswith("cpp_fused")]
    for module, name, kernel in found:
        setattr(module, name, recorder(kernel))
    try:
        yield calls
    finally:
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
    for (kernel, _), addresses in zip(calls, owned, strict=True):
        for i, a in enumerate(addresses):
            largest[kernel, i] = max(largest.get((kernel, i), storage[a]), storage[a], key=lambda s: s.nbytes())
    for (kernel, args), addresses in zip(calls, owned, strict=True):
        index = {a: i for i, a in enumerate(addresses)}
        for j, x in enumerate(args):
            if address(x) in index:
                shared = largest[kernel, index[address(x)]]
                args[j] = torch.empty(0, dtype=x.dtype).set_(shared, x.storage_offset(), x.shape, x.stride())


def replay(calls: Calls) -> None:
    """Everything that was recorded, in order, on what the recorded tensors hold now."""
    for kernel, args in calls:
        kernel(*args)
