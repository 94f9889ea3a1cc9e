"""Hyper-parameters of a file are checked against their limits and its tensors; settings against theirs."""

import math
from pathlib import Path

import numpy as np
import pytest
from gguf_writer import Typed
from tiny_gguf import write_tiny_model

from rvllm.config import EngineConfig, ModelConfig
from rvllm.gguf_file import GGUFError, GGUFFile

ARRAY, BOOL = 9, 7


def config(path: Path, drop: str | None = None, **changes: object) -> ModelConfig:
    """Config of a tiny model whose keys are changed: underscores stand for dots."""
    write_tiny_model(path, hidden=96, heads=6, kv_heads=2)
    gguf = GGUFFile(path)
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        del gguf.metadata[f"llama.{key}"]
    if drop:
        del gguf.metadata[f"llama.{drop}"]
    for key, value in changes.items():
        gguf.metadata[f"llama.{key}"] = value
    return ModelConfig.from_gguf(gguf)


def test_a_good_file(tmp_path: Path) -> None:
    c = config(tmp_path / "m.gguf")
    assert (c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim) == (2, 96, 6, 2, 16)
    assert (c.intermediate_size, c.context_length, c.layers) == (96, 512, ((0, 0), (0, 0)))
    assert c.attention_scale == 0.25
    np.testing.assert_allclose(c.rope_tables[0].inv_freq, 10_000.0 ** -(np.arange(0, 16, 2) / 16))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("attention.head_count", v) for v in (0, 7, 2**31, -1, "6", 6.0, True)],
        *[("attention.head_count_kv", v) for v in (0, 3, 4, 12)],
        *[("block_count", v) for v in (0, 1, 3, 10**9, "2")],
        *[("embedding_length", v) for v in (0, 97, 192)],
        *[("feed_forward_length", v) for v in (0, 1, 95)],
        *[("context_length", v) for v in (0, -5, "512")],
        *[("attention.layer_norm_rms_epsilon", v) for v in (0.0, -1e-5, math.nan, math.inf, "1e-5")],
        *[("rope.freq_base", v) for v in (0.0, -1.0, math.nan)],
        *[("rope.dimension_count", v) for v in (0, 15, 17, 32, 128)],
        *[("attention.key_length", v) for v in (0, 32, 15)],
        ("attention.value_length", 8),
        ("rope.scaling.type", "dynamic"),
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.factor", -1.0),
        ("rope.scaling.factor", False),
        ("attention.scale", -1.0),
        ("rope.scaling.yarn_ext_factor", 0.5),
        ("rope.scaling.yarn_attn_factor", 0.5),
        ("attention.causal", False),
        ("attention.clamp_kqv", 8.0),
        ("attention.clamp_kqv", np.array([0.0, 0.0])),
        ("attention.max_alibi_bias", "0"),
        ("attention.layer_norm_rms_epsilon", 1e-45),
        ("attention.layer_norm_rms_epsilon", 1e38),
        ("final_logit_softcapping", 1e39),
        ("logit_scale", 1e-45),
        ("expert_gating_func", 2),
        ("expert_weights_scale", 2.5),
        ("expert_weights_norm", False),
        ("rope.dimension_sections", np.array([16, 24, 24, 0], np.int32)),
        ("attention.sliding_window", -1),
        ("attention.temperature_scale", -0.1),
        ("final_logit_softcapping", -30.0),
        ("attention.head_count", np.array([6] * 3)),
        ("attention.head_count", np.array([6, 5])),
        ("attention.head_count", np.array([6.0, 6.0])),
        ("block_count", np.array([2])),
        ("block_count", np.array([2, 2])),
        ("block_count", "x" * 10**6),
        ("rope.scaling.type", np.array([5, 6])),
    ],
)
def test_bad_hyper_parameter_is_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(GGUFError) as error:
        config(tmp_path / "m.gguf", **{key: value})
    message = str(error.value)
    assert "\n" not in message and str(tmp_path) in message and len(message) < 400
    assert key in message


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear", "attention.scale"])
@pytest.mark.parametrize("zero", [0, 0.0])
def test_zero_that_means_not_given(tmp_path: Path, key: str, zero: float) -> None:
    assert config(tmp_path / "m.gguf", **{key: zero}) == config(tmp_path / "n.gguf")


def test_usual_ways_are_no_problem(tmp_path: Path) -> None:
    usual = {"expert_gating_func": 1, "expert_weights_scale": 1.0, "expert_weights_norm": True}
    assert config(tmp_path / "m.gguf", **usual) == config(tmp_path / "n.gguf")


@pytest.mark.parametrize("base", [0.5, 1.0])
def test_yarn_needs_a_base_above_1(tmp_path: Path, base: float) -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    with pytest.raises(GGUFError, match=rf"llama\.rope\.freq_base: {base:g} is not above 1"):
        config(tmp_path / "m.gguf", **yarn, **{"rope.freq_base": base})
    assert config(tmp_path / "m.gguf", **{"rope.freq_base": base}).rope_tables[0].inv_freq[0] == 1
    swa = {"attention.sliding_window": 8, "rope.freq_base_swa": base}
    with pytest.raises(GGUFError, match=rf"llama\.rope\.freq_base_swa: {base:g} is not above 1"):
        config(tmp_path / "m.gguf", **yarn, **swa)


@pytest.mark.parametrize(
    "key", ["attention.layer_norm_rms_epsilon", "block_count", "feed_forward_length", "context_length"]
)
def test_missing_hyper_parameter_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(GGUFError, match=f"llama.{key}: missing"):
        config(tmp_path / "m.gguf", drop=key)


def test_absent_kv_heads_must_fit_the_tensors(tmp_path: Path) -> None:
    with pytest.raises(
        GGUFError, match=r"head_count_kv: 6 of attention.key_length 16 does not fit blk.0.attn_k.weight"
    ):
        config(tmp_path / "m.gguf", drop="attention.head_count_kv")


def test_defaults(tmp_path: Path) -> None:
    assert config(tmp_path / "m.gguf", drop="rope.freq_base").rope_tables[0].inv_freq[1] == pytest.approx(
        10_000 ** (-1 / 8)
    )
    per_layer = {"attention.head_count": np.array([6, 6], np.uint32)}
    assert config(tmp_path / "m.gguf", **per_layer).num_heads == 6
    assert config(tmp_path / "m.gguf", context_length=2**40).context_length == 2**30


def test_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_model(path)
    gguf = GGUFFile(path)
    gguf.metadata["general.architecture"] = "nope"
    with pytest.raises(
        GGUFError,
        match=r"general\.architecture: 'nope' is not supported; supported: arcee, .* llama, .*qwen2",
    ):
        ModelConfig.from_gguf(gguf)


def test_vocabulary_must_fit_the_embedding(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_model(path)
    gguf = GGUFFile(path)
    gguf.metadata["tokenizer.ggml.tokens"] = gguf.metadata["tokenizer.ggml.tokens"][:-1]
    with pytest.raises(
        GGUFError, match=r"tokenizer\.ggml\.tokens: 25. tokens, but token_embd\.weight has 26. rows"
    ):
        ModelConfig.from_gguf(gguf)


@pytest.mark.parametrize("factors", [[1.0] * 7, [1.0] * 9, [0.0] * 8, [math.nan] * 8, [1e-45] * 8])
def test_rope_factors_are_checked(tmp_path: Path, factors: list[float]) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_model(path, rope_freqs=factors)
    with pytest.raises(GGUFError, match=r"rope_freqs\.weight"):
        ModelConfig.from_gguf(GGUFFile(path))


def test_gemma3_layers(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    metadata = {"gemma3.rope.freq_base": 1e6}
    write_tiny_model(path, arch="gemma3", layers=7, sliding_window=24, metadata=metadata)
    c = ModelConfig.from_gguf(GGUFFile(path))
    assert c.layers == ((1, 24),) * 5 + ((0, 0), (1, 24))
    assert c.embedding_scale == 8.0 and c.activation == "gelu_gated" and c.qk_norm == "head"
    assert c.post_norms and not c.rope_interleaved


def test_gemma3_27b_scales_by_the_width_of_a_query_head(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for layers, scale in ((61, 1 / 8), (62, 1 / 4)):
        write_tiny_model(path, arch="gemma3", hidden=64, heads=4, head_dim=64, layers=layers)
        assert ModelConfig.from_gguf(GGUFFile(path)).attention_scale == scale


def test_gemma3_layers_may_be_listed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for pattern, local in (
        (2, [True, False, True]),
        (Typed(ARRAY, Typed(BOOL, [False, True, True])), [False, True, True]),
    ):
        write_tiny_model(
            path, arch="gemma3", layers=3, sliding_window=24,
            metadata={"gemma3.attention.sliding_window_pattern": pattern},
        )  # fmt: skip
        assert [window > 0 for _, window in ModelConfig.from_gguf(GGUFFile(path)).layers] == local
        gguf = GGUFFile(path)
    gguf.metadata["gemma3.attention.sliding_window_pattern"] = np.array([True])
    with pytest.raises(GGUFError, match="sliding_window_pattern: 1 values for 3 layers"):
        ModelConfig.from_gguf(gguf)


@pytest.mark.parametrize(
    ("setting", "value", "limit"),
    [
        ("block_size", 0, "between 1 and 4096, not 0"),
        ("max_num_seqs", -1, "not -1"),
        ("max_num_batched_tokens", 0, "not 0"),
        ("max_model_len", 0, "not 0"),
        ("num_blocks", 0, "not 0"),
        ("num_threads", 0, "not 0"),
        ("kv_cache_memory", 0, "not 0"),
        ("kv_cache_dtype", "fp8", "one of f16, f32, bf16, q8_0, not 'fp8'"),
        ("seed", -1, "not -1"),
        ("max_num_seqs", 1.5, "an integer, not 1.5"),
        ("max_num_seqs", True, "an integer, not True"),
        ("block_size", None, "an integer, not None"),
        ("gpu_memory_utilization", 0.0, "above 0 and at most 1, not 0.0"),
        ("gpu_memory_utilization", True, "not True"),
        ("isa", 5, "of type str, not 5"),
        ("enable_prefix_caching", "no", "of type bool, not 'no'"),
    ],
)
def test_bad_setting_is_named(setting: str, value: object, limit: str) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be .*{limit}"):
        EngineConfig(**{setting: value})  # type: ignore[arg-type]


def test_a_setting_of_gpus_is_refused_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="gpu_memory_utilization is a setting of devices 'cuda' and 'metal'"):
        EngineConfig(gpu_memory_utilization=0.9)
    assert EngineConfig(device="cuda", gpu_memory_utilization=0.5).gpu_memory_utilization == 0.5
