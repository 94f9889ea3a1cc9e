"""Frozen settings: EngineConfig is what the user chose, ModelConfig is what the model file says.

A family of models is a row of ARCHITECTURES and flags in ModelConfig, never a branch in the forward pass.
"""

from __future__ import annotations

import math
import re
import reprlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rvllm.gguf_file import GGUFError, GGUFFile

_MAX_POSITION = 2**30  # positions are int32
_MEAN_POOLING = 1


KV_CACHE_DTYPES = ("f16", "f32", "bf16", "q8_0")  # q8_0: int8 with a float scale for each 32 elements


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine; None means: derive it from the model and the machine."""

    device: str = "cpu"
    dtype: str = "auto"  # of the weights: as in the file, or "float32", dequantized when they are loaded
    max_model_len: int | None = None  # tokens of prompt and answer together
    max_num_seqs: int = 64  # requests that run at a time
    max_num_batched_tokens: int = 512  # tokens computed in one step
    block_size: int = 16  # tokens in a KV-cache block
    num_blocks: int | None = None
    kv_cache_memory: int | None = None  # bytes; num_blocks wins when both are given
    kv_cache_dtype: str = "f16"  # of keys and values: one of KV_CACHE_DTYPES
    enable_prefix_caching: bool = True
    num_threads: int | None = None
    isa: str | None = None
    seed: int | None = None
    profile: bool = False

    def __post_init__(self) -> None:
        limits = {
            "max_model_len": (1, _MAX_POSITION),
            "max_num_seqs": (1, 2**16),
            "max_num_batched_tokens": (1, 2**20),
            "block_size": (1, 4096),
            "num_blocks": (1, 2**30),
            "kv_cache_memory": (1, 2**62),
            "num_threads": (1, 1024),
            "seed": (0, 2**64 - 1),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an integer, not {value!r}")
            if not low <= value <= high:
                raise ValueError(f"{name} must be between {low} and {high}, not {value}")
        for name, kind in (("device", str), ("isa", str), ("enable_prefix_caching", bool)):
            value = getattr(self, name)
            if not isinstance(value, kind) and not (value is None and name == "isa"):
                raise ValueError(f"{name} must be of type {kind.__name__}, not {value!r}")
        if self.dtype not in ("auto", "float32"):
            raise ValueError(f"dtype must be 'auto' or 'float32', not {self.dtype!r}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(
                f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, not {self.kv_cache_dtype!r}"
            )


_OPTIONAL = frozenset({"max_model_len", "num_blocks", "kv_cache_memory", "num_threads", "seed"})


class Architecture(NamedTuple):
    """What sets a family of models apart and is not said in its files."""

    rope_interleaved: bool = False  # RoPE pairs (2i, 2i + 1) instead of (i, i + dim / 2)
    qk_norm: bool = False
    post_norms: bool = False
    gelu: bool = False
    scaled_embedding: bool = False  # embeddings times sqrt(hidden_size)
    window_period: int = 0  # every such layer attends to everything, the others through the sliding window
    wide_query_layers: int = (
        0  # the size of this many layers scales scores by the width of a query head's input
    )
    local_rope_theta: float = 0.0  # of the layers with a window; 0: the same as the others


ARCHITECTURES = {
    "gemma3": Architecture(
        qk_norm=True,
        post_norms=True,
        gelu=True,
        scaled_embedding=True,
        window_period=6,
        wide_query_layers=62,
        local_rope_theta=10_000.0,
    ),
    "llama": Architecture(rope_interleaved=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(qk_norm=True),
}


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer. Sizes carry their Hugging Face names."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int  # tokens the model was trained for
    rms_norm_eps: float
    embedding_scale: float
    attention_scale: float
    attention_soft_cap: float
    rope_interleaved: bool
    qk_norm: bool
    post_norms: bool
    gelu: bool
    inv_freq: tuple[tuple[float, ...], ...]  # RoPE tables: angle = position * inv_freq[i]
    layers: tuple[tuple[int, int], ...]  # for each layer: index of its RoPE table, sliding window (0: none)
    pooling: int  # of an embedding, by GGUF's numbers: 1 mean, 2 first token, 3 last token

    @classmethod
    def from_gguf(cls, gguf: GGUFFile) -> ModelConfig:
        """Reads and checks the model's hyper-parameters. Raises GGUFError naming the key that is wrong."""
        return _Reader(gguf).model_config()


class _Reader:
    """Reads the keys of one file's architecture, each checked against its limits and the tensors' shapes."""

    def __init__(self, gguf: GGUFFile):
        self.gguf = gguf
        self.architecture = gguf.architecture
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise GGUFError(
                f"{gguf.path}: general.architecture: {reprlib.repr(self.architecture)} is not supported; "
                f"supported: {known}"
            )

    def fail(self, key: str, problem: str) -> GGUFError:
        return GGUFError(f"{self.gguf.path}: {self.architecture}.{key}: {problem}")

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = _MAX_POSITION) -> int:
        value = self.gguf.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, np.ndarray):  # one value a layer: the same for all, or not one shape
            layers = self.integer("block_count", high=10_000) if key != "block_count" else 0
            if value.size != layers or value.dtype.kind not in "iu" or np.unique(value).size != 1:
                raise self.fail(
                    key, f"{value.size} values, expected one integer or one for each layer, all equal"
                )
            value = int(value[0])
        if value is None:
            raise self.fail(key, "missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"expected an integer, not {reprlib.repr(value)}")
        if not low <= value <= high:
            raise self.fail(key, f"{value} is not between {low} and {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.gguf.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise self.fail(key, "missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(key, f"expected a number, not {reprlib.repr(value)}")
        if not (math.isfinite(value) and value > 0):
            raise self.fail(key, f"{value} is not a positive number")
        return float(value)

    def rows(self, tensor: str) -> int:
        """Output size of a matrix, and 0 where it is missing: loading it will say so."""
        found = self.gguf.tensors.get(f"{tensor}.weight")
        return found.shape[0] if found is not None and len(found.shape) == 2 else 0

    def model_config(self) -> ModelConfig:
        family = ARCHITECTURES[self.architecture]
        num_layers = self.integer("block_count", high=10_000)
        hidden_size = self.integer("embedding_length", high=2**20)
        num_heads = self.integer("attention.head_count", high=2**16)
        num_kv_heads = self.integer("attention.head_count_kv", default=num_heads, high=2**16)
        embedding = self.gguf.tensors.get("token_embd.weight")
        if embedding is not None and embedding.shape[-1:] != (hidden_size,):
            raise self.fail(
                "embedding_length", f"{hidden_size} does not fit token_embd.weight of {embedding.shape}"
            )
        if "attention.key_length" not in self.keys() and hidden_size % num_heads:
            raise self.fail(
                "attention.head_count", f"{num_heads} heads do not divide the width of {hidden_size}"
            )
        head_dim = self.integer("attention.key_length", default=hidden_size // num_heads, high=4096)
        value_dim = self.integer("attention.value_length", default=head_dim, high=4096)
        intermediate_size = self.integer("feed_forward_length", high=2**24)
        context_length = min(self.integer("context_length", high=2**63), _MAX_POSITION)
        if num_heads % num_kv_heads:
            raise self.fail(
                "attention.head_count_kv", f"{num_kv_heads} does not divide the {num_heads} query heads"
            )
        if value_dim != head_dim:
            raise self.fail("attention.value_length", f"{value_dim} differs from the key length {head_dim}")
        length = f"of attention.key_length {head_dim}"
        for key, value, tensor, rows in (
            ("attention.head_count", f"{num_heads} {length}", "blk.0.attn_q", num_heads * head_dim),
            ("attention.head_count_kv", f"{num_kv_heads} {length}", "blk.0.attn_k", num_kv_heads * head_dim),
            ("feed_forward_length", intermediate_size, "blk.0.ffn_gate", intermediate_size),
            ("embedding_length", hidden_size, "blk.0.ffn_down", hidden_size),
        ):
            if self.rows(tensor) not in (0, rows):
                raise self.fail(
                    key,
                    f"{value} does not fit {tensor}.weight, which has {self.rows(tensor)} rows, not {rows}",
                )
        blocks = {int(name.split(".")[1]) for name in self.gguf.tensors if re.match(r"blk\.\d+\.", name)}
        if blocks and max(blocks) + 1 != num_layers:
            raise self.fail(
                "block_count", f"{num_layers} layers, but the file has tensors for {max(blocks) + 1}"
            )
        query_dim = hidden_size // num_heads if num_layers == family.wide_query_layers else head_dim
        inv_freq, layers = self.rope(family, num_layers, head_dim)
        return ModelConfig(
            architecture=self.architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=intermediate_size,
            vocab_size=self.vocab_size(),
            context_length=context_length,
            rms_norm_eps=self.number("attention.layer_norm_rms_epsilon"),
            embedding_scale=math.sqrt(hidden_size) if family.scaled_embedding else 1.0,
            attention_scale=1.0 / math.sqrt(query_dim),
            attention_soft_cap=0.0,
            rope_interleaved=family.rope_interleaved,
            qk_norm=family.qk_norm,
            post_norms=family.post_norms,
            gelu=family.gelu,
            inv_freq=inv_freq,
            layers=layers,
            pooling=self.integer("pooling_type", default=0, low=0, high=2**31 - 1) or _MEAN_POOLING,
        )

    def keys(self) -> set[str]:
        prefix = f"{self.architecture}."
        return {key[len(prefix) :] for key in self.gguf.metadata if key.startswith(prefix)}

    def vocab_size(self) -> int:
        rows = self.rows("token_embd")
        if rows == 0:
            raise GGUFError(f"{self.gguf.path}: token_embd.weight: tensor is missing or is no matrix")
        tokens = self.gguf.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) != rows:
            raise GGUFError(
                f"{self.gguf.path}: tokenizer.ggml.tokens: {len(tokens)} tokens, but token_embd.weight has {rows} rows"
            )
        return rows

    def rope(
        self, family: Architecture, num_layers: int, head_dim: int
    ) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[int, int], ...]]:
        """RoPE tables and, for each layer, which one it uses and its window. arXiv:2104.09864"""
        dim = self.integer("rope.dimension_count", default=head_dim, high=head_dim)
        if dim % 2:
            raise self.fail("rope.dimension_count", f"{dim} is odd")
        scaling = self.gguf.metadata.get(f"{self.architecture}.rope.scaling.type", "none")
        if not isinstance(scaling, str) or scaling not in ("none", "linear"):
            raise self.fail(
                "rope.scaling.type", f"{reprlib.repr(scaling)} is not supported; supported: none, linear"
            )
        factor = self.number("rope.scaling.factor", 1.0) if scaling == "linear" else 1.0
        theta = self.number("rope.freq_base", 10_000.0)
        exponents = np.arange(0, dim, 2) / dim
        tables = [theta**-exponents / factor / self.rope_factors(dim)]
        window = 0
        if family.window_period:
            window = self.integer("attention.sliding_window", default=0, low=0)
        if window and family.local_rope_theta:
            tables.append(self.number("rope.freq_base_swa", family.local_rope_theta) ** -exponents)
        local = self.local_layers(family.window_period, num_layers) if window else [False] * num_layers
        layers = tuple((len(tables) - 1, window) if is_local else (0, 0) for is_local in local)
        return tuple(tuple(float(f) for f in table) for table in tables), layers

    def local_layers(self, period: int, num_layers: int) -> list[bool]:
        """Which layers attend through the sliding window: all but every period-th, unless the file lists them."""
        key = "attention.sliding_window_pattern"
        pattern = self.gguf.metadata.get(f"{self.architecture}.{key}")
        if isinstance(pattern, np.ndarray) and pattern.dtype == np.bool_:
            if pattern.size != num_layers:
                raise self.fail(key, f"{pattern.size} values for {num_layers} layers")
            return [bool(is_local) for is_local in pattern]
        period = self.integer(key, default=period)
        return [(layer + 1) % period != 0 for layer in range(num_layers)]

    def rope_factors(self, dim: int) -> np.ndarray:
        """Divisors of the frequencies, as Llama 3.1 files carry them."""
        tensor = self.gguf.tensors.get("rope_freqs.weight")
        if tensor is None:
            return np.ones(dim // 2)
        if tensor.shape != (dim // 2,) or tensor.type.name != "F32":
            raise GGUFError(
                f"{self.gguf.path}: rope_freqs.weight: {tensor.type.name} of shape {tensor.shape}, "
                f"expected F32 of shape {(dim // 2,)}"
            )
        factors = tensor.data.view("<f4").astype(np.float64)
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            raise GGUFError(f"{self.gguf.path}: rope_freqs.weight: factors must be positive numbers")
        return factors
