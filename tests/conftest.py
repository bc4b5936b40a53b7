"""Shared by all tests: one thread (two busy ones on tiny tensors are several times slower) and a tiny random model."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)

import model as llama  # noqa: E402
from eval import hf_weights  # noqa: E402


def rarely(cases: list, often: Callable) -> list:
    """Parameters of a test; those that are not to run often are for `pytest -m slow`."""
    whole = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[] if often(*case) else [pytest.mark.slow]) for case in whole]


def tiny_args(**changes) -> llama.ModelArgs:
    """9 query and 3 KV heads like the default model, everything else small."""
    args = dict(
        dim=36,
        n_layer=3,
        n_head=9,
        n_kv_head=3,
        head_dim=20,
        hidden_dim=48,
        vocab_size=97,
        max_seq_len=512,
        norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling={"rope_type": "default"},
        tie_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        qk_norm=False,
        eos_ids=(0,),
    )
    return llama.ModelArgs(**{**args, **changes})


def tiny_model(dtype: torch.dtype = torch.float32, seed: int = 0, **changes) -> llama.Transformer:
    """Random weights, large enough that attention is far from uniform."""
    torch.manual_seed(seed)
    model = llama.Transformer(tiny_args(**changes))
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=2.0 * p.shape[-1] ** -0.5)
    return model.to(dtype).eval().requires_grad_(False)


def tokens(n: int, batch: int = 1, vocab: int = 97, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, vocab, (batch, n), generator=torch.Generator().manual_seed(seed))


def decode(model, ids: torch.Tensor, prompt: int, **prefill) -> torch.Tensor:
    """Logits [B,n-prompt+1,V] of prefilling ids[:, :prompt] and feeding the rest token by token."""
    out = [model.prefill(ids[:, :prompt], **prefill)]
    for t in range(prompt, ids.shape[1]):
        out.append(model(ids[:, t : t + 1], torch.full((ids.shape[0], 1), t))[:, 0])
    return torch.stack(out, 1)


def garbage(layers: list) -> int:
    """Writes what nobody wants to see into every slot of these caches that holds no token: NaN where there is one, else
    all bits set. Returns into how many."""
    written = 0
    for cache in layers:
        b, h, slot = (cache.slot_pos < 0).nonzero(as_tuple=True)
        if cache.layout.pool:  # those of which the head has no page are somebody else's
            held = torch.tensor([[len(pages) for pages in row] for row in cache.layout.pages])
            b, h, slot = (x[slot < held[b, h] * cache.layout.pool.page] for x in (b, h, slot))
        written += len(slot)
        for store in (cache.k_store, cache.v_store):
            *chunk, lane = cache.layout.locate(b, h, slot)
            for i, part in enumerate(store.stored):
                bad = float("nan") if part.is_floating_point() else torch.iinfo(part.dtype).max
                if store.unit == 1 or i == 0:  # slots of a unit share the rest
                    part[(*chunk, slice(None), lane) if store.slots_last(i) else (*chunk, lane)] = bad
        if hasattr(cache.policy, "rank"):
            cache.policy.rank[cache.slot_pos < 0] = float("nan")
    return written


def needs_smollm2() -> None:
    """Fetches the default model, or skips the test that calls this."""
    try:
        llama.fetch_smollm2(None)
    except llama.CheckpointError as error:
        pytest.skip(str(error))


def caches_of(model) -> list:
    return [layer.attention.cache for layer in model.layers]


@pytest.fixture
def model():
    return tiny_model()


TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A Hugging Face directory: a tiny random llama, a tokenizer of bytes with `<|end|>` as EOS, a chat template."""
    import json

    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("tiny")
    char = {byte: chr(c) for c, byte in llama.BYTE_OF_CHAR.items()}
    specials = ["<|end|>", "<|start|>"]
    tokenizer = {
        "model": {"type": "BPE", "vocab": {char[b]: b for b in range(256)}, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "added_tokens": [{"id": 256 + i, "content": s, "special": True} for i, s in enumerate(specials)],
    }
    config = dict(
        model_type="llama",
        hidden_size=36,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=20,
        intermediate_size=48,
        vocab_size=260,
        max_position_embeddings=1024,
        eos_token_id=[256],
    )
    model = tiny_model(vocab_size=260, n_layer=3, max_seq_len=1024)
    save_file({name: tensor.clone() for name, tensor in hf_weights(model).items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"}))
    return path
