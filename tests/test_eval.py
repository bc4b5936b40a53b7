"""eval.py: the bench measures what it says, on every row."""

import json
import shutil

import pytest

import eval as ev
from model import default_dtype

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")

FLAGS = [
    "--prompt-tokens",
    "60,200",
    "--cache",
    "full,pyramid:window=4",
    "--budget",
    "0.25",
    "--steps",
    "4",
    "--rounds",
    "2",
]


def test_bench(checkpoint, capsys):
    assert ev.main(["bench", "--checkpoint", str(checkpoint), *FLAGS, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["cache"], r["prompt_tokens"]) for r in rows] == [
        (name, prompt)
        for prompt in (60, 200)
        for name in ("full 16", "full 4", "pyramid:window=4 0.25 16", "pyramid:window=4 0.25 4")
    ]
    full, _, small, small4 = rows[4:]
    assert rows[0]["speed_vs_first"] == 1 and all(r["decode_ms"] > 0 and r["prefill_tok_s"] > 0 for r in rows)
    assert full["slots"] == 200 + 4 * 3 and small["slots"] == 50 + 4 * 3
    assert small["bytes"] < 0.5 * full["bytes"]
    layer = 2 * 200 * 3 * 20 * default_dtype("cpu").itemsize  # one layer's keys and values
    assert full["kv_peak_bytes"] == full["bytes"] + layer and small["kv_peak_bytes"] == small["bytes"] + layer
    assert small4["bytes"] != small["bytes"]


def test_bench_prints_a_table(checkpoint, capsys):
    assert ev.main(["bench", "--checkpoint", str(checkpoint), *FLAGS[:2], "--rounds", "1", "--steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * 3 and "vs first" in lines[0] and lines[1].startswith("full 16")


@pytest.mark.parametrize(
    "flags,word",
    [
        (["--cache", "h3o"], "h3o"),
        (["--rounds", "0"], "--rounds 0"),
        (["--prompt-tokens", "0"], "--prompt-tokens 0"),
        (["--prompt-tokens", "x"], "--prompt-tokens"),
        (["--prompt-tokens", "100000"], "100"),
        (["--bits", "5"], "--bits 5"),
    ],
)
def test_refusals(checkpoint, capsys, flags, word):
    assert ev.main(["bench", "--checkpoint", str(checkpoint), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and word in err
