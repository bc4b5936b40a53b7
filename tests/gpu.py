"""Everything that only a machine with a GPU can say, in under five minutes: `python tests/gpu.py`.

1. every kernel against float64 and the reference, in bf16, fp16 and float32
2. the compiled step: eager's logits, one CUDA graph, nothing that skipped it; offload and selection
3. bytes a second of decode attention, next to those of a copy
4. a step of a model of Llama-3-8B's shape at 32,768 tokens, pyramid at 4 bits, next to one at 128

Prints what it measures, and what is wrong; exit code 1 if anything is. --small: sizes that a test of this script takes.
"""

import itertools
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

from conftest import tiny_args  # noqa: E402
from kernel_cases import FORMATS, by_reference, filled, on_pages, oracle  # noqa: E402

import cache as caches  # noqa: E402
import kernels  # noqa: E402
import model as llama  # noqa: E402
from generate import DecodeStep  # noqa: E402

SMALL = "--small" in sys.argv
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LLAMA_3_8B = dict(dim=4096, n_layer=32, n_head=32, n_kv_head=8, head_dim=128, hidden_dim=14336, vocab_size=128256)
wrong: list[str] = []
if SMALL:
    kernels.PROGRAMS = 4


def check(good: bool, what: str) -> None:
    if not good:
        wrong.append(what)
        print(f"  WRONG: {what}")


def furthest(got, want) -> float:
    """The largest error, as a part of the largest number; infinite for NaN."""
    error = ((got.double() - want.double()).abs().max() / want.abs().max()).item()
    return error if error == error else float("inf")


def sync() -> None:
    if CUDA:
        torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------------------------------------
# 1. Kernels


def right() -> None:
    bounds = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}
    dims, groups = ([64], [3]) if SMALL else ([20, 64, 96, 128, 256], [1, 3, 4, 7, 16])
    for dtype, bound in bounds.items():
        if SMALL and dtype != torch.float32:
            continue
        forms = ("float-16", "int-4", "kivi-2") if SMALL else FORMATS
        worst = dict.fromkeys(forms, 0.0)
        for form, dim, policy in itertools.product(
            forms, dims, ("streaming",) if SMALL else ("random", "tova", "streaming")
        ):
            for residual in (0,) if form == "float-16" else (0, 16):
                cache = filled(form, dim, dtype, residual, policy, 2, 2, DEVICE)
                for group in groups:
                    q = torch.randn(2, 2, group, dim, device=DEVICE).to(dtype)
                    pos = torch.full((2,), 111, device=DEVICE)
                    y, mass = cache.attend(q, pos)
                    if policy == "streaming":  # sinks are asked by a query of their own: what the oracle knows not
                        want, want_mass = by_reference(cache.attend, q, pos)
                    else:
                        want, want_mass = oracle(cache, q, pos)
                    error = furthest(y, want)
                    error = error if mass is None else max(error, furthest(mass, want_mass))
                    worst[form] = max(worst[form], error)
                    check(error < bound, f"{form} {dtype} D {dim} G {group} {policy} residual {residual}: {error:.1e}")
                    paged = on_pages(cache, q, pos)
                    check(torch.equal(paged[0], y), f"{form} {dtype} D {dim} G {group} {policy}: paged is not dense")
        print(f"{str(dtype)[6:]:9}", "  ".join(f"{form} {error:.0e}" for form, error in worst.items()))
        sizes = [(3, 70, 0, 64), (1, 5, 70, 80)] if SMALL else [(3, 300, 0, 64), (4, 130, 190, 128), (1, 5, 200, 80)]
        for group, new, old, dim in sizes:
            q, k, v = (torch.randn(2, n, h, dim, device=DEVICE).transpose(1, 2).to(dtype)
                       for n, h in ((new, 2 * group), (old + new, 2), (old + new, 2)))  # fmt: skip
            live = torch.rand(2, 2, old, device=DEVICE) > 0.3 if old else None
            mass = kernels.column_mass(q, k, live)
            error = furthest(mass, by_reference(kernels.column_mass, q, k, live))
            check(error < max(bound / 10, 5e-6), f"column_mass {dtype} {group, new, old, dim}: {error:.1e}")
            check(torch.equal(mass, kernels.column_mass(q, k, live)), f"column_mass {dtype} is not deterministic")
            if old:
                error = furthest(kernels.attend_chunk(q, k, v, live), by_reference(kernels.attend_chunk, q, k, v, live))
                check(error < bound, f"attend_chunk {dtype} {group, new, old, dim}: {error:.1e}")


# ---------------------------------------------------------------------------------------------------------------------
# 2. The compiled step


def random_model(dtype: torch.dtype, **shape) -> llama.Transformer:
    with torch.device("meta"):
        model = llama.Transformer(tiny_args(max_seq_len=65536, **shape))
    model = model.to(dtype).to_empty(device=DEVICE).eval().requires_grad_(False)
    model.finish_loading(DEVICE)
    for name, p in model.named_parameters():
        torch.nn.init.ones_(p) if "norm" in name else torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return model


def compiled() -> None:
    from torch._dynamo.utils import counters

    shape = dict(dim=256, n_layer=3, n_head=12, n_kv_head=4, head_dim=64, hidden_dim=512, vocab_size=1000)
    ids = torch.randint(0, 1000, (1, 200), device=DEVICE)
    forms = [("full", 16, "auto"), ("tova", 4, "int"), ("snapkv", 2, "auto"), ("h2o", 8, "fp8"), ("window", 4, "kivi"),
             ("streaming", 4, "nvfp4"), ("pyramid", 4, "mxfp4")]  # fmt: skip
    for policy, bits, form in forms[:1] if SMALL else forms:
        logits = []
        for how in ("eager", "eager") if SMALL else ("eager", "by hand", "reduce-overhead"):
            torch.manual_seed(0)
            torch._dynamo.reset()
            model = random_model(torch.float32, **shape)
            spec = caches.build(policy, bits=bits, format=form, budget=None if policy == "full" else 96)
            model.setup_caches(spec, 1, 300)
            if how != "eager":
                model.compile()
            step = DecodeStep(model)
            if how == "reduce-overhead":
                counters.clear()
                model.run_block, model.run_head = llama.TransformerBlock.forward, llama.Transformer.head
                in_one = torch.compile(llama.Transformer.forward, fullgraph=True, mode="reduce-overhead")

                def step(tok, pos, in_one=in_one, model=model):
                    torch.compiler.cudagraph_mark_step_begin()
                    return in_one(model, tok, pos).clone()

            with torch.no_grad():
                model.prefill(ids[:, :150], 0, 60)
                out = []
                for t in range(150, 153 if SMALL else 200):
                    out.append(step(ids[:, t : t + 1], torch.tensor([[t]], device=DEVICE))[0, 0].clone())
            logits.append(torch.stack(out))
            if how == "reduce-overhead" and CUDA:
                check(not counters["inductor"]["cudagraph_skips"], f"{policy} {bits} {form}: skipping cudagraphs")
            elif how == "by hand" and CUDA:
                check(step.again is not None, f"{policy} {bits} {form}: the step was not captured")
        errors = [furthest(x, logits[0]) for x in logits[1:]]
        print(f"{policy} {bits} {form}: captured by hand, and reduce-overhead, are off eager by {errors}")
        check(max(errors) < 1e-2, f"{policy} {bits} {form}: compiled is not eager")


def tiers() -> None:
    """Codes in the host's memory and in a file: the same logits. Selection: compiled as eager, one step captured."""
    shape = dict(dim=256, n_layer=5, n_head=12, n_kv_head=4, head_dim=64, hidden_dim=512, vocab_size=1000)
    prompt, new = (350, 40) if not SMALL else (130, 2)  # Triton's interpreter takes its time
    if SMALL:
        shape |= dict(n_layer=3, n_head=1, n_kv_head=1, head_dim=16)
    model, ids = random_model(torch.float32, **shape), torch.randint(0, 1000, (1, 400), device=DEVICE)

    def logits(compile: bool, **options) -> torch.Tensor:
        torch._dynamo.reset()
        model.compiled, model.run_block, model.run_head = False, llama.TransformerBlock.forward, llama.Transformer.head
        if compile:
            model.compile()
        model.setup_caches(caches.build("full", **options), 1, prompt + new)
        step = DecodeStep(model)
        with torch.no_grad():
            model.prefill(ids[:, :prompt], 0, new)
            where = [torch.tensor([[t]], device=DEVICE) for t in range(prompt, prompt + new)]
            return torch.stack([step(ids[:, int(t)][None], t)[0, 0].clone() for t in where])

    for bits in (4,) if SMALL else (16, 4):
        want = logits(False, bits=bits)
        for offload in ("cpu", "disk") if CUDA else ("disk",):
            check(torch.equal(logits(False, bits=bits, offload=offload), want), f"offload {offload} {bits} is not none")
        want = logits(False, bits=bits, select=96)
        error = furthest(logits(not SMALL, bits=bits, select=96), want)
        check(error < 1e-2, f"select {bits}: compiled is off eager by {error:.1e}")
    print("offload and selection, in 16 and 4 bits")


# ---------------------------------------------------------------------------------------------------------------------
# 3. Bytes a second


def captured_ms(f, times: int = 5) -> float:
    """Milliseconds of f, captured as a CUDA graph: the median of some replays."""
    f()
    if not CUDA:
        began = time.perf_counter()
        f()
        return (time.perf_counter() - began) * 1e3
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        f()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    graph.replay()
    ms = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        ms.append(start.elapsed_time(end))
    return sorted(ms)[len(ms) // 2]


def copy_rate() -> float:
    """Bytes a second that are read and written by a copy of a large tensor."""
    x = torch.zeros(2**20 if SMALL else 2**30, dtype=torch.uint8, device=DEVICE)
    y = torch.empty_like(x)
    return 2 * x.nbytes / captured_ms(lambda: y.copy_(x)) * 1e3


def fast() -> None:
    rate = copy_rate()
    print(f"copy: {rate / 1e9:.0f} GB/s")
    torch._dynamo.config.force_parameter_static_shapes = False
    args = SimpleNamespace(n_layer=1, n_kv_head=8, head_dim=128, max_seq_len=2**18)
    sizes = [(1, 256)] if SMALL else itertools.product((1, 8), (4096, 32768, 131072))
    forms = ["float-16", "int-4"] if SMALL else ["float-16", "int-8", "int-4", "int-2", "nvfp4-4", "fp8-8", "kivi-4"]
    for (batch, slots), form in itertools.product(sizes, forms):
        name, bits = form.split("-")
        spec = caches.build("full", bits=int(bits), format=name, residual=None if bits == "16" else 128)
        some = []  # more bytes than the GPU's own cache holds, read in turn
        while not some or (not SMALL and sum(c.nbytes() for c in some) < 4e8):
            cache = spec(args, torch.rand(64, device=DEVICE), batch, slots, torch.bfloat16, DEVICE)[0]
            cache.allocate(slots)
            cache.slot_pos.copy_(torch.arange(slots, device=DEVICE).expand_as(cache.slot_pos))
            some.append(cache)
        q, pos = torch.randn(batch, 8, 4, 128, device=DEVICE), torch.full((batch,), slots - 1, device=DEVICE)
        attend = lambda cache, q, pos: cache.attend(q, pos)[0]  # noqa: E731
        attend = torch.compile(attend, fullgraph=True, dynamic=False) if CUDA else attend
        with torch.no_grad():
            ms = captured_ms(lambda attend=attend, some=some, q=q, pos=pos: [attend(c, q, pos) for c in some]) / len(
                some
            )
        nbytes = some[0].nbytes()
        print(
            f"batch {batch} x {slots:6}  {form:8}  {nbytes / 1e6:8.1f} MB  {ms * 1e3:8.1f} us  "
            f"{nbytes / ms / 1e6:7.0f} GB/s  {nbytes / ms * 1e3 / rate:.2f} of a copy"
        )
        del some


# ---------------------------------------------------------------------------------------------------------------------
# 4. A whole model


def whole() -> None:
    few = dict(n_layer=1, n_head=4, n_kv_head=1, dim=64, hidden_dim=64, vocab_size=100)
    shape = LLAMA_3_8B | (few if SMALL else {})
    model = random_model(torch.bfloat16 if CUDA else torch.float32, **shape)
    model.compile() if CUDA else None
    weights, rate, first = model.step_bytes(), copy_rate(), None
    for tokens, policy, bits in [(128, "full", 16), (32768, "pyramid", 4), (32768, "full", 4), (32768, "full", 16)]:
        tokens = min(tokens, 300) if SMALL else tokens
        spec = caches.build(policy, bits=bits, budget=None if policy == "full" else 0.2)
        with torch.no_grad():
            model.setup_caches(spec, 1, tokens + 64)
            ids = torch.randint(0, shape["vocab_size"], (1, tokens), device=DEVICE)
            began = time.perf_counter()
            model.prefill(ids, 0, 64)
            sync()
            read = time.perf_counter() - began
            step, ms = DecodeStep(model), []
            for t in range(5 if SMALL else 40):
                began = time.perf_counter()
                step(ids[:, :1], torch.tensor([[tokens + t]], device=DEVICE))
                sync()
                ms.append((time.perf_counter() - began) * 1e3)
        took = sorted(ms[3:])[len(ms[3:]) // 2]
        first = first or took
        nbytes = weights + caches.memory([layer.attention.cache for layer in model.layers])
        print(
            f"{policy} {bits} at {tokens}: read in {read:.1f} s, step {took:.2f} ms, {took / first:.2f} x the first, "
            f"{nbytes / took / 1e6:.0f} GB/s, {nbytes / took * 1e3 / rate:.2f} of a copy"
        )


def main() -> int:
    if not CUDA and not (SMALL and kernels.INTERPRETED):
        print(
            "gpu.py: this machine has no CUDA GPU; tests/test_kernels.py is what can be tested without", file=sys.stderr
        )
        return 2
    name = torch.cuda.get_device_name() if CUDA else "interpreter"
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    print(f"{name}, torch {torch.__version__}, triton {kernels.triton.__version__}, commit {commit or 'unknown'}")
    for part in (right, compiled, tiers, fast, whole):
        began = time.perf_counter()
        print(f"\n{part.__name__}")
        try:
            torch.manual_seed(0)
            part()
        except Exception as error:  # what the other parts say is wanted all the same
            check(False, f"{part.__name__}: {type(error).__name__}: {error}")
        print(f"({time.perf_counter() - began:.0f} s)")
    print(f"\n{len(wrong)} wrong" if wrong else "\nall right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
