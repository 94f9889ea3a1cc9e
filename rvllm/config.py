"""Frozen settings: EngineConfig is what the user chose, ModelConfig is what the model file says.

A family of models is a row of ARCHITECTURES and flags in ModelConfig, never a branch in the forward pass.
"""

from __future__ import annotations

import math
import re
import reprlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from rvllm.architecture_keys import FLOAT32, MAX_POSITION, ArchitectureKeys
from rvllm.architectures import ARCHITECTURES, Architecture
from rvllm.gguf_file import GGUFError, GGUFFile
from rvllm.rope import SCALING_TYPES, RopeScaling, RopeTable, rope_table

_MAX_EXPERTS = 1024
_MEAN_POOLING = 1
_SOFTMAX, _SIGMOID = 1, 2  # of expert_gating_func
# Keys whose other values would change every answer; None: no value at all.
_USUAL_VALUES = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "expert_group_count": 1,
    "interleave_moe_layer_step": 1,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}


KV_CACHE_DTYPES = ("f16", "f32", "bf16", "q8_0")  # q8_0: int8 with a float scale for each 32 elements
PREFILL_COMPUTE = ("auto", "int8", "f16")
_DEVICE = re.compile(r"cpu|metal|cuda(:\d{1,3})?")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine; None means: derive it from the model and the machine."""

    device: str = "cpu"  # or "metal", "cuda", "cuda:1", ...
    dtype: str = "auto"  # of the weights: as in the file, or "float32", dequantized when they are loaded
    max_model_len: int | None = None  # tokens of prompt and answer together
    max_num_seqs: int = 64  # requests that run at a time
    max_num_batched_tokens: int = 512  # tokens computed in one step
    block_size: int = 16  # tokens in a KV-cache block
    num_blocks: int | None = None
    kv_cache_memory: int | None = None  # bytes; num_blocks wins when both are given
    kv_cache_dtype: str = "f16"  # of keys and values: one of KV_CACHE_DTYPES
    gpu_memory_utilization: float | None = None  # share of a GPU's memory for weights and KV cache together
    num_replicas: int = 1  # engines like this one that share the memory, each an equal part
    prefill_compute: str = "auto"  # "f16" (cuda): many tokens by cuBLAS, not the same in any company
    enable_prefix_caching: bool = True
    num_threads: int | None = None
    isa: str | None = None
    seed: int | None = None
    profile: bool = False

    def __post_init__(self) -> None:
        limits = {
            "max_model_len": (1, MAX_POSITION),
            "max_num_seqs": (1, 2**16),
            "max_num_batched_tokens": (1, 2**20),
            "block_size": (1, 4096),
            "num_blocks": (1, 2**30),
            "kv_cache_memory": (1, 2**62),
            "num_replicas": (1, 1024),
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
        if not _DEVICE.fullmatch(self.device):
            raise ValueError(f"device must be 'cpu', 'metal', 'cuda' or 'cuda:N', not {self.device!r}")
        if self.device != "cpu" and self.isa is not None:
            raise ValueError(f"isa is a setting of device 'cpu', not of {self.device!r}")
        if self.prefill_compute not in PREFILL_COMPUTE:
            raise ValueError(
                f"prefill_compute must be one of {', '.join(PREFILL_COMPUTE)}, not {self.prefill_compute!r}"
            )
        if self.prefill_compute == "f16" and self.device == "cpu":
            raise ValueError("prefill_compute 'f16' is a setting of devices 'cuda' and 'metal', not of 'cpu'")
        utilization = self.gpu_memory_utilization
        if utilization is not None:
            is_number = isinstance(utilization, (int, float)) and not isinstance(utilization, bool)
            if not is_number or not 0 < utilization <= 1:
                raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, not {utilization!r}")
            if self.device == "cpu":
                raise ValueError(
                    "gpu_memory_utilization is a setting of devices 'cuda' and 'metal', not of 'cpu'"
                )
        if self.dtype not in ("auto", "float32"):
            raise ValueError(f"dtype must be 'auto' or 'float32', not {self.dtype!r}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(
                f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, not {self.kv_cache_dtype!r}"
            )


_OPTIONAL = frozenset({"max_model_len", "num_blocks", "kv_cache_memory", "num_threads", "seed"})


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer. Sizes carry their Hugging Face names."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of a dense feed-forward network
    num_experts: int  # 0: the network is dense
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int  # 0: no expert is used by every token
    first_k_dense_replace: int  # layers before the mixtures, whose networks are dense
    sigmoid_router: bool  # experts are chosen and weighted by sigmoids of their logits, not by a softmax
    norm_topk_prob: bool  # the weights of a token's experts add up to 1
    routed_scaling_factor: float  # and are then multiplied by this
    vocab_size: int
    context_length: int  # tokens the model was trained for
    norm_eps: float
    layer_norm: bool  # LayerNorm, not RMSNorm
    activation: str  # a name in csrc/activation.h
    pre_norms: bool
    ffn_norm: str  # name of the norm before the feed-forward network
    post_norms: bool
    parallel_block: bool  # attention and feed-forward read the same norm and are added together
    qk_norm: str  # "", "head", "heads" or "row"; see Architecture
    qk_norm_after_rope: bool
    embedding_scale: float
    residual_scale: float  # of what a branch adds to the residual stream
    logit_scale: float
    logit_soft_cap: float  # 0: none
    attention_scale: float
    attention_soft_cap: float  # 0: none
    attn_sinks: bool
    # Queries at position p are multiplied by 1 + scale * ln(1 + floor(p / length)), if scale is not 0.
    attention_temperature: tuple[float, int]
    rope_interleaved: bool
    rope_tables: tuple[RopeTable, ...]
    layers: tuple[
        tuple[int, int], ...
    ]  # for each: index of its RoPE table (-1: no RoPE), sliding window (0: none)
    pooling: int  # of an embedding, by GGUF's numbers: 1 mean, 2 first token, 3 last token

    @classmethod
    def from_gguf(cls, gguf: GGUFFile, max_model_len: int | None = None) -> ModelConfig:
        """Reads and checks the model's hyper-parameters. Raises GGUFError naming the key that is wrong.

        max_model_len: tokens that a request may have, which some models' RoPE depends on; by default the
        context length that the file gives.
        """
        return _Reader(gguf, max_model_len).model_config()


class _Reader(ArchitectureKeys):
    """Makes a ModelConfig of the keys of one file's architecture, also checked against the tensors' shapes."""

    def __init__(self, gguf: GGUFFile, max_model_len: int | None):
        super().__init__(gguf)
        self.max_model_len = max_model_len
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise GGUFError(
                f"{gguf.path}: general.architecture: {reprlib.repr(self.architecture)} is not supported; "
                f"supported: {known}"
            )

    def model_config(self) -> ModelConfig:
        family = ARCHITECTURES[self.architecture]
        num_blocks = self.integer("block_count", high=10_000)
        # The last layers of some files predict tokens further ahead, and no answer needs them.
        num_layers = num_blocks - self.integer("nextn_predict_layers", default=0, low=0, high=num_blocks - 1)
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
        num_dense = self.integer("leading_dense_block_count", default=0, low=0, high=num_layers - 1)
        num_experts = self.num_experts(family, num_dense)
        experts = self.experts(family, num_experts, num_dense)
        intermediate_size = (
            0 if num_experts and not num_dense else self.integer("feed_forward_length", high=2**24)
        )
        context_length = min(self.integer("context_length", high=2**63), MAX_POSITION)
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
            if rows and self.rows(tensor) not in (0, rows):
                raise self.fail(
                    key,
                    f"{value} does not fit {tensor}.weight, which has {self.rows(tensor)} rows, not {rows}",
                )
        blocks = {int(name.split(".")[1]) for name in self.gguf.tensors if re.match(r"blk\.\d+\.", name)}
        if blocks and max(blocks) + 1 not in (num_layers, num_blocks):
            raise self.fail(
                "block_count", f"{num_blocks} layers, but the file has tensors for {max(blocks) + 1}"
            )
        self.refuse_unknown_ways(family)
        query_dim = hidden_size // num_heads if num_layers == family.wide_query_layers else head_dim
        rope_tables, layers = self.layers(family, num_layers, head_dim)
        parallel_block = family.parallel_block and "blk.0.ffn_norm.weight" not in self.gguf.tensors
        has_qk_norm = not family.qk_norm_optional or "blk.0.attn_q_norm.weight" in self.gguf.tensors
        default_scale = None if family.scales_given else 1.0
        logit_scale = self.number("logit_scale", default_scale)
        norm = "layer_norm" if family.layer_norm else "layer_norm_rms"
        return ModelConfig(
            architecture=self.architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=intermediate_size,
            num_experts=num_experts,
            **experts,
            sigmoid_router=family.sigmoid_router,
            vocab_size=self.vocab_size(),
            context_length=context_length,
            norm_eps=self.number(f"attention.{norm}_epsilon"),
            layer_norm=family.layer_norm,
            activation=family.activation,
            pre_norms=family.pre_norms,
            ffn_norm=family.ffn_norm,
            post_norms=family.post_norms,
            parallel_block=parallel_block,
            qk_norm=family.qk_norm if has_qk_norm else "",
            qk_norm_after_rope=family.qk_norm_after_rope,
            embedding_scale=self.number(
                "embedding_scale", math.sqrt(hidden_size) if family.scaled_embedding else default_scale
            ),
            residual_scale=self.number("residual_scale", default_scale),
            logit_scale=1.0 / logit_scale if family.divided_logits else logit_scale,
            logit_soft_cap=self.number("final_logit_softcapping", family.logit_soft_cap, low=0.0),
            attention_scale=self.number("attention.scale", 0.0, zero=1.0 / math.sqrt(query_dim)),
            attention_soft_cap=self.number("attn_logit_softcapping", family.attention_soft_cap, low=0.0),
            attn_sinks=family.attn_sinks,
            attention_temperature=self.attention_temperature(rope_tables, layers, head_dim),
            rope_interleaved=not self.has_mrope(family) and family.rope_interleaved,
            rope_tables=rope_tables,
            layers=layers,
            pooling=self.integer("pooling_type", default=0, low=0, high=2**31 - 1) or _MEAN_POOLING,
        )

    def num_experts(self, family: Architecture, num_dense: int) -> int:
        count = self.integer("expert_count", default=0, low=0, high=_MAX_EXPERTS)
        router = f"blk.{num_dense}.ffn_gate_inp"
        if family.norm_topk_prob is None and count == 1 and not self.rows(router):
            return 0  # a dense network: what some files call a mixture of one
        if count and family.norm_topk_prob is None:
            raise self.fail("expert_count", f"{count}, but mixtures of experts are not supported here")
        if self.rows(router) not in (0, count):
            given = count if "expert_count" in self.keys() else "missing, which means 0,"
            raise self.fail(
                "expert_count", f"{given} does not fit {router}.weight, which has {self.rows(router)} rows"
            )
        return count

    def experts(self, family: Architecture, num_experts: int, num_dense: int) -> dict[str, Any]:
        """What there is to say of a mixture of experts, zeros where there is none."""
        names = (
            "num_experts_per_tok",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "first_k_dense_replace",
            "norm_topk_prob",
            "routed_scaling_factor",
        )
        if not num_experts:
            return dict(zip(names, (0, 0, 0, 0, False, 1.0), strict=True))
        experts = self.gguf.tensors.get(f"blk.{num_dense}.ffn_up_exps.weight")
        size = experts.shape[-2] if experts is not None and len(experts.shape) > 1 else None
        default = size or self.integer("feed_forward_length", high=2**24)
        shared = self.rows(f"blk.{num_dense}.ffn_up_shexp")
        values = (
            self.integer("expert_used_count", high=num_experts),
            self.integer("expert_feed_forward_length", default=default, high=2**24),
            self.integer("expert_shared_feed_forward_length", default=shared, low=0, high=2**24),
            num_dense,
            self.boolean("expert_weights_norm", bool(family.norm_topk_prob)),
            self.number("expert_weights_scale", 1.0),
        )
        return dict(zip(names, values, strict=True))

    def refuse_unknown_ways(self, family: Architecture) -> None:
        """Refuses keys that change what the model computes in ways that are not built."""
        usual_values: dict[str, float | None] = {
            **_USUAL_VALUES,
            "expert_gating_func": _SIGMOID if family.sigmoid_router else _SOFTMAX,
        }
        if not family.router_keys:
            usual_values |= {
                "expert_weights_norm": bool(family.norm_topk_prob),
                "expert_weights_scale": 1.0,
            }
        if not family.mrope:
            usual_values["rope.dimension_sections"] = None
        for key, usual in usual_values.items():
            value = self.gguf.metadata.get(f"{self.architecture}.{key}", usual)
            if value is not usual and (not isinstance(value, (bool, int, float)) or value != usual):
                supported = "" if usual is None else f"; supported: {usual}"
                raise self.fail(key, f"{reprlib.repr(value)} is not supported{supported}")

    def has_mrope(self, family: Architecture) -> bool:
        """Whether RoPE takes a position of several dimensions, which are all the same in text. arXiv:2409.12191"""
        key = "rope.dimension_sections"
        sections = self.gguf.metadata.get(f"{self.architecture}.{key}")
        if not family.mrope or sections is None:
            return False
        values = sections.tolist() if isinstance(sections, np.ndarray) else []
        are_sizes = len(values) in (3, 4) and all(isinstance(v, int) and v >= 0 for v in values)
        if not are_sizes or any(values[3:]):
            shown = reprlib.repr(values or sections)
            raise self.fail(key, f"{shown} is not supported; supported: the sizes of three sections")
        return bool(values[0] and values[1])

    def vocab_size(self) -> int:
        rows = self.rows("token_embd")
        if rows == 0:
            raise GGUFError(f"{self.gguf.path}: token_embd.weight: tensor is missing or is no matrix")
        tokens = self.gguf.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) != rows:
            raise GGUFError(
                f"{self.gguf.path}: tokenizer.ggml.tokens: {len(tokens)} tokens, but token_embd.weight has {rows} rows"
            )
        self.integer("vocab_size", default=rows)  # of no use, but no reason to take what is no number
        return rows

    def layers(
        self, family: Architecture, num_layers: int, head_dim: int
    ) -> tuple[tuple[RopeTable, ...], tuple[tuple[int, int], ...]]:
        """RoPE tables and, for each layer, which one it uses and its window. arXiv:2104.09864"""
        dim = self.integer("rope.dimension_count", default=head_dim, high=head_dim)
        if dim % 2:
            raise self.fail("rope.dimension_count", f"{dim} is odd")
        scaling = self.rope_scaling(dim)
        theta = self.rope_base("rope.freq_base", 10_000.0, scaling)
        tables = [rope_table(dim, theta, scaling)]
        # Published files give it with its usual value, or with one that llama.cpp does not read either.
        key = "rope.scaling.yarn_attn_factor"
        if not any(
            math.isclose(self.number(key, 1.0), usual, rel_tol=1e-3) for usual in (1.0, tables[0].scale)
        ):
            raise self.fail(key, f"{self.number(key):g} is not supported; supported: {tables[0].scale:g}")
        window = self.integer("attention.sliding_window", default=family.window, low=0)
        local = self.local_layers(family.window_period, num_layers) if window else [False] * num_layers
        if window:
            local_scaling = scaling if family.local_rope_scaled else RopeScaling()
            local_theta = self.rope_base(
                "rope.freq_base_swa", family.local_rope_theta or theta, local_scaling
            )
            tables.append(rope_table(dim, local_theta, local_scaling))
        if tables[-1] == tables[0]:
            del tables[1:]

        def has_rope(layer: int) -> bool:
            if family.rope_if_finetuned and not self.boolean("rope.scaling.finetuned", True):
                return False
            if family.no_rope_period and (layer + 1) % family.no_rope_period == 0:
                return False
            return local[layer] or not (window and family.rope_in_windows)

        layers = tuple(
            (is_local * (len(tables) - 1) if has_rope(layer) else -1, window if is_local else 0)
            for layer, is_local in enumerate(local)
        )
        return tuple(tables), layers

    def rope_base(self, key: str, default: float, scaling: RopeScaling) -> float:
        theta = self.number(key, default)
        if scaling.type == "yarn" and theta <= 1:  # no pair turns more slowly than the one before it
            raise self.fail(key, f"{theta:g} is not above 1, as rope.scaling.type yarn needs")
        return theta

    def rope_scaling(self, dim: int) -> RopeScaling:
        """How RoPE is stretched: rope.scaling.*, and the factors of rope_freqs, or of rope_factors_long or _short."""
        kind = self.gguf.metadata.get(f"{self.architecture}.rope.scaling.type", "linear")
        if not isinstance(kind, str) or kind not in SCALING_TYPES:
            supported = ", ".join(SCALING_TYPES)
            raise self.fail(
                "rope.scaling.type", f"{reprlib.repr(kind)} is not supported; supported: {supported}"
            )
        original = self.original_context_length()
        names = ["rope_freqs", "rope_factors_short"]
        if (self.max_model_len or self.integer("context_length", high=2**63)) > original:
            names[1] = "rope_factors_long"
        found = [name for name in names if f"{name}.weight" in self.gguf.tensors]
        if kind == "longrope" and not found:
            raise self.fail("rope.scaling.type", f"longrope, but tensor {names[1]}.weight is missing")
        return RopeScaling(
            type=kind,
            factor=self.number(
                "rope.scaling.factor", self.number("rope.scale_linear", 1.0, zero=1.0), zero=1.0
            ),
            factors=self.rope_factors(f"{found[0]}.weight", dim) if found else 1.0,
            original_context_length=original,
            attention_factor=self.number("rope.scaling.attn_factor", 1.0),
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0),
            log_multiplier=self.number("rope.scaling.yarn_log_multiplier", 0.0, low=0.0),
        )

    def attention_temperature(
        self, tables: tuple[RopeTable, ...], layers: tuple[tuple[int, int], ...], head_dim: int
    ) -> tuple[float, int]:
        key = "attention.temperature_scale"
        scale = self.number(key, 0.0, low=0.0)
        # It is part of the queries' RoPE, which must then reach every element.
        whole = all(table >= 0 and 2 * len(tables[table].inv_freq) == head_dim for table, _ in layers)
        if scale and not whole:
            raise self.fail(key, "is not supported where RoPE leaves out layers or elements of a head")
        return scale, min(self.original_context_length(), MAX_POSITION)

    def original_context_length(self) -> int:
        """Tokens the model was trained for before RoPE was stretched."""
        context_length = self.integer("context_length", high=2**63)
        return self.integer("rope.scaling.original_context_length", context_length, high=2**63)

    def local_layers(self, period: int, num_layers: int) -> list[bool]:
        """Which layers attend through the sliding window: all but every period-th, unless the file lists them."""
        key = "attention.sliding_window_pattern"
        pattern = self.gguf.metadata.get(f"{self.architecture}.{key}")
        if isinstance(pattern, np.ndarray) and pattern.dtype == np.bool_:
            if pattern.size != num_layers:
                raise self.fail(key, f"{pattern.size} values for {num_layers} layers")
            return [bool(is_local) for is_local in pattern]
        period = self.integer(key, default=period, low=0)
        return [period == 0 or (layer + 1) % period != 0 for layer in range(num_layers)]

    def rope_factors(self, name: str, dim: int) -> np.ndarray:
        """Divisors of the frequencies [dim / 2], as Llama 3.1 and Phi 3 files carry them."""
        tensor = self.gguf.tensors[name]
        if tensor.shape != (dim // 2,) or tensor.type.name != "F32":
            raise GGUFError(
                f"{self.gguf.path}: {name}: {tensor.type.name} of shape {tensor.shape}, "
                f"expected F32 of shape {(dim // 2,)}"
            )
        factors = tensor.data.view("<f4").astype(np.float64)
        least, most = float(FLOAT32.tiny), float(1 / FLOAT32.tiny)
        wrong = factors[~((least <= factors) & (factors <= most))]
        if wrong.size:
            raise GGUFError(f"{self.gguf.path}: {name}: {wrong[0]:g} is not between {least:g} and {most:g}")
        return factors
