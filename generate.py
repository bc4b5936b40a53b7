"""generate.py: run a model from the command line, with any cache.

    python generate.py --cache pyramid --bits 4

Top to bottom: `main` reads the flags; `Saved` and `PrefixStore` are what outlives a process; `generate` is the loop for
one sequence, with sampling, the decode step and stop strings; `Engine` is the one for many; then the reports. Left out:
beam search, speculative decoding, serving over a network.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

STARTED = time.perf_counter()
if __name__ == "__main__":  # while Python imports, an interrupt is no error with a traceback
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import cache as caches  # noqa: E402
import kernels  # noqa: E402
from model import PREFILL_CHUNK, CheckpointError, Tokenizer, Transformer, TransformerBlock, load_checkpoint  # noqa: E402

EMPTY = "the prompt is empty; give --prompt TEXT, or --prompt-file FILE with some text in it"


class UsageError(ValueError):
    """A flag that cannot be obeyed: one sentence that names it, what was given and what would work."""


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 2 for a wrong input, 130 when interrupted."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop

    def work() -> int:
        args = parse(argv)
        kernels.join_ranks(args.device)
        with open(os.devnull, "w") as nobody, contextlib.redirect_stderr(nobody if args.quiet else sys.stderr):
            return chat(args) if args.interactive else serve(args) if args.batch else run(args)

    silent = kernels.started()[0] > 0  # of several processes that share a model, the first speaks
    with contextlib.ExitStack() as stack:
        if silent:
            nobody = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nobody))
            stack.enter_context(contextlib.redirect_stderr(nobody))
        code = exit_code("generate.py", work)
    kernels.leave_ranks(code)
    return code


def exit_code(program: str, work: Callable[[], int]) -> int:
    """What work returns; for what a person can get wrong, one sentence on stderr and 2; 130 when interrupted."""
    try:
        return work()
    except (CheckpointError, caches.SpecError, UsageError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except kernels.LostRank as error:
        print(f"{program}: {error}", file=sys.__stderr__)  # also of a process that is to be silent otherwise
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has gone, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0 if kernels.RANKS == 1 else 128 + signal.SIGPIPE  # the others have to hear that it ends here
    except OSError as error:
        print(f"{program}: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """One prompt: text to stdout as it comes, the report to stderr, and to a file with --json."""
    prompt, note = read_prompt(args)
    model, tokenizer = load(args)
    talk = Conversation(args, tokenizer)
    ids = talk.next(prompt)
    check_length(args, model, talk.seen + len(ids), args.max_new_tokens)
    check_memory(args, model, talk.seen + len(ids), args.max_new_tokens)
    model.setup_caches(args.spec, 1, talk.seen + len(ids) + args.max_new_tokens)
    talk.restore(model)
    if note:
        print(note, file=sys.stderr)
    report = Report(args, model, tokenizer)
    for text in report.stream(ids, talk.seen):
        print(text, end="", flush=True)
    print()
    talk.answered(report)
    if args.save_cache:
        talk.save(args.save_cache, model)
    print(report, file=sys.stderr)
    if args.json:
        write_json(args.json, report.data())
    return 0


def serve(args: argparse.Namespace) -> int:
    """Several prompts, or samples of one: a line of JSON for each on stdout, in their order, the report to stderr."""
    model, tokenizer = load(args)
    lines, prompts, seen = [], [], args.saved.said["seen"] if args.saved else 0
    for i, line in enumerate(args.batch):
        try:
            params = Params(**{**vars(args.params), **line["params"]}, stop_ids=tuple(tokenizer.eos_ids))
            prompts.append(Conversation(args, tokenizer).next(line["prompt"]))
            check_length(args, model, seen + len(prompts[-1]), params.max_new_tokens)
        except UsageError as error:
            raise UsageError(f"prompt {i + 1}: {error}") from None
        lines.append(params)
    longest = seen + max(len(ids) + params.max_new_tokens for ids, params in zip(prompts, lines, strict=True))
    lanes = min(args.max_batch, len(prompts) * args.num_samples)
    prefix = args.prefix and not args.saved
    engine = Engine(model, args.spec, lanes, longest, args.pages, args.prefill_layers, prefix, args.store)
    document = engine.load(args.saved) if args.saved else None
    report = Service(args, engine, tokenizer)
    for i, (ids, params) in enumerate(zip(prompts, lines, strict=True)):
        try:
            report.submit(ids, params, args.num_samples, document)
        except UsageError as error:
            raise UsageError(f"prompt {i + 1}: {error}") from None
    for answer in report.answers():
        print(json.dumps(answer, ensure_ascii=False), flush=True)
    print(report, file=sys.stderr)
    if args.json:
        write_json(args.json, report.data())
    return 0


def check_length(args: argparse.Namespace, model: Transformer, prompt: int, new: int) -> None:
    left = model.args.max_seq_len - prompt
    if new > left and not args.spec.endless:
        raise UsageError(
            f"--max-new-tokens {new} after a prompt of {prompt} tokens is more than the model's "
            f"{model.args.max_seq_len} positions; "
            + (f"at most {left} fit" if left >= 0 else f"shorten the prompt by {new - left} tokens")
            + ", or choose --cache streaming, whose text has no end"
        )


def check_memory(args: argparse.Namespace, model: Transformer, prompt: int, new: int) -> None:
    """Refuses a text whose cache, or whose reading, will not fit, before any of it is allocated."""
    shape, weight, has = model.args, model.norm.weight, kernels.free_memory(model.norm.weight.device)
    heads = 2 * (shape.n_head + shape.n_kv_head) * shape.head_dim  # queries, keys, values and what is read, of a layer
    once = min(prompt, PREFILL_CHUNK) * 3 * shape.hidden_dim
    reading = (prompt * (heads + 3 * shape.dim) + once) * weight.itemsize

    def need(spec: caches.CacheSpec) -> int:
        kept = spec.nbytes(shape, prompt, new, weight.dtype) if spec.offload == "none" else 0
        return kept + reading

    if kernels.all_agree(need(args.spec) <= has):
        return
    advice = "shorten the prompt, or --max-new-tokens"
    for name, budget in ((args.spec.name, args.budget), caches.SMALL):
        for bits in (2, 4, 8):
            if need(caches.build(name, budget=budget, bits=bits, residual=args.residual)) <= has:
                advice = f"try --cache {name}{'' if budget is None else f' --budget {budget}'} --bits {bits}"
        if advice.startswith("try"):
            break
    raise UsageError(
        f"--cache {args.spec.name}: {prompt + new} tokens take {size(need(args.spec))}, {size(reading)} of them only "
        f"while the prompt is read, and {size(has)} are free; {advice}"
    )


def size(n: float) -> str:
    return f"{n / 1e9:,.2f} GB" if n >= 1e8 else f"{n / 1e6:,.2f} MB"


def chat(args: argparse.Namespace) -> int:
    """A conversation. Every turn goes on from the cache that the turns before have left: nothing is read twice."""
    model, tokenizer = load(args)
    if not tokenizer.has_chat_template:
        raise UsageError("--interactive needs a checkpoint with a chat template; this one has none, use --prompt --raw")
    limit = caches.LONGEST if args.spec.endless else model.args.max_seq_len
    check_memory(args, model, min(limit, model.args.max_seq_len), 0)
    model.setup_caches(args.spec, 1, limit)
    talk, report = Conversation(args, tokenizer), Report(args, model, tokenizer)
    talk.restore(model)
    print("Type a message; an empty line or Ctrl-D ends.", file=sys.stderr)
    while line := read_line():
        ids = talk.next(line)
        left = limit - talk.seen - len(ids)
        if left < 1:
            talk.messages.pop()
            print(f"[{len(ids)} tokens are {1 - left} more than still fit; say it shorter, or end]", file=sys.stderr)
            continue
        for text in report.stream(ids, talk.seen, min(args.max_new_tokens, left)):
            print(text, end="", flush=True)
        print()
        talk.answered(report)
    if args.save_cache:
        talk.save(args.save_cache, model)
    if report.seen:
        print(report, file=sys.stderr)
        if args.json:
            write_json(args.json, report.data())
    return 0


class Conversation:
    """Where a text stands between turns, in this process or, as a file with its cache, between two of them.

    A file is a safetensors: what `KVCache.state` gives of every layer, and as JSON where the text stands, what cache it
    is, of which model, and a checksum of all of it.
    """

    VERSION = 1

    def __init__(self, args: argparse.Namespace, tokenizer: Tokenizer):
        self.args, self.tokenizer, self.saved = args, tokenizer, args.saved
        said = self.saved.said if self.saved else {"messages": system(args), "seen": 0, "unread": [], "tokens": ""}
        self.messages, self.seen, self.unread, self.tokens = (said[k] for k in ("messages", "seen", "unread", "tokens"))
        self.messages = [*self.messages]  # another one may go on from the same file

    def next(self, text: str) -> list[int]:
        """The tokens that come next: those of an answer that were not read yet, and text as a message, if this is a
        chat."""
        if not text:
            raise UsageError(EMPTY)
        if not self.args.chat:
            ids = self.unread + self.tokenizer.encode(text, bos=not self.seen)
        else:
            before = self.tokenizer.chat(self.messages, add_generation_prompt=False) if self.seen else []
            self.messages.append({"role": "user", "content": text})
            ids = self.tokenizer.chat(self.messages)
            if self.seen:  # what the template puts after an answer, such as its end of turn, has not been read yet
                # Ends of turns are counted: a template may shorten earlier answers, by what the model thought.
                ends, turns = ([i for i, id in enumerate(x) if id in self.tokenizer.eos_ids] for x in (ids, before))
                ids = self.unread + ids[ends[len(turns) - 1] if 0 < len(turns) <= len(ends) else len(before) :]
        if not ids:
            raise UsageError(EMPTY)
        self.read = ids
        return ids

    def answered(self, report: "Report") -> None:
        """A turn is over."""
        read = self.read + report.answer
        self.tokens = caches.chained(self.tokens.encode(), tuple(read[: report.seen - self.seen])).hex()
        self.seen, self.unread = report.seen, report.unread
        if self.args.chat:
            self.messages.append({"role": "assistant", "content": report.answered})
            if self.args.spec.endless:  # a template need not see all of a text without end to say what comes next
                del self.messages[self.messages[0]["role"] == "system" : -2]

    def restore(self, model: Transformer) -> None:
        """The model's caches hold what the file says, if there is one."""
        if self.saved:
            self.saved.check(model, self.args.spec)
            self.saved.restore([layer.attention.cache for layer in model.layers])

    def save(self, path: Path, model: Transformer) -> None:
        said = {name: getattr(self, name) for name in ("messages", "seen", "unread", "tokens")}
        layers = [layer.attention.cache for layer in model.layers]
        Saved.write(path, model, self.args.spec, layers, said, self.args.chat)


class Saved:
    """A file that `write` wrote, read and checked."""

    HEADER = ("version", "model", "cache", "said", "chat")

    def __init__(self, path: Path):
        self.name = name = f"--load-cache {path}"
        began = time.perf_counter()
        try:
            text, self.tensors = self.read(path)
        except OSError as error:
            raise UsageError(f"{name}: {error.strerror or error}") from None
        except ValueError as error:
            raise UsageError(f"{name}: damaged, or not what --save-cache writes ({error}); make it anew") from None
        try:
            header = json.loads(text)
            version, self.model, self.cache, self.said, self.chat = map(header.__getitem__, self.HEADER)
        except (ValueError, TypeError, KeyError, AttributeError):
            version = None  # whoever made it, and a checksum for it
        if version != Conversation.VERSION:
            raise UsageError(
                f"{name}: of format {version}, and this program reads {Conversation.VERSION}; make it anew"
            )
        self.seconds = time.perf_counter() - began  # that it took to read, and then to put in place

    @classmethod
    def write(
        cls,
        path: Path,
        model: Transformer,
        spec: caches.CacheSpec,
        layers: list[caches.KVCache],
        said: dict,
        chat: bool,
    ) -> None:
        """All or nothing: whatever happens, path is what it was before or this. layers: caches of one sequence."""
        from safetensors.torch import save_file

        states = [cache.state() for cache in layers]
        tensors = {f"{i}.{name}": x.cpu().contiguous() for i, s in enumerate(states) for name, x in s.items()}
        header = Conversation.VERSION, fingerprint(model), spec.given, said, chat
        text = json.dumps(dict(zip(cls.HEADER, header, strict=True)))
        with all_or_nothing(path.resolve()) as part:
            save_file(tensors, part, {"kv-fast": text, "checksum": cls.checksum(text, tensors)})
            with open(part, "rb+") as file:
                os.fsync(file.fileno())

    def check(self, model: Transformer, spec: caches.CacheSpec) -> None:
        """Raises UsageError for a file of another model or cache than these."""
        if self.model != fingerprint(model):
            raise UsageError(
                f"{self.name}: it is of another model, or of these weights in another --dtype or --weights"
            )
        theirs, ours = (" ".join(map(str, given)) for given in (self.cache, spec.given))
        if theirs != ours:
            raise UsageError(f"{self.name}: its cache, budget, bits, format and residual are {theirs}, here {ours}")

    def restore(self, layers: list[caches.KVCache]) -> None:
        """Caches of one sequence hold what the file says; raises UsageError where that does not fit."""
        began = time.perf_counter()
        try:
            for i, cache in enumerate(layers):
                cache.restore({k: x.to(cache.slot_pos.device) for k, x in self.layer(i).items()})
        except (ValueError, KeyError, RuntimeError) as error:
            raise UsageError(f"{self.name}: its layer {i} does not fit this cache ({error}); make it anew") from None
        self.seconds += time.perf_counter() - began

    @classmethod
    def read(cls, path: Path) -> tuple[str, dict[str, Tensor]]:
        """The text and the tensors of a file. Raises OSError, and ValueError if it is not what was written."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, RuntimeError) as error:  # RuntimeError: it was there, and another process removed it
            raise ValueError(str(error)) from None
        text = about.get("kv-fast", "")
        if about.get("checksum") != cls.checksum(text, tensors):
            raise ValueError("its checksum is wrong")
        return text, tensors

    @staticmethod
    def checksum(text: str, tensors: dict[str, Tensor]) -> str:
        sum = hashlib.blake2b(text.encode(), digest_size=16)
        for name in sorted(tensors):
            x = tensors[name]
            sum.update(f"{name} {x.dtype} {[*x.shape]}".encode())
            sum.update(x.reshape(-1).view(torch.uint8).numpy())
        return sum.hexdigest()

    def layer(self, i: int) -> dict[str, Tensor]:
        start = f"{i}."
        return {name.removeprefix(start): x for name, x in self.tensors.items() if name.startswith(start)}


class PrefixStore:
    """Prefixes that outlive the process (after LMCache, 2510.09665): a directory with a file for each block of tokens.

    A file is named by the block's hash. It is a safetensors of what the block holds in all layers and heads, with salt,
    parent and tokens as JSON, and a checksum; one that is not what its name says is removed. Processes may share a
    directory: a file is there whole or not at all, and one that has vanished is not found.
    """

    VERSION = 1  # of what is in a file
    GIGABYTES = 10.0

    def __init__(self, path: Path, gigabytes: float = GIGABYTES):
        """gigabytes: beyond them, those files go that were used least recently. Raises OSError where path is not, and
        cannot become, a directory to write to."""
        self.path, self.limit, self.failed = path.resolve(), gigabytes * 1e9, ""
        self.path.mkdir(parents=True, exist_ok=True)
        probe = part_file(self.path / "probe")
        probe.touch()
        probe.unlink()

    def load(self, layers: list, found: list[caches.Block], tokens: list[int], most: int) -> list[caches.Block]:
        """found, then those of the first `most` blocks of a text that follow it here, in pages claimed for them.
        layers: the caches of one sequence that are to begin with them."""
        pool, pages, found = layers[0].layout.pool, len(layers) * layers[0].layout.heads, [*found]
        for text in pool.prefixes.split(tokens)[len(found) : most]:
            block = pool.prefixes.block(found, text, [], lambda: caches.first_tokens(layers, 0))
            content = self.read(block, pool, pages)
            if content is None:
                break
            block.pages = pool.claim(pages)
            pool.fill(block, content)
            found.append(block)
        return found

    def read(self, block: caches.Block, pool: caches.Pool, pages: int) -> dict[str, Tensor] | None:
        """What `Pool.content` gave of a block of so many pages, if it is here."""
        path = self.file(block)
        try:
            text, content = Saved.read(path)
        except OSError:
            return None
        except ValueError:
            text, content = "", {}
        shapes = {name: (x.dtype, (*x.shape,)) for name, x in content.items()}
        if text == self.about(block, pool) and shapes == pool.shapes(block, pages):
            return content
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def save(self, pool: caches.Pool, blocks: list[caches.Block]) -> None:
        """Writes those of a text's blocks that are not here, and marks all of them as used, the first as the latest: a
        text without its beginning is not found. A full disk is no error, but `failed` says so."""
        from safetensors.torch import save

        now, wrote = time.time_ns(), False
        try:
            for i, block in enumerate(blocks):
                path, used = self.file(block), (now - 1000 * i,) * 2
                if path.exists():
                    with contextlib.suppress(OSError):  # gone meanwhile, or another user's
                        os.utime(path, ns=used)
                    continue
                text, content, wrote = self.about(block, pool), pool.content(block), True
                with all_or_nothing(path) as part:
                    part.write_bytes(save(content, {"kv-fast": text, "checksum": Saved.checksum(text, content)}))
                    os.utime(part, ns=used)
            if wrote:
                self.trim()
        except OSError as error:
            self.failed = error.strerror or str(error)

    def trim(self) -> None:
        """Removes what is beyond the limit, and what a process that was killed has left half-written."""
        files = []
        for entry in os.scandir(self.path):
            with contextlib.suppress(OSError):  # another process removes files, too
                stat = entry.stat()
                if entry.name.endswith(".kv-fast"):
                    files.append((stat.st_mtime_ns, stat.st_size, entry.path))
                elif entry.name.startswith(PART) and time.time() - stat.st_mtime > 3600:
                    os.unlink(entry.path)
        excess = sum(size for _, size, _ in files) - self.limit
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            excess -= size
            with contextlib.suppress(OSError):
                os.unlink(path)

    def file(self, block: caches.Block) -> Path:
        return self.path / f"{block.key.hex()}.kv-fast"

    @staticmethod
    def about(block: caches.Block, pool: caches.Pool) -> str:
        """What a hash stands for: it only says where to look."""
        return json.dumps([pool.prefixes.salt.decode(), block.parent.key.hex() if block.parent else "", block.tokens])


def salt(model: Transformer, spec: caches.CacheSpec) -> bytes:
    """What the numbers of a prefix depend on besides its tokens; the same in every process."""
    return f"{PrefixStore.VERSION} {fingerprint(model)} {spec.identity}".encode()


def fingerprint(model: Transformer) -> str:
    """Of a model's shape, dtype and weights: of each of those some rows."""
    sum = hashlib.blake2b(repr(model.args).encode(), digest_size=16)
    for name, p in sorted(model.named_parameters()):
        sum.update(f"{name} {p.dtype} {[*p.shape]}".encode())
        sum.update(p.detach().reshape(-1)[:: max(p.numel() // 64, 1)][:64].contiguous().cpu().view(torch.uint8).numpy())
    return sum.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# The loop


@torch.no_grad()
def generate(
    model: Transformer,
    ids: list[int],
    max_new_tokens: int,
    *,
    start: int = 0,
    stop_ids: tuple[int, ...] = (),
    sample: Callable[[Tensor], Tensor] | None = None,
    on_event: Callable[[str], None] = lambda name: None,
) -> Iterator[int]:
    """Token ids that follow ids, a prompt from position `start` on; a stop id is yielded, and is the last.

    model has caches (`setup_caches`). sample: logits [1,V] -> token [1], greedy by default. on_event is told
    "prefill", "first step" (it compiles, and the next one is recorded) and "step" when each of them has finished.
    """
    device = model.norm.weight.device
    logits = model.prefill(torch.tensor([ids], device=device), start, max_new_tokens)
    yield from decode(model, logits, start + len(ids), max_new_tokens, stop_ids, sample, on_event)


@torch.no_grad()
def decode(
    model: Transformer,
    logits: Tensor,
    seen: int,
    max_new_tokens: int,
    stop_ids: tuple[int, ...] = (),
    sample: Callable[[Tensor], Tensor] | None = None,
    on_event: Callable[[str], None] = lambda name: None,
) -> Iterator[int]:
    """The second half of `generate`: logits [1,V] are those after the `seen` tokens that the caches have been told."""
    sample = sample or greedy
    tok = sample(logits)
    pos = torch.full((1, 1), seen, device=logits.device)
    step = DecodeStep(model)
    for i in range(max_new_tokens):
        id = int(tok)  # the one moment of a step when the host waits for the device
        if i == 0:
            on_event("prefill")
        yield id
        if id in stop_ids or i + 1 == max_new_tokens:
            return
        tok = sample(step(tok[:, None], pos)[:, 0])
        pos += 1
        on_event("step" if i > 1 else "first step")
    on_event("prefill")


class DecodeStep:
    """`model(tok, pos)` for one sequence that goes on: from the third step of a compiled model on, a replay.

    Buffers keep their addresses while a sequence decodes, so the second step is recorded (one CUDA graph on a GPU, the
    list of compiled kernels on a CPU) and later steps run it again on new inputs. The first step compiles.
    """

    def __init__(self, model: Transformer):
        self.model, self.steps, self.again = model, 0, None

    def __call__(self, tok: Tensor, pos: Tensor) -> Tensor:
        """tok [B,1], pos [B,1] -> logits [B,1,V], which the next call overwrites."""
        self.steps += 1
        if self.again is not None:
            self.x.copy_(self.model.tok_embeddings(tok))
            self.rope.copy_(self.model.rope(pos))
            self.pos.copy_(pos)
            self.again()
            return self.logits
        # Layers that come and go between a step's kernels are waited for, which is no kernel.
        layouts = [getattr(layer.attention.cache, "layout", None) for layer in self.model.layers]
        staged = any(isinstance(layout, caches.Staged) for layout in layouts)
        if not self.model.compiled or self.steps != 2 or staged:
            return self.model(tok, pos)
        self.x, self.rope, self.pos = self.model.tok_embeddings(tok), self.model.rope(pos), pos.clone()
        return self.record_cuda() if tok.is_cuda else self.record_cpu()

    def record_cuda(self) -> Tensor:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # runs nothing
            self.logits = self.model.trunk(self.x, self.rope, self.pos)
        self.again = graph.replay
        graph.replay()
        return self.logits

    def record_cpu(self) -> Tensor:
        """Does the step, and then once more from the record: unless all came out the same, there will be no replay."""
        state = [b for layer in self.model.layers for b in layer.attention.cache.bookkeeping()]
        before = [b.clone() for b in state]
        with kernels.recorded() as calls:
            self.logits = self.model.trunk(self.x, self.rope, self.pos)
        constants = [x for m in self.model.modules() for x in vars(m).values() if isinstance(x, Tensor)]
        lasting = [*self.model.parameters(), *self.model.buffers(), *constants, self.x, self.rope, self.pos]
        kernels.share_scratch(calls, lasting)
        logits, after = self.logits.clone(), [b.clone() for b in state]
        for buffer, old in zip(state, before, strict=True):
            buffer.copy_(old)
        spoiled = kernels.spoil(calls, lasting)
        self.logits.fill_(float("nan"))
        again = kernels.ready(calls)
        replay(again)
        same = torch.equal(logits, self.logits) and all(map(torch.equal, state, after))
        if kernels.all_agree(same):
            self.again = functools.partial(replay, again)
            return logits
        for buffer, old in [*zip(state, before, strict=True), *spoiled]:
            buffer.copy_(old)
        return self.model.trunk(self.x, self.rope, self.pos)  # what that replay wrote is written again


def replay(calls: list[Callable]) -> None:
    for call in calls:
        call()


def greedy(logits: Tensor) -> Tensor:
    """logits [B,V] -> token [B]. In float32, which a CPU has vectors for."""
    return logits.float().argmax(-1)


def sampler(
    temperature: float, top_k: int | None, top_p: float | None, seed: int, device
) -> Callable[[Tensor], Tensor]:
    """A function from logits [B,V] to tokens [B]; same seed, same tokens. Temperature 0 is greedy."""
    if temperature == 0:
        return greedy
    generator = torch.Generator(device).manual_seed(seed)

    def sample(logits: Tensor) -> Tensor:
        logits = (logits.float() - logits.amax(-1, keepdim=True)) / temperature  # at most 0: no overflow however cold
        if top_k is not None and top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
        if top_p is not None and top_p < 1:
            sorted_logits, order = logits.sort(-1, descending=True)
            p = sorted_logits.softmax(-1)
            outside = p.cumsum(-1) - p >= top_p  # the tokens before this one hold top_p already
            outside[:, 0] = False
            logits = logits.masked_fill(torch.empty_like(outside).scatter_(-1, order, outside), float("-inf"))
        # argmax of p / Exp(1) draws from p, without the host having to look at a sum.
        noise = torch.empty_like(logits).exponential_(generator=generator)
        return (logits.softmax(-1) / noise).argmax(-1)

    return sample


def until(pieces: Iterator[str], stops: list[str]) -> Iterator[str]:
    """Text up to the first of the stop strings, holding back only what could be the beginning of one."""
    held = ""
    for piece in pieces:
        held += piece
        found = [i for i in map(held.find, stops) if i >= 0]
        if found:
            yield held[: min(found)]
            return
        partial = max((n for stop in stops for n in range(1, len(stop)) if held.endswith(stop[:n])), default=0)
        yield held[: len(held) - partial]
        held = held[len(held) - partial :]
    yield held


# ---------------------------------------------------------------------------------------------------------------------
# The engine: many requests, of different lengths, in the lanes of one compiled step


@dataclass(frozen=True)
class Params:
    """How a request is to be answered; temperature 0 is greedy. stop_ids: tokens that end it, `tokenizer.eos_ids`."""

    max_new_tokens: int = 200
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop_ids: tuple[int, ...] = ()


class Request:
    """One text that is to be continued. Its own sampler, so that its tokens do not depend on its neighbours."""

    def __init__(self, id: int, prompt: list[int], params: Params, after: "Document | None", device):
        self.id, self.prompt, self.params, self.after = id, prompt, params, after
        self.start = after.seen if after else 0  # position of the prompt
        self.sample = sampler(params.temperature, params.top_k, params.top_p, params.seed, device)
        self.tokens: list[int] = []  # generated
        self.told = 0  # how many of those have been told since its prompt was read last
        self.hit = 0  # tokens of the prompt that were found when it was read first
        self.order = 0  # of admission
        self.lane: int | None = None
        self.held: np.ndarray | None = None  # slots [L,H] in use, which grow as tokens are appended, or stay
        self.forked = False  # does it share a page that it writes to next?

    @property
    def cached(self) -> list[int]:
        """The tokens that its lane holds: the newest one was not fed back."""
        return self.prompt + self.tokens[: max(self.told - 1, 0)]


@dataclass(eq=False)
class Document:
    """A saved cache in the pool of an engine, on top of which requests are read.

    They share its full pages if the policy appends. Those that a request may write to, it copies: the last one of each
    head, or with a policy that evicts all of them.
    """

    seen: int  # tokens
    caches: list[caches.KVCache]
    held: np.ndarray  # slots [L,H] in use
    shared: np.ndarray  # pages [L,H], the first ones of each head, that nobody writes to

    @property
    def pages(self) -> int:
        return sum(len(held) for cache in self.caches for held in cache.layout.pages[0])


class Engine:
    """Continuous batching: `submit`, then `step` until nothing is `unfinished`; an id that is no longer in `live` has
    ended.

    Requests wait in order. One prompt at a time is read, `prefill_layers` layers between two decode steps, into a cache
    of its own, the desk, whose pages then become a lane's. All lanes decode in one step; one that is finished is filled
    again at once. When the pool has no page for a lane's next token, the request that was admitted last makes way: its
    prompt is read again later, and what it had generated is fed again, token by token, so that a policy that compressed
    the prompt holds the same again.
    """

    PAGE = 64  # slots of a page, where the cache does not say
    GROWTH = 64  # slots that a step looks at beyond those of the longest lane; a 32nd of them where that is more

    def __init__(
        self,
        model: Transformer,
        cache: caches.CacheSpec,
        max_batch: int = 8,
        max_seq_len: int | None = None,
        pages: int | None = None,
        prefill_layers: int = 4,
        prefix: bool = True,
        store: "PrefixStore | None" = None,
    ):
        """cache: what `caches.build` returned; max_batch: lanes; max_seq_len: of a prompt and its new tokens together;
        pages: of the pool, one head of one layer each, by default enough for all lanes at their longest; prefix: may
        prompts that begin alike share pages? With fewer than 16 bits what follows is then read on top of the codes, as
        a second turn of a chat is. store: where they are looked for, too, and outlive the engine."""
        assert max_batch >= 1
        args, weight = model.args, model.norm.weight
        self.model, self.spec = model, cache if cache.page else replace(cache, page=self.PAGE)
        self.max_seq_len, self.prefill_layers = max_seq_len or args.max_seq_len, prefill_layers
        if self.max_seq_len > args.max_seq_len and not cache.endless:
            raise UsageError(f"max_seq_len {max_seq_len}: this model has {args.max_seq_len} positions")
        self.policy, self.device = self.spec.policy(), weight.device
        longest = max(self.need(self.max_seq_len, 0), self.need(1, self.max_seq_len - 1))
        what = f"--pages {pages}:" if pages else f"{max_batch} lanes of {self.max_seq_len} tokens:"
        pages = max_batch * longest if pages is None else pages
        page_bytes = self.spec.page_bytes(args.head_dim, weight.dtype) + 200  # and the host's
        free = kernels.free_memory(weight.device)
        if not kernels.all_agree(pages * page_bytes <= free) and self.spec.offload == "none":
            fit = int(free / page_bytes)
            fewer = f"give --pages {fit} or fewer" if fit >= longest else "shorten the longest prompt"
            raise UsageError(
                f"{what} pages take {size(pages * page_bytes)}, and {size(free)} are free; {fewer}, or give fewer "
                "--max-new-tokens or --bits"
            )
        self.pool = caches.Pool(self.spec.page, 1 + pages, weight.device, self.spec.memory(weight.device))

        self.caches, self.desk = self.make(max_batch), self.make(1)
        self.documents: list[Document] = []
        self.nothing = self.pool.claim(1)[0]  # where lanes without a request write
        self.lanes: list[Request | None] = [None] * max_batch
        self.size = [-1] * args.n_layer
        self.resize()
        self.tok, self.pos, self.active = torch.zeros(3, max_batch, 1, dtype=torch.int64, device=weight.device)
        self.live: dict[int, Request] = {}
        self.waiting: deque[list[Request]] = deque()  # each with the other samples of its prompt
        self.reading: list[Request] = []
        self.requests = self.admissions = 0
        self.preempted = self.hit_tokens = self.stored_tokens = self.peak = 0
        self.unused = 0.0
        self.prefix, self.store = prefix and self.spec.why_no_prefix() is None, store
        self.pool.prefixes.salt = salt(model, self.spec)

    def make(self, batch: int, paged: bool = True) -> list[caches.KVCache]:
        spec, pool = (self.spec, self.pool) if paged else (replace(self.spec, page=0), None)
        model, weight = self.model, self.model.norm.weight
        return spec(model.args, model.rope.frequencies, batch, self.max_seq_len, weight.dtype, weight.device, pool)

    def need(self, prompt: int, new: int, samples: int = 1, after: Document | None = None) -> int:
        """Pages for that many samples of so many tokens each, at the end, or at most where heads share a budget; with
        those of a document before them."""
        args, page = self.model.args, self.spec.page
        slots = [n + (new if self.policy.appends else 0) for n in self.spec.slots(prompt, args.n_layer)]
        if self.policy.relative and self.max_seq_len > args.max_seq_len:
            slots = [min(n, caches.longest_window(args.max_seq_len)) for n in slots]
        H = args.n_kv_head
        pages = sum(H * n // page + H if self.policy.ragged else H * -(-n // page) for n in slots)
        if after:
            pages = int((-(-(after.held + (prompt + new) * self.policy.appends) // page)).sum())
        alone = H * args.n_layer if self.policy.appends else pages  # what a sample cannot share
        return pages + (samples - 1) * alone

    # What a caller does

    def submit(
        self, prompt: list[int], params: Params = Params(), samples: int = 1, after: Document | None = None
    ) -> int | list[int]:
        """Queues a prompt, token ids, that follows a document, if there is one. Returns the request's id, or those of
        all samples, the i-th with seed + i.

        Raises UsageError for one that never fits: positions, pages, or lanes for its samples.
        """
        assert after is None or after in self.documents
        T, new = (after.seen if after else 0) + len(prompt), params.max_new_tokens
        total = len(self.pool.refs) - 1 - sum(document.pages for document in self.documents)
        if not prompt:
            raise UsageError(EMPTY)
        if T + new > self.max_seq_len:
            raise UsageError(
                f"{T} tokens in the prompt and {new} new ones are more than {self.max_seq_len}; shorten one of them"
            )
        if samples > len(self.lanes):
            raise UsageError(f"--num-samples {samples}: there are {len(self.lanes)} lanes; give --max-batch {samples}")
        sizes = [(new - 1, 1), (1, samples)] if new else []
        need = max((self.need(len(prompt), *size, after) for size in sizes), default=0)
        need -= int(after.shared.sum()) if after else 0
        if need > total:
            raise UsageError(
                f"--pages {total}: a prompt of {T} tokens and {new} new ones need {need} pages of {self.spec.page} "
                f"slots, each of one head of one layer"
            )
        group = [
            Request(self.requests + i, list(prompt), replace(params, seed=params.seed + i), after, self.device)
            for i in range(samples)
        ]
        self.requests += samples
        ids = [r.id for r in group]
        if new:
            self.live |= zip(ids, group, strict=True)
            self.waiting.append(group)
        return ids[0] if samples == 1 else ids

    @torch.no_grad()
    def step(self) -> dict[int, list[int]]:
        """Reads some layers of a prompt, and gives every lane its next token: new tokens of requests, by id."""
        out: dict[int, list[int]] = {}
        for layer, own in zip(self.model.layers, self.caches, strict=True):
            layer.attention.cache = own  # whoever used the model in between
        self.begin()
        running = any(self.lanes)
        for _ in range(self.prefill_layers if running else sys.maxsize):
            if not self.reading or self.read_layer(out):
                break
        self.make_room()
        if self.pool.used - 1 > self.peak:
            self.peak, self.unused = self.pool.used - 1, self.waste()
        if any(self.lanes):
            logits = self.decode(self.tok, self.pos)[:, 0]
            self.pos += self.active
            tok = greedy(logits)
            for r in filter(None, self.lanes):
                if r.told < len(r.tokens):  # it was generated before this request had to make way
                    tok[r.lane] = r.tokens[r.told]
                elif r.sample is not greedy:
                    tok[r.lane] = r.sample(logits[r.lane : r.lane + 1])[0]
            self.tok.copy_(tok[:, None])
            ids = tok.tolist()  # the one moment of a step when the host waits for the device
            for r in filter(None, list(self.lanes)):
                r.held += self.policy.appends
                self.tell(r, ids[r.lane], out)
        return out

    @property
    def unfinished(self) -> int:
        """Requests that wait, are being read, or run."""
        return len(self.live)

    def generate(self, prompts: list[list[int]], params: Params = Params()) -> list[list[int]]:
        """Token ids that follow each of the prompts, in their order."""
        tokens = {self.submit(prompt, params): [] for prompt in prompts}
        while self.unfinished:
            for id, new in self.step().items():
                if id in tokens:
                    tokens[id] += new
        return list(tokens.values())

    def cancel(self, id: int) -> None:
        """Ends a request, wherever it is; one that has ended, or never was, is no error."""
        r = self.live.pop(id, None)
        if r is None:
            return
        if r.lane is not None:
            self.vacate(r)
        for group in [*self.waiting, self.reading]:
            if r in group:
                group.remove(r)
        self.waiting = deque(group for group in self.waiting if group)
        if not self.reading:
            self.clear_desk()

    @torch.no_grad()
    def save(self, path: Path | str, ids: list[int]) -> None:
        """Reads a text, token ids, and writes what this engine's cache keeps of it to a file, for `load` and
        --load-cache, as plain text: what follows it is in no chat template."""
        if not 0 < len(ids) <= self.max_seq_len:
            raise UsageError(f"{path}: a document has 1 to {self.max_seq_len} tokens here, and this one {len(ids)}")
        layers = self.make(1, paged=False)  # pages are for requests
        pieces = [cache.fit([len(ids)], [0], 0, self.max_seq_len)[0] for cache in layers]
        deque(self.model.reading(torch.tensor([ids], device=self.device), 0, min(pieces), caches=layers), maxlen=0)
        said = {"messages": [], "seen": len(ids), "unread": [], "tokens": caches.chained(b"", tuple(ids)).hex()}
        Saved.write(Path(path), self.model, self.spec, layers, said, False)

    def load(self, saved: "Saved | Path | str") -> Document:
        """A file of `save` or --save-cache becomes the beginning of requests, in pages that the pool gets for it.

        Raises UsageError for a file that is damaged, or of another model, cache or budget.
        """
        saved = saved if isinstance(saved, Saved) else Saved(Path(saved))
        saved.check(self.model, self.spec)
        held = [x for name, x in saved.tensors.items() if name.endswith(".slot_pos")]  # [H,S]
        slots = [caches.filled(x) if self.policy.appends else torch.tensor([x.shape[1]] * len(x)) for x in held]
        pages = sum(int((-(-n // self.spec.page)).sum()) for n in slots)
        self.pool.enlarge(len(self.pool.refs) + pages)
        self.decode = DecodeStep(self.model)  # its record has the old pool's addresses
        layers = self.make(1)
        try:
            saved.restore(layers)
        except UsageError:
            for cache in layers:
                cache.layout.release(0)
            raise
        appends, H = self.policy.appends, self.model.args.n_kv_head
        slots = [caches.filled(cache.slot_pos)[0] if appends else cache.policy.capacity.expand(H) for cache in layers]
        held = torch.stack(slots).cpu().numpy()
        self.documents.append(Document(saved.said["seen"], layers, held, held // self.spec.page * appends))
        return self.documents[-1]

    def drop(self, document: Document) -> None:
        """Ends a document, and the requests that follow it."""
        for id in [r.id for r in self.live.values() if r.after is document]:
            self.cancel(id)
        for cache in document.caches:
            cache.layout.release(0)
        self.documents.remove(document)

    def reset(self) -> None:
        """As new: nothing waits, nothing runs, no document and no prefix is known."""
        for id in list(self.live):
            self.cancel(id)
        for document in list(self.documents):
            self.drop(document)
        self.pool.prefixes.clear()
        self.preempted = self.hit_tokens = self.stored_tokens = self.peak = 0
        self.unused = 0.0

    # What happens inside

    def begin(self) -> None:
        """Starts to read the next prompt, if there are a lane and pages for it."""
        if self.reading or not self.waiting:
            return
        group = self.waiting[0]
        if self.lanes.count(None) < len(group):
            return
        (prompt, after), most = (group[0].prompt, group[0].after), self.findable(group[0])
        found = [] if after else self.pool.prefixes.find(prompt)[:most]
        shared = [page for block in found for page in block.pages]
        self.pool.share(shared)
        there = int(after.shared.sum()) if after else len(shared)
        if self.need(len(prompt), 1, len(group), after) - there > len(self.pool.free):
            self.pool.release(shared)
            return
        known = len(found) * self.spec.page
        if self.store is not None and not after:
            found = self.store.load(self.desk, found, prompt, most)
        hit = caches.begin(self.desk, found)
        self.reading = self.waiting.popleft()
        self.admissions += 1
        self.hit_tokens += hit
        self.stored_tokens += max(hit - known, 0)
        for r in group:
            r.order, r.hit = self.admissions, r.hit if r.tokens else hit
        pieces, start = [], group[0].start + hit
        for i, cache in enumerate(self.desk):
            if after:
                cache.allocate(after.caches[i].slot_pos.shape[2])
                cache.adopt(0, after.caches[i], share=True)
                self.unshare(cache, 0, after.shared[i])
            pieces += cache.fit([len(prompt) - hit], [start], 0, self.max_seq_len)
        ids = torch.tensor([prompt[hit:]], device=self.device)
        self.layers = self.model.reading(ids, start, min(pieces), caches=self.desk)

    def findable(self, r: Request) -> int:
        """How many blocks of a prompt may be found."""
        most = caches.findable(self.desk, len(r.prompt)) if self.prefix else 0
        if r.tokens and self.spec.bits != 16:  # codes of what it had computed would not give the same answer
            most = min(most, r.hit // self.spec.page)
        return most

    def publish(self, tokens: list[int], layers: list[caches.KVCache], row: int) -> None:
        if self.prefix:
            blocks = caches.publish(layers, row, tokens)
            if self.store is not None:
                self.store.save(self.pool, blocks)

    def read_layer(self, out: dict[int, list[int]]) -> bool:
        """One more layer of the prompt that is being read; True if that was the last one."""
        logits = next(self.layers)
        if logits is None:
            return False
        group, self.reading = self.reading, []
        if not group[0].after:
            self.publish(group[0].prompt, self.desk, 0)
        slots = [cache.policy.count[0] if self.policy.appends else cache.policy.capacity for cache in self.desk]
        held = np.stack([n.cpu().expand(self.model.args.n_kv_head).numpy() for n in slots])
        self.resize([cache.slot_pos.shape[2] for cache in self.desk])
        for i, r in enumerate(group):
            r.lane, r.told, r.held, r.forked = self.lanes.index(None), 0, held.copy(), len(group) > 1
            self.lanes[r.lane] = r
            for cache, desk in zip(self.caches, self.desk, strict=True):
                cache.adopt(r.lane, desk, share=i + 1 < len(group))
        for r in group:
            if r.forked and not self.policy.appends:  # it may write to any page
                for cache in self.caches:
                    self.unshare(cache, r.lane, [0] * len(held[0]))
            id = r.tokens[0] if r.tokens else int(r.sample(logits))
            self.tok[r.lane], self.pos[r.lane], self.active[r.lane] = id, r.start + len(r.prompt), 1
            self.tell(r, id, out)
        return True

    def unshare(self, cache: caches.KVCache, row: int, first: list[int]) -> None:
        """Sequence row gets pages of its own to write to: of each head, from the first[h]-th on."""
        for h, pages in enumerate(cache.layout.pages[row]):
            for i in range(first[h], len(pages)):
                cache.layout.unshare(row, h, i)

    def tell(self, r: Request, id: int, out: dict[int, list[int]]) -> None:
        """A request has its next token."""
        if r.told == len(r.tokens):
            r.tokens.append(id)
            out.setdefault(r.id, []).append(id)
        r.told += 1
        if id in r.params.stop_ids or r.told == r.params.max_new_tokens:
            del self.live[r.id]
            self.vacate(r)

    def vacate(self, r: Request) -> None:
        """A lane is free again. What it held can be found until its pages are used."""
        if not r.after:
            self.publish(r.cached, self.caches, r.lane)
        for cache in self.caches:
            cache.layout.release(r.lane)
            cache.layout.idle(r.lane, self.nothing)
        self.tok[r.lane] = self.pos[r.lane] = self.active[r.lane] = 0
        self.lanes[r.lane], r.lane = None, None

    def clear_desk(self) -> None:
        for cache in self.desk:
            cache.layout.release(0)

    def make_room(self) -> None:
        """Pages and slots for the next token of every lane."""
        self.resize()
        for r in sorted(filter(None, self.lanes), key=lambda r: r.order):
            while r.lane is not None and not self.room_for(r):
                running = [r for r in self.lanes if r is not None]
                self.preempt(max(running + self.reading, key=lambda r: (r.order, r.id)))

    def room_for(self, r: Request) -> bool:
        if not self.policy.appends:
            return True
        page, b = self.spec.page, r.lane
        grows = np.argwhere(r.held % page == 0)
        if not len(grows) and not r.forked:
            return True
        layouts = [cache.layout for cache in self.caches]
        grows = [(i, h) for i, h in grows if len(layouts[i].pages[b][h]) * page == r.held[i, h]]
        shared = []
        if r.forked:
            places = [(i, h, n // page) for (i, h), n in np.ndenumerate(r.held) if n % page]
            shared = [(i, h, j) for i, h, j in places if self.pool.refs[layouts[i].pages[b][h][j]] > 1]
        promised = 0
        if self.reading:
            claimed = sum(len(held) for cache in self.desk for held in cache.layout.pages[0])
            first = self.reading[0]
            promised = max(self.need(len(first.prompt), 1, len(self.reading), first.after) - claimed, 0)
        if len(grows) + len(shared) > len(self.pool.free) - promised:
            return False
        for i, h in grows:
            layouts[i].grow(b, h, int(r.held[i, h]) + 1)
        for i, h, j in shared:
            layouts[i].unshare(b, h, j)
        r.forked = False
        return True

    def preempt(self, r: Request) -> None:
        """The latest request makes way, and is the first to come back."""
        self.preempted += 1
        if r in self.reading:
            group, self.reading = self.reading, []
            self.clear_desk()
        else:
            group = [r]
            self.vacate(r)
        self.waiting.appendleft(group)

    def waste(self) -> float:
        """The part of the slots of the running lanes' pages that hold no token."""
        running = [r for r in self.lanes if r is not None]
        pages = sum(len(held) for r in running for cache in self.caches for held in cache.layout.pages[r.lane])
        return 1 - sum(int(r.held.sum()) for r in running) / (pages * self.spec.page) if pages else 0.0

    def in_use(self) -> list[int]:
        """Slots that the longest lane uses in each layer, its next token included."""
        most = [r.held.max(1) + self.policy.appends for r in self.lanes if r is not None]
        return np.max(most, 0).tolist() if most else [0] * len(self.caches)

    def resize(self, more: list[int] | None = None) -> None:
        """Lets a step look at as many slots of each layer as the longest lane uses, or as `more` says.

        All layers at once, and not at every token: the next step is compiled code without its record.
        """
        need = self.in_use() if more is None else [max(pair) for pair in zip(self.in_use(), more, strict=True)]
        if all(n <= size <= 1.5 * n + 2 * self.GROWTH for n, size in zip(need, self.size, strict=True)):
            return
        ahead = max(self.GROWTH, max(need) // 32) if self.policy.appends else 1
        self.size = [-(-(n + ahead) // caches.CHUNK) * caches.CHUNK for n in need]
        for cache, size in zip(self.caches, self.size, strict=True):
            cache.resize(size)
            for b, r in enumerate(self.lanes):
                if r is None:
                    cache.layout.idle(b, self.nothing)
        self.decode = DecodeStep(self.model)


# ---------------------------------------------------------------------------------------------------------------------
# The report


class Report:
    """Runs `generate`, as text, and keeps the books: tokens, slots, bytes and seconds."""

    def __init__(self, args: argparse.Namespace, model: Transformer, tokenizer: Tokenizer):
        self.args, self.model, self.tokenizer = args, model, tokenizer
        self.sample = sampler(args.temperature, args.top_k, args.top_p, args.seed, model.norm.weight.device)
        self.load_s = time.perf_counter() - STARTED
        self.prompt_tokens = self.new_tokens = self.seen = 0
        self.token_ids, self.text = [], ""  # of all turns, for --json
        self.unread: list[int] = []  # generated, but not yet in the cache
        self.health = Health(model) if args.stats else None
        self.prefill_s = self.compile_s = self.decode_s = 0.0
        self.prefilled = self.steps = self.found = 0
        self.store, self.layers = args.store, [layer.attention.cache for layer in model.layers]
        self.pool = self.layers[0].layout.pool
        if self.store is not None:
            self.pool.prefixes.salt = salt(model, args.spec)

    def stream(self, ids: list[int], start: int = 0, max_new_tokens: int | None = None) -> Iterator[str]:
        new = self.args.max_new_tokens if max_new_tokens is None else max_new_tokens
        self.answer, self.answered = [], ""  # of this turn, as tokens and as text
        self.clock, self.status = time.perf_counter(), Status(f"reading {len(ids)} tokens")
        self.prompt_tokens += len(ids)
        self.seen, self.unread = start + len(ids), []
        begins = self.store is not None and start == 0
        found = self.recall(ids) if begins else 0
        tokens = generate(
            self.model,
            ids[found:],
            new,
            start=start + found,
            stop_ids=self.tokenizer.eos_ids,
            sample=self.sample,
            on_event=lambda name: self.event(name, len(ids)),
        )
        try:
            for text in until(self.decode(tokens), self.args.stop):
                if text:
                    self.answered += text
                    yield text
        finally:
            self.status.close()
            self.seen += max(len(self.answer) - 1, 0)  # the last token was never fed back
            self.new_tokens += len(self.answer)
            if self.args.json:  # nobody else wants it, and a conversation may have no end
                self.token_ids += self.answer
                self.text += self.answered
        if begins:
            self.store.save(self.pool, caches.publish(self.layers, 0, (ids + self.answer)[: self.seen]))

    def recall(self, ids: list[int]) -> int:
        """The caches begin with what the store has of a prompt: so many tokens."""
        self.pool.expected.clear()  # of texts as long as can be; of this one only `fit` knows
        blocks = self.store.load(self.layers, [], ids, caches.findable(self.layers, len(ids)))
        self.found = caches.begin(self.layers, blocks)
        return self.found

    def decode(self, tokens: Iterator[int]) -> Iterator[str]:
        stream = self.tokenizer.stream()
        for id in tokens:
            self.answer.append(id)
            self.unread = [] if id in self.tokenizer.eos_ids else [id]
            yield stream.put(id)
        yield stream.flush()

    def event(self, name: str, prompt: int) -> None:
        now = time.perf_counter()
        spent, self.clock = now - self.clock, now
        self.status.close()
        if name == "prefill":
            self.prefill_s += spent
            self.prefilled += prompt
            if self.model.compiled and not self.steps:
                self.status = Status("compiling the decode step (once per cache and machine; later runs reuse it)")
        elif name == "first step" and self.model.compiled:
            self.compile_s += spent
        else:
            self.decode_s += spent
            self.steps += 1

    def data(self) -> dict:
        """The report as it goes into --json."""
        args, model, layers = self.args, self.model, self.layers
        kept = [int((c.slot_pos >= 0).sum(-1).float().mean().round()) for c in layers]
        away, reads = caches.offloaded(layers), caches.read_bytes(layers)
        nbytes = caches.memory(layers) + away
        B, H, _ = layers[0].slot_pos.shape
        full = self.seen * len(layers) * B * H * model.args.head_dim * 2 * 2  # K and V, two bytes each
        weights = model.step_bytes()
        rate = lambda n, s: n / s if s else None  # noqa: E731
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "text": self.text,
            "token_ids": self.token_ids,
            "cache": {
                "policy": args.spec.name,
                "format": args.spec.format.replace("float", str(layers[0].k_store.dtype)[6:]),
                "bits": args.spec.bits,
                "layout": args.spec.layout,
                "slots_per_layer": [c.slot_pos.shape[2] for c in layers],
                "kept_per_layer": kept,
                "evicted_per_layer": [self.seen - n for n in kept],
                "kept_per_head": [(c.slot_pos >= 0).sum(-1)[0].tolist() for c in layers],
                "bytes": nbytes,
                "offloaded_bytes": away,
                "read_bytes": reads,
                "full_bytes": full,
                **({"pages": len(self.pool.refs), "pages_used": self.pool.used} if self.pool else {}),
                **({"stored_tokens": self.found} if self.store else {}),
            },
            "time": {
                "load_s": self.load_s,
                **({"restore_s": args.saved.seconds} if args.saved else {}),
                "compile_s": self.compile_s,
                "prefill_s": self.prefill_s,
                "decode_s": self.decode_s,
                "prefill_tok_s": rate(self.prefilled, self.prefill_s),
                "decode_tok_s": rate(self.steps, self.decode_s),
                "decode_gb_s": rate(self.steps * (weights + reads) / 1e9, self.decode_s),
            },
            "graphs": graphs() if model.compiled else 0,
            **({"health": self.health.data()} if self.health else {}),
        }

    def __str__(self) -> str:
        data = self.data()
        c, t = data["cache"], data["time"]
        kept, evicted = (sum(c[k]) / len(c["slots_per_layer"]) for k in ("kept_per_layer", "evicted_per_layer"))
        show = lambda x, unit: f"{x:,.1f} {unit}" if x is not None else f"- {unit}"  # noqa: E731
        slots = f"{min(c['slots_per_layer']):,}-{max(c['slots_per_layer']):,}"
        per_head = [n for layer in c["kept_per_head"] for n in layer]
        ragged = any(len(set(layer)) > 1 for layer in c["kept_per_head"])
        heads = f", of which heads use {min(per_head):,}-{max(per_head):,}" if ragged else ""
        lines = [
            f"tokens   {data['prompt_tokens']:,} prompt + {data['new_tokens']:,} new; per layer {kept:,.0f} kept, "
            f"{evicted:,.0f} evicted; {slots} slots{heads}",
            f"cache    {c['policy']}, {c['format']}{f' {n} bits' if (n := c['bits']) != 16 else ''}: "
            f"{c['bytes'] / 1e6:,.2f} MB; full bf16 cache "
            f"{c['full_bytes'] / 1e6:,.2f} MB; ratio {c['bytes'] / c['full_bytes']:.3f}"
            + (f"; {c['offloaded_bytes'] / 1e6:,.2f} MB of it {self.args.spec.where}" if c["offloaded_bytes"] else "")
            + (f"; {c['pages_used']:,} of {c['pages']:,} pages" if "pages" in c else ""),
            f"speed    prefill {show(t['prefill_tok_s'], 'tok/s')}; decode {show(t['decode_tok_s'], 'tok/s')}, "
            f"{show(t['decode_gb_s'], 'GB/s')}",
            f"time     load {t['load_s']:.1f} s, "
            + (f"of it the cache {t['restore_s']:.2f} s, " if "restore_s" in t else "")
            + f"prefill {t['prefill_s']:.1f} s, compile {t['compile_s']:.1f} s, "
            f"decode {t['decode_s']:.1f} s",
        ]
        if self.store:
            lines.insert(2, f"prefix   {found_line(self.found, self.found, self.layers, self.store)}")
        if self.args.spec.select is not None:
            part = c["read_bytes"] / c["bytes"]
            lines.insert(2, f"select   a step reads {c['read_bytes'] / 1e6:,.2f} MB of that, {part:.1%}")
        if self.health:
            lines.append(health_line(data["health"]))
        return "\n".join(lines + ranks_line())


class Service:
    """Runs an engine, as text, and keeps the books: requests, tokens, pages and seconds."""

    def __init__(self, args: argparse.Namespace, engine: Engine, tokenizer: Tokenizer):
        self.args, self.engine, self.tokenizer = args, engine, tokenizer
        self.load_s, self.seconds, self.unused = time.perf_counter() - STARTED, 0.0, 0.0
        self.open: dict[int, dict] = {}
        self.streams: dict[int, object] = {}
        self.prompt_tokens = self.new_tokens = 0

    def submit(self, ids: list[int], params: Params, samples: int, after: Document | None = None) -> None:
        for i in range(samples):
            if i == 0:
                made = self.engine.submit(ids, params, samples, after)
            id = made if samples == 1 else made[i]
            sample = {"sample": i} if samples > 1 else {}
            self.open[id] = {**sample, "prompt_tokens": len(ids), "token_ids": [], "text": "", "ended": "length"}
            self.streams[id] = self.tokenizer.stream()
        self.prompt_tokens += len(ids)

    def answers(self) -> Iterator[dict]:
        """What becomes of every request, in the order in which they came."""
        began, engine, waiting = time.perf_counter(), self.engine, deque(self.open)
        progress = Progress()
        try:
            while waiting:
                for id, tokens in engine.step().items():
                    self.add(id, tokens)
                progress.show(self.state)
                while waiting and waiting[0] not in engine.live:
                    id = waiting.popleft()
                    answer = self.open[id]
                    self.write(id, self.streams[id].flush())
                    self.new_tokens += len(answer["token_ids"])
                    self.seconds = time.perf_counter() - began
                    progress.clear()
                    yield answer
        finally:
            progress.clear()

    def add(self, id: int, tokens: list[int]) -> None:
        answer = self.open[id]
        for token in tokens:
            if answer["ended"] == "stop":
                return
            answer["token_ids"].append(token)
            if token in self.tokenizer.eos_ids:
                answer["ended"] = "eos"
            self.write(id, self.streams[id].put(token))

    def write(self, id: int, text: str) -> None:
        """More text of an answer, which ends before a stop string."""
        answer = self.open[id]
        if answer["ended"] == "stop":
            return
        answer["text"] += text
        found = [i for i in map(answer["text"].find, self.args.stop) if i >= 0]
        if found:
            answer["text"], answer["ended"] = answer["text"][: min(found)], "stop"
            self.engine.cancel(id)

    @property
    def state(self) -> str:
        e = self.engine
        running = sum(r is not None for r in e.lanes)
        waiting = e.unfinished - running
        return f"running {running}, waiting {waiting}, pages {e.pool.used - 1:,} of {len(e.pool.refs) - 1:,}"

    def data(self) -> dict:
        engine, spec, saved = self.engine, self.engine.spec, self.args.saved
        documents = [cache for document in engine.documents for cache in document.caches]
        every = [*engine.caches, *engine.desk, *documents]
        return {
            "requests": len(self.open),
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "answers": list(self.open.values()),
            "cache": {
                "policy": spec.name,
                "format": spec.format.replace("float", str(engine.caches[0].k_store.dtype)[6:]),
                "bits": spec.bits,
                "layout": spec.layout,
                "bytes": caches.memory(every) + caches.offloaded(every),
                "offloaded_bytes": caches.offloaded(every),
                "lanes": len(engine.lanes),
                "page_slots": spec.page,
                "pages": len(engine.pool.refs) - 1,
                "pages_at_peak": engine.peak,
                "pages_of_documents": sum(document.pages for document in engine.documents),
                "unused_slots_at_peak": engine.unused,
                "preempted": engine.preempted,
                "prefix_tokens": engine.hit_tokens,
                "stored_tokens": engine.stored_tokens,
                "no_prefix_because": spec.why_no_prefix(),
            },
            "time": {
                "load_s": self.load_s,
                **({"restore_s": saved.seconds} if saved else {}),
                "serve_s": self.seconds,
                "requests_s": len(self.open) / self.seconds if self.seconds else None,
                "tok_s": self.new_tokens / self.seconds if self.seconds else None,
            },
            "graphs": graphs() if engine.model.compiled else 0,
        }

    def __str__(self) -> str:
        data = self.data()
        c, t = data["cache"], data["time"]
        bits = f" {c['bits']} bits" if c["bits"] != 16 else ""
        prefix = found_line(c["prefix_tokens"], c["stored_tokens"], self.engine.desk, self.engine.store)
        prefix = prefix if self.engine.prefix else "not looked for"
        prefix = f"none found: {c['no_prefix_because']}" if c["no_prefix_because"] else prefix
        if self.args.saved:
            prefix = f"{self.args.saved.said['seen']:,} tokens of {self.args.load_cache}, before every prompt"
        return "\n".join(
            [
                f"requests {data['requests']:,}: {data['prompt_tokens']:,} tokens of prompts + "
                f"{data['new_tokens']:,} new; {c['lanes']} lanes",
                f"cache    {c['policy']}, {c['format']}{bits}: {c['bytes'] / 1e6:,.2f} MB"
                + (
                    f"; {c['offloaded_bytes'] / 1e6:,.2f} MB of it {self.engine.spec.where}"
                    if c["offloaded_bytes"]
                    else ""
                )
                + (f"; a step selects {n} of a head's tokens" if (n := self.engine.spec.select) is not None else ""),
                f"pages    {c['pages_at_peak']:,} of {c['pages']:,} in use at the peak, of {c['page_slots']} slots; "
                f"unused then {c['unused_slots_at_peak']:.1%}; requests that made way {c['preempted']:,}",
                f"prefix   {prefix}",
                f"speed    {t['requests_s']:.2f} requests/s, {t['tok_s']:,.1f} tok/s (load {t['load_s']:.1f} s, "
                f"all requests {t['serve_s']:.1f} s, compiling included)",
                *ranks_line(),
            ]
        )


def ranks_line() -> list[str]:
    n = kernels.RANKS
    return (
        [f"ranks    {n} processes, each with a part of the model and of the cache; bytes are of one"] if n > 1 else []
    )


def found_line(found: int, stored: int, layers: list[caches.KVCache], store: PrefixStore | None) -> str:
    """How many tokens were found for these caches of one sequence, and how many of them in the store; if none, what can
    be."""
    page, ring = layers[0].layout.pool.page, layers[0].residual
    rest = f", and the last {ring.length} tokens are always read" if ring else ""
    least = "" if found else f"; only whole pages of {page} tokens can be{rest}"
    where = f"{f', {stored:,} of them' if stored < found else ''} in {store.path}" if store else ""
    failed = f"; nothing more is written there: {store.failed}" if store and store.failed else ""
    return f"{found:,} tokens found{where}{least}{failed}"


class Progress:
    """One line on stderr that is written over, ten times a second at most. Only on a terminal."""

    def __init__(self):
        self.on, self.last = sys.stderr is not None and sys.stderr.isatty(), 0.0

    def show(self, text: str) -> None:
        if self.on and time.perf_counter() - self.last > 0.1:
            self.last = time.perf_counter()
            print(f"\r\x1b[K\x1b[2m[{text}]\x1b[0m", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.on:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def health_line(layers: list[dict]) -> str:
    """All layers in one line: means, and the worst."""
    kept, sinks, keys, values = (
        sum(r[name] for r in layers) / len(layers) for name in ("attention_kept", "sinks", "key_error", "value_error")
    )
    worst = min(range(len(layers)), key=lambda i: layers[i]["lowest"])
    first, last = min(r["span"][0] for r in layers), max(r["span"][1] for r in layers)
    return (
        f"health   {kept:.1%} of the prompt's attention kept, in the worst head {layers[worst]['lowest']:.1%} (layer "
        f"{worst}); sinks {sinks:.0%}; positions {first:,}-{last:,}, longest gap "
        f"{max(r['longest_gap'] for r in layers):,}; error of keys {keys:.2%}, of values {values:.2%}"
    )


class Health:
    """What monitoring wants to know of a model's caches, layer by layer. Make it before a prompt is read.

    What was lost is known only while it is still there, so attention and errors are those of the first prompt that
    begins a sequence; the rest is how the caches are now.
    """

    WINDOW = 64  # queries whose attention is looked at

    def __init__(self, model: Transformer):
        self.layers = [layer.attention.cache for layer in model.layers]
        self.found: list[list[tuple]] = [[] for _ in self.layers]
        for cache, found in zip(self.layers, self.found, strict=True):
            cache.watch = functools.partial(self.look, found)

    def look(self, found: list[tuple], cache: caches.KVCache, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """As KVCache.watch: notes attention [B,H] that is kept, errors of keys and values relative to their norm."""
        if int(pos[0, 0]) > 0:
            return
        live, where = cache.slot_pos >= 0, cache.slot_pos.clamp(min=0).long()
        kept = (kernels.window_mass(q, k, min(self.WINDOW, k.shape[2])).gather(2, where) * live).sum(-1)
        pairs = [
            (caches.take(x, where)[live].float(), y[live]) for x, y in zip((k, v), cache.read(pos[:, -1]), strict=True)
        ]
        found.append((kept, *(float((x - y).norm() / x.norm()) for x, y in pairs)))

    def data(self) -> list[dict]:
        """attention_kept: the part of the attention of a prompt's last queries that falls on what is kept of it, mean
        and lowest over heads; sinks: the part of the first four positions that heads still hold; longest_gap: evicted
        positions in a row, at most; span: first and last position; key_error, value_error: relative to their norm."""
        rows = []
        for cache, found in zip(self.layers, self.found, strict=True):
            held = cache.slot_pos.sort(-1).values
            live, steps = held >= 0, held.diff(dim=-1, prepend=torch.full_like(held[..., :1], -1))
            kept = torch.cat([attention for attention, _, _ in found])
            rows.append(
                {
                    "attention_kept": float(kept.mean()),
                    "lowest": float(kept.min()),
                    "sinks": float((live & (held < 4)).sum(-1).float().mean()) / 4,
                    "longest_gap": int(((steps - 1) * live).max()),
                    "span": [int(held[live].min()), int(held.max())],
                    "key_error": sum(key for _, key, _ in found) / len(found),
                    "value_error": sum(value for _, _, value in found) / len(found),
                }
            )
        return rows


def graphs() -> int:
    """How many graphs the layers' decode step was compiled to. One serves them all, whatever their sizes."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(TransformerBlock.forward.__code__))


class Status:
    """What is being waited for, with the seconds so far, on one line of stderr that vanishes. Only on a terminal."""

    def __init__(self, text: str):
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.show, args=(text, time.perf_counter()), daemon=True)
        if sys.stderr is not None and sys.stderr.isatty():
            self.thread.start()

    def show(self, text: str, started: float) -> None:
        while not self.done.wait(0.5):
            print(
                f"\r\x1b[2m[{text}: {time.perf_counter() - started:.0f} s]\x1b[0m", end="", file=sys.stderr, flush=True
            )
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        self.done.set()
        if self.thread.is_alive():
            self.thread.join()


def write_json(path: Path, data: dict) -> None:
    """All or nothing: a file that is there is complete. A pipe or a device is written to, not replaced."""
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    replaced = path.is_file() or not path.exists()
    try:
        with all_or_nothing(path.resolve()) if replaced else contextlib.nullcontext(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json {path}: {error.strerror}; give a file that can be written to") from None


@contextlib.contextmanager
def all_or_nothing(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of path when all of it is written."""
    part = part_file(path)
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


PART = ".kv-fast-"  # how the names of half-written files begin


def part_file(path: Path) -> Path:
    """Where a file is written before it takes the place of path: another name at each call, and a short one."""
    return path.parent / f"{PART}{os.urandom(8).hex()}"


def check_writable(path: Path, flag: str = "--json") -> None:
    """Before hours of work, not after: can the report be written there?"""
    try:
        path = path.resolve()
        if path.is_dir():
            raise IsADirectoryError(0, "it is a directory")
        if not path.exists() or path.is_file():
            for probe in [part_file(path)] if path.exists() else [part_file(path), path]:
                probe.touch()
                probe.unlink()
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}; give a file in a directory that exists") from None


# ---------------------------------------------------------------------------------------------------------------------
# The edge: everything that a person can get wrong is refused here


def load(args: argparse.Namespace) -> tuple[Transformer, Tokenizer]:
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    model, tokenizer = load_checkpoint(args.checkpoint, device=args.device, dtype=dtype)
    if args.weights == "int8":
        model.to_int8()
    if args.chat is None:
        args.chat = tokenizer.has_chat_template
    if args.chat and not tokenizer.has_chat_template:
        raise UsageError("--chat: this checkpoint has no chat template; use --raw")
    if args.system is not None and not args.chat:
        raise UsageError("--system needs a chat template, and --raw or a checkpoint without one leaves it no place")
    if args.compile:
        if compiler_missing(args.device):
            print("No C++ compiler (g++): running without torch.compile, several times slower.", file=sys.stderr)
        else:
            model.compile()
    return model, tokenizer


def compiler_missing(device: torch.device) -> bool:
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    return device.type == "cpu" and shutil.which(compiler) is None


def system(args: argparse.Namespace) -> list[dict]:
    return [] if args.system is None else [{"role": "system", "content": args.system}]


def read_line() -> str:
    print("> ", end="", file=sys.stderr, flush=True)
    try:
        return input().strip()
    except (EOFError, RuntimeError):  # RuntimeError: there is no stdin at all
        print(file=sys.stderr)
        return ""
    except UnicodeDecodeError:
        raise UsageError("--interactive: the input is not UTF-8; convert it first") from None


def read_prompt(args: argparse.Namespace) -> tuple[str, str]:
    """The prompt, and a line that says what it is when nobody gave one."""
    if args.prompt is None and args.text is None:
        return demonstration(), "[no --prompt: a demonstration, a question about 2,800 tokens of Python's own manual]\n"
    text = args.prompt[0] if args.prompt else args.text
    if not text:
        raise UsageError(EMPTY)
    return text, ""


def read_file(name: str) -> str:
    """The text of --prompt-file."""
    try:
        if name != "-":
            return Path(name).read_bytes().decode("utf-8-sig")  # some editors begin a file with a mark
        return "" if sys.stdin is None else sys.stdin.buffer.read().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"--prompt-file {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt-file {name}: not UTF-8 (byte {error.start}); convert it first") from None


def batch(args: argparse.Namespace) -> list[dict]:
    """The requests of a command line, if those are several: prompt and, of each, what differs from the flags."""
    if args.interactive:
        return []
    if args.text is not None and (lines := json_lines(args)):
        return lines
    prompts = args.prompt or ([args.text] if args.text is not None else [])
    if len(prompts) < 2 and args.num_samples == 1:
        return []
    return [{"prompt": text, "params": {}} for text in prompts or [demonstration()]]


def json_lines(args: argparse.Namespace) -> list[dict]:
    """Of a file with one JSON object a line, its requests; of any other text, none."""

    def parsed(line: str):
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            return None

    known = {"max_new_tokens": int, "temperature": float, "top_k": int, "top_p": float, "seed": int}
    lines = [(i, line) for i, line in enumerate(args.text.split("\n"), 1) if line.strip()]
    if not lines or not isinstance(parsed(lines[0][1]), dict):
        return []
    requests = []
    for i, line in lines:
        request, where = parsed(line), f"--prompt-file {args.prompt_file}: line {i}"
        if not isinstance(request, dict) or not isinstance(request.get("prompt"), str) or not request["prompt"]:
            raise UsageError(f'{where}: give an object with some text as its "prompt", as in {{"prompt": "Hello"}}')
        params = {key: value for key, value in request.items() if key != "prompt"}
        for key, value in params.items():
            if key not in known:
                raise UsageError(f"{where}: {key} is unknown; a request has prompt, {', '.join(known)}")
            if isinstance(value, bool) or not isinstance(value, (int, known[key])) or abs(value) >= 2**63:
                kind = "number" if known[key] is float else "whole number"
                raise UsageError(f"{where}: {key} is {json.dumps(value)[:50]}; give a {kind}")
        try:
            check_params(argparse.Namespace(**{**vars(args.params), **params}))
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
        requests.append({"prompt": request["prompt"], "params": params})
    return requests


def demonstration() -> str:
    """A document of about 2,800 tokens that every Python has, and a question about it."""
    from pydoc_data.topics import topics

    names = ("assert", "break", "continue", "del", "global", "pass", "return", "with", "for")
    document = "\n\n".join(topics[name] for name in names)[:12000]
    return f"Read this text:\n\n{document}\n\nQuestion: In one sentence, what does the break statement do?"


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = Parser(
        prog="generate.py",
        usage="python generate.py [--prompt TEXT] [--cache NAME] [--budget N] [--bits N] [..]",
        description="Text from a model whose KV cache is small: what it keeps (--cache, --budget), how that is written "
        "down (--bits, --format), and where it lives (--page-size, --offload). The text goes to stdout, all else to "
        "stderr. Exit code 0; 2 if a flag or a file is wrong; 130 when interrupted.",
        epilog="Without any flag: a question about 2,800 tokens of Python's manual, with the full cache. Several "
        "processes share a model: torchrun --nproc-per-node 3 generate.py ..",
    )
    g = p.add_argument_group("what is asked")
    g.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated: then answers are JSON lines")
    g.add_argument(
        "--prompt-file",
        metavar="FILE",
        help='a UTF-8 text, or a JSON object a line, {"prompt": .., "max_new_tokens": ..}, for several; - is stdin',
    )
    g.add_argument("--interactive", action="store_true", help="a conversation that keeps its cache between turns")
    g.add_argument("--system", metavar="TEXT", help="system message, where the checkpoint has a chat template")
    g.add_argument("--chat", action=argparse.BooleanOptionalAction, help="wrap the prompt in the chat template")
    g.add_argument("--raw", dest="chat", action="store_false", help="the prompt as it is (same as --no-chat)")
    g = p.add_argument_group("the answer")
    g.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="of an answer; 0 only reads (200)")
    g.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (0)")
    g.add_argument("--top-k", type=int, metavar="N", help="draw from the N likeliest tokens")
    g.add_argument("--top-p", type=float, metavar="X", help="draw from the likeliest tokens that have X of the mass")
    g.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same text (0)")
    g.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    g = p.add_argument_group("the cache")
    g.add_argument(
        "--cache", default="full", metavar="NAME[:k=v,..]", help=", ".join(caches.POLICIES) + "; help explains them"
    )
    g.add_argument(
        "--budget", type=number, metavar="N", help="slots per KV head, or fraction of the prompt: 0.2 (default), 1.0"
    )
    g.add_argument(
        "--bits", metavar="N", help="16 (default), 8, 4 or 2 per element of the cache; keys and values apart: k=4,v=2"
    )
    g.add_argument(
        "--format",
        default="auto",
        metavar="NAME[:k=v,..]",
        help="auto, " + ", ".join(caches.FORMATS) + "; help explains",
    )
    g.add_argument("--residual", type=int, metavar="N", help="newest tokens kept exactly (default 128 below 16 bits)")
    g.add_argument(
        "--select",
        type=number,
        metavar="N",
        help="a step reads so many tokens, 96 or more, or a fraction below 1, of all that are held: those whose keys "
        "promise most (all)",
    )
    g.add_argument(
        "--offload",
        default="none",
        metavar="none|cpu|disk[:DIR]",
        help="where the cache's codes live: with the model (none), for a GPU in the host's memory, or in files of DIR "
        "(/var/tmp)",
    )
    g.add_argument(
        "--page-size",
        type=int,
        default=0,
        metavar="N",
        help="slots of a page; 0 (default): none, of several prompts 64",
    )
    g = p.add_argument_group("several prompts")
    g.add_argument("--max-batch", type=int, default=8, metavar="N", help="lanes: sequences of one step (8)")
    g.add_argument(
        "--num-samples", type=int, default=1, metavar="N", help="answers to each prompt, with seeds from --seed"
    )
    g.add_argument(
        "--pages",
        type=int,
        metavar="N",
        help="of the whole pool; one has the slots of one head of one layer (default: enough for all lanes)",
    )
    g.add_argument(
        "--prefill-layers", type=int, default=4, metavar="N", help="layers of a new prompt between two steps (4)"
    )
    g.add_argument(
        "--prefix",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prompts that begin alike share pages, where the cache keeps everything (yes)",
    )
    g = p.add_argument_group("what outlives the process")
    g.add_argument("--save-cache", type=Path, metavar="FILE", help="at the end, what was read and answered, as a cache")
    g.add_argument("--load-cache", type=Path, metavar="FILE", help="go on from there: each prompt follows it")
    g.add_argument(
        "--prefix-store",
        type=Path,
        metavar="DIR",
        help="keep whole pages of prompts there, of 64 tokens, and find them in later runs, where --prefix could",
    )
    g.add_argument(
        "--prefix-store-gb",
        type=float,
        metavar="N",
        help=f"forget the least recently used beyond that ({PrefixStore.GIGABYTES:g})",
    )
    g = p.add_argument_group("the model")
    g.add_argument(
        "--checkpoint", default="smollm2", metavar="NAME", help="smollm2, a Hub id, a directory or a .gguf file"
    )
    g.add_argument("--device", default="auto", help="auto, cpu or cuda")
    g.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    g.add_argument(
        "--weights", choices=["int8"], help="of 8 bits, with a scale for 64 of an output channel; else as --dtype"
    )
    g.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="the decode step (yes)")
    g = p.add_argument_group("the report")
    g.add_argument("--json", type=Path, metavar="FILE", help="write it there, too, with more in it")
    g.add_argument("--stats", action="store_true", help="report how healthy the cache is, in --json layer by layer")
    g.add_argument("--quiet", action="store_true", help="the text alone: no report, no progress; errors are still told")
    args = p.parse_args(argv)
    if args.cache == "help":
        print(caches.describe())
        p.exit()
    if args.format == "help":
        print(caches.describe_formats())
        p.exit()
    args.saved = None if args.load_cache is None else Saved(args.load_cache)
    names = ("cache", "budget", "bits", "format", "residual")
    for name, value in zip(names, args.saved.cache if args.saved else (), strict=False):
        said = "the default" if value is None else value
        if getattr(args, name) not in (p.get_default(name), value) and str(getattr(args, name)) != str(value):
            raise UsageError(
                f"--{name} {getattr(args, name)}: --load-cache {args.load_cache} has {said}; drop one of them"
            )
        setattr(args, name, value)
    args.spec = caches.build(
        args.cache,
        **{name: getattr(args, name) for name in names[1:]},
        page_size=args.page_size or (Engine.PAGE if args.prefix_store else 0),
        select=args.select,
        offload=args.offload,
    )
    args.device = pick_device(args.device)
    check(args)
    check_ranks(args)
    args.params = argparse.Namespace(
        **{name: getattr(args, name) for name in Params.__annotations__ if name != "stop_ids"}
    )
    args.text = None if args.prompt_file is None else read_file(args.prompt_file)
    args.batch = batch(args)
    check_batch(args)
    check_saved(args)
    args.store = open_store(args)
    return args


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """Also says which flag, or which of some choices, was probably meant."""
        if found := re.match(r"argument (-\S+): invalid (int|float|number) value: '(.*)'", message):
            kind = "whole number" if found[2] == "int" else "number"
            message, hint = f"{found[1]} {found[3]}: give a {kind}", ""
        elif found := re.match(r"unrecognized arguments: (-[^\s=]*)", message):
            hint = caches.near(found[1], self._option_string_actions)
        elif found := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            hint = caches.near(found[1], re.findall(r"[\w-]+", found[2]))
        else:
            hint = ""
        raise UsageError(message + hint)


def number(text: str) -> int | float:
    return float(text) if "." in text or "e" in text.lower() else int(text)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return pick_device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"  # torchrun: one for each process
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise UsageError(f"--device {name}: choose auto, cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"--device {name}: this PyTorch sees {torch.cuda.device_count()} CUDA devices; use --device cpu"
        )
    return device


def check(args: argparse.Namespace) -> None:
    def refuse(wrong: bool, sentence: str) -> None:
        if wrong:
            raise UsageError(sentence)

    refuse(args.prompt is not None and args.prompt_file is not None, "--prompt and --prompt-file: give one of them")
    given = args.prompt is not None or args.prompt_file is not None
    refuse(args.interactive and given, "--interactive reads its prompts from the terminal; drop --prompt")
    refuse(args.interactive and args.chat is False, "--interactive is a chat; drop --raw")
    check_params(args)
    refuse("" in args.stop, "--stop: an empty text is everywhere; give some text")
    refuse(args.interactive and args.max_new_tokens == 0, "--max-new-tokens 0: --interactive needs at least 1")
    shrinks = args.interactive and not args.spec.policy().appends and isinstance(args.spec.budget, float)
    refuse(
        shrinks, f"--interactive --cache {args.spec.name}: give --budget as a number of slots, there is no one prompt"
    )
    for flag, texts in {"--prompt": args.prompt or [], "--system": filter(None, [args.system])}.items():
        refuse(any(map(not_utf8, texts)), f"{flag}: not UTF-8; convert it first")
    for flag, least in {"max_batch": 1, "num_samples": 1, "pages": 1, "prefill_layers": 1}.items():
        value = getattr(args, flag)
        refuse(value is not None and value < least, f"--{flag.replace('_', '-')} {value}: give {least} or more")
    if args.json is not None:
        check_writable(args.json)


def check_ranks(args: argparse.Namespace) -> None:
    """What several processes that share a model (torchrun) cannot do; the first of them speaks for all."""
    rank, ranks = kernels.started()
    given = {"--interactive": args.interactive, "--prompt-file -": args.prompt_file == "-", "--stats": args.stats}
    given |= {flag: getattr(args, flag[2:].replace("-", "_")) for flag in ("--save-cache", "--load-cache")}
    given["--prefix-store"] = args.prefix_store
    for flag in [flag for flag, value in given.items() if value and ranks > 1]:
        raise UsageError(f"{flag}: not with torchrun, whose {ranks} processes share the model; run it in one process")
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device)
    if rank > 0:
        args.json = None


def check_params(args: argparse.Namespace) -> None:
    """Those flags that a request of a file may have for itself."""

    def refuse(wrong: bool, sentence: str) -> None:
        if wrong:
            raise UsageError(sentence)

    refuse(args.max_new_tokens < 0, f"--max-new-tokens {args.max_new_tokens}: give 0 or more")
    refuse(not 0 <= args.temperature < float("inf"), f"--temperature {args.temperature}: give 0 (greedy) or more")
    refuse(args.top_k is not None and args.top_k < 1, f"--top-k {args.top_k}: give 1 or more")
    refuse(args.top_p is not None and not 0 < args.top_p <= 1, f"--top-p {args.top_p}: give a number in (0, 1]")
    ignored = args.temperature == 0 and (args.top_k is not None or args.top_p is not None)
    refuse(ignored, "--top-k and --top-p do nothing at --temperature 0, which is greedy; give a temperature above 0")
    refuse(not 0 <= args.seed < 2**63, f"--seed {args.seed}: give a number from 0 up, below 2^63")


def check_saved(args: argparse.Namespace) -> None:
    if args.save_cache is not None and args.batch:
        raise UsageError(f"--save-cache {args.save_cache}: a file is of one conversation; give one prompt")
    if args.saved:
        if args.system is not None:
            raise UsageError("--system: the conversation of --load-cache has begun; drop it")
        if args.chat not in (None, args.saved.chat):
            kind = "a chat" if args.saved.chat else "plain text"
            raise UsageError(f"--{'chat' if args.chat else 'raw'}: --load-cache {args.load_cache} is {kind}; drop it")
        args.chat = args.saved.chat
        if args.stats:
            raise UsageError("--stats looks at a text while it is read, and --load-cache has read it; drop one of them")
        if args.prompt is None and args.text is None and not args.interactive:
            raise UsageError(f"--load-cache {args.load_cache}: give what follows it, with --prompt or --interactive")
        if args.interactive and not args.chat:
            raise UsageError(
                f"--interactive is a chat, and --load-cache {args.load_cache} is plain text; give --prompt"
            )
    if args.save_cache is not None and args.json is not None and args.save_cache.resolve() == args.json.resolve():
        raise UsageError(f"--save-cache {args.save_cache} and --json: give two files")
    if args.save_cache is not None:
        check_writable(args.save_cache, "--save-cache")


def open_store(args: argparse.Namespace) -> PrefixStore | None:
    """What --prefix-store names, if it is given and can be of use."""
    path, size = args.prefix_store, args.prefix_store_gb
    if path is None:
        if size is not None:
            raise UsageError(f"--prefix-store-gb {size:g}: there is no store; give --prefix-store DIR as well")
        return None
    for flag, given in {"--no-prefix": not args.prefix, "--load-cache": args.saved, "--stats": args.stats}.items():
        if given:
            raise UsageError(f"--prefix-store and {flag}: give one of them")
    if why := args.spec.why_no_prefix():
        raise UsageError(f"--prefix-store: nothing could be found, {why}; choose --cache full with --format int")
    if size is not None and not size > 0:
        raise UsageError(f"--prefix-store-gb {size:g}: give a number of gigabytes above 0")
    try:
        return PrefixStore(path, PrefixStore.GIGABYTES if size is None else size)
    except OSError as error:
        raise UsageError(f"--prefix-store {path}: {error.strerror}; give a directory that can be written to") from None


def check_batch(args: argparse.Namespace) -> None:
    """What only several prompts can have, and what they cannot."""
    if args.batch:
        if args.spec.policy().ragged and kernels.started()[1] > 1:
            others = caches.either(name for name, policy in caches.POLICIES.items() if not policy.ragged)
            raise UsageError(
                f"--cache {args.spec.name}: not of several prompts with torchrun, where each process counts pages by "
                f"its own heads; choose {others}, or give one prompt"
            )
        if args.stats:
            raise UsageError("--stats looks at the cache of one prompt; drop it, or give one prompt")
        if args.num_samples > args.max_batch:
            raise UsageError(f"--num-samples {args.num_samples}: give --max-batch {args.num_samples} or more")
        same = args.num_samples > 1 and any(
            {**vars(args.params), **r["params"]}["temperature"] == 0 for r in args.batch
        )
        if same:
            raise UsageError(f"--num-samples {args.num_samples}: all would be the same at --temperature 0; give more")
        return
    given = {"--pages": args.pages is not None, "--max-batch": args.max_batch != 8, "--no-prefix": not args.prefix}
    given["--prefill-layers"] = args.prefill_layers != 4
    given["--num-samples"] = args.interactive and args.num_samples != 1
    for flag in [flag for flag, wrong in given.items() if wrong]:
        raise UsageError(f"{flag} is for several prompts: give --prompt twice, --prompt-file of JSON, or --num-samples")


def not_utf8(text: str) -> bool:
    """Were there bytes on the command line that are not UTF-8? Python smuggles them in as surrogates."""
    return any("\ud800" <= c <= "\udfff" for c in text)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on `exit_code` says what it means
    sys.exit(main())
