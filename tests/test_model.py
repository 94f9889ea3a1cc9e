"""The whole transformer on tiny models: near the reference, and the same bits on every ISA, in any company."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reference
from gguf import GGML_QUANT_SIZES as BLOCK_SIZES
from gguf import GGMLQuantizationType as GGMLType
from numpy.typing import NDArray
from random_weights import BLOCK_FIELDS
from runner_logits import get_logits
from tiny_gguf import write_tiny_model

from rvllm import _core
from rvllm.config import EngineConfig, ModelConfig
from rvllm.gguf_file import GGML_TYPES, GGUFError, GGUFFile
from rvllm.model_runner import ModelRunner

ISAS = _core.available_isas()
TOKENS = [int(t) for t in np.random.default_rng(7).integers(0, 256, 70)]

MODELS = {
    "llama": {"arch": "llama"},
    "llama untied": {"arch": "llama", "tied": False},
    "llama heads of 32": {"arch": "llama", "head_dim": 32, "heads": 6, "kv_heads": 3},
    "llama rope_freqs": {"arch": "llama", "rope_freqs": [1, 1, 1, 1, 8, 8, 8, 8]},
    "llama linear rope": {
        "arch": "llama",
        "metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    },
    "qwen2": {"arch": "qwen2"},
    "qwen3": {"arch": "qwen3", "head_dim": 32},
    "gemma3": {"arch": "gemma3", "layers": 7, "sliding_window": 24, "kv_heads": 1},
}


def load(path: Path, **config: object) -> ModelRunner:
    gguf = GGUFFile(path)
    return ModelRunner(gguf, ModelConfig.from_gguf(gguf), EngineConfig(num_blocks=96, **config))  # type: ignore[arg-type]


def logits(path: Path, tokens: list[int] = TOKENS, **config: object) -> NDArray[np.float32]:
    return get_logits(load(path, **config), tokens)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_reference(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, **MODELS[name])
    out, expected = logits(path), reference.forward(path, TOKENS)
    # K and V are kept in f16, which is what is left of the difference.
    assert np.abs(out - expected).max() < 0.02 * expected.std()
    assert (out.argmax(1) == expected.argmax(1)).mean() > 0.95


@pytest.mark.parametrize("quant", ["F16", "BF16", *(kind.name for kind in BLOCK_FIELDS)])
def test_every_type_runs_a_whole_model(tmp_path: Path, quant: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, quant=quant)
    out, expected = logits(path), reference.forward(path, TOKENS, int8=True)
    # The reference quantizes activations as the kernels do, but a value at the edge of a step may fall either way.
    assert np.abs(out - expected).max() < 0.2 * expected.std()
    assert np.abs(out - expected).mean() < 0.02 * expected.std()


def test_types_may_be_mixed_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    quant = {
        "*.attn_v.*": "Q6_K",
        "*.attn_q.*": "Q4_0",
        "*.ffn_down.*": "F16",
        "token_embd*": "Q8_0",
        "*": "Q4_K",
    }
    write_tiny_model(path, quant=quant, tied=False)
    out, expected = logits(path), reference.forward(path, TOKENS, int8=True)
    assert np.abs(out - expected).mean() < 0.02 * expected.std()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_same_bits_on_every_isa_thread_count_and_chunk_size(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, quant="Q4_1", **MODELS[name])
    alone = logits(path, isa="scalar", num_threads=1)
    for isa in ISAS:
        for threads in (1, 2):
            np.testing.assert_array_equal(logits(path, isa=isa, num_threads=threads), alone)
    for chunk in (1, 7, 16, 33, 69):
        np.testing.assert_array_equal(logits(path, max_num_batched_tokens=chunk), alone)
    for block_size in (1, 5, 32):
        np.testing.assert_array_equal(logits(path, block_size=block_size), alone)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("blk.1.ffn_up.weight", r"blk\.1\.ffn_up\.weight: tensor is missing"),
        ("output_norm.weight", r"output_norm\.weight: tensor is missing"),
        ("token_embd.weight", r"token_embd\.weight: tensor is missing"),
        ("blk.0.attn_k.bias", r"blk\.0\.attn_q\.bias: some of the matrices beside it have a bias"),
    ],
)
def test_missing_tensor_is_named(tmp_path: Path, tensor: str, message: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, arch="qwen2")
    gguf = GGUFFile(path)
    del gguf.tensors[tensor]
    with pytest.raises(GGUFError, match=message):
        ModelRunner(gguf, ModelConfig.from_gguf(gguf), EngineConfig())


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K", "NVFP4", "Q1_0", "F64", "I8"])
def test_type_without_kernels_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path)
    gguf = GGUFFile(path)
    type_id = next(i for i, t in GGML_TYPES.items() if t.name == kind)
    name = "blk.0.ffn_up.weight"
    gguf.tensors[name] = replace(gguf.tensors[name], type=GGML_TYPES[type_id], type_id=type_id)
    with pytest.raises(
        GGUFError, match=rf"blk\.0\.ffn_up\.weight: type {kind} \({type_id}\) is not supported"
    ):
        ModelRunner(gguf, ModelConfig.from_gguf(gguf), EngineConfig(num_blocks=4))


@pytest.mark.parametrize("quant", ["IQ4_NL", "MXFP4", "IQ4_XS", "TQ1_0", "IQ2_S"])
def test_rows_of_half_a_block_are_refused(quant: str) -> None:
    kind, cols = GGMLType[quant], BLOCK_SIZES[GGMLType[quant]][0] // 2
    with pytest.raises(
        ValueError, match=f"rows of {cols} weights are no whole number of {quant} blocks of {2 * cols}"
    ):
        _core.ops.linear(_core.CpuBackend(1), int(kind), 1, b"", np.zeros((1, cols), np.float32))


@pytest.mark.parametrize(
    "name", ["foo", "blk.1.attn_norm.bias", "blk.0.attn_sinks.weight", "blk.0.attn_q.scale", "output.bias"]
)
def test_unused_tensor_is_named_beside_those_that_are_used(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path)
    gguf = GGUFFile(path)
    gguf.tensors[name] = gguf.tensors["output_norm.weight"]
    with pytest.raises(GGUFError, match=rf"{name}: llama models with such a tensor .*blk\.0\.attn_q\.weight"):
        ModelRunner(gguf, ModelConfig.from_gguf(gguf), EngineConfig(num_blocks=4))


def test_harmless_tensors_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path)
    gguf = GGUFFile(path)
    gguf.tensors["blk.0.attn_rot_embd.weight"] = gguf.tensors["output_norm.weight"]
    ModelRunner(gguf, ModelConfig.from_gguf(gguf), EngineConfig(num_blocks=4))


@pytest.mark.parametrize("quant", ["Q4_1", "Q6_K", "F16"])
def test_float32_computes_on_the_dequantized_weights(tmp_path: Path, quant: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, "qwen2", quant)
    expected = reference.forward(path, TOKENS)
    errors = [np.abs(logits(path, dtype=dtype) - expected) for dtype in ("auto", "float32")]
    assert errors[1].max() < 0.02 * expected.std()
    assert quant == "F16" or errors[1].mean() < 0.5 * errors[0].mean()


def test_bad_batches_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path)
    runner = load(path)
    for tokens, table, message in (
        ([1, 2, 999], [0], "token id 999 is outside the vocabulary"),
        ([1, 2, -1], [0], "token id -1 is outside the vocabulary"),
        ([1, 2, 3], [96], "slot 1536 is outside the 96 blocks of 16"),
        ([1, 2, 3], [-1], "slot -16 is outside the 96 blocks of 16"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.get_logits(tokens, 0, [table], 0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"device": "tpu"}, "device must be 'cpu', 'metal', 'cuda' or 'cuda:N', not 'tpu'"),
        ({"dtype": "int4"}, "dtype must be 'auto' or 'float32', not 'int4'"),
        ({"kv_cache_memory": 10}, "kv_cache_memory of 10 bytes is less than one block of"),
        ({"num_blocks": 2**29}, "a KV cache of 536870912 blocks needs"),
        ({"isa": "neon" if "neon" not in ISAS else "amx"}, "is not available here"),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, setting: dict[str, object], message: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path)
    gguf = GGUFFile(path)
    with pytest.raises(ValueError, match=message):
        ModelRunner(gguf, ModelConfig.from_gguf(gguf), EngineConfig(**setting))  # type: ignore[arg-type]
