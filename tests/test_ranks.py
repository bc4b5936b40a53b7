"""Several processes that share a model: the same tokens as one, and none that waits for one that is gone."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import needs_smollm2, tiny_args

import model as m
from cache import FORMATS, POLICIES

HERE = Path(__file__).parent
GENERATE = HERE.parent / "generate.py"
GENERATE_ARGS = [str(GENERATE), "--raw", "--dtype", "float32"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def environment(**more):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in names} | {"OMP_NUM_THREADS": "1"} | more


def found(command, out, **more):
    done = subprocess.run([*command, out], env=environment(**more), capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text())


def one_and_three(checkpoint, tmp_path, **more):
    script = [str(HERE / "ranks.py"), str(checkpoint)]
    one = found([sys.executable, *script], tmp_path / "one", **more)
    return one, found([*TORCHRUN, "3", *script], tmp_path / "three", **more)


def same_in_three(checkpoint, tmp_path, **more):
    one, three = one_and_three(checkpoint, tmp_path, **more)
    assert three == one
    return one


@pytest.mark.parametrize("name", ["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
def test_three_processes_say_what_one_says(name, checkpoint, tmp_path):
    """In float32, every policy, every format, pages, files, lanes; the same tokens are kept, too. Of the default model,
    it takes a minute."""
    if name == "smollm2":
        needs_smollm2()
    one = same_in_three(checkpoint if name == "tiny" else name, tmp_path)
    assert one["adakv"][1] == one["snapkv"][1] < one["select"][1]  # heads that share a budget share it with all
    assert len({tuple(held) for name, (_, *held) in one.items() if name != "engine"}) > 10  # each keeps something else


@pytest.mark.slow
def test_three_processes_say_what_one_says_of_every_pair(tmp_path):
    """Every policy with every format, on the default model: the same tokens, as many kept, and the same ones, but for
    near ties, which sums in another order may decide otherwise. It takes minutes."""
    needs_smollm2()
    one, three = one_and_three("smollm2", tmp_path, PRODUCT="1")
    assert {name: what[:2] for name, what in three.items()} == {name: what[:2] for name, what in one.items()}
    assert sum(three[name] != what for name, what in one.items()) <= 2
    forms = sum(len(store.widths) for store in FORMATS.values())
    kivi = len(FORMATS["kivi"].widths)
    assert len(one) >= len(POLICIES) * forms - kivi


def test_compiled(checkpoint, tmp_path):
    """From the third step on a record is replayed, sums over processes included."""
    same_in_three(checkpoint, tmp_path, COMPILED="1")


def test_only_the_first_process_speaks(checkpoint, tmp_path):
    command = [*GENERATE_ARGS, "--checkpoint", checkpoint, "--prompt", "a b c", "--max-new-tokens", "6", "--no-compile"]
    alone = subprocess.run([sys.executable, *map(str, command)], env=environment(), capture_output=True, text=True)
    report = tmp_path / "report.json"
    together = subprocess.run(
        [*TORCHRUN, "3", *map(str, command), "--json", report], env=environment(), capture_output=True, text=True
    )
    assert together.returncode == alone.returncode == 0, together.stderr[-2000:]
    assert together.stdout == alone.stdout and together.stderr.count("tokens   ") == 1
    assert "ranks    3 processes" in together.stderr and "ranks " not in alone.stderr
    assert json.loads(report.read_text())["cache"]["kept_per_head"] == [[10], [10], [10]]  # its own head of each layer


@pytest.mark.parametrize(
    "ranks, flags, said",
    [
        (2, [], "torchrun --nproc-per-node 2: 3 KV heads and 48 hidden units cannot be shared"),
        (2, ["--interactive"], "--interactive: not with torchrun, whose 2 processes share the model"),
        (2, ["--save-cache", "x"], "--save-cache: not with torchrun"),
        (2, ["--prompt-file", "-"], "--prompt-file -: not with torchrun"),
        (3, ["--prompt", "b", "--cache", "adakv"], "--cache adakv: not of several prompts with torchrun"),
    ],
)
def test_what_several_processes_cannot_do(ranks, flags, said, checkpoint):
    """Refused before any of them waits for another; without torchrun's agent, whose own report is long."""
    raw = [] if "--interactive" in flags else ["--raw"]
    prompt = [] if {"--interactive", "--prompt-file"} & set(flags) else ["--prompt", "a"]
    started = start(ranks, [GENERATE, *raw, "--no-compile", "--checkpoint", checkpoint, *prompt, *flags])
    outs = [p.communicate(timeout=120) for p in started]
    assert [p.returncode for p in started] == [2] * ranks
    assert said in outs[0][1] and "Traceback" not in outs[0][1] and not any(err for _, err in outs[1:])


def start(ranks, command):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    envs = [environment(**shared, MASTER_PORT=str(port), RANK=str(r), LOCAL_RANK=str(r)) for r in range(ranks)]
    return [subprocess.Popen([sys.executable, *map(str, command)], env=env, **pipes) for env in envs]


@pytest.mark.parametrize("who", [0, 2])
def test_a_process_that_dies_ends_the_others(who, checkpoint):
    """Killed while all decode: the others say so within 30 seconds, whichever it was, and no traceback."""
    command = [*GENERATE_ARGS, "--no-compile", "--checkpoint", checkpoint, "--prompt", "a", "--max-new-tokens", "900"]
    started = start(3, command)
    try:
        first = started[0].stdout.read(1)  # they decode
        assert first
        started[who].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        for r, p in enumerate(started):
            if r != who:
                err = p.communicate(timeout=30)[1]
                assert p.returncode == 1 and f"rank {r} of 3: another process has ended" in err, err
                assert "Traceback" not in err and len(err.strip().splitlines()) <= 2
        assert time.monotonic() - killed < 30
    finally:
        for p in started:
            p.kill()


@pytest.mark.parametrize("end", ["pipe", "json"])
def test_the_first_process_ends_alone(end, checkpoint):
    """Whoever read its output has gone, or its report cannot be written: none waits for it, none has a traceback."""
    flags = ["--no-compile", "--checkpoint", checkpoint, "--prompt", "a"]
    flags += ["--max-new-tokens", "900"] if end == "pipe" else ["--max-new-tokens", "3", "--json", "/dev/full"]
    started = start(3, [*GENERATE_ARGS, *flags])
    try:
        if end == "pipe":
            assert started[0].stdout.read(1)
            started[0].stdout.close()
            started[0].stdout = None
        errors = [p.communicate(timeout=60)[1] for p in started]
        assert not any("Traceback" in error for error in errors)
        assert started[0].returncode == (128 + signal.SIGPIPE if end == "pipe" else 2)
        assert "--json /dev/full: No space left" in errors[0] or end == "pipe"
    finally:
        for p in started:
            p.kill()


def test_shares_of_every_matrix_add_up(monkeypatch):
    """Together all processes have every weight once; a bias of a sum is added by the first alone."""
    whole = m.Transformer(tiny_args(qkv_bias=True, o_bias=True))
    share = m.Transformer(whole.args.shared(3))
    for (name, full), like in zip(whole.state_dict().items(), share.state_dict().values(), strict=True):
        stem, kind = name.split(".", 2)[-1].rsplit(".", 1) if name.startswith("layers.") else name.rsplit(".", 1)
        heads = [9 * 20, 3 * 20, 3 * 20] if stem == "attention.wqkv" else [len(full)]
        full, parts = torch.randn_like(full), []
        for rank in range(3):
            monkeypatch.setattr(m.kernels, "RANKS", 3)
            monkeypatch.setattr(m.kernels, "RANK", rank)
            parts.append(torch.cat([m._share(stem, piece) for piece in full.split(heads)]))
            assert parts[-1].shape == like.shape, name
        if stem not in m.SHARED:
            assert all(torch.equal(part, full) for part in parts)
        elif stem == "attention.wo" and kind == "bias":
            torch.testing.assert_close(sum(parts), full)
        else:
            assert sum(part.numel() for part in parts) == full.numel()
            assert sorted(torch.cat([p.flatten() for p in parts]).tolist()) == sorted(full.flatten().tolist())
