"""What sets families of models apart and is not said in their files: a row for each general.architecture."""

from __future__ import annotations

from typing import NamedTuple


class Architecture(NamedTuple):
    """Flags of one family; the defaults are those of Llama."""

    layer_norm: bool = False  # norms take the mean off (arXiv:1607.06450), not RMS norms
    activation: str = "silu_gated"  # a name in csrc/activation.h
    pre_norms: bool = True  # of what attention and feed-forward read
    ffn_norm: str = "ffn_norm"  # name of the latter
    post_norms: bool = False  # of what they add to the residual stream
    parallel_block: bool = False  # layers without ffn_norm: both branches read what attn_norm gives
    # What attn_q_norm and attn_k_norm normalize: "head" each head by one weight; "heads" each by its own; "row" all
    # heads together.
    qk_norm: str = ""
    qk_norm_optional: bool = False  # only where the file has them
    qk_norm_after_rope: bool = False
    attn_sinks: bool = False  # each head has one more score in its softmax, without a value
    # Of mixtures of experts: whether the weights of a token's experts add up to 1. None: there are no mixtures.
    norm_topk_prob: bool | None = None
    sigmoid_router: bool = False  # experts are chosen and weighted by sigmoids, not by a softmax
    router_keys: bool = False  # the file may have expert_weights_norm and expert_weights_scale of its own
    attention_soft_cap: float = 0.0  # where the file has no attn_logit_softcapping
    logit_soft_cap: float = 0.0  # where the file has no final_logit_softcapping
    scaled_embedding: bool = False  # embeddings times sqrt(hidden_size)
    scales_given: bool = False  # the file must have embedding_scale, residual_scale and logit_scale
    divided_logits: bool = False  # logit_scale divides logits, instead of multiplying them
    # In models of this many layers the width of a query head's input scales scores, not head_dim.
    wide_query_layers: int = 0
    window: int = 0  # tokens, where the file has no attention.sliding_window
    window_period: int = 0  # every such layer attends to everything; 0: each one through the window
    rope_interleaved: bool = False  # RoPE pairs (2i, 2i + 1) instead of (i, i + dim / 2)
    mrope: bool = False  # files with rope.dimension_sections, for images, keep pairs as (i, i + dim / 2)
    rope_in_windows: bool = False  # of the layers of a model with windows, only those with one have RoPE
    no_rope_period: int = 0  # every such layer has no RoPE
    rope_if_finetuned: bool = False  # rope.scaling.finetuned = false: no layer has RoPE
    local_rope_theta: float = 0.0  # of the layers with a window; 0: the same as the others
    local_rope_scaled: bool = True  # whether they share the others' RoPE scaling


_GEMMA = Architecture(activation="gelu_gated", scaled_embedding=True)
_GRANITE = Architecture(rope_interleaved=True, divided_logits=True, rope_if_finetuned=True)
_HUNYUAN = Architecture(qk_norm="head", qk_norm_after_rope=True)
_SIGMOID_MIXTURE = Architecture(qk_norm="head", norm_topk_prob=False, sigmoid_router=True, router_keys=True)

ARCHITECTURES = {
    "arcee": Architecture(activation="relu_sqr", rope_interleaved=True),
    "bailingmoe": Architecture(rope_interleaved=True, norm_topk_prob=False, router_keys=True),
    "chatglm": Architecture(rope_interleaved=True),
    "cohere2": Architecture(
        layer_norm=True, parallel_block=True, rope_interleaved=True, window_period=4, rope_in_windows=True
    ),
    "command-r": Architecture(
        layer_norm=True, parallel_block=True, rope_interleaved=True, qk_norm="heads", qk_norm_optional=True
    ),
    "deepseek": Architecture(rope_interleaved=True, norm_topk_prob=False),
    "dots1": _SIGMOID_MIXTURE,
    "ernie4_5": Architecture(rope_interleaved=True),
    "ernie4_5-moe": Architecture(rope_interleaved=True, norm_topk_prob=True),
    "exaone": Architecture(),
    "exaone4": Architecture(
        pre_norms=False, post_norms=True, qk_norm="head", window_period=4, rope_in_windows=True
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA._replace(
        post_norms=True,
        attention_soft_cap=50.0,
        logit_soft_cap=30.0,
        wide_query_layers=46,
        window=4096,
        window_period=2,
    ),
    "gemma3": _GEMMA._replace(
        post_norms=True,
        qk_norm="head",
        wide_query_layers=62,
        window_period=6,
        local_rope_theta=10_000.0,
        local_rope_scaled=False,
    ),
    "glm4": Architecture(post_norms=True, rope_interleaved=True, mrope=True),
    "glm4moe": _SIGMOID_MIXTURE._replace(ffn_norm="post_attention_norm", qk_norm_optional=True, mrope=True),
    "gpt-oss": Architecture(
        activation="swiglu_oai",
        ffn_norm="post_attention_norm",
        attn_sinks=True,
        norm_topk_prob=True,
        window_period=2,
    ),
    "granite": _GRANITE,
    "granitemoe": _GRANITE._replace(norm_topk_prob=True),
    "hunyuan-dense": _HUNYUAN,
    "hunyuan-moe": _HUNYUAN._replace(norm_topk_prob=True),
    "internlm2": Architecture(rope_interleaved=True),
    "llama": Architecture(rope_interleaved=True, norm_topk_prob=True),
    "minicpm": Architecture(rope_interleaved=True, scales_given=True, divided_logits=True),
    "minimax-m2": Architecture(qk_norm="row", norm_topk_prob=True, sigmoid_router=True),
    "mistral3": Architecture(rope_interleaved=True),
    "nemotron": Architecture(layer_norm=True, activation="relu_sqr"),
    "olmo2": Architecture(
        pre_norms=False, post_norms=True, qk_norm="row", window_period=4, local_rope_scaled=False
    ),
    "olmoe": Architecture(qk_norm="row", norm_topk_prob=False),
    "phi3": Architecture(),
    "qwen2": Architecture(),
    "qwen2moe": Architecture(norm_topk_prob=False),
    "qwen2vl": Architecture(mrope=True),
    "qwen3": Architecture(qk_norm="head"),
    "qwen3moe": Architecture(qk_norm="head", norm_topk_prob=True),
    "qwen3vl": Architecture(qk_norm="head", mrope=True),
    "qwen3vlmoe": Architecture(qk_norm="head", norm_topk_prob=True, mrope=True),
    "seed_oss": Architecture(ffn_norm="post_attention_norm"),
    "smollm3": Architecture(rope_interleaved=True, no_rope_period=4),
    "stablelm": Architecture(layer_norm=True, parallel_block=True, qk_norm="heads", qk_norm_optional=True),
    "starcoder2": Architecture(layer_norm=True, activation="gelu"),
}
