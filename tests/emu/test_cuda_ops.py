"""Every operation of the CUDA backend, in several schedules of the emulator and on a GPU: the bits of the scalar CPU
kernels, which test_ops.py compares with NumPy; products by float weights, which have an order of their own, nearly.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from devices import CPU, DEVICES, VARIANT, Device
from gguf import GGMLQuantizationType as GGMLType
from numpy.typing import NDArray
from random_weights import BLOCK_FIELDS, random_weights
from reference import UNGATED
from test_ops import KEPT, Step, hostile_activations, normal

from rvllm import _core
from rvllm._core import ops

# ThreadSanitizer takes a hundred times as long, and the formats share what could race.
QUANTIZED = ["Q4_1", "Q6_K"] if VARIANT == "tsan" else [kind.name for kind in BLOCK_FIELDS]
FLOATS = ["F32", "F16", "BF16"]
shares_nothing = pytest.mark.skipif(VARIANT == "tsan", reason="threads of these kernels share nothing")


def few(*cases: Any) -> tuple[Any, ...]:
    """Of the cases the first, under ThreadSanitizer."""
    return cases[:1] if VARIANT == "tsan" else cases


NEARLY = {"rtol": 2e-5, "atol": 2e-5}
CUBLAS = {"rtol": 2e-3, "atol": 4e-3}  # activations rounded to the type of the weights

Array = NDArray[np.float32]


@pytest.fixture(params=DEVICES, ids=lambda device: device.name)
def device(request: pytest.FixtureRequest) -> Device:
    return request.param


@pytest.fixture
def backend(device: Device, monkeypatch: pytest.MonkeyPatch) -> Any:
    return device.backend(monkeypatch)


@pytest.fixture(scope="module")
def scalar() -> _core.CpuBackend:
    return _core.CpuBackend(1, "scalar")


def weight_of(name: str, n: int, k: int, spread: float = 0.05) -> tuple[int, bytes]:
    kind = GGMLType[name]
    return int(kind), random_weights(kind, n, k, spread, np.random.default_rng(n + k)).tobytes()


# One token; a tile of eight, one short of it and one over; more than one tile of tokens a block.
@pytest.mark.parametrize("rows", few(9, 1, 7, 40))
@pytest.mark.parametrize("name", QUANTIZED)
def test_linear(backend: Any, scalar: _core.CpuBackend, name: str, rows: int) -> None:
    kind, weight = weight_of(name, 35, 768)
    x = normal(rows, 768, seed=rows)
    np.testing.assert_array_equal(
        ops.linear(backend, kind, 35, weight, x), ops.linear(scalar, kind, 35, weight, x)
    )


# With this many tiles of rows warps share what they read, in blocks of 32 rows and of 128; the last ones are not whole,
# the number of blocks of K is odd or even where the format allows it, and all buffers are used again.
@pytest.mark.parametrize(("rows", "n"), [(40, 195), (70, 259)])
@pytest.mark.parametrize("name", QUANTIZED)
def test_linear_of_many_tokens(backend: Any, scalar: _core.CpuBackend, name: str, rows: int, n: int) -> None:
    if VARIANT == "tsan" and (rows, name) == (70, "Q6_K"):
        pytest.skip("Q4_1 shows the races of the larger blocks")
    k = {40: 672, 70: 640}[rows] if gguf.GGML_QUANT_SIZES[GGMLType[name]][0] == 32 else 768
    kind, weight = weight_of(name, n, k)
    x, bias = normal(rows, k, seed=rows), normal(n, seed=n)
    np.testing.assert_array_equal(
        ops.linear(backend, kind, n, weight, x, bias), ops.linear(scalar, kind, n, weight, x, bias)
    )


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_linear_of_many_tokens_and_one_block(backend: Any, scalar: _core.CpuBackend, name: str) -> None:
    """What stands in the place of the pair's other block is never looked at."""
    kind, weight = weight_of(name, 195, 32)
    x = normal(40, 32)
    np.testing.assert_array_equal(
        ops.linear(backend, kind, 195, weight, x), ops.linear(scalar, kind, 195, weight, x)
    )


@shares_nothing
@pytest.mark.parametrize("rows", [3, 40])
def test_linear_of_the_largest_sums(backend: Any, scalar: _core.CpuBackend, rows: int) -> None:
    """Of Q6_K, codes of -32 and sub-scales of -128: the whole numbers of a block come near the 2^24 of a float."""
    blocks = np.zeros((195, 2, 210), np.uint8)
    blocks[::2, :, :192] = 255  # codes of 31
    blocks[:, :, 192:208], blocks[:, :, 208:] = 128, [0x00, 0x3C]  # d: 1
    x = np.full((rows, 512), 300, np.float32)
    x[1::2] *= -1
    args = int(GGMLType.Q6_K), 195, blocks.tobytes(), x
    np.testing.assert_array_equal(ops.linear(backend, *args), ops.linear(scalar, *args))


@shares_nothing
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_linear_of_activations_made_to_hurt(backend: Any, scalar: _core.CpuBackend, name: str) -> None:
    kind, weight = weight_of(name, 32, 512)
    x = hostile_activations(512)
    x[4, 256:] = 1e-30  # the largest that counts as zero
    np.testing.assert_array_equal(
        ops.linear(backend, kind, 32, weight, x), ops.linear(scalar, kind, 32, weight, x)
    )


@pytest.mark.parametrize("n", few(17, 1, 15, 16, 130, 160))
def test_linear_adds_the_bias_for_any_width(backend: Any, scalar: _core.CpuBackend, n: int) -> None:
    kind, weight = weight_of("Q8_0", n, 64)
    x, bias = normal(3, 64), normal(n, seed=n)
    np.testing.assert_array_equal(
        ops.linear(backend, kind, n, weight, x, bias), ops.linear(scalar, kind, n, weight, x, bias)
    )


@pytest.mark.parametrize(("rows", "k"), [(1, 1), (2, 7), (9, 264), (5, 300)])
@pytest.mark.parametrize("name", FLOATS)
def test_linear_of_float_weights(
    backend: Any, scalar: _core.CpuBackend, name: str, rows: int, k: int
) -> None:
    kind, weight = weight_of(name, 9, k, 0.3)
    x, bias = normal(rows, k), normal(9, seed=1)
    expected = ops.linear(scalar, kind, 9, weight, x, bias)
    np.testing.assert_allclose(ops.linear(backend, kind, 9, weight, x, bias), expected, **NEARLY)


@shares_nothing
@pytest.mark.parametrize("name", FLOATS)
def test_linear_of_float_weights_and_many_tokens(backend: Any, scalar: _core.CpuBackend, name: str) -> None:
    kind, weight = weight_of(name, 20, 72, 0.1)
    x, bias = normal(40, 72), normal(20, seed=1)
    expected = ops.linear(scalar, kind, 20, weight, x, bias)
    tolerance = NEARLY if name == "F32" else CUBLAS | ({"atol": 2e-2} if name == "BF16" else {})
    np.testing.assert_allclose(ops.linear(backend, kind, 20, weight, x, bias), expected, **tolerance)


@shares_nothing
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", FLOATS)
def test_float_weights_that_are_not_finite_are_refused(backend: Any, name: str, bad: float) -> None:
    weight = normal(33, 72)
    weight[32, 71] = bad
    data = gguf.quants.quantize(weight, GGMLType[name]).tobytes()
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        ops.linear(backend, int(GGMLType[name]), 33, data, normal(1, 72))


@shares_nothing
@pytest.mark.parametrize("name", QUANTIZED)
def test_linear_by_cublas(
    device: Device, monkeypatch: pytest.MonkeyPatch, scalar: _core.CpuBackend, name: str
) -> None:
    """What many tokens take with f16 prefill: the dequantized product, in half precision."""
    if device == CPU:
        pytest.skip("the CPU has no f16 prefill")
    kind, weight = weight_of(name, 20, 256)
    x = normal(513, 256)
    matrix = gguf.quants.dequantize(np.frombuffer(weight, np.uint8).reshape(20, -1), GGMLType(kind))
    backend = device.backend(monkeypatch, f16_prefill=True)
    out = ops.linear(backend, kind, 20, weight, x)
    error = np.abs(out - x.astype(np.float64) @ matrix.T)
    assert (error <= 1e-3 * (np.abs(x) @ np.abs(matrix).T)).all()
    if isinstance(device, Device):  # on CUDA fewer have the CPU's bits; Metal takes its matrices from 17 on
        few = ops.linear(backend, kind, 20, weight, x[:512])
        np.testing.assert_array_equal(few, ops.linear(scalar, kind, 20, weight, x[:512]))
        assert not np.array_equal(few, out[:512])


@shares_nothing
@pytest.mark.parametrize("name", ["F32", "F16", "BF16", *QUANTIZED])
def test_embedding(backend: Any, scalar: _core.CpuBackend, name: str) -> None:
    k = 288 if gguf.GGML_QUANT_SIZES[GGMLType[name]][0] <= 32 else 512
    kind, weight = weight_of(name, 40, k, 1.0)
    ids = np.array([0, 39, 16, 15, 24], np.int32)  # of each half of a tile of rows, the first one, too
    for scale in (1.0, 25.5):
        np.testing.assert_array_equal(
            ops.embedding(backend, kind, 40, k, weight, ids, scale),
            ops.embedding(scalar, kind, 40, k, weight, ids, scale),
        )


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("n", few(4100, 1, 5, 16, 63, 576))
def test_norm(backend: Any, scalar: _core.CpuBackend, n: int, kind: str) -> None:
    x, weight = normal(3, n) + 2, normal(n, seed=1)
    bias = normal(n, seed=2) if kind == "layer" else None
    args = x, weight, 1e-5, bias, getattr(ops.NormKind, kind)
    np.testing.assert_array_equal(ops.norm(backend, *args), ops.norm(scalar, *args))


@pytest.mark.parametrize("weights", [1, 2])
def test_norm_of_each_head(backend: Any, scalar: _core.CpuBackend, weights: int) -> None:
    x, weight = normal(4, 2 * 32), normal(weights, 32, seed=1)
    np.testing.assert_array_equal(ops.norm(backend, x, weight, 1e-6), ops.norm(scalar, x, weight, 1e-6))


@shares_nothing
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dim", [8, 16, 12])
def test_rope(backend: Any, scalar: _core.CpuBackend, interleaved: bool, dim: int) -> None:
    x, cos_sin = normal(4, 43 * 16), normal(4, dim, seed=1)
    args = x, 16, cos_sin, interleaved
    np.testing.assert_array_equal(ops.rope(backend, *args), ops.rope(scalar, *args))


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "Q8_0"])
def test_norm_linear(backend: Any, scalar: _core.CpuBackend, name: str, rows: int) -> None:
    kind, weight = weight_of(name, 35, 768)
    x, norm = normal(rows, 768), normal(768, seed=1)
    for norm_kind, bias in ((ops.NormKind.rms, None), (ops.NormKind.layer, normal(768, seed=2))):
        args = kind, 35, weight, x, norm, 1e-5, bias, norm_kind
        np.testing.assert_array_equal(ops.norm_linear(backend, *args), ops.norm_linear(scalar, *args))


ACTIVATIONS = list(ops.Activation.__members__)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activated_linear(backend: Any, scalar: _core.CpuBackend, activation: str, rows: int) -> None:
    kind, weight = weight_of("Q8_0", 35, 288)
    x = normal(rows, 288 * (1 if activation in UNGATED else 2)) * 4
    args = kind, 35, weight, x, getattr(ops.Activation, activation)
    np.testing.assert_array_equal(ops.activated_linear(backend, *args), ops.activated_linear(scalar, *args))


@shares_nothing
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(backend: Any, scalar: _core.CpuBackend, activation: str) -> None:
    """Through a weight of ones and zeros, which shows each element."""
    gate = np.concatenate([np.linspace(-100, 100, 251), [0.0, -0.0, 1e-30, -1e-30, 3e4, -3e4, 7.03]])
    x = np.concatenate([gate] if activation in UNGATED else [gate, normal(len(gate)) * 5])[None]
    eye = np.eye(len(gate), dtype=np.float32).tobytes()
    args = int(GGMLType.F32), len(gate), eye, x.astype(np.float32), getattr(ops.Activation, activation)
    np.testing.assert_array_equal(ops.activated_linear(backend, *args), ops.activated_linear(scalar, *args))


@shares_nothing
def test_add(backend: Any) -> None:
    x, y = normal(5, 370), normal(5, 370, seed=1)
    np.testing.assert_array_equal(ops.add(backend, x, y), x + y)
    np.testing.assert_array_equal(ops.add(backend, x, y, 0.22), x + np.float32(0.22) * y)


@shares_nothing
def test_add_gated(backend: Any, scalar: _core.CpuBackend) -> None:
    args = normal(5, 370), normal(5, 370, seed=1), normal(5, 1, seed=2) * 4
    np.testing.assert_array_equal(ops.add_gated(backend, *args), ops.add_gated(scalar, *args))


def experts(name: str, num_experts: int, n: int, k: int, seed: int, bias: bool) -> Any:
    """The matrices of a mixture, as ops.mixture takes them."""
    kind = GGMLType[name]
    rows = random_weights(kind, num_experts * n, k, k**-0.5, np.random.default_rng(seed))
    return int(kind), n, rows.tobytes(), normal(num_experts, n, seed=seed) if bias else None


# Fewer tokens than experts, many of one expert, and more experts than a warp has lanes.
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "num_used"), few((21, 5, 2), (1, 4, 2), (3, 70, 6), (40, 2, 1))
)
def test_mixture_of_experts(
    backend: Any, scalar: _core.CpuBackend, tokens: int, num_experts: int, num_used: int, normalized: bool
) -> None:
    logits, x = normal(tokens, num_experts, seed=9), normal(tokens, 256, seed=8)
    first = experts("Q4_K", num_experts, 64, 256, 1, bias=True)
    second = experts("Q8_0", num_experts, 40, 32, 2, bias=normalized)
    args = logits, num_used, normalized, x, first, second, ops.Activation.silu_gated
    np.testing.assert_array_equal(ops.mixture(backend, *args), ops.mixture(scalar, *args))


ROUTERS = {
    "sigmoid": {"sigmoid": True},
    "biased": {"router_bias": normal(70, seed=4) * np.float32(0.01)},
    "biased sigmoid": {"sigmoid": True, "scale": 2.5, "router_bias": normal(70, seed=4) * np.float32(0.2)},
}


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("router", ROUTERS)
def test_mixture_by_scores_of_the_router(
    backend: Any, scalar: _core.CpuBackend, router: str, normalized: bool
) -> None:
    logits = 2 * normal(9, 70)
    logits[7:] -= 30  # sigmoids whose sum is not divided by
    args = (
        logits,
        6,
        normalized,
        normal(9, 256, seed=8),
        experts("Q8_0", 70, 24, 256, 1, bias=False),
    )
    out, expected = (ops.mixture(b, *args, **ROUTERS[router]) for b in (backend, scalar))
    np.testing.assert_array_equal(out, expected)


def test_mixture_of_equal_logits_takes_the_first(backend: Any, scalar: _core.CpuBackend) -> None:
    logits = np.zeros((3, 40), np.float32)
    logits[1, 7:] = 1
    args = logits, 4, True, normal(3, 256), experts("Q8_0", 40, 24, 256, 1, bias=False)
    np.testing.assert_array_equal(ops.mixture(backend, *args), ops.mixture(scalar, *args))


def test_mixture_shows_a_logit_that_is_no_number(backend: Any, scalar: _core.CpuBackend) -> None:
    logits = normal(3, 8)
    logits[1, 3] = np.nan
    args = logits, 2, True, normal(3, 256), experts("Q8_0", 8, 24, 256, 1, bias=False)
    out, expected = ops.mixture(backend, *args), ops.mixture(scalar, *args)
    assert np.isnan(out[1]).all() and np.isnan(expected[1]).all()
    np.testing.assert_array_equal(out[[0, 2]], expected[[0, 2]])


def test_mixture_of_float_experts(backend: Any, scalar: _core.CpuBackend) -> None:
    args = normal(12, 4), 2, True, normal(12, 72), experts("F16", 4, 24, 72, 1, bias=True)
    np.testing.assert_allclose(ops.mixture(backend, *args), ops.mixture(scalar, *args), **NEARLY)


@pytest.mark.parametrize("cols", [1, 31, 1024, 5000])
def test_argmax(backend: Any, scalar: _core.CpuBackend, cols: int) -> None:
    """Of equal values the first counts, and a row with an element that is not finite has none."""
    x = normal(7, cols)
    x[1] = 0
    x[2, [cols // 3, cols - 1]] = 9
    x[3, -1], x[4, 0], x[5, cols // 2], x[6, -1] = 7, np.nan, -np.inf, np.inf
    expected = ops.argmax(scalar, x)
    assert list(expected[1:4]) == [0, cols // 3, cols - 1]
    np.testing.assert_array_equal(ops.argmax(backend, x), expected)


@shares_nothing
@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
def test_scale_logits(backend: Any, scalar: _core.CpuBackend, soft_cap: float) -> None:
    x = normal(3, 370) * 100
    np.testing.assert_array_equal(
        ops.scale_logits(backend, x, 0.5, soft_cap), ops.scale_logits(scalar, x, 0.5, soft_cap)
    )


def assert_attention_equals(backend: Any, scalar: _core.CpuBackend, step: Step, *args: Any) -> None:
    for out, expected in zip(step.attend(backend, *args), step.attend(scalar, *args), strict=True):
        np.testing.assert_array_equal(out, expected)


# Contexts within a block, within a partition of 256 positions, and over two of them; prompts and single tokens.
@pytest.mark.parametrize("block_size", few(16, 5))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), few((6, 3, 20), (9, 3, 64), (2, 1, 256), (4, 4, 8), (20, 1, 16))
)
@pytest.mark.parametrize(("window", "soft_cap"), few((7, 3.0), (0, 0.0)))
def test_attention(
    backend: Any, scalar: _core.CpuBackend, block_size: int, heads: int, kv_heads: int, dim: int,
    window: int, soft_cap: float,
) -> None:  # fmt: skip
    step = Step([1, 5, 17, 1], [1, 9, 17, 40], block_size, heads, kv_heads, dim)
    assert_attention_equals(backend, scalar, step, window, soft_cap)


@pytest.mark.parametrize("window", [0, 300])
def test_attention_over_several_partitions(backend: Any, scalar: _core.CpuBackend, window: int) -> None:
    step = Step([1, 1], [530, 20], 16, 4, 2, 32)
    for out, expected in zip(
        step.attend_last(backend, window), step.attend_last(scalar, window), strict=True
    ):
        np.testing.assert_array_equal(out, expected)


def test_attention_sinks(backend: Any, scalar: _core.CpuBackend) -> None:
    sinks = np.linspace(-5, 90, 6, dtype=np.float32)  # from next to nothing to nearly all of the weight
    assert_attention_equals(backend, scalar, Step([1, 3], [30, 3], 16, 6, 3, 32), 0, 0.0, sinks)
    step = Step([1, 1], [300, 20], 16, 6, 3, 32)
    assert_attention_equals(backend, scalar, step, 0, 0.0, sinks)  # by blocks that go through all partitions
    for out, expected in zip(
        step.attend_last(backend, 0, sinks=sinks), step.attend_last(scalar, 0, sinks=sinks), strict=True
    ):
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("kv_type", KEPT)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (6, 3, 20), (2, 1, 48)])
def test_attention_over_other_types(
    backend: Any, scalar: _core.CpuBackend, kv_type: str, heads: int, kv_heads: int, dim: int
) -> None:
    step = Step([1, 5], [40, 5], 16, heads, kv_heads, dim)
    step.kv_type = getattr(_core.KVType, kv_type)
    assert_attention_equals(backend, scalar, step)


def test_attention_saturates_what_f16_cannot_hold(backend: Any, scalar: _core.CpuBackend) -> None:
    step = Step([1], [20], 16, 2, 1, 16)
    step.v[0][3, ::2], step.v[0][3, 1::2] = 1e6, -1e6
    assert_attention_equals(backend, scalar, step)


def test_unsupported_type_is_refused(backend: Any) -> None:
    with pytest.raises(ValueError, match="type"):
        ops.linear(backend, int(GGMLType.I32), 4, bytes(4 * 4 * 4), normal(1, 4))
