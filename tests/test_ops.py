"""Every operation of the backend, on every instruction set: equal to the bit between them, and to the reference."""

import os
import signal
import time
from functools import cache

import gguf
import numpy as np
import pytest
import reference
from gguf import GGMLQuantizationType as GGMLType
from numpy.typing import NDArray
from random_weights import BLOCK_FIELDS, random_weights, write_d

from rvllm import _core
from rvllm._core import ops

ISAS = _core.available_isas()
QUANTIZED = [kind.name for kind in BLOCK_FIELDS]
TYPES = ["F32", "F16", "BF16", *QUANTIZED]

Array = NDArray[np.float32]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def hostile_activations(k: int) -> Array:
    """Rows that find overflows and lost lanes: extremes of both signs, one outlier, constants, zeros, tiny and huge."""
    rows = np.zeros((8, k), np.float32)
    rows[0] = np.where(np.arange(k) % 2, 1.0, -1.0)
    rows[1] = 300.0
    rows[2] = -1.0
    rows[3, k // 2] = 1e6
    rows[5] = normal(k, seed=5) * 1e-20
    rows[6] = normal(k, seed=6) * 1e20
    rows[7] = np.where(np.arange(k) % 32 == 31, 1.0, 1e-3)
    return rows


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 13, 65])
@pytest.mark.parametrize("name", TYPES)
def test_linear_equals_the_integer_reference(backend: _core.CpuBackend, name: str, rows: int) -> None:
    kind, n, k = GGMLType[name], 35, 768
    weight = random_weights(kind, n, k, 0.05, np.random.default_rng(rows)).tobytes()
    x = normal(rows, k, seed=rows)
    np.testing.assert_array_equal(
        ops.linear(backend, int(kind), n, weight, x), reference.linear_int8(weight, kind, n, k, x)
    )


@pytest.mark.parametrize("name", QUANTIZED)
def test_linear_on_blocks_made_to_hurt(backend: _core.CpuBackend, name: str) -> None:
    kind, n, k = GGMLType[name], 32, 512
    weight = random_weights(kind, n, k, 0.05, np.random.default_rng(3))
    weight[1] = 0  # d = 0 and every code 0
    block, size = gguf.GGML_QUANT_SIZES[kind]
    fields = BLOCK_FIELDS[kind]
    for row, byte in ((2, 0x00), (3, 0xFF)):  # all codes and sub-scales at either end
        weight[row] = byte
        blocks = weight[row].reshape(-1, size)
        write_d(kind, blocks, np.linspace(-0.05, 0.05, k // block))
        if fields.m is not None:
            blocks[:, fields.m : fields.m + 2] = np.array([0.1], "<f2").view(np.uint8)
    x = hostile_activations(k)
    with np.errstate(all="ignore"):
        expected = reference.linear_int8(weight.tobytes(), kind, n, k, x)
    np.testing.assert_array_equal(ops.linear(backend, int(kind), n, weight.tobytes(), x), expected)


@pytest.mark.parametrize("name", QUANTIZED)
def test_linear_is_close_to_the_dequantized_product(backend: _core.CpuBackend, name: str) -> None:
    kind, n, k = GGMLType[name], 48, 1024
    weight = random_weights(kind, n, k, 0.05, np.random.default_rng(4))
    x = normal(5, k, seed=4)
    w = gguf.quants.dequantize(weight, kind)
    error = np.abs(ops.linear(backend, int(kind), n, weight.tobytes(), x) - x.astype(np.float64) @ w.T)
    assert (error <= 4e-3 * (np.abs(x) @ np.abs(w).T)).all()  # int8 activations: half a step of 1/127 each


@pytest.mark.parametrize("n", [1, 15, 16, 17, 160])
def test_linear_adds_the_bias_for_any_width(backend: _core.CpuBackend, n: int) -> None:
    weight = random_weights(GGMLType.Q8_0, n, 64, 0.1, np.random.default_rng(n)).tobytes()
    x, bias = normal(3, 64), normal(n, seed=n)
    expected = reference.linear_int8(weight, GGMLType.Q8_0, n, 64, x) + bias
    np.testing.assert_array_equal(ops.linear(backend, int(GGMLType.Q8_0), n, weight, x, bias), expected)


def test_rows_of_float_weights_of_any_length(backend: _core.CpuBackend) -> None:
    for k in (1, 7, 33):
        weight = normal(5, k, seed=k)
        x = normal(2, k)
        expected = reference.linear_int8(weight.tobytes(), GGMLType.F32, 5, k, x)
        np.testing.assert_array_equal(
            ops.linear(backend, int(GGMLType.F32), 5, weight.tobytes(), x), expected
        )


@pytest.mark.parametrize("name", TYPES)
def test_embedding_is_the_dequantized_row(backend: _core.CpuBackend, name: str) -> None:
    kind, n, k = GGMLType[name], 40, 256
    weight = random_weights(kind, n, k, 1.0, np.random.default_rng(2))
    ids = np.array([0, 39, 16, 15, 7], np.int32)
    rows = gguf.quants.dequantize(weight, kind)[ids]
    np.testing.assert_array_equal(ops.embedding(backend, int(kind), n, k, weight.tobytes(), ids), rows)
    scaled = ops.embedding(backend, int(kind), n, k, weight.tobytes(), ids, 25.5)
    np.testing.assert_array_equal(scaled, rows * np.float32(25.5))


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("n", [1, 5, 16, 63, 64, 576])
def test_norm(backend: _core.CpuBackend, n: int, kind: str) -> None:
    x, weight = normal(3, n) + 2, normal(n, seed=1)
    bias = normal(n, seed=2) if kind == "layer" else None
    out = ops.norm(backend, x, weight, 1e-5, bias, getattr(ops.NormKind, kind))
    expected = (reference.rms_norm if bias is None else reference.layer_norm)(x, weight, 1e-5)
    np.testing.assert_allclose(out, expected + (0 if bias is None else bias), rtol=5e-6, atol=2e-6)
    scalar = ops.norm(_core.CpuBackend(1, "scalar"), x, weight, 1e-5, bias, getattr(ops.NormKind, kind))
    np.testing.assert_array_equal(out, scalar)


@pytest.mark.parametrize("weights", [1, 3])
def test_norm_of_each_head(backend: _core.CpuBackend, weights: int) -> None:
    x, weight = normal(4, 3 * 32), normal(weights, 32, seed=1)
    expected = reference.rms_norm(x.reshape(4, 3, 32), weight, 1e-6).reshape(4, 96)
    np.testing.assert_allclose(ops.norm(backend, x, weight, 1e-6), expected, rtol=2e-6)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dim", [8, 16, 12])
def test_rope(backend: _core.CpuBackend, interleaved: bool, dim: int) -> None:
    heads, head_dim = 3, 16
    positions = np.array([0, 1, 500, 30_000])
    x = normal(4, heads * head_dim)
    frequencies = reference.rope_frequencies(dim, 10_000.0)
    angles = positions[:, None] * frequencies
    cos_sin = np.hstack([np.cos(angles), np.sin(angles)]).astype(np.float32)
    out = ops.rope(backend, x, head_dim, cos_sin, interleaved)
    expected = reference.rope(x.reshape(4, heads, head_dim), positions, frequencies, interleaved)
    np.testing.assert_allclose(out, expected.reshape(4, -1), atol=2e-6)
    np.testing.assert_array_equal(
        out, ops.rope(_core.CpuBackend(1, "scalar"), x, head_dim, cos_sin, interleaved)
    )


ACTIVATIONS = {
    "silu_gated": lambda x: reference.silu(x[0]) * x[1],
    "gelu_gated": lambda x: reference.gelu(x[0]) * x[1],
    "swiglu_oai": lambda x: reference.swiglu_oai(x[0], x[1]),
    "gelu": lambda x: reference.gelu(x[0]),
    "relu_sqr": lambda x: reference.relu_sqr(x[0]),
}


def activated(backend: _core.CpuBackend, x: Array, name: str) -> Array:
    """x through an activation, through a weight that adds only zeros to it."""
    n = x.shape[1] // (1 if name in reference.UNGATED else 2)
    weight = np.eye(n, dtype=np.float32).tobytes()
    return ops.activated_linear(backend, int(GGMLType.F32), n, weight, x, getattr(ops.Activation, name))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(backend: _core.CpuBackend, name: str) -> None:
    gate = np.concatenate([np.linspace(-100, 100, 501), [0.0, -0.0, 1e-30, -1e-30, 3e4, -3e4]]).astype(
        np.float32
    )
    up = normal(len(gate)) * 5
    x = gate[None] if name in reference.UNGATED else np.concatenate([gate, up])[None]
    out = activated(backend, x, name)
    with np.errstate(over="ignore"):
        expected = ACTIVATIONS[name](np.stack([gate, up]))
    # The reference's 1 + tanh leaves a rounding error of float64 where gelu vanishes.
    np.testing.assert_allclose(out[0], expected, rtol=4e-6, atol=1e-12 if "gelu" in name else 1e-30)
    np.testing.assert_array_equal(out, activated(_core.CpuBackend(1, "scalar"), x, name))


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "F16"])
def test_fused_linears_equal_their_parts(backend: _core.CpuBackend, name: str, rows: int) -> None:
    kind, n, k = GGMLType[name], 35, 256
    weight = random_weights(kind, n, k, 0.05, np.random.default_rng(rows)).tobytes()
    x, norm, gate_up = normal(rows, k), normal(k, seed=1), normal(rows, 2 * k, seed=2)
    for norm_kind in (ops.NormKind.rms, ops.NormKind.layer):
        args = norm, 1e-5, None, norm_kind
        expected = ops.linear(backend, int(kind), n, weight, ops.norm(backend, x, *args))
        np.testing.assert_array_equal(ops.norm_linear(backend, int(kind), n, weight, x, *args), expected)
    for activation in ACTIVATIONS:
        inner = x if activation in reference.UNGATED else gate_up
        expected = ops.linear(backend, int(kind), n, weight, activated(backend, inner, activation))
        out = ops.activated_linear(backend, int(kind), n, weight, inner, getattr(ops.Activation, activation))
        np.testing.assert_array_equal(out, expected)


def test_add(backend: _core.CpuBackend) -> None:
    x, y = normal(5, 37), normal(5, 37, seed=1)
    np.testing.assert_array_equal(ops.add(backend, x, y), x + y)
    np.testing.assert_array_equal(ops.add(backend, x, y, 0.22), x + np.float32(0.22) * y)


def argmax_rows(n: int) -> Array:
    """Six rows with equals and the largest at either end, and three with an element that is not finite."""
    x = normal(9, n)
    x[1] = -7.0  # all alike
    x[2, n // 2], x[3, n - 1], x[4, 0] = 99.0, 99.0, 99.0
    x[5, n // 3 :] = 50.0  # the first of equals
    for row, value in ((6, np.nan), (7, np.inf), (8, -np.inf)):
        x[row, n // 2] = value
    return x


@pytest.mark.parametrize("n", [3, 15, 16, 1000, 4099])
def test_argmax(backend: _core.CpuBackend, n: int) -> None:
    x = argmax_rows(n)
    np.testing.assert_array_equal(ops.argmax(backend, x), [*x[:6].argmax(axis=1), -1, -1, -1])


@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
def test_scale_logits(backend: _core.CpuBackend, soft_cap: float) -> None:
    x = normal(3, 37) * 100
    scaled = x.astype(np.float64) * 0.5
    expected = soft_cap * np.tanh(scaled / soft_cap) if soft_cap else scaled
    out = ops.scale_logits(backend, x, 0.5, soft_cap)
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=4e-6)
    np.testing.assert_array_equal(out, ops.scale_logits(_core.CpuBackend(1, "scalar"), x, 0.5, soft_cap))


def kept_bf16(a: Array) -> Array:
    bits = a.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32)


def kept_q8_0(a: Array) -> Array:
    """As int8 with one scale for each 32 elements of a head, the last block being shorter."""
    blocks = []
    for first in range(0, a.shape[-1], 32):
        x = a[..., first : first + 32]
        scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
        blocks.append(np.rint(x / np.where(scale == 0, 1, scale)) * scale)
    return np.concatenate(blocks, axis=-1)


KEPT = {
    "f16": lambda a: a.astype(np.float16).astype(np.float32),
    "f32": lambda a: a,
    "bf16": kept_bf16,
    "q8_0": kept_q8_0,
}


class Step:
    """Requests with some context, laid out in shuffled blocks; attention of their last tokens."""

    def __init__(
        self, queries: list[int], contexts: list[int], block_size: int, heads: int, kv_heads: int, dim: int
    ):
        rng = np.random.default_rng(sum(contexts) + block_size + dim)
        self.queries, self.contexts, self.block_size = queries, contexts, block_size
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.kv_type = _core.KVType.f16
        self.q = [normal(n, heads * dim, seed=i) for i, n in enumerate(queries)]
        self.k = [normal(n, kv_heads * dim, seed=10 + i) for i, n in enumerate(contexts)]
        self.v = [normal(n, kv_heads * dim, seed=20 + i) for i, n in enumerate(contexts)]
        blocks = [-(-n // block_size) for n in contexts]
        self.num_blocks = sum(blocks) + 3
        order = rng.permutation(self.num_blocks)
        self.tables = np.zeros((len(contexts), max(blocks)), np.int32)
        at = 0
        for i, count in enumerate(blocks):
            self.tables[i, :count] = order[at : at + count]
            at += count

    def attend(
        self,
        backend: _core.CpuBackend,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: Array | None = None,
    ) -> list[Array]:
        """All tokens of every context are stored; those before the queries have queries of zeros, left out."""
        positions, slots, queries, keep = [], [], [], []
        for i, context in enumerate(self.contexts):
            position = np.arange(context)
            positions.append(position)
            slots.append(
                self.tables[i][position // self.block_size] * self.block_size + position % self.block_size
            )
            rows = np.zeros((context, self.heads * self.dim), np.float32)
            rows[context - self.queries[i] :] = self.q[i]
            queries.append(rows)
            keep.append(position >= context - self.queries[i])
        starts = np.cumsum([0, *self.contexts])
        out = ops.attention(
            backend, np.vstack(queries), np.vstack(self.k), np.vstack(self.v), np.concatenate(positions),
            np.concatenate(slots), starts, np.array(self.contexts), self.tables, self.num_blocks, self.block_size,
            self.heads, self.kv_heads, window, self.dim**-0.5, soft_cap, self.kv_type, sinks,
        )  # fmt: skip
        return [out[starts[i] : starts[i + 1]][keep[i]] for i in range(len(self.contexts))]

    def attend_last(
        self,
        backend: _core.CpuBackend,
        window: int,
        tables: NDArray[np.int32] | None = None,
        sinks: Array | None = None,
    ) -> list[Array]:
        """The same of one query each, as requests that decode have it. tables: what they read, if not all."""
        positions = [np.arange(context) for context in self.contexts]
        slots = [self.tables[i][p // self.block_size] * self.block_size + p % self.block_size
                 for i, p in enumerate(positions)]  # fmt: skip
        out = ops.attention(
            backend, np.vstack(self.q), np.vstack(self.k), np.vstack(self.v), np.array(self.contexts) - 1,
            np.concatenate(slots), np.arange(len(positions) + 1), np.array(self.contexts),
            self.tables if tables is None else tables, self.num_blocks, self.block_size, self.heads,
            self.kv_heads, window, self.dim**-0.5, 0.0, self.kv_type, sinks,
        )  # fmt: skip
        return list(out)

    def expected(self, i: int, window: int = 0, soft_cap: float = 0.0, sinks: Array | None = None) -> Array:
        q = self.q[i].reshape(-1, self.heads, self.dim)
        k, v = (KEPT[self.kv_type.name](a[i].reshape(-1, self.kv_heads, self.dim)) for a in (self.k, self.v))
        return reference.attention(q, k, v, self.dim**-0.5, window, soft_cap, sinks).reshape(len(q), -1)


SHAPES = [(9, 3, 64), (4, 1, 256), (4, 2, 16), (4, 4, 8), (40, 1, 16), (6, 3, 20)]


@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (7, 0.0), (270, 0.0), (0, 3.0)])
def test_attention(
    backend: _core.CpuBackend,
    block_size: int,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int,
    soft_cap: float,
) -> None:
    step = Step([1, 5, 17, 1], [1, 37, 17, 300], block_size, heads, kv_heads, dim)
    out = step.attend(backend, window, soft_cap)
    for i in range(4):
        np.testing.assert_allclose(out[i], step.expected(i, window, soft_cap), rtol=2e-5, atol=2e-6)


def step_with_sinks(*shape: int) -> tuple[Step, Array]:
    """Each head's sink has from next to nothing to nearly all of the weight."""
    sinks = np.linspace(-5, 90, shape[0], dtype=np.float32)
    return Step([1, 5, 17, 1], [1, 37, 17, 300], 16, *shape), sinks


@cache
def alone_with_sinks(window: int, *shape: int) -> list[Array]:
    """Of each request, by scalar kernels, in blocks of another size."""
    step, sinks = step_with_sinks(*shape)
    backend, out = _core.CpuBackend(1, "scalar"), []
    for i in range(4):
        alone = Step([step.queries[i]], [step.contexts[i]], 5, *shape)
        alone.q, alone.k, alone.v = [step.q[i]], [step.k[i]], [step.v[i]]
        out += alone.attend(backend, window, 0.0, sinks)
    return out


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("window", [0, 270])
def test_attention_sinks(backend: _core.CpuBackend, window: int, heads: int, kv_heads: int, dim: int) -> None:
    step, sinks = step_with_sinks(heads, kv_heads, dim)
    out = step.attend(backend, window, 0.0, sinks)
    for i, alone in enumerate(alone_with_sinks(window, heads, kv_heads, dim)):
        np.testing.assert_allclose(out[i], step.expected(i, window, 0.0, sinks), rtol=2e-5, atol=2e-6)
        np.testing.assert_array_equal(out[i], alone)


@pytest.mark.parametrize("kv_type", ["f32", "bf16", "q8_0"])
@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_attention_over_other_types(
    backend: _core.CpuBackend, kv_type: str, block_size: int, heads: int, kv_heads: int, dim: int
) -> None:
    step = Step([1, 5], [40, 300], block_size, heads, kv_heads, dim)
    step.kv_type = getattr(_core.KVType, kv_type)
    out = step.attend(backend)
    # A code of q8_0 may fall on the other side of a half: one step of the scale, for one element.
    tolerance = 2e-3 if kv_type == "q8_0" else 2e-6
    for i in range(2):
        np.testing.assert_allclose(out[i], step.expected(i), rtol=2e-5, atol=tolerance)


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("block_size", [16, 256, 1])
def test_attention_over_a_shared_prefix_has_the_same_bits(window: int, block_size: int) -> None:
    shape, contexts, shared = (6, 3, 32), [513, 600, 1030, 700, 768, 530, 20], 512
    step = Step([1] * len(contexts), contexts, block_size, *shape)
    for i in range(1, 6):  # all but the last begin alike; two of them part after the first 256
        count = 256 if i == 3 else shared
        step.tables[i, : count // block_size] = step.tables[0, : count // block_size]
        step.k[i][:count], step.v[i][:count] = step.k[0][:count], step.v[0][:count]
    together = step.attend_last(_core.CpuBackend(2), window)
    for i in range(len(contexts)):
        alone = Step([1], [contexts[i]], block_size, *shape)
        alone.q, alone.k, alone.v = [step.q[i]], [step.k[i]], [step.v[i]]
        np.testing.assert_array_equal(together[i], alone.attend(_core.CpuBackend(1, "scalar"), window)[0][0])


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("block_size", [16, 1, 5, 64, 256])
def test_attention_never_reads_what_has_left_the_window(
    backend: _core.CpuBackend, block_size: int, kv_type: str
) -> None:
    window, contexts = 70, [600, 37, 326, 71, 582]
    step = Step([1] * len(contexts), contexts, block_size, 6, 3, 32)
    step.kv_type = getattr(_core.KVType, kv_type)
    expected = step.attend_last(backend, window)
    tables = step.tables.copy()
    for i, context in enumerate(contexts):
        hidden = max(0, context - window)
        step.k[i][:hidden] = step.v[i][:hidden] = np.nan
        tables[i, : hidden // block_size] = -1
    np.testing.assert_array_equal(step.attend_last(backend, window, tables), expected)


@pytest.mark.parametrize("window", [0, 100])
def test_attention_has_the_same_bits_alone_in_any_blocks_on_any_isa(window: int) -> None:
    shape = (6, 3, 32)
    alone = Step([9], [600], 16, *shape).attend(_core.CpuBackend(1, "scalar"), window)[0]
    for isa in ISAS:
        for block_size in (16, 1, 3, 64):
            together = Step([9, 1, 30], [600, 300, 30], block_size, *shape)
            np.testing.assert_array_equal(together.attend(_core.CpuBackend(2, isa), window)[0], alone)
    one_by_one = Step([1], [600], 16, *shape)
    one_by_one.q[0] = Step([9], [600], 16, *shape).q[0][-1:]
    np.testing.assert_array_equal(one_by_one.attend(_core.CpuBackend(1), window)[0][0], alone[-1])


def test_attention_saturates_what_f16_cannot_hold(backend: _core.CpuBackend) -> None:
    step = Step([1], [20], 16, 2, 1, 16)
    step.v[0][3] = 1e6
    out = step.attend(backend)[0]
    assert np.isfinite(out).all()


@pytest.mark.parametrize("isa", ["sse9", "scalars"])
def test_unknown_isa_is_refused(isa: str) -> None:
    with pytest.raises(ValueError, match=f"isa '{isa}' is unknown; available here: scalar"):
        _core.CpuBackend(1, isa)


@pytest.mark.skipif("neon" in ISAS, reason="this machine has neon")
def test_missing_isa_is_refused() -> None:
    with pytest.raises(ValueError, match="isa 'neon' is not available here; available: scalar"):
        _core.CpuBackend(1, "neon")


def test_environment_chooses_the_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "RVLLM_ISA", "scalar")
    assert _core.detect_isa() == "scalar"
    assert _core.CpuBackend(1).isa == "scalar"
    monkeypatch.setitem(os.environ, "RVLLM_ISA", "sse9")
    with pytest.raises(ValueError, match="sse9"):
        _core.detect_isa()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_of_fork_has_no_threads_to_wait_for() -> None:
    backend = _core.CpuBackend(2)
    x, weight = normal(40, 64), np.ones(64, np.float32)
    expected = ops.norm(backend, x, weight, 1e-5)
    child = os.fork()
    if child == 0:
        same = np.array_equal(ops.norm(backend, x, weight, 1e-5), expected)
        del backend
        os._exit(0 if same else 1)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
    assert ended == (child, 0)
