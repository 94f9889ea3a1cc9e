"""Steps of the CUDA backend: replayed as graphs, single tokens and the best of them, and the choice of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import CPU, DEVICES, VARIANT, Device, use_cuda
from gguf import GGMLQuantizationType as GGMLType
from test_ops import Step, normal
from tiny_gguf import write_tiny_model

from rvllm import LLM, SamplingParams, _core
from rvllm._core import ops


@pytest.fixture(params=[d for d in DEVICES if d != CPU], ids=lambda device: device.name)
def device(request: pytest.FixtureRequest) -> Device:
    return request.param


@pytest.fixture
def backend(device: Device, monkeypatch: pytest.MonkeyPatch) -> Any:
    return device.backend(monkeypatch)


@pytest.mark.parametrize("num_experts", [1, 17, 128])
def test_experts_that_are_chosen(backend: Any, num_experts: int) -> None:
    """Each expert gives a one at its place; some logits are alike."""
    ones = int(GGMLType.F32), num_experts, np.eye(num_experts, dtype=np.float32)[:, :, None].tobytes(), None
    logits = np.round(normal(20, num_experts), 1)
    for normalized in (True, False):
        args = logits, min(num_experts, 8), normalized, np.ones((20, 1), np.float32), ones
        np.testing.assert_array_equal(
            ops.mixture(backend, *args), ops.mixture(_core.CpuBackend(1, "scalar"), *args)
        )


@pytest.mark.parametrize("n", [3, 31, 1000, 4099])
def test_argmax(backend: Any, n: int) -> None:
    x = normal(9, n)
    x[1] = -7.0  # all alike
    x[2, n // 2], x[3, n - 1], x[4, 0] = 99.0, 99.0, 99.0
    x[5, n // 3 :] = 50.0  # the first of equals
    for row, value in ((6, np.nan), (7, np.inf), (8, -np.inf)):
        x[row, n // 2] = value
    np.testing.assert_array_equal(ops.argmax(backend, x), [*x[:6].argmax(axis=1), -1, -1, -1])


# One query row a unit, up to 4, 8 and 16 of them, and more than one unit for the heads of a KV head.
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 2, 80), (6, 2, 96), (8, 1, 128), (16, 1, 64), (21, 1, 32)]
)
def test_attention_of_single_tokens(backend: Any, heads: int, kv_heads: int, dim: int) -> None:
    step = Step([1, 1, 1], [300, 16, 1], 16, heads, kv_heads, dim)
    scalar = _core.CpuBackend(1, "scalar")
    for window in (0, 40):
        for out, expected in zip(
            step.attend_last(backend, window), step.attend_last(scalar, window), strict=True
        ):
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("window", [0, 300])
def test_attention_of_the_last_tokens_of_long_contexts(backend: Any, window: int) -> None:
    """With the window, the first tokens of a chunk see a partition of positions that later ones do not."""
    step = Step([17, 3, 1], [566, 260, 20], 16, 4, 2, 32)
    positions = [np.arange(n - count, n) for n, count in zip(step.contexts, step.queries, strict=True)]
    slots = [
        table[np.arange(n) // 16] * 16 + np.arange(n) % 16
        for n, table in zip(step.contexts, step.tables, strict=True)
    ]
    args = (
        np.vstack(step.q), np.vstack(step.k), np.vstack(step.v), np.concatenate(positions), np.concatenate(slots),
        np.cumsum([0, *step.queries]), np.array(step.contexts), step.tables, step.num_blocks, 16, 4, 2, window,
    )  # fmt: skip
    np.testing.assert_array_equal(
        ops.attention(backend, *args), ops.attention(_core.CpuBackend(1, "scalar"), *args)
    )


@pytest.mark.skipif(VARIANT == "tsan", reason="a hundred times slower")
def test_steps_are_replayed_with_the_same_tokens(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy requests, of which ids alone come down, beside others; the CPU's tokens, half of the steps replayed."""
    path = tmp_path / "model.gguf"
    write_tiny_model(path, quant={"*.attn_v.*": "F16", "*.ffn_down.*": "Q6_K", "*": "Q4_0"})
    prompts = [list(range(5, 5 + n)) for n in (1, 12, 5)]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    sampled = SamplingParams(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True)
    use_cuda(device, monkeypatch)
    settings = {"num_threads": 1, "max_num_batched_tokens": 16, "max_model_len": 64}
    cpu, cuda = (LLM(path, device=name, **settings) for name in ("cpu", "cuda"))
    for params in ([greedy] * 3, [greedy, sampled, greedy]):
        tokens, expected = (
            [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            for llm in (cuda, cpu)
        )
        assert tokens == expected
    assert cuda.engine.runner.backend.num_replayed > cuda.engine.stats.steps / 4
