"""The operations on experts: which ones a token gets and what they make of it, to the bit in any company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
from gguf import GGMLQuantizationType as GGMLType
from numpy.typing import NDArray
from random_weights import BLOCK_FIELDS, random_weights

from rvllm import _core
from rvllm._core import ops

ISAS = _core.available_isas()
TYPES = ["F32", "F16", "BF16", *(kind.name for kind in BLOCK_FIELDS)]

Array = NDArray[np.float32]
Experts = tuple[int, int, bytes, Array | None]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def router_weights(
    backend: _core.CpuBackend, logits: Array, num_used: int, normalized: bool, **router: Any
) -> Array:
    """The weight of every expert for every token [T, E], 0 where not chosen: an expert gives a one at its place."""
    num_experts = logits.shape[1]
    ones = np.eye(num_experts, dtype=np.float32)[:, :, None].tobytes()
    x = np.ones((len(logits), 1), np.float32)
    identity = int(GGMLType.F32), num_experts, ones, None
    return ops.mixture(backend, logits, num_used, normalized, x, identity, **router)


def experts(name: str, num_experts: int, n: int, k: int, seed: int, bias: bool = False) -> Experts:
    kind = GGMLType[name]
    rows = random_weights(kind, num_experts * n, k, k**-0.5, np.random.default_rng(seed))
    return int(kind), n, rows.tobytes(), normal(num_experts, n, seed=seed) if bias else None


def expert_product(weight: Experts, num_experts: int, expert: int, x: Array) -> Array:
    """What one expert makes of x [T, K], to the bit: [T, N]."""
    kind, n, data, bias = weight
    size = len(data) // num_experts
    y = reference.linear_int8(data[expert * size : (expert + 1) * size], kind, n, x.shape[1], x)
    return y if bias is None else y + bias[expert]


def combined(weights: Array, logits: Array, products: list[Array]) -> Array:
    """The sum over a token's experts in the order of their logits, in float32."""
    out = np.zeros_like(products[0])
    for t, row in enumerate(weights):
        for e in np.argsort(-logits[t], kind="stable"):
            if row[e] != 0:
                out[t] += row[e] * products[e][t]
    return out


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("num_experts", "num_used"), [(1, 1), (8, 2), (32, 4), (60, 4), (128, 8), (17, 17)])
def test_route(backend: _core.CpuBackend, num_experts: int, num_used: int, normalized: bool) -> None:
    logits = 3 * normal(50, num_experts, seed=num_experts)
    out = router_weights(backend, logits, num_used, normalized)
    chosen, expected = reference.route(logits, num_used, normalized)
    dense = np.zeros_like(out)
    np.put_along_axis(dense, chosen, expected.astype(np.float32), axis=1)
    np.testing.assert_allclose(out, dense, rtol=2e-6)
    scalar = _core.CpuBackend(1, "scalar")
    np.testing.assert_array_equal(out, router_weights(scalar, logits, num_used, normalized))


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_scores_of_the_router(
    backend: _core.CpuBackend, sigmoid: bool, biased: bool, normalized: bool
) -> None:
    """A bias chooses, without a part in the weights; a scale is applied last."""
    logits = 2 * normal(50, 40, seed=1)
    bias = (0.2 if sigmoid else 0.01) * normal(40, seed=2) if biased else None
    router = {"sigmoid": sigmoid, "scale": 2.5, "router_bias": bias}
    out = router_weights(backend, logits, 6, normalized, **router)
    chosen, expected = reference.route(logits, 6, normalized, sigmoid, bias, 2.5)
    dense = np.zeros_like(out)
    np.put_along_axis(dense, chosen, expected.astype(np.float32), axis=1)
    np.testing.assert_allclose(out, dense, rtol=4e-6)
    best = np.sort(np.argsort(-logits, axis=1)[:, :6], axis=1)
    assert (np.sort(chosen, axis=1) != best).any() == biased
    scalar = _core.CpuBackend(1, "scalar")
    np.testing.assert_array_equal(out, router_weights(scalar, logits, 6, normalized, **router))


@pytest.mark.parametrize("lowest", [-8.0, -30.0, -200.0])
def test_scores_that_vanish_are_not_blown_up(backend: _core.CpuBackend, lowest: float) -> None:
    logits = normal(9, 40, seed=1) + np.float32(lowest)
    out = router_weights(backend, logits, 6, True, sigmoid=True)
    chosen, expected = reference.route(logits, 6, True, use_sigmoid=True)
    dense = np.zeros_like(out)
    np.put_along_axis(dense, chosen, expected.astype(np.float32), axis=1)
    np.testing.assert_allclose(out, dense, rtol=4e-6, atol=1e-30)
    assert (out.sum(axis=1) < 1e-6).all() == (lowest < -10)


def test_of_equal_logits_the_first_is_chosen(backend: _core.CpuBackend) -> None:
    logits = np.array([[0, 1, 1, 0, 1, 1], [2, 2, 2, 2, 2, 2], [0, 0, 0, 5, 0, 0]], np.float32)
    chosen = router_weights(backend, logits, 3, True) > 0
    assert [np.flatnonzero(row).tolist() for row in chosen] == [[1, 2, 4], [0, 1, 2], [0, 1, 3]]


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("bias", [None, np.zeros(8, np.float32)])
@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_logit_that_is_no_number_is_not_lost(
    backend: _core.CpuBackend, at: int, bias: Array | None, sigmoid: bool
) -> None:
    logits = normal(2, 8)
    logits[0, at] = np.nan
    out = router_weights(backend, logits, 2, True, sigmoid=sigmoid, router_bias=bias)
    assert np.isnan(out[0]).any() and np.isfinite(out[1]).all()


@pytest.mark.parametrize("name", TYPES)
def test_expert_linear_equals_the_integer_reference(backend: _core.CpuBackend, name: str) -> None:
    num_experts, num_used, n, k, tokens = 5, 2, 21, 256, 9
    weight = experts(name, num_experts, n, k, seed=1, bias=True)
    x, logits = normal(tokens, k, seed=2), normal(tokens, num_experts, seed=3)
    weights = router_weights(backend, logits, num_used, True)
    products = [expert_product(weight, num_experts, e, x) for e in range(num_experts)]
    np.testing.assert_array_equal(
        ops.mixture(backend, logits, num_used, True, x, weight), combined(weights, logits, products)
    )


@pytest.mark.parametrize("tokens", [1, 2, 70])
def test_two_matrices_of_experts(backend: _core.CpuBackend, tokens: int) -> None:
    num_experts, num_used, n, k = 6, 3, 64, 32
    first = experts("Q4_0", num_experts, 2 * n, k, seed=1, bias=True)
    second = experts("Q8_0", num_experts, 17, n, seed=2)
    x, logits = normal(tokens, k, seed=3), normal(tokens, num_experts, seed=4)
    products = []
    for e in range(num_experts):
        gate_up = expert_product(first, num_experts, e, x)
        data, size = second[2], len(second[2]) // num_experts
        down = data[e * size : (e + 1) * size]
        products.append(
            ops.activated_linear(backend, int(GGMLType.Q8_0), 17, down, gate_up, ops.Activation.swiglu_oai)
        )
    weights = router_weights(backend, logits, num_used, False)
    out = ops.mixture(backend, logits, num_used, False, x, first, second, ops.Activation.swiglu_oai)
    np.testing.assert_array_equal(out, combined(weights, logits, products))


def test_a_token_has_the_same_bits_in_any_company() -> None:
    first, second = experts("Q4_K", 8, 512, 256, seed=1), experts("Q6_K", 8, 48, 256, seed=2)
    x, logits = normal(150, 256, seed=3), normal(150, 8, seed=4)
    logits[:100] += np.eye(8, dtype=np.float32)[2] * 5  # most tokens share an expert
    scalar = _core.CpuBackend(1, "scalar")
    tokens = [slice(t, t + 1) for t in range(150)]
    alone = np.vstack([ops.mixture(scalar, logits[t], 2, True, x[t], first, second) for t in tokens])
    for isa in ISAS:
        for threads in (1, 2):
            backend = _core.CpuBackend(threads, isa)
            for step in (150, 7):
                out = [
                    ops.mixture(backend, logits[t : t + step], 2, True, x[t : t + step], first, second)
                    for t in range(0, 150, step)
                ]
                np.testing.assert_array_equal(np.vstack(out), alone)


def test_add_gated(backend: _core.CpuBackend) -> None:
    x, y = normal(6, 37), normal(6, 37, seed=1)
    gate = np.array([[-200], [-5], [0], [0.3], [4], [200]], np.float32)
    out = ops.add_gated(backend, x, y, gate)
    np.testing.assert_allclose(out, x + y * reference.sigmoid(gate), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(out, ops.add_gated(_core.CpuBackend(1, "scalar"), x, y, gate))
    np.testing.assert_array_equal(out[0], x[0])
