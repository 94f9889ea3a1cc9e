"""Steps of the CUDA backend: replayed as graphs, single tokens and the best of them, and the choice of experts."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import CPU, DEVICES, VARIANT, Device, emulated_module, use_cuda
from gguf import GGMLQuantizationType as GGMLType
from test_ops import Step, argmax_rows, normal
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
    x = argmax_rows(n)
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
    """Greedy requests, of which ids alone come down, beside others; the CPU's tokens, most steps replayed."""
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
    assert cuda.engine.runner.backend.num_replayed > cuda.engine.stats.steps / 2


def step_arrays(*requests: tuple[int, int, list[int]], first_id: int = 3) -> _core.StepArrays:
    """Of each request (begin, end, table) the tokens at these positions; the logits of the last token of all."""
    positions = [position for begin, end, _ in requests for position in range(begin, end)]
    slots = [
        table[position // 16] * 16 + position % 16
        for begin, end, table in requests
        for position in range(begin, end)
    ]
    starts = np.cumsum([0, *(end - begin for begin, end, _ in requests)])
    arrays = (
        (np.arange(len(positions)) * 7 + first_id) % 50, positions, [slots], starts,
        [end for _, end, _ in requests], [[table for _, _, table in requests]], [len(positions) - 1],
    )  # fmt: skip
    return _core.StepArrays(*(np.array(a, np.int32) for a in arrays))


@pytest.fixture
def cuda(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    path = tmp_path / "model.gguf"
    write_tiny_model(path, quant={"*": "Q4_0"})
    use_cuda(device, monkeypatch)
    return LLM(path, device="cuda", num_threads=1, max_num_batched_tokens=32, max_model_len=64)


def test_a_step_is_not_replayed_with_block_tables_of_another_width(cuda: LLM) -> None:
    """Two prompts of a block each, and one of two blocks: alike in every length and address but this."""
    model = cuda.engine.runner._model
    narrow, wide = step_arrays((0, 16, [3]), (0, 16, [4])), step_arrays((0, 32, [5, 6]))
    expected = model.logits(narrow), model.logits(wide)
    assert (expected[0] != expected[1]).any()
    for _ in range(2):
        np.testing.assert_array_equal(model.logits(narrow), expected[0])
        np.testing.assert_array_equal(model.logits(wide), expected[1])
    assert cuda.engine.runner.backend.num_replayed > 0


def test_work_of_a_failed_step_is_not_done_by_the_next(cuda: LLM) -> None:
    """It would write other keys and values to the block that the next step reads."""
    runner = cuda.engine.runner
    model = runner._model
    prompt, other, last = (
        step_arrays((0, 8, [3])),
        step_arrays((0, 8, [3]), first_id=20),
        step_arrays((8, 9, [3])),
    )
    model.logits(prompt)
    expected = model.logits(last)

    def fail() -> None:
        raise InterruptedError

    sampler = runner.make_sampler(SamplingParams(temperature=0.0), [3], [], 0, 0)
    with pytest.raises(InterruptedError):
        model.step(other, [sampler], [], fail)
    np.testing.assert_array_equal(model.logits(last), expected)


def test_a_backend_works_with_its_own_device_in_every_thread(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new thread begins with device 0."""
    if not device.emulated:
        pytest.skip("needs two devices")
    monkeypatch.setenv("RVLLM_EMU_DEVICES", "2")
    backend = device.backend(monkeypatch, device=1)
    x, ones = normal(3, 64), np.ones(64, np.float32)
    with ThreadPoolExecutor(1) as pool:
        out = pool.submit(ops.norm, backend, x, ones, 1e-5).result()
    np.testing.assert_array_equal(out, ops.norm(_core.CpuBackend(1, "scalar"), x, ones, 1e-5))


def test_a_backend_may_go_in_any_thread(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds of cuBLAS must go with the device that it came with."""
    if not device.emulated:
        pytest.skip("needs two devices")
    monkeypatch.setenv("RVLLM_EMU_DEVICES", "2")
    handles = ctypes.CDLL(emulated_module().__file__).rv_emu_cublas_handles
    before = handles()
    backends = [device.backend(monkeypatch, device=1)]
    ops.linear(backends[0], int(GGMLType.F16), 1, bytes(4), normal(1, 2))
    assert handles() == before + 1
    with ThreadPoolExecutor(1) as pool:
        pool.submit(backends.clear).result()
    assert handles() == before


def test_work_is_cut_for_as_many_processors_as_asked_for(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions of attention take memory where each has a block of its own: not where one would be kept waiting."""
    if not device.emulated:
        pytest.skip("needs memory that is counted by the byte")
    step = Step([1], [300], 16, 4, 4, 32)
    taken = []
    for num_processors in (1, 2, 0):
        backend = device.backend(monkeypatch, num_processors=num_processors)
        free, _ = backend.memory_info
        step.attend_last(backend, 0)
        taken.append(free - backend.memory_info[0])
    assert taken[0] < taken[1] == taken[2]


def test_a_cublas_that_fails_leaves_no_handle(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    if not device.emulated:
        pytest.skip("needs a cuBLAS that fails")
    backend = device.backend(monkeypatch)
    handles = ctypes.CDLL(emulated_module().__file__).rv_emu_cublas_handles
    before = handles()
    monkeypatch.setenv("RVLLM_EMU_BROKEN_CUBLAS", "1")
    with pytest.raises(RuntimeError, match="cublasSetStream failed with status 1"):
        ops.linear(backend, int(GGMLType.F16), 1, bytes(4), normal(1, 2))
    assert handles() == before
    monkeypatch.delenv("RVLLM_EMU_BROKEN_CUBLAS")
    ops.linear(backend, int(GGMLType.F16), 1, bytes(4), normal(1, 2))
    assert handles() == before + 1
    del backend
    assert handles() == before
