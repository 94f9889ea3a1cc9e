"""Seeded tiny GGUF models in any format, with a byte-level vocabulary: text prompts work, answers vary."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from gguf_writer import ARR, I32, Tensor, Typed, write_gguf
from random_weights import random_weights

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCAB = 256 + len(CONTROL_TOKENS)
EOS_TOKEN_ID = 256 + CONTROL_TOKENS.index("<|im_end|>")
BOS_TOKEN_ID = 256 + CONTROL_TOKENS.index("<|im_start|>")

EMBEDDING_SPREAD = 0.6  # the last token and the layers then weigh about the same in the next token
QUERY_SPREAD = 2.5  # attention that chooses: an average over all tokens would settle on one answer
ROUTER_SPREAD = 2.0  # experts of a token then weigh differently, and the next in rank is not too near
LOGITS_SPREAD = 4.0  # large enough that the best token leads clearly
NORMAL_TOKEN, CONTROL_TOKEN, USER_DEFINED_TOKEN, UNUSED_TOKEN = 1, 3, 4, 5


class Family(NamedTuple):
    """Which tensors and keys an architecture's files have; those of Llama by default."""

    eps_key: str = "layer_norm_rms_epsilon"
    norm_bias: bool = False
    attn_norm: bool = True
    ffn_norm: str = "ffn_norm"  # its name
    post_norms: bool = False
    qk_norm: str = (
        ""  # weights of "head": one for each head alike, "heads": for each its own, "row": for all together
    )
    fused: tuple[str, ...] = ()  # "attn_qkv": query, key and value in one matrix; "ffn_up": gate and up
    gated: bool = True
    biases: tuple[str, ...] = ()  # matrices that have one
    scaled_embedding: bool = False
    attn_sinks: bool = False
    num_experts: int = 0
    experts_per_token: int = 2
    shared_experts: int = 0  # so many times the size of the others
    shared_gate: bool = False
    router_bias: bool = False
    dense_layers: int = 0  # before the mixtures
    nextn_layers: int = 0  # behind the others, for tokens further ahead
    expert_keys: tuple[str, ...] = ()  # sizes of experts that the files give, of EXPERT_KEYS
    keys: Mapping[str, object] = {}  # behind the architecture's name


EXPERT_KEYS = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
_EPS = "layer_norm_epsilon"
_ATTN = ("attn_q", "attn_k", "attn_v", "attn_output")
_FUSED = ("attn_qkv", "ffn_up")
_GRANITE_KEYS = {"attention.scale": 0.5, "embedding_scale": 6.0, "residual_scale": 0.4, "logit_scale": 3.0}
_GLM = {"rope.dimension_count": 8}
_SECTIONS = {"rope.dimension_sections": [2, 3, 3, 0]}
_INTERLEAVED_SECTIONS = {"rope.dimension_sections": [3, 3, 2, 0]}
_DENSE_FIRST = {"leading_dense_block_count": 1}
_SHARED = {"expert_shared_count": 1}
_SIGMOID = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5}
FAMILIES = {
    "arcee": Family(gated=False),
    "bailingmoe": Family(
        num_experts=6,
        shared_experts=2,
        expert_keys=EXPERT_KEYS[:1],
        keys={"expert_shared_count": 2, "expert_weights_norm": True, "expert_weights_scale": 1.0},
    ),
    "chatglm": Family(fused=_FUSED, biases=("attn_qkv",), keys=_GLM),
    "cohere2": Family(eps_key=_EPS, ffn_norm="", keys={"logit_scale": 0.25, "attention.sliding_window": 12}),
    "command-r": Family(eps_key=_EPS, ffn_norm="", keys={"logit_scale": 0.0625}),
    "deepseek": Family(
        num_experts=6,
        shared_experts=2,
        expert_keys=EXPERT_KEYS[:1],
        dense_layers=1,
        keys={"expert_shared_count": 2, **_DENSE_FIRST},
    ),
    "dots1": Family(
        qk_norm="head",
        num_experts=7,
        experts_per_token=3,
        shared_experts=1,
        router_bias=True,
        expert_keys=EXPERT_KEYS[:1],
        dense_layers=1,
        keys={**_SHARED, **_DENSE_FIRST, **_SIGMOID},
    ),
    "ernie4_5": Family(),
    "ernie4_5-moe": Family(
        num_experts=7,
        experts_per_token=3,
        shared_experts=2,
        router_bias=True,
        expert_keys=EXPERT_KEYS,
        dense_layers=1,
        keys={"expert_shared_count": 2, "interleave_moe_layer_step": 1, **_DENSE_FIRST},
    ),
    "exaone": Family(),
    "exaone4": Family(attn_norm=False, ffn_norm="", post_norms=True, qk_norm="head"),
    "gemma": Family(scaled_embedding=True),
    "gemma2": Family(
        post_norms=True,
        scaled_embedding=True,
        keys={
            "attention.sliding_window": 12,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": Family(post_norms=True, qk_norm="head", scaled_embedding=True),
    "glm4": Family(post_norms=True, fused=_FUSED[1:], biases=_ATTN[:3], keys=_GLM),
    "glm4moe": Family(
        ffn_norm="post_attention_norm",
        biases=_ATTN[:3],
        num_experts=7,
        experts_per_token=3,
        shared_experts=1,
        router_bias=True,
        expert_keys=EXPERT_KEYS[:1],
        dense_layers=1,
        nextn_layers=1,
        keys={"nextn_predict_layers": 1, **_GLM, **_SHARED, **_DENSE_FIRST, **_SIGMOID},
    ),
    "gpt-oss": Family(
        ffn_norm="post_attention_norm",
        biases=(*_ATTN, "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
        attn_sinks=True,
        num_experts=6,
        expert_keys=EXPERT_KEYS[:1],
        keys={
            "attention.sliding_window": 12,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
        },
    ),
    "granite": Family(keys=_GRANITE_KEYS),
    "granitemoe": Family(num_experts=5, keys=_GRANITE_KEYS),
    "hunyuan-dense": Family(qk_norm="head"),
    "hunyuan-moe": Family(
        qk_norm="head", num_experts=6, shared_experts=1, expert_keys=EXPERT_KEYS, keys=_SHARED
    ),
    "internlm2": Family(),
    "llama": Family(),
    "minicpm": Family(keys={"embedding_scale": 6.0, "residual_scale": 0.4, "logit_scale": 3.0}),
    "minimax-m2": Family(
        qk_norm="row",
        num_experts=7,
        experts_per_token=3,
        router_bias=True,
        expert_keys=EXPERT_KEYS[:1],
        keys={"expert_gating_func": 2, "rope.dimension_count": 8},
    ),
    "mistral3": Family(
        keys={
            "attention.temperature_scale": 0.3,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 10,
            "rope.scaling.yarn_beta_fast": 4.0,
            "rope.scaling.yarn_log_multiplier": 0.5,
        }
    ),
    "nemotron": Family(eps_key=_EPS, norm_bias=True, gated=False, keys={"rope.dimension_count": 8}),
    "olmo2": Family(attn_norm=False, ffn_norm="", post_norms=True, qk_norm="row"),
    "olmoe": Family(qk_norm="row", num_experts=8, experts_per_token=3),
    "phi3": Family(fused=_FUSED),
    "qwen2": Family(biases=_ATTN[:3]),
    "qwen2moe": Family(
        biases=_ATTN[:3], num_experts=6, shared_experts=2, shared_gate=True, expert_keys=EXPERT_KEYS
    ),
    "qwen2vl": Family(biases=_ATTN[:3], keys=_SECTIONS),
    "qwen3": Family(qk_norm="head"),
    "qwen3moe": Family(qk_norm="head", num_experts=7, experts_per_token=3, expert_keys=EXPERT_KEYS[:1]),
    "qwen3vl": Family(qk_norm="head", keys={**_INTERLEAVED_SECTIONS, "n_deepstack_layers": 1}),
    "qwen3vlmoe": Family(
        qk_norm="head",
        num_experts=7,
        experts_per_token=3,
        expert_keys=EXPERT_KEYS[:1],
        keys=_INTERLEAVED_SECTIONS,
    ),
    "seed_oss": Family(ffn_norm="post_attention_norm", biases=_ATTN[:3]),
    "smollm3": Family(),
    "stablelm": Family(eps_key=_EPS, norm_bias=True),
    "starcoder2": Family(
        eps_key=_EPS,
        norm_bias=True,
        gated=False,
        biases=(*_ATTN, "ffn_up", "ffn_down"),
    ),
}


def byte_level_tokenizer(vocab: int = VOCAB) -> dict[str, object]:
    """Metadata of a tokenizer: ids 0..255 are the bytes, then come CONTROL_TOKENS, then unused tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    # GPT-2's alphabet: a byte that does not print gets a character from 256 on.
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    unused = vocab - VOCAB
    if unused < 0:
        raise ValueError(f"vocab = {vocab} is less than the {VOCAB} bytes and control tokens")
    tokens = [letters[byte] for byte in range(256)]
    tokens += [*CONTROL_TOKENS, *(f"<|unused_{i}|>" for i in range(unused))]
    types = [NORMAL_TOKEN] * 256 + [CONTROL_TOKEN] * len(CONTROL_TOKENS) + [UNUSED_TOKEN] * unused
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed(ARR, Typed(I32, types)),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": BOS_TOKEN_ID,
        "tokenizer.ggml.eos_token_id": EOS_TOKEN_ID,
        "tokenizer.ggml.padding_token_id": 256 + CONTROL_TOKENS.index("<|pad|>"),
        "tokenizer.ggml.add_bos_token": False,
    }


def write_tiny_model(
    path: str | os.PathLike[str],
    arch: str = "llama",
    quant: str | Mapping[str, str] = "F32",
    *,
    hidden: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    layers: int = 2,
    ff: int | None = None,
    vocab: int = VOCAB,
    tied: bool = True,
    family: Family | None = None,
    qkv_bias: bool | None = None,
    rope_dim: int | None = None,
    rope_freqs: Sequence[float] | None = None,
    rope_factors: Mapping[str, Sequence[float]] | None = None,
    sliding_window: int = 0,
    context_length: int = 512,
    seed: int = 0,
    poisoned_token: int | None = None,
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write a random model of one of FAMILIES; the same arguments give the same bytes.

    quant: the type of all matrices, or types by the first pattern that matches a tensor's name, as in
    {"*.ffn_down.*": "Q6_K", "*": "Q4_K"}; the rest, and routers, are F32. hidden and ff default to 64 and 96,
    with K-quants to 256 and 512; experts have a third of that, with K-quants 256. family replaces the
    architecture's row. qkv_bias defaults to what the architecture has. rope_dim: elements of a head with RoPE.
    rope_factors: of "long" and "short" contexts. poisoned_token: one element of its embedding, which must be
    F32, is infinite once it is scaled. metadata adds keys or replaces them. Raises ValueError when the blocks of a
    type do not divide a matrix.
    """
    patterns = {"*": quant} if isinstance(quant, str) else quant
    is_super = any(gguf.GGML_QUANT_SIZES[GGMLType[name]][0] == gguf.QK_K for name in patterns.values())
    hidden = hidden or (256 if is_super else 64)
    ff = ff or (512 if is_super else 96)
    head_dim = head_dim or hidden // heads
    family = family or FAMILIES[arch]
    q_size, kv_size = heads * head_dim, kv_heads * head_dim
    expert_ff = 256 if is_super else ff // 3
    shared_ff = family.shared_experts * expert_ff
    rng = np.random.default_rng(seed)
    tensors: list[Tensor] = []

    def matrix(name: str, n: int, k: int, spread: float | None = None, num: int = 0) -> None:
        kind = GGMLType[next((patterns[p] for p in patterns if fnmatchcase(name, p)), "F32")]
        data = random_weights(kind, (num or 1) * n, k, k**-0.5 if spread is None else spread, rng)
        tensors.append((name, (num, n, k) if num else (n, k), int(kind), data.tobytes()))

    def vector(name: str, n: int | tuple[int, int], mean: float = 1.0, spread: float = 0.1) -> None:
        values = mean + spread * rng.standard_normal(n)
        tensors.append((name, values.shape, int(GGMLType.F32), values.astype("<f4").tobytes()))

    def linear(
        name: str, n: int, k: int, spread: float | None = None, bias: bool = False, num: int = 0
    ) -> None:
        """One matrix, or one for each of so many experts."""
        matrix(f"{name}.weight", n, k, spread, num)
        if bias or name.split(".")[-1] in family.biases:
            vector(f"{name}.bias", (num, n) if num else n, 0.0, 0.3)

    def mixture(blk: str) -> None:
        num = family.num_experts
        vector(f"{blk}.ffn_gate_inp.weight", (num, hidden), 0.0, ROUTER_SPREAD * hidden**-0.5)
        if "ffn_gate_inp" in family.biases:
            vector(f"{blk}.ffn_gate_inp.bias", num, 0.0, 0.3)
        if family.router_bias:
            vector(f"{blk}.exp_probs_b.bias", num, 0.0, 0.2)
        linear(f"{blk}.ffn_gate_exps", expert_ff, hidden, num=num)
        linear(f"{blk}.ffn_up_exps", expert_ff, hidden, num=num)
        linear(f"{blk}.ffn_down_exps", hidden, expert_ff, num=num)
        if family.shared_gate:
            vector(f"{blk}.ffn_gate_inp_shexp.weight", hidden, 0.0, hidden**-0.5)
        if shared_ff:
            linear(f"{blk}.ffn_gate_shexp", shared_ff, hidden)
            linear(f"{blk}.ffn_up_shexp", shared_ff, hidden)
            linear(f"{blk}.ffn_down_shexp", hidden, shared_ff)

    def norm(name: str, n: int = hidden, mean: float = 1.0, spread: float = 0.1) -> None:
        vector(f"{name}.weight", n, mean, spread)
        if family.norm_bias:
            vector(f"{name}.bias", n, 0.0, 0.3)

    scale = float(family.keys.get("embedding_scale", math.sqrt(hidden) if family.scaled_embedding else 1.0))
    spread = EMBEDDING_SPREAD / scale
    matrix("token_embd.weight", vocab, hidden, spread)
    if poisoned_token is not None:
        name, shape, kind, data = tensors.pop()
        table = np.frombuffer(data, "<f4").reshape(shape).copy()
        table[poisoned_token, 3] = np.finfo(np.float32).max
        tensors.append((name, shape, kind, table.tobytes()))
    for layer in range(layers + family.nextn_layers):
        blk = f"blk.{layer}"
        if family.attn_norm:
            norm(f"{blk}.attn_norm")
        if "attn_qkv" in family.fused:
            linear(f"{blk}.attn_qkv", q_size + 2 * kv_size, hidden, 2 * hidden**-0.5)
        else:
            for name, n in (("q", q_size), ("k", kv_size), ("v", kv_size)):
                gain = QUERY_SPREAD if name == "q" else 1.0
                linear(f"{blk}.attn_{name}", n, hidden, gain * hidden**-0.5, bool(qkv_bias))
        for name, mean, count in (("q", QUERY_SPREAD, heads), ("k", 1.0, kv_heads)):
            shape = {"head": head_dim, "heads": (count, head_dim), "row": count * head_dim}.get(
                family.qk_norm
            )
            if shape:
                vector(f"{blk}.attn_{name}_norm.weight", shape, mean)
        linear(f"{blk}.attn_output", hidden, q_size)
        if family.attn_sinks:
            vector(f"{blk}.attn_sinks.weight", heads, 0.0, 1.0)
        if family.ffn_norm:
            norm(f"{blk}.{family.ffn_norm}")
        if family.num_experts and layer >= family.dense_layers:
            mixture(blk)
        else:
            is_fused = "ffn_up" in family.fused
            if family.gated and not is_fused:
                linear(f"{blk}.ffn_gate", ff, hidden)
            linear(f"{blk}.ffn_up", 2 * ff if is_fused else ff, hidden)
            linear(f"{blk}.ffn_down", hidden, ff)
        if family.post_norms:
            norm(f"{blk}.post_attention_norm")
            norm(f"{blk}.post_ffw_norm")
        if layer >= layers:
            matrix(f"{blk}.nextn.eh_proj.weight", hidden, 2 * hidden)
            norm(f"{blk}.nextn.enorm")
            norm(f"{blk}.nextn.hnorm")
    # Logits are a normalized x times this norm through the output matrix. The minus keeps tied embeddings
    # from answering every token with itself.
    gain = -LOGITS_SPREAD / (spread * math.sqrt(hidden)) if tied else LOGITS_SPREAD
    norm("output_norm", hidden, gain, 0.1 * abs(gain))
    if not tied:
        linear("output", vocab, hidden)
    given = {f"rope_factors_{length}": values for length, values in (rope_factors or {}).items()}
    for name, values in ({"rope_freqs": rope_freqs} if rope_freqs is not None else given).items():
        factors = np.asarray(values, "<f4")
        tensors.append((f"{name}.weight", factors.shape, int(GGMLType.F32), factors.tobytes()))

    keys: dict[str, object] = {
        "general.architecture": arch,
        "general.name": f"tiny {arch}",
        f"{arch}.block_count": layers + family.nextn_layers,
        f"{arch}.context_length": context_length,
        f"{arch}.embedding_length": hidden,
        f"{arch}.feed_forward_length": expert_ff if family.num_experts and not family.dense_layers else ff,
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.{family.eps_key}": 1e-5,
        f"{arch}.rope.freq_base": 10_000.0,
        f"{arch}.rope.dimension_count": rope_dim or head_dim,
        f"{arch}.vocab_size": vocab,
        **byte_level_tokenizer(vocab),
        **{f"{arch}.{key}": value for key, value in family.keys.items()},
    }
    if family.num_experts:
        keys[f"{arch}.expert_count"] = family.num_experts
        keys[f"{arch}.expert_used_count"] = family.experts_per_token
        sizes = zip(EXPERT_KEYS, (expert_ff, shared_ff), strict=True)
        keys.update({f"{arch}.{key}": size for key, size in sizes if key in family.expert_keys})
    if sliding_window:
        keys[f"{arch}.attention.sliding_window"] = sliding_window
    if poisoned_token is not None:
        keys[f"{arch}.embedding_scale"] = 8.0
    keys.update(metadata or {})
    write_gguf(path, keys, tensors)
