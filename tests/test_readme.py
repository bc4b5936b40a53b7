"""The README's commands do what they say: all of generate.py's are run, on a tiny model, all others are looked up."""

import json
import re
import shlex
import shutil

import pytest
from readme import ROOT, commands, write_files

import eval as ev
import generate

OF = {kind: [w for w in commands() if kind in w] for kind in ("generate.py", "eval.py", "pytest")}


def test_commands_are_found():
    assert len(OF["generate.py"]) > 10 and len(OF["eval.py"]) > 15 and len(OF["pytest"]) > 10
    others = [w for w in commands() if not any(w in found for found in OF.values())]
    assert all((ROOT / w[1]).is_file() for w in others), others  # python tests/gpu.py


@pytest.fixture(scope="module")
def home(checkpoint, tmp_path_factory):
    """A directory with the files that the commands name, and a tiny model with enough positions."""
    path = tmp_path_factory.mktemp("home")
    write_files(path)
    shutil.copytree(checkpoint, path / "model")
    config = json.loads((path / "model" / "config.json").read_text())
    (path / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return path


@pytest.mark.parametrize("words", OF["generate.py"], ids=shlex.join)
def test_generate(words, home, monkeypatch, capsys):
    """In their order, for one writes the file that the next one reads."""
    lines = iter(["Hello, who are you?", ""])
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("builtins.input", lambda: next(lines))
    monkeypatch.setattr(generate, "demonstration", lambda: "Read this text: " + "a b c d " * 200)
    given = words[words.index("generate.py") + 1 :]
    if words[0] == "torchrun" or "--checkpoint" in given:
        generate.parse(given[:-2] if "--checkpoint" in given else given)  # tests/test_ranks.py runs several processes
        return
    if "--save-cache" not in given and "--load-cache" in given:
        assert (home / given[given.index("--load-cache") + 1]).exists()
    short = [] if "--max-new-tokens" in given else ["--max-new-tokens", "4"]
    assert generate.main([*given, "--checkpoint", "model", "--no-compile", *short]) == 0
    out, err = capsys.readouterr()
    assert out or "--max-new-tokens" in given
    assert "cache    " in err


@pytest.mark.parametrize("words", OF["eval.py"], ids=shlex.join)
def test_eval(words, monkeypatch, tmp_path):
    """Flags that exist and go together. What they name as --out is there already."""
    monkeypatch.chdir(ROOT)
    args = ev.parse([word.replace("docs/", f"{tmp_path}/") for word in words[words.index("eval.py") + 1 :]])
    assert args.task in ev.TASKS and args.arms


@pytest.mark.parametrize("words", OF["pytest"], ids=shlex.join)
def test_pytest(words):
    """Files that exist, and hold a test that -k picks."""
    files = [word for word in words[1:] if word.endswith(".py")]
    text = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    if "-k" in words:
        assert re.search(rf"def test\w*{words[words.index('-k') + 1]}", text)
    assert files or "-n" in words
