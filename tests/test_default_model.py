"""The policies on SmolLM2-135M-Instruct and natural text: Python's own manual."""

import functools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import model as m
from cache import build
from eval import transformers_twin

N = 600  # tokens of a prompt
BUDGET = 150


@functools.cache
def text(n):
    from pydoc_data.topics import topics

    return torch.tensor([default(torch.float32)[1].encode("\n\n".join(topics[t] for t in sorted(topics)))[:n]])


@functools.cache
def default(dtype):
    try:
        return m.load_checkpoint("smollm2", dtype=dtype)
    except m.CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True, scope="module")
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@functools.cache
def evidence():
    """What transformers' own model computes on the prompt: for every layer attention [9,T,T], keys and values
    [3,T,64], and queries before rotation [9,T,64]."""
    pytest.importorskip("transformers", reason="compares with the transformers package")
    hf, queries = transformers_twin(default(torch.float32)[0], attn_implementation="eager"), []
    for layer in hf.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda _m, _x, y: queries.append(y[0].unflatten(-1, (9, 64))))
    with torch.no_grad():
        out = hf(text(N), output_attentions=True, use_cache=True)
    past = out.past_key_values.layers
    return [
        (attention[0], layer.keys[0], layer.values[0], q.transpose(0, 1))
        for attention, layer, q in zip(out.attentions, past, queries, strict=True)
    ]


def scores(name, attention, k, v, q):
    """As a public library (kvpress 0.5.5) defines them, [3,T]: higher stays."""
    T, inf = k.shape[1], math.inf
    if name == "snapkv":
        mass = attention[:, -64:, :-64].mean(1)
        # There, zeros beyond the edges count as neighbours. Here they do not: two tokens at either end get up to 5/3.
        mass = F.avg_pool1d(mass, 5, 1, 2) / F.avg_pool1d(torch.ones_like(mass), 5, 1, 2)
        return F.pad(mass.unflatten(0, (3, 3)).mean(1), (0, 64), value=inf)
    if name == "tova":
        return F.pad(attention[:, -1, :-1].mean(0).expand(3, -1), (0, 1), value=inf)
    if name == "keynorm":
        return -k.norm(dim=-1)
    if name == "streaming":
        t = torch.arange(T)
        return torch.where(t < 4, inf, t.float()).expand(3, -1)
    if name == "h2o":
        # There, divided by the number of queries that could see the key, T - j, and no token is protected.
        return attention.sum(1).unflatten(0, (3, 3)).mean(1) / torch.arange(T, 0, -1)
    q, kept = q[:, 4:], k[:, 4:]
    mean = q.mean(1, keepdim=True)
    covariance = (q - mean).mT @ (q - mean) / q.shape[1]
    angle = torch.arange(T, T + 512)[:, None] * 100000.0 ** (-torch.arange(32) / 32)
    cos, sin = angle.cos().mean(0).diag(), angle.sin().mean(0).diag()
    turn = torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])
    mean, covariance = mean @ turn.T, turn @ covariance @ turn.T
    kept = kept.repeat_interleave(3, 0)
    logit = (mean * kept).sum(-1) / 8 + ((kept @ covariance) * kept).sum(-1) / 128
    worth = logit.softmax(-1).unflatten(0, (3, 3)).mean(1) * v[:, 4:].norm(dim=-1)
    return F.pad(worth, (4, 0), value=inf)


@pytest.mark.parametrize("name", ["snapkv", "tova", "keynorm", "streaming", "h2o", "expected"])
def test_kept_tokens_are_an_independent_implementations(name):
    """All layers and heads, 150 of 600 tokens. Equal keys, of one word said twice, may be kept either way."""
    model, _ = default(torch.float32)
    assert model.args.rope_theta == 100000.0
    model.setup_caches(build(name, budget=BUDGET), 1, N + 1)
    model.prefill(text(N), room=0)
    different = 0
    for layer, (attention, k, v, q) in zip(model.layers, evidence(), strict=True):
        theirs, cache = scores(name, attention, k, v, q), layer.attention.cache
        assert (cache.slot_pos.sort(-1).values == cache.slot_pos).all() and cache.slot_pos.shape[2] == BUDGET
        if name == "h2o":
            # The mapping: times T - j it is our sum over the group of three; then half the budget is the newest's.
            theirs = theirs * torch.arange(N, 0, -1) * 3
            torch.testing.assert_close(
                cache.policy.rank, theirs.gather(1, cache.slot_pos[0].long())[None], atol=1e-4, rtol=1e-4
            )
            theirs[:, N - BUDGET // 2 :] = math.inf
        for h in range(3):
            ours = set(cache.slot_pos[0, h].tolist())
            best = set(theirs[h].topk(BUDGET).indices.tolist())
            edge = theirs[h].topk(BUDGET).values[-1]
            for t in ours ^ best:
                torch.testing.assert_close(theirs[h, t], edge, atol=0, rtol=1e-4)
            different += len(ours - best)
    assert different <= 30 * 3 * BUDGET * 0.001


def test_bf16_keeps_what_exact_sums_keep():
    """8,000 tokens, H2O's column sums of a bf16 model against float64 on the same queries and keys: at least 99 % of
    the kept tokens are the same. Sums held in bf16 would stop growing at 256 times what one query adds."""
    whole, _ = default(torch.bfloat16)
    model = m.Transformer(replace(whole.args, n_layer=3))
    model.load_state_dict(whole.state_dict(), strict=False, assign=True)
    model.setup_caches(build("h2o", budget=2000), 1, 8001)
    cache, seen = model.layers[2].attention.cache, []
    prefill = cache.prefill
    cache.prefill = lambda q, k, v, pos: seen.append((q[0], k[0])) or prefill(q, k, v, pos)
    model.prefill(text(8000), room=0)
    q, k = seen[0]
    assert q.dtype == torch.bfloat16
    T, future = 8000, torch.ones(500, 500, dtype=torch.bool).triu(1)
    for h in range(3):
        mass = torch.zeros(T, dtype=torch.float64)
        for g in range(3 * h, 3 * h + 3):
            for t in range(0, T, 500):
                score = q[g, t : t + 500].double() @ k[h, : t + 500].double().T / 8
                score[:, t:].masked_fill_(future, -math.inf)
                mass[: t + 500] += score.softmax(-1).sum(0)
        mass[T - 1000 :] = math.inf
        exact = set(mass.topk(2000).indices.tolist())
        assert len(exact & set(cache.slot_pos[0, h].tolist())) >= 0.99 * 2000


@pytest.mark.slow
def test_streaming_past_the_end_is_as_good_as_reading_again():
    """Three times the model's 8,192 positions, in turns of 512 tokens and then one by one: finite, and at three depths
    the perplexity is within 10 % of a window of the last 256 tokens that is read again for every token."""
    model, _ = default(torch.bfloat16)
    ids, size, score = text(3 * 8192 + 1), 256, 24
    nll, again = [], []
    model.setup_caches(build("streaming", budget=size), 1, ids.shape[1])
    seen = 0
    for depth in (8192, 2 * 8192, 3 * 8192):
        for t in range(seen, depth - score, 512):
            logits = model.prefill(ids[:, t : min(t + 512, depth - score)], t, room=0)
        for t in range(depth - score, depth):
            logits = model(ids[:, t : t + 1], torch.full((1, 1), t))[:, 0].float()
            assert logits.isfinite().all()
            nll.append(F.cross_entropy(logits, ids[:, t + 1]))
        assert model.layers[0].attention.cache.slot_pos.max() == depth - 1
        seen = depth
    fresh = m.Transformer(model.args)
    fresh.load_state_dict(model.state_dict(), assign=True)
    fresh.requires_grad_(False)
    for depth in (8192, 2 * 8192, 3 * 8192):
        rows = torch.stack([ids[0, t + 1 - size : t + 1] for t in range(depth - score, depth)])
        for part, first in zip(rows.split(12), range(depth - score, depth, 12), strict=True):
            pos = torch.arange(size).expand(len(part), -1)
            x, rope = fresh.tok_embeddings(part), fresh.rope(pos)
            for layer in fresh.layers:
                x = layer(x, rope, pos)
            again.append(
                F.cross_entropy(fresh.head(x[:, -1]).float(), ids[0, first + 1 : first + 13], reduction="none")
            )
    ratio = math.exp(torch.stack(nll).mean() - torch.cat(again).mean())
    assert 0.9 < ratio < 1.1


def test_perplexity_is_that_of_transformers(capsys, tmp_path):
    """The full cache's, window by window through `eval.py ppl`, against one forward pass of the other library."""
    import json

    import eval as ev

    pytest.importorskip("transformers", reason="compares with the transformers package")
    model, tokenizer = default(torch.float32)
    flags = ["--context", "500", "--score", "60", "--windows", "2", "--cache", "full", "--bits", "16", "--json"]
    assert ev.main(["ppl", "--dtype", "float32", "--no-compile", *flags]) == 0
    row = json.loads(capsys.readouterr().out)
    hf, ids, nll = transformers_twin(model), tokenizer.encode(ev.sample_text()), []
    for i in range(2):
        window = torch.tensor([ids[i * 561 : (i + 1) * 561]])
        with torch.no_grad():
            logits = hf(window).logits[0, 500:560]
        nll.append(F.cross_entropy(logits, window[0, 501:]).item())
    assert row["samples"] == 2 and row["nll"] == pytest.approx(sum(nll) / 2, abs=1e-4)
    assert row["ppl"] == pytest.approx(math.exp(sum(nll) / 2), abs=1e-3)


@pytest.mark.parametrize("dtype, most", [(torch.float32, 0.002), (torch.bfloat16, 0.005)])
def test_int8_weights_change_little(dtype, most, capsys):
    """KL divergence of what comes next, of 1,500 tokens, from that of the same model's own weights; 0.001 of it is
    bf16's own noise, where that is computed with."""
    model, small = (m.load_checkpoint("smollm2", dtype=dtype)[0] for _ in range(2))
    small.to_int8()
    assert small.step_bytes() / model.step_bytes() < (0.54 if dtype == torch.bfloat16 else 0.27)
    ids = text(1500)
    with torch.no_grad():
        p, q = (x(ids, torch.arange(1500)[None]).float().log_softmax(-1) for x in (model, small))
    kl = (p.exp() * (p - q)).sum(-1).mean().item()
    with capsys.disabled():
        print(f" KL {kl:.5f}", end="")
    assert 0 < kl <= most
