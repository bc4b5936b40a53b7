"""eval.py: what a cache costs and what it buys.

    python eval.py ppl --cache window,snapkv --budget 1.0,0.5,0.25 --bits 16,4
    python eval.py bench --cache full,pyramid --budget 0.125 --bits 16,4 --prompt-tokens 128,4096

Every task runs a grid, cache x budget x bits, and begins with the full cache in the model's own precision.

    ppl        perplexity of text that is read through the compressed cache
    fidelity   how far the next token's distribution is from the full cache's
    needle     a number hidden in text: is it found, with the question inside the compressed prompt or after it
    ruler      tasks after RULER (2404.06654), several needles, variables, words to count: the part that is found
    bench      speed and memory

The first four compare caches of equal memory: a budget is a part of what the full cache holds at the end, and a policy
that appends what follows a prompt has that many slots less for the prompt. They note every result in --out as it comes,
and one that was interrupted goes on from there.

`bench` measures in turns (A B A B ..), because a shared machine drifts; compare rows of one run, never two runs.
The first row is what its ratios refer to.
"""

import argparse
import functools
import importlib.util
import itertools
import json
import math
import random
import re
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import cache as caches
import kernels
from generate import (
    DecodeStep,
    Parser,
    UsageError,
    check_writable,
    compiler_missing,
    exit_code,
    generate,
    number,
    pick_device,
)
from model import Tokenizer, Transformer, load_checkpoint


def main(argv: list[str] | None = None) -> int:
    def work() -> int:
        args = parse(argv)
        rows = bench(args) if args.task == "bench" else grid(args)
        lines = bench_table(rows) if args.task == "bench" else grid_table(rows)
        for line in [json.dumps(row) for row in rows] if args.json else aligned(lines):
            print(line)
        if args.plot:
            plot(rows, args.plot)
        return 0

    return exit_code("eval.py", work)


# ---------------------------------------------------------------------------------------------------------------------
# Quality


@dataclass(frozen=True)
class Arm:
    """A cache that is compared with others of the same memory."""

    cache: str
    budget: int | float | None
    bits: int

    def spec(self, prompt: int, room: int) -> caches.CacheSpec:
        """For a prompt and `room` tokens after it, which are part of the budget."""
        if self.budget is None:
            return caches.build(self.cache, bits=self.bits)
        slots = self.budget if isinstance(self.budget, int) else round(self.budget * (prompt + room))
        policy = caches.build(self.cache, budget=1.0).policy()
        left = slots - room if policy.appends else slots
        if left < policy.least():
            raise UsageError(
                f"--budget {self.budget} with {self.cache}: {slots} slots, {slots - left} of them for what follows the "
                f"prompt; give at least {policy.least() + slots - left} slots, or {room} fewer tokens to follow"
            )
        return caches.build(self.cache, budget=left, bits=self.bits)


@torch.no_grad()
def grid(args: argparse.Namespace) -> list[dict]:
    """One dict for each arm, as printed by --json: means over all samples, and their standard errors."""
    model, tokenizer = load_checkpoint(args.checkpoint, device=args.device)
    if args.compile and not compiler_missing(args.device):
        model.compile()
    task = teacher_forced if args.task in ("ppl", "fidelity") else questions
    samples, measure = task(args, model, tokenizer)
    for arm in args.arms:
        for prompt, room in {(s.prompt, s.room) for s in samples}:
            arm.spec(prompt, room)  # all that cannot be run is refused before anything is
    identity = {"task": args.task, "checkpoint": args.checkpoint, "dtype": str(model.norm.weight.dtype)[6:]}
    done, began, fresh = read_results(args.out), time.perf_counter(), 0
    results: dict[Arm, list[dict]] = {arm: [] for arm in args.arms}
    todo = [(s, arm) for s in samples for arm in args.arms]
    for i, (sample, arm) in enumerate(todo):
        key = {**identity, "cache": arm.cache, "budget": arm.budget, "bits": arm.bits, **sample.key}
        if (result := done.get(json.dumps(key, sort_keys=True))) is None:
            left = (time.perf_counter() - began) / max(fresh, 1) * (len(todo) - i)
            eta = f", about {left:.0f} s to go" if fresh else ""
            print(
                f"{i} of {len(todo)}: {arm.cache} {arm.budget or ''} {arm.bits}{eta}".ljust(70),
                end="\r",
                file=sys.stderr,
            )
            values = measure(sample, arm)
            layers, fresh = [layer.attention.cache for layer in model.layers], fresh + 1
            kept = statistics.mean(float((c.slot_pos >= 0).sum(-1).float().mean()) for c in layers)
            seen = int(max(c.slot_pos.max() for c in layers)) + 1
            result = {**values, "kept": kept, "evicted": seen - kept, "bytes": sum(c.nbytes() for c in layers)}
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "result": result}) + "\n")
        results[arm].append(result)
    rows = []
    for arm, found in results.items():
        row = {"cache": arm.cache, "budget": arm.budget, "bits": arm.bits, "samples": len(found)}
        for name in dict.fromkeys(name for r in found for name in r):
            values = [r[name] for r in found if name in r]
            row[name] = statistics.mean(values)
            if name not in ("kept", "evicted", "bytes"):
                row[name + "_error"] = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        if args.task == "ppl":  # of the mean, not the mean of perplexities; its error to first order
            row["ppl"] = math.exp(row["nll"])
            row["ppl_error"] = row["ppl"] * row["nll_error"]
        rows.append(row)
    return rows


def grid_table(rows: list[dict]) -> list[list[str]]:
    measures = [name for name in rows[0] if name + "_error" in rows[0]]
    lines = [["cache", "budget", "bits", "kept", "evicted", "MB", *measures]]
    for r in rows:
        budget = "-" if r["budget"] is None else f"{r['budget']:g}"
        evicted = f"{r['evicted']:,.0f}"
        if r["evicted"] == 0 and r["budget"] not in (None, 1):
            evicted = "NONE"  # a policy that never fired has proved nothing
        sizes = [f"{r['kept']:,.0f}", evicted, f"{r['bytes'] / 1e6:.2f}"]
        values = [f"{r[m]:.4f} ± {r[m + '_error']:.4f}" for m in measures]
        lines.append([r["cache"], budget, str(r["bits"]), *sizes, *values])
    return lines


def plot(rows: list[dict], path: Path) -> None:
    """Every measure against the memory that it took, a line for each policy and number of bits, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measures = [name for name in rows[0] if name + "_error" in rows[0]]
    figure, axes = pyplot.subplots(1, len(measures), figsize=(5 * len(measures), 4), squeeze=False)
    for axis, name in zip(axes[0], measures, strict=True):
        axis.axhline(rows[0][name], color="black", linewidth=0.8)
        for cache, bits in dict.fromkeys((r["cache"], r["bits"]) for r in rows[1:]):
            line = sorted(
                (r["bytes"] / 1e6, r[name], r[name + "_error"])
                for r in rows[1:]
                if (r["cache"], r["bits"]) == (cache, bits)
            )
            x, y, error = zip(*line, strict=True)
            axis.errorbar(x, y, error, marker="o", markersize=3, linewidth=1, label=f"{cache} {bits}")
        axis.set(xlabel="cache, MB", ylabel=name)
    axes[0][-1].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def read_results(path: Path | None) -> dict[str, dict]:
    """What an earlier run noted. A last line that was cut off when it was killed is taken away."""
    if path is None or not path.exists():
        return {}
    done, whole = {}, 0  # bytes of whole lines
    for i, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True), 1):
        if not line.endswith("\n") and '{"key": '.startswith(line[:8]):
            with path.open("r+b") as file:
                file.truncate(whole)
            break
        try:
            record = json.loads(line)
            done[json.dumps(record["key"], sort_keys=True)] = record["result"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(
                f"--out {path}: line {i} is not a result; give a file of an earlier run, or a new one"
            ) from None
        whole += len(line.encode())
    return done


@dataclass
class Sample:
    """Tokens to read: a prompt and, after it, `room` more. key: what makes it this sample and no other."""

    ids: list[int]
    prompt: int
    room: int
    key: dict
    split: int = 0
    answers: list[str] = field(default_factory=list)


def teacher_forced(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer):
    """Windows of text: --context tokens are compressed, the next --score are read through the cache one by one."""
    text = "\n\n".join(read_text(path) for path in args.text) if args.text else sample_text()
    ids, size = tokenizer.encode(text), args.context + args.score + 1
    if len(ids) < size:
        raise UsageError(f"--text has {len(ids)} tokens; --context {args.context} and --score {args.score} need {size}")
    if size > model.args.max_seq_len:
        raise UsageError(f"--context and --score make {size} tokens; the model has {model.args.max_seq_len} positions")
    windows = min(args.windows, len(ids) // size)
    source = ", ".join(map(str, args.text)) or f"pydoc_data.topics of Python {sys.version.split()[0]}"
    start = tokenizer.encode("")[:1]
    bos = "a BOS before each" if start else "no BOS"
    print(
        f"{source}: {windows} windows of {args.context} + {args.score} tokens, {size} apart, {bos}; "
        f"{windows * args.score} tokens scored",
        file=sys.stderr,
    )
    samples = []
    for i in range(windows):
        part = ids[i * size : (i + 1) * size]
        part = part if part[: len(start)] == start else [*start, *part[: size - len(start)]]
        samples.append(
            Sample(
                part,
                args.context,
                args.score,
                {"text": source, "context": args.context, "score": args.score, "window": i},
            )
        )
    reference: dict[int, Tensor] = {}

    def measure(sample: Sample, arm: Arm) -> dict:
        logits = through(model, arm.spec(sample.prompt, sample.room), sample.ids, sample.prompt)
        target = torch.tensor(sample.ids[sample.prompt + 1 :], device=logits.device)
        if args.task == "ppl":
            return {"nll": F.cross_entropy(logits, target).item()}
        if id(sample) not in reference:
            reference.clear()  # one window's is enough memory
            full = logits if arm == args.arms[0] else through(model, args.arms[0].spec(0, 0), sample.ids, sample.prompt)
            reference[id(sample)] = full
        full = reference[id(sample)]
        p, q = full.log_softmax(-1), logits.log_softmax(-1)
        return {
            "kl": (p.exp() * (p - q)).sum(-1).mean().item(),
            "top1": (full.argmax(-1) == logits.argmax(-1)).float().mean().item(),
            "gap": (full - logits).abs().max().item(),
        }

    return samples, measure


def through(model: Transformer, spec: caches.CacheSpec, ids: list[int], prompt: int) -> Tensor:
    """Logits [n,V], float32, after each token that follows the prompt, but the last: all read the compressed cache."""
    device = model.norm.weight.device
    model.setup_caches(spec, 1, len(ids))
    tokens = torch.tensor([ids], device=device)
    model.prefill(tokens[:, :prompt])
    step, pos, logits = DecodeStep(model), torch.full((1, 1), prompt, device=device), []
    for t in range(prompt, len(ids) - 1):
        logits.append(step(tokens[:, t : t + 1], pos)[0, 0].float().clone())
        pos += 1
    return torch.stack(logits)


def questions(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer):
    """A text and a question about it, which is part of the compressed prompt (inside), or read after it (after)."""
    if tokenizer.has_chat_template:
        ask = lambda text: tokenizer.chat([{"role": "user", "content": text}])  # noqa: E731
    else:
        ask = lambda text: tokenizer.encode(text + "\nAnswer:")  # noqa: E731
    filler, samples = tokenizer.encode(sample_text()), []
    places = args.depth if args.task == "needle" else list(RULER)
    for length, place, i in itertools.product(args.length, places, range(args.samples)):
        draw = random.Random(f"{args.seed} {length} {place} {i}")
        first = draw.randrange(max(len(filler) - length, 1))
        lines = tokenizer.decode(filler[first : first + length]).split("\n")
        if args.task == "needle":
            context, question, answers = needle(draw, lines, place)
        else:
            context, question, answers = RULER[place](draw, lines, length)
        ids, alone = ask(context + question), ask(context)
        split = next((j for j, (a, b) in enumerate(zip(ids, alone, strict=False)) if a != b), len(alone))
        if len(ids) + args.answer > model.args.max_seq_len:
            raise UsageError(
                f"--length {length}: makes {len(ids)} tokens and --answer {args.answer} more; "
                f"the model has {model.args.max_seq_len} positions"
            )
        for protocol in args.protocol:
            inside = protocol == "inside"
            key = {"length": length, "place": place, "protocol": protocol, "sample": i, "seed": args.seed}
            key["answer"] = args.answer
            room = args.answer + (0 if inside else len(ids) - split)
            samples.append(Sample(ids, len(ids) if inside else split, room, key, 0 if inside else split, answers))

    def measure(sample: Sample, arm: Arm) -> dict:
        model.setup_caches(arm.spec(sample.prompt, sample.room), 1, len(sample.ids) + args.answer)
        if sample.split:
            model.prefill(torch.tensor([sample.ids[: sample.split]], device=model.norm.weight.device), 0, sample.room)
        rest = sample.ids[sample.split :]
        text = tokenizer.decode(
            list(generate(model, rest, args.answer, start=sample.split, stop_ids=tokenizer.eos_ids))
        )
        if args.task == "needle":
            return {sample.key["protocol"]: float(re.findall(r"\d+", text)[:1] == sample.answers)}
        recall = sum(a.lower() in text.lower() for a in sample.answers) / len(sample.answers)
        return {f"{sample.key['place']} {sample.key['protocol']}": recall}

    return samples, measure


def needle(draw: random.Random, lines: list[str], depth: float) -> tuple[str, str, list[str]]:
    """A pass key of five digits at `depth` of the text: 0 is its beginning, 1 its end."""
    key = str(draw.randint(10000, 99999))
    lines.insert(round(depth * len(lines)), f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n")
    context = "There is a pass key hidden in the following text. Find it and remember it.\n\n" + "\n".join(lines)
    return context, "\n\nWhat is the pass key? Answer with the number alone.", [key]


def lockers(draw: random.Random, lines: list[str], others: int, values: int, asked: int) -> tuple[str, str, list[str]]:
    """RULER's needles (2404.06654): `asked` keys with `values` numbers each, among `others` that nobody asks for."""
    names = draw.sample(words(), asked + others)
    codes = {name: [str(draw.randint(100000, 999999)) for _ in range(values)] for name in names}
    for name, numbers in codes.items():
        for code in numbers:
            lines.insert(draw.randrange(len(lines) + 1), f"The locker named {name} opens with {code}.")
    context = "Some lines of the following text say which numbers open a locker. Remember them.\n\n" + "\n".join(lines)
    wanted = " and ".join(names[:asked])
    question = f"\n\nWhich numbers open the locker named {wanted}? Write down all of them."
    return context, question, [code for name in names[:asked] for code in codes[name]]


def variables(draw: random.Random, lines: list[str], length: int) -> tuple[str, str, list[str]]:
    """RULER's variable tracking: a chain of five names for one value, and another chain that leads elsewhere."""
    names = draw.sample([f"{a}{b}{c}" for a, b, c in itertools.product("BCDFGHJK", "AEIOU", "LMNPRSTV")], 10)
    value, other = draw.sample(range(10000, 99999), 2)
    chains = [
        [f"Let {n} be {p}." for p, n in itertools.pairwise([v, *c])]
        for v, c in ((value, names[:5]), (other, names[5:]))
    ]
    places = [sorted(draw.sample(range(len(lines) + 1), min(5, len(lines) + 1))) for _ in chains]
    inserts = [
        (p, text) for chain, spots in zip(chains, places, strict=True) for p, text in zip(spots, chain, strict=False)
    ]
    for p, text in sorted(inserts, key=lambda x: -x[0]):  # from the end: earlier places stay where they are
        lines.insert(p, text)
    context = "Some lines of the following text give values to variables. Keep track of them.\n\n" + "\n".join(lines)
    return context, f"\n\nWhich five variables have the value {value}? Write down their names.", names[:5]


def common_words(draw: random.Random, lines: list[str], length: int, top: int = 10) -> tuple[str, str, list[str]]:
    """RULER's common words: ten words come ten times as often as the others of a list."""
    size = max(length // 5, 2 * top)
    often = max(size // 2 // top, 2)
    chosen = draw.sample(words(), top + min(size // max(often // 10, 1), len(words()) - top))
    rare = itertools.islice(itertools.cycle(chosen[top:]), size - often * top)
    listed = [w for w in chosen[:top] for _ in range(often)] + list(rare)
    draw.shuffle(listed)
    context = "Here is a list of words.\n\n" + " ".join(f"{i}. {w}" for i, w in enumerate(listed, 1))
    return context, f"\n\nWhich {top} words come most often in the list?", chosen[:top]


def frequent_words(draw: random.Random, lines: list[str], length: int) -> tuple[str, str, list[str]]:
    """RULER's frequent words: made-up words, the n-th as often as 1 / n^2 says; the first three are asked for."""
    coined = ["".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(6)) for _ in range(60)]
    weights = [1 / (n + 1) ** 2 for n in range(60)]
    listed = draw.choices(coined, weights, k=max(length // 4, 20))
    ranked = sorted(set(listed), key=lambda w: -listed.count(w))
    return (
        "Here is a text in an unknown language.\n\n" + " ".join(listed),
        "\n\nWhich three words come most often in it?",
        ranked[:3],
    )


@functools.cache
def words() -> list[str]:
    return sorted(set(re.findall(r"\b[a-z]{5,9}\b", sample_text())))


RULER = {
    "single": lambda draw, lines, length: lockers(draw, lines, 0, 1, 1),
    "multikey": lambda draw, lines, length: lockers(draw, lines, 4, 1, 1),
    "multivalue": lambda draw, lines, length: lockers(draw, lines, 0, 4, 1),
    "multiquery": lambda draw, lines, length: lockers(draw, lines, 0, 1, 4),
    "variables": variables,
    "common": common_words,
    "frequent": frequent_words,
}


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--text {path}: not UTF-8 (byte {error.start}); convert it first") from None


# ---------------------------------------------------------------------------------------------------------------------
# Speed and memory


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


def bench_table(rows: list[dict]) -> list[list[str]]:
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
    return lines


def aligned(lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


def cache_names(text: str) -> list[str]:
    """Policies by commas; a comma between two arguments of one, as in h2o:recent=9,sink=2, is not one of those."""
    return re.split(r",(?![^,:]*=)", text)


def parse(argv: list[str] | None) -> argparse.Namespace:
    def listed(kind):
        return lambda text: [kind(item) for item in text.split(",")]

    p = Parser(prog="eval.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("task", choices=["ppl", "fidelity", "needle", "ruler", "bench"])
    p.add_argument("--checkpoint", default="smollm2")
    p.add_argument("--cache", type=cache_names, default=["pyramid"], help="policies, by commas")
    p.add_argument("--budget", type=listed(number), help="slots or fractions, by commas: 1.0,0.5,0.25; for bench 0.2")
    p.add_argument("--bits", type=listed(int), default=[16, 4], help="16, 8, 4, 2, by commas")
    p.add_argument("--threads", type=int, help="CPU threads")
    p.add_argument("--device", default="auto")
    p.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    g = p.add_argument_group("ppl, fidelity, needle, ruler")
    g.add_argument("--out", type=Path, help="JSONL to which every result is added; what is there is not done again")
    g.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the table (needs matplotlib)")
    g.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    g = p.add_argument_group("ppl, fidelity")
    g.add_argument("--text", type=Path, nargs="+", default=[], metavar="FILE", help="instead of Python's manual")
    g.add_argument("--context", type=int, default=3500, help="tokens that are compressed")
    g.add_argument("--score", type=int, default=128, help="tokens that are then read one by one")
    g.add_argument("--windows", type=int, default=4, help="pieces of text, one after the other")
    g = p.add_argument_group("needle, ruler")
    g.add_argument("--length", type=listed(int), default=[1000, 3500], help="tokens of text, by commas")
    g.add_argument("--protocol", type=listed(str), default=["inside", "after"], help="where the question stands")
    g.add_argument("--samples", type=int, default=2, help="for each length and depth, or task of ruler")
    g.add_argument("--answer", type=int, help="tokens of an answer: 16, for ruler 48")
    g.add_argument("--seed", type=int, default=0)
    g = p.add_argument_group("needle")
    g.add_argument("--depth", type=listed(float), default=[0.1, 0.5, 0.9], help="where, 0 to 1, by commas")
    g = p.add_argument_group("bench")
    g.add_argument("--prompt-tokens", type=listed(int), default=[128, 4096], help="lengths, by commas")
    g.add_argument("--prefills", type=int, default=1, help="how often every prompt is read")
    g.add_argument("--steps", type=int, default=15, help="decode steps a turn")
    g.add_argument("--rounds", type=int, default=8, help="turns of every row")
    args = p.parse_args(argv)
    for group in p._action_groups[2:]:  # none is silently ignored
        for action in group._group_actions:
            if args.task not in group.title.split(", ") and getattr(args, action.dest) != action.default:
                raise UsageError(f"{action.option_strings[0]}: only for {group.title}, not for {args.task}")
    for name in ("prefills", "steps", "rounds", "threads", "context", "score", "windows", "samples", "answer"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)}: give 1 or more")
    for flag, least in {"--prompt-tokens": min(args.prompt_tokens), "--length": min(args.length)}.items():
        if least < 1:
            raise UsageError(f"{flag} {least}: give 1 or more")
    for depth in args.depth:
        if not 0 <= depth <= 1:
            raise UsageError(f"--depth {depth}: give numbers from 0, the beginning, to 1, the end")
    for protocol in args.protocol:
        if protocol not in ("inside", "after"):
            raise UsageError(f"--protocol {protocol}: choose inside, after or both by a comma")
    if args.out:
        check_writable(args.out, "--out")
    if args.plot:
        check_writable(args.plot, "--plot")
        if args.plot.suffix not in (".png", ".svg", ".pdf"):
            raise UsageError(f"--plot {args.plot}: give a name that ends in .png, .svg or .pdf")
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError(f"--plot {args.plot}: matplotlib is not installed; pip install matplotlib, or drop --plot")
    if args.answer is None:
        args.answer = 16 if args.task == "needle" else 48
    if args.budget is None:
        args.budget = [0.2] if args.task == "bench" else [1.0, 0.5, 0.25]
    args.device = pick_device(args.device)
    args.specs, args.arms = [("full 16", caches.build("full"))], [Arm("full", None, 16)]
    for name, bits in itertools.product(args.cache, args.bits):
        for budget in [None] if name == "full" else args.budget:
            if (arm := Arm(name, budget, bits)) not in args.arms:
                args.arms.append(arm)
            label = " ".join([name, *([] if budget is None else [str(budget)]), str(bits)])
            if label != "full 16":
                args.specs.append((label, caches.build(name, budget=budget, bits=bits)))
    args.prompt_tokens.sort()
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


if __name__ == "__main__":
    sys.exit(main())
