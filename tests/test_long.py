"""Text without end: 50,000 tokens through the command line at constant memory, and positions beyond 2^24 and 2^31."""

import io
import json
from decimal import Decimal, getcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_model, tokens

import cache as caches
import generate as g
import kernels
from cache import SpecError, build
from eval import hf_weights

SHAPE = dict(dim=8, n_layer=2, n_head=2, n_kv_head=1, head_dim=8, hidden_dim=8, vocab_size=260, max_seq_len=128)
FORMATS = [dict(bits=16), dict(bits=4, residual=64)]  # all that is held is in the ring: codes depend on the rotation


@pytest.fixture(scope="module")
def smallest(tmp_path_factory, checkpoint) -> Path:
    """`checkpoint` with a model that does thousands of tokens a second."""
    path = tmp_path_factory.mktemp("smallest")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((checkpoint / name).read_bytes())
    config = json.loads((checkpoint / "config.json").read_text())
    config |= dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    config |= dict(intermediate_size=8, max_position_embeddings=128, eos_token_id=[])
    (path / "config.json").write_text(json.dumps(config))
    from safetensors.torch import save_file

    save_file({name: x.clone() for name, x in hf_weights(tiny_model(**SHAPE)).items()}, path / "model.safetensors")
    return path


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="what is resident is known on Linux only")
def test_fifty_thousand_tokens_at_constant_memory(smallest, capsys, monkeypatch):
    """Ten turns of 5,000 tokens as --interactive does them, compiled and replayed; the first two are the warm-up."""
    turns, steps, finite, memory, graphs, kept = 10, 0, torch.tensor(True), [], [], []
    stream, greedy = g.Report.stream, g.greedy

    def watched(report, ids, start, new):
        buffers = lambda: [b for layer in report.model.layers for b in layer.attention.cache.buffers()]  # noqa: E731
        where = None
        for piece in stream(report, ids, start, new):
            where = where or [b.data_ptr() for b in buffers()]  # the prompt was read
            yield piece
        assert [b.data_ptr() for b in buffers()] == where
        assert all(b.isfinite().all() for b in buffers())
        memory.append(resident())
        graphs.append(g.graphs())
        kept.append((len(report.token_ids), len(report.text)))

    def checked(logits):
        logits[:, 256:] = -1e4  # no answer ends before its 5,000 tokens
        nonlocal steps
        steps += 1
        finite.logical_and_(logits.isfinite().all())
        return greedy(logits)

    monkeypatch.setattr(g.Report, "stream", watched)
    monkeypatch.setattr(g, "greedy", checked)
    monkeypatch.setattr("sys.stdin", io.StringIO("And then?\n" * turns))
    torch._dynamo.reset()
    flags = ["--cache", "streaming", "--budget", "40", "--bits", "4", "--residual", "8", "--dtype", "float32"]
    flags += ["--interactive", "--max-new-tokens", "5000"]
    assert g.main(["--checkpoint", str(smallest), *flags]) == 0
    assert f"{turns * 5000:,} new" in capsys.readouterr().err
    assert steps == turns * 5000
    assert finite
    assert max(memory[2:]) - memory[1] < 5e6
    assert set(graphs) == {1}
    assert set(kept) == {(0, 0)}


def test_a_conversation_without_end_remembers_a_turn(checkpoint):
    """What comes next is what it would be with all messages."""
    tokenizer = g.load_checkpoint(str(checkpoint))[1]
    for system in (None, "Be brief."):
        talks = []
        for spec in (build("streaming", budget=40), build()):
            args = SimpleNamespace(spec=spec, system=system, chat=True, saved=None)
            talks.append(g.Conversation(args, tokenizer))
        for turn in range(5):
            a, b = (talk.next(f"Question {turn}") for talk in talks)
            assert a == b
            answer = tokenizer.encode(f"Answer {turn}") + [*tokenizer.eos_ids][: turn % 2]
            seen = talks[0].seen + len(a) + len(answer) - 1
            for talk in talks:
                talk.answered(SimpleNamespace(answer=answer, answered=f"Answer {turn}", seen=seen, unread=[]))
        assert len(talks[1].messages) == 10 + (system is not None)
        assert talks[0].messages == talks[1].messages[: system is not None] + talks[1].messages[-2:]


def test_with_json_a_report_holds_all_turns(smallest, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAnd then?\n"))
    file = tmp_path / "report.json"
    flags = ["--interactive", "--cache", "streaming", "--budget", "40", "--max-new-tokens", "7", "--no-compile"]
    assert g.main(["--checkpoint", str(smallest), *flags, "--json", str(file)]) == 0
    data = json.loads(file.read_text())
    assert len(data["token_ids"]) == data["new_tokens"] == 14
    assert data["text"] == capsys.readouterr().out.replace("\n", "") != ""


# ---------------------------------------------------------------------------------------------------------------------
# Positions beyond what float32 can count


def cos_and_sin(angle: Decimal) -> tuple[float, float]:
    """By their series, of an angle that is reduced first; 60 digits."""
    pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
    x = angle % (2 * pi)
    term, sums = Decimal(1), [Decimal(0), Decimal(0)]
    for n in range(80):
        sums[n % 2] += term if n % 4 < 2 else -term
        term = term * x / (n + 1)
    return float(sums[0]), float(sums[1])


def test_angles_are_exact_wherever_a_text_is():
    getcontext().prec = 60
    frequencies = tiny_model().rope.frequencies
    for pos in [2**24 + 1, 2**24 + 3, 2**25 - 1, 2**30, 2**30 + 1, 2**31 - 1]:
        got = kernels.rotary(torch.tensor([pos]), frequencies)[0]  # [2,D/2]
        want = [cos_and_sin(pos * Decimal(float(f))) for f in frequencies]
        assert (got - torch.tensor(want).T).abs().max() < 1e-6, pos


def shifted(state: dict, by: int, sink: int) -> dict:
    """As if all tokens but the sinks had come `by` positions later; keys stay rotated as they are."""
    later = state["slot_pos"] + by * (state["slot_pos"] >= sink).int()
    return {**state, "slot_pos": later}


@pytest.mark.parametrize("form", FORMATS)
def test_only_differences_of_positions_matter(form):
    """The same text at small positions and beyond 2^25: a step, and a second turn, give the same logits."""
    model, ids, by = tiny_model(n_layer=2), tokens(200), 2**25 + 64  # a multiple of what the ring holds
    states, logits = None, []
    for offset in (0, by):
        model.setup_caches(build("streaming", budget=40, **form), 1, caches.LONGEST)
        if states is None:
            model.prefill(ids[:, :40], room=0)
            states = [{k: x.clone() for k, x in layer.attention.cache.state().items()} for layer in model.layers]
        for layer, state in zip(model.layers, states, strict=True):
            layer.attention.cache.restore(shifted(state, offset, sink=4))
        for t in range(40, 160):  # after two windows, one for each layer, nothing is left that was rotated elsewhere
            y = model(ids[:, t : t + 1], torch.tensor([[t + offset]]))[:, 0]
            logits.append(y)
        logits.append(model.prefill(ids[:, 160:], 160 + offset, 0))
    near, far = (torch.stack(x[-41:]) for x in (logits[: len(logits) // 2], logits))
    assert near.std() > 0.5
    assert (near - far).abs().max() < 1e-4


def test_the_newest_win_at_any_position():
    """A text that is read first at a position where float32 knows every second one only."""
    for start in (0, 2**24 + 1, 2**30 + 1):
        model = tiny_model(n_layer=1)
        model.setup_caches(build("streaming", budget=16), 1, caches.LONGEST)
        model.prefill(tokens(60), start, 0)
        held = model.layers[0].attention.cache.slot_pos
        first = [0, 1, 2, 3] if start == 0 else []
        newest = range(start + 60 - 16 + len(first), start + 60)
        assert held.sort(-1).values.tolist() == [[first + [*newest]] * 3]


def test_the_end_of_a_text_without_end():
    model = tiny_model(n_layer=1)
    model.setup_caches(build("streaming", budget=16), 1, caches.LONGEST)
    with pytest.raises(SpecError, match="positions are int32, so that at most 2,147,483,647 fit"):
        model.setup_caches(build("streaming", budget=16), 1, caches.LONGEST + 1)
    with pytest.raises(SpecError, match="int32"):
        g.Engine(model, build("streaming", budget=16), 2, caches.LONGEST + 1)
    last = caches.LONGEST - 1
    model.prefill(tokens(20), last - 20, 1)
    assert model(tokens(1), torch.tensor([[last]])).isfinite().all()
    assert int(model.layers[0].attention.cache.slot_pos.max()) == last


def test_draws_are_told_apart_beyond_2_24():
    """`random` ranks by a hash of the position, not by the position."""
    policy = build("random", budget=16).policy().attach(0, torch.zeros(4), 512)
    pos = torch.arange(2**24, 2**24 + 1000)[None]
    assert policy.score(None, torch.zeros(1, 1, 1000, 8), None, pos).unique().numel() > 990
