"""Logits equal those of transformers, for a tiny random config of every family and for the default model."""

import pytest
import torch
from conftest import tiny_args

import model as m
from eval import hf_weights, transformers_twin
from model import CheckpointError, ModelArgs, load_checkpoint

transformers = pytest.importorskip("transformers", reason="parity tests compare with the transformers package")

TINY = dict(
    vocab_size=97,
    hidden_size=36,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
FAMILIES = {
    "llama": dict(head_dim=20),
    "llama-tied-default-heads": dict(tie_word_embeddings=True, num_key_value_heads=9),
    "llama-attention-bias": dict(attention_bias=True),
    "llama-llama3": dict(head_dim=20, rope_parameters={**LLAMA3, "rope_theta": 500000.0}),
    "llama-linear": dict(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
    "llama-yarn": dict(
        head_dim=32,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 10000.0,
        },
    ),
    "mistral": dict(head_dim=20, sliding_window=None),
    "qwen2": dict(),
    "qwen3": dict(head_dim=16),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_every_family(name):
    family = name.split("-")[0]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**TINY, **FAMILIES[name]})
    model = m.Transformer(ModelArgs.from_hf(config.to_dict())).eval().requires_grad_(False)
    for p in model.parameters():  # biases and norms start as constants, which would hide a mistake
        torch.nn.init.normal_(p, mean=float(p.dim() == 1) * 0.5, std=0.3)
    hf = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    missing, unexpected = hf.load_state_dict(hf_weights(model), strict=False)
    assert not unexpected and missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
    assert model.args.qk_norm == (family == "qwen3")
    ids = torch.randint(0, 97, (2, 300))
    with torch.no_grad():
        expected = hf(ids).logits
    got = model(ids, torch.arange(300).expand(2, -1))
    assert (got - expected).abs().max() / expected.std() < 1e-5
    if "bias" not in name and family != "mistral":  # the same from the shape alone, as `eval.py bench --vs` compares
        with torch.no_grad():
            assert (transformers_twin(model)(ids).logits - expected).abs().max() / expected.std() < 1e-5


def test_logits_of_the_default_model():
    """SmolLM2-135M-Instruct in float32, 512 positions of natural text, max abs 2e-4."""
    from pydoc_data.topics import topics

    try:
        model, tokenizer = load_checkpoint("smollm2", dtype=torch.float32)
    except CheckpointError as error:
        pytest.skip(str(error))
    hf = transformers_twin(model)
    ids = torch.tensor([tokenizer.encode(topics["for"] + topics["try"])[:512]])
    assert ids.shape == (1, 512)
    with torch.no_grad():
        expected = hf(ids).logits
    got = model(ids, torch.arange(512)[None])
    assert (got - expected).abs().max() < 2e-4
    assert expected.softmax(-1).amax(-1).mean() > 0.3  # a model that predicts text, not noise


def test_rope_stays_float32_whatever_the_model_is():
    model = m.Transformer(tiny_args())
    exact = model.rope(torch.tensor([[4000]]))
    model.to(torch.bfloat16)
    assert model.norm.weight.dtype == torch.bfloat16
    assert model.rope(torch.tensor([[4000]])).dtype == torch.float32
    assert torch.equal(model.rope(torch.tensor([[4000]])), exact)
