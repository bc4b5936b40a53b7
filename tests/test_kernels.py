"""Triton's kernels without a GPU: run by the interpreter (see interpreted.py), and compiled ahead of time."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from conftest import rarely
from kernel_cases import FORMATS

import cache as caches
import kernels

HERE = Path(__file__).parent
triton = pytest.importorskip("triton", reason="Triton is not installed")

ARCHITECTURES = (80, 90, 100)
SHAPES = {
    "Llama-3-8B": (8, 4, 128),
    "SmolLM2-135M": (3, 3, 64),
    "wide": (2, 8, 256),
}  # KV heads, query heads of each, head_dim
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.uint8: "*u8", torch.bool: "*i1",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


PARTS = ["not test_decode", *(f"test_decode and {form}" for form in FORMATS)]
OFTEN = ("test_decode", "float-16", "int-4")  # the last word of a part


def version(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(".")[:2])


interpreter = pytest.mark.skipif(
    version(triton.__version__) < (3, 7) and version(numpy.__version__) >= (2, 4),
    reason="the interpreter of this Triton needs numpy below 2.4",
)


@interpreter
@pytest.mark.parametrize("part", rarely(PARTS, lambda part: part.split()[-1] in OFTEN))
def test_interpreted(part):
    """Kernels run by the interpreter agree with float64 and with the reference."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted.py"), "-k", part],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=HERE.parent,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert re.search(r"\d+ passed", ran.stdout)


def test_one_graph_on_a_gpu():
    """Every policy x format is captured whole for a GPU, as one graph that launches the kernel once."""
    ran = subprocess.run(
        [sys.executable, str(HERE / "traced.py")],
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.count("one graph, one kernel") == 8 * len(caches.POLICIES) - 1 + 3  # keydiff refuses kivi


@interpreter
def test_the_script_for_a_gpu_runs():
    """tests/gpu.py, on a few small sizes and without what only a GPU can do."""
    ran = subprocess.run(
        [sys.executable, str(HERE / "gpu.py"), "--small"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert ran.stdout.endswith("all right\n")


class Launches:
    """Stands in for a kernel, and notes what it is called with."""

    def __init__(self, kernel):
        self.kernel, self.calls = kernel, []

    def __getitem__(self, grid):
        return lambda *args, **named: self.calls.append((args, named))


def launches(monkeypatch, *names: str) -> list[Launches]:
    """From here on kernels of these names run nowhere."""
    monkeypatch.setattr(kernels, "has_kernel", lambda x: True)
    stand_ins = [Launches(getattr(kernels, name)) for name in names]
    for name, stand_in in zip(names, stand_ins, strict=True):
        monkeypatch.setattr(kernels, name, stand_in)
    return stand_ins


def compiled(kernel, args: tuple, named: dict, architecture: int, capfd, **options) -> dict:
    """What ptxas says of a kernel compiled for such a call: registers, bytes of stack, of spills, of shared memory."""
    options = {name: named[name] for name in ("num_warps", "num_stages")} | options
    given = dict(zip((p.name for p in kernel.params), args, strict=False)) | named
    signature, constants, attributes = {}, {}, {}
    for i, param in enumerate(kernel.params):
        x = given[param.name]
        if isinstance(x, torch.Tensor):
            signature[param.name] = TYPES[x.dtype]
        elif param.is_constexpr or x == 1:  # the JIT makes a constant of 1, too
            signature[param.name], constants[i,] = "constexpr", x
        else:
            signature[param.name] = "fp32" if isinstance(x, float) else "i32"
        if isinstance(x, torch.Tensor) or ((i,) not in constants and isinstance(x, int) and x % 16 == 0):
            attributes[i,] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
    capfd.readouterr()
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope():
        triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True
        binary = triton.compile(source, target=target, options=options)
    log = capfd.readouterr().out
    assert binary.asm["cubin"]
    return dict(
        registers=int(re.search(r"Used (\d+) registers", log)[1]),
        stack=int(re.search(r"(\d+) bytes stack frame", log)[1]),
        spills=sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        shared=binary.metadata.shared,
        narrow=len(re.findall(r"ld\.global\S*\.b8", binary.asm["ptx"])),
    )


def decode_launch(
    monkeypatch, form: str, shape: str, policy: str, dtype: torch.dtype = torch.bfloat16, page: int = 0
) -> tuple:
    heads, group, dim = SHAPES[shape]
    name, bits = form.split("-")
    args = SimpleNamespace(n_layer=1, n_kv_head=heads, head_dim=dim, max_seq_len=8192)
    spec = caches.build(policy, budget=1024, bits=int(bits), format=name, page_size=page)
    cache = spec(args, torch.rand(dim // 2), 1, 4096, dtype, "cpu")[0]
    cache.fit([2048], [0], 32, 4096)
    if page:
        cache.layout.pool.enlarge(1)
    (stand_in,) = launches(monkeypatch, "attend_kernel")
    cache.attend(torch.zeros(1, heads, group, dim, dtype=dtype), torch.tensor([2048]))
    return stand_in.kernel, *stand_in.calls[0]


POLICIES = ("window", "h2o", "streaming")  # neither, logits, a second query
ALL = [*itertools.product(FORMATS, SHAPES, POLICIES, ARCHITECTURES)]


def often(form: str, shape: str, policy: str, architecture: int) -> bool:
    """Every format of Llama's heads, and of few formats what else there is; other architectures once each."""
    if architecture != 90:
        return (shape, policy) == ("Llama-3-8B", "window") and form in ("float-16", "int-4")
    if form in ("float-16", "int-4", "kivi-2"):
        return policy == "window" or shape == "Llama-3-8B"
    return policy == "window" and shape == "Llama-3-8B"


@pytest.mark.parametrize("form,shape,policy,architecture", rarely(ALL, often))
def test_decode_compiles(form, shape, policy, architecture, monkeypatch, capfd):
    if shape == "wide" and (policy != "window" or form not in ("float-16", "int-4", "fp8-8")):
        pytest.skip("the widest heads take long to compile: some formats, once")
    kernel, args, named = decode_launch(monkeypatch, form, shape, policy)
    used = compiled(kernel, args, named, architecture, capfd)
    with capfd.disabled():
        print(f"\n{form} {shape} {policy} sm_{architecture}: {used}", end="")
    assert used["spills"] == used["stack"] == 0
    assert used["shared"] <= 163 * 1024  # what one program may have on sm_80


@pytest.mark.parametrize(("form", "page"), [("float-16", 16), ("int-4", 64), ("fp8-8", 16), ("kivi-4", 32)])
def test_decode_compiles_on_pages(form, page, monkeypatch, capfd):
    """A page's slots are read as wide as a dense cache's: no byte at a time, but for what kivi says of chunks."""
    seen = {}
    for size in (0, page):
        with monkeypatch.context() as patch:
            kernel, args, named = decode_launch(patch, form, "Llama-3-8B", "window", page=size)
            seen[size] = compiled(kernel, args, named, 90, capfd)
    assert seen[page]["spills"] == seen[page]["stack"] == 0
    assert seen[page]["narrow"] <= seen[0]["narrow"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["float-16", "int-4"])
def test_decode_compiles_in_float32(form, shape, monkeypatch, capfd):
    kernel, args, named = decode_launch(monkeypatch, form, shape, "h2o", torch.float32)
    used = compiled(kernel, args, named, 80, capfd)
    with capfd.disabled():
        print(f"\n{form} float32 {shape} sm_80: {used}", end="")
    assert used["shared"] <= 99 * 1024
    assert used["spills"] == used["stack"] == 0


PROMPTS = [(torch.bfloat16, 90), (torch.float32, 80), (torch.bfloat16, 80), (torch.bfloat16, 100)]


@pytest.mark.parametrize("dtype,architecture", rarely(PROMPTS, lambda *case: case in PROMPTS[:2]))
@pytest.mark.parametrize("shape", SHAPES)
def test_prompt_compiles(shape, dtype, architecture, monkeypatch, capfd):
    heads, group, dim = SHAPES[shape]
    flash, columns = launches(monkeypatch, "flash_kernel", "columns_kernel")
    q = torch.zeros(1, 512, heads * group, dim, dtype=dtype).transpose(1, 2)
    k = torch.zeros(1, heads, 512 + 64, dim, dtype=dtype)
    live = torch.zeros(1, heads, 64, dtype=torch.bool)
    kernels.column_mass(q, k, live)
    kernels.column_mass(q, k[:, :, 64:])
    kernels.attend_chunk(q, k, k, live)
    kernels.attend_chunk(q, k, k, live, q, 4)
    assert len(flash.calls) == 4
    assert len(columns.calls) == 2
    for stand_in in (flash, columns):
        for args, named in stand_in.calls:
            used = compiled(stand_in.kernel, args, named, architecture, capfd)
            with capfd.disabled():
                print(f"\n{stand_in.kernel.__name__} {dtype} {shape} sm_{architecture}: {used}", end="")
            assert used["shared"] <= 99 * 1024
            assert used["spills"] == used["stack"] == 0


def test_spills_would_be_seen(monkeypatch, capfd):
    kernel, args, named = decode_launch(monkeypatch, "int-4", "Llama-3-8B", "window")
    assert compiled(kernel, args, named, 90, capfd, maxnreg=32)["spills"] > 0
