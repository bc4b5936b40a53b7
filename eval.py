"""eval.py: what a cache costs and what it buys.

    python eval.py ppl --cache window,snapkv --budget 1.0,0.5,0.25 --bits 16,4
    python eval.py bench --cache full,pyramid --budget 0.125 --bits 16,4 --prompt-tokens 128,4096

Every task runs a grid, cache x budget x bits, next to the full cache in the model's own precision.

    ppl        perplexity of text that is read through the compressed cache
    fidelity   how far the next token's distribution is from the full cache's
    needle     a number hidden in text: is it found, with the question inside the compressed prompt or after it
    ruler      tasks after RULER (2404.06654), several needles, variables, words to count: the part that is found
    longbench  LongBench (2308.14508), sixteen tasks in English, with its metrics, 0 to 100
    table      all of those but the last, and the speed of decoding, on one page
    health     what monitoring wants to know of each layer: attention kept, sinks, gaps, errors of quantization
    map        which positions each layer kept of one prompt, as text or picture
    bench      speed and memory of a step
    profile    where the time of a step goes
    serve      many requests: lanes together and alone, requests of all lengths, prompts that begin alike
    plan       what a model that nobody has loaded would take on so many GPUs, computed from its shape

All but the last four compare caches that hold the same number of tokens: a budget is a part of what the full cache
holds at the end, and a policy that appends what follows a prompt has that many slots less for the prompt. A prompt is
read once for many caches, because they differ only in what they keep. The first six note results in --out as they come,
and a run that was interrupted goes on from there. Behind a mean, ± is the standard error of its difference to the full
cache's on the same samples.

Speed is measured in turns (A B A B ..), because a shared machine drifts; compare rows of one run, never two runs.
The first row is what ratios refer to.
"""

import argparse
import difflib
import functools
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import re
import signal
import statistics
import string
import subprocess
import sys
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # while Python imports, an interrupt is no error with a traceback
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cache as caches
import kernels
from generate import (
    DecodeStep,
    Engine,
    Health,
    Params,
    Parser,
    UsageError,
    check_writable,
    compiler_missing,
    decode,
    exit_code,
    generate,
    number,
    pick_device,
)
from model import WEIGHTS, ModelArgs, Tokenizer, Transformer, load_checkpoint


def main(argv: list[str] | None = None) -> int:
    def work() -> int:
        args = parse(argv)
        run, lines, draw = TASKS[args.task]
        dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
        if args.task == "plan":
            rows = plan(args, dtype or torch.bfloat16)
            print(*([json.dumps(row) for row in rows] if args.json else lines(rows)), sep="\n")
            return 0
        model, tokenizer = load_checkpoint(args.checkpoint, device=args.device, dtype=dtype)
        if args.weights == "int8":
            model.to_int8()
        if args.compile and not compiler_missing(args.device):
            model.compile()
        rows = run(args, model, tokenizer)
        for line in [json.dumps(row) for row in rows] if args.json else lines(rows):
            print(line)
        if args.plot:
            draw(rows, args.plot)
        return 0

    return exit_code("eval.py", work)


# ---------------------------------------------------------------------------------------------------------------------
# Quality


@dataclass(frozen=True)
class Arm:
    """A cache that is compared with others of the same memory."""

    cache: str
    budget: int | float | None
    bits: int | str
    format: str = "auto"
    page: int = 0
    select: int | float | None = None
    offload: str = "none"

    def __str__(self) -> str:
        pages = f", pages of {self.page}" if self.page else ""
        away = f", offload {self.offload}" if self.offload != "none" else ""
        return " ".join(part for part in named(self.key()) if part != "-") + pages + away

    def key(self) -> dict:
        usual = Arm(self.cache, self.budget, self.bits)
        more = ("format", "page", "select", "offload")
        more = {name: value for name in more if (value := getattr(self, name)) != getattr(usual, name)}
        return {"cache": self.cache, "budget": self.budget, "bits": self.bits, **more}

    def build(self, budget: int | float | None) -> caches.CacheSpec:
        options = dict(page_size=self.page, select=self.select, offload=self.offload)
        return caches.build(self.cache, budget=budget, bits=self.bits, format=self.format, **options)

    def relative(self) -> caches.CacheSpec:
        """With a budget for the prompt alone, as in generate.py: what follows comes on top where a policy appends."""
        return self.build(self.budget)

    def spec(self, prompt: int, room: int) -> caches.CacheSpec:
        """For a prompt and `room` tokens after it, which are part of the budget."""
        if self.budget is None:
            return self.relative()
        slots = self.budget if isinstance(self.budget, int) else round(self.budget * (prompt + room))
        policy = self.build(1.0).policy()
        left = slots - room if policy.appends else slots
        if left < policy.least():
            least = policy.least() + slots - left
            held = f", {room} of them for what follows the prompt" if policy.appends else ""
            raise UsageError(
                f"--budget {self.budget} with {self.cache}: {slots} slots{held}; give at least {least}"
                + (", or fewer tokens to follow (--score, --answer)" if policy.appends else "")
            )
        return self.build(left)


class Together(nn.Module):
    """One layer's caches of many arms. They read a prompt together, since all of them attend to the whole of it."""

    def __init__(self, members: list[caches.KVCache]):
        super().__init__()
        self.members = members

    def fit(self, *sizes) -> list[int]:
        return [min(n) for n in zip(*(cache.fit(*sizes) for cache in self.members), strict=True)]

    def enter(self) -> None:
        for cache in self.members:
            cache.enter()

    def leave(self, step: bool) -> None:
        for cache in self.members:
            cache.leave(step)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        for cache in self.members:
            cache.store(q, k, v, pos)
        return kernels.causal_attention(q, k, v)


def read_together(model: Transformer, ids: list[int], room: int, specs: list[caches.CacheSpec]) -> tuple[list, Tensor]:
    """Read a prompt, with `room` tokens to follow -> every spec's caches, one a layer, and the last logits [1,V]."""
    arms = []
    for spec in specs:
        model.setup_caches(spec, 1, len(ids) + room)
        arms.append([layer.attention.cache for layer in model.layers])
    install(model, [Together(layer) for layer in zip(*arms, strict=True)])
    return arms, model.prefill(torch.tensor([ids], device=model.norm.weight.device), 0, room)


def install(model: Transformer, layers: list) -> None:
    for layer, cache in zip(model.layers, layers, strict=True):
        layer.attention.cache = cache


@torch.no_grad()
def grid(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer, task: str = "") -> list[dict]:
    """One dict for each arm, as printed by --json: means over all samples, and their standard errors."""
    task = task or args.task
    samples, measure = prepared(args, model, tokenizer, task)
    log = Log(args, model, task, len(samples) * len(args.arms))
    found: dict[Arm, list[tuple[str, dict]]] = {arm: [] for arm in args.arms}
    for sample in samples:
        todo = [arm for arm in args.arms if log.find(arm, sample.key) is None]
        for some in batched(todo, args.together):
            log.show(f"{task}: {len(some)} caches read {sample.prompt} tokens")
            specs = [arm.spec(sample.prompt, sample.room) for arm in some]
            every, logits = read_together(model, sample.ids[: sample.prompt], sample.room, specs)
            for arm, layers in zip(some, every, strict=True):
                log.show(f"{task}: {arm}")
                install(model, layers)
                log.add(arm, sample.key, {**measure(sample, arm, logits), **holding(layers)})
        for arm in args.arms:
            found[arm].append((sample.place, log.find(arm, sample.key)))
    log.close()
    rows, full = [], [r for _, r in found[args.arms[0]]]
    for arm, results in found.items():
        row = {"task": task, **arm.key(), "samples": len(results), "places": {}}
        for name in dict.fromkeys(name for _, r in results for name in r):
            values = {place: [r[name] for p, r in results if p == place and name in r] for place, _ in results}
            means = {place: statistics.mean(v) for place, v in values.items() if v}
            row[name] = statistics.mean(means.values())
            if name not in ("kept", "evicted", "bytes"):
                apart = [r[name] - f[name] for (_, r), f in zip(results, full, strict=True) if name in r]
                row[name + "_error"] = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else None
                if list(means) != [""]:
                    row["places"] |= {f"{place} {name}": mean for place, mean in means.items()}
        if "nll" in row:  # perplexity of the mean, not the mean of perplexities; its error to first order
            row["ppl"] = math.exp(row["nll"])
            row["ppl_error"] = row["nll_error"] and row["ppl"] * row["nll_error"]
        rows.append(row)
    return rows


def prepared(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer, task: str) -> tuple[list, Callable]:
    """Samples of a task, and what measures one: all that cannot be run is refused here, before anything is."""
    samples, measure = (teacher_forced if task in ("ppl", "fidelity") else questions)(args, model, tokenizer, task)
    for sample in samples:
        sample.key["ids"] = f"{zlib.crc32(torch.tensor(sample.ids).numpy().tobytes()):08x}"
    for arm in args.arms:
        for prompt, room in {(s.prompt, s.room) for s in samples}:
            arm.spec(prompt, room)
    return samples, measure


def holding(layers: list[caches.KVCache]) -> dict:
    """How many tokens a head holds and has lost, averaged over heads and layers, and bytes of all buffers."""
    kept = statistics.mean(float((c.slot_pos >= 0).sum(-1).float().mean()) for c in layers)
    seen = int(max(c.slot_pos.max() for c in layers)) + 1
    return {"kept": kept, "evicted": seen - kept, "bytes": caches.memory(layers) + caches.offloaded(layers)}


class Log:
    """Results of one task: what an earlier run noted in --out, what this one adds to it, and how long it will take."""

    def __init__(self, args: argparse.Namespace, model: Transformer, task: str, total: int):
        self.out, self.total, self.fresh, self.began = args.out, total, 0, time.perf_counter()
        weights = functools.reduce(lambda crc, p: zlib.crc32(as_bytes(p), crc), model.parameters(), 0)
        self.identity = {"task": task, "checkpoint": args.checkpoint, "weights": f"{weights:08x}"}
        self.identity |= {"dtype": str(model.norm.weight.dtype)[6:], "device": args.device.type}
        self.done, self.whole = read_results(args.out)
        self.seen: set[str] = set()
        self.used: Counter = Counter()

    def key(self, arm: Arm, sample: dict) -> dict:
        return {**self.identity, **arm.key(), **sample}

    def find(self, arm: Arm, sample: dict) -> dict | None:
        key = json.dumps(self.key(arm, sample), sort_keys=True)
        if key in self.done and key not in self.seen:
            self.used[self.done[key][1]] += 1
        self.seen.add(key)
        return self.done[key][0] if key in self.done else None

    def add(self, arm: Arm, sample: dict, result: dict) -> None:
        key = self.key(arm, sample)
        self.done[json.dumps(key, sort_keys=True)] = result, None
        self.fresh += 1
        if self.out:
            with self.out.open("ab") as file:
                if self.whole is not None:
                    file.truncate(self.whole)
                    self.whole = None
                file.write((json.dumps({"key": key, "result": result, "with": versions()}) + "\n").encode())

    def show(self, doing: str) -> None:
        left = self.total - sum(key in self.done for key in self.seen)
        spent = time.perf_counter() - self.began
        eta = f", about {spent / self.fresh * left:.0f} s to go" if self.fresh else ""
        progress(f"{doing}; {self.total - left} of {self.total}{eta}")

    def close(self) -> None:
        progress("")
        for origin, n in self.used.items():
            print(f"{self.identity['task']}: {n} results of an earlier run ({origin})", file=sys.stderr)


def as_bytes(x: Tensor) -> bytes:
    """Some of a tensor's bytes, from all over it: enough to tell checkpoints apart."""
    part = x.flatten()[:: max(x.numel() // 1000, 1)].contiguous().cpu()
    return part.view(torch.uint8).numpy().tobytes()


@functools.cache
def versions() -> str:
    """What made a result."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return f"commit {commit}, torch {torch.__version__}, Python {sys.version.split()[0]}"


def read_results(path: Path | None) -> tuple[dict[str, tuple[dict, str]], int | None]:
    """Key -> result and what made it, of an earlier run; and how many bytes of the file are whole lines, where a last
    one was cut off when that run was killed."""
    if path is None or not path.exists():
        return {}, None
    done, whole, numbers = {}, 0, (int, float)
    for i, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n") and b'{"key": {"task": '.startswith(line[:17]):
            return done, whole
        try:
            record = json.loads(line)
            key, result = json.dumps(record["key"], sort_keys=True), record["result"]
            good = {"bytes", "evicted"} <= set(result) or {"speed", "error"} == set(result)
            if not (good and all(isinstance(value, numbers) for value in result.values())):
                raise ValueError
            done[key] = result, record.get("with", "unknown")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UsageError(
                f"--out {path}: line {i} is not a result; give a file of an earlier run, or a new one"
            ) from None
        whole += len(line)
    return done, None


@dataclass
class Sample:
    """A prompt of `prompt` of these tokens, and `room` tokens after it. key: what makes it this sample and no other;
    place: which mean it goes into. score: text of an answer -> a number."""

    ids: list[int]
    prompt: int
    room: int
    key: dict
    place: str = ""
    answer: int = 0
    score: Callable[[str], float] | None = None


def teacher_forced(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer, task: str):
    """Windows of text: --context tokens are compressed, the next --score are read through the cache one by one."""
    source, ids = text_of(args, tokenizer)
    size = args.context + args.score + 1
    if len(ids) < size:
        raise UsageError(f"--text has {len(ids)} tokens; --context {args.context} and --score {args.score} need {size}")
    if size > model.args.max_seq_len:
        raise UsageError(f"--context and --score make {size} tokens; the model has {model.args.max_seq_len} positions")
    windows = min(args.windows, len(ids) // size)
    start = tokenizer.encode("")[:1]
    print(
        f"{source}: {windows} windows of {args.context} + {args.score} tokens, {size} apart, "
        f"{'a BOS before each' if start else 'no BOS'}; {windows * args.score} tokens scored",
        file=sys.stderr,
    )
    samples = []
    for i in range(windows):
        part = ids[i * size : (i + 1) * size]
        part = part if part[: len(start)] == start else [*start, *part[: size - len(start)]]
        key = {"text": source, "context": args.context, "score": args.score, "window": i}
        samples.append(Sample(part, args.context, args.score, key))
    reference: dict[int, Tensor] = {}

    def measure(sample: Sample, arm: Arm, first: Tensor) -> dict:
        target = torch.tensor(sample.ids[sample.prompt + 1 :], device=model.norm.weight.device)
        if task == "ppl":
            return {"nll": F.cross_entropy(through(model, sample.ids, sample.prompt), target).item()}
        if arm != args.arms[0] and id(sample) not in reference:  # an interrupted run goes on in the middle
            mine = [layer.attention.cache for layer in model.layers]
            (full,), _ = read_together(model, sample.ids[: sample.prompt], sample.room, [caches.build("full")])
            install(model, full)
            measure(sample, args.arms[0], first)
            install(model, mine)
        logits = through(model, sample.ids, sample.prompt)
        if arm == args.arms[0]:
            reference.clear()  # one window's is enough memory
            reference[id(sample)] = logits
        full = reference[id(sample)]
        p, q = full.log_softmax(-1), logits.log_softmax(-1)
        return {
            "nll": F.cross_entropy(logits, target).item(),
            "kl": (p.exp() * (p - q)).sum(-1).mean().item(),
            "top1": (full.argmax(-1) == logits.argmax(-1)).float().mean().item(),
            "gap": (full - logits).abs().max().item(),
        }

    return samples, measure


def through(model: Transformer, ids: list[int], prompt: int) -> Tensor:
    """Logits [n,V], float32, after each token that follows the prompt, but the last: all read the compressed cache."""
    tokens = torch.tensor([ids], device=model.norm.weight.device)
    step, pos, logits = DecodeStep(model), torch.full((1, 1), prompt, device=tokens.device), []
    for t in range(prompt, len(ids) - 1):
        logits.append(step(tokens[:, t : t + 1], pos)[0, 0].float().clone())
        pos += 1
    return torch.stack(logits)


def questions(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer, task: str):
    """A text and a question about it, which is part of the compressed prompt (inside), or read after it (after)."""
    samples, positions = [], model.args.max_seq_len
    for q in longbench(args) if task == "longbench" else hidden(args, tokenizer, task):
        chat = q.chat and tokenizer.has_chat_template
        wrap = (lambda text: tokenizer.chat([{"role": "user", "content": text}])) if chat else tokenizer.encode
        context, question = fitted(q, wrap, tokenizer, positions)
        ids, alone = wrap(context + question), wrap(context)
        split = next((j for j, (a, b) in enumerate(zip(ids, alone, strict=False)) if a != b), len(alone))
        if len(ids) + q.answer > positions:
            raise UsageError(
                f"{task} --length {q.key['length']}: makes {len(ids)} tokens and --answer {q.answer} more; "
                f"the model has {positions} positions"
            )
        for protocol in args.protocol:
            prompt = len(ids) if protocol == "inside" else split
            key = {**q.key, "protocol": protocol, "answer": q.answer}
            samples.append(Sample(ids, prompt, len(ids) - prompt + q.answer, key, q.place, q.answer, q.score))

    def measure(sample: Sample, arm: Arm, logits: Tensor) -> dict:
        seen, answer, ends = sample.prompt, sample.answer, tokenizer.eos_ids
        if seen == len(sample.ids):
            tokens = decode(model, logits, seen, answer, ends)
        else:
            tokens = generate(model, sample.ids[seen:], answer, start=seen, stop_ids=ends)
        return {sample.key["protocol"]: sample.score(tokenizer.decode(tokens))}

    return samples, measure


@dataclass
class Question:
    """Text and a question about it. answer: tokens for one; chat: asked in the chat template, where there is one;
    cut: may the middle be left out where it is too long?"""

    context: str
    question: str
    score: Callable[[str], float]
    answer: int
    place: str
    key: dict
    chat: bool = True
    cut: bool = False


def fitted(q: Question, wrap: Callable[[str], list[int]], tokenizer: Tokenizer, positions: int) -> tuple[str, str]:
    """Context and question; where they are too long and may be cut, the first and the last half of what fits."""
    text = q.context + q.question
    limit = min(q.key["length"] or positions, positions) - q.answer
    ids, size = tokenizer.encode(text, bos=False), limit - len(wrap(""))
    while q.cut and len(wrap(text)) > limit:  # pieces of text may make more tokens than they were cut from
        if size < 2:
            raise UsageError(
                f"--length {q.key['length']}: too short for a prompt and an answer of {q.place}; give more"
            )
        text = tokenizer.decode(ids[: size // 2]) + tokenizer.decode(ids[-(size // 2) :])
        size -= 2
    alike = itertools.takewhile(
        lambda ends: ends[0] == ends[1], zip(reversed(text), reversed(q.question), strict=False)
    )
    end = len(text) - len(list(alike))
    return text[:end], text[end:]


def hidden(args: argparse.Namespace, tokenizer: Tokenizer, task: str) -> Iterator[Question]:
    """Questions about what is hidden in Python's manual."""
    filler, end = tokenizer.encode(sample_text()), "" if tokenizer.has_chat_template else "\nAnswer:"
    places = args.depth if task == "needle" else RULER
    for length, place, i in itertools.product(args.length, places, range(args.samples)):
        draw = random.Random(f"{args.seed} {length} {place} {i}")
        first = draw.randrange(max(len(filler) - length, 1))
        lines = tokenizer.decode(filler[first : first + length]).split("\n")
        key = {"length": length, "place": place, "sample": i, "seed": args.seed}
        if task == "needle":
            context, question, answers = needle(draw, lines, place)
            score = functools.partial(exact, answers=answers)
        else:
            context, question, answers = RULER[place](draw, lines, length)
            score = functools.partial(recall, answers=answers)
        answer = args.answer or (16 if task == "needle" else 120 if place == "common" else 48)
        place = f"{length} {place}" if task == "needle" or len(args.length) > 1 else place
        yield Question(context, question + end, score, answer, place, key)


def exact(text: str, answers: list[str]) -> float:
    return float(re.findall(r"\d+", text)[:1] == answers)


def recall(text: str, answers: list[str]) -> float:
    return sum(a.lower() in text.lower() for a in answers) / len(answers)


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
    lines += [""] * (5 - len(lines))  # a place for each
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
    ranked = sorted(set(listed), key=lambda w: (-listed.count(w), w))
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


# ---------------------------------------------------------------------------------------------------------------------
# LongBench (2308.14508): its data, its metrics and the structure of its prompts


def longbench(args: argparse.Namespace) -> Iterator[Question]:
    """Rows of LongBench's JSONL files, as many as there are, or --samples of each."""
    tasks = longbench_files(args.data)
    missing = [name for name in LONGBENCH if name not in tasks]
    print(f"LongBench: {len(tasks)} of {len(LONGBENCH)} tasks found", end="", file=sys.stderr)
    print(f", not {', '.join(missing)}: no average over all" if missing else "", file=sys.stderr)
    for name, (where, lines) in tasks.items():
        answer, metric, chat, before, after = LONGBENCH[name]
        lines = [line for line in lines if line.strip()]
        if not lines:
            raise UsageError(f"--data {where}: has no rows; get it again, or take it away")
        chosen = lines[: args.samples]
        print(f"  {name}: {len(chosen)} of {len(lines)} rows", file=sys.stderr)
        for i, line in enumerate(chosen):
            try:
                row = json.loads(line)
                context, asked, answers, classes = (row[k] for k in ("context", "input", "answers", "all_classes"))
                if not (isinstance(answers, list) and answers and all(isinstance(text, str) for text in answers)):
                    raise TypeError("answers is not a list of texts")
                if metric is classified and not set(answers) <= set(classes):
                    raise ValueError("an answer that is none of all_classes")
                for reference in answers:
                    metric("0", reference, classes)  # what cannot be scored is refused now, not after the answer
                score = functools.partial(official, metric=metric, answers=answers, classes=classes, name=name)
                key = {"place": name, "row": zlib.crc32(line.encode()), "length": args.length[0]}
                tokens, question = args.answer or answer, after.replace("{input}", asked)
                q = Question(before + context, question, score, tokens, name, key, chat, cut=True)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                raise UsageError(f"--data {where}: row {i + 1} is not LongBench's ({reason})") from None
            yield q


def longbench_files(data: Path | None) -> dict[str, tuple[str, list[str]]]:
    """Task -> name of its file and lines, of a directory, or of the archive that the Hub has."""
    if data is None:
        try:
            import huggingface_hub

            data = Path(huggingface_hub.hf_hub_download("zai-org/LongBench", "data.zip", repo_type="dataset"))
        except Exception as error:
            raise UsageError(
                f"longbench: data.zip of zai-org/LongBench cannot be fetched from the Hub ({type(error).__name__}); "
                "give --data DIR with its JSONL files"
            ) from None
    found = {}
    try:
        if data.is_file():
            with zipfile.ZipFile(data) as archive:
                for name in LONGBENCH:
                    if (path := f"data/{name}.jsonl") in archive.namelist():
                        found[name] = f"{data}/{path}", archive.read(path).decode("utf-8").split("\n")
        else:
            for name, path in itertools.product(LONGBENCH, (data, data / "data")):
                if (file := path / f"{name}.jsonl").exists():
                    found[name] = str(file), file.read_text(encoding="utf-8").split("\n")
    except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, UnicodeDecodeError) as error:
        raise UsageError(f"--data {data}: cannot be read ({error})") from None
    if not found:
        names = ", ".join(f"{name}.jsonl" for name in LONGBENCH)
        raise UsageError(f"--data {data}: has none of {names}; give the directory with LongBench's JSONL files")
    return found


def official(text: str, metric, answers: list[str], classes: list[str] | None, name: str) -> float:
    """LongBench's number for one answer, 0 to 100: the best over the reference answers."""
    if name in ("trec", "triviaqa", "samsum"):  # a model of few shots goes on with the next example
        text = text.lstrip("\n").split("\n")[0]
    return 100 * max((metric(text, answer, classes) for answer in answers), default=0.0)


def f1(text: str, answer: str, classes=None) -> float:
    """Of words, without case, punctuation and articles."""

    def bag(text: str) -> Counter:
        text = "".join(c for c in text.lower() if c not in string.punctuation)
        return Counter(re.sub(r"\b(a|an|the)\b", " ", text).split())

    given, wanted = bag(text), bag(answer)
    return 2 * (given & wanted).total() / max(given.total() + wanted.total(), 1)


def rouge_l(text: str, answer: str, classes=None) -> float:
    """ROUGE-L as the package `rouge` 1.0 computes it, which LongBench uses: the *different* words of every longest
    common subsequence between a sentence of one and a sentence of the other, and the F1 of their number."""
    given, wanted = ([" ".join(part.split()).split(" ") for part in t.split(".") if part] for t in (text, answer))
    common = set().union(*(common_words_in_order(w, g) for w in wanted for g in given))
    n, m = (len(set(itertools.chain(*side))) for side in (given, wanted))
    if not n or not m:
        return 0.0
    precision, recall = len(common) / n, len(common) / m
    return 2 * precision * recall / (precision + recall + 1e-8)


def common_words_in_order(x: list[str], y: list[str]) -> set[str]:
    """The words of a longest common subsequence; of several, the one that leaves out the end of y first."""
    table = [[0] * (len(y) + 1)]
    for a in x:
        row = [0]
        for j, b in enumerate(y):
            row.append(table[-1][j] + 1 if a == b else max(table[-1][j + 1], row[j]))
        table.append(row)
    found, i, j = set(), len(x), len(y)
    while i and j:
        if x[i - 1] == y[j - 1]:
            i, j = i - 1, j - 1
            found.add(x[i])
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def classified(text: str, answer: str, classes: list[str]) -> float:
    """One over the number of classes that are named, if the right one is; parts of its own name do not count."""
    named = [c for c in classes if c in text]
    for c in named:  # as published: what follows one that is removed is not looked at
        if c in answer and c != answer:
            named.remove(c)
    return 1 / len(named) if answer in named else 0.0


def numbered(text: str, answer: str, classes=None) -> float:
    """The part of all numbers that is the right one: a count, or the number of a paragraph."""
    given = re.findall(r"\d+", text)
    return given.count(re.findall(r"\d+", answer)[0]) / max(len(given), 1)


def code_similarity(text: str, answer: str, classes=None) -> float:
    """Edit similarity of the first line that is code, in hundredths, as the package `fuzzywuzzy` rounds it."""
    lines = text.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


BRIEFLY = "Answer with a single phrase where possible, as short as you can, and explain nothing. "
PASSAGES = "Answer a question from passages. Give the answer alone, without another word. "
UNSURE = (
    'Where the article does not tell, write "unanswerable"; to a question of yes or no, answer "yes", "no" or '
    '"unanswerable". '
)
ASKED = "\n\nQuestion: {input}\nAnswer:"
# fmt: off
LONGBENCH = {  # tokens of an answer, metric, in the chat template?, what stands before the text, what after it
    "narrativeqa": (128, f1, True,
        f"Here is a story, a novel or the script of a film, and a question about it. {BRIEFLY}\n\nStory: ",
        f"\n\nNow answer the question about the story. {BRIEFLY}{ASKED}"),
    "qasper": (128, f1, True,
        f"Here is a scientific article, and a question about it. {BRIEFLY}{UNSURE}\n\nArticle: ",
        f"\n\nNow answer the question about the article. {BRIEFLY}{UNSURE}{ASKED}"),
    "multifieldqa_en": (64, f1, True,
        "Read this text, and answer briefly.\n\n",
        f"\n\nNow answer a question about the text. Give the answer alone, without another word.{ASKED}"),
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique"), (32, f1, True,
        f"{PASSAGES}\n\nThese are the passages.\n",
        f"\n\n{PASSAGES}{ASKED}")),
    "gov_report": (512, rouge_l, True,
        "Here is a report of a government agency. Summarize it on one page.\n\nReport:\n",
        "\n\nNow summarize the report on one page.\n\nSummary:"),
    "qmsum": (512, rouge_l, True,
        "Here is what was said in a meeting, and a question or task. Answer in one or more sentences.\n\nTranscript:\n",
        "\n\nNow answer about the meeting in one or more sentences.\n\nQuery: {input}\nAnswer:"),
    "multi_news": (512, rouge_l, True,
        "Here are passages of news. Summarize all of them on one page.\n\nNews:\n",
        "\n\nNow summarize all the news on one page.\n\nSummary:"),
    "trec": (64, classified, False, "Say of which type a question is. Here are some examples.\n\n", "\n{input}"),
    "triviaqa": (32, f1, False,
        "Answer the question from the passage. Give the answer alone, without another word. Some examples:\n\n",
        "\n\n{input}"),
    "samsum": (128, rouge_l, False,
        "Summarize a conversation in a few short sentences. Here are some examples.\n\n",
        "\n\n{input}"),
    "passage_count": (32, numbered, True,
        "Here are paragraphs from Wikipedia, some of them more than once. Read them with care and find out how many "
        "different ones there are, each counted once.\n\n",
        "\n\nHow many different paragraphs are there? Write the number alone: 1, 2, 3 and so on.\n\nThe answer is: "),
    "passage_retrieval_en": (32, numbered, True,
        "Here are 30 paragraphs from Wikipedia, and an abstract. Find the paragraph that the abstract is of.\n\n",
        "\n\nThis is the abstract.\n\n{input}\n\nWrite the number of its paragraph, in the form \"Paragraph 1\", "
        "\"Paragraph 2\" and so on.\n\nThe answer is: "),
    "lcc": (64, code_similarity, False, "Complete this code.\n", "Next line of code:\n"),
    "repobench-p": (64, code_similarity, False, "Complete this code.\n", "{input}Next line of code:\n"),
}
# fmt: on


# ---------------------------------------------------------------------------------------------------------------------
# What is kept: map and health


@torch.no_grad()
def look(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> list[dict]:
    """For each arm, what its layers hold of the first --context tokens of a text: positions, or how healthy it is."""
    source, ids = text_of(args, tokenizer)
    ids = ids[: args.context]
    if len(ids) < args.context:
        raise UsageError(f"--text has {len(ids)} tokens; --context {args.context} needs {args.context}")
    if len(ids) > model.args.max_seq_len:
        raise UsageError(f"--context {args.context}: the model has {model.args.max_seq_len} positions")
    arms = args.arms if "full" in args.cache and 16 in args.bits else args.arms[1:]
    specs = [arm.spec(len(ids), 0) for arm in arms]
    print(f"{source}: {len(ids)} tokens", file=sys.stderr)
    rows = []
    for arm, spec in zip(arms, specs, strict=True):
        model.setup_caches(spec, 1, len(ids))
        layers, health = [layer.attention.cache for layer in model.layers], Health(model)
        model.prefill(torch.tensor([ids], device=args.device))
        row = {**arm.key(), **holding(layers)}
        if args.task == "health":
            row["layers"] = health.data()
        else:
            row["positions"] = [[sorted(head[head >= 0].tolist()) for head in c.slot_pos[0]] for c in layers]
            row["tokens"] = [tokenizer.decode([id]) for id in ids]
        rows.append(row)
    return rows


def health_lines(rows: list[dict]) -> list[str]:
    lines = [["cache", "budget", "bits", "layer", *rows[0]["layers"][0]]]
    for r in rows:
        for i, layer in enumerate(r["layers"]):
            values = ["-".join(map(str, x)) if isinstance(x, list) else f"{x:,.4g}" for x in layer.values()]
            lines.append([*named(r), str(i), *values])
    return aligned(lines)


def plot_health(rows: list[dict], path: Path) -> None:
    names = [name for name, x in rows[0]["layers"][0].items() if not isinstance(x, list)]
    figure, axes = panels(1, len(names))
    for axis, name in zip(axes[0], names, strict=True):
        for r in rows:
            axis.plot([layer[name] for layer in r["layers"]], linewidth=1, label=" ".join(named(r)))
        axis.set(xlabel="layer", ylabel=name.replace("_", " "))
    axes[0][-1].legend(fontsize="x-small")
    save(figure, path)


def kept_by_layer(row: dict) -> list[list[float]]:
    """The part of a layer's heads that keeps a position, for every layer and position."""
    counts = [Counter(itertools.chain(*heads)) for heads in row["positions"]]
    return [[c[t] / len(row["positions"][0]) for t in range(len(row["tokens"]))] for c in counts]


def map_lines(rows: list[dict], width: int = 100) -> list[str]:
    """A line for each layer, a character for a stretch of text: from ' ', nothing of it is kept, to '@', all is. Then
    the passages that at least half of all heads keep."""
    lines = []
    for r in rows:
        kept, n = kept_by_layer(r), len(r["tokens"])
        edges = [round(i * n / min(width, n)) for i in range(min(width, n) + 1)]
        held = f"{r['kept']:,.0f} of {n:,} tokens a head, {r['bytes'] / 1e6:.2f} MB"
        lines.append(f"{' '.join(named(r))}: {held}; {n / (len(edges) - 1):.0f} tokens a column")
        for i, layer in enumerate(kept):
            parts = [statistics.mean(layer[a:b]) for a, b in itertools.pairwise(edges)]
            lines.append(f"{i:3} |" + "".join(" .:-=+*#%@"[math.ceil(9 * part)] for part in parts) + "|")
        half = [statistics.mean(column) >= 0.5 for column in zip(*kept, strict=True)]
        lines.append("kept by at least half of all heads:")
        for is_kept, run in itertools.groupby(range(n), key=half.__getitem__):
            if is_kept:
                run = list(run)
                lines.append(f"  {run[0]}-{run[-1]}  {''.join(r['tokens'][t] for t in run)!r}")
    return lines


def plot_map(rows: list[dict], path: Path) -> None:
    """A panel for each cache, a line for each layer; dark is kept by all heads. Short prompts are written below."""
    figure, axes = panels(len(rows), 1, width=12, height=2.5)
    for (axis,), r in zip(axes, rows, strict=True):
        axis.imshow(kept_by_layer(r), aspect="auto", cmap="Greys", vmin=0, vmax=1, interpolation="none")
        axis.set(title=" ".join(named(r)), ylabel="layer", xlabel="position")
        if len(r["tokens"]) <= 120:
            labels = [token.replace("\n", "\\n").replace("$", r"\$") for token in r["tokens"]]
            axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=5)
    save(figure, path)


# ---------------------------------------------------------------------------------------------------------------------
# Tables and pictures


def grid_lines(rows: list[dict]) -> list[str]:
    measures = [name[:-6] for name in rows[0] if name.endswith("_error") and name != "nll_error"]
    places = rows[0]["places"] if rows[0]["task"] in ("ruler", "longbench") else ()
    lines = [["cache", "budget", "bits", "kept", "evicted", "MB", *measures, *places]]
    for r in rows:
        evicted = f"{r['evicted']:,.0f}"
        if r["evicted"] == 0 and r["budget"] not in (None, 1):
            evicted = "NONE"  # a policy that never fired has proved nothing
        sizes = [f"{r['kept']:,.0f}", evicted, f"{r['bytes'] / 1e6:.2f}"]
        values = [f"{r[m]:.4f}" + (f" ± {e:.4f}" if (e := r[m + "_error"]) else "         ") for m in measures]
        lines.append([*named(r), *sizes, *values, *(f"{r['places'][p]:.2f}" for p in places)])
    return aligned(lines)


def named(row: dict) -> list[str]:
    bits = f"{row['format']} {row['bits']}" if "format" in row else str(row["bits"])
    cache = row["cache"] + (f" select {row['select']}" if "select" in row else "")
    return [cache, "-" if row["budget"] is None else str(row["budget"]), bits]


def plot_grid(rows: list[dict], path: Path) -> None:
    """Every measure against the memory that it took: a colour for each policy, a kind of line for each width."""
    measures = [name[:-6] for name in rows[0] if name.endswith("_error") and name != "nll_error"]
    columns = min(len(measures) + 1, 4)  # and a place for the legend
    figure, axes = panels(-(-(len(measures) + 1) // columns), columns)
    axes = list(itertools.chain(*axes))
    policies, forms = (list(dict.fromkeys(named(r)[i] for r in rows[1:])) for i in (0, 2))
    for axis, name in zip(axes, measures, strict=False):
        axis.axhline(rows[0][name], color="black", linewidth=0.8)
        for (i, cache), (j, form) in itertools.product(
            enumerate(policies), enumerate(sorted(forms, reverse="16" in forms))
        ):
            line = sorted(
                (r["bytes"] / 1e6, r[name], r[name + "_error"] or 0) for r in rows[1:] if named(r)[::2] == [cache, form]
            )
            if line:
                x, y, error = zip(*line, strict=True)
                style = {"color": f"C{i}", "linestyle": ("-", "--", ":", "-.")[j % 4], "label": f"{cache} {form}"}
                axis.errorbar(x, y, error, marker="o", markersize=3, linewidth=1, elinewidth=0.4, **style)
        axis.set(xlabel="cache, MB", ylabel=name, xscale="log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        if name == "kl":
            axis.set_yscale("symlog", linthresh=1e-3)
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        axes[len(measures)].legend(handles, labels, fontsize="x-small", loc="upper left", ncols=-(-len(labels) // 16))
    for axis in axes[len(measures) :]:
        axis.axis("off")
    save(figure, path)


def plot_needle(rows: list[dict], path: Path) -> None:
    """A heat map for each cache and protocol: where the number stood, and how long the text was."""
    cells = [tuple(place.split(" ")) for place in rows[0]["places"]]
    lengths, depths, protocols = (list(dict.fromkeys(column)) for column in zip(*cells, strict=True))
    figure, axes = panels(len(rows), len(protocols), width=1 + len(lengths), height=1.5 + len(depths) / 3)
    for line, r in zip(axes, rows, strict=True):
        for axis, protocol in zip(line, protocols, strict=True):
            image = [[r["places"][f"{length} {depth} {protocol}"] for length in lengths] for depth in depths]
            axis.imshow(image, aspect="auto", cmap="RdYlGn", vmin=0, vmax=1)
            axis.set_title(f"{' '.join(named(r))}\nquestion {protocol}", fontsize="small")
            for (y, line_of), x in itertools.product(enumerate(image), range(len(lengths))):
                axis.text(x, y, f"{line_of[x]:.2g}", ha="center", va="center", fontsize="x-small")
            axis.set_xticks(range(len(lengths)), lengths)
            axis.set_yticks(range(len(depths)), depths)
            axis.set(xlabel="tokens", ylabel="depth")
    save(figure, path)


def panels(rows: int, columns: int, width: float = 4, height: float = 4):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)


def save(figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def aligned(lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Speed and memory


class Run:
    """One cache on one prompt, between turns: the layers' caches and where the sequences stand."""

    def __init__(self, model: Transformer, name: str, spec: caches.CacheSpec, batch: int, prompt: int):
        self.model, self.name, self.spec, self.batch, self.prompt = model, name, spec, batch, prompt
        self.prefill_s: list[float] = []
        self.step_ms: list[float] = []
        self.cpu_ms: list[float] = []
        self.compile_s, self.kv_peak, self.layers = 0.0, 0, []

    def read(self, ids: Tensor, room: int) -> None:
        """Prefill. kv_peak: all caches' bytes plus the keys and values of the layer that is being read, at the layer
        where their sum is largest."""
        self.layers = []  # of an earlier turn
        self.model.setup_caches(self.spec, self.batch, ids.shape[1] + room)
        self.layers = [layer.attention.cache for layer in self.model.layers]

        def watch(cache, q, k, v, pos):
            self.kv_peak = max(self.kv_peak, self.nbytes() + k.nbytes + v.nbytes)

        for cache in self.layers:
            cache.watch = watch
        self.model.prefill(ids, 0, room)
        self.step = DecodeStep(self.model)

    def enter(self) -> None:
        install(self.model, self.layers)

    def nbytes(self) -> int:
        return caches.memory(self.layers) + caches.offloaded(self.layers)

    def read_bytes(self) -> int:
        return caches.read_bytes(self.layers)

    def slots(self) -> float:
        return statistics.mean(c.slot_pos.shape[2] for c in self.layers)


class Theirs(Run):
    """The same with a cache of `transformers`, on the same weights. kind: Dynamic, Static or Quantized."""

    def __init__(self, model: Transformer, twin: nn.Module, kind: str, batch: int, prompt: int):
        super().__init__(model, f"transformers {kind}", None, batch, prompt)
        self.twin, self.kind = twin, kind

    def read(self, ids: Tensor, room: int) -> None:
        from transformers import DynamicCache, QuantizedCache, StaticCache

        config, forward = self.twin.config, self.twin.forward
        if self.kind == "Static":
            cache = StaticCache(config=config, max_cache_len=ids.shape[1] + room)
        else:
            cache = DynamicCache(config=config) if self.kind == "Dynamic" else QuantizedCache("quanto", config, nbits=4)
        self.layers = cache.layers
        argument = "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
        given = {argument: cache, "use_cache": True, "logits_to_keep": 1}
        forward(ids, position_ids=torch.arange(ids.shape[1], device=ids.device)[None], **given)
        if self.kind == "Static":
            forward = torch.compile(forward, dynamic=False)
        self.step = lambda tok, pos: forward(tok, position_ids=pos, **given).logits

    def enter(self) -> None:
        pass

    def nbytes(self) -> int:
        return sum(t.nbytes for layer in self.layers for t in tensors_in(vars(layer)))

    read_bytes = nbytes

    def slots(self) -> None:
        return None


def tensors_in(x) -> Iterator[Tensor]:
    """All tensors of some nested structure; of one that is quantized, those that it is made of."""
    if hasattr(x, "__tensor_flatten__"):
        x = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict | list | tuple):
        for part in x.values() if isinstance(x, dict) else x:
            yield from tensors_in(part)


@torch.no_grad()
def bench(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> list[dict]:
    """One dict a row, as printed by --json."""
    if not model.compiled:
        raise UsageError("bench measures compiled code, and there is no C++ compiler; install g++")
    turns = args.rounds + 1
    need = max(args.prompt_tokens) + args.steps * turns
    if need > model.args.max_seq_len:
        raise UsageError(f"--prompt-tokens and steps make {need} tokens; the model has {model.args.max_seq_len}")
    twin, theirs = transformers_twin(model) if args.vs else None, ["Dynamic", "Static"] if args.vs else []
    if args.vs and find_quanto() and model.args.head_dim % 64 == 0:  # its groups are of 64
        theirs.append("Quantized")
    elif args.vs:
        print("Without QuantizedCache: it needs optimum-quanto, and heads of 64, 128, .. channels", file=sys.stderr)
    runs = []
    for prompt, batch in itertools.product(args.prompt_tokens, args.batch):
        runs += [Run(model, str(arm), arm.relative(), batch, prompt) for arm in args.arms]
        runs += [Theirs(model, twin, kind, batch, prompt) for kind in theirs]
    text = tokenizer.encode(sample_text())
    for turn in range(args.prefills):
        for run in runs:
            progress(f"{run.name}: reading {run.batch} x {run.prompt} tokens")
            ids = (text * (run.prompt // len(text) + 1))[: run.prompt]
            ids = torch.tensor([ids] * run.batch, device=args.device)
            began = time.perf_counter()
            run.read(ids, args.steps * turns)
            synchronize(args.device)
            run.prefill_s.append(time.perf_counter() - began)
            if turn + 1 == args.prefills:
                run.compile_s = sum(steps(run, run.prompt, args.steps, args.device)) / 1e3
    rate = take_turns(runs, args)
    weights = model.step_bytes()
    first = runs[0].batch * 1e3 / statistics.median(runs[0].step_ms)
    rows, usual = [], {(run.batch, run.prompt): run for run in runs if run.name == runs[0].name}
    for run in runs:
        ms, nbytes = statistics.median(run.step_ms), run.nbytes()
        reading, full = statistics.median(run.prefill_s), usual[run.batch, run.prompt]
        tokens = (run.prompt + args.steps * turns) * run.batch
        bf16 = tokens * model.args.n_layer * model.args.n_kv_head * model.args.head_dim * 4
        rows.append(
            {
                "cache": run.name,
                "batch": run.batch,
                "prompt_tokens": run.prompt,
                "slots": run.slots(),
                "bytes": nbytes,
                "bytes_vs_bf16": nbytes / bf16,
                "kv_peak_bytes": run.kv_peak,
                "prefill_tok_s": run.batch * run.prompt / reading,
                "prefill_vs_full": reading / statistics.median(full.prefill_s),
                "compile_s": run.compile_s,
                "decode_ms": ms,
                "decode_cpu_ms": statistics.median(run.cpu_ms),
                "decode_tok_s": run.batch * 1e3 / ms,
                "read_bytes": run.read_bytes(),
                "decode_gb_s": (weights + run.read_bytes()) / ms / 1e6,
                "floor": (weights + run.read_bytes()) / rate / ms * 1e3,
                "speed_vs_full": statistics.median(full.step_ms) / ms,
                "speed_vs_first": run.batch * 1e3 / ms / first,
            }
        )
    return rows


def take_turns(runs: list[Run], args: argparse.Namespace) -> float:
    """--steps steps of each run, --rounds times, in turns. Returns bytes a second that the memory gives, measured in
    between."""
    rates = []
    for turn in range(1, args.rounds + 1):
        for run in runs:
            began = time.process_time()
            run.step_ms += steps(run, run.prompt + turn * args.steps, args.steps, args.device)
            run.cpu_ms.append((time.process_time() - began) * 1e3 / args.steps)
        rates.append(bandwidth(args.device))
        progress(f"turn {turn} of {args.rounds}")
    return statistics.median(rates)


def bandwidth(device: torch.device) -> float:
    """Bytes a second of reading half a gigabyte."""
    block = torch.ones(2**27, device=device)
    synchronize(device)
    began = time.perf_counter()
    block.sum()
    synchronize(device)
    return block.nbytes / (time.perf_counter() - began)


@torch.no_grad()
def profile(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> list[dict]:
    """Where a decode step goes: each part of it compiled alone and run for all layers in turn, as the step runs them,
    next to the whole step. One dict for every part of every cache."""
    if not model.compiled or args.device.type != "cpu":
        raise UsageError("profile replays the kernels of a compiled CPU step: it needs --device cpu and a C++ compiler")
    if max(args.prompt_tokens) + 16 > model.args.max_seq_len:
        raise UsageError(
            f"--prompt-tokens {max(args.prompt_tokens)}: with 16 more to write, the model has {model.args.max_seq_len}"
        )
    text, rows = tokenizer.encode(sample_text()), []
    parts = {
        "q, k, v": (lambda block, x, rope, y: block.attention.qkv(block.attention_norm(x), rope), "attention.wqkv"),
        "attention": (lambda block, q, k, v, pos: block.attention.cache(q, k, v, pos), ""),
        "output": (lambda block, x, rope, y: x + block.attention.out(y), "attention.wo"),
        "feed forward": (lambda block, x, rope, y: x + block.feed_forward(block.ffn_norm(x)), "feed_forward"),
    }
    compiled = {name: torch.compile(f, fullgraph=True, dynamic=False) for name, (f, _) in parts.items()}
    for prompt, arm in itertools.product(args.prompt_tokens, args.arms):
        run = Run(model, str(arm), arm.relative(), 1, prompt)
        run.read(torch.tensor([(text * (prompt // len(text) + 1))[:prompt]]), 16)
        steps(run, prompt, 8, args.device)
        pos = torch.full((1, 1), prompt + 8)
        x, rope = model.tok_embeddings(torch.zeros_like(pos)), model.rope(pos)
        q, k, v = (t.transpose(1, 2) for t in model.layers[0].attention.qkv(x, rope))
        timed = {"whole step": [lambda run=run, x=x, pos=pos: run.step(torch.zeros_like(pos), pos)]}
        for name, f in compiled.items():
            given = (q, k, v, pos) if name == "attention" else (x, rope, q.transpose(1, 2))
            timed[name] = recorded_calls(lambda f=f, given=given: [f(block, *given) for block in model.layers])
        timed["head"] = recorded_calls(lambda x=x: model.run_head(model, x))
        ms, rates = {name: [] for name in timed}, []
        for turn in range(args.rounds * args.steps):
            for name, calls in timed.items():  # in turns, so that none finds its weights in a cache of the CPU
                began = time.perf_counter()
                for call in calls:
                    call()
                ms[name].append((time.perf_counter() - began) * 1e3)
            if turn % args.steps == 0:
                rates.append(bandwidth(args.device))
        nbytes = {name: weight_bytes(model, within) for name, (_, within) in parts.items() if within}
        nbytes |= {
            "attention": run.read_bytes(),
            "head": sum(p.nbytes for p in (model.output or model.tok_embeddings).parameters()),
        }
        nbytes["whole step"] = sum(nbytes.values())
        for name in [*parts, "head", "whole step"]:
            took, floor = statistics.median(ms[name]), nbytes[name] / statistics.median(rates) * 1e3
            rows.append(
                {"cache": run.name, "prompt_tokens": prompt, "part": name, "bytes": nbytes[name]}
                | {"ms": took, "floor_ms": floor, "of_floor": floor / took}
            )
    return rows


def recorded_calls(f: Callable) -> list[Callable]:
    """The compiled kernels that f runs, ready to be called without the Python between them."""
    f()
    with kernels.recorded() as calls:
        f()
    assert calls, "nothing was compiled"
    return kernels.ready(calls)


def weight_bytes(model: Transformer, within: str) -> int:
    """Of all layers' weights in a module of that name."""
    return sum(p.nbytes for layer in model.layers for p in layer.get_submodule(within).parameters())


def profile_lines(rows: list[dict]) -> list[str]:
    columns = {
        "cache": lambda r: r["cache"],
        "prompt": lambda r: str(r["prompt_tokens"]),
        "part": lambda r: r["part"],
        "MB": lambda r: f"{r['bytes'] / 1e6:.1f}",
        "floor ms": lambda r: f"{r['floor_ms']:.2f}",
        "ms": lambda r: f"{r['ms']:.2f}",
        "of floor": lambda r: f"{r['of_floor']:.2f}",
    }
    return aligned([list(columns), *([show(r) for show in columns.values()] for r in rows)])


def steps(run: Run, pos: int, n: int, device: torch.device) -> list[float]:
    """n decode steps from position pos on, each fed the likeliest token; milliseconds of each."""
    run.enter()
    tok, times = torch.zeros(run.batch, 1, dtype=torch.long, device=device), []
    where = torch.full((run.batch, 1), pos, device=device)
    for _ in range(n):
        began = time.perf_counter()
        tok = run.step(tok, where)[:, -1].argmax(-1, keepdim=True)
        where += 1
        synchronize(device)
        times.append((time.perf_counter() - began) * 1e3)
    return times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def progress(text: str, said: list[float] = [-60.0]) -> None:  # noqa: B006  when it was said last
    """One line that is written over, on a terminal; elsewhere, such as in a file, a line every minute."""
    if sys.stderr.isatty():
        print(text.ljust(79), end="\r", file=sys.stderr)
    elif text and time.perf_counter() - said[0] > 60:
        said[0] = time.perf_counter()
        print(text, file=sys.stderr)


def bench_lines(rows: list[dict]) -> list[str]:
    columns = {
        "cache": lambda r: r["cache"],
        "batch": lambda r: str(r["batch"]),
        "prompt": lambda r: str(r["prompt_tokens"]),
        "slots": lambda r: "-" if r["slots"] is None else f"{r['slots']:,.0f}",
        "MB": lambda r: f"{r['bytes'] / 1e6:.2f}",
        "vs bf16": lambda r: f"{r['bytes_vs_bf16']:.3f}",
        "peak MB": lambda r: f"{r['kv_peak_bytes'] / 1e6:.1f}" if r["kv_peak_bytes"] else "-",
        "prefill tok/s": lambda r: f"{r['prefill_tok_s']:.0f}",
        "time vs full": lambda r: f"{r['prefill_vs_full']:.2f}",
        "decode ms": lambda r: f"{r['decode_ms']:.2f}",
        "cpu ms": lambda r: f"{r['decode_cpu_ms']:.2f}",
        "decode tok/s": lambda r: f"{r['decode_tok_s']:.1f}",
        "GB/s": lambda r: f"{r['decode_gb_s']:.1f}",
        "of floor": lambda r: f"{r['floor']:.2f}",
        "vs full": lambda r: f"{r['speed_vs_full']:.3f}",
        "vs first": lambda r: f"{r['speed_vs_first']:.3f}",
    }
    return aligned([list(columns), *([show(r) for show in columns.values()] for r in rows)])


def serve(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> list[dict]:
    """Three dicts for every cache: what an engine of --max-batch lanes is worth, each beside the same without."""
    text, rows = tokenizer.encode(sample_text()), []
    for arm in args.arms:
        for prompt in args.prompt_tokens:
            rows.append({"cache": str(arm), **lanes_together(args, model, arm, text, prompt)})
        rows.append({"cache": str(arm), **requests_of_all_lengths(args, model, arm, text)})
        rows.append({"cache": str(arm), **prompts_that_begin_alike(args, model, arm, text)})
    return rows


def piece(text: list[int], start: int, n: int) -> list[int]:
    """n tokens of a text that has no end."""
    start %= len(text)
    return (text[start:] + text * (n // len(text) + 1))[:n]


def lanes_together(args: argparse.Namespace, model: Transformer, arm: Arm, text: list[int], prompt: int) -> dict:
    """Steps of one lane and of all, in turns, from `prompt` tokens on."""
    new, per_token = args.steps * (args.rounds + 1) + 8, {1: [], args.max_batch: []}
    engines = {n: Engine(model, arm.relative(), n, prompt + new) for n in per_token}
    for n, engine in engines.items():
        progress(f"{arm}: reading {n} x {prompt} tokens")
        for i in range(n):
            engine.submit(piece(text, 7919 * i, prompt), Params(new))
        while engine.waiting or engine.reading:
            engine.step()
        for _ in range(4):  # what is compiled and recorded is
            engine.step()
    for turn in range(args.rounds):
        for n, engine in engines.items():
            began = time.perf_counter()
            for _ in range(args.steps):
                engine.step()
            per_token[n].append((time.perf_counter() - began) * 1e3 / args.steps / n)
        progress(f"turn {turn + 1} of {args.rounds}")
    one, all = (statistics.median(per_token[n]) for n in engines)
    return {
        "what": f"decode from {prompt} tokens on, {args.max_batch} lanes beside one",
        "alone": 1e3 / one,
        "together": 1e3 / all,
        "unit": "tok/s",
        "ratio": one / all,
        "pages": engines[args.max_batch].peak,
        "unused": engines[args.max_batch].unused,
    }


def requests_of_all_lengths(args: argparse.Namespace, model: Transformer, arm: Arm, text: list[int]) -> dict:
    """--requests of them, 32 to 2,000 tokens long, short ones as likely as long ones, half of a request its prompt:
    through all lanes, and one after the other."""
    draw = random.Random(0)
    lengths = [round(math.exp(draw.uniform(math.log(32), math.log(2000)))) for _ in range(args.requests)]
    lengths = [min(n, model.args.max_seq_len) for n in lengths]
    took, engines = {}, {n: Engine(model, arm.relative(), n, max(lengths)) for n in (1, args.max_batch)}
    for n, engine in engines.items():
        engine.generate([piece(text, 31 * i, 40) for i in range(n)], Params(8))
        engine.reset()
        progress(f"{arm}: {args.requests} requests, {n} at a time")
        began = time.perf_counter()
        for i, total in enumerate(lengths):
            engine.submit(piece(text, 7919 * i, total // 2), Params(total - total // 2))
        while engine.unfinished:
            engine.step()
        took[n] = time.perf_counter() - began
    engine = engines[args.max_batch]
    return {
        "what": f"{args.requests} requests of 32 to {max(lengths):,} tokens, {args.max_batch} lanes beside one",
        "alone": args.requests / took[1],
        "together": args.requests / took[args.max_batch],
        "unit": "requests/s",
        "ratio": took[1] / took[args.max_batch],
        "pages": engine.peak,
        "unused": engine.unused,
    }


def prompts_that_begin_alike(args: argparse.Namespace, model: Transformer, arm: Arm, text: list[int]) -> dict:
    """The time to the first token of a prompt of --shared tokens and a question, read anew and as the second one."""
    shared = min(args.shared, model.args.max_seq_len - 100)
    engine, took = Engine(model, arm.relative(), 1, shared + 100), {True: [], False: []}
    for turn in range(3):
        engine.reset()
        for known in (False, True):
            began = time.perf_counter()
            engine.submit(piece(text, 0, shared) + piece(text, 5003 + 997 * (2 * turn + known), 30), Params(1))
            while engine.unfinished:
                engine.step()
            took[known].append(time.perf_counter() - began)
        progress(f"{arm}: prefixes, turn {turn + 1} of 3")
    anew, again = (statistics.median(took[known]) for known in (False, True))
    return {
        "what": f"first token after {shared:,} + 30 tokens, of which {engine.hit_tokens:,} were found",
        "alone": anew,
        "together": again,
        "unit": "s",
        "ratio": anew / again,
        "pages": None,
        "unused": None,
    }


def serve_lines(rows: list[dict]) -> list[str]:
    columns = {
        "cache": lambda r: r["cache"],
        "what": lambda r: r["what"],
        "without": lambda r: f"{r['alone']:,.2f} {r['unit']}",
        "with": lambda r: f"{r['together']:,.2f} {r['unit']}",
        "ratio": lambda r: f"{r['ratio']:.2f}",
        "pages": lambda r: "-" if r["pages"] is None else f"{r['pages']:,}",
        "unused": lambda r: "-" if r["unused"] is None else f"{r['unused']:.1%}",
    }
    return aligned([list(columns), *([show(r) for show in columns.values()] for r in rows)])


def find_quanto() -> bool:
    try:
        return importlib.util.find_spec("optimum.quanto") is not None
    except ModuleNotFoundError:
        return False


def transformers_twin(model: Transformer, **options) -> nn.Module:
    """`transformers`' own model of the same shape, on the same memory where it can. options: of its config."""
    import transformers

    a = model.args
    family = "Qwen3" if a.qk_norm else "Qwen2" if a.qkv_bias and not a.o_bias else "Llama"
    config = getattr(transformers, f"{family}Config")(
        vocab_size=a.vocab_size,
        hidden_size=a.dim,
        intermediate_size=a.hidden_dim,
        num_hidden_layers=a.n_layer,
        num_attention_heads=a.n_head,
        num_key_value_heads=a.n_kv_head,
        head_dim=a.head_dim,
        max_position_embeddings=a.max_seq_len,
        rms_norm_eps=a.norm_eps,
        rope_parameters={**a.rope_scaling, "rope_theta": a.rope_theta},
        tie_word_embeddings=a.tie_embeddings,
        attention_bias=a.qkv_bias,
        dtype=model.norm.weight.dtype,
        **options,
    )
    with torch.device(model.norm.weight.device):
        twin = getattr(transformers, f"{family}ForCausalLM")(config).to(model.norm.weight.dtype).eval()
    missing, unexpected = twin.load_state_dict(hf_weights(model), strict=False, assign=True)
    twin.tie_weights()
    if unexpected or set(missing) - ({"lm_head.weight"} if a.tie_embeddings else set()):
        raise UsageError(f"--vs transformers: it has no model with {', '.join([*unexpected, *missing])}")
    return twin.requires_grad_(False)


def hf_weights(model: Transformer) -> dict[str, Tensor]:
    """The model's weights under the names, and in the pieces, of a Hugging Face checkpoint."""
    a = model.args
    heads, weights = [n * a.head_dim for n in (a.n_head, a.n_kv_head, a.n_kv_head)], {}
    for name, tensor in model.state_dict().items():
        stem, kind = name.rsplit(".", 1)
        prefix = ""
        if stem.startswith("layers."):
            _, i, stem = stem.split(".", 2)
            prefix = f"model.layers.{i}."
        parts = WEIGHTS[stem][0].split()
        for part, piece in zip(parts, tensor.split(heads) if len(parts) == 3 else [tensor], strict=True):
            weights[f"{prefix}{part}.{kind}"] = piece
    return weights


@torch.no_grad()
def table(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> list[dict]:
    """Quality and speed of every arm on one page: `fidelity`, `needle` and `ruler`, and decode steps in turns."""
    timed = args.steps * (args.rounds + 1)
    if args.context + timed > model.args.max_seq_len:
        raise UsageError(
            f"--context {args.context} and {timed} measured steps (--steps, --rounds) are more than the model's "
            f"{model.args.max_seq_len} positions"
        )
    for arm in args.arms:
        arm.spec(args.context, timed)
    for task in ("needle", "ruler"):
        prepared(args, model, tokenizer, task)
    rows = grid(args, model, tokenizer, "fidelity")
    for row in rows:
        row["task"] = "table"
        for name in ("top1", "gap", "nll"):
            del row[name], row[name + "_error"]
    for task in ("needle", "ruler"):
        for row, other in zip(rows, grid(args, model, tokenizer, task), strict=True):
            row["places"] |= {f"{task} {place}": mean for place, mean in other["places"].items()}
            for protocol in args.protocol:
                row |= {f"{task} {protocol}{end}": other[protocol + end] for end in ("", "_error")}
    for row, result in zip(rows, speeds(args, model, tokenizer), strict=True):
        row |= {"speed": result["speed"], "speed_error": result["error"] or None}
    return rows


def speeds(args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer) -> list[dict]:
    """Of every arm, the speed of decoding after --context tokens relative to the full cache's, in turns with it: the
    median of turns, and its standard error."""
    ids, room = text_of(args, tokenizer)[1][: args.context], args.steps * (args.rounds + 1)
    conditions = {"context": args.context, "steps": args.steps, "rounds": args.rounds, "compiled": model.compiled}
    conditions["threads"] = torch.get_num_threads()
    log, full = Log(args, model, "speed", len(args.arms) - 1), args.arms[0]
    todo = [arm for arm in args.arms[1:] if log.find(arm, conditions) is None]
    for some in batched(todo, args.together):
        log.show(f"speed: {len(some)} caches read {args.context} tokens")
        runs = [Run(model, str(arm), arm.spec(args.context, room), 1, args.context) for arm in [full, *some]]
        for run, layers in zip(runs, read_together(model, ids, room, [run.spec for run in runs])[0], strict=True):
            run.layers, run.step = layers, DecodeStep(model)
            steps(run, args.context, args.steps, args.device)
        take_turns(runs, args)
        turns = [[statistics.median(turn) for turn in batched(run.step_ms, args.steps)] for run in runs]
        for arm, mine in zip(some, turns[1:], strict=True):
            ratios = [usual / ms for usual, ms in zip(turns[0], mine, strict=True)]
            error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
            log.add(arm, conditions, {"speed": statistics.median(ratios), "error": error})
    log.close()
    return [{"speed": 1.0, "error": 0.0}, *(log.find(arm, conditions) for arm in args.arms[1:])]


def batched(items: list, n: int) -> list[list]:
    return [items[i : i + n] for i in range(0, len(items), n)]


# ---------------------------------------------------------------------------------------------------------------------
# Planning: bytes of a model that need not be there


def plan(args: argparse.Namespace, dtype: torch.dtype) -> list[dict]:
    """One dict for every cache on every number of GPUs; bytes are those of one GPU.

    Of weights each GPU has its part of attention and MLP, and all of the embeddings, the head and the norms. A step
    reads weights (of an embedding that is not the head's, too, a row) and cache once, at --gb-s, and waits twice a
    layer for a sum over the GPUs, --latency-us each: a floor, not a promise. While a prompt is read there are one
    layer's keys and values in full as well.
    """
    whole, rows, prompt = read_shape(args.model), [], args.context - args.new_tokens
    if not 0 < prompt < args.context <= whole.max_seq_len:
        raise UsageError(
            f"--context {args.context} with --new-tokens {args.new_tokens}: give more than those, and at most the "
            f"{whole.max_seq_len} positions of {args.model}"
        )
    usual = [n for n in (1, 2, 4, 8) if n in whole.ranks]
    for arm, batch, gpus in itertools.product(args.arms, args.batch, args.gpus or usual):
        shape, spec = whole.shared(gpus, "--gpus"), arm.relative()
        with torch.device("meta"):
            model = Transformer(shape).to(dtype)
        weights = sum(p.nbytes for p in model.parameters())
        cache = batch * spec.nbytes(shape, prompt, args.new_tokens, dtype)
        layer = 2 * shape.n_kv_head * shape.head_dim * dtype.itemsize  # of one token
        full = batch * args.context * layer * shape.n_layer
        waits = 2 * shape.n_layer * args.latency_us / 1e3 if gpus > 1 else 0.0
        ms = (model.step_bytes() + cache) / args.gb_s / 1e6 + waits
        peak = weights + cache + prompt * layer
        rows.append(
            {
                "cache": str(arm),
                "batch": batch,
                "gpus": gpus,
                "weight_bytes": weights,
                "cache_bytes": cache,
                "cache_vs_full": cache / full,
                "peak_bytes": peak,
                "fits": peak <= args.memory_gb * 1e9,
                "step_ms": ms,
                "tok_s": batch * 1e3 / ms,
            }
        )
    return rows


def plan_lines(rows: list[dict]) -> list[str]:
    lines = [["cache", "batch", "GPUs", "weights GB", "cache GB", "of bf16", "peak GB", "fits", "ms", "tok/s"]]
    for row in rows:
        sizes = [f"{row[name] / 1e9:,.2f}" for name in ("weight_bytes", "cache_bytes", "peak_bytes")]
        lines.append(
            [row["cache"], str(row["batch"]), str(row["gpus"]), *sizes[:2], f"{row['cache_vs_full']:.3f}", sizes[2]]
            + ["yes" if row["fits"] else "no", f"{row['step_ms']:.2f}", f"{row['tok_s']:,.0f}"]
        )
    return aligned(lines)


LLAMA3 = dict(vocab_size=128256, rope_theta=5e5, max_position_embeddings=131072)
LLAMA31 = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
QWEN = dict(vocab_size=151936, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True)
SHAPES: dict[str, dict] = {  # what is in the config.json of each, where it is not the default below
    "smollm2-135m": dict(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_theta=1e5,
        tie_word_embeddings=True,
    ),
    "smollm2-1.7b": dict(
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=32,
        intermediate_size=8192,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_theta=1.3e5,
        tie_word_embeddings=True,
    ),
    "tinyllama-1.1b": dict(
        hidden_size=2048,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=5632,
        vocab_size=32000,
        max_position_embeddings=2048,
    ),
    "llama-2-7b": dict(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        intermediate_size=11008,
        vocab_size=32000,
        max_position_embeddings=4096,
    ),
    "llama-3.2-1b": LLAMA3
    | dict(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=8192,
        tie_word_embeddings=True,
        rope_scaling=LLAMA31 | dict(factor=32.0),
    ),
    "llama-3.1-8b": LLAMA3
    | dict(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        rope_scaling=LLAMA31 | dict(factor=8.0),
    ),
    "llama-3-70b": LLAMA3  # of 3.1 and 3.3, that is, which have the positions
    | dict(
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        rope_scaling=LLAMA31 | dict(factor=8.0),
    ),
    "mistral-7b-v0.3": dict(
        model_type="mistral",
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=32768,
        max_position_embeddings=32768,
        rope_theta=1e6,
        sliding_window=None,
    ),
    "qwen2.5-0.5b": QWEN
    | dict(
        model_type="qwen2",
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        max_position_embeddings=32768,
    ),
    "qwen3-0.6b": QWEN
    | dict(
        model_type="qwen3",
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        max_position_embeddings=40960,
    ),
}
DEFAULTS = dict(model_type="llama", rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=False)


def read_shape(name: str) -> ModelArgs:
    """Of a model that is known by name, or of any config.json."""
    if name in SHAPES:
        return ModelArgs.from_hf(DEFAULTS | SHAPES[name])
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        known = f"{caches.either(SHAPES)}, or the path of a config.json"
        raise UsageError(f"--model {name}: no such model{caches.near(name, SHAPES)}; give {known}")
    try:
        return ModelArgs.from_hf(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"--model {path}: {' '.join(str(error).split())[:200]}; give the config.json of a model"
        ) from None


# ---------------------------------------------------------------------------------------------------------------------
# The edge


def text_of(args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """What --text is, and its tokens. Results go by that name, so it changes with what is in the files."""
    if not args.text:
        return f"pydoc_data.topics of Python {sys.version.split()[0]}", tokenizer.encode(sample_text())
    text = "\n\n".join(map(read_text, args.text))
    return f"{', '.join(map(str, args.text))} (CRC {zlib.crc32(text.encode()):08x})", tokenizer.encode(text)


@functools.cache
def sample_text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--text {path}: not UTF-8 (byte {error.start}); convert it first") from None


def cache_names(text: str) -> list[str]:
    """Policies by commas; a comma between two arguments of one, as in h2o:recent=9,sink=2, is not one of those."""
    return re.split(r",(?![^,:]*=)", text)


def widths(text: str) -> list[int | str]:
    """Bits by commas; that between k= and v= is not one of those."""
    return [int(item) if item.isdecimal() else item for item in re.split(r",(?!v=)", text)]


TASKS = {  # what runs, what prints its rows, what draws them
    "ppl": (grid, grid_lines, plot_grid),
    "fidelity": (grid, grid_lines, plot_grid),
    "needle": (grid, grid_lines, plot_needle),
    "ruler": (grid, grid_lines, plot_grid),
    "longbench": (grid, grid_lines, plot_grid),
    "table": (table, grid_lines, plot_grid),
    "health": (look, health_lines, plot_health),
    "map": (look, map_lines, plot_map),
    "bench": (bench, bench_lines, None),
    "profile": (profile, profile_lines, None),
    "serve": (serve, serve_lines, None),
    "plan": (plan, plan_lines, None),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    def listed(kind):
        def items(text: str) -> list:
            return list(dict.fromkeys(kind(item) for item in text.split(",")))

        items.__name__ = "list of numbers"  # what argparse calls it
        return items

    p = Parser(prog="eval.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("task", choices=list(TASKS))
    p.add_argument("--checkpoint", default="smollm2", help="smollm2, a Hub id, a directory or a .gguf file")
    p.add_argument(
        "--cache", type=cache_names, default=["pyramid"], help="policies, by commas (pyramid); help explains"
    )
    p.add_argument(
        "--budget", type=listed(number), help="slots or fractions, by commas (1.0,0.5,0.25; bench, profile 0.2)"
    )
    p.add_argument("--bits", type=widths, help="16, 8, 4, 2 or k=4,v=2, by commas (16,4; for map 16)")
    p.add_argument(
        "--format", nargs="+", default=["auto"], help="int, nvfp4, .., one or more; generate.py explains them"
    )
    p.add_argument("--select", type=listed(number), default=[], help="also with so many tokens read a step, by commas")
    p.add_argument("--threads", type=int, help="CPU threads")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")
    p.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="of the model")
    p.add_argument(
        "--weights", choices=["int8"], help="of 8 bits, with a scale for 64 of an output channel; else as --dtype"
    )
    p.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    g = p.add_argument_group("ppl, fidelity, needle, ruler, longbench, table")
    g.add_argument("--out", type=Path, help="JSONL to which every result is added; what is there is not done again")
    g.add_argument(
        "--together", type=int, default=32, help="how many caches read a prompt at once; 1 takes least memory"
    )
    g.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="the decode step (yes)")
    g = p.add_argument_group("ppl, fidelity, needle, ruler, longbench, table, health, map")
    g.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the table (needs matplotlib)")
    g = p.add_argument_group("ppl, fidelity, table, health, map")
    g.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="instead of Python's manual, which needle and ruler always use",
    )
    g = p.add_argument_group("ppl, fidelity, table, health, map, plan")
    g.add_argument("--context", type=int, default=3500, help="tokens that are compressed; plan: all of a text (3500)")
    g = p.add_argument_group("ppl, fidelity, table")
    g.add_argument("--score", type=int, default=128, help="tokens that are then read one by one (128)")
    g.add_argument("--windows", type=int, default=4, help="pieces of text, one after the other (4)")
    g = p.add_argument_group("needle, ruler, longbench, table")
    g.add_argument("--length", type=listed(int), help="tokens of text, by commas (1000,3500); longbench: what fits")
    g.add_argument("--protocol", type=listed(str), help="where the question stands: inside,after; longbench: inside")
    g.add_argument("--samples", type=int, help="for each length and place (2); for each task of longbench (all)")
    g.add_argument(
        "--answer", type=int, help="tokens of an answer (needle 16, ruler 48, its common words 120, longbench its own)"
    )
    g = p.add_argument_group("needle, ruler, table")
    g.add_argument("--seed", type=int, default=0, help="of texts and questions (0)")
    g = p.add_argument_group("needle, table")
    g.add_argument(
        "--depth", type=listed(float), default=[0.1, 0.5, 0.9], help="where, 0 to 1, by commas (0.1,0.5,0.9)"
    )
    g = p.add_argument_group("longbench")
    g.add_argument("--data", type=Path, help="directory or zip with its JSONL files; without it, from the Hub")
    g = p.add_argument_group("bench, profile, serve")
    g.add_argument("--prompt-tokens", type=listed(int), help="lengths, by commas (128,4096; for serve 1000)")
    g = p.add_argument_group("bench, serve")
    g.add_argument("--page-size", type=listed(int), default=[0], help="slots of a page, by commas; 0: none (0)")
    g = p.add_argument_group("serve")
    g.add_argument("--max-batch", type=int, default=8, help="lanes (8)")
    g.add_argument("--requests", type=int, default=64, help="of all lengths (64)")
    g.add_argument("--shared", type=int, default=2000, help="tokens that prompts have in common (2000)")
    g = p.add_argument_group("bench")
    g.add_argument(
        "--offload", type=listed(str), default=["none"], help="none, cpu, disk or disk:DIR, by commas (none)"
    )
    g.add_argument("--prefills", type=int, default=1, help="how often every prompt is read (1)")
    g.add_argument("--vs", choices=["transformers"], help="also its caches, with the same weights")
    g = p.add_argument_group("bench, plan")
    g.add_argument("--batch", type=listed(int), default=[1], help="sequences at a time, by commas (1)")
    g = p.add_argument_group("plan")
    g.add_argument("--model", default="llama-3-70b", help=f"{caches.either(SHAPES)}, or a config.json (llama-3-70b)")
    g.add_argument("--gpus", type=listed(int), default=[], help="that share it, by commas (1,2,4,8, if heads divide)")
    g.add_argument("--new-tokens", type=int, default=256, help="of --context, that are written (256)")
    g.add_argument("--memory-gb", type=float, default=141.0, help="of a GPU (141, an H200's)")
    g.add_argument("--gb-s", type=float, default=4800.0, help="its memory's bandwidth (4800, an H200's)")
    g.add_argument("--latency-us", type=float, default=10.0, help="of a sum over all GPUs, an assumption (10)")
    g = p.add_argument_group("bench, profile, serve, table")
    g.add_argument("--steps", type=int, default=15, help="decode steps a turn (15)")
    g.add_argument("--rounds", type=int, default=8, help="turns of every row (8)")
    args = p.parse_args(argv)
    for flag, text in {"cache": caches.describe, "format": caches.describe_formats}.items():
        if getattr(args, flag) == ["help"]:
            print(text())
            p.exit()
    for group in p._action_groups[2:]:  # none is silently ignored
        for action in group._group_actions:
            if args.task not in group.title.split(", ") and getattr(args, action.dest) != action.default:
                flag = action.option_strings[getattr(args, action.dest) is False and -1]  # --no-compile, if that
                raise UsageError(f"{flag}: only for {group.title}, not for {args.task}")
    if args.budget is not None and set(args.cache) == {"full"}:
        raise UsageError(f"--budget {','.join(map(str, args.budget))}: full keeps every token; name another --cache")
    defaults = {
        "budget": [0.2] if args.task in ("bench", "profile", "serve", "plan") else [1.0, 0.5, 0.25],
        "samples": 2,
    }
    defaults |= {
        "bits": [16] if args.task == "map" else [16, 4],
        "length": [1000, 3500],
        "protocol": ["inside", "after"],
        "prompt_tokens": [1000] if args.task == "serve" else [128, 4096],
    }
    if args.task == "longbench":
        defaults |= {"length": [None], "protocol": ["inside"], "samples": None}
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name, value in vars(args).items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1 and name != "seed":
            raise UsageError(f"--{name} {value}: give 1 or more")
    for name in ("memory_gb", "gb_s", "latency_us"):
        if not 0 < getattr(args, name) < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name):g}: give a number above 0")
    if args.task == "plan":
        no = {"--checkpoint": "smollm2", "--select": [], "--weights": None, "--threads": None, "--device": "auto"}
        for flag in [flag for flag, usual in no.items() if getattr(args, flag[2:]) != usual]:
            raise UsageError(f"{flag}: not for plan, which loads nothing and counts what a step reads of a cache: all")
    for name in ("prompt_tokens", "length", "batch", "gpus"):
        if getattr(args, name) not in ([], [None]) and (least := min(getattr(args, name))) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {least}: give 1 or more")
    if args.task == "longbench" and len(args.length) > 1:
        raise UsageError(f"--length {','.join(map(str, args.length))}: give one, the most tokens of a prompt")
    for depth in args.depth:
        if not 0 <= depth <= 1:
            raise UsageError(f"--depth {depth}: give numbers from 0, the beginning, to 1, the end")
    for protocol in args.protocol:
        if protocol not in ("inside", "after"):
            raise UsageError(f"--protocol {protocol}: choose inside, after or both by a comma")
    if args.out:
        check_writable(args.out, "--out")
        if args.out.exists() and not args.out.is_file():
            raise UsageError(f"--out {args.out}: is no regular file; give a name for one")
        read_results(args.out)
    if args.plot:
        check_writable(args.plot, "--plot")
        if args.plot.suffix not in (".png", ".svg", ".pdf"):
            raise UsageError(f"--plot {args.plot}: give a name that ends in .png, .svg or .pdf")
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError(f"--plot {args.plot}: matplotlib is not installed; pip install matplotlib, or drop --plot")
    if args.vs and args.weights:
        raise UsageError(f"--weights {args.weights} with --vs transformers: its models have no such weights; drop one")
    if args.vs and importlib.util.find_spec("transformers") is None:
        raise UsageError("--vs transformers: it is not installed; pip install transformers, or drop --vs")
    args.device = pick_device(args.device)
    args.arms = [Arm("full", None, 16)]
    wanted = {bits: {*map(str, caches.apart("--bits", bits))} for bits in args.bits}
    offered = {name: {*map(str, store.widths)} for name, store in caches.FORMATS.items()}
    for name, form, bits in itertools.product(args.cache, args.format, args.bits):
        own = offered.get(form.partition(":")[0], wanted[bits])
        if not wanted[bits] <= own and wanted[bits] <= set().union(*offered.values()):  # of a grid, what there is
            if not any(some <= own for some in wanted.values()):
                raise UsageError(
                    f"--format {form}: has {caches.either(sorted(own, key=int, reverse=True))} bits, none of --bits"
                )
            continue
        for budget in [None] if name == "full" else args.budget:
            for page, select, away in itertools.product(args.page_size, [None, *args.select], args.offload):
                arm = Arm(name, budget, bits, form, page, select, away)
                arm.relative()  # what is wrong with it is said before a model is loaded
                if arm not in args.arms:
                    args.arms.append(arm)
    if args.task == "serve" and any(arm.page for arm in args.arms):
        args.arms = [arm for arm in args.arms if arm.page]  # an engine has no lanes without pages
    args.prompt_tokens.sort()
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on `exit_code` says what it means
    sys.exit(main())
