"""What a GPU would be given to compile: every cache's step, captured whole on tensors that only pretend to be CUDA's.

`test_kernels.py` starts this in a process of its own. A build without CUDA has no device guard, so that whatever calls
one, which is Python's own indexing and a few methods, is replaced by the operators that they end in.
"""

from types import SimpleNamespace

import torch
import torch.utils._triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import cache as caches
import kernels

aten = torch.ops.aten


class Pretended:
    """A driver for one GPU of compute capability 9.0."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda *_: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cuda:0"))


def getitem(x, index):
    index = list(index) if isinstance(index, tuple) else [index]
    for at, i in enumerate(index):
        if i is Ellipsis:
            index[at : at + 1] = [slice(None)] * (x.dim() - sum(i is not None and i is not Ellipsis for i in index))
            break
    dim, tensors = 0, []
    for i in index:
        if i is None:
            x = aten.unsqueeze.default(x, dim)
        elif isinstance(i, torch.Tensor):
            tensors += [None] * (dim - len(tensors)) + [i]
        elif isinstance(i, slice):
            x = x if i == slice(None) else aten.slice.Tensor(x, dim, i.start, i.stop, i.step or 1)
        else:
            x, dim = aten.select.int(x, dim, i), dim - 1
        dim += 1
    return aten.index.Tensor(x, tensors) if tensors else x


def setitem(x, index, value):
    where = [None if isinstance(i, slice) else i for i in (index if isinstance(index, tuple) else (index,))]
    value = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
    aten.index_put_.default(x, where, value)


def pretend() -> None:
    torch.utils._triton.has_triton = torch.utils._triton.has_triton_package = lambda: True
    driver.set_active(Pretended())
    FakeTensor.__getitem__, FakeTensor.__setitem__ = getitem, setitem
    FakeTensor.__invert__ = lambda x: aten.bitwise_not.default(x)
    FakeTensor.copy_ = lambda x, source: aten.copy_.default(x, source)
    for name in ("masked_fill", "masked_fill_", "clamp_"):
        setattr(FakeTensor, name, lambda x, *a, name=name, **k: getattr(aten, name)(x, *a, **k))
    kernels.rotation = lambda dim, device: torch.zeros(dim, dim, device=device)


def captured(policy: str, form: str, bits: int, page: int = 0) -> list[str]:
    """Names of the functions in the one graph of a step."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.config.force_parameter_static_shapes = False
    with FakeTensorMode(allow_non_fake_inputs=True):
        budget = None if policy == "full" else 1024
        spec = caches.build(policy, budget=budget, bits=bits, format=form, page_size=page)
        args = SimpleNamespace(n_layer=1, n_kv_head=8, head_dim=128, max_seq_len=4096)
        cache = spec(args, torch.rand(64, device="cuda"), 2, 2048, torch.bfloat16, "cuda")[0]
        cache.allocate(1024)
        if page:
            cache.layout.pool.enlarge(100)
        q, k, v = (torch.randn(2, h, 1, 128, device="cuda", dtype=torch.bfloat16) for h in (32, 8, 8))
        step = torch.compile(lambda *x: cache(*x), backend=backend, fullgraph=True, dynamic=False)
        y = step(q, k, v, torch.zeros(2, 1, dtype=torch.int64, device="cuda"))
    assert y.is_cuda
    assert y.shape == q.shape
    (graph,) = graphs
    return [str(node.target) for node in graph.graph.nodes]


if __name__ == "__main__":
    pretend()
    forms = [("float", 16), ("int", 8), ("int", 4), ("int", 2), ("kivi", 4), ("fp8", 8), ("nvfp4", 4), ("mxfp4", 4)]
    for policy in caches.POLICIES:
        for form, bits in forms:
            try:
                calls = captured(policy, form, bits)
            except caches.SpecError:
                continue
            assert sum("triton" in call for call in calls) == 1, (policy, form, calls)
            print(policy, form, bits, "one graph, one kernel")
    for policy, form, bits, page in [("full", "int", 4, 16), ("h2o", "float", 16, 64), ("adakv", "kivi", 4, 32)]:
        calls = captured(policy, form, bits, page)
        assert sum("triton" in call for call in calls) == 1, (policy, form, calls)
        print(policy, form, bits, "on pages: one graph, one kernel")
