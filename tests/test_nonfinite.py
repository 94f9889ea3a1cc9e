"""What is no finite number never passes for one: a file with it is refused, or it reaches the logits and ends its own
request with an error."""

import re
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GGMLType
from numpy.typing import NDArray
from random_weights import BLOCK_FIELDS, random_weights, write_d
from reference import UNGATED
from tiny_gguf import VOCAB, write_tiny_model

from rvllm import LLM, SamplingParams, _core
from rvllm._core import ops
from rvllm.config import EngineConfig, ModelConfig
from rvllm.gguf_file import GGUFError, GGUFFile
from rvllm.model_runner import ModelRunner

ISAS = _core.available_isas()
POISON = VOCAB  # a token of the poisoned models whose embedding holds one infinite element

Array = NDArray[np.float32]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q6_K", "F16", "F32"])
def test_linear_passes_on_any_element(isa: str, value: float, name: str) -> None:
    kind, n, k, rows = GGMLType[name], 20, 256, 256
    weight = random_weights(kind, n, k, 0.1, np.random.default_rng(0)).tobytes()
    backend = _core.CpuBackend(1, isa)
    x = normal(2 * rows, k)
    expected = ops.linear(backend, int(kind), n, weight, x)
    x[np.arange(rows) * 2, np.arange(rows)] = value  # every second row, each at another element
    out = ops.linear(backend, int(kind), n, weight, x)
    assert not np.isfinite(out[::2]).any()
    np.testing.assert_array_equal(out[1::2], expected[1::2])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("kv_type", _core.KVType.__members__.values(), ids=lambda t: t.name)
def test_attention_passes_on_any_element(isa: str, value: float, which: str, kv_type: _core.KVType) -> None:
    context, heads, dim = 300, 2, 64
    backend = _core.CpuBackend(1, isa)
    slots = np.arange(context)
    for at in (0, 17, 255, 256, 299):
        for d in (0, 31, 63):
            arrays = {name: normal(context, heads * dim, seed=i) for i, name in enumerate("qkv")}
            arrays[which][at, dim + d] = value  # in the second head
            out = ops.attention(
                backend, *arrays.values(), slots, slots, np.array([0, context]), np.array([context]),
                np.arange(-(-context // 16))[None], 20, 16, heads, heads, kv_type=kv_type,
            )  # fmt: skip
            out = out.reshape(context, heads, dim)
            assert np.isfinite(out[:, 0]).all()
            seen = out[at : at + 1, 1] if which == "q" else out[at:, 1]
            assert not np.isfinite(seen[:, d] if which == "v" else seen).any()


@pytest.mark.parametrize("isa", ISAS)
def test_elementwise_operations_pass_on_any_element(isa: str) -> None:
    n = 64
    backend, one, poison = _core.CpuBackend(1, isa), normal(n, n), normal(n, n, seed=1)
    np.fill_diagonal(poison, np.nan)
    assert np.isnan(np.diag(ops.add(backend, one, poison))).all()
    assert np.isnan(np.diag(ops.scale_logits(backend, poison, 0.5, 30.0))).all()
    for kind in (ops.NormKind.rms, ops.NormKind.layer):
        assert np.isnan(ops.norm(backend, poison, np.ones(n, np.float32), 1e-5, None, kind)).all()
    for activation in ops.Activation.__members__.values():
        inputs = [np.hstack([poison, one]), np.hstack([one, poison])]
        for x in [poison] if activation.name in UNGATED else inputs:
            for name in ("F32", "Q8_0"):  # a NaN reaches every output of its row, however small its weight
                weight = random_weights(GGMLType[name], 3, n, 1.0, np.random.default_rng(0)).tobytes()
                out = ops.activated_linear(backend, int(GGMLType[name]), 3, weight, x, activation)
                assert np.isnan(out).all()


def test_the_sampler_finds_any_logit() -> None:
    for value in (np.nan, np.inf, -np.inf):
        for at in (0, 15, 16, 30, 36):
            logits = normal(37)
            logits[at] = value
            with pytest.raises(RuntimeError, match="the model's logits are not finite numbers"):
                _core.Sampler(vocab_size=37, temperature=0.0).sample(logits)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("arch", "quant", "more"),
    [("llama", "Q8_0", {}), ("gemma3", "Q4_0", {"layers": 3, "sliding_window": 8}), ("qwen3", "F16", {})],
)
def test_only_the_request_that_meets_it_ends(
    tmp_path: Path, isa: str, arch: str, quant: str, more: dict[str, int]
) -> None:
    path = tmp_path / "poisoned.gguf"
    write_tiny_model(
        path, arch, {"token_embd*": "F32", "*": quant}, vocab=VOCAB + 1, tied=False, poisoned_token=POISON, **more
    )  # fmt: skip
    llm = LLM(path, isa=isa, num_blocks=64)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    healthy = [[1, 2, 3], list(range(40)), [7] * 17]
    expected = [output.outputs for output in llm.generate(healthy, params)]
    sick = [POISON, *range(1, 7)]  # the last token computed is another one, and sees it in the cache
    for prompts, ends in (([*healthy, sick], 3), ([sick, *healthy], 0)):
        outputs = llm.generate(prompts, params)
        bad = outputs.pop(ends).outputs[0]
        assert (bad.finish_reason, bad.token_ids, bad.text) == ("error", [], "")
        assert bad.error == "the model's logits are not finite numbers"
        assert [output.outputs for output in outputs] == expected
    assert llm.engine.stats.free_blocks == 64
    llm.engine.scheduler.check_integrity()


def spoil(data: Array | NDArray[np.uint8], kind: GGMLType, at: int, value: float) -> bytes:
    """Weights in which the scale of block `at`, or weight `at`, is value."""
    if kind not in BLOCK_FIELDS:
        words = {GGMLType.F32: "<f4", GGMLType.F16: "<f2"}.get(kind, "<u2")
        flat = data.reshape(-1).view(words).copy()
        flat[at] = 0x7F80 if kind == GGMLType.BF16 else value
        return flat.tobytes()
    blocks = data.reshape(-1, GGML_QUANT_SIZES[kind][1]).copy()
    if kind == GGMLType.MXFP4:
        blocks[at, 0] = 255
    else:
        with np.errstate(invalid="ignore"):
            write_d(kind, blocks[at : at + 1], np.array([value]))
    return blocks.tobytes()


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("kind", [GGMLType.F32, GGMLType.F16, GGMLType.BF16, *BLOCK_FIELDS])
def test_weights_are_checked_as_they_are_loaded(kind: GGMLType, value: float) -> None:
    n, k = 40, 512
    backend, x = _core.CpuBackend(2), normal(1, k)
    weight = random_weights(kind, n, k, 0.1, np.random.default_rng(0))
    ops.linear(backend, int(kind), n, weight.tobytes(), x)
    num_blocks = n * k // GGML_QUANT_SIZES[kind][0]
    for at in (0, num_blocks // 2 + 1, num_blocks - 1):
        with pytest.raises(ValueError, match="holds NaN or infinity, so no answer would be right"):
            ops.linear(backend, int(kind), n, spoil(weight, kind, at, value), x)


@pytest.mark.parametrize("offset", [2, 82])
def test_minimums_are_checked_as_well(offset: int) -> None:
    kind = GGMLType.Q4_1 if offset == 2 else GGMLType.Q2_K
    weight = random_weights(kind, 3, 256, 0.1, np.random.default_rng(0))
    weight[1, offset : offset + 2] = np.array([np.inf], "<f2").view(np.uint8)
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        ops.linear(_core.CpuBackend(1), int(kind), 3, weight.tobytes(), normal(1, 256))


@pytest.mark.parametrize("name", ["blk.1.attn_q.weight", "blk.0.attn_norm.weight", "token_embd.weight"])
def test_the_tensor_is_named(tmp_path: Path, name: str) -> None:
    write_tiny_model(tmp_path / "tiny.gguf")
    gguf = GGUFFile(tmp_path / "tiny.gguf")
    tensor = gguf.tensors[name]
    data = np.frombuffer(spoil(np.array(tensor.data), GGMLType.F32, 5, np.nan), np.uint8)
    gguf.tensors[name] = type(tensor)(name, tensor.type, tensor.type_id, tensor.shape, data)
    message = rf"tiny\.gguf: {re.escape(name)}: holds NaN or infinity, so no answer would be right"
    with pytest.raises(GGUFError, match=message):
        ModelRunner(gguf, ModelConfig.from_gguf(gguf), EngineConfig(num_blocks=4))
