"""What single architectures' keys and tensors say, and which of them are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_writer import ARR, F32, I32, Typed
from test_architectures import logits
from tiny_architectures import PROMPT, write
from tiny_gguf import FAMILIES, write_tiny_model

from rvllm.config import EngineConfig, ModelConfig
from rvllm.gguf_file import GGUFError, GGUFFile
from rvllm.model_runner import ModelRunner


def config_of(path: Path, arch: str, keys: dict[str, object], **arguments: Any) -> ModelConfig:
    write_tiny_model(
        path, arch, metadata={f"{arch}.{key}": value for key, value in keys.items()}, **arguments
    )
    return ModelConfig.from_gguf(GGUFFile(path))


def integers(*values: int) -> Typed:
    return Typed(ARR, Typed(I32, values))


@pytest.mark.parametrize(
    ("arch", "key", "value", "message"),
    [
        ("llama", "vocab_size", 260.0, r"llama\.vocab_size: expected an integer, not 260\.0"),
        ("llama", "vocab_size", True, r"llama\.vocab_size: expected an integer, not True"),
        ("llama", "vocab_size", "many", r"llama\.vocab_size: expected an integer, not 'many'"),
        ("llama", "vocab_size", 0, r"llama\.vocab_size: 0 is not between 1 and"),
        ("llama", "vocab_size", integers(260, 260, 260), r"llama\.vocab_size: 3 values, expected one"),
        ("qwen2", "rope.dimension_sections", integers(2, 3, 3, 0), r"dimension_sections: .* is not supported$"),
        ("qwen2vl", "rope.dimension_sections", integers(2, 2, 2, 2), r"\[2, 2, 2, 2\] is not supported; supported: "),
        ("qwen2vl", "rope.dimension_sections", integers(2, 2, 2, 1, 1), r"\[2, 2, 2, 1, 1\] is not supported"),
        ("qwen2vl", "rope.dimension_sections", integers(2, -2, 8, 0), r"\[2, -2, 8, 0\] is not supported"),
        ("qwen2vl", "rope.dimension_sections", 8, r"dimension_sections: 8 is not supported"),
        ("qwen2vl", "rope.dimension_sections", Typed(ARR, Typed(F32, [2.0, 3.0, 3.0])), r"is not supported"),
        ("hunyuan-dense", "rope.scaling.alpha", 1000.0, r"rope\.scaling\.alpha: 1000\.0 is not supported"),
        ("hunyuan-dense", "expert_count", 2, r"expert_count: 2, but mixtures of experts are not supported here"),
        ("qwen3moe", "expert_gating_func", 2, r"expert_gating_func: 2 is not supported; supported: 1"),
        ("dots1", "expert_gating_func", 1, r"expert_gating_func: 1 is not supported; supported: 2"),
        ("qwen3moe", "expert_weights_scale", 2.5, r"expert_weights_scale: 2\.5 is not supported; supported: 1\.0"),
        ("qwen3moe", "expert_weights_norm", False, r"expert_weights_norm: False is not supported; supported: True"),
        ("dots1", "expert_weights_scale", 0.0, r"expert_weights_scale: 0\.0 is not between"),
        ("dots1", "expert_weights_norm", 1, r"expert_weights_norm: expected true or false, not 1"),
        ("dots1", "leading_dense_block_count", 2, r"leading_dense_block_count: 2 is not between 0 and 1"),
        ("ernie4_5-moe", "interleave_moe_layer_step", 2, r"interleave_moe_layer_step: 2 is not supported; supp"),
        ("glm4moe", "nextn_predict_layers", 3, r"nextn_predict_layers: 3 is not between 0 and 2"),
        ("llama", "block_count", 3, r"block_count: 3 layers, but the file has tensors for 2"),
        ("minimax-m2", "expert_group_count", 8, r"expert_group_count: 8 is not supported; supported: 1"),
    ],
)  # fmt: skip
def test_wrong_keys_are_named(tmp_path: Path, arch: str, key: str, value: object, message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        config_of(tmp_path / "tiny.gguf", arch, {key: value})


@pytest.mark.parametrize("key", ["embedding_scale", "residual_scale", "logit_scale"])
def test_scales_of_minicpm_must_be_there(tmp_path: Path, key: str) -> None:
    gguf = GGUFFile(write("minicpm", tmp_path))
    del gguf.metadata[f"minicpm.{key}"]
    with pytest.raises(GGUFError, match=rf"minicpm\.{key}: missing"):
        ModelConfig.from_gguf(gguf)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("glm4moe", "blk.2.exp_probs_b.bias"),
        ("glm4moe", "blk.0.ffn_gate.weight"),
        ("glm4moe-norms", "blk.1.ffn_up.weight"),
        ("glm4moe-norms", "blk.1.attn_k_norm.weight"),
        ("glm4moe", "blk.1.post_attention_norm.weight"),
        ("glm4moe", "blk.0.attn_q.bias"),
        ("dots1", "blk.1.ffn_gate_inp.weight"),
        ("dots1", "blk.2.ffn_down_shexp.weight"),
        ("seed_oss", "blk.0.post_attention_norm.weight"),
        ("glm4", "blk.1.post_ffw_norm.weight"),
        ("hunyuan-dense", "blk.0.attn_q_norm.weight"),
    ],
)
def test_missing_tensors_are_named(tmp_path: Path, name: str, tensor: str) -> None:
    gguf = GGUFFile(write(name, tmp_path))
    del gguf.tensors[tensor]
    # A layer's biases of query, key and value are asked for together.
    missing = (
        "attn_q.bias: some of the matrices" if tensor.endswith("q.bias") else f"{tensor}: tensor is missing"
    )
    with pytest.raises(GGUFError, match=missing):
        ModelRunner(gguf, ModelConfig.from_gguf(gguf), EngineConfig(num_blocks=4))


def test_layers_for_tokens_further_ahead_are_left_out(tmp_path: Path) -> None:
    """Whether their tensors are in the file, as in GLM 4.5's, or not."""
    with_layer, without = tmp_path / "with.gguf", tmp_path / "without.gguf"
    write_tiny_model(with_layer, "glm4moe")
    keys = {k: v for k, v in FAMILIES["glm4moe"].keys.items() if k != "nextn_predict_layers"}
    config = config_of(without, "glm4moe", {}, family=FAMILIES["glm4moe"]._replace(nextn_layers=0, keys=keys))
    gguf = GGUFFile(with_layer)
    assert any(name.startswith("blk.2.") for name in gguf.tensors)
    assert ModelConfig.from_gguf(gguf).num_layers == config.num_layers == 2
    for name in [name for name in gguf.tensors if name.startswith("blk.2.")]:
        del gguf.tensors[name]
    assert ModelConfig.from_gguf(gguf) == config
    ModelRunner(gguf, config, EngineConfig(num_blocks=4))


def test_a_mixture_of_one_expert_without_a_router_is_a_dense_network(tmp_path: Path) -> None:
    assert config_of(tmp_path / "tiny.gguf", "hunyuan-dense", {"expert_count": 1}).num_experts == 0


def test_sections_of_rope_turn_interleaved_pairs_into_halves(tmp_path: Path) -> None:
    for name, interleaved in {"glm4": True, "glm4-sections": False, "qwen2vl": False}.items():
        assert ModelConfig.from_gguf(GGUFFile(write(name, tmp_path))).rope_interleaved == interleaved


def test_where_norms_of_queries_stand_matters(tmp_path: Path) -> None:
    """The same tensors under another name: RoPE before the norms, or after them."""
    for arch in ("hunyuan-dense", "qwen3"):
        write_tiny_model(tmp_path / f"{arch}.gguf", arch)
    first, second = (logits(tmp_path / f"{arch}.gguf", PROMPT) for arch in ("hunyuan-dense", "qwen3"))
    assert np.abs(first - second).max() > 0.1
