"""Every operation of the Metal backend, by the tests of the CUDA backend: in several schedules of the emulator, and
on an Apple GPU. Of the variant with fast math numbers are near the CPU's.
"""

from __future__ import annotations

from typing import Any

import gguf
import metal_devices
import numpy as np
import pytest
from devices import VARIANT
from gguf import GGMLQuantizationType as GGMLType
from metal_devices import MetalDevice
from test_cuda_ops import *  # noqa: F403
from test_cuda_ops import QUANTIZED, weight_of
from test_cuda_steps import (  # noqa: F401
    test_attention_of_single_tokens,
    test_attention_of_the_last_tokens_of_long_contexts,
    test_experts_that_are_chosen,
)
from test_ops import Step, normal

from rvllm import _core
from rvllm._core import ops


@pytest.fixture(params=metal_devices.DEVICES, ids=lambda device: device.name)
def device(request: pytest.FixtureRequest) -> MetalDevice:
    """In place of the one that the imported tests take their backend from."""
    return request.param


def assert_equal(out: Any, expected: Any) -> None:
    """Except that a GPU may flush what is below float's smallest normal number to zero."""
    is_flushed = (out == 0) & (np.abs(expected) < np.finfo(np.float32).tiny)
    np.testing.assert_equal(np.where(is_flushed, expected, out), expected)


def assert_near(out: Any, expected: Any) -> None:
    """What fast math may change is the order of operations."""
    if expected.dtype.kind != "f":
        np.testing.assert_equal(out, expected)
        return
    finite = np.isfinite(expected)  # fast math knows no infinities and NaN
    size = np.abs(expected) + np.nanmedian(np.abs(expected), axis=-1, keepdims=True)
    assert (np.abs(out - expected)[finite] <= 1e-3 * size[finite] + 1e-30).all()


@pytest.fixture(autouse=True)
def tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np.testing, "assert_array_equal", assert_near if VARIANT == "fast" else assert_equal)


# With the window some tokens skip the first partition; of the shorter context some do not reach the last one.
@pytest.mark.parametrize(("context", "window"), [(566, 0), (566, 300), (520, 0)])
def test_attention_where_a_group_goes_through_all_partitions(backend: Any, context: int, window: int) -> None:
    """Of so many heads that partitions get no groups of their own."""
    step = Step([17], [context], 16, 32, 32, 8)
    positions = np.arange(context)
    args = (
        np.vstack(step.q), np.vstack(step.k), np.vstack(step.v), positions[-17:],
        step.tables[0][positions // 16] * 16 + positions % 16, np.array([0, 17]), np.array(step.contexts),
        step.tables, step.num_blocks, 16, 32, 32, window,
    )  # fmt: skip
    np.testing.assert_array_equal(
        ops.attention(backend, *args), ops.attention(_core.CpuBackend(1, "scalar"), *args)
    )


def test_linear_of_activations_that_are_not_finite(backend: Any) -> None:
    """Their row shows it, the others do not change."""
    kind, weight = weight_of("Q8_0", 35, 64)
    x = normal(4, 64)
    x[1, 40], x[2, 3] = np.inf, np.nan
    expected = ops.linear(_core.CpuBackend(1, "scalar"), kind, 35, weight, x)
    assert np.isnan(expected[1:3]).all()
    np.testing.assert_array_equal(ops.linear(backend, kind, 35, weight, x), expected)


def dequantized(kind: int, weight: bytes, n: int) -> Any:
    data = np.frombuffer(weight, np.uint8).reshape(n, -1)
    return gguf.quants.dequantize(data, GGMLType(kind)).astype(np.float64)


@pytest.mark.parametrize("name", ["F16", "BF16", *QUANTIZED])
def test_linear_by_the_matrices_of_simdgroups(
    device: MetalDevice, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """More rows and tokens than a threadgroup makes; nothing is rounded to F16, and the other tokens do not count."""
    n, k = (80, 512) if name in QUANTIZED else (65, 200)
    kind, weight = weight_of(name, n, k)
    x, bias = normal(33, k), normal(n, seed=1)
    backend = device.backend(monkeypatch, f16_prefill=True)
    out = ops.linear(backend, kind, n, weight, x, bias)
    matrix = dequantized(kind, weight, n)
    error = np.abs(out - (x.astype(np.float64) @ matrix.T + bias))
    assert (error <= 1e-6 * (np.abs(x) @ np.abs(matrix).T + np.abs(bias))).all()
    np.testing.assert_array_equal(ops.linear(backend, kind, n, weight, x[10:27], bias), out[10:27])


@pytest.mark.parametrize("mps", [False, True])
def test_products_of_whole_numbers_are_exact(
    device: MetalDevice, monkeypatch: pytest.MonkeyPatch, mps: bool
) -> None:
    """In whatever order the device adds them."""
    rng = np.random.default_rng(1)
    weight = rng.integers(-8, 9, (70, 72)).astype(np.float16)
    x = rng.integers(-99, 100, (40, 72)).astype(np.float32)
    out = ops.linear(device.backend(monkeypatch, mps=mps), int(GGMLType.F16), 70, weight.tobytes(), x)
    np.testing.assert_array_equal(out, x @ weight.astype(np.float32).T)


@pytest.mark.parametrize(("name", "k"), [("Q4_0", 288), ("Q6_K", 512)])
def test_linear_by_mps(device: MetalDevice, monkeypatch: pytest.MonkeyPatch, name: str, k: int) -> None:
    """Activations and dequantized weights are rounded to F16."""
    kind, weight = weight_of(name, 36, k)
    x, bias, matrix = normal(40, k), normal(36, seed=1), dequantized(kind, weight, 36)
    out = ops.linear(device.backend(monkeypatch, f16_prefill=True, mps=True), kind, 36, weight, x, bias)
    assert (np.abs(out - (x @ matrix.T + bias)) <= 1e-3 * (np.abs(x) @ np.abs(matrix).T)).all()
