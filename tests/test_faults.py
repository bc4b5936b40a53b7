"""What goes wrong outside: interrupts, memory, files with flipped bits, and five thousand requests in a row."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from safetensors.torch import save_file
from test_checkpoint import config, sentencepiece_model, weights, write_gguf  # noqa: F401  a fixture

import kernels
from cache import build
from generate import Engine, Params, graphs, main
from model import CheckpointError, ModelArgs, load_checkpoint

ROOT = Path(__file__).parent.parent


# ---------------------------------------------------------------------------------------------------------------------
# Ctrl-C, as a terminal sends it: to the whole group of processes


def interrupted(flags, when, tmp_path, script="generate.py", **environment):
    """Starts a process, waits until `when(process)` returns, interrupts; -> stdout and stderr from then on."""
    report = ["--json", str(tmp_path / "report.json")] if script == "generate.py" else []
    process = subprocess.Popen(
        [sys.executable, str(ROOT / script), *map(str, flags), *report],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
        env=os.environ | environment,
    )
    try:
        when(process)
        os.killpg(process.pid, signal.SIGINT)
        began = time.monotonic()
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err and time.monotonic() - began < 15
    assert not (tmp_path / "report.json").exists() and not list(tmp_path.glob("*.part*"))
    return out, err


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc to see what is being imported")
@pytest.mark.parametrize("script", ["generate.py", "eval.py"])
@pytest.mark.parametrize("seconds", [0, 0.4])
def test_interrupted_before_it_has_begun(script, seconds, tmp_path):
    """While Python imports torch, which takes longer than people wait."""

    def importing(process):
        while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
            time.sleep(0.005)
        time.sleep(seconds)

    interrupted(["--prompt", "x"] if script == "generate.py" else ["ppl"], importing, tmp_path, script)


def test_interrupted_while_it_writes(checkpoint, tmp_path):
    """What was written so far is there, and no file is."""
    saved = tmp_path / "text.kv"
    flags = ["--checkpoint", checkpoint, "--raw", "--prompt", "a", "--max-new-tokens", "1000", "--no-compile"]
    began = []
    interrupted([*flags, "--save-cache", saved], lambda process: began.append(process.stdout.read(5)), tmp_path)
    assert len(began[0]) == 5 and not saved.exists()


def test_interrupted_while_it_compiles(checkpoint, tmp_path):
    """Compiler and all: the next run, with what the interrupted one left on disk, finds nothing that is half there."""
    home = tmp_path / "inductor"

    def compiling(process):
        while not any(files for _, _, files in os.walk(home)):
            time.sleep(0.02)
            assert process.poll() is None
        time.sleep(0.3)

    flags = ["--checkpoint", checkpoint, "--raw", "--prompt", "a", "--max-new-tokens", "4"]
    interrupted(flags, compiling, tmp_path, TORCHINDUCTOR_CACHE_DIR=str(home))
    again = subprocess.run(
        [sys.executable, str(ROOT / "generate.py"), *map(str, flags)],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(home)},
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0 and "4 new" in again.stderr, again.stderr


def test_interrupted_while_it_reads(tmp_path):
    """8,000 tokens take the default model seconds."""
    try:
        load_checkpoint("smollm2", progress=None)
    except CheckpointError as error:
        pytest.skip(str(error))
    (tmp_path / "text").write_text("The keeper wrote every storm into a ledger. " * 700)
    flags = ["--prompt-file", tmp_path / "text", "--no-compile", "--dtype", "float32"]
    out, _ = interrupted(flags, lambda process: time.sleep(6), tmp_path)
    assert out == ""


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def test_what_will_not_fit_is_refused_before_it_is_allocated(checkpoint, monkeypatch, capsys):
    """With what it needs, what there is, and what would fit."""
    command = ["--checkpoint", str(checkpoint), "--raw", "--dtype", "float32", "--no-compile", "--prompt", "abc " * 200]

    def said(free, *flags):
        monkeypatch.setattr(kernels, "free_memory", lambda device: free)
        code = main([*command, "--max-new-tokens", "100", *flags])
        err = capsys.readouterr().err
        assert (code == 2) == (err.count("\n") == 1)
        return err if code else ""

    assert said(10_000).startswith("generate.py: --checkpoint") and "torchrun" in said(10_000)
    cache = 900 * 3 * 3 * (20 * 2 * 4 + 4) + 28 * 3 * 3 * 20 * 2 * 4  # 900 slots, up to whole chunks
    reading = 800 * 4 * (24 * 20 + 3 * 36 + 3 * 48)
    sizes = f"{(cache + reading) / 1e6:.2f} MB, {reading / 1e6:.2f} MB of them only while the prompt is read"
    assert f"--cache full: 900 tokens take {sizes}" in said(cache + reading - 1)
    assert "try --cache full --bits 8" in said(cache + reading - 1)
    assert "try --cache snapkv --budget 0.1 --bits" in said(reading + cache // 5)
    assert "try --cache h2o --budget 500 --bits" in said(reading + cache // 2, "--cache", "h2o", "--budget", "500")
    assert "shorten the prompt" in said(reading // 2)
    assert not said(cache + reading)
    assert not said(2 * cache + reading, "--bits", "4", "--residual", "20000000")  # as many as there are tokens
    assert "2 lanes of 900 tokens: pages take" in said(cache // 2, "--prompt", "x")
    assert "shorten the longest prompt" in said(cache // 2, "--prompt", "x")
    assert not said(reading, "--offload", "disk")


def test_memory_of_a_container(monkeypatch):
    """Its limit, not its machine's; of a system that says nothing, any number."""
    files = {"/proc/meminfo": "MemTotal: 9\nMemAvailable:   1000 kB\n"}
    monkeypatch.setattr(Path, "read_text", lambda self, *_: files[str(self)] if str(self) in files else missing())

    def missing():
        raise OSError

    cpu = torch.device("cpu")
    assert kernels.free_memory(cpu) == 1000 * 1024
    files |= {"/sys/fs/cgroup/memory.max": "max", "/sys/fs/cgroup/memory.current": "5"}
    assert kernels.free_memory(cpu) == 1000 * 1024
    files["/sys/fs/cgroup/memory.max"] = "505"
    assert kernels.free_memory(cpu) == 500
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert kernels.free_memory(cpu) == 125
    files.clear()
    assert kernels.free_memory(cpu) == float("inf")


# ---------------------------------------------------------------------------------------------------------------------
# Files


def use(path) -> None:
    """Loads a checkpoint, and does with it what the command line would."""
    model, tokenizer = load_checkpoint(str(path), dtype=torch.float32, progress=None)
    ids = tokenizer.encode("the 12 <|x|>\n é")
    tokenizer.decode(ids)
    if tokenizer.has_chat_template:
        tokenizer.chat([{"role": "user", "content": "hello"}])
    assert all(0 <= i < model.args.vocab_size for i in ids)
    if ids:
        model(torch.tensor([ids[:8]]), torch.arange(len(ids[:8]))[None])


def mutations(file, n, seed):
    """n files of which a byte is another, bytes are missing, come twice, or are zero: in every region."""
    data, draw = file.read_bytes(), random.Random(seed)
    for i in range(n):
        at = (len(data) * i // n + draw.randrange(max(len(data) // n, 1))) % len(data)
        length = draw.choice([1, 1, 2, 8, 64])
        kinds = [bytes([data[at] ^ 1 << draw.randrange(8)]), b"", data[at : at + length] * 2, bytes(length)]
        file.write_bytes(data[:at] + draw.choice(kinds) + data[at + length :])
        yield f"{file.name} {i}"
    file.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "x.gguf"]
)
def test_any_byte_of_any_file(name, checkpoint, tmp_path, sentencepiece_model):  # noqa: F811
    """Another byte anywhere is found, or is no harm: one sentence, or a model; never a crash, never a hang."""
    path = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, path)
    target, file = path, path / name
    if name == "tokenizer.model":
        (path / "tokenizer.json").unlink()
        (path / "tokenizer_config.json").unlink()
        file.write_bytes(sentencepiece_model[0])
        settings = (path / "config.json").read_text().replace('"vocab_size": 260', '"vocab_size": 600')
        (path / "config.json").write_text(settings)
        args = ModelArgs.from_hf(json.loads(settings))
        save_file(weights(args), path / "model.safetensors")
    if name == "x.gguf":
        args = ModelArgs.from_hf(config(num_hidden_layers=1))
        target = file = write_gguf(tmp_path / name, "llama", weights(args), args)
    use(target)
    refused = fine = 0
    for what in mutations(file, 90, len(name)):
        began = time.monotonic()
        try:
            use(target)
            fine += 1
        except CheckpointError as error:
            assert "\n" not in str(error) and len(str(error)) < 600, what
            refused += 1
        except Exception as error:
            raise AssertionError(what) from error
        assert time.monotonic() - began < 10, what
    assert refused > 5 and refused + fine == 90


# ---------------------------------------------------------------------------------------------------------------------
# A day in miniature


def resident() -> float:
    """Bytes of memory that this process has, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc to see memory")
@pytest.mark.parametrize("number", [2000, pytest.param(5000, marks=pytest.mark.slow)])
def test_thousands_of_requests(number):
    """Of all lengths, some cancelled: memory stays, nothing is compiled again, and every page comes back."""
    torch._dynamo.reset()
    model = tiny_model(n_layer=2, dim=24, hidden_dim=24, n_head=2, n_kv_head=1, head_dim=16, vocab_size=40)
    model.compile()
    engine = Engine(model, build("full", bits=4, residual=8, page_size=16), 8, 100, pages=20, prefill_layers=2)
    draw, common, submitted, seen, sizes = random.Random(0), [7] * 40, 0, {}, []
    while submitted < number or engine.unfinished:
        while submitted < number and engine.unfinished < 12:
            prompt = [draw.randrange(1, 40) for _ in range(min(int(draw.expovariate(0.08)) + 1, 80))]
            prompt = (common + prompt)[:80] if draw.random() < 0.3 else prompt
            id = engine.submit(prompt, Params(draw.randrange(1, 8), stop_ids=(0,)))
            submitted += 1
            if draw.random() < 0.02:
                engine.cancel(id)
            if submitted % 500 == 0:
                sizes.append(resident())
                seen[submitted] = graphs()
        engine.step()
    assert engine.preempted > 0 and engine.hit_tokens > 0
    assert seen[number] == seen[1000], seen
    assert sizes[-1] - sizes[1] < 5, sizes
    assert engine.pool.used == 1 and sum(engine.pool.refs) == 1  # the page that idle lanes write to
    engine.reset()
    assert not engine.pool.prefixes.blocks and not engine.live and not engine.waiting
