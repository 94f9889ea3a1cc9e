"""Every architecture on a tiny model: logits equal the reference's and llama.cpp's, to the bit in any company."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import reference
from numpy.typing import NDArray
from runner_logits import get_logits
from tiny_architectures import ARCHITECTURES, LONG, LONG_CONTEXT, LONG_POSITIONS, PROMPT, long_prompt, write
from tiny_gguf import FAMILIES, write_tiny_model

from rvllm import LLM, SamplingParams, architectures
from rvllm._core import available_isas
from rvllm.config import EngineConfig, ModelConfig
from rvllm.gguf_file import GGUFError, GGUFFile
from rvllm.model_runner import ModelRunner
from rvllm.rope import RopeScaling, rope_table

SCRIPTS = Path(__file__).parents[1] / "scripts"
RECORDED = Path(__file__).parent / "data" / "llama_cpp_logits"
VOCAB_STEP = 4  # of the recorded logits

# Errors of one logit, in standard deviations of all. In float32, engines differ by the order of their additions.
TOLERANCE = 2e-4
# llama.cpp takes gelu from a table of float16, by its argument in float16.
GELU_TOLERANCE = 0.01
# Angles far out: llama.cpp multiplies theta up in float32, which 32,000 positions magnify.
LONG_TOLERANCE = 0.005

Float = NDArray[np.float32]


def load(path: Path, **config: object) -> ModelRunner:
    gguf = GGUFFile(path)
    settings = {"kv_cache_dtype": "f32", "dtype": "float32", "num_blocks": 16, **config}
    return ModelRunner(gguf, ModelConfig.from_gguf(gguf), EngineConfig(**settings))  # type: ignore[arg-type]


def logits(path: Path, token_ids: list[int] = PROMPT, **config: object) -> Float:
    runner = load(path, **config)
    return get_logits(runner, token_ids)


def assert_close(out: Float, expected: Float, tolerance: float) -> None:
    assert out.shape == expected.shape and np.isfinite(out).all()
    error = np.abs(out - expected).max() / expected.std()
    assert error < tolerance, f"an error of {error:.2g} standard deviations"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_the_reference(tmp_path: Path, name: str) -> None:
    path = write(name, tmp_path)
    expected = reference.forward(path, PROMPT)
    assert_close(logits(path), expected, TOLERANCE)
    assert len(set(expected.argmax(1))) > 8  # a model that says one thing shows little


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_llama_cpp(tmp_path: Path, name: str) -> None:
    out = logits(write(name, tmp_path))[:, ::VOCAB_STEP]
    recorded = np.load(RECORDED / f"{name}.npz")["logits"]
    gelu = architectures.ARCHITECTURES[ARCHITECTURES[name]["arch"]].activation.startswith("gelu")
    assert_close(out, recorded, GELU_TOLERANCE if gelu else TOLERANCE)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recorded_logits_are_llama_cpps(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    from make_llama_cpp_logits import model_logits

    recorded = np.load(RECORDED / f"{name}.npz")["logits"]
    assert_close(model_logits(name, write(name, tmp_path)), recorded, TOLERANCE)


def test_every_architecture_has_a_tiny_model_and_recorded_logits() -> None:
    archs = {arguments["arch"] for arguments in ARCHITECTURES.values()}
    assert set(FAMILIES) <= archs <= set(architectures.ARCHITECTURES)
    assert {path.stem for path in RECORDED.glob("*.npz")} == {*ARCHITECTURES, *LONG}


def test_the_docs_list_every_architecture() -> None:
    page = Path(__file__).parents[1] / "docs" / "models.md"
    if not page.exists():
        pytest.skip("the docs are not beside the tests")
    listed = re.findall(r"^\| `([\w-]+)` \|", page.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(architectures.ARCHITECTURES)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_chunks_company_and_processor_change_no_bit(tmp_path: Path, name: str) -> None:
    path = write(name, tmp_path)
    alone = logits(path)
    for chunk in (1, 7, 32):
        np.testing.assert_array_equal(logits(path, max_num_batched_tokens=chunk), alone)
    for isa in available_isas():
        np.testing.assert_array_equal(logits(path, isa=isa), alone)
    prompts = [PROMPT, PROMPT[:1], PROMPT[3:30], PROMPT[:20] + PROMPT[30:]]
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=6, logprobs=3, prompt_logprobs=1, ignore_eos=True
    )
    settings = {"num_threads": 2, "max_num_batched_tokens": 48, "enable_prefix_caching": False}
    llm = LLM(path, num_blocks=64, **settings)  # type: ignore[arg-type]
    together = llm.generate(prompts, params)
    for prompt, output in zip(prompts, together, strict=True):
        (single,) = llm.generate([prompt], params)
        assert (single.outputs, single.prompt_logprobs) == (output.outputs, output.prompt_logprobs)


# RoPE far out


def tables(path: Path, max_model_len: int | None = None) -> ModelConfig:
    return ModelConfig.from_gguf(GGUFFile(path), max_model_len)


@pytest.mark.parametrize("name", [*ARCHITECTURES, *LONG])
def test_angles_equal_the_references_up_to_32k(tmp_path: Path, name: str) -> None:
    path = write(name, tmp_path)
    positions = np.array([*range(0, 300, 7), *LONG_POSITIONS])[:, None]
    for max_model_len in (None, 64):  # of Phi 3's, the long factors and the short ones
        config = tables(path, max_model_len)
        transformer = reference.Transformer(path, max_model_len)
        for layer, (index, window) in enumerate(config.layers):
            assert (index >= 0) == transformer.has_rope(layer)
            assert (window > 0) == transformer.is_local(layer)
            if index >= 0:
                table = config.rope_tables[index]
                frequencies, magnitude = transformer.rope_frequencies(window > 0, config.head_dim)
                assert table.scale == pytest.approx(magnitude, rel=1e-6)
                np.testing.assert_allclose(positions * table.inv_freq, positions * frequencies, atol=2e-3)


@pytest.mark.parametrize("name", LONG)
def test_logits_equal_llama_cpp_up_to_32k(tmp_path: Path, name: str) -> None:
    runner = load(write(name, tmp_path), num_blocks=LONG_CONTEXT // 256, block_size=256)
    out = get_logits(runner, long_prompt())[list(LONG_POSITIONS), ::VOCAB_STEP]
    assert_close(out, np.load(RECORDED / f"{name}.npz")["logits"], LONG_TOLERANCE)
    # What another scaling would make of the same tokens is much further away.
    others = [np.load(RECORDED / f"{other}.npz")["logits"] for other in LONG if other != name]
    assert min(np.abs(other - out).max() / out.std() for other in others) > 0.5


def test_yarn_by_hand() -> None:
    scaling = RopeScaling("yarn", factor=4.0, original_context_length=4096)
    table = rope_table(64, 10_000.0, scaling)
    plain = 10_000.0 ** (-np.arange(0, 64, 2) / 64)
    ratio = np.array(table.inv_freq) / plain
    # Pairs 0..10 turn more than 32 times within 4096 tokens, from the 23rd on they turn less than once.
    turns = 4096 * plain / (2 * np.pi)
    np.testing.assert_allclose(ratio[turns > 32][:-1], 1)
    np.testing.assert_allclose(ratio[turns < 1][1:], 0.25)
    assert (np.diff(ratio) <= 0).all()
    assert table.scale == pytest.approx(1 + 0.1 * np.log(4))
    assert rope_table(64, 10_000.0, scaling._replace(log_multiplier=1.0)).scale == pytest.approx(1.0)


def test_phi3_takes_the_long_factors_when_contexts_may_be_long(tmp_path: Path) -> None:
    path = write("phi3-long", tmp_path)
    short, long = tables(path, 256), tables(path, 257)
    assert tables(path) == long
    for config, name in ((short, "short"), (long, "long")):
        factors = ARCHITECTURES["phi3-long"]["rope_factors"][name]
        plain = 10_000.0 ** (-np.arange(0, 16, 2) / 16)
        np.testing.assert_allclose(config.rope_tables[0].inv_freq, plain / factors, rtol=1e-6)
        assert config.rope_tables[0].scale == pytest.approx(1.19)


# What a file says, and what is refused


def test_windows_and_rope_of_layers(tmp_path: Path) -> None:
    for name, layers in {
        "cohere2": [(0, 12), (0, 12), (0, 12), (-1, 0), (0, 12)],
        "olmo3": [(1, 12), (1, 12), (1, 12), (0, 0), (1, 12)],
        "gemma2": [(0, 12), (0, 0), (0, 12), (0, 0)],
        "smollm3": [(0, 0), (0, 0), (0, 0), (-1, 0), (0, 0)],
        "exaone4": [(0, 0), (0, 0)],
        "granite-no-rope": [(-1, 0), (-1, 0)],
    }.items():
        assert list(tables(write(name, tmp_path)).layers) == layers
    write_tiny_model(tmp_path / "mistral.gguf", "llama", sliding_window=12)
    assert tables(tmp_path / "mistral.gguf").layers == ((0, 12), (0, 12))
    write_tiny_model(tmp_path / "gemma2.gguf", "gemma2", family=FAMILIES["gemma2"]._replace(keys={}))
    config = tables(tmp_path / "gemma2.gguf")
    assert config.layers == ((0, 4096), (0, 0))
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)


@pytest.mark.parametrize("arch", ["llama", "phi3", "qwen2"])
def test_any_model_may_have_a_window(tmp_path: Path, arch: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, arch, sliding_window=9)
    assert_close(logits(path), reference.forward(path, PROMPT), TOLERANCE)
    write_tiny_model(tmp_path / "full.gguf", arch)
    assert np.abs(logits(tmp_path / "full.gguf") - logits(path)).max() > 0.1


def test_temperature_needs_rope_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, "mistral3", rope_dim=8)
    with pytest.raises(GGUFError, match=r"attention\.temperature_scale: is not supported where RoPE leaves"):
        tables(path)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    for name, tensor in (
        ("phi3", "blk.0.attn_qkv.weight"),
        ("phi3", "blk.0.ffn_up.weight"),
        ("olmo2", "blk.0.attn_q_norm.weight"),
        ("exaone4", "blk.1.post_ffw_norm.weight"),
        ("starcoder2", "blk.0.ffn_up.weight"),
        ("llama", "blk.0.ffn_norm.weight"),
        ("llama", "blk.0.ffn_gate.weight"),
        ("starcoder2", "blk.1.attn_output.bias"),
        ("stablelm", "blk.0.attn_norm.bias"),
        ("stablelm", "output_norm.bias"),
    ):
        gguf = GGUFFile(write(name, tmp_path))
        del gguf.tensors[tensor]
        missing = tensor.replace("attn_qkv", "attn_q").replace(
            "ffn_up", "ffn_gate" if name == "phi3" else "ffn_up"
        )
        with pytest.raises(GGUFError, match=rf"{missing}: tensor is missing"):
            ModelRunner(gguf, ModelConfig.from_gguf(gguf), EngineConfig(num_blocks=4))


def test_misshapen_fused_tensors_are_named(tmp_path: Path) -> None:
    gguf = GGUFFile(write("phi3", tmp_path))
    gguf.tensors["blk.0.attn_qkv.weight"] = gguf.tensors["blk.0.ffn_up.weight"]
    with pytest.raises(GGUFError, match=r"blk\.0\.attn_qkv\.weight: shape \[192, 64\], expected \[128, 64\]"):
        ModelRunner(gguf, ModelConfig.from_gguf(gguf), EngineConfig(num_blocks=4))
