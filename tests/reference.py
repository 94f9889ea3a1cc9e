"""NumPy truth of every operation and of the whole transformer, in float64, without cache, batches or tricks.

The quantized matrix product to the bit is in quant_reference.py. Letters: T tokens, H heads, KVH KV heads,
D head dim, N out, K in, V vocabulary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from quant_reference import Array, decode, dequantize, fma, linear_int8, quantize_activations

__all__ = [
    "Transformer",
    "attention",
    "decode",
    "dequantize",
    "fma",
    "forward",
    "gelu",
    "layer_norm",
    "linear",
    "linear_int8",
    "log_softmax",
    "quantize_activations",
    "rms_norm",
    "rope",
    "rope_frequencies",
    "silu",
    "swiglu_oai",
]

Float = NDArray[np.float64]

INTERLEAVED_ROPE = ("llama",)  # these files keep the rows of Q and K in pairs (2i, 2i + 1)
GEMMA3_27B_LAYERS = 62  # this size alone scales scores by hidden / heads, which is not its head_dim


def rms_norm(x: Array, weight: Array, eps: float) -> Float:
    """x [..., K] over the root of its mean square, times weight [K]. arXiv:1910.07467"""
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def layer_norm(x: Array, weight: Array, eps: float) -> Float:
    """x [..., K] less its mean, over its standard deviation, times weight [K]. arXiv:1607.06450"""
    x = np.asarray(x, np.float64)
    return rms_norm(x - x.mean(axis=-1, keepdims=True), weight, eps)


def linear(x: Array, weight: Array, bias: Array | None = None) -> Float:
    """x [T, K] times the transpose of weight [N, K], plus bias [N]: [T, N]."""
    y = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    return y if bias is None else y + bias


def rope_frequencies(dim: int, theta: float, scale: float = 1.0, factors: Array | None = None) -> Float:
    """Angles of one position, [dim / 2]. scale stretches all wavelengths, factors [dim / 2] each its own."""
    frequencies = theta ** -(np.arange(0, dim, 2) / dim) / scale
    return frequencies if factors is None else frequencies / factors


def rope(x: Array, positions: Array, frequencies: Array, interleaved: bool) -> Float:
    """Rotate the first dim elements of each head of x [T, H, D], by frequencies [dim / 2]. arXiv:2104.09864

    Pairs are (2i, 2i + 1) when interleaved, else (i, i + dim / 2).
    """
    out = np.array(x, np.float64)
    dim = 2 * len(frequencies)
    pairs = np.arange(dim).reshape(-1, 2).T if interleaved else np.arange(dim).reshape(2, -1)  # [2, dim / 2]
    a, b = out[..., pairs[0]], out[..., pairs[1]]
    angles = np.asarray(positions, np.float64)[:, None, None] * frequencies  # [T, 1, dim / 2]
    out[..., pairs[0]] = a * np.cos(angles) - b * np.sin(angles)
    out[..., pairs[1]] = a * np.sin(angles) + b * np.cos(angles)
    return out


def attention(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Array | None = None,
) -> Float:
    """Causal attention of the last T of S positions: q [T, H, D] over k, v [S, KVH, D]; gives [T, H, D].

    H / KVH heads share a KV head. A token sees the last `window` positions, itself included (0: all). Scores
    become soft_cap * tanh(score / soft_cap) unless soft_cap is 0. sinks [H]: for each head one more score in
    the softmax, without a value.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(np.asarray(a, np.float64), group, axis=1) for a in (k, v))  # [S, H, D]
    scores = np.einsum("thd,shd->hts", q, k) * scale
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    position = np.arange(len(k))
    age = position[len(k) - len(q) :, None] - position  # [T, S]
    hidden = (age < 0) | (age >= window) if window else age < 0
    scores = np.where(hidden, -np.inf, scores)
    if sinks is not None:
        sink = np.broadcast_to(np.asarray(sinks, np.float64)[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, sink], axis=-1)
    weights = np.exp(log_softmax(scores))[..., : len(k)]
    return np.einsum("hts,shd->thd", weights, v)


def silu(x: Array) -> Float:
    return x / (1 + np.exp(-np.asarray(x, np.float64)))


def gelu(x: Array) -> Float:
    """The tanh form. arXiv:1606.08415"""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * np.asarray(x, np.float64) ** 3)))


def swiglu_oai(gate: Array, up: Array) -> Float:
    """gpt-oss's gate: silu with a slope of 1.702 of a bounded gate, times a bounded up plus 1."""
    gate = np.minimum(np.asarray(gate, np.float64), 7.0)
    return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(np.asarray(up, np.float64), -7.0, 7.0) + 1)


def log_softmax(x: Array) -> Float:
    """Natural logarithm of the softmax over the last axis."""
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


class Transformer:
    """A llama, qwen2, qwen3 or gemma3 file, read by the gguf package; weights stay in memory once used."""

    def __init__(self, path: str | os.PathLike[str]):
        self.reader = gguf.GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.architecture = self.reader.fields["general.architecture"].contents()
        self.weights: dict[str, Array] = {}

    def get(self, key: str, default: Any = None) -> Any:
        """The value of an architecture's key; without a default the key must be there."""
        name = f"{self.architecture}.{key}"
        if name not in self.reader.fields and default is not None:
            return default
        return self.reader.fields[name].contents()

    def weight(self, name: str) -> Array | None:
        """A tensor as float32 in NumPy order, None if the file has none of that name."""
        if name not in self.tensors:
            return None
        if name not in self.weights:
            tensor = self.tensors[name]
            self.weights[name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return self.weights[name]

    def linear(self, x: Float, name: str, int8: bool) -> Float:
        """x [T, K] through the matrix of that name, and its bias if there is one."""
        bias = self.weight(f"{name}.bias")
        if not int8:
            return linear(x, self.weight(f"{name}.weight"), bias)
        tensor = self.tensors[f"{name}.weight"]
        k, n = (int(size) for size in tensor.shape)
        y = linear_int8(tensor.data.tobytes(), tensor.tensor_type, n, k, x.astype(np.float32))
        return (y if bias is None else y + bias).astype(np.float64)

    def is_local(self, layer: int) -> bool:
        """Whether a layer attends through the sliding window: in gemma3 all but every sixth."""
        if self.architecture != "gemma3" or not self.get("attention.sliding_window", 0):
            return False
        period = self.get("attention.sliding_window_pattern", 6)
        return bool(period[layer]) if isinstance(period, list) else period == 0 or (layer + 1) % period != 0

    def rope_frequencies(self, local: bool, head_dim: int) -> Float:
        dim = self.get("rope.dimension_count", head_dim)
        if local:
            return rope_frequencies(dim, self.get("rope.freq_base_swa", 10_000.0))
        scaling = self.get("rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise ValueError(f"rope.scaling.type: {scaling!r} is neither none nor linear")
        scale = self.get("rope.scaling.factor", 1.0) if scaling == "linear" else 1.0
        theta = self.get("rope.freq_base", 10_000.0)
        return rope_frequencies(dim, theta, scale, self.weight("rope_freqs.weight"))

    def logits(self, token_ids: Sequence[int], int8: bool = False) -> Float:
        """Logits [T, V] of every position, as hidden_states() computes."""
        output = "output" if "output.weight" in self.tensors else "token_embd"
        return self.linear(self.hidden_states(token_ids, int8), output, int8)

    def hidden_states(self, token_ids: Sequence[int], int8: bool = False) -> Float:
        """Final hidden states [T, K] of every position.

        int8: matrix products by linear_int8, and K and V rounded to float16 as the KV cache keeps them. What
        then sets the engine apart is the rounding of its other float32 operations.
        """
        gemma = self.architecture == "gemma3"
        hidden = self.get("embedding_length")
        num_heads = self.get("attention.head_count")
        num_kv_heads = self.get("attention.head_count_kv", num_heads)
        head_dim = self.get("attention.key_length", hidden // num_heads)
        eps = self.get("attention.layer_norm_rms_epsilon")
        num_layers = self.get("block_count")
        scale = 1 / math.sqrt(hidden / num_heads if gemma and num_layers == GEMMA3_27B_LAYERS else head_dim)
        positions = np.arange(len(token_ids))

        def norm(x: Float, name: str) -> Float:
            weight = self.weight(f"{name}.weight")
            return x if weight is None else rms_norm(x, weight, eps)

        def heads(x: Float, count: int) -> Float:
            return x.reshape(len(x), count, head_dim)

        embedding = self.tensors["token_embd.weight"]
        x = gguf.quants.dequantize(embedding.data[list(token_ids)], embedding.tensor_type)  # [T, K]
        x = x * (math.sqrt(hidden) if gemma else 1.0)
        for layer in range(num_layers):
            blk = f"blk.{layer}"
            local = self.is_local(layer)
            frequencies = self.rope_frequencies(local, head_dim)

            h = norm(x, f"{blk}.attn_norm")
            q = heads(self.linear(h, f"{blk}.attn_q", int8), num_heads)  # [T, H, D]
            k = heads(self.linear(h, f"{blk}.attn_k", int8), num_kv_heads)  # [T, KVH, D]
            v = heads(self.linear(h, f"{blk}.attn_v", int8), num_kv_heads)
            q, k = norm(q, f"{blk}.attn_q_norm"), norm(k, f"{blk}.attn_k_norm")
            q, k = (rope(a, positions, frequencies, self.architecture in INTERLEAVED_ROPE) for a in (q, k))
            if int8:
                k, v = k.astype(np.float16), v.astype(np.float16)
            window = self.get("attention.sliding_window") if local else 0
            h = attention(q, k, v, scale, window).reshape(len(x), -1)  # [T, H * D]
            x = x + norm(self.linear(h, f"{blk}.attn_output", int8), f"{blk}.post_attention_norm")

            h = norm(x, f"{blk}.ffn_norm")
            gate = self.linear(h, f"{blk}.ffn_gate", int8)  # [T, I]
            up = self.linear(h, f"{blk}.ffn_up", int8)
            h = (gelu(gate) if gemma else silu(gate)) * up  # arXiv:2002.05202
            x = x + norm(self.linear(h, f"{blk}.ffn_down", int8), f"{blk}.post_ffw_norm")
        return norm(x, "output_norm")


def forward(path: str | os.PathLike[str], token_ids: Sequence[int], int8: bool = False) -> Float:
    """Logits [T, V] of the model in a GGUF file at every position of token_ids; see Transformer.logits."""
    return Transformer(path).logits(token_ids, int8)
