"""What tests of Triton's kernels share, on a CPU (interpreted.py) and on a GPU (gpu.py): caches, and what is right."""

from types import SimpleNamespace

import torch

import cache as caches
import kernels

FORMATS = ["float-16", "int-8", "int-4", "int-2", "kivi-4", "kivi-2", "fp8-8", "nvfp4-4", "mxfp4-4"]


def filled(
    form: str,
    dim: int,
    dtype: torch.dtype,
    residual: int,
    policy: str,
    batch: int,
    heads: int,
    device: str = "cpu",
    page: int = 0,
):
    """A cache of 96 slots a head that 112 tokens were read into, half a residual's length of them one by one."""
    name, bits = form.split("-")
    ring = residual if bits != "16" else None
    spec = caches.build(policy, budget=96, bits=int(bits), format=name, residual=ring, page_size=page)
    args = SimpleNamespace(n_layer=1, n_kv_head=heads, head_dim=dim, max_seq_len=512)
    cache = spec(args, torch.rand(dim // 2, device=device), batch, 256, dtype, device)[0]
    cache.fit([104] * batch, [0] * batch, 8, 256)
    k, v = torch.randn(2, batch, heads, 112, dim, device=device).to(dtype)
    pos = torch.arange(112, device=device).expand(batch, -1)
    for t in (slice(0, 104), *(slice(i, i + 1) for i in range(104, 112))):
        by_reference(cache, k[:, :, t], k[:, :, t], v[:, :, t], pos[:, t])
    return cache


def by_reference(f, *args):
    """f(*args), without any Triton kernel."""
    has_kernel = kernels.has_kernel
    try:
        kernels.has_kernel = lambda x: False
        return f(*args)
    finally:
        kernels.has_kernel = has_kernel


def oracle(cache, q, pos):
    """q [B,H,R,D] over what the cache holds, in float64 -> y [B,H,R,D] and mass [B,H,S]."""
    S = cache.slot_pos.shape[2]
    k, v = (store.decoded().flatten(2, 3)[:, :, :S].double() for store in (cache.k_store, cache.v_store))
    if cache.residual is not None:
        k, v = cache.residual.overlay(k, v, cache.slot_pos, pos)
    score = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    weight = score.masked_fill(cache.slot_pos[:, :, None] < 0, float("-inf")).softmax(-1)
    return weight @ v.double(), weight.sum(2)


def on_pages(cache, q, pos):
    """cache.attend, of a pool whose chunks lie in random order."""
    shape = cache.k_store.part0.shape[:3]
    order = torch.randperm(shape.numel(), generator=torch.Generator().manual_seed(3)).to(q.device)

    def moved(x: kernels.Written):
        pool = {n: getattr(x, n).flatten(0, 2) for n in ("codes", "shared") if getattr(x, n) is not None}
        return x._replace(**{n: torch.empty_like(y).index_copy_(0, order, y) for n, y in pool.items()})

    dense = kernels.attend
    try:
        table = order.view(shape).to(torch.int32)
        kernels.attend = lambda q, k, v, *rest: dense(q, moved(k), moved(v), *rest[:-1], table)
        return cache.attend(q, pos)
    finally:
        kernels.attend = dense


def close(got, want, bound):
    assert got.isfinite().all()
    assert (got - want).abs().max() <= bound * want.abs().max()
