"""Prefixes on disk: what another process has read is found bit for bit, or not at all."""

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import tiny_model, tokens
from safetensors.torch import load_file, save_file
from test_saved import cli  # noqa: F401  a fixture

import generate as g
from cache import build
from generate import Engine, Params, PrefixStore

KINDS = [(16, "auto", None), (8, "int", 0), (4, "int", 8), (4, "mxfp4", 8), (4, "kivi", 8), (2, "kivi", 0)]
GREEDY = Params(12)


def kind(bits=16, form="auto", residual=None, page=32):
    return build(bits=bits, format=form, residual=residual, page_size=page)


def text(n: int, seed: int) -> list[int]:
    return tokens(n, seed=seed)[0].tolist()


def engine(spec, path: Path | None = None, model=None, **more) -> Engine:
    store = None if path is None else PrefixStore(path)
    return Engine(tiny_model() if model is None else model, spec, 2, 512, store=store, **more)


def said(spec, path: Path, prompt: list[int], model=None) -> tuple[list[int], int]:
    """What a new engine says, and how many tokens it found."""
    new = engine(spec, path, model)
    [answer] = new.generate([prompt], GREEDY)
    assert new.stored_tokens == new.hit_tokens
    assert new.pool.used == sum(new.pool.refs) == 1
    return answer, new.stored_tokens


def blocks(spec, path: Path, prompt: list[int]) -> int:
    """How many of a prompt's blocks are there to load."""
    new = engine(spec)
    return len(PrefixStore(path).load(new.desk, [], prompt, len(prompt)))


@pytest.fixture
def logits(monkeypatch):
    """All that a model's head says, in order."""
    seen, head = [], g.Transformer.head

    def spy(self, x):
        y = head(self, x)
        seen.append(y[0].clone())  # of the first lane
        return y

    monkeypatch.setattr(g.Transformer, "head", spy)
    return seen


@pytest.mark.parametrize(("bits", "form", "residual"), KINDS)
def test_found_on_disk_is_found_in_memory(bits, form, residual, tmp_path, logits):
    """Logits, bit for bit, of an engine that has read the beginning itself, and of one that finds the first one's."""
    spec, first = kind(bits, form, residual), text(128, 1)
    second = first[:100] + text(50, 9)
    one = engine(spec, tmp_path)
    one.generate([first], GREEDY)
    one.store = None
    logits.clear()
    want = one.generate([second], GREEDY)
    kept = [*logits]
    logits.clear()
    other = engine(spec, tmp_path)
    assert other.generate([second], GREEDY) == want
    assert len(kept) == len(logits) == 12
    assert all(map(torch.equal, kept, logits))
    assert one.hit_tokens == other.hit_tokens == other.stored_tokens == 96
    pairs = [[x.pool.content(b) for b in x.pool.prefixes.find(second)] for x in (one, other)]
    for a, b in zip(*pairs, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("page", [1, 3, 16, 64])
def test_pages_of_all_sizes(page, tmp_path):
    """Of a ring's first 4 tokens a page has all, or some."""
    for bits, residual in ((16, None), (4, 8)):
        path, spec, prompt = tmp_path / str(bits), kind(bits, "auto", residual, page), text(101, 1)
        read = engine(spec, path)
        for _ in range(2):  # few bits say the same once they begin with the same codes
            [want] = read.generate([prompt], GREEDY)
        found = (101 - (8 if residual else 1)) // page * page
        assert said(spec, path, prompt) == (want, found)
        for block in read.pool.prefixes.find(prompt)[1:2]:
            read.store.file(block).unlink()
        assert said(spec, path, prompt)[1] == (0 if residual and page < 4 else page)


def test_texts_that_part(tmp_path):
    spec, shared = kind(page=16), text(40, 1)
    engine(spec, tmp_path).generate([shared + text(60, 2)], GREEDY)
    for prompt, found in ((shared + text(30, 3), 32), (text(1, 4) + shared, 0), (shared[:33], 32), (shared[:32], 16)):
        assert said(spec, tmp_path, prompt) == (engine(spec).generate([prompt], GREEDY)[0], found)


def test_part_in_memory_and_the_rest_on_disk(tmp_path):
    """Answers are there, too; and pages that are in use stay as they are."""
    spec, first = kind(page=16), text(64, 1)
    [answer] = engine(spec, tmp_path).generate([first], Params(40))
    second = first + answer + text(9, 7)
    new = engine(spec, tmp_path)
    new.generate([first[:40]], GREEDY)
    got = new.generate([second], GREEDY)
    assert (new.stored_tokens, new.hit_tokens) == (32 + 96 - 32, 32 + 96)
    assert got == engine(spec).generate([second], GREEDY)


def test_codes_that_were_left_behind_are_not_read_instead(tmp_path):
    """Few bits, a pool that is too small: who makes way reads its prompt anew, though it is on disk by then."""
    model, spec = tiny_model(), kind(2, "int", 0, 16)
    requests = [(text(60, i), Params(70, 0.7, seed=i)) for i in range(4)]

    def run(prefix, pages=None):
        new = Engine(model, spec, 4, 512, pages, prefix=prefix, store=PrefixStore(tmp_path))
        out = {new.submit(*request): [] for request in requests}
        while new.unfinished:
            for id, more in new.step().items():
                out[id] += more
        return new, out

    want = run(False)[1]
    assert not [*tmp_path.iterdir()]
    new, got = run(True, int(2.5 * new.need(60, 69)) if (new := engine(spec, model=model)) else 0)
    assert new.preempted > 0
    assert got == want


def forged(path: Path, change) -> None:
    """A file with a right checksum, whatever is in it."""
    about, content = g.Saved.read(path)
    about, content = change(json.loads(about), content)
    about = json.dumps(about)
    save_file(content, path, {"kv-fast": about, "checksum": g.Saved.checksum(about, content)})


DAMAGE = {
    "empty": lambda f, raw, other: f.write_bytes(b""),
    "cut": lambda f, raw, other: f.write_bytes(raw[: len(raw) // 2]),
    "short": lambda f, raw, other: f.write_bytes(raw[:-1]),
    "another text's": lambda f, raw, other: f.write_bytes(other),
    "no checksum": lambda f, raw, other: save_file(load_file(f), f),
    "another salt": lambda f, raw, other: forged(f, lambda a, c: (["x", *a[1:]], c)),
    "another parent": lambda f, raw, other: forged(f, lambda a, c: ([a[0], "00" * 16, a[2]], c)),
    "other tokens": lambda f, raw, other: forged(f, lambda a, c: ([*a[:2], [5, *a[2][1:]]], c)),
    "a part less": lambda f, raw, other: forged(f, lambda a, c: (a, {"k0": c["k0"]})),
    "another shape": lambda f, raw, other: forged(f, lambda a, c: (a, c | {"k0": c["k0"][:1]})),
    "another dtype": lambda f, raw, other: forged(f, lambda a, c: (a, c | {"v0": c["v0"].to(torch.int16)})),
}


@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_file_is_a_miss_and_goes(which, tmp_path):
    spec, prompt, draw = kind(4, "int", 8, 16), text(70, 1), random.Random(0)
    one = engine(spec, tmp_path)
    one.generate([prompt], GREEDY)
    want = one.generate([prompt], GREEDY)[0]
    names = [f"{block.key.hex()}.kv-fast" for block in one.pool.prefixes.find(prompt)]
    file, other = tmp_path / names[which], tmp_path / names[2]
    raw, size, there = file.read_bytes(), file.stat().st_size, len([*tmp_path.iterdir()])
    flips = [*range(0, 40, 7), *(draw.randrange(size) for _ in range(20)), size - 1]
    damage = [
        lambda f, raw, other, at=at: f.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]) for at in flips
    ]
    for how in [*DAMAGE.values(), *damage]:
        how(file, raw, other.read_bytes())
        assert blocks(spec, tmp_path, prompt) == which
        assert not file.exists()
        assert len([*tmp_path.iterdir()]) == there - 1
        file.write_bytes(raw)
    assert blocks(spec, tmp_path, prompt) == 4
    file.write_bytes(raw[:-1])
    assert said(spec, tmp_path, prompt)[1] == 16 * which
    assert g.Saved.read(file)  # written anew
    file.write_bytes(raw)
    assert said(spec, tmp_path, prompt) == (want, 48)


def test_only_the_same_cache_of_the_same_model(tmp_path):
    prompt, spec = text(100, 1), kind(4, "int", 8)
    engine(spec, tmp_path).generate([prompt], GREEDY)
    others = [
        kind(8, "int", 8),
        kind(4, "kivi", 8),
        kind(4, "int:solver=mse", 8),
        kind(4, "int", 9),
        kind(),
        kind(page=64),
    ]
    others += [kind(4, "int", 8, 64), kind("k=4,v=8", "int", 8)]
    for other in others:
        assert said(other, tmp_path, prompt)[1] == 0
    for model in (tiny_model(seed=1), tiny_model(torch.bfloat16), tiny_model(rope_theta=5000.0)):
        assert said(spec, tmp_path, prompt, model)[1] == 0
    assert said(build(bits="4", format="int", residual=8, page_size=32), tmp_path, prompt)[1] == 64


def test_the_least_recently_used_go_first(tmp_path):
    """And of a text its end, without which its beginning is still of use."""
    spec, prompts = kind(page=16), [text(50, i) for i in range(3)]
    engine(spec, tmp_path).generate(prompts[:1], Params(1))
    files = [*tmp_path.iterdir()]
    assert len(files) == 3
    small = lambda: Engine(tiny_model(), spec, 2, store=PrefixStore(tmp_path, 7.5e-9 * files[0].stat().st_size))  # noqa: E731
    for i in (1, 0, 2):
        new = small()
        new.generate([prompts[i]], Params(1))
        assert new.stored_tokens == (48 if i == 0 else 0)
    assert [blocks(spec, tmp_path, prompt) for prompt in prompts] == [3, 1, 3]
    assert len([*tmp_path.iterdir()]) == 7
    small().generate([text(200, 5)], Params(1))
    assert [blocks(spec, tmp_path, prompt) for prompt in (*prompts, text(200, 5))] == [0, 0, 0, 7]


def test_writers_and_readers_at_once(tmp_path):
    """Files vanish and appear all the time: no error, and never a wrong block."""
    spec, prompt = kind(page=16), text(100, 1)
    made = [engine(spec) for _ in range(4)]
    for new in made:
        new.generate([prompt], Params(1))
    stores = [PrefixStore(tmp_path, 10 if i else 1e-4) for i in range(4)]
    want = [made[0].pool.content(block) for block in made[0].pool.prefixes.find(prompt)]

    def work(i):
        read, draw = 0, random.Random(i)
        for _ in range(40):
            found = made[i].pool.prefixes.find(prompt)
            stores[i].save(made[i].pool, found)
            stores[i].file(draw.choice(found)).unlink(missing_ok=True)
            for block, right in zip(found, want, strict=True):
                got = stores[i].read(block, made[i].pool, 9)
                read += got is not None
                assert got is None or all(torch.equal(got[name], right[name]) for name in right)
        return read

    with ThreadPoolExecutor(4) as threads:
        read = sum(threads.map(work, range(4)))
    assert 0 < read < 4 * 40 * 6
    assert [store.failed for store in stores] == [""] * 4
    assert all(f.name.endswith(".kv-fast") for f in tmp_path.iterdir())


def test_what_else_lies_there(tmp_path):
    """Half-written files are nobody's prefix; old ones are cleared away, and nothing that others put there."""
    spec, prompt = kind(page=16), text(50, 1)
    new = Engine(tiny_model(), spec, store=PrefixStore(tmp_path, 1e-9))
    names = ".kv-fast-old", ".kv-fast-new", "notes.txt", "model.safetensors"
    for name in names:
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (1, 1) if name != ".kv-fast-new" else None)
    (tmp_path / "sub").mkdir()
    new.generate([prompt], Params(1))
    assert {f.name for f in tmp_path.iterdir()} == {*names[1:], "sub"}
    assert said(spec, tmp_path, prompt)[1] == 0


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    spec, prompt = kind(page=16), text(50, 1)
    new = engine(spec, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
        assert new.generate([prompt], GREEDY) == engine(spec).generate([prompt], GREEDY)
    assert new.store.failed == "No space left on device"
    assert not [*tmp_path.iterdir()]


# ---------------------------------------------------------------------------------------------------------------------
# The command line

PROMPT = "The quick brown fox jumps over the lazy dog, and then it does so again. And again it jumps over the dog. " * 2


@pytest.fixture
def ask(cli, tmp_path):  # noqa: F811
    def run(*flags, new="12"):
        report = tmp_path / "report.json"
        flags = ("--prefix-store", str(tmp_path / "store"), "--json", str(report), *flags)
        code, out, err = cli("--max-new-tokens", new, *flags)
        assert code == 0, err
        return out, err, json.loads(report.read_text())

    return run


def test_the_same_prompt_again(ask, cli, tmp_path):  # noqa: F811
    _, want, _ = cli("--prompt", PROMPT + "Why?", "--max-new-tokens", "12")
    out, err, data = ask("--prompt", PROMPT + "How?")
    assert data["cache"]["stored_tokens"] == 0
    assert "prefix   0 tokens found in" in err
    assert "; only whole pages of 64 tokens can be" in err
    out, err, data = ask("--prompt", PROMPT + "Why?")
    assert out == want
    assert data["cache"]["stored_tokens"] == 192
    assert "prefix   192 tokens found in" in err
    assert data["prompt_tokens"] > 192
    assert data["cache"]["kept_per_layer"] == [data["prompt_tokens"] + 11] * 3
    files = len([*(tmp_path / "store").iterdir()])
    ask("--prompt", PROMPT + "Why?", "--page-size", str(data["prompt_tokens"] + 12))
    assert len([*(tmp_path / "store").iterdir()]) == files  # the last token of an answer was never read


def test_one_prompt_and_several_share_a_store(ask, checkpoint, tmp_path):
    """And a ring of the last tokens is read anew."""
    flags = "--bits", "4", "--residual", "16", "--page-size", "32"
    ask("--prompt", PROMPT, *flags)
    _, _, one = ask("--prompt", PROMPT + "Why?", *flags)
    assert one["cache"]["stored_tokens"] == (one["prompt_tokens"] - 16) // 32 * 32 > 128
    out, err, two = ask("--prompt", PROMPT + "Why?", "--prompt", "Hello", *flags)
    assert two["cache"]["stored_tokens"] == two["cache"]["prefix_tokens"] == one["cache"]["stored_tokens"]
    assert json.loads(out.splitlines()[0])["token_ids"] == one["token_ids"]
    assert f"prefix   {one['cache']['stored_tokens']} tokens found in" in err


def test_the_first_turn_of_a_chat(ask, cli, monkeypatch):  # noqa: F811
    import io

    def turns():
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\nAnd then?\n"))
        return "--interactive", "--max-new-tokens", "12"

    _, want, _ = cli(*turns())
    out, _, first = ask(*turns())
    assert out == want
    out, _, data = ask(*turns())
    assert out == want
    assert data["cache"]["stored_tokens"] == 192
    assert data["cache"]["pages"] == first["cache"]["pages"], "for this chat, not for the longest there could be"


def test_another_process(ask, checkpoint, tmp_path):
    """Hashes do not depend on where things lie in memory."""
    want, _, _ = ask("--prompt", PROMPT)
    report, root = tmp_path / "second.json", Path(g.__file__)
    flags = ["--dtype", "float32", "--no-compile", "--max-new-tokens", "12", "--prompt", PROMPT, "--json", str(report)]
    again = [
        sys.executable,
        str(root),
        "--checkpoint",
        str(checkpoint),
        "--prefix-store",
        str(tmp_path / "store"),
        *flags,
    ]
    done = subprocess.run(again, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "7"}, check=True)
    assert done.stdout == want
    assert json.loads(report.read_text())["cache"]["stored_tokens"] == 192


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--cache", "snapkv"], "snapkv keeps what the end of a prompt looks at; choose --cache full"),
        (["--cache", "h2o", "--prompt", "b"], "h2o keeps"),
        (["--bits", "4", "--format", "nvfp4"], "nvfp4 has a scale that a whole prompt sets"),
        (["--no-prefix", "--prompt", "b"], "--prefix-store and --no-prefix: give one of them"),
        (["--stats"], "--prefix-store and --stats"),
        (["--prefix-store-gb", "0"], "--prefix-store-gb 0: give a number of gigabytes above 0"),
        (["--prefix-store-gb", "nan"], "--prefix-store-gb nan"),
        (["--prefix-store-gb", "many"], "--prefix-store-gb"),
    ],
)
def test_what_cannot_help_is_refused(flags, says, cli, tmp_path):  # noqa: F811
    code, out, err = cli("--prompt", "a", "--prefix-store", str(tmp_path / "store"), *flags)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert says in err
    assert not (tmp_path / "store").exists()


def test_a_directory_that_is_none(cli, tmp_path):  # noqa: F811
    (tmp_path / "file").touch()
    saved = str(tmp_path / "saved")
    assert cli("--prompt", "a", "--save-cache", saved, "--max-new-tokens", "1")[0] == 0
    for flags, says in (
        (
            ["--prefix-store", str(tmp_path / "file")],
            f"--prefix-store {tmp_path / 'file'}: File exists; give a directory",
        ),
        (["--prefix-store", str(tmp_path / "file" / "a")], "Not a directory"),
        (["--prefix-store", "/proc/none"], "--prefix-store /proc/none: "),
        (["--prefix-store", str(tmp_path / "a"), "--load-cache", saved], "--prefix-store and --load-cache"),
        (["--prefix-store-gb", "1"], "there is no store; give --prefix-store DIR as well"),
    ):
        code, out, err = cli("--prompt", "a", *flags)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert says in err
