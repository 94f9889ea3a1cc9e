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
    "UNGATED",
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
    "relu_sqr",
    "rms_norm",
    "rope",
    "rope_frequencies",
    "route",
    "sigmoid",
    "silu",
    "swiglu_oai",
    "yarn_frequencies",
]

Float = NDArray[np.float64]

GEMMAS = ("gemma", "gemma2", "gemma3")
GRANITES = ("granite", "granitemoe")
LAYER_NORM = ("cohere2", "command-r", "nemotron", "stablelm", "starcoder2")
RELU_SQR = ("arcee", "nemotron")
# These files keep the rows of Q and K in pairs (2i, 2i + 1), unless they have sections of RoPE for images.
INTERLEAVED_ROPE = (
    "arcee", "bailingmoe", "chatglm", "cohere2", "command-r", "deepseek", "ernie4_5", "ernie4_5-moe", "glm4",
    *GRANITES, "internlm2", "llama", "minicpm", "mistral3", "smollm3",
)  # fmt: skip
QK_NORM_OF_ROWS = ("minimax-m2", "olmo2", "olmoe")  # one norm for all heads
ROPE_FIRST = ("hunyuan-dense", "hunyuan-moe")  # norms of queries and keys come after it
NORM_BETWEEN = ("glm4moe", "gpt-oss", "seed_oss")  # post_attention_norm precedes the feed-forward network
SIGMOID_ROUTER = ("dots1", "glm4moe", "minimax-m2")
PLAIN_WEIGHTS = ("bailingmoe", "deepseek", "dots1", "glm4moe", "olmoe", "qwen2moe")  # do not add up to 1
PARALLEL = ("cohere2", "command-r", "stablelm")  # where a layer has no ffn_norm
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}  # this size scales scores by hidden / heads, not by head_dim
WINDOWS = {"gemma2": 4096}  # where the file does not say
WINDOW_PERIODS = {"cohere2": 4, "exaone4": 4, "gemma2": 2, "gemma3": 6, "gpt-oss": 2, "olmo2": 4}


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


def yarn_frequencies(
    dim: int,
    theta: float,
    factor: float,
    original_context: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    factors: Array | None = None,
) -> Float:
    """rope_frequencies of which the fast ones stay and the slow ones are divided by factor. arXiv:2309.00071

    In between, from the pair that turns beta_fast times within the original context to the one that turns
    beta_slow times, they are mixed in proportion to the pair's place.
    """
    pairs = np.arange(dim // 2)
    place = [
        dim * math.log(original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (beta_fast, beta_slow)
    ]
    low, high = max(math.floor(place[0]), 0), min(math.ceil(place[1]), dim - 1)
    stretched = np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
    fast, slow = (rope_frequencies(dim, theta, scale, factors) for scale in (1.0, factor))
    return fast * (1 - stretched) + slow * stretched


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


UNGATED = ("gelu", "relu_sqr")  # the activations of one vector; the others take gate and up


def silu(x: Array) -> Float:
    return x / (1 + np.exp(-np.asarray(x, np.float64)))


def gelu(x: Array) -> Float:
    """The tanh form. arXiv:1606.08415"""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * np.asarray(x, np.float64) ** 3)))


def relu_sqr(x: Array) -> Float:
    """arXiv:2109.08668"""
    return np.maximum(np.asarray(x, np.float64), 0) ** 2


def swiglu_oai(gate: Array, up: Array) -> Float:
    """gpt-oss's gate: silu with a slope of 1.702 of a bounded gate, times a bounded up plus 1."""
    gate = np.minimum(np.asarray(gate, np.float64), 7.0)
    return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(np.asarray(up, np.float64), -7.0, 7.0) + 1)


def sigmoid(x: Array) -> Float:
    return np.exp(-np.logaddexp(0, -np.asarray(x, np.float64)))


def route(
    logits: Array,
    num_used: int,
    normalized: bool,
    use_sigmoid: bool = False,
    bias: Array | None = None,
    scale: float = 1.0,
) -> tuple[NDArray[np.int64], Float]:
    """The experts with the largest scores plus bias [E], of equal ones the first, and their weights: [T, num_used].

    Scores are a softmax of logits [T, E] (arXiv:1701.06538), or sigmoids. Weights are the scores, divided by their
    sum (or 2^-14) if normalized, times scale. A bias has no part in them (arXiv:2408.15664).
    """
    logits = np.asarray(logits, np.float64)
    scores = sigmoid(logits) if use_sigmoid else np.exp(log_softmax(logits))
    order = logits if bias is None else scores + bias
    chosen = np.argsort(-order, axis=1, kind="stable")[:, :num_used]
    weights = np.take_along_axis(scores, chosen, axis=1)
    if normalized:
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), 2**-14)
    return chosen, weights * scale


def log_softmax(x: Array) -> Float:
    """Natural logarithm of the softmax over the last axis."""
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


class Transformer:
    """A GGUF file read by the gguf package; weights stay in memory once used."""

    def __init__(self, path: str | os.PathLike[str], max_model_len: int | None = None):
        """max_model_len: tokens of context, which chooses between LongRoPE's factors; by default the file's."""
        self.reader = gguf.GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.architecture = self.reader.fields["general.architecture"].contents()
        self.context_length = self.get("context_length")
        self.num_layers = self.get("block_count") - self.get("nextn_predict_layers", 0)
        self.max_model_len = max_model_len or self.context_length
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

    def linear(self, x: Float, name: str, int8: bool, expert: int | None = None) -> Float:
        """x [T, K] through the matrix of that name (or one of its experts), and its bias if there is one."""
        bias = self.weight(f"{name}.bias")
        if bias is not None and expert is not None:
            bias = bias[expert]
        if not int8:
            weight = np.atleast_2d(self.weight(f"{name}.weight"))
            return linear(x, weight if expert is None else weight[expert], bias)
        tensor = self.tensors[f"{name}.weight"]
        k, n = (int(size) for size in (*tensor.shape, 1)[:2])
        data = tensor.data if expert is None else tensor.data[expert]
        y = linear_int8(data.tobytes(), tensor.tensor_type, n, k, x.astype(np.float32))
        return (y if bias is None else y + bias).astype(np.float64)

    def norm(self, x: Float, name: str) -> Float:
        """x through the norm of that name, and as it is if there is none."""
        weight, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        if weight is None:
            return x
        if self.architecture in LAYER_NORM:
            y = layer_norm(x, weight, self.get("attention.layer_norm_epsilon"))
        else:
            y = rms_norm(x, weight, self.get("attention.layer_norm_rms_epsilon"))
        return y if bias is None else y + bias

    def window(self) -> int:
        return int(self.get("attention.sliding_window", WINDOWS.get(self.architecture, 0)))

    def is_local(self, layer: int) -> bool:
        """Whether a layer attends through the sliding window: all do, or all but every n-th."""
        if not self.window():
            return False
        period = self.get("attention.sliding_window_pattern", WINDOW_PERIODS.get(self.architecture, 0))
        return bool(period[layer]) if isinstance(period, list) else period == 0 or (layer + 1) % period != 0

    def has_rope(self, layer: int) -> bool:
        if self.architecture in GRANITES:
            return bool(self.get("rope.scaling.finetuned", True))
        if self.architecture == "smollm3":
            return (layer + 1) % 4 != 0
        return self.architecture not in ("cohere2", "exaone4") or self.is_local(layer) or not self.window()

    def rope_frequencies(self, local: bool, head_dim: int) -> tuple[Float, float]:
        """Angles of one position [dim / 2], and what cosines and sines are multiplied by."""
        dim = self.get("rope.dimension_count", head_dim)
        theta = self.get("rope.freq_base", 10_000.0)
        if local and self.architecture == "gemma3":
            return rope_frequencies(dim, self.get("rope.freq_base_swa", 10_000.0)), 1.0
        if local:
            theta = self.get("rope.freq_base_swa", theta)
            if self.architecture == "olmo2":
                return rope_frequencies(dim, theta), 1.0
        scaling = self.get("rope.scaling.type", "linear")
        factor = 1.0 if scaling == "none" else self.get("rope.scaling.factor", 1.0)
        magnitude = self.get("rope.scaling.attn_factor", 1.0)
        original = self.get("rope.scaling.original_context_length", self.context_length)
        length = "long" if self.max_model_len > original else "short"
        factors = self.weight("rope_freqs.weight")
        if factors is None:
            factors = self.weight(f"rope_factors_{length}.weight")
        if scaling != "yarn":
            return rope_frequencies(dim, theta, factor, factors), magnitude
        betas = (
            self.get(f"rope.scaling.yarn_beta_{end}", beta) for end, beta in (("fast", 32.0), ("slow", 1.0))
        )
        magnitude *= 1 + 0.1 * math.log(factor)
        magnitude /= 1 + 0.1 * self.get("rope.scaling.yarn_log_multiplier", 0.0) * math.log(factor)
        return yarn_frequencies(dim, theta, factor, original, *betas, factors), magnitude

    def logits(self, token_ids: Sequence[int], int8: bool = False) -> Float:
        """Logits [T, V] of every position, as hidden_states() computes."""
        output = "output" if "output.weight" in self.tensors else "token_embd"
        logits = self.linear(self.hidden_states(token_ids, int8), output, int8)
        scale = self.get("logit_scale", 1.0)
        logits = logits / scale if self.architecture in (*GRANITES, "minicpm") else logits * scale
        cap = self.get("final_logit_softcapping", 30.0 if self.architecture == "gemma2" else 0.0)
        return cap * np.tanh(logits / cap) if cap else logits

    def hidden_states(self, token_ids: Sequence[int], int8: bool = False) -> Float:
        """Final hidden states [T, K] of every position.

        int8: matrix products by linear_int8, and K and V rounded to float16 as the KV cache keeps them. What
        then sets the engine apart is the rounding of its other float32 operations.
        """
        hidden = self.get("embedding_length")
        residual_scale = self.get("residual_scale", 1.0)
        default = math.sqrt(hidden) if self.architecture in GEMMAS else 1.0
        embedding = self.tensors["token_embd.weight"]
        x = gguf.quants.dequantize(embedding.data[list(token_ids)], embedding.tensor_type)  # [T, K]
        x = x * self.get("embedding_scale", default)
        for layer in range(self.num_layers):
            blk = f"blk.{layer}"
            h = self.norm(x, f"{blk}.attn_norm")
            branch = self.attention(h, layer, int8)
            if self.architecture not in NORM_BETWEEN:
                branch = self.norm(branch, f"{blk}.post_attention_norm")
            branch = branch * residual_scale
            if self.architecture in PARALLEL and f"{blk}.ffn_norm.weight" not in self.tensors:
                x = x + branch + self.feed_forward(h, blk, int8) * residual_scale
                continue
            x = x + branch
            norm = "post_attention_norm" if self.architecture in NORM_BETWEEN else "ffn_norm"
            branch = self.feed_forward(self.norm(x, f"{blk}.{norm}"), blk, int8)
            x = x + self.norm(branch, f"{blk}.post_ffw_norm") * residual_scale
        return self.norm(x, "output_norm")

    def attention(self, h: Float, layer: int, int8: bool) -> Float:
        """h [T, K] through a layer's attention, without the norms around it: [T, K]."""
        blk, hidden = f"blk.{layer}", self.get("embedding_length")
        num_heads = self.get("attention.head_count")
        num_kv_heads = self.get("attention.head_count_kv", num_heads)
        head_dim = self.get("attention.key_length", hidden // num_heads)
        gemma_27b = self.num_layers == GEMMA_27B_LAYERS.get(self.architecture)
        scale = self.get("attention.scale", 1 / math.sqrt(hidden / num_heads if gemma_27b else head_dim))
        cap = self.get("attn_logit_softcapping", 50.0 if self.architecture == "gemma2" else 0.0)
        positions = np.arange(len(h))
        local = self.is_local(layer)

        if f"{blk}.attn_qkv.weight" in self.tensors:
            qkv = self.linear(h, f"{blk}.attn_qkv", int8)
        else:
            qkv = np.hstack([self.linear(h, f"{blk}.attn_{name}", int8) for name in "qkv"])
        sizes = np.cumsum([num_heads * head_dim, num_kv_heads * head_dim])
        q, k, v = np.split(qkv, sizes, axis=1)
        of_rows, rope_first = self.architecture in QK_NORM_OF_ROWS, self.architecture in ROPE_FIRST
        if of_rows:
            q, k = self.norm(q, f"{blk}.attn_q_norm"), self.norm(k, f"{blk}.attn_k_norm")
        q, k, v = (a.reshape(len(h), -1, head_dim) for a in (q, k, v))  # [T, H or KVH, D]
        if not of_rows and not rope_first:
            q, k = self.norm(q, f"{blk}.attn_q_norm"), self.norm(k, f"{blk}.attn_k_norm")
        if self.has_rope(layer):
            frequencies, magnitude = self.rope_frequencies(local, head_dim)
            dim = 2 * len(frequencies)
            has_sections = f"{self.architecture}.rope.dimension_sections" in self.reader.fields
            interleaved = self.architecture in INTERLEAVED_ROPE and not has_sections
            q, k = (rope(a, positions, frequencies, interleaved) for a in (q, k))
            q[..., :dim] *= magnitude
            k[..., :dim] *= magnitude
        if rope_first:
            q, k = self.norm(q, f"{blk}.attn_q_norm"), self.norm(k, f"{blk}.attn_k_norm")
        temperature = self.get("attention.temperature_scale", 0.0)
        if temperature:
            original = self.get("rope.scaling.original_context_length", self.context_length)
            q = q * (1 + temperature * np.log(1 + positions // original))[:, None, None]
        if int8:
            k, v = k.astype(np.float16), v.astype(np.float16)
        sinks = self.weight(f"{blk}.attn_sinks.weight")
        h = attention(q, k, v, scale, self.window() if local else 0, cap, sinks)  # [T, H, D]
        h = h.reshape(len(h), -1)
        return self.linear(h, f"{blk}.attn_output", int8)

    def feed_forward(self, h: Float, blk: str, int8: bool) -> Float:
        """h [T, K] through a layer's feed-forward network, without the norms around it: [T, K]."""
        if f"{blk}.ffn_gate_inp.weight" in self.tensors:
            return self.mixture(h, blk, int8)
        up = self.linear(h, f"{blk}.ffn_up", int8)  # [T, I], or gate and up in one
        if self.architecture in RELU_SQR:
            return self.linear(relu_sqr(up), f"{blk}.ffn_down", int8)
        if self.architecture == "starcoder2":
            return self.linear(gelu(up), f"{blk}.ffn_down", int8)
        if f"{blk}.ffn_gate.weight" in self.tensors:
            gate = self.linear(h, f"{blk}.ffn_gate", int8)
        else:
            gate, up = np.split(up, 2, axis=1)
        h = (gelu(gate) if self.architecture in GEMMAS else silu(gate)) * up  # arXiv:2002.05202
        return self.linear(h, f"{blk}.ffn_down", int8)

    def mixture(self, h: Float, blk: str, int8: bool) -> Float:
        """h [T, K] through the experts that the router chooses, and through the shared one."""
        act = swiglu_oai if self.architecture == "gpt-oss" else lambda gate, up: silu(gate) * up
        router_logits = self.linear(h, f"{blk}.ffn_gate_inp", int8)  # [T, E]
        chosen, weights = route(
            router_logits,
            self.get("expert_used_count"),
            self.get("expert_weights_norm", self.architecture not in PLAIN_WEIGHTS),
            self.architecture in SIGMOID_ROUTER,
            self.weight(f"{blk}.exp_probs_b.bias"),
            self.get("expert_weights_scale", 1.0),
        )
        out = np.zeros_like(h)
        for expert in np.unique(chosen):
            tokens, rank = np.nonzero(chosen == expert)
            gate, up = (
                self.linear(h[tokens], f"{blk}.ffn_{name}_exps", int8, expert) for name in ("gate", "up")
            )
            y = self.linear(act(gate, up), f"{blk}.ffn_down_exps", int8, expert)
            out[tokens] += weights[tokens, rank][:, None] * y
        if f"{blk}.ffn_up_shexp.weight" in self.tensors:
            gate, up = (self.linear(h, f"{blk}.ffn_{name}_shexp", int8) for name in ("gate", "up"))
            y = self.linear(act(gate, up), f"{blk}.ffn_down_shexp", int8)
            if f"{blk}.ffn_gate_inp_shexp.weight" in self.tensors:
                y = y * sigmoid(self.linear(h, f"{blk}.ffn_gate_inp_shexp", int8))
            out += y
        return out


def forward(path: str | os.PathLike[str], token_ids: Sequence[int], int8: bool = False) -> Float:
    """Logits [T, V] of the model in a GGUF file at every position of token_ids; see Transformer.logits."""
    return Transformer(path).logits(token_ids, int8)
