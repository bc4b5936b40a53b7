"""Caches that outlive the process: a file holds what the cache held, or is refused."""

import io
import itertools
import json
import os
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import decode, tiny_model, tokens

import cache as caches
import generate as g
from cache import SpecError, build

POLICIES = [f"{name}:window=8" if name in ("snapkv", "pyramid", "adakv") else name for name in caches.POLICIES]
FORMATS = [
    ("auto", 16, None),
    ("int", 4, 8),
    ("int", 2, 0),
    ("kivi", 4, 8),
    ("fp8", 8, 150),
    ("nvfp4", 4, 8),
    ("mxfp4", 4, 8),
]
LAYOUTS = [(0, 0), (0, 16), (64, 0), (3, 32), (32, 1)]


@pytest.mark.parametrize(("form", "bits", "residual"), FORMATS)
@pytest.mark.parametrize("name", POLICIES)
def test_restored_is_never_saved(name, form, bits, residual):
    """Bit for bit, whatever the layouts: logits of a second turn and of steps, and what is held afterwards."""
    model, ids = tiny_model(n_layer=2), tokens(150)
    budget = None if name == "full" else 160 if form == "kivi" else 64
    layouts = [(0, 64), (64, 32)] if form == "kivi" else LAYOUTS
    turn = POLICIES.index(name) + len(form)  # two of them here, all of them among the formats and policies
    for before, after in (layouts[turn % len(layouts)], layouts[(turn + 2) % len(layouts)]):
        try:
            old, new = (
                build(name, budget=budget, bits=bits, format=form, residual=residual, page_size=page)
                for page in (before, after)
            )
        except SpecError:
            pytest.skip("refused, and tested where that is")
        model.setup_caches(old, 1, 200)
        decode(model, ids[:, :110], 100)
        states = [{k: x.clone() for k, x in layer.attention.cache.state().items()} for layer in model.layers]

        def more():
            out = [model.prefill(ids[:, 110:115], start=110, room=20)]
            out += [model(ids[:, t : t + 1], torch.tensor([[t]]))[:, 0] for t in range(115, 130)]
            return torch.stack(out), [layer.attention.cache.state() for layer in model.layers]

        want, held = more()
        model.setup_caches(new, 1, 220)
        for layer, state in zip(model.layers, states, strict=True):
            layer.attention.cache.restore(state)
        got, now = more()
        assert torch.equal(got, want)
        for a, b in zip(held, now, strict=True):
            assert torch.equal(a["slot_pos"], b["slot_pos"])
        pool = model.layers[0].attention.cache.layout.pool
        assert pool is None or pool.used == sum(pool.refs) > 0


@pytest.mark.parametrize(("form", "bits", "residual"), FORMATS)
@pytest.mark.parametrize("name", POLICIES)
def test_questions_about_a_document(name, form, bits, residual, tmp_path, monkeypatch):
    """In two lanes, with pages of another size, as each alone after it: tokens, and the first logits bit for bit."""
    model, ids, file = tiny_model(n_layer=2), tokens(150)[0].tolist(), tmp_path / "doc.kv"
    document, questions = ids[:100], [ids[100:130], ids[130:131]]
    budget, pages = None if name == "full" else 160 if form == "kivi" else 64, (64, 32) if form == "kivi" else (16, 7)
    try:
        before, after = (
            build(name, budget=budget, bits=bits, format=form, residual=residual, page_size=page) for page in pages
        )
    except SpecError:
        pytest.skip("refused, and tested where that is")
    g.Engine(model, before, 1, 256).save(file, document)
    want, logits, read, greedy = [], [], [], g.greedy
    for question in questions:
        for room in (0, 6):  # slots that are masked change the order of sums, so that an engine's are those of no room
            model.setup_caches(replace(before, page=0), 1, 256)
            g.Saved(file).restore([layer.attention.cache for layer in model.layers])
            logits += [] if room else [model.prefill(torch.tensor([question]), 100, 0)]
        want.append([*g.generate(model, question, 6, start=100)])

    def spy(logits):
        read.extend([logits.clone()] if len(logits) == 1 else [])
        return greedy(logits)

    monkeypatch.setattr(g, "greedy", spy)
    engine = g.Engine(model, after, 2, 256, prefill_layers=1)
    doc = engine.load(file)
    assert ask(engine, doc, questions, g.Params(6)) == want
    assert all(map(torch.equal, read, logits))
    assert len(read) == 2
    assert engine.pool.used == 1 + doc.pages
    engine.drop(doc)
    assert engine.pool.used == sum(engine.pool.refs) == 1


def ask(engine, doc, questions: list[list[int]], params: g.Params) -> list[list[int]]:
    out = {engine.submit(question, params, after=doc): [] for question in questions}
    while engine.unfinished:
        for id, new in engine.step().items():
            out[id] += new
    return [*out.values()]


DOCUMENTS = [("full", 16, 16), ("snapkv:window=8", 4, 16), ("adakv:window=8", 16, 3), ("h2o", 16, 16)]


def loaded(model, name, bits, page, lanes, file, pages=None):
    """An engine, and a document of 101 tokens that it has read from the file; the first one writes it."""
    kind = build(name, budget=None if name == "full" else 64, bits=bits, page_size=page)
    engine = g.Engine(model, kind, lanes, 256, pages=pages, prefill_layers=1)
    if not file.exists():
        engine.save(file, tokens(101)[0].tolist())
    return engine, engine.load(file)


@pytest.mark.parametrize(("name", "bits", "page"), DOCUMENTS)
def test_questions_make_way_for_one_another(name, bits, page, tmp_path):
    """They are read on top of the document again; texts of their own come before and after, and samples of one."""
    model, file = tiny_model(n_layer=2), tmp_path / "doc.kv"
    questions = [tokens(20, seed=n)[0].tolist() for n in range(3)]
    engine, doc = loaded(model, name, bits, page, 4, file)
    own = [ask(engine, None, [question], g.Params(20))[0] for question in questions]
    engine, doc = loaded(model, name, bits, page, 4, file)
    want = [ask(engine, doc, [question], g.Params(30))[0] for question in questions]
    most = engine.need(20, 29, after=doc) - int(doc.shared.sum())
    small, doc = loaded(model, name, bits, page, 4, file, 2 * most)
    small.pool.claim(len(small.pool.free) - 2 * most)  # what the document did not take
    assert ask(small, None, questions[1:], g.Params(20)) == own[1:]
    assert ask(small, doc, questions, g.Params(30)) == want  # none began with a text of its own
    assert small.preempted > 0 or name == "h2o"
    assert ask(small, None, questions[:1], g.Params(20)) == own[:1]  # and the other way round
    one, two = small.submit(questions[1], g.Params(3, 1.0, seed=3), 2, after=doc)
    out = {one: [], two: []}
    while small.unfinished:
        for id, new in small.step().items():
            out[id] += new
    samples = [ask(engine, engine.documents[0], [questions[1]], g.Params(3, 1.0, seed=seed))[0] for seed in (3, 4)]
    assert [out[one], out[two]] == samples


def test_a_question_is_read_while_lanes_take_the_last_pages(tmp_path):
    """What was promised to it, nobody else takes; else it would find nothing at its end."""
    model, file = tiny_model(n_layer=2), tmp_path / "doc.kv"
    engine, doc = loaded(model, "full", 16, 4, 2, file)
    requests = [(tokens(10, seed=1)[0].tolist(), g.Params(40)), (tokens(60, seed=2)[0].tolist(), g.Params(3))]
    want = [ask(engine, doc, [question], params)[0] for question, params in requests]
    for new in range(1, 6):
        pages = engine.need(10, new, after=doc) + engine.need(60, 3, after=doc) - 2 * int(doc.shared.sum())
        small, again = loaded(model, "full", 16, 4, 2, file, pages)
        small.pool.claim(len(small.pool.free) - pages)
        out = {small.submit(question, params, after=again): [] for question, params in requests}
        while small.unfinished:
            for id, told in small.step().items():
                out[id] += told
        assert [*out.values()] == want


def test_a_document_is_there_once(tmp_path):
    """In pages of its own, on top of the pool's; of each question only its own, and a copy of the last one."""
    model = tiny_model(n_layer=2)
    engine, doc = loaded(model, "full", 16, 32, 4, tmp_path / "doc.kv")
    size, heads = len(engine.pool.refs), 2 * 3
    assert engine.pool.used - 1 == doc.pages == heads * 4
    assert size == 1 + 4 * heads * 8 + doc.pages
    for n in range(4):
        engine.submit([1, 2, n], g.Params(20), after=doc)
    while engine.waiting or engine.reading:
        engine.step()
    assert engine.pool.used - 1 == doc.pages + 4 * heads
    engine.drop(doc)
    assert engine.unfinished == 0
    assert engine.pool.used == 1
    with pytest.raises(AssertionError):
        engine.submit([1, 2], after=doc)
    engine.load(tmp_path / "doc.kv")
    engine.reset()
    assert engine.pool.used == sum(engine.pool.refs) == 1
    assert not engine.documents


def test_a_document_that_does_not_belong_here(tmp_path):
    model, file = tiny_model(n_layer=2), tmp_path / "doc.kv"
    engine, doc = loaded(model, "full", 4, 16, 2, file)
    for other, kind, says in (
        (tiny_model(n_layer=2, seed=1), build(bits=4), "of another model"),
        (model, build(bits=8), "are full None 4 auto None, here full None 8 auto None"),
    ):
        engine = g.Engine(other, kind, 2, 256)
        pages = len(engine.pool.refs)
        with pytest.raises(g.UsageError, match=f"--load-cache {file}: .*{says}"):
            engine.load(file)
        assert len(engine.pool.refs) == pages
        assert engine.pool.used == 1
    engine, doc = loaded(model, "full", 4, 16, 2, file)
    with pytest.raises(g.UsageError, match="201 tokens in the prompt and 60 new ones are more than 256"):
        engine.submit([1] * 100, g.Params(60), after=doc)
    for ids in ([], [1] * 257):
        with pytest.raises(g.UsageError, match="a document has 1 to 256 tokens here"):
            engine.save(tmp_path / "other.kv", ids)
    assert not (tmp_path / "other.kv").exists()
    small, doc = loaded(model, "full", 4, 16, 2, file, pages=6)
    assert small.submit([1, 2], g.Params(5), after=doc) == 0
    with pytest.raises(g.UsageError, match="--pages 6: "):
        small.submit([1] * 20, g.Params(5), after=doc)


PROMPT = "The quick brown fox jumps over the lazy dog, and then it does so again. And again it jumps over the dog."


@pytest.fixture
def cli(checkpoint, capsys):
    def run(*flags):
        code = g.main(["--checkpoint", str(checkpoint), "--dtype", "float32", "--no-compile", *flags])
        return (code, *capsys.readouterr())

    return run


@pytest.mark.parametrize("cache", ["full", "pyramid:window=8", "h2o", "adakv:window=8"])
@pytest.mark.parametrize("new", ["0", "12"])
def test_a_second_process_goes_on_as_the_same_one(cli, tmp_path, monkeypatch, cache, new):
    file = str(tmp_path / "doc.kv")
    flags = ["--cache", cache, "--bits", "4", "--residual", "16"] + ([] if cache == "full" else ["--budget", "60"])
    if new != "0":
        flags += ["--max-new-tokens", new]
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\nAnd then?\nWhy?\n"))
        code, want, _ = cli("--interactive", *flags)
        assert code == 0
    code, first, _ = cli("--prompt", PROMPT, *flags, "--max-new-tokens", new, "--save-cache", file)
    assert code == 0
    code, second, _ = cli("--load-cache", file, "--prompt", "And then?", "--max-new-tokens", "12", "--save-cache", file)
    assert code == 0
    code, third, _ = cli("--load-cache", file, "--prompt", "Why?", "--max-new-tokens", "12", "--page-size", "16")
    assert code == 0
    assert second.strip()
    if new != "0":
        assert first + second + third == want


def test_plain_text_goes_on(cli, tmp_path):
    """Without a template, the next prompt is simply what follows; so two halves are one text."""
    file = str(tmp_path / "doc.kv")
    _, want, _ = cli("--raw", "--prompt", PROMPT, "--max-new-tokens", "20")
    assert cli("--raw", "--prompt", PROMPT[:70], "--max-new-tokens", "0", "--save-cache", file)[0] == 0
    assert cli("--load-cache", file, "--prompt", PROMPT[70:], "--max-new-tokens", "20")[1] == want


def test_a_chat_saves_and_loads(cli, tmp_path, monkeypatch):
    file = str(tmp_path / "doc.kv")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\nAnd then?\nWhy?\n"))
    _, want, _ = cli("--interactive", "--max-new-tokens", "9", "--system", "Be brief.")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\nAnd then?\n"))
    _, first, _ = cli("--interactive", "--max-new-tokens", "9", "--system", "Be brief.", "--save-cache", file)
    monkeypatch.setattr("sys.stdin", io.StringIO("Why?\n"))
    _, rest, _ = cli("--interactive", "--load-cache", file, "--max-new-tokens", "9")
    assert first + rest == want


@pytest.mark.parametrize(("cache", "chat"), [("full", True), ("pyramid:window=8", False), ("h2o", True)])
def test_questions_on_the_command_line(cli, tmp_path, cache, chat):
    """Each answer is that of a process of its own, after a chat as after plain text."""
    file, lines = str(tmp_path / "doc.kv"), tmp_path / "lines.jsonl"
    flags = ["--cache", cache, "--bits", "4", "--residual", "16", *([] if cache == "full" else ["--budget", "60"])]
    new = ["--max-new-tokens", "9"]
    assert cli("--prompt", PROMPT, *flags, *new, *([] if chat else ["--raw"]), "--save-cache", file)[0] == 0
    questions = ["Why?", "And what does the dog do then?", "Who?"]
    alone = [cli("--load-cache", file, "--prompt", question, *new)[1].removesuffix("\n") for question in questions]
    assert len(set(alone)) > 1
    prompts = [flag for question in questions for flag in ("--prompt", question)]
    code, out, _ = cli("--load-cache", file, *prompts, *new, "--max-batch", "2")
    assert code == 0
    assert [json.loads(line)["text"] for line in out.splitlines()] == alone
    lines.write_text("\n".join(json.dumps({"prompt": question, "max_new_tokens": 9}) for question in questions))
    code, out, _ = cli("--load-cache", file, "--prompt-file", str(lines), "--page-size", "16")
    assert [json.loads(line)["text"] for line in out.splitlines()] == alone
    same = ["--temperature", "1", "--seed", "5"]
    alone = cli("--load-cache", file, "--prompt", "Why?", *new, *same)[1].removesuffix("\n")
    code, out, _ = cli("--load-cache", file, "--prompt", "Why?", *new, *same, "--num-samples", "2")
    assert json.loads(out.splitlines()[0])["text"] == alone


def test_what_an_engine_saved_goes_on_as_plain_text(cli, tmp_path, checkpoint):
    file, (model, tokenizer) = str(tmp_path / "doc.kv"), g.load_checkpoint(str(checkpoint), dtype=torch.float32)
    ids = tokenizer.encode(PROMPT[:70])
    g.Engine(model, build(bits=4, page_size=16), 1, len(ids)).save(file, ids)
    flags = ["--raw", "--prompt", PROMPT[:70], "--bits", "4", "--max-new-tokens", "0"]
    assert cli(*flags, "--save-cache", file + "2")[0] == 0
    ours, theirs = g.Saved(file), g.Saved(file + "2")
    assert (ours.said, ours.chat) == (theirs.said, theirs.chat)
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(x, theirs.tensors[name]) for name, x in ours.tensors.items())
    assert cli("--load-cache", file, "--bits", "4", "--prompt", PROMPT[70:], "--max-new-tokens", "20")[0] == 0


@pytest.fixture
def saved(cli, tmp_path):
    file = tmp_path / "doc.kv"
    assert cli("--prompt", "Hello there", "--bits", "4", "--max-new-tokens", "3", "--save-cache", str(file))[0] == 0
    return file


def test_a_damaged_file_is_refused(cli, saved, tmp_path):
    """Cut anywhere, or any bit flipped: one sentence."""
    raw, other, draw = saved.read_bytes(), tmp_path / "other.kv", random.Random(0)
    places = [*range(0, 40, 3), *(draw.randrange(len(raw)) for _ in range(40)), len(raw) - 1]
    for at, cut in itertools.product(places, (False, True)):
        other.write_bytes(raw[:at] if cut else raw[:at] + bytes([raw[at] ^ 1 << draw.randrange(8)]) + raw[at + 1 :])
        code, out, err = cli("--load-cache", str(other), "--prompt", "Hi")
        assert code == 2, at
        assert not out
        assert len(err.splitlines()) == 1
        assert "damaged, or not what --save-cache writes" in err


def test_a_file_of_something_else_is_refused(cli, saved, tmp_path, checkpoint):
    def refused(*flags, says):
        code, out, err = cli("--prompt", "Hi", *flags)
        assert code == 2
        assert not out
        assert len(err.splitlines()) == 1
        assert says in err, err

    load = ["--load-cache", str(saved)]
    refused("--load-cache", str(tmp_path / "none.kv"), says="No such file")
    refused("--load-cache", str(tmp_path), says="--load-cache")
    refused(*load, "--dtype", "bfloat16", says="of another model")
    refused(*load, "--stats", says="--load-cache has read it")
    refused("--save-cache", str(tmp_path / "r"), "--json", str(tmp_path / "r"), says="give two files")
    refused(*load, "--weights", "int8", says="of another model")
    refused(*load, "--bits", "8", says="--bits 8: --load-cache")
    refused(*load, "--cache", "h2o", says="--cache h2o: --load-cache")
    refused(*load, "--budget", "50", says="has the default; drop one of them")
    refused(*load, "--raw", says="is a chat; drop it")
    refused(*load, "--system", "x", says="--system: the conversation")
    refused(*load, "--prompt", "b", "--save-cache", str(tmp_path / "b"), says="give one prompt")
    refused(*load, "--prompt", "b" * 1000, says="prompt 2: --max-new-tokens 200 after a prompt of 10")
    refused("--save-cache", str(tmp_path / "a" / "b"), says="--save-cache")
    refused("--save-cache", str(saved), "--num-samples", "2", "--temperature", "1", says="give one prompt")
    assert cli("--prompt", "Hi", *load, "--bits", "4", "--max-new-tokens", "2")[0] == 0


def test_another_version_is_refused(cli, saved, monkeypatch):
    monkeypatch.setattr(g.Conversation, "VERSION", 2)
    code, _, err = cli("--load-cache", str(saved), "--prompt", "Hi")
    assert code == 2
    assert "of format 1, and this program reads 2" in err


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_file_is_old_or_new(cli, saved, monkeypatch, where):
    """Interrupted while it is written, the file that was there is still there, and nothing else."""
    before = saved.read_bytes()

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(*((os, "fsync") if where == "fsync" else (type(saved), "replace")), interrupt)
    assert cli("--prompt", "Another text", "--max-new-tokens", "3", "--save-cache", str(saved))[0] == 130
    assert saved.read_bytes() == before
    assert [x.name for x in saved.parent.iterdir()] == [saved.name]


def test_what_a_file_says_of_itself(saved, checkpoint):
    """A safetensors that other programs can read, with all that is needed to go on."""
    from safetensors import safe_open

    with safe_open(saved, "pt") as file:
        header = json.loads(file.metadata()["kv-fast"])
        names = set(file.keys())
    assert header["cache"] == ["full", None, "4", "auto", None]
    assert header["said"]["messages"][0] == {"role": "user", "content": "Hello there"}
    assert header["said"]["seen"] > 11
    said = g.Saved(saved)
    args, tokenizer = SimpleNamespace(saved=said, chat=True), g.load_checkpoint(str(checkpoint))[1]
    assert g.Conversation(args, tokenizer).next("Why?") == g.Conversation(args, tokenizer).next("Why?")
    assert said.said == header["said"]  # whoever goes on from it changes nothing
    assert {f"{i}.slot_pos" for i in range(3)} < names
    assert not any("table" in name for name in names)


def test_a_file_without_what_it_should_say(cli, saved):
    """A right checksum is no proof of a right content."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(saved)
    for text in ("", "[]", "{}", '{"version": 1}'):
        save_file(tensors, saved, {"kv-fast": text, "checksum": g.Saved.checksum(text, tensors)})
        code, out, err = cli("--load-cache", str(saved), "--prompt", "Hi")
        assert code == 2
        assert not out
        assert len(err.splitlines()) == 1
