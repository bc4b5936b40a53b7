"""The command line and the loop: what a user types, what comes out, and what is refused."""

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import decode, needs_smollm2, tiny_model, tokens

import generate as g
from cache import build
from model import load_checkpoint

ROOT = Path(g.__file__).parent


@pytest.fixture
def cli(checkpoint, tmp_path, capsys):
    """Runs the command line on the tiny checkpoint: cli("--prompt", "Hi") -> exit code, stdout, stderr, --json."""

    def run(*flags, eager=True):
        file = tmp_path / "report.json"
        file.unlink(missing_ok=True)
        base = ["--checkpoint", str(checkpoint), "--dtype", "float32", "--json", str(file)]
        code = g.main([*base, *(["--no-compile"] if eager else []), *flags])
        out, err = capsys.readouterr()
        return code, out, err, json.loads(file.read_text()) if file.exists() else None

    return run


PROMPT = "The quick brown fox jumps over the lazy dog, and then it does so again and again. " * 3


def test_report(cli):
    code, out, err, data = cli(
        "--prompt", PROMPT, "--cache", "pyramid:window=8", "--bits", "4", "--max-new-tokens", "9"
    )
    assert code == 0
    assert set(data) == {"prompt_tokens", "new_tokens", "text", "token_ids", "cache", "time", "graphs"}
    assert list(data["cache"]) == [
        *(
            "policy",
            "format",
            "bits",
            "layout",
            "slots_per_layer",
            "kept_per_layer",
            "evicted_per_layer",
            "kept_per_head",
        ),
        *("bytes", "offloaded_bytes", "read_bytes", "full_bytes"),
    ]
    assert list(data["time"]) == [
        *("load_s", "compile_s", "prefill_s", "decode_s", "prefill_tok_s", "decode_tok_s", "decode_gb_s")
    ]
    c, prompt = data["cache"], data["prompt_tokens"]
    assert prompt == len(PROMPT) + len("<|start|>user\n\n<|start|>assistant\n") - 2 * len("<|start|>") + 2 + 1
    assert data["new_tokens"] == len(data["token_ids"]) == 9
    kept = round(0.2 * prompt)  # of the prompt, on average over the layers
    assert sum(c["kept_per_layer"]) == 3 * (kept + 8) and sum(c["slots_per_layer"]) == 3 * (kept + 9)
    assert all(k + e == prompt + 8 for k, e in zip(c["kept_per_layer"], c["evicted_per_layer"], strict=True))
    assert c["kept_per_head"] == [[k] * 3 for k in c["kept_per_layer"]]
    assert len(set(c["slots_per_layer"])) == 3
    assert c["full_bytes"] == (prompt + 8) * 3 * 3 * 20 * 2 * 2
    assert (c["policy"], c["format"], c["bits"], c["layout"]) == ("pyramid", "k=int:solver=mse,v=int", 4, "dense")
    assert data["graphs"] == 0 and data["time"]["compile_s"] == 0
    assert out == data["text"] + "\n"
    assert f"{prompt:,} prompt + 9 new" in err and "ratio" in err and "tok/s" in err


def test_bytes_in_the_report_are_the_caches_own(cli, checkpoint):
    data = cli("--prompt", PROMPT, "--bits", "2", "--max-new-tokens", "4", "--raw")[3]
    model, _ = load_checkpoint(str(checkpoint), dtype=torch.float32)
    model.setup_caches(build("full", bits=2), 1, len(PROMPT) + 4)
    model.prefill(torch.zeros(1, len(PROMPT), dtype=torch.long), room=4)
    assert data["cache"]["bytes"] == sum(layer.attention.cache.nbytes() for layer in model.layers)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_new_tokens(cli, n):
    code, out, _, data = cli("--prompt", PROMPT, "--max-new-tokens", str(n))
    assert code == 0 and data["new_tokens"] == n and out == data["text"] + "\n"
    assert data["time"]["prefill_s"] > 0 and data["cache"]["kept_per_layer"][0] == data["prompt_tokens"] + max(n - 1, 0)
    if n == 0:
        assert data["text"] == ""


def test_greedy_is_the_default_and_a_budget_of_everything_changes_nothing(cli):
    full = cli("--prompt", PROMPT, "--max-new-tokens", "20")[3]
    for flags in (["--cache", "pyramid", "--budget", "1.0"], ["--cache", "snapkv", "--budget", "500"], ["--seed", "5"]):
        assert cli("--prompt", PROMPT, "--max-new-tokens", "20", *flags)[3]["token_ids"] == full["token_ids"]
    small = cli("--prompt", PROMPT, "--max-new-tokens", "20", "--cache", "window", "--budget", "8")[3]
    assert small["token_ids"][0] == full["token_ids"][0]  # the prompt was read in full
    assert small["token_ids"] != full["token_ids"]


def test_same_seed_same_text(cli):
    flags = ["--prompt", PROMPT, "--max-new-tokens", "20", "--temperature", "1.5"]
    a, b, c = (cli(*flags, "--seed", seed)[3]["token_ids"] for seed in ("1", "1", "2"))
    assert a == b != c


def test_prompt_sources(cli, tmp_path, monkeypatch):
    expected = cli("--prompt", "Grüße 🦊", "--max-new-tokens", "5")[3]
    (tmp_path / "p.txt").write_text("Grüße 🦊", encoding="utf-8")
    assert (
        cli("--prompt-file", str(tmp_path / "p.txt"), "--max-new-tokens", "5")[3]["token_ids"] == expected["token_ids"]
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüße 🦊".encode())))
    assert cli("--prompt-file", "-", "--max-new-tokens", "5")[3]["token_ids"] == expected["token_ids"]
    assert cli("--prompt", "Grüße 🦊", "--raw", "--max-new-tokens", "5")[3]["prompt_tokens"] == 12


def test_system_message_is_read(cli):
    plain = cli("--prompt", "Hi", "--max-new-tokens", "1")[3]["prompt_tokens"]
    assert cli("--prompt", "Hi", "--system", "Be brief", "--max-new-tokens", "1")[3]["prompt_tokens"] == plain + 8 + 10


def test_typed_control_tokens_are_text(cli):
    ids = cli("--prompt", "<|end|>", "--raw", "--max-new-tokens", "0")[3]
    assert ids["prompt_tokens"] == len("<|end|>")


def test_the_demonstration_is_about_3000_tokens():
    needs_smollm2()
    _, tokenizer = load_checkpoint("smollm2")
    n = len(tokenizer.chat([{"role": "user", "content": g.demonstration()}]))
    assert 2500 < n < 3500


# ---------------------------------------------------------------------------------------------------------------------
# Refusals: one sentence with the flag in it, exit code 2, nothing written


@pytest.mark.parametrize(
    "flags,words",
    [
        (["--cache", "h3o"], ["h3o", "pyramid"]),
        (["--cache", "snapkv:windo=3"], ["windo", "window"]),
        (["--format", "kiwi", "--bits", "4"], ["kiwi", "int"]),
        (["--bits", "3"], ["--bits 3", "8, 4 or 2"]),
        (["--bits", "four"], ["--bits", "four"]),
        (["--budget", "lots"], ["--budget", "lots"]),
        (["--cache", "pyramid", "--budget", "16"], ["--budget 16", "17"]),
        (["--cache", "full", "--budget", "16"], ["--budget 16", "full"]),
        (["--residual", "5"], ["--residual 5", "--bits"]),
        (["--prompt", ""], ["prompt is empty"]),
        (["--prompt", "", "--raw"], ["prompt is empty"]),
        (["--prompt-file", "no-such-file"], ["--prompt-file no-such-file", "No such file"]),
        (["--prompt", "a", "--prompt-file", "b"], ["--prompt", "--prompt-file"]),
        (["--max-new-tokens", "-1"], ["--max-new-tokens -1"]),
        (["--max-new-tokens", "5000"], ["--max-new-tokens 5000", "1024", "at most"]),
        (["--prompt", "a" * 3000, "--max-new-tokens", "30"], ["1024", "shorten the prompt by", "streaming"]),
        (["--top-p", "0", "--temperature", "1"], ["--top-p 0"]),
        (["--top-p", "1.5", "--temperature", "1"], ["--top-p 1.5"]),
        (["--top-k", "0", "--temperature", "1"], ["--top-k 0"]),
        (["--top-k", "3"], ["--top-k", "--temperature"]),
        (["--temperature", "-1"], ["--temperature -1"]),
        (["--temperature", "nan"], ["--temperature nan"]),
        (["--stop", ""], ["--stop"]),
        (["--device", "tpu"], ["--device tpu", "cpu"]),
        (["--json", "/no/such/dir/x.json"], ["--json /no/such/dir/x.json"]),
        (["--json", "/proc/x.json"], ["--json /proc/x.json"]),
        (["--json", "x" * 300], ["--json"]),
        (["--checkpoint", "a" * 5000], ["aaa"]),
        (["--seed", str(2**64), "--temperature", "1"], ["--seed"]),
        (["--seed", "-1"], ["--seed -1"]),
        (["--device", "cpu:99"], ["--device cpu:99"]),
        (["--cache", "pyramid:beta=nan", "--budget", "100"], ["beta=nan"]),
        (["--prompt", "h\udcff"], ["--prompt", "UTF-8"]),
        (["--interactive", "--max-new-tokens", "0"], ["--max-new-tokens 0"]),
        (["--interactive", "--cache", "window"], ["--interactive", "--budget"]),
        (["--system", "x", "--raw"], ["--system", "--raw"]),
        (["--interactive", "--prompt", "x"], ["--interactive", "--prompt"]),
        (["--interactive", "--raw"], ["--interactive", "--raw"]),
        (["--no-such-flag"], ["--no-such-flag"]),
        (["--checkpoint", "/no/such/path"], ["/no/such/path"]),
    ],
)
def test_refusals(cli, flags, words):
    prompt = [] if {"--prompt", "--prompt-file", "--interactive"} & set(flags) else ["--prompt", "Hello there"]
    code, out, err, data = cli(*prompt, *flags)
    assert code == 2 and out == "" and data is None
    assert err.startswith("generate.py: ") and err.count("\n") == 1 and "Traceback" not in err
    assert all(word in err for word in words), err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_cuda(cli):
    code, _, err, _ = cli("--prompt", "x", "--device", "cuda")
    assert code == 2 and "--device cuda" in err and "--device cpu" in err


def test_prompt_file_not_utf8(cli, tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    code, _, err, _ = cli("--prompt-file", str(tmp_path / "latin"))
    assert code == 2 and "UTF-8" in err and "latin" in err and err.count("\n") == 1


def test_stats(cli):
    """What --stats adds to the report: of the prompt while it was read, and of the cache as it is in the end."""
    flags = ["--prompt", PROMPT, "--raw", "--cache", "window", "--budget", "60", "--max-new-tokens", "9"]
    code, out, err, data = cli(*flags, "--stats")
    assert code == 0 and [len(r) for r in data["health"]] == [7] * 3
    n = data["prompt_tokens"] + 8  # the last token is not read
    for r in data["health"]:
        assert r["span"] == [0, n - 1] and r["longest_gap"] == n - 60 and r["sinks"] == 1
        assert 0 < r["lowest"] <= r["attention_kept"] < 1 and r["key_error"] == r["value_error"] == 0
    assert err.splitlines()[-1].startswith("health   ") and f"longest gap {n - 60}" in err
    plain = cli(*flags)
    assert "health" not in plain[3] and "health" not in plain[2] and plain[1] == out


def test_stats_of_a_conversation(cli, monkeypatch):
    """Later turns do not change what was seen of the first; positions are those of the end."""
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello there, how are you?\nAnd now?\n\n"))
    flags = ["--interactive", "--cache", "streaming", "--budget", "40", "--bits", "4", "--residual", "4"]
    code, _, err, data = cli(*flags, "--max-new-tokens", "5", "--stats")
    last = (
        data["prompt_tokens"] + data["new_tokens"] - 2
    )  # the last token of an answer is not read before the next turn
    assert code == 0 and "health" in err
    assert all(r["span"][0] == 0 and last - 2 <= r["span"][1] <= last for r in data["health"])
    assert all(0 < r["key_error"] < 0.3 and 0 < r["value_error"] < 0.3 for r in data["health"])


def test_json_into_a_pipe_or_through_a_link(cli, tmp_path):
    (tmp_path / "target.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    assert cli("--prompt", "x", "--max-new-tokens", "1", "--json", str(tmp_path / "link.json"))[0] == 0
    assert (tmp_path / "link.json").is_symlink() and json.loads((tmp_path / "target.json").read_text())[
        "new_tokens"
    ] == 1
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE)
    assert cli("--prompt", "x", "--max-new-tokens", "1", "--json", str(tmp_path / "pipe"))[0] == 0
    assert json.loads(reader.communicate(timeout=20)[0])["new_tokens"] == 1
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".kv-fast")]


@pytest.mark.parametrize("what", ["no-config", "torn", "gguf"])
def test_broken_checkpoints(tmp_path, capsys, checkpoint, what):
    path = tmp_path / "broken"
    shutil.copytree(checkpoint, path)
    if what == "no-config":
        (path / "config.json").unlink()
    elif what == "torn":
        data = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    else:
        path = tmp_path / "x.gguf"
        path.write_bytes(b"GGUF" + bytes(range(200)))
    code = g.main(["--checkpoint", str(path), "--prompt", "x", "--no-compile"])
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.count("\n") == 1 and str(path) in err


def test_a_real_process_exits_with_2_and_no_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "generate.py", "--bits", "5"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1


def test_interrupt_exits_with_130(monkeypatch, cli):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(g, "load_checkpoint", interrupted)
    assert cli("--prompt", "x")[0] == 130


def test_no_compiler_means_eager_and_says_so(cli, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, _, err, data = cli("--prompt", "Hello", "--max-new-tokens", "3", eager=False)
    assert code == 0 and "C++ compiler" in err and data["time"]["compile_s"] == 0 and data["new_tokens"] == 3


# ---------------------------------------------------------------------------------------------------------------------
# Conversations


@pytest.mark.parametrize("flags", [[], ["--bits", "4"], ["--cache", "pyramid:window=8", "--bits", "4"]])
def test_a_conversation_reads_nothing_twice(cli, monkeypatch, flags):
    """What the turns feed, one after the other, is the template of the whole conversation, token for token."""
    lines = iter(["Hello, who are you?", "And what is the capital of France?", "Thanks!", ""])
    monkeypatch.setattr("builtins.input", lambda: next(lines))
    fed, prefill = [], g.Transformer.prefill

    def spy(self, ids, start=0, room=None, **kw):
        fed.append((start, ids[0].tolist()))
        return prefill(self, ids, start, room, **kw)

    monkeypatch.setattr(g.Transformer, "prefill", spy)
    code, _, _, data = cli("--interactive", "--max-new-tokens", "6", *flags)
    assert code == 0 and len(fed) == 3
    # Positions follow on: a turn starts where the last one, and what it generated and fed back, ended.
    assert fed[0][0] == 0
    generated, at = data["token_ids"], 0
    whole = []
    for start, ids in fed:
        assert start == len(whole)
        whole += ids
        answer = generated[at : at + 6]
        answer = answer[: answer.index(256) + 1] if 256 in answer else answer
        at += len(answer)
        whole += answer[:-1]
    assert data["prompt_tokens"] == sum(len(ids) for _, ids in fed)
    text = bytes(b for b in whole if b < 256)
    for line in ("Hello, who are you?", "And what is the capital of France?", "Thanks!"):
        assert text.count(line.encode()) == 1
    assert whole.count(257) == 6 and whole.count(256) == 5  # three turns of each; the last answer is still open


def test_a_template_that_drops_earlier_thoughts(checkpoint, tmp_path):
    """Of a second turn, everything after the first answer is read, however the template now writes that answer."""
    path = tmp_path / "thinks"
    shutil.copytree(checkpoint, path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace(
        "m['content']", "(m['content'] if loop.last else m['content'].split('</think>')[-1])"
    )
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = g.load_checkpoint(str(path))[1]
    args = argparse.Namespace(saved=None, system=None, chat=True, spec=build())
    talk = g.Conversation(args, tokenizer)
    seen = len(talk.next("Hello")) + 9
    for unread in ([], [65]):
        answer = argparse.Namespace(answer=[65], answered="A long thought</think>Hi", seen=seen, unread=unread)
        talk.answered(answer)
        want = [256, *b"\n", 257, *b"user\nWhat?", 256, *b"\n", 257, *b"assistant\n"]
        assert talk.next("What?") == unread + want


def test_a_line_that_does_not_fit_is_refused_and_the_talk_goes_on(cli, monkeypatch):
    lines = iter(["Hello", "x" * 5000, "Bye", ""])
    monkeypatch.setattr("builtins.input", lambda: next(lines))
    code, _, err, data = cli("--interactive", "--max-new-tokens", "4")
    assert code == 0 and "still fit" in err and data["new_tokens"] >= 2 and data["prompt_tokens"] < 120


def test_second_turn_equals_one_long_prompt(cli, monkeypatch):
    """With a full cache, the second answer is the one that a fresh run on the same tokens gives."""
    lines = iter(["Hello, who are you?", "Go on.", ""])
    monkeypatch.setattr("builtins.input", lambda: next(lines))
    fed, prefill, models = [], g.Transformer.prefill, []

    def spy(self, ids, start=0, room=None, **kw):
        models.append(self)
        fed.append(ids[0].tolist())
        return prefill(self, ids, start, room, **kw)

    monkeypatch.setattr(g.Transformer, "prefill", spy)
    ids = cli("--interactive", "--max-new-tokens", "6")[3]["token_ids"]
    if 256 in ids[:6]:
        pytest.skip("the random model ended its first answer early")
    model = models[0]
    model.setup_caches(build("full"), 1, 200)
    again = list(g.generate(model, fed[0] + ids[:5] + fed[1], 6, stop_ids=(256,)))
    assert again == ids[6:]


# ---------------------------------------------------------------------------------------------------------------------
# Parts


@pytest.mark.parametrize(
    "pieces,stops,expected",
    [
        (["a", "b", "c"], [], "abc"),
        (["ab", "cd"], ["bc"], "a"),
        (["a", "b", "c", "d"], ["bcx"], "abcd"),
        (["aa", "ab"], ["aab"], "a"),
        (["one END two"], ["END", "one"], ""),
        (["x EN"], ["END"], "x EN"),
        (["üb", "er"], ["be"], "ü"),
    ],
)
def test_until(pieces, stops, expected):
    assert "".join(g.until(iter(pieces), stops)) == expected


def test_until_holds_back_no_more_than_it_must():
    assert list(g.until(iter(["ab", "E", "x"]), ["END"])) == ["ab", "", "Ex", ""]


def test_stop_ends_the_text_before_it(cli):
    full = cli("--prompt", PROMPT, "--max-new-tokens", "30", "--raw")[3]["text"]
    stop = full[5:7]
    data = cli("--prompt", PROMPT, "--max-new-tokens", "30", "--raw", "--stop", stop)[3]
    assert data["text"] == full[: full.index(stop)] and data["new_tokens"] < 30


def test_stops_on_any_eos():
    model = tiny_model()
    model.setup_caches(build("full"), 1, 100)
    ids = list(g.generate(model, tokens(20)[0].tolist(), 40))
    assert len(ids) == 40
    for stop in {ids[3], ids[20]}:
        expected = ids[: ids.index(stop) + 1]
        assert list(g.generate(model, tokens(20)[0].tolist(), 40, stop_ids=(999, stop))) == expected


def test_sampling():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(4000, 1)
    p = logits[0].softmax(-1)
    draw = g.sampler(1.0, None, None, 0, "cpu")(logits)
    assert ((draw.bincount(minlength=4) / 4000) - p).abs().max() < 0.03
    assert g.sampler(1.0, 2, None, 0, "cpu")(logits).max() == 1
    assert g.sampler(1.0, 1, None, 0, "cpu")(logits).max() == 0
    assert g.sampler(1.0, None, 0.5, 0, "cpu")(logits).max() == 0  # the first token alone has 0.64
    assert g.sampler(1.0, None, 0.7, 0, "cpu")(logits).max() == 1
    hot = g.sampler(100.0, None, None, 0, "cpu")(logits).bincount(minlength=4)
    assert hot.min() > 800
    for extreme in (g.sampler(1e-40, None, None, 0, "cpu"), g.sampler(1.0, None, 1e-300, 0, "cpu")):
        assert extreme(logits * 100 - 50).max() == 0
    assert torch.equal(g.sampler(0, None, None, 0, "cpu")(logits), logits.argmax(-1))


# ---------------------------------------------------------------------------------------------------------------------
# The real thing, in processes of their own


@pytest.fixture(scope="module")
def real():
    needs_smollm2()

    def run(*flags, **env):
        file = Path(os.environ.get("TMPDIR", "/tmp")) / f"kv-fast-test-{os.getpid()}.json"
        command = [sys.executable, "generate.py", "--json", str(file), *flags]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env=os.environ | env, check=False, encoding="utf-8"
        )
        assert done.returncode == 0, done.stderr
        data = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
        return data, done.stdout, done.stderr

    return run


def test_main_job(real):
    """`python generate.py --cache pyramid --bits 4`, compiled, on the demonstration."""
    data, out, err = real("--cache", "pyramid", "--bits", "4", "--max-new-tokens", "60")
    assert "demonstration" in err
    c = data["cache"]
    assert sum(c["kept_per_layer"]) < 0.25 * data["prompt_tokens"] * 30
    assert c["bytes"] < 0.2 * c["full_bytes"]
    assert data["graphs"] == 1 and data["time"]["compile_s"] > 0
    words = re.findall(r"[a-z]+", data["text"].lower())
    assert len(words) >= 8 and "loop" in words and len(set(words)) > len(words) / 3, data["text"]
    assert out.strip() == data["text"].strip()


def test_text_with_room_for_everything_is_the_full_caches(real):
    flags = [
        "--prompt",
        "What is the capital of France?",
        "--max-new-tokens",
        "8",
        "--no-compile",
        "--dtype",
        "float32",
    ]
    full = real(*flags)[0]
    assert "Paris" in full["text"]
    for cache in (
        ["--cache", "pyramid"],
        ["--cache", "snapkv", "--budget", "100"],
        ["--cache", "window", "--budget", "99"],
    ):
        assert real(*flags, *cache)[0]["token_ids"] == full["token_ids"]


def test_readme_python_example(real, capsys):
    """The README's example is run as it stands there."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```python\n(import torch\n.*?)```", text, re.S)[1]
    scope = {}
    exec(block, scope)
    kept = [(layer.attention.cache.slot_pos >= 0).sum(-1) for layer in scope["model"].layers]
    assert sum(int(n[0, 0]) for n in kept) == 30 * (256 + 29)
    assert scope["logits"].shape == (1, 1, 49152) and len(capsys.readouterr().out) > 20
    exec(re.search(r"```python\n(from generate import Engine.*?)```", text, re.S)[1], scope)
    engine = scope["engine"]
    assert (scope["first"], scope["second"]) == (0, 1) and engine.hit_tokens >= len(scope["ids"]) - 128 - 64
    out = capsys.readouterr().out
    assert len(scope["answer"]) == 30 and out.count("(its last)") == 2


def test_readme_policy_in_five_lines(model):
    """The README's example is run as it stands there."""
    import cache

    block = re.search(r"```python\n(# a policy.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[1]
    assert len([line for line in block.splitlines() if line.strip() and not line.strip().startswith("#")]) <= 8
    before = dict(cache.POLICIES)
    try:
        exec(block, {})
        (name,) = set(cache.POLICIES) - set(before)
        model.setup_caches(build(name, budget=50, bits=4), 1, 110)
        ids = tokens(110)
        decode(model, ids, 100)
        for layer in model.layers:
            held = layer.attention.cache.slot_pos[0].sort(-1).values
            assert held.shape[1] == 50 and held[:, :4].eq(torch.arange(4)).all()  # sinks
            assert held[:, -32:].eq(torch.arange(78, 110)).all()  # recent tokens
            assert len({tuple(h.tolist()) for h in held}) == 3  # between them, each head has its own
    finally:
        cache.POLICIES.clear()
        cache.POLICIES.update(before)


def test_readme_adds_a_number_format():
    """The README's example is run as it stands there, and loses little more than int does."""
    import cache

    block = re.search(r"```python\n(# a number format.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[
        1
    ]
    code = "\n".join(line for line in block.splitlines() if "import" not in line)
    scope = {"cache": cache, "torch": torch}
    try:
        exec(code, scope)
        x, errors = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)), []
        for name in ("symmetric", "int"):
            store = cache.Form(name, 4).store(True, 64, torch.float32, "cpu")
            errors.append(((store.decode(*store.encode(x)) - x).norm() / x.norm()).item())
        assert errors[1] < errors[0] < 1.5 * errors[1]
        assert cache.Form("symmetric", 4).effective(64) == 4.5
    finally:
        del cache.FORMATS["symmetric"]


# ---------------------------------------------------------------------------------------------------------------------
# Several prompts


def answers(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("cache", ["full", "snapkv:window=8", "h2o"])
def test_several_prompts_are_each_alone(cli, cache):
    """Answers come in the order of the prompts, and say what each says alone."""
    prompts = [PROMPT, "Hi", "Another one", PROMPT + "!", "x"]
    flags = ["--cache", cache, "--page-size", "16", "--max-new-tokens", "12", "--bits", "4", "--residual", "8"]
    flags += [] if cache == "full" else ["--budget", "60"]
    alone = [cli("--prompt", p, *flags)[3] for p in prompts]
    code, out, err, data = cli(
        *(x for p in prompts for x in ("--prompt", p)), *flags, "--max-batch", "2", "--no-prefix"
    )
    assert code == 0
    got = answers(out)
    assert [a["text"] for a in got] == [a["text"] for a in alone]
    assert [a["token_ids"] for a in got] == [a["token_ids"] for a in alone]
    assert [a["prompt_tokens"] for a in got] == [a["prompt_tokens"] for a in alone]
    assert data["answers"] == got
    assert data["requests"] == 5
    assert data["cache"]["lanes"] == 2
    assert data["cache"]["pages_at_peak"] <= data["cache"]["pages"]
    assert data["new_tokens"] == sum(len(a["token_ids"]) for a in got)
    assert "requests 5: " in err
    assert "pages " in err
    assert "requests/s" in err


def test_a_file_of_json_lines(cli, tmp_path):
    file = tmp_path / "requests.jsonl"
    lines = [
        {"prompt": "One two three", "max_new_tokens": 7},
        {"prompt": "Four \u2028 five", "temperature": 0.9, "seed": 5},
        {"prompt": "Six"},
    ]
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n", encoding="utf-8")
    code, out, _, data = cli("--prompt-file", str(file), "--max-new-tokens", "5")
    assert code == 0
    assert [len(a["token_ids"]) for a in answers(out)] == [7, 5, 5]
    single = cli("--prompt", "Four \u2028 five", "--temperature", "0.9", "--seed", "5", "--max-new-tokens", "5")[3]
    assert answers(out)[1]["token_ids"] == single["token_ids"]
    code, out, _, _ = cli("--prompt-file", str(file), "--max-new-tokens", "5", "--max-batch", "1", "--pages", "40")
    assert code == 0
    assert answers(out) == data["answers"]


def test_a_file_of_one_json_line_is_a_batch_and_other_text_is_a_prompt(cli, tmp_path):
    file = tmp_path / "request"
    file.write_text('{"prompt": "Hi", "max_new_tokens": 3}')
    code, out, _, data = cli("--prompt-file", str(file))
    assert code == 0
    assert len(answers(out)) == data["requests"] == 1
    file.write_text('{"prompt": "Hi", "max_new_tokens": 3}', encoding="utf-8-sig")
    assert answers(cli("--prompt-file", str(file))[1]) == answers(out)
    file.write_text("[" * 10**5)
    assert cli("--prompt-file", str(file))[0] == 2  # a prompt that is too long
    file.write_text("{not JSON} is a prompt")
    code, _, _, data = cli("--prompt-file", str(file), "--max-new-tokens", "3")
    assert code == 0
    assert data["new_tokens"] == 3


def test_samples_of_one_prompt(cli):
    flags = ["--prompt", PROMPT, "--max-new-tokens", "10", "--temperature", "1", "--page-size", "16", "--bits", "4"]
    code, out, _, data = cli(*flags, "--num-samples", "3", "--seed", "4")
    assert code == 0
    got = answers(out)
    assert [a["sample"] for a in got] == [0, 1, 2]
    for i in range(3):
        assert cli(*flags, "--seed", str(4 + i))[3]["token_ids"] == got[i]["token_ids"]
    alone = cli(*flags, "--num-samples", "1", "--prompt", PROMPT)[3]  # two prompts: the same pages twice
    assert data["cache"]["pages_at_peak"] < 3 * alone["cache"]["pages_at_peak"] / 2


def test_stop_strings_of_several(cli):
    prompts = ["--prompt", PROMPT, "--prompt", "Hi"]
    plain = answers(cli(*prompts, "--max-new-tokens", "30")[1])
    stop = plain[0]["text"][5:8]
    got = answers(cli(*prompts, "--max-new-tokens", "30", "--stop", stop)[1])
    for before, after in zip(plain, got, strict=True):
        assert after["text"] == before["text"].split(stop)[0]
        assert after["ended"] == ("stop" if stop in before["text"] else before["ended"])


def test_prefixes_are_reported(cli):
    prompts = [x for i in range(3) for x in ("--prompt", PROMPT + str(i))]
    _, _, err, data = cli(*prompts, "--max-new-tokens", "3", "--page-size", "16", "--max-batch", "1")
    assert data["cache"]["prefix_tokens"] > 2 * 16
    assert f"{data['cache']['prefix_tokens']:,} tokens found" in err
    _, _, err, data = cli(*prompts, "--max-new-tokens", "3", "--cache", "snapkv:window=8", "--budget", "60")
    assert data["cache"]["prefix_tokens"] == 0
    assert "none found: snapkv" in err
    assert "not looked for" in cli(*prompts, "--max-new-tokens", "3", "--no-prefix")[2]


def test_pages_of_one_prompt(cli):
    """The same answer, from pages; their number is what heads keep."""
    flags = ["--prompt", PROMPT, "--cache", "adakv:window=8", "--budget", "60", "--max-new-tokens", "9"]
    dense, paged = (cli(*flags, "--page-size", str(n)) for n in (0, 1))
    assert dense[1] == paged[1]
    assert paged[3]["cache"]["layout"] == "paged by 1"
    kept = sum(n for layer in dense[3]["cache"]["kept_per_head"] for n in layer)
    heads = 3 * 3
    assert kept + heads <= paged[3]["cache"]["pages"] <= kept + 2 * heads
    assert "pages" in paged[2]


@pytest.mark.parametrize("cache", [["full"], ["adakv:window=8", "--budget", "60"], ["h2o", "--budget", "60"]])
def test_a_conversation_on_pages(cli, monkeypatch, cache):
    """Turn by turn the same answers, and pages for what is held and the room for an answer, no more."""
    flags = ["--interactive", "--cache", *cache, "--bits", "4", "--max-new-tokens", "9"]
    seen = {}
    for page in ("0", "16"):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT.strip()}\nWhy?\nAnd then?\n"))
        seen[page] = cli(*flags, "--page-size", page)
        assert seen[page][0] == 0
    assert seen["0"][1] == seen["16"][1]
    c = seen["16"][3]["cache"]
    slots = sum(3 * n for n in c["slots_per_layer"])
    assert c["pages_used"] * 16 <= slots + 9 * 16


def test_offload_and_select_are_reported(cli, tmp_path):
    """The same answer from a file; and a step that reads one chunk in two of one layer in three."""
    flags = ["--prompt", PROMPT, "--max-new-tokens", "9"]
    usual = cli(*flags)[3]
    _, out, err, data = cli(*flags, "--offload", f"disk:{tmp_path}")
    c = data["cache"]
    assert data["token_ids"] == usual["token_ids"]
    slots = sum(-(-n // 32) * 32 for n in c["slots_per_layer"])
    assert c["offloaded_bytes"] == slots * 3 * 20 * 2 * 4
    assert c["bytes"] == usual["cache"]["bytes"] == c["read_bytes"]
    assert f"{c['offloaded_bytes'] / 1e6:,.2f} MB of it on disk" in err
    _, _, err, data = cli(*flags, "--select", "96")
    c, chunks = data["cache"], -(-(usual["prompt_tokens"] + 9) // 32)
    assert c["bytes"] - c["read_bytes"] == (chunks - 3) * 32 * 3 * (15 + 20) * 4  # 5 of 20 channels of keys are seen
    assert f"a step reads {c['read_bytes'] / 1e6:,.2f} MB" in err
    several = ["--prompt", "b", "--offload", f"disk:{tmp_path}", "--select", "96"]
    _, out, err, data = cli(*flags, *several)
    assert json.loads(out.splitlines()[0])["token_ids"] == cli(*flags, "--select", "96")[3]["token_ids"]
    assert data["cache"]["offloaded_bytes"] > 0
    assert "MB of it on disk" in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--page-size", "-1"], "--page-size -1: give"),
        (["--select", "10"], "--select 10: .* give at least 96"),
        (["--select", "x"], "--select"),
        (["--select", "96", "--cache", "h2o"], "--select 96 --cache h2o: "),
        (["--prompt", "a", "--offload", "cpu"], "--offload cpu: the model is on the CPU"),
        (["--prompt", "a", "--offload", "disk:/nowhere"], "--offload disk:/nowhere: No such file"),
        (["--offload", "ram"], "choose none, cpu, disk or disk:DIR"),
        (["--page-size", "16", "--format", "kivi", "--bits", "4"], "a multiple of 32"),
        (["--prompt", "a", "--pages", "5"], "--pages is for several prompts"),
        (["--prompt", "a", "--max-batch", "2"], "--max-batch is for several prompts"),
        (["--prompt", "a", "--no-prefix"], "--no-prefix is for several prompts"),
        (["--prompt", "a", "--prefill-layers", "2"], "--prefill-layers is for several prompts"),
        (["--prompt", "a", "--prompt", "b", "--max-batch", "0"], "--max-batch 0: give 1 or more"),
        (["--prompt", "a", "--prompt", "b", "--stats"], "--stats looks at the cache of one prompt"),
        (["--prompt", "a", "--prompt", ""], "prompt 2: the prompt is empty"),
        (["--prompt", "a", "--prompt", "b", "--pages", "3"], "prompt 1: --pages 3: a prompt of"),
        (["--prompt", "a", "--prompt", "b" * 1100], "prompt 2: .* more than"),
        (["--prompt", "a", "--num-samples", "3"], "all would be the same at --temperature 0"),
        (["--prompt", "a", "--num-samples", "9", "--temperature", "1"], "give --max-batch 9 or more"),
        (["--interactive", "--num-samples", "2"], "--num-samples is for"),
        (["--interactive", "--prompt", "a", "--prompt", "b"], "--interactive reads its prompts"),
    ],
)
def test_what_several_prompts_cannot_have(cli, flags, says):
    code, out, err, data = cli(*flags)
    assert code == 2
    assert not out
    assert data is None
    assert len(err.splitlines()) == 1
    assert re.search(says, err), err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"prompt": "a"}\n{"prompt": 5}', 'line 2: give an object with some text as its "prompt"'),
        ('{"text": "a"}', "line 1: give an object"),
        ('{"prompt": "a"}\n\nnot JSON', "line 3: give an object"),
        ('{"prompt": "a", "max_tokens": 5}', "line 1: max_tokens is unknown; a request has prompt, max_new_tokens"),
        ('{"prompt": "a", "max_new_tokens": "5"}', 'max_new_tokens is "5"; give a whole number'),
        ('{"prompt": "a", "max_new_tokens": true}', "max_new_tokens is true; give a whole number"),
        ('{"prompt": "a", "max_new_tokens": 2.5}', "max_new_tokens is 2.5; give a whole number"),
        ('{"prompt": "a", "temperature": 1' + "0" * 400 + "}", "temperature is 1000"),
        ('{"prompt": "a"}\n' + "[" * 10**5, "line 2: give an object"),
        ('{"prompt": "a", "max_new_tokens": -1}', "line 1: --max-new-tokens -1: give 0 or more"),
        ('{"prompt": "a", "temperature": NaN}', "line 1: --temperature nan"),
        ('{"prompt": "a", "seed": 1e300}', "seed is 1e"),
    ],
)
def test_files_that_are_refused(cli, tmp_path, text, says):
    file = tmp_path / "requests.jsonl"
    file.write_text(text)
    code, out, err, _ = cli("--prompt-file", str(file))
    assert code == 2
    assert not out
    assert len(err.splitlines()) == 1
    assert says in err, err
