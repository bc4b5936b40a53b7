"""eval.py: what a cache costs and what it buys.

    python eval.py bench --cache full,pyramid --budget 0.125 --bits 16,4 --prompt-tokens 128,4096

`bench` measures speed and memory of every combination in one process, with one set of weights. Decoding is measured in
turns (A B A B ..), because a shared machine's speed drifts; compare rows of one run, never two runs. The first row, the
full cache at the shortest prompt in the model's own precision, is what the ratios refer to.
"""

import argparse
import itertools
import json
import re
import statistics
import sys
import time
from dataclasses import dataclass, field

import torch

import cache as caches
import kernels
from generate import DecodeStep, Parser, UsageError, compiler_missing, exit_code, number, pick_device
from model import Transformer, load_checkpoint


def main(argv: list[str] | None = None) -> int:
    def work() -> int:
        args = parse(argv)
        rows = bench(args)
        for line in [json.dumps(row) for row in rows] if args.json else table(rows):
            print(line)
        return 0

    return exit_code("eval.py", work)


@dataclass
class Run:
    """One cache on one prompt, between turns: the layers' caches and where the sequence stands."""

    name: str
    spec: caches.CacheSpec
    prompt: int
    layers: list = field(default_factory=list)
    step: DecodeStep | None = None
    pos: int = 0
    prefill_s: list[float] = field(default_factory=list)
    compile_s: float = 0.0
    kv_peak: int = 0
    step_ms: list[float] = field(default_factory=list)


@torch.no_grad()
def bench(args: argparse.Namespace) -> list[dict]:
    """One dict a row, as printed by --json."""
    runs = [Run(name, spec, prompt) for prompt in args.prompt_tokens for name, spec in args.specs]
    model, tokenizer = load_checkpoint(args.checkpoint, device=args.device)
    if compiler_missing(args.device):
        raise UsageError("bench measures compiled code, and there is no C++ compiler; install g++")
    model.compile()
    text = tokenizer.encode(sample_text())
    need = max(args.prompt_tokens) + args.steps * (args.rounds + 1)
    if need > model.args.max_seq_len:
        raise UsageError(f"--prompt-tokens and steps make {need} tokens; the model has {model.args.max_seq_len}")
    for turn in range(args.prefills):
        for run in runs:
            print(f"{run.name}: reading {run.prompt} tokens".ljust(60), end="\r", file=sys.stderr)
            read(model, run, (text * (run.prompt // len(text) + 1))[: run.prompt], args)
            if turn + 1 == args.prefills:
                run.step = DecodeStep(model)
                run.compile_s = sum(steps(model, run, args.steps)) / 1e3
    for turn in range(args.rounds):
        for run in runs:
            run.step_ms += steps(model, run, args.steps)
        print(f"turn {turn + 1} of {args.rounds}".ljust(60), end="\r", file=sys.stderr)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    first = statistics.median(runs[0].step_ms)
    rows, full_cache = [], {run.prompt: run for run in reversed(runs) if run.name == runs[0].name}
    for run in runs:
        nbytes, ms = sum(c.nbytes() for c in run.layers), statistics.median(run.step_ms)
        prefill, usual = (statistics.median(r.prefill_s) for r in (run, full_cache[run.prompt]))
        full = run.pos * len(run.layers) * model.args.n_kv_head * model.args.head_dim * 4
        rows.append(
            {
                "cache": run.name,
                "prompt_tokens": run.prompt,
                "slots": sum(c.slot_pos.shape[2] for c in run.layers) / len(run.layers),
                "bytes": nbytes,
                "bytes_vs_bf16": nbytes / full,
                "kv_peak_bytes": run.kv_peak,
                "prefill_tok_s": run.prompt / prefill,
                "prefill_vs_full": prefill / usual,
                "compile_s": run.compile_s,
                "decode_ms": ms,
                "decode_tok_s": 1e3 / ms,
                "decode_gb_s": (weights + nbytes) / ms / 1e6,
                "speed_vs_first": first / ms,
            }
        )
    return rows


def read(model: Transformer, run: Run, ids: list[int], args: argparse.Namespace) -> None:
    """Prefill. kv_peak: all caches' bytes plus the keys and values of the layer that is being read, at the layer where
    their sum is largest."""
    run.layers = []  # of an earlier turn
    model.setup_caches(run.spec, 1, run.prompt + args.steps * (args.rounds + 1))
    attend = kernels.causal_attention

    def spy(q, k, v):
        held = sum(layer.attention.cache.nbytes() for layer in model.layers)
        run.kv_peak = max(run.kv_peak, held + k.nbytes + v.nbytes)
        return attend(q, k, v)

    began = time.perf_counter()
    kernels.causal_attention = spy
    try:
        model.prefill(torch.tensor([ids], device=args.device))
    finally:
        kernels.causal_attention = attend
    synchronize(args.device)
    run.prefill_s.append(time.perf_counter() - began)
    run.layers, run.pos = [layer.attention.cache for layer in model.layers], run.prompt


def steps(model: Transformer, run: Run, n: int) -> list[float]:
    """n decode steps, each fed the likeliest token; milliseconds of each."""
    for layer, cache in zip(model.layers, run.layers, strict=True):
        layer.attention.cache = cache
    device = model.norm.weight.device
    tok, pos, times = torch.zeros(1, 1, dtype=torch.long, device=device), torch.tensor([[run.pos]], device=device), []
    for _ in range(n):
        began = time.perf_counter()
        tok = run.step(tok, pos)[:, -1].argmax(-1, keepdim=True)
        pos += 1
        synchronize(device)
        times.append((time.perf_counter() - began) * 1e3)
    run.pos += n
    return times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def sample_text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def table(rows: list[dict]) -> list[str]:
    lines = [
        [
            "cache",
            "prompt",
            "slots",
            "MB",
            "vs bf16",
            "prefill peak MB",
            "prefill tok/s",
            "time vs full",
            "decode ms",
            "decode tok/s",
            "GB/s",
            "vs first",
        ]
    ]
    for r in rows:
        sizes = [f"{r['slots']:,.0f}", f"{r['bytes'] / 1e6:.2f}", f"{r['bytes_vs_bf16']:.3f}"]
        speed = [f"{r['decode_ms']:.2f}", f"{r['decode_tok_s']:.1f}", f"{r['decode_gb_s']:.1f}"]
        peak, prefill = f"{r['kv_peak_bytes'] / 1e6:.1f}", f"{r['prefill_tok_s']:.0f}"
        slower = f"{r['prefill_vs_full']:.2f}"
        lines.append(
            [r["cache"], str(r["prompt_tokens"]), *sizes, peak, prefill, slower, *speed, f"{r['speed_vs_first']:.3f}"]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


def parse(argv: list[str] | None) -> argparse.Namespace:
    def listed(kind):
        return lambda text: [kind(item) for item in text.split(",")]

    p = Parser(prog="eval.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("task", choices=["bench"])
    p.add_argument("--checkpoint", default="smollm2")
    p.add_argument(
        "--cache", type=lambda text: re.split(r",(?![^,:]*=)", text), default=["pyramid"], help="policies, by commas"
    )
    p.add_argument("--budget", type=listed(number), default=[0.2], help="slots or fractions, by commas")
    p.add_argument("--bits", type=listed(int), default=[16, 4], help="16, 8, 4, 2, by commas")
    p.add_argument("--prompt-tokens", type=listed(int), default=[128, 4096], help="lengths, by commas")
    p.add_argument("--prefills", type=int, default=1, help="how often every prompt is read")
    p.add_argument("--steps", type=int, default=15, help="decode steps a turn")
    p.add_argument("--rounds", type=int, default=8, help="turns of every row")
    p.add_argument("--threads", type=int, help="CPU threads")
    p.add_argument("--device", default="auto")
    p.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    args = p.parse_args(argv)
    for name in ("prefills", "steps", "rounds", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)}: give 1 or more")
    if min(args.prompt_tokens) < 1:
        raise UsageError(f"--prompt-tokens {min(args.prompt_tokens)}: give 1 or more")
    args.device = pick_device(args.device)
    args.specs = [("full 16", caches.build("full"))]
    for name, bits in itertools.product(args.cache, args.bits):
        for budget in [None] if name == "full" else args.budget:
            label = " ".join([name, *([] if budget is None else [str(budget)]), str(bits)])
            if label != "full 16":
                args.specs.append((label, caches.build(name, budget=budget, bits=bits)))
    args.prompt_tokens.sort()
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


if __name__ == "__main__":
    sys.exit(main())
