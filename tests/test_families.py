"""The models that people use, from their published configs: shapes, sizes, and a cut of each against transformers."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from test_checkpoint import assert_holds, weights, write_gguf

import model as m
from cache import POLICIES, build, memory
from eval import DEFAULTS, SHAPES, hf_weights, main
from model import ModelArgs, load_checkpoint

PARAMETERS = {  # as their model cards count them
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameter_counts(name):
    with torch.device("meta"):
        model = m.Transformer(ModelArgs.from_hf(DEFAULTS | SHAPES[name]))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def cut(name: str) -> dict:
    """Two layers of a model with a fraction of its heads, MLP and vocabulary; heads, groups, positions as they are."""
    config = DEFAULTS | SHAPES[name]
    heads, kv = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    fewer = math.gcd(heads, kv) // (1 if kv == 1 else math.gcd(math.gcd(heads, kv), 2))  # one or two KV heads are left
    config |= dict(head_dim=config.get("head_dim", config["hidden_size"] // heads))
    config |= dict(num_attention_heads=heads // fewer, num_key_value_heads=kv // fewer, num_hidden_layers=2)
    config |= dict(hidden_size=192, intermediate_size=160, vocab_size=300)
    return config


@pytest.mark.parametrize("name", SHAPES)
def test_a_cut_of_each_family_says_what_transformers_says(name, tmp_path):
    """From safetensors and from GGUF, to 1e-4 of the logits; through the caches of a decode step, too."""
    transformers = pytest.importorskip("transformers", reason="compares with the transformers package")
    config = cut(name)
    args = ModelArgs.from_hf(config)
    tensors = {key: x * (0.3 if x.dim() == 1 else x.shape[-1] ** -0.5) for key, x in weights(args).items()}
    family = config["model_type"]
    hf_config = transformers.AutoConfig.for_model(**config)
    hf = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").eval().float()
    tied = ["lm_head.weight"] if args.tie_embeddings else []
    assert hf.load_state_dict(tensors, strict=False) == (tied, [])
    hf.tie_weights()
    ids = torch.randint(1, 300, (1, 120), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = hf(ids).logits

    directory = tmp_path / "hf"
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(json.dumps(bytes_only()))
    scaling, more = args.rope_scaling, {}
    if scaling["rope_type"] == "llama3":  # what a converter writes is the factor of every pair
        plain = m.rope_frequencies(ModelArgs(**{**vars(args), "rope_scaling": {"rope_type": "default"}}))[0]
        more = {"rope_freqs.weight": plain / m.rope_frequencies(args)[0]}
    arch = "llama" if family == "mistral" else family
    gguf = write_gguf(tmp_path / "cut.gguf", arch, tensors | more, args)
    for path in (directory, gguf):
        model, _ = load_checkpoint(str(path), dtype=torch.float32)
        assert_holds(model, tensors) if path == directory else None
        got = model(ids, torch.arange(120)[None])
        limit = 1e-4 * expected.std()
        assert (got - expected).abs().max() < limit
        model.setup_caches(build("full"), 1, 120)
        assert (model.prefill(ids[:, :118], room=2) - expected[:, 117]).abs().max() < limit
        assert (model(ids[:, 118:119], torch.tensor([[118]])) - expected[:, 118]).abs().max() < limit


def bytes_only() -> dict:
    char = {byte: chr(c) for c, byte in m.BYTE_OF_CHAR.items()}
    return {
        "model": {"type": "BPE", "vocab": {char[b]: b for b in range(256)}, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    }


@pytest.mark.parametrize("page", [0, 64])
@pytest.mark.parametrize("name", POLICIES)
def test_planned_bytes_are_measured_bytes(name, page):
    """Of the default model's shape, to 1 %, at 16, 8, 4 and 2 bits, kivi's and NVFP4's included. adakv's heads are
    ragged, and without pages all have the slots of the largest."""
    args, prompt, new = ModelArgs.from_hf(DEFAULTS | SHAPES["smollm2-135m"]), 700, 50
    args.n_layer = 4
    if name == "adakv":
        name += ":floor=1"
    q, k = torch.randn(1, 9, prompt, 64), torch.randn(1, 3, prompt, 64)
    pos, rope = torch.arange(prompt)[None], m.rope_frequencies(args)[0]
    for bits, form in ((16, "auto"), (8, "auto"), (4, "auto"), (2, "auto"), (4, "nvfp4"), (4, "kivi")):
        if form == "kivi" and name == "keydiff":
            continue
        budget = None if name == "full" else 256
        spec = build(name, budget=budget, bits=bits, format=form, page_size=page)
        layers = spec(args, rope, 1, prompt + new, torch.bfloat16, "cpu")
        for layer in layers:
            layer.fit([prompt], [0], new, prompt + new)
            layer.prefill(q.bfloat16(), k.bfloat16(), k.bfloat16(), pos)
        planned = spec.nbytes(args, prompt, new, torch.bfloat16)
        assert planned == pytest.approx(memory(layers), rel=0.01 if not page else 0.04), (bits, form)


def test_plan(capsys, tmp_path):
    """A number of GPUs is as good as the heads allow; what is saved on cache is saved on time."""
    flags = ["plan", "--model", "llama-3-70b", "--context", "131072", "--cache", "full,pyramid", "--json"]
    assert main(flags) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    of = {(row["cache"], row["gpus"]): row for row in rows}
    full, small = of["full 16", 1], of["pyramid 0.2 4", 1]
    assert full["cache_bytes"] == pytest.approx(131072 * 80 * 8 * 128 * 4 * (1 + 4 / 512), rel=1e-3)
    assert full["weight_bytes"] == 2 * PARAMETERS["llama-3-70b"]
    table = 128256 * 8192 * 2
    assert full["step_ms"] == pytest.approx((full["weight_bytes"] - table + full["cache_bytes"]) / 4800e6)
    assert small["cache_bytes"] < 0.08 * full["cache_bytes"] and small["step_ms"] < full["step_ms"]
    for gpus in (2, 4, 8):
        row = of["pyramid 0.2 4", gpus]
        assert row["cache_bytes"] == small["cache_bytes"] / gpus and row["fits"]
        replicated = 2 * table + (2 * 80 + 1) * 8192 * 2  # embeddings, head and norms
        assert row["weight_bytes"] - replicated == (small["weight_bytes"] - replicated) / gpus
    assert not full["fits"]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(DEFAULTS | SHAPES["smollm2-135m"]))
    assert main(["plan", "--model", str(config), "--gpus", "1,3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 3 * 2
    assert main(["plan", "--model", "qwen2.5-0.5b"]) == 0  # of 1, 2, 4, 8 those that divide its 2 KV heads
    assert len(capsys.readouterr().out.splitlines()) == 1 + 3 * 2
    for wrong, said in {
        ("--gpus", "3"): "--gpus 3: 8 KV heads",
        ("--model", "llama-3-80b"): "(did you mean llama-3-70b?)",
        ("--context", "200000"): "131072 positions of llama-3-70b",
        ("--gb-s", "0"): "--gb-s 0: give a number above 0",
        ("--threads", "2"): "--threads: not for plan",
        ("--steps", "3"): "--steps: only for bench",
    }.items():
        assert main(["plan", *wrong]) == 2
        assert said in capsys.readouterr().err
    config.write_text("[1")
    assert main(["plan", "--model", str(config)]) == 2 and "config.json" in capsys.readouterr().err


def test_hf_names_cover_every_weight():
    model = m.Transformer(ModelArgs.from_hf(cut("qwen2.5-0.5b")))
    assert set(hf_weights(model)) == set(weights(model.args))
