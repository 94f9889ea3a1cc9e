"""Mixtures of experts in whole models: every type of weight, the same bits in any company, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reference
from numpy.typing import NDArray
from random_weights import BLOCK_FIELDS
from runner_logits import get_logits
from tiny_gguf import FAMILIES, write_tiny_model

from rvllm import LLM, SamplingParams, _core
from rvllm.config import EngineConfig, ModelConfig
from rvllm.gguf_file import GGUFError, GGUFFile
from rvllm.model_runner import ModelRunner

TOKENS = [int(t) for t in np.random.default_rng(7).integers(0, 256, 40)]
MIXTRAL = {"arch": "llama", "tied": False, "family": FAMILIES["llama"]._replace(num_experts=6)}
GPT_OSS = {"arch": "gpt-oss", "tied": False, "quant": {"*_exps.*": "MXFP4", "*": "Q8_0"}}

Float = NDArray[np.float32]


def load(path: Path, **config: object) -> ModelRunner:
    gguf = GGUFFile(path)
    return ModelRunner(gguf, ModelConfig.from_gguf(gguf), EngineConfig(num_blocks=16, **config))  # type: ignore[arg-type]


def logits(path: Path, **config: object) -> Float:
    runner = load(path, **config)
    return get_logits(runner, TOKENS)


def assert_near_the_reference(path: Path) -> None:
    """The reference quantizes activations as the kernels do, but a value at the edge of a step may fall either way."""
    out, expected = logits(path), reference.forward(path, TOKENS, int8=True)
    assert np.abs(out - expected).max() < 0.2 * expected.std()
    assert np.abs(out - expected).mean() < 0.02 * expected.std()


@pytest.mark.parametrize("quant", ["F16", "BF16", *(kind.name for kind in BLOCK_FIELDS)])
def test_experts_of_every_type(tmp_path: Path, quant: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(
        path, "qwen2moe", {"*_exps.*": quant, "*_shexp.*": quant, "*": "Q8_0"}, layers=1, tied=False
    )
    assert_near_the_reference(path)


@pytest.mark.parametrize("arch", ["gpt-oss", "llama"])
def test_types_may_be_mixed(tmp_path: Path, arch: str) -> None:
    path = tmp_path / "tiny.gguf"
    mixed = {
        "*gate_exps.*": "Q4_K",
        "*up_exps.*": "F16",
        "*down_exps.*": "Q6_K",
        "*attn_v.*": "Q5_0",
        "*": "Q8_0",
    }
    # Seed 0 has a token whose experts are so near each other that rounding decides.
    write_tiny_model(path, **{**(GPT_OSS if arch == "gpt-oss" else MIXTRAL), "quant": mixed, "seed": 1})
    assert_near_the_reference(path)


def test_gpt_oss_as_its_files_are(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, **GPT_OSS, layers=3)
    assert_near_the_reference(path)


@pytest.mark.parametrize("arguments", [{**MIXTRAL, "quant": "Q4_K"}, GPT_OSS], ids=["mixtral", "gpt-oss"])
def test_same_bits_on_every_isa_thread_count_and_chunk_size(
    tmp_path: Path, arguments: dict[str, object]
) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, **arguments)  # type: ignore[arg-type]
    alone = logits(path, isa="scalar", num_threads=1)
    for isa in _core.available_isas():
        for threads in (1, 2):
            np.testing.assert_array_equal(logits(path, isa=isa, num_threads=threads), alone)
    for chunk in (1, 7, 16, 33):
        np.testing.assert_array_equal(logits(path, max_num_batched_tokens=chunk), alone)


def test_answers_are_the_same_alone_and_batched(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, **GPT_OSS)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, n).tolist() for n in rng.integers(1, 60, 24)]
    params = SamplingParams(temperature=1.2, seed=5, max_tokens=8, logprobs=5, ignore_eos=True)
    alone = LLM(path, isa="scalar", num_threads=1, num_blocks=64, enable_prefix_caching=False)
    expected = [alone.generate([prompt], params, use_tqdm=False)[0].outputs for prompt in prompts]
    for settings in ({}, {"max_num_batched_tokens": 37}, {"max_num_seqs": 5}):
        llm = LLM(path, num_blocks=256, **settings)  # type: ignore[arg-type]
        assert [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)] == expected


def test_profile_names_what_a_mixture_does(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, "qwen2moe", tied=False)
    llm = LLM(path, num_blocks=16, profile=True)
    llm.generate([TOKENS], SamplingParams(max_tokens=2, temperature=0.0), use_tqdm=False)
    assert llm.profile is not None
    operations = {operation.name: operation for operation in llm.profile.operations()}
    for name in ("route", "combine", "add_gated", "linear ffn_gate_exps", "linear ffn_down_exps"):
        assert operations[name].calls == 2 * 2, name  # layers times steps
    tokens, num_used, ff, hidden = len(TOKENS) + 1, 2, 32, 64
    assert operations["linear ffn_gate_exps"].macs == 2 * tokens * num_used * 2 * ff * hidden
    assert operations["linear ffn_down_exps"].macs == 2 * tokens * num_used * ff * hidden


# What is refused


@pytest.mark.parametrize(
    ("arch", "key", "value", "message"),
    [
        ("qwen3moe", "expert_used_count", 8, r"expert_used_count: 8 is not between 1 and 7"),
        ("qwen3moe", "expert_used_count", 0, r"expert_used_count: 0 is not between 1 and 7"),
        ("qwen3moe", "expert_count", 5000, r"expert_count: 5000 is not between 0 and 1024"),
        ("qwen3moe", "expert_count", 8, r"expert_count: 8 does not fit blk\.0\.ffn_gate_inp\.weight, which has 7 rows"),
        ("qwen3moe", "expert_count", 0, r"expert_count: 0 does not fit blk\.0\.ffn_gate_inp\.weight, which has 7 rows"),
        ("qwen3moe", "expert_feed_forward_length", 31, r"ffn_gate_exps\.weight: shape \[224, 64\], expected \[217"),
        ("qwen3moe", "expert_group_count", 2, r"qwen3moe\.expert_group_count: 2 is not supported; supported: 1"),
        ("qwen3", "expert_count", 4, r"qwen3\.expert_count: 4, but mixtures of experts are not supported here"),
        ("llama", "expert_count", 4, r"llama\.expert_used_count: missing, expected an integer between 1 and 4"),
    ],
)  # fmt: skip
def test_wrong_keys_are_named(tmp_path: Path, arch: str, key: str, value: int, message: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, arch, metadata={f"{arch}.{key}": value})
    with pytest.raises(GGUFError, match=message):
        load(path)


def test_missing_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, "qwen3moe")
    gguf = GGUFFile(path)
    del gguf.metadata["qwen3moe.expert_count"]
    message = (
        r"expert_count: missing, which means 0, does not fit blk\.0\.ffn_gate_inp\.weight, which has 7 rows"
    )
    with pytest.raises(GGUFError, match=message):
        ModelConfig.from_gguf(gguf)


@pytest.mark.parametrize(
    ("arch", "tensor", "message"),
    [
        ("gpt-oss", "blk.1.ffn_up_exps.weight", r"blk\.1\.ffn_up_exps\.weight: tensor is missing"),
        ("gpt-oss", "blk.0.ffn_up_exps.bias", r"blk\.0\.ffn_gate_exps\.bias: some of the matrices beside it"),
        ("gpt-oss", "blk.0.attn_sinks.weight", r"blk\.0\.attn_sinks\.weight: tensor is missing"),
        ("gpt-oss", "blk.0.post_attention_norm.weight", r"blk\.0\.post_attention_norm\.weight: tensor is miss"),
        ("qwen2moe", "blk.0.ffn_gate_inp.weight", r"blk\.0\.ffn_gate_inp\.weight: tensor is missing"),
        ("gpt-oss", "blk.1.ffn_down_exps.bias", r"blk\.1\.ffn_down_exps\.bias: tensor is missing, other layers"),
        ("gpt-oss", "blk.0.ffn_gate_inp.bias", r"blk\.0\.ffn_gate_inp\.bias: tensor is missing, other layers"),
        ("qwen2moe", "blk.1.ffn_gate_inp_shexp.weight", r"blk\.1\.ffn_gate_inp_shexp\.weight: tensor is missing,"),
        ("qwen2moe", "blk.0.ffn_down_shexp.weight", r"blk\.0\.ffn_down_shexp\.weight: tensor is missing"),
    ],
)  # fmt: skip
def test_missing_tensor_is_named(tmp_path: Path, arch: str, tensor: str, message: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, arch, tied=False)
    gguf = GGUFFile(path)
    del gguf.tensors[tensor]
    with pytest.raises(GGUFError, match=message):
        ModelRunner(gguf, ModelConfig.from_gguf(gguf), EngineConfig(num_blocks=4))


def test_tensor_of_another_number_of_experts_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, "qwen3moe")
    gguf = GGUFFile(path)
    tensor = gguf.tensors["blk.0.ffn_up_exps.weight"]
    swapped = type(tensor)(tensor.name, tensor.type, tensor.type_id, (32, 7, 64), tensor.data)
    gguf.tensors[tensor.name] = swapped
    config = ModelConfig.from_gguf(gguf)
    with pytest.raises(GGUFError, match=r"blk\.0\.ffn_up_exps\.weight: of 32 experts, expected 7"):
        ModelRunner(gguf, config, EngineConfig(num_blocks=4))


def test_experts_in_one_matrix_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, "qwen3moe")
    gguf = GGUFFile(path)
    tensor = gguf.tensors["blk.0.ffn_up_exps.weight"]
    flat = (tensor.shape[0] * tensor.shape[1], tensor.shape[2])
    gguf.tensors[tensor.name] = type(tensor)(tensor.name, tensor.type, tensor.type_id, flat, tensor.data)
    with pytest.raises(GGUFError, match=r"blk\.0\.ffn_up_exps\.weight: of 1 experts, expected 7"):
        ModelRunner(gguf, ModelConfig.from_gguf(gguf), EngineConfig(num_blocks=4))
