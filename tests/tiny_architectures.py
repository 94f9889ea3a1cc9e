"""A tiny model for each architecture and for each way that its files differ, with a prompt that reaches them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tiny_gguf import EXPERT_KEYS, FAMILIES, write_tiny_model

PROMPT = [int(t) for t in np.random.default_rng(5).integers(0, 256, 40)]
MAX_MODEL_LEN = 512  # what the files say: longer than some models' original context, which changes their RoPE

_LINEAR = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 16,
}
_FACTORS = {
    "long": [1.1, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0],
    "short": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
}
_ALL_BIASES = FAMILIES["starcoder2"].biases


def _keys(arch: str, keys: dict[str, object]) -> dict[str, object]:
    return {f"{arch}.{key}": value for key, value in keys.items()}


# Arguments of write_tiny_model.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "arcee": {"arch": "arcee", "tied": False, "metadata": _keys("arcee", _YARN)},
    "bailingmoe": {"arch": "bailingmoe", "tied": False},
    "chatglm": {"arch": "chatglm", "tied": False},
    "cohere2": {"arch": "cohere2", "layers": 5},
    "command-r": {"arch": "command-r"},
    "deepseek": {"arch": "deepseek", "layers": 3, "tied": False, "kv_heads": 4},
    "dots1": {"arch": "dots1", "layers": 3, "tied": False, "kv_heads": 4, "head_dim": 32},
    "ernie4_5": {"arch": "ernie4_5", "head_dim": 32},
    "ernie4_5-moe": {"arch": "ernie4_5-moe", "layers": 3},
    "ernie4_5-moe-unbiased": {
        "arch": "ernie4_5-moe",
        "layers": 3,
        "family": FAMILIES["ernie4_5-moe"]._replace(router_bias=False),
    },
    "exaone": {"arch": "exaone", "rope_freqs": [1, 1, 1, 2, 4, 8, 8, 8]},
    "exaone4": {"arch": "exaone4"},
    "exaone4-windows": {"arch": "exaone4", "layers": 64, "hidden": 32, "ff": 32, "sliding_window": 12},
    "gemma": {"arch": "gemma", "head_dim": 32, "kv_heads": 1},
    "gemma2": {"arch": "gemma2", "layers": 4},
    "gemma3": {
        "arch": "gemma3",
        "layers": 7,
        "sliding_window": 12,
        "kv_heads": 1,
        "metadata": {
            "gemma3.rope.freq_base": 1e6,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
        },
    },
    "glm4": {"arch": "glm4", "tied": False},
    "glm4-sections": {
        "arch": "glm4",
        "tied": False,
        "metadata": {"glm4.rope.dimension_sections": [1, 2, 1, 0]},
    },
    "glm4moe": {"arch": "glm4moe", "layers": 3, "tied": False, "head_dim": 32},
    "glm4moe-norms": {
        "arch": "glm4moe",
        "layers": 3,
        "tied": False,
        "family": FAMILIES["glm4moe"]._replace(qk_norm="head", dense_layers=2),
        "metadata": {"glm4moe.leading_dense_block_count": 2, "glm4moe.expert_weights_norm": False},
    },
    "gpt-oss": {"arch": "gpt-oss", "layers": 3, "tied": False},
    "granite": {"arch": "granite"},
    "granite-no-rope": {"arch": "granite", "metadata": {"granite.rope.scaling.finetuned": False}},
    "granitemoe": {"arch": "granitemoe"},
    "granitemoe-shared": {
        "arch": "granitemoe",
        "family": FAMILIES["granitemoe"]._replace(shared_experts=1, expert_keys=EXPERT_KEYS[1:]),
    },
    "hunyuan-dense": {"arch": "hunyuan-dense", "head_dim": 32},
    "hunyuan-moe": {"arch": "hunyuan-moe"},
    "internlm2": {"arch": "internlm2", "tied": False},
    "llama": {"arch": "llama"},
    "llama-biases": {
        "arch": "llama",
        "tied": False,
        "family": FAMILIES["llama"]._replace(biases=(*_ALL_BIASES, "ffn_gate")),
    },
    "llama-linear": {"arch": "llama", "metadata": _LINEAR},
    "llama-rope-freqs": {"arch": "llama", "rope_freqs": [1, 1, 1, 1, 8, 8, 8, 8]},
    "llama-yarn": {"arch": "llama", "metadata": _keys("llama", _YARN)},
    "minicpm": {"arch": "minicpm"},
    "minicpm-long": {
        "arch": "minicpm",
        "rope_factors": _FACTORS,
        "metadata": {"minicpm.rope.scaling.type": "longrope"},
    },
    "minimax-m2": {"arch": "minimax-m2", "tied": False},
    "mistral3": {"arch": "mistral3", "head_dim": 32},
    "mixtral": {"arch": "llama", "tied": False, "family": FAMILIES["llama"]._replace(num_experts=6)},
    "nemotron": {"arch": "nemotron", "tied": False},
    "olmo2": {"arch": "olmo2", "tied": False, "heads": 4, "kv_heads": 4},
    "olmo3": {
        "arch": "olmo2",
        "tied": False,
        "layers": 5,
        "sliding_window": 12,
        "metadata": _keys("olmo2", _YARN),
    },
    "olmoe": {"arch": "olmoe", "kv_heads": 4, "tied": False},
    "phi3": {"arch": "phi3", "tied": False},
    "phi3-long": {
        "arch": "phi3",
        "rope_factors": _FACTORS,
        "metadata": _keys(
            "phi3",
            {
                "rope.scaling.type": "longrope",
                "rope.scaling.original_context_length": 256,
                "rope.scaling.attn_factor": 1.19,
            },
        ),
    },
    "phi3-short": {"arch": "phi3", "rope_factors": _FACTORS},
    "phi3-partial": {"arch": "phi3", "head_dim": 16, "rope_dim": 12},
    "qwen2": {"arch": "qwen2"},
    "qwen2moe": {"arch": "qwen2moe", "tied": False},
    "qwen2vl": {"arch": "qwen2vl"},
    "qwen3": {"arch": "qwen3", "head_dim": 32},
    "qwen3moe": {"arch": "qwen3moe"},
    "qwen3vl": {"arch": "qwen3vl"},
    "qwen3vlmoe": {"arch": "qwen3vlmoe"},
    "seed_oss": {"arch": "seed_oss", "head_dim": 32, "tied": False},
    "smollm3": {"arch": "smollm3", "layers": 5},
    "stablelm": {"arch": "stablelm", "tied": False, "rope_dim": 4, "qkv_bias": True},
    "stablelm-parallel": {
        "arch": "stablelm",
        "tied": False,
        "rope_dim": 8,
        "family": FAMILIES["stablelm"]._replace(ffn_norm="", qk_norm="heads"),
    },
    "starcoder2": {"arch": "starcoder2"},
}

# Three layers' worth of rotation far out: models of one layer whose prompts are as long as their contexts.
LONG_CONTEXT = 32_768
LONG_POSITIONS = (0, 1, 100, 4095, 8191, 16_383, 24_000, 32_767)
_LONG: dict[str, Any] = {
    "layers": 1,
    "heads": 1,
    "kv_heads": 1,
    "hidden": 32,
    "ff": 32,
    "context_length": LONG_CONTEXT,
}
LONG: dict[str, dict[str, Any]] = {
    "long-llama3": {"arch": "llama", **_LONG, "head_dim": 32, "rope_freqs": [1] * 6 + [2, 3, 5] + [8] * 7},
    "long-linear": {"arch": "llama", **_LONG, "head_dim": 32, "metadata": _LINEAR},
    "long-yarn": {
        "arch": "llama",
        **_LONG,
        "head_dim": 32,
        "metadata": _keys("llama", {**_YARN, "rope.scaling.original_context_length": 4096}),
    },
    "long-longrope": {
        "arch": "phi3",
        **_LONG,
        "head_dim": 32,
        "rope_factors": {"long": np.geomspace(1, 60, 16).tolist(), "short": [1.0] * 16},
        "metadata": _keys(
            "phi3",
            {
                "rope.scaling.type": "longrope",
                "rope.scaling.original_context_length": 4096,
                "rope.scaling.attn_factor": 1.19,
            },
        ),
    },
}


def long_prompt() -> list[int]:
    return [int(t) for t in np.random.default_rng(6).integers(0, 256, LONG_CONTEXT)]


def write(name: str, directory: Path) -> Path:
    """Write the model of that name, from ARCHITECTURES or LONG."""
    path = directory / f"{name}.gguf"
    arguments = {**ARCHITECTURES, **LONG}[name]
    # llama.cpp looks for Phi 3's own tokens in the vocabulary of a model by that name.
    metadata = {"general.name": "tiny", **arguments.get("metadata", {})}
    write_tiny_model(path, **{**arguments, "metadata": metadata})
    return path
