"""eval.py: control arms that cannot flatter, results that survive a kill, a bench that measures what it says."""

import itertools
import json
import shutil

import pytest

import eval as ev
from model import default_dtype

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")

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


@needs_compiler
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


@needs_compiler
def test_bench_prints_a_table(checkpoint, capsys):
    assert ev.main(["bench", "--checkpoint", str(checkpoint), *FLAGS[:2], "--rounds", "1", "--steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * 3 and "vs first" in lines[0] and lines[1].startswith("full 16")


TEXT = ["--context", "150", "--score", "30", "--windows", "2"]
ASKED = ["--length", "200", "--samples", "1", "--answer", "8"]
FEW = {"ppl": TEXT, "fidelity": TEXT, "needle": [*ASKED, "--depth", "0.5"], "ruler": ASKED}
EVERY = "window,streaming,h2o,tova,snapkv:window=8,pyramid:window=8,adakv:window=8,expected,keynorm,keydiff,random"


def rows_of(capsys, checkpoint, task, *flags):
    command = [task, "--checkpoint", str(checkpoint), "--no-compile", "--json", *FEW[task], *flags]
    assert ev.main(command) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("task", ["ppl", "fidelity", "needle", "ruler"])
def test_control_arms_equal_the_full_cache(checkpoint, capsys, task):
    """A budget of everything at 16 bits is the full cache in every number; a quarter is not, and says what it cost."""
    names = "snapkv:window=8,h2o" if task == "ruler" else EVERY  # seven tasks of two protocols take long
    rows = rows_of(capsys, checkpoint, task, "--cache", names, "--budget", "1.0,0.5", "--bits", "16")
    assert len(rows) == 1 + 2 * len(ev.cache_names(names)) and rows[0]["cache"] == "full"
    numbers = [k for k in rows[0] if k + "_error" in rows[0]]
    assert numbers == {"ppl": ["nll", "ppl"], "fidelity": ["kl", "top1", "gap"], "needle": ["inside", "after"]}.get(
        task, numbers
    )
    for row in rows[1:]:
        if row["budget"] == 1:
            assert row["evicted"] == 0
            assert [row[n] for n in numbers] == pytest.approx([rows[0][n] for n in numbers], abs=2e-6)
        else:
            assert row["evicted"] > 60
            if task in ("ppl", "fidelity"):
                assert abs(row[numbers[0]] - rows[0][numbers[0]]) > 1e-4
    if task == "fidelity":
        assert rows[0]["kl"] == 0 and rows[0]["top1"] == 1 and rows[0]["gap"] == 0


def test_arms_of_one_budget_hold_the_same(checkpoint, capsys):
    """What follows the prompt is part of the budget: 91 of 181 slots in the end, whatever the policy."""
    rows = rows_of(capsys, checkpoint, "ppl", "--cache", EVERY, "--budget", "0.5,70", "--bits", "16,4")
    assert {round(r["kept"]) for r in rows if r["budget"] == 0.5} == {90}
    assert {round(r["kept"]) for r in rows if r["budget"] == 70} == {70}
    assert all(r["kept"] + r["evicted"] == 180 for r in rows)


def test_fewer_bits_cost_more_fidelity(checkpoint, capsys):
    rows = rows_of(capsys, checkpoint, "fidelity", "--cache", "full", "--bits", "16,8,4,2")
    kl = [r["kl"] for r in rows]
    assert kl[0] == 0 and 0 < kl[1] < kl[2] < kl[3]
    assert [r["bits"] for r in rows] == [16, 8, 4, 2]


def test_an_interrupted_run_goes_on(checkpoint, capsys, tmp_path, monkeypatch):
    out, flags = tmp_path / "r.jsonl", ["--cache", "window,h2o", "--budget", "0.5", "--bits", "16"]
    calls, through = [], ev.through

    def counted(*args):
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return through(*args)

    monkeypatch.setattr(ev, "through", counted)
    command = ["ppl", "--checkpoint", str(checkpoint), "--no-compile", "--json", *TEXT, *flags, "--out", str(out)]
    assert ev.main(command) == 130
    assert len(out.read_text().splitlines()) == 4
    with out.open("a") as file:
        file.write('{"key": {"task"')  # killed while it wrote
    capsys.readouterr()
    assert ev.main(command) == 0
    again = capsys.readouterr().out
    assert len(calls) == 5 + 2  # three arms, two windows, four of them done before
    assert len(out.read_text().splitlines()) == 6 and all(json.loads(line) for line in out.read_text().splitlines())
    assert ev.main(command) == 0 and capsys.readouterr().out == again and len(calls) == 7
    fresh = ["ppl", "--checkpoint", str(checkpoint), "--no-compile", "--json", *TEXT, *flags]
    assert ev.main(fresh) == 0 and capsys.readouterr().out == again


def test_rulers_answers_are_right():
    """Read back from the text itself: what is asked for is there, and nothing else would do."""
    import random
    import re
    from collections import Counter

    lines = ev.sample_text().split("\n")[:200]
    for seed, (name, task) in itertools.product(range(5), ev.RULER.items()):
        context, question, answers = task(random.Random(seed), list(lines), 2000)
        if name in ("single", "multikey", "multivalue", "multiquery"):
            pairs = re.findall(r"The locker named (\w+) opens with (\d+)\.", context)
            asked = re.search(r"named (.*)\?", question)[1].split(" and ")
            assert sorted(answers) == sorted(code for who, code in pairs if who in asked)
            assert (len(pairs), len(answers)) == {"single": (1, 1), "multikey": (5, 1)}.get(name, (4, 4))
        elif name == "variables":
            value = {}
            for left, right in re.findall(r"Let (\w+) be (\w+)\.", context):
                value[left] = value.get(right, right)  # in the order of the text
            wanted = re.search(r"value (\d+)", question)[1]
            assert sorted(answers) == sorted(n for n, v in value.items() if v == wanted) and len(answers) == 5
        else:
            listed = re.findall(r"\b[a-z]+\b", context.split("\n\n")[1])
            top = [w for w, _ in Counter(listed).most_common(len(answers))]
            assert name == "frequent" or set(top) == set(answers)
            counts = Counter(listed)
            assert sorted(counts[w] for w in answers) == sorted(counts[w] for w in top)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_needle_lies_at_its_depth(depth):
    import random

    lines = [f"line {i}" for i in range(100)]
    context, _, (key,) = ev.needle(random.Random(0), lines, depth)
    assert context.count(key) == 2 and context[: context.index(key)].count("line") == round(100 * depth)


def test_plot(checkpoint, capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="--plot draws with matplotlib")
    rows_of(
        capsys, checkpoint, "fidelity", "--cache", "window", "--budget", "0.5,0.3", "--plot", str(tmp_path / "a.png")
    )
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_plot_without_matplotlib_is_refused_before_any_work(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(ev.importlib.util, "find_spec", lambda name: None)
    assert ev.main(["ppl", "--checkpoint", str(checkpoint), "--plot", "a.png"]) == 2
    assert "matplotlib" in capsys.readouterr().err


def test_a_policy_that_never_fired_is_marked():
    row = {
        "cache": "h2o",
        "budget": 0.5,
        "bits": 16,
        "kept": 10.0,
        "evicted": 0.0,
        "bytes": 1,
        "kl": 0.0,
        "kl_error": 0.0,
    }
    assert ev.grid_table([row])[1][4] == "NONE" and ev.grid_table([{**row, "budget": 1.0}])[1][4] == "0"


def test_ppl_is_the_models_own(checkpoint, capsys, tmp_path):
    """Text from a file; the full cache's perplexity is that of one forward pass without any cache."""
    import torch

    from model import load_checkpoint

    text = "".join(chr(97 + i * i % 23) for i in range(181))
    (tmp_path / "t.txt").write_text(text)
    (row,) = rows_of(capsys, checkpoint, "ppl", "--cache", "full", "--bits", "16", "--text", str(tmp_path / "t.txt"))
    model, tokenizer = load_checkpoint(checkpoint)
    ids = torch.tensor([tokenizer.encode(text)])
    logits = model(ids, torch.arange(181)[None])[0].float()
    nll = torch.nn.functional.cross_entropy(logits[150:180], ids[0, 151:])
    assert row["samples"] == 1 and row["nll"] == pytest.approx(
        float(nll), abs=0.02 if model.norm.weight.dtype == torch.bfloat16 else 1e-4
    )


@pytest.mark.parametrize(
    "command,words",
    [
        (["ppl", "--text", "/nowhere.txt"], ["--text /nowhere.txt", "No such file"]),
        (["ppl", "--text", "SHORT"], ["4 tokens", "181"]),
        (["ppl", "--context", "5000"], ["5031", "1024"]),
        (["ppl", "--budget", "0.05", "--cache", "snapkv"], ["--budget 0.05", "9 slots", "95"]),
        (["ppl", "--budget", "half"], ["--budget"]),
        (["nothing"], ["nothing", "ppl"]),
        (["ppl", "--depth", "0.3"], ["--depth", "needle", "ppl"]),
        (["ruler", "--rounds", "3"], ["--rounds", "bench", "ruler"]),
        (["needle", "--depth", "1.5"], ["--depth 1.5"]),
        (["needle", "--protocol", "outside"], ["--protocol outside", "inside"]),
        (["needle", "--length", "3000"], ["--length 3000", "1024"]),
        (["ppl", "--out", "/nowhere/r.jsonl"], ["--out /nowhere/r.jsonl"]),
        (["ppl", "--cache", "full", "--out", "SHORT"], ["--out SHORT", "line 1"]),
    ],
)
def test_quality_refusals(checkpoint, capsys, tmp_path, monkeypatch, command, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SHORT").write_text("abc\n")
    if "--out" in command:
        (tmp_path / "SHORT").write_text("abc\ndef\n")
    assert (
        ev.main([command[0], "--checkpoint", str(checkpoint), "--no-compile", *FEW.get(command[0], []), *command[1:]])
        == 2
    )
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith("eval.py: ") and all(w in err.splitlines()[-1] for w in words)


@pytest.mark.parametrize("text", ["notes", "notes\n", '{"key": 1}\n', "\x00\n"])
def test_a_file_that_is_no_result_is_left_alone(checkpoint, capsys, tmp_path, text):
    (tmp_path / "mine").write_text(text)
    flags = ["--checkpoint", str(checkpoint), "--no-compile", *TEXT, "--cache", "full", "--out", str(tmp_path / "mine")]
    assert ev.main(["ppl", *flags]) == 2
    assert "line 1" in capsys.readouterr().err and (tmp_path / "mine").read_text() == text


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
