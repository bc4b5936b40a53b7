"""Greedy tokens and kept positions, every policy, every format, in as many processes as there are: test_ranks.py.

python tests/ranks.py CHECKPOINT OUT; or torchrun --nproc-per-node 3 tests/ranks.py CHECKPOINT OUT; the first process
writes what it found to OUT. COMPILED=1 in the environment compiles the step; PRODUCT=1 takes each policy with every
format, not with one.
"""

import itertools
import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import kernels
from cache import FORMATS, POLICIES, CacheSpec, build
from generate import Engine, Params, generate
from model import load_checkpoint

NEW = 4


def recipe(i: int, name: str, form: str, bits: int) -> CacheSpec | None:
    """One of a list, every second of them in pages; None for the one policy that does not go with the one format."""
    if (name, form) == ("keydiff", "kivi"):
        return None
    budget = 128 if form == "kivi" else 96  # of whole units, beside those of the newest tokens
    residual = None if bits == 16 else 16
    return build(
        name,
        budget=None if name == "full" else budget,
        format=form,
        bits=bits,
        page_size=32 * (i % 2),
        residual=residual,
    )


def main(checkpoint: str, out: str) -> None:
    torch.set_num_threads(1)
    kernels.join_ranks(torch.device("cpu"))
    model, tokenizer = load_checkpoint(checkpoint, dtype=torch.float32)
    text = "The lighthouse keeper wrote every storm into a ledger, and the ledger grew heavier than the lamp. " * 8
    ids, found = tokenizer.encode(text + "In the end the keeper")[:140], {}
    forms = [(name, bits) for name, store in FORMATS.items() for bits in store.widths]
    if os.environ.get("COMPILED"):
        model.compile()
        specs = {"tova": build("tova", budget=96, bits=4)}  # its heads ask each other in every step
    else:
        pairs = zip(POLICIES, itertools.cycle(forms), strict=False)
        if os.environ.get("PRODUCT"):
            pairs = itertools.product(POLICIES, forms)
        specs = {f"{name} {form} {bits}": recipe(i, name, form, bits) for i, (name, (form, bits)) in enumerate(pairs)}
        specs = {name: spec for name, spec in specs.items() if spec is not None}
        specs |= {name: build(name, budget=96) for name in ("snapkv", "adakv")}
        specs["select"] = build("full", select=96, offload="disk")
    for name, spec in specs.items():
        model.setup_caches(spec, 1, len(ids) + NEW)
        tokens = [*generate(model, ids, NEW)]
        held = [layer.attention.cache.slot_pos for layer in model.layers]
        kept, positions = sum((p >= 0).sum() for p in held), sum(p.clamp(min=0).sum() for p in held)
        found[name] = tokens, int(kernels.all_sum(kept.float())), int(kernels.all_sum(positions.float()))
    if not os.environ.get("COMPILED"):
        engine = Engine(model, build("snapkv", budget=80), 2, len(ids) + NEW)
        found["engine"] = engine.generate([ids[:100], ids[20:], ids[:60]], Params(NEW)), engine.preempted
    if kernels.RANK == 0:
        Path(out).write_text(json.dumps(found))
    kernels.leave_ranks(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
