"""Seeded tiny GGUF models in any format, with a byte-level vocabulary: text prompts work, answers vary."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

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
LOGITS_SPREAD = 4.0  # large enough that the best token leads clearly
NORMAL_TOKEN, CONTROL_TOKEN, UNUSED_TOKEN = 1, 3, 5


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
    qkv_bias: bool | None = None,
    rope_freqs: Sequence[float] | None = None,
    sliding_window: int = 0,
    context_length: int = 512,
    seed: int = 0,
    poisoned_token: int | None = None,
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write a random llama, qwen2, qwen3 or gemma3 model; the same arguments give the same bytes.

    quant: the type of all matrices, or types by the first pattern that matches a tensor's name, as in
    {"*.ffn_down.*": "Q6_K", "*": "Q4_K"}; the rest is F32. hidden and ff default to 64 and 96, with K-quants
    to 256 and 512. qkv_bias defaults to what the architecture has. sliding_window is for gemma3.
    poisoned_token: one element of its embedding, which must be F32, is NaN. metadata adds keys or replaces
    them. Raises ValueError when the blocks of a type do not divide a matrix.
    """
    patterns = {"*": quant} if isinstance(quant, str) else quant
    is_super = any(gguf.GGML_QUANT_SIZES[GGMLType[name]][0] == gguf.QK_K for name in patterns.values())
    hidden = hidden or (256 if is_super else 64)
    ff = ff or (512 if is_super else 96)
    head_dim = head_dim or hidden // heads
    gemma = arch == "gemma3"
    rng = np.random.default_rng(seed)
    tensors: list[Tensor] = []

    def matrix(name: str, n: int, k: int, spread: float | None = None) -> None:
        kind = GGMLType[next((patterns[p] for p in patterns if fnmatchcase(name, p)), "F32")]
        data = random_weights(kind, n, k, k**-0.5 if spread is None else spread, rng)
        tensors.append((name, (n, k), int(kind), data.tobytes()))

    def vector(name: str, n: int, mean: float = 1.0, spread: float = 0.1) -> None:
        values = mean + spread * rng.standard_normal(n)
        tensors.append((name, (n,), int(GGMLType.F32), values.astype("<f4").tobytes()))

    spread = EMBEDDING_SPREAD / (math.sqrt(hidden) if gemma else 1.0)
    matrix("token_embd.weight", vocab, hidden, spread)
    if poisoned_token is not None:
        name, shape, kind, data = tensors.pop()
        table = np.frombuffer(data, "<f4").reshape(shape).copy()
        table[poisoned_token, 3] = np.nan
        tensors.append((name, shape, kind, table.tobytes()))
    for layer in range(layers):
        blk = f"blk.{layer}"
        vector(f"{blk}.attn_norm.weight", hidden)
        for name, n in (("q", heads * head_dim), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim)):
            matrix(
                f"{blk}.attn_{name}.weight", n, hidden, (QUERY_SPREAD if name == "q" else 1.0) * hidden**-0.5
            )
            if qkv_bias if qkv_bias is not None else arch == "qwen2":
                vector(f"{blk}.attn_{name}.bias", n, 0.0, 0.3)
        if arch in ("qwen3", "gemma3"):
            vector(f"{blk}.attn_q_norm.weight", head_dim, QUERY_SPREAD)
            vector(f"{blk}.attn_k_norm.weight", head_dim)
        matrix(f"{blk}.attn_output.weight", hidden, heads * head_dim)
        vector(f"{blk}.ffn_norm.weight", hidden)
        matrix(f"{blk}.ffn_gate.weight", ff, hidden)
        matrix(f"{blk}.ffn_up.weight", ff, hidden)
        matrix(f"{blk}.ffn_down.weight", hidden, ff)
        if gemma:
            vector(f"{blk}.post_attention_norm.weight", hidden)
            vector(f"{blk}.post_ffw_norm.weight", hidden)
    # Logits are a normalized x times this norm through the output matrix. The minus keeps tied embeddings
    # from answering every token with itself.
    gain = -LOGITS_SPREAD / (spread * math.sqrt(hidden)) if tied else LOGITS_SPREAD
    vector("output_norm.weight", hidden, gain, 0.1 * abs(gain))
    if not tied:
        matrix("output.weight", vocab, hidden)
    if rope_freqs is not None:
        factors = np.asarray(rope_freqs, "<f4")
        tensors.append(("rope_freqs.weight", factors.shape, int(GGMLType.F32), factors.tobytes()))

    keys: dict[str, object] = {
        "general.architecture": arch,
        "general.name": f"tiny {arch}",
        f"{arch}.block_count": layers,
        f"{arch}.context_length": context_length,
        f"{arch}.embedding_length": hidden,
        f"{arch}.feed_forward_length": ff,
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10_000.0,
        f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.vocab_size": vocab,
        **byte_level_tokenizer(vocab),
    }
    if sliding_window:
        keys[f"{arch}.attention.sliding_window"] = sliding_window
    keys.update(metadata or {})
    write_gguf(path, keys, tensors)
