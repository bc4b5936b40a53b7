"""eval.py: control arms that cannot flatter, results that survive a kill, a bench that measures what it says."""

import itertools
import json
import os
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
    flags = ["--prompt-tokens", "60", "--batch", "1,3", "--rounds", "1", "--steps", "2", "--bits", "16"]
    assert ev.main(["bench", "--checkpoint", str(checkpoint), *flags]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "of floor" in head and lines[0].startswith("full 16") and len(lines) == 2 * 2
    batch, size = (head.split().index(name) + 1 for name in ("batch", "MB"))  # "full 16" is two words
    assert [line.split()[batch] for line in (lines[0], lines[2])] == ["1", "3"]
    assert float(lines[2].split()[size]) == pytest.approx(3 * float(lines[0].split()[size]), abs=0.02)


@needs_compiler
def test_profile(checkpoint, capsys):
    """Every part of a step, whose bytes are all that the step reads; with int8 weights these are fewer."""
    flags = ["--checkpoint", str(checkpoint), "--prompt-tokens", "100", "--rounds", "1", "--steps", "2", "--bits", "16"]
    whole = {}
    for weights in ([], ["--weights", "int8"]):
        assert ev.main(["profile", *flags, "--cache", "h2o", "--budget", "40", *weights, "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert {r["cache"] for r in rows} == {"full 16", "h2o 40 16"}
        for cache in ("full 16", "h2o 40 16"):
            *parts, step = [r for r in rows if r["cache"] == cache]
            assert [r["part"] for r in parts] == ["q, k, v", "attention", "output", "feed forward", "head"]
            assert step["part"] == "whole step" and step["bytes"] == sum(r["bytes"] for r in parts)
            assert all(r["ms"] > 0 and r["floor_ms"] > 0 for r in rows)
            whole[cache, bool(weights)] = step["bytes"]
    assert whole["h2o 40 16", False] < whole["full 16", False]
    assert whole["full 16", True] < whole["full 16", False]
    assert ev.main(["profile", *flags[:2], "--prompt-tokens", "1010"]) == 2
    assert "--prompt-tokens 1010" in capsys.readouterr().err
    assert ev.main(["bench", *flags[:2], "--vs", "transformers", "--weights", "int8"]) == 2
    assert "--weights int8" in capsys.readouterr().err


@needs_compiler
def test_bench_against_transformers(checkpoint, capsys):
    """The same tokens through its caches; what they hold is counted in bytes."""
    pytest.importorskip("transformers", reason="compares with the transformers package")
    flags = ["--prompt-tokens", "60", "--cache", "full", "--bits", "16", "--rounds", "1", "--steps", "2"]
    assert ev.main(["bench", "--checkpoint", str(checkpoint), *flags, "--vs", "transformers", "--json"]) == 0
    full, dynamic, static, *_ = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [full["cache"], dynamic["cache"], static["cache"]] == [
        "full 16", "transformers Dynamic", "transformers Static"
    ]  # fmt: skip
    token = 2 * 3 * 3 * 20 * default_dtype("cpu").itemsize  # keys and values, layers, heads, channels
    assert dynamic["bytes"] == 64 * token and static["bytes"] >= 64 * token
    assert dynamic["decode_ms"] > 0 and static["speed_vs_full"] > 0


TEXT = ["--context", "150", "--score", "30", "--windows", "2"]
ASKED = ["--length", "200", "--samples", "1", "--answer", "8"]
FEW = {
    "ppl": TEXT,
    "fidelity": TEXT,
    "needle": [*ASKED, "--depth", "0.5"],
    "ruler": ASKED,
    "longbench": ["--length", "220", "--samples", "1", "--answer", "8"],
    "table": [*TEXT, *ASKED, "--depth", "0.5", "--steps", "2", "--rounds", "2"],
    "map": ["--context", "150"],
    "health": ["--context", "150"],
}
EVERY = "window,streaming,h2o,tova,snapkv:window=8,pyramid:window=8,adakv:window=8,expected,keynorm,keydiff,random"


def rows_of(capsys, checkpoint, task, *flags):
    eager = [] if task in ("map", "health") else ["--no-compile"]  # they take no step
    assert ev.main([task, "--checkpoint", str(checkpoint), *eager, "--json", *FEW[task], *flags]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("task", ["ppl", "fidelity", "needle", "ruler", "longbench", "table"])
def test_control_arms_equal_the_full_cache(checkpoint, longbench, capsys, task):
    """A budget of everything at 16 bits is the full cache in every number; a half is not, and says what it cost."""
    names = EVERY if task in ("ppl", "fidelity", "needle") else "snapkv:window=8,h2o"  # many questions take long
    data = ["--data", str(longbench)] if task == "longbench" else []
    rows = rows_of(capsys, checkpoint, task, "--cache", names, "--budget", "1.0,0.5", "--bits", "16", *data)
    assert len(rows) == 1 + 2 * len(ev.cache_names(names)) and rows[0]["cache"] == "full"
    numbers = [
        k[:-6] for k in rows[0] if k.endswith("_error") and k != "speed_error"
    ]  # no two turns take the same time
    assert numbers == {
        "ppl": ["nll", "ppl"],
        "fidelity": ["nll", "kl", "top1", "gap", "ppl"],
        "table": ["kl", "ppl", "needle inside", "needle after", "ruler inside", "ruler after"],
        "longbench": ["inside"],
    }.get(task, ["inside", "after"])
    for row in rows[1:]:
        if row["budget"] == 1:
            assert row["evicted"] == 0
            assert [row[n] for n in numbers] == pytest.approx([rows[0][n] for n in numbers], abs=2e-6)
            assert row["places"] == pytest.approx(rows[0]["places"], abs=2e-6)
        else:
            assert row["evicted"] > 60
            if task in ("ppl", "fidelity", "table"):
                assert abs(row[numbers[0]] - rows[0][numbers[0]]) > 1e-4
    if task == "fidelity":
        assert rows[0]["kl"] == 0 and rows[0]["top1"] == 1 and rows[0]["gap"] == 0
    if task == "table":
        assert rows[0]["speed"] == 1 and all(r["speed"] > 0 for r in rows)


def test_errors_are_of_the_difference_to_the_full_cache(checkpoint, capsys):
    """On the same windows: what makes one text harder than another is no error of a cache."""
    flags = ["--cache", "full,window", "--budget", "0.5", "--bits", "16,8", "--windows", "3", "--together", "2"]
    full, eight, window, _ = rows_of(capsys, checkpoint, "fidelity", *flags)
    assert full["nll_error"] == full["kl_error"] == 0 and 0 < eight["nll_error"] < 0.01 < window["nll_error"]
    assert rows_of(capsys, checkpoint, "fidelity", *flags, "--windows", "1")[1]["nll_error"] is None


def test_a_run_that_is_refused_changes_no_file(checkpoint, capsys, tmp_path):
    """Also where the last line of --out was cut off, which a run that goes on takes away."""
    out = tmp_path / "r.jsonl"
    rows_of(capsys, checkpoint, "ppl", "--cache", "full", "--bits", "16", "--out", str(out))
    whole = out.read_bytes()
    cut = whole + whole.splitlines(keepends=True)[0][:60]
    out.write_bytes(cut)
    flags = ["ppl", "--checkpoint", str(checkpoint), "--no-compile", *TEXT, "--out", str(out)]
    assert ev.main([*flags, "--cache", "h3o"]) == 2 and out.read_bytes() == cut
    assert ev.main([*flags, "--cache", "full", "--bits", "16"]) == 0 and out.read_bytes() == cut  # nothing to add
    assert "2 results of an earlier run (commit " in capsys.readouterr().err
    assert ev.main([*flags, "--cache", "full", "--bits", "8"]) == 0
    assert out.read_bytes().startswith(whole) and all(json.loads(line) for line in out.read_text().splitlines())


def test_results_are_of_these_weights(checkpoint, capsys, tmp_path):
    """A checkpoint that changed under its name is another one."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, tmp_path / "model")
    flags = ["--cache", "full", "--bits", "16", "--windows", "1", "--out", str(tmp_path / "r.jsonl")]
    first = rows_of(capsys, tmp_path / "model", "ppl", *flags)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    save_file({name: w * 1.1 for name, w in weights.items()}, tmp_path / "model" / "model.safetensors")
    second = rows_of(capsys, tmp_path / "model", "ppl", *flags)
    assert first[0]["nll"] != second[0]["nll"] and len((tmp_path / "r.jsonl").read_text().splitlines()) == 2


def test_the_same_sample_is_not_counted_twice(checkpoint, capsys):
    flags = [
        "--cache",
        "full",
        "--bits",
        "16",
        "--length",
        "100,100",
        "--depth",
        "0.5,0.5",
        "--protocol",
        "after,after",
    ]
    assert rows_of(capsys, checkpoint, "needle", *flags)[0]["samples"] == 1


def test_speeds_are_of_these_turns(checkpoint, capsys, tmp_path):
    out = tmp_path / "r.jsonl"
    flags = ["--cache", "window", "--budget", "0.5", "--bits", "16", "--protocol", "after", "--out", str(out)]
    rows_of(capsys, checkpoint, "table", *flags)
    n = len(out.read_text().splitlines())
    rows_of(capsys, checkpoint, "table", *flags)
    assert len(out.read_text().splitlines()) == n
    rows_of(capsys, checkpoint, "table", *flags, "--steps", "3")
    assert len(out.read_text().splitlines()) == n + 1


@pytest.mark.parametrize("flag,word", [("--cache", "snapkv"), ("--format", "nvfp4")])
def test_help_on_names(capsys, flag, word):
    with pytest.raises(SystemExit):
        ev.main(["ppl", flag, "help"])
    assert word in capsys.readouterr().out


def test_frequent_words_do_not_depend_on_the_order_of_a_set():
    """Words that come equally often are ordered by name."""
    import random

    for seed in range(20):
        context, _, answers = ev.frequent_words(random.Random(seed), [], 80)
        listed = context.split("\n\n")[1].split()
        assert answers == sorted(set(listed), key=lambda w: (-listed.count(w), w))[:3]


@pytest.mark.parametrize("bits", [16, 4])
def test_caches_that_read_together_are_as_if_alone(checkpoint, bits):
    """Every buffer of every policy, and the logits."""
    import torch

    from model import load_checkpoint

    model, tokenizer = load_checkpoint(checkpoint, dtype=torch.float32)
    ids = tokenizer.encode(ev.sample_text())[:150]
    specs = [ev.Arm(name, 0.4, bits).spec(150, 20) for name in ev.cache_names(EVERY)]
    together, logits = ev.read_together(model, ids, 20, specs)
    for spec, layers in zip(specs, together, strict=True):
        ((alone,), same) = ev.read_together(model, ids, 20, [spec])
        model.setup_caches(spec, 1, 170)
        expected = model.prefill(torch.tensor([ids]), 0, 20)
        assert torch.equal(logits, expected) and torch.equal(same, expected)
        for mine, single, layer in zip(layers, alone, model.layers, strict=True):
            for name, buffer in layer.attention.cache.named_buffers():
                assert torch.equal(mine.get_buffer(name), buffer), (spec.name, name)
                assert torch.equal(single.get_buffer(name), buffer), (spec.name, name)
        assert 0 < int((layers[0].slot_pos >= 0).sum()) < 150 * 3


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


def test_formats_side_by_side(checkpoint, capsys):
    """Of formats x bits, what there is; keys and values apart; each under its name."""
    formats = ["--format", "int", "kivi:solver=mse", "nvfp4"]
    flags = ["--cache", "full", *formats, "--bits", "8,4,k=4,v=2", "--windows", "1"]
    rows = rows_of(capsys, checkpoint, "fidelity", *flags)
    kivi = ["kivi:solver=mse 4", "kivi:solver=mse k=4,v=2"]
    assert [ev.named(r)[2] for r in rows] == ["16", "int 8", "int 4", "int k=4,v=2", *kivi, "nvfp4 4"]
    assert rows[1]["kl"] < rows[2]["kl"] < rows[3]["kl"] and len({r["kl"] for r in rows}) == 7
    rows = rows_of(capsys, checkpoint, "fidelity", "--cache", "full", "--bits", "16,k=8,v=2", "--windows", "1")
    assert [r["bits"] for r in rows] == [16, "k=8,v=2"] and rows[1]["kl"] > 0
    assert ev.main(["ppl", "--cache", "full", "--format", "nvfp4", "--bits", "8,2"]) == 2
    assert "--format nvfp4: has 4 bits" in capsys.readouterr().err
    given = [("foo", "foo"), ("k=x,v=2", "x"), ("99,4", "99")]
    for (bits, bad), form in itertools.product(given, ["auto", "int"]):
        assert ev.main(["ppl", "--cache", "full", "--format", form, "--bits", bits]) == 2
        assert capsys.readouterr().err.startswith(f"eval.py: --bits {bad}: ")


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


def test_results_of_a_text_are_not_those_of_another(checkpoint, capsys, tmp_path):
    """--out knows results by the text's content, not by its file's name."""
    text, out = tmp_path / "t.txt", tmp_path / "r.jsonl"
    flags = ["--cache", "full", "--bits", "16", "--text", str(text), "--out", str(out)]
    nll = []
    for content in ("abcdefg " * 30, "gfedcba " * 30, "abcdefg " * 30):
        text.write_text(content)
        nll += [r["nll"] for r in rows_of(capsys, checkpoint, "ppl", *flags)]
    assert nll[0] == nll[2] != nll[1] and len(out.read_text().splitlines()) == 2


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


@pytest.mark.parametrize("task", ["fidelity", "needle", "table", "map", "health"])
def test_plot(checkpoint, capsys, tmp_path, task):
    pytest.importorskip("matplotlib", reason="--plot draws with matplotlib")
    picture = tmp_path / "a.png"
    rows_of(capsys, checkpoint, task, "--cache", "window,h2o", "--budget", "0.5,0.3", "--plot", str(picture))
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_plot_without_matplotlib_is_refused_before_any_work(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(ev.importlib.util, "find_spec", lambda name: None)
    assert ev.main(["ppl", "--checkpoint", str(checkpoint), "--plot", "a.png"]) == 2
    assert "matplotlib" in capsys.readouterr().err


def test_a_policy_that_never_fired_is_marked():
    row = {
        "task": "fidelity",
        "places": {},
        "cache": "h2o",
        "budget": 0.5,
        "bits": 16,
        "kept": 10.0,
        "evicted": 0.0,
        "bytes": 1,
        "kl": 0.0,
        "kl_error": 0.0,
    }
    assert ev.grid_lines([row])[1].split()[4] == "NONE"
    assert ev.grid_lines([{**row, "budget": 1.0}])[1].split()[4] == "0"


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


@pytest.fixture(scope="session")
def longbench(tmp_path_factory):
    """Two tasks of the sixteen, two rows each, longer than the tests' prompts may be."""
    path = tmp_path_factory.mktemp("longbench")
    rows = [
        {"input": f"Who is number {i}?", "context": f"START {'Nobody is number 7. ' * 30}MIDDLE {'So it is. ' * 30}END"}
        for i in range(2)
    ]
    for name, answers in {"qasper": ["nobody", "no one"], "multi_news": ["Nobody is number 7. So it is."]}.items():
        more = {"answers": answers, "all_classes": None, "length": 100, "language": "en", "dataset": name}
        lines = [json.dumps({**row, **more, "_id": f"{name}{i}"}) for i, row in enumerate(rows)]
        (path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return path


def test_longbench_runs_what_is_there_and_says_so(checkpoint, longbench, capsys):
    command = ["longbench", "--checkpoint", str(checkpoint), "--no-compile", "--cache", "full", "--bits", "16"]
    flags = [*FEW["longbench"], "--data", str(longbench), "--samples", "5", "--json"]
    assert ev.main([*command, *flags]) == 0
    out, err = capsys.readouterr()
    row = json.loads(out)
    assert row["samples"] == 4 and list(row["places"]) == ["qasper inside", "multi_news inside"]
    assert row["inside"] == pytest.approx(sum(row["places"].values()) / 2)
    assert "2 of 16 tasks found, not narrativeqa" in err and "qasper: 2 of 2 rows" in err


def test_longbench_from_an_archive(longbench, tmp_path, monkeypatch):
    """As the Hub has it, without --data."""
    import sys
    import types
    import zipfile

    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for file in longbench.iterdir():
            archive.write(file, f"data/{file.name}")
    hub = types.SimpleNamespace(hf_hub_download=lambda *_, **__: str(tmp_path / "data.zip"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    lines = lambda files: {name: lines for name, (_, lines) in files.items()}  # noqa: E731
    assert lines(ev.longbench_files(None)) == lines(ev.longbench_files(longbench)) != {}
    assert lines(ev.longbench_files(tmp_path / "data.zip")) == lines(ev.longbench_files(longbench))


def test_longbench_prompts(checkpoint, longbench):
    """Text and question are there; where they are too long, their middle is not; a question "after" is after it."""
    from types import SimpleNamespace

    from model import load_checkpoint

    tokenizer = load_checkpoint(checkpoint)[1]
    wrap = lambda text: tokenizer.chat([{"role": "user", "content": text}])  # noqa: E731
    args = SimpleNamespace(data=longbench, samples=None, length=[0], answer=None)
    for q in ev.longbench(args):
        context, question = ev.fitted(q, wrap, tokenizer, 10**6)
        assert (context, question) == (q.context, q.question) and "{" not in context + question
        assert "START" in context and "END" in context and "MIDDLE" in context and q.answer in (128, 512)
        assert (q.place == "multi_news") != ("Who is number" in question)
        for limit in (700, 701, 900):
            context, question = ev.fitted(q, wrap, tokenizer, limit + q.answer)
            assert limit - 4 <= len(wrap(context + question)) <= limit  # bytes are this tokenizer's tokens
            whole, part = q.context + q.question, context + question
            half = len(part) // 2
            assert question == q.question and len(part) % 2 == 0
            assert whole.startswith(part[:half]) and whole.endswith(part[half:])
    with pytest.raises(ev.UsageError, match="--length 140: too short"):
        ev.fitted(ev.Question("a" * 500, "?", None, 120, "qasper", {"length": 140}, cut=True), wrap, tokenizer, 900)


def test_longbench_knows_sixteen_tasks_in_english():
    assert " ".join(ev.LONGBENCH) == (
        "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique gov_report qmsum multi_news trec triviaqa "
        "samsum passage_count passage_retrieval_en lcc repobench-p"
    )
    summaries = ("gov_report", "multi_news", "passage_count", "lcc")  # nothing is asked but what the task says
    for name, (answer, _, chat, before, after) in ev.LONGBENCH.items():
        assert 32 <= answer <= 512 and before and after
        assert ("{input}" in after) == (name not in summaries) and "{" not in before + after.replace("{input}", "")
        assert chat == (name not in ("trec", "triviaqa", "samsum", "lcc", "repobench-p"))


@pytest.mark.parametrize(
    "text,answer,value",
    [  # computed with the package rouge 1.0.1, which LongBench uses
        (
            "The cat sat on the mat. It was warm there.",
            "A cat sat on a mat. There it was warm and dry.",
            0.5454545404958678,
        ),
        ("one two three four five", "five four three two one", 0.19999999500000015),
        ("a b c d. e f g. a b x", "a b c. d e f g. x a", 0.874999995),
        ("Nothing alike here", "completely other words", 0.0),
        ("same words. same words. same", "same words same words", 0.999999995),
        ("trailing stop. ", "trailing stop", 0.7999999952000001),
        ("", "something", 0.0),
    ],
)
def test_rouge_l(text, answer, value):
    assert ev.rouge_l(text, answer) == pytest.approx(value, abs=1e-12)


def test_longbench_metrics():
    """Cases worked out by hand from the benchmark's definitions."""
    assert ev.f1("The answer is: Paris!", "paris") == pytest.approx(2 * (1 / 3) / (1 / 3 + 1))  # answer, is, paris
    assert ev.f1("An apple a day", "the apple day") == 1 and ev.f1("", "x") == 0 == ev.f1("y", "x")
    assert ev.f1("a b b", "b b c") == pytest.approx(0.8)  # b b of b b and of b b c: "a" is an article
    assert ev.numbered("3 or 4, no: 3", "3") == pytest.approx(2 / 3) and ev.numbered("none", "3") == 0
    assert ev.numbered("Paragraph 12", "Paragraph 12") == 1 and ev.numbered("12", "Paragraph 2") == 0
    classes = ["City", "Other location", "State", "Date"]
    assert ev.classified("It is a City", "City", classes) == 1 and ev.classified("City or Date", "City", classes) == 0.5
    assert ev.classified("Date", "City", classes) == 0 == ev.classified("", "City", classes)
    assert ev.classified("Other location", "Other location", ["location", *classes]) == 1  # a part of its own name
    assert ev.code_similarity("\n# no\nx = foo(1)\ny", "x = foo(2)") == 0.9  # fuzzywuzzy's ratio is 90
    assert ev.code_similarity("return None", "return self.value") == 0.57 and ev.code_similarity("# no", "x") == 0
    assert ev.code_similarity("# no", "") == 1
    best = lambda text, name, metric=ev.f1: ev.official(text, metric, ["x", "y z"], None, name)  # noqa: E731
    assert best("y z", "qasper") == 100 and best("\ny z\nQuestion: more", "triviaqa") == 100
    assert best("y z\nQuestion: more", "qasper") == pytest.approx(100 * 2 / 3)


def test_map_shows_what_is_kept(checkpoint, capsys):
    """The window keeps 4 sinks and the newest 56 of 150, in every layer and head."""
    flags = ["--cache", "window,snapkv:window=8", "--budget", "60"]
    window, snap = rows_of(capsys, checkpoint, "map", *flags)
    assert window["positions"] == [[[*range(4), *range(94, 150)]] * 3] * 3 and window["evicted"] == 90
    assert {len(head) for layer in snap["positions"] for head in layer} == {60} and snap["positions"][0] != snap[
        "positions"
    ][1]
    assert "".join(window["tokens"]) == ev.sample_text()[:150]
    assert ev.main(["map", "--checkpoint", str(checkpoint), "--context", "150", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("window 60 16: 60 of 150 tokens")
    row = lines[1]
    assert row.startswith("  0 |@@") and row.endswith("@@|") and len(row) == 6 + 100 and 55 <= row.count(" ") - 3 <= 62
    assert "0-3  " in lines[5] and "94-149" in lines[6] and repr(ev.sample_text()[94:150]) in lines[6]


def test_health_by_definition(checkpoint, capsys):
    """Attention, errors and gaps, computed here from the model's own queries, keys and values."""
    import torch

    from model import load_checkpoint

    window, four = rows_of(capsys, checkpoint, "health", "--cache", "window", "--budget", "60", "--dtype", "float32")
    model, tokenizer = load_checkpoint(checkpoint, dtype=torch.float32)
    seen = []

    class Spy(torch.nn.Module):
        def enter(self):
            pass

        def leave(self, step):
            pass

        def forward(self, q, k, v, pos):
            seen.append((q, k, v))
            return ev.kernels.causal_attention(q, k, v)

    for layer in model.layers:
        layer.attention.cache = Spy()
    model(torch.tensor([tokenizer.encode(ev.sample_text())[:150]]), torch.arange(150)[None])
    kept = [*range(4), *range(94, 150)]
    for (q, k, _), layer, coarse in zip(seen, window["layers"], four["layers"], strict=True):
        scores = q[0].double().unflatten(0, (3, 3)) @ k[0, :, None].double().mT / 20**0.5
        scores = scores.masked_fill(torch.ones(150, 150, dtype=torch.bool).triu(1), float("-inf"))
        mass = scores.softmax(-1)[:, :, -64:].mean((1, 2))[:, kept].sum(-1)
        assert layer["attention_kept"] == pytest.approx(float(mass.mean()), abs=1e-5)
        assert layer["lowest"] == pytest.approx(float(mass.min()), abs=1e-5) and layer["lowest"] < 0.95
        assert (layer["sinks"], layer["longest_gap"], layer["span"]) == (1, 90, [0, 149])
        assert layer["key_error"] == layer["value_error"] == 0  # 16 bits mean the model's own dtype
        assert coarse["attention_kept"] == layer["attention_kept"]
        assert coarse["key_error"] == 0 == coarse["value_error"]  # 60 tokens: all in the residual


def test_health_sees_fewer_bits(checkpoint, capsys):
    rows = rows_of(capsys, checkpoint, "health", "--context", "400", "--cache", "full", "--bits", "16,8,4,2")
    error = [[layer[name] for r in rows for layer in r["layers"]] for name in ("key_error", "value_error")]
    for e in error:
        sixteen, eight, four, two = (e[i : i + 3] for i in range(0, 12, 3))
        assert sixteen == [0, 0, 0] and all(0 < a < b / 4 < c / 8 for a, b, c in zip(eight, four, two, strict=True))


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
        (["longbench", "--data", "/nowhere"], ["--data /nowhere", "narrativeqa.jsonl", "repobench-p.jsonl"]),
        (["longbench", "--data", "SHORT"], ["--data SHORT", "zip"]),
        (["longbench", "--data", "BAD"], ["--data BAD/qasper.jsonl", "row 1", "context"]),
        (["longbench", "--data", "ODD"], ["--data ODD/trec.jsonl", "row 1"]),
        *(
            (["longbench", "--data", f"ODD{i}"], [f"--data ODD{i}/lcc.jsonl", word])
            for i, word in enumerate(["row 1", "row 1", "row 1", "row 1", "no rows"])
        ),
        (["longbench", "--data", "BROKEN.zip"], ["--data BROKEN.zip", "cannot be read"]),
        (["ppl", "--cache", "full", "--budget", "0.3"], ["--budget 0.3", "full"]),
        (["ppl", "--budget", "inf"], ["--budget", "inf"]),
        (["needle", "--length", "abc"], ["--length", "list of numbers", "abc"]),
        (["longbench", "--length", "0"], ["--length 0"]),
        (["table", "--length", "3000"], ["needle --length 3000", "1024"]),
        (
            ["table", "--cache", "snapkv", "--budget", "0.5", "--context", "150", "--rounds", "60"],
            ["--budget 0.5", "of them"],
        ),
        (["map", "--no-compile"], ["--no-compile", "map"]),
        (["ppl", "--out", "FIFO"], ["--out FIFO", "regular"]),
        (["table", "--context", "900", "--rounds", "90"], ["--context 900", "1024"]),
        (["longbench", "--length", "100,200"], ["--length 100,200", "one"]),
        (["ppl", "--data", "BAD"], ["--data", "longbench", "ppl"]),
        (["map", "--context", "2000"], ["--context 2000", "1024"]),
        (["health", "--text", "SHORT"], ["4 tokens", "150"]),
        (["health", "--out", "x"], ["--out", "health"]),
    ],
)
def test_quality_refusals(checkpoint, capsys, tmp_path, monkeypatch, command, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SHORT").write_text("abc\n")
    (tmp_path / "BAD").mkdir()
    odd = {"input": "?", "context": "x", "answers": ["y"], "all_classes": None}
    broken = [{**odd, "answers": "Paris"}, {**odd, "answers": []}, {**odd, "answers": [5]}, "[" * 200000, ""]
    for i, row in enumerate(broken):
        (tmp_path / f"ODD{i}").mkdir()
        (tmp_path / f"ODD{i}" / "lcc.jsonl").write_text(row if isinstance(row, str) else json.dumps(row))
    (tmp_path / "BROKEN.zip").write_bytes(b"PK\x03\x04 no archive")
    os.mkfifo(tmp_path / "FIFO")
    (tmp_path / "ODD").mkdir()
    (tmp_path / "ODD" / "trec.jsonl").write_text(
        '{"input": "?", "context": "", "answers": ["Date"], "all_classes": null}\n'
    )
    (tmp_path / "BAD" / "qasper.jsonl").write_text('{"input": "?"}\n')
    if "--out" in command:
        (tmp_path / "SHORT").write_text("abc\ndef\n")
    eager = [] if command[0] in ("map", "health") else ["--no-compile"]
    assert ev.main([command[0], "--checkpoint", str(checkpoint), *eager, *FEW.get(command[0], []), *command[1:]]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith("eval.py: ") and all(w in err.splitlines()[-1] for w in words)


@pytest.mark.parametrize(
    "text",
    [
        *("notes", "notes\n", '{"key": 1}\n', "\x00\n", '{"key": "my api key", "x": 1}', "[" * 9999 + "\n"),
        '{"key": {"task": "ppl"}, "result": 5}\n',
        '{"key": {"task": "ppl"}, "result": {}}\n',
        '{"key": {"task": "ppl"}, "result": {"bytes": "x", "evicted": 1}}\n',
    ],
)
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
        (["--batch", "0"], "--batch 0"),
        (["--vs", "gpt"], "--vs"),
        (["--plot", "a.png"], "--plot"),
    ],
)
def test_refusals(checkpoint, capsys, flags, word):
    assert ev.main(["bench", "--checkpoint", str(checkpoint), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and word in err


@needs_compiler
def test_serve(checkpoint, capsys):
    """Lanes beside one, requests of all lengths, prompts that begin alike; each cache has its three rows."""
    flags = ["--checkpoint", str(checkpoint), "--max-batch", "3", "--requests", "4", "--shared", "200", "--steps", "2"]
    flags += ["--rounds", "2", "--prompt-tokens", "50", "--cache", "full,h2o", "--budget", "40", "--bits", "16"]
    assert ev.main(["serve", *flags, "--json", "--page-size", "16"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["cache"] for r in rows] == ["full 16, pages of 16"] * 3 + ["h2o 40 16, pages of 16"] * 3
    assert all(r["ratio"] > 0 and r["alone"] > 0 and r["together"] > 0 for r in rows)
    assert "of which 192 were found" in rows[2]["what"]
    assert "of which 0 were found" in rows[5]["what"]
    assert rows[0]["pages"] == 3 * 3 * 3 * 4  # three lanes of 50 to 64 tokens
    table = ev.serve_lines(rows)
    assert table[0].split() == ["cache", "what", "without", "with", "ratio", "pages", "unused"]
    assert len(table) == 7


@needs_compiler
def test_bench_of_pages(checkpoint, capsys):
    flags = ["--checkpoint", str(checkpoint), "--prompt-tokens", "60", "--rounds", "1", "--steps", "2", "--bits", "16"]
    assert ev.main(["bench", *flags, "--cache", "full", "--page-size", "0,32", "--json"]) == 0
    dense, paged, *_ = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert dense["cache"] == "full 16"
    assert paged["cache"] == "full 16, pages of 32"
    table = 3 * 3 * 3 * 4
    assert abs(paged["bytes"] - dense["bytes"] - table) <= 3 * 3 * 32 * 20 * 2 * default_dtype("cpu").itemsize
    assert ev.main(["bench", *flags, "--page-size", "-1"]) == 2
    assert "--page-size -1" in capsys.readouterr().err
    assert ev.main(["needle", "--page-size", "4"]) == 2


@needs_compiler
def test_bench_of_selection_and_offload(checkpoint, tmp_path, capsys):
    flags = ["--checkpoint", str(checkpoint), "--prompt-tokens", "200", "--rounds", "1", "--steps", "2", "--bits", "16"]
    away = f"disk:{tmp_path}"
    assert ev.main(["bench", *flags, "--cache", "full", "--select", "96", "--offload", f"none,{away}", "--json"]) == 0
    rows = {row["cache"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert [*rows] == [
        *("full 16", f"full 16, offload {away}", "full select 96 16", f"full select 96 16, offload {away}")
    ]
    full, there, some, both = rows.values()
    assert full["bytes"] == there["bytes"] == full["read_bytes"]
    assert some["bytes"] == both["bytes"] > full["bytes"]
    assert some["read_bytes"] == both["read_bytes"] < full["bytes"]
    assert ev.main(["needle", "--offload", away]) == 2
    assert ev.main(["needle", "--cache", "h2o", "--select", "96"]) == 2
