"""Triton's kernels against float64, run on a CPU by Triton's interpreter; `test_kernels.py` starts this in a process
of its own, because there is no compiling once it runs. bf16 is only tested on a GPU: the interpreter is wrong there."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from conftest import garbage
from kernel_cases import FORMATS, by_reference, close, filled, on_pages, oracle

import cache as caches
import kernels

assert kernels.INTERPRETED, "start this with TRITON_INTERPRET=1"

# Errors allowed, of the largest number that comes out. In fp16 the interpreter rounds code * scale before it adds zero,
# which a GPU does at once: numbers of 6 steps of 2^-10 for a key of 1.
DTYPES = {"float32": 2e-6, "float16": 4e-3}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(kernels, "PROGRAMS", 6)  # each costs milliseconds
    torch.manual_seed(0)


@pytest.mark.parametrize("dim", [20, 64, 128])
@pytest.mark.parametrize("form", FORMATS)
def test_decode(form, dim):
    """Every format x residual or none x mass or none x G x float32 and float16 x dense and paged."""
    seen = 0
    for dtype, residual, mass in itertools.product(DTYPES, (0, 16), (False, True)):
        if (residual and form == "float-16") or (form == "mxfp4-4" and dtype == "float16"):
            continue  # no residual at 16 bits; powers of two are computed with in bf16
        for batch, heads, groups in ((1, 2, (1, 3)), (2, 1, (4, 8))):
            policy = "tova" if mass else "random"  # random evicts the newest, too: rows of the ring without a slot
            cache = filled(form, dim, getattr(torch, dtype), residual, policy, batch, heads)
            pos = torch.full((batch,), 111)
            for group in groups:
                q = torch.randn(batch, heads, group, dim).to(getattr(torch, dtype))
                want_y, want_mass = oracle(cache, q, pos)
                y, got_mass = cache.attend(q, pos)
                close(y, want_y, DTYPES[dtype])
                assert (got_mass is not None) == mass
                if mass:
                    close(got_mass, want_mass, DTYPES[dtype])
                close(y, by_reference(cache.attend, q, pos)[0].double(), DTYPES[dtype])
                seen += 1
            paged_y, paged_mass = on_pages(cache, q, pos)
            assert torch.equal(paged_y, y)
            assert not mass or torch.equal(paged_mass, got_mass)
    assert seen >= (8 if form == "float-16" else 16)


@pytest.mark.parametrize("programs", [4, 8])
@pytest.mark.parametrize("form", ["float-16", "int-4", "kivi-2"])
def test_many_blocks(form, programs, monkeypatch):
    """One or two programs for all of 300 slots, a ring of 132 rows, prompts of two lengths, pages of several chunks."""
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    name, bits = form.split("-")
    spec = caches.build("full", bits=int(bits), format=name, residual=None if bits == "16" else 128)
    args = SimpleNamespace(n_layer=1, n_kv_head=2, head_dim=64, max_seq_len=512)
    cache = spec(args, torch.rand(32), 2, 400, torch.float32, "cpu")[0]
    lengths = [301, 190]
    cache.fit(lengths, [0, 0], 10, 400)
    for b, n in enumerate(lengths):
        k, v = torch.randn(2, 1, 2, n, 64)
        by_reference(cache.lane(b), k, k, v, torch.arange(n)[None])
    k, v = torch.randn(2, 2, 2, 1, 64)
    pos = torch.tensor(lengths)
    by_reference(cache, k, k, v, pos[:, None])
    q = torch.randn(2, 2, 3, 64)
    want = oracle(cache, q, pos)[0]
    y, _ = cache.attend(q, pos)
    close(y, want, 2e-6)
    assert torch.equal(cache.attend(q, torch.stack([pos, pos], 1)[:, 0])[0], y)  # strided, as a caller may have it
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(cache.attend(strided, pos)[0], y)
    assert torch.equal(on_pages(cache, q, pos)[0], y)


@pytest.mark.parametrize("page", [1, 3, 16, 96])
@pytest.mark.parametrize("form", ["float-16", "int-4", "nvfp4-4"])
def test_pages_of_any_size(form, page):
    """What the kernel reads through the table of a real pool, with pages that are no whole chunk, too."""
    torch.manual_seed(0)
    y = {}
    q = torch.randn(2, 2, 3, 64)
    for size in (0, page):
        torch.manual_seed(1)
        cache = filled(form, 64, torch.float32, 8, "h2o", 2, 2, page=size)
        y[size] = cache.attend(q, torch.full((2,), 111))
    assert torch.equal(y[page][0], y[0][0])
    assert torch.equal(y[page][1], y[0][1])


def test_a_format_that_no_kernel_knows():
    """A subclass that means other numbers by the same codes is read by plain PyTorch, not as what it derives from."""

    class Shifted(caches.IntStore):
        def number(self, code):
            return code.float() + 1

    cache = filled("int-4", 64, torch.float32, 16, "random", 1, 2)
    cache.k_store.__class__ = Shifted
    q, pos = torch.randn(1, 2, 3, 64), torch.tensor([111])
    close(cache.attend(q, pos)[0], oracle(cache, q, pos)[0], 2e-6)


@pytest.mark.parametrize("form", ["float-16", "int-4"])
def test_sinks_are_asked_by_a_query_of_their_own(form):
    cache = filled(form, 64, torch.float32, 16, "streaming", 1, 2)
    q, pos = torch.randn(1, 2, 3, 64), torch.tensor([111])
    close(cache.attend(q, pos)[0], by_reference(cache.attend, q, pos)[0], 2e-6)


@pytest.mark.parametrize("rows", [15, 70])
def test_many_queries(rows):
    """A chunk of tokens is R = G x T rows, more than fit one program."""
    cache = filled("int-4", 64, torch.float32, 0, "random", 1, 2)
    q, pos = torch.randn(1, 2, rows, 64), torch.tensor([111])
    close(cache.attend(q, pos)[0], oracle(cache, q, pos)[0], 2e-6)


def test_nothing_to_read():
    """A row without a live slot is 0, not NaN; so is one of which only the ring is left."""
    cache = filled("int-4", 64, torch.float32, 16, "tova", 1, 2)
    cache.slot_pos.fill_(-1)
    q, pos = torch.randn(1, 2, 3, 64), torch.tensor([111])
    y, mass = cache.attend(q, pos)
    close(y, by_reference(cache.attend, q, pos)[0], 2e-6)
    assert not mass.any()
    cache.residual.slot.fill_(-1)
    y, mass = cache.attend(q, pos)
    assert not y.any()
    assert not mass.any()


@pytest.mark.parametrize("form", ["float-16", "int-4", "fp8-8", "nvfp4-4"])
def test_garbage_in_empty_slots(form):
    """NaN, or all bits set, where no token is: nobody looks there."""
    cache = filled(form, 64, torch.float32, 0, "random", 1, 2)
    cache.slot_pos[:, :, 5::7] = -1
    q, pos = torch.randn(1, 2, 3, 64), torch.tensor([111])
    y = cache.attend(q, pos)[0]
    assert garbage([cache])
    assert torch.equal(cache.attend(q, pos)[0], y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "heads", "group", "new", "old", "dim"),
    [
        (1, 2, 3, 100, 0, 20),
        (2, 1, 3, 70, 50, 64),
        (1, 1, 4, 130, 90, 128),
        (1, 2, 1, 5, 200, 80),
        (1, 1, 8, 1, 30, 96),
    ],
)
def test_chunks(dtype, batch, heads, group, new, old, dim):
    """column_mass, window_mass, attend_chunk of tokens strided as the model's are, on a cache or alone."""
    q, k, v = (torch.randn(batch, n, h, dim).transpose(1, 2).to(getattr(torch, dtype))
               for n, h in ((new, heads * group), (old + new, heads), (old + new, heads)))  # fmt: skip
    live = torch.rand(batch, heads, old) > 0.3 if old else None
    near = torch.randn(batch, heads * group, new, dim).to(q.dtype)
    mass = kernels.column_mass(q, k, live)
    close(mass, by_reference(kernels.column_mass, q, k, live), 2e-6)
    assert abs(mass.sum() / (batch * heads * group * new) - 1) < 1e-5
    assert torch.equal(mass, kernels.column_mass(q, k, live))  # deterministic
    window = min(new, 9)
    close(kernels.window_mass(q, k, window, live), by_reference(kernels.window_mass, q, k, window, live), 2e-6)
    if old:
        for extra in ((), (near, 4)):
            want = by_reference(kernels.attend_chunk, q, k, v, live, *extra)
            close(kernels.attend_chunk(q, k, v, live, *extra).float(), want.float(), DTYPES[dtype])
