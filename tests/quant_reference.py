"""The quantized matrix product of the engine, to the bit: integer codes, int8 activations, float32 sums.

`linear_int8` fixes every rounding, so a kernel is right when it returns the same bits on any instruction set.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from numpy.typing import NDArray
from random_weights import BLOCK_FIELDS, write_d

Array = NDArray[np.generic]

FLOAT_TYPES = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
CODE_TYPES = tuple(BLOCK_FIELDS)
BLOCK = 32  # activations that share one scale
TINY_AMAX = np.float32(1e-30)  # a block below it becomes zeros: 127 / amax must stay finite


@dataclass(frozen=True)
class Codes:
    """A quantized matrix [N, K] as w = d * scale * q + m * min, in the order of k, zero points subtracted."""

    q: Array  # [N, K] int64
    d: Array  # [N, K / 32] float32
    scale: Array  # [N, K / 16] int64, ones where a type has no sub-scales for 16 k
    m: Array | None  # [N, K / 32] float32, None where a type has no minimum
    min: Array  # [N, K / 16] int64, ones where a type has no sub-minima for 16 k

    def weights(self) -> Array:
        """The matrix [N, K], float32; each weight is rounded once."""
        w = np.repeat(self.d, 32, axis=1) * np.repeat(self.scale, 16, axis=1).astype(np.float64) * self.q
        if self.m is not None:
            w += np.repeat(self.m, 32, axis=1) * np.repeat(self.min, 16, axis=1).astype(np.float64)
        return w.astype(np.float32)


def bit_fields(data: Array, width: int) -> Array:
    """Cut the bytes [..., n] into fields of `width` bits: [..., 8 / width, n], lowest bits first."""
    shifts = np.arange(0, 8, width)[:, None]
    return data[..., None, :].astype(np.int64) >> shifts & (1 << width) - 1


def decode(weight: Array | bytes, ggml_type: int, n: int, k: int) -> Codes:
    """Decode the bytes of a quantized matrix [N, K] of one of CODE_TYPES. The layouts are ggml's."""
    kind = GGMLType(ggml_type)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.frombuffer(weight, np.uint8).reshape(-1, size)

    def part(at: int, *shape: int) -> Array:
        """Bytes from `at` of each block, [blocks, *shape]."""
        return blocks[:, at : at + int(np.prod(shape))].reshape(-1, *shape)

    def half(at: int) -> Array:
        """A float16 of each block, as float32 [blocks, 1]."""
        return np.ascontiguousarray(part(at, 2)).view("<f2").astype(np.float32)

    def rows(values: Array) -> Array:
        return values.reshape(n, -1)

    def codes(q: Array, zero: int = 0) -> Array:
        return rows(q.astype(np.int64)) - zero

    def two_bits(at: int) -> Array:
        return bit_fields(part(at, 2, 32), 2).reshape(-1, 256)

    ones = np.ones((n, k // 16), np.int64)
    match kind:
        case GGMLType.Q4_0:
            return Codes(codes(bit_fields(part(2, 16), 4), 8), rows(half(0)), ones, None, ones)
        case GGMLType.Q4_1:
            return Codes(codes(bit_fields(part(4, 16), 4)), rows(half(0)), ones, rows(half(2)), ones)
        case GGMLType.Q5_0 | GGMLType.Q5_1:
            has_min = kind == GGMLType.Q5_1
            at = 4 if has_min else 2
            fifth = np.unpackbits(part(at, 4), axis=1, bitorder="little").astype(np.int64)
            q = bit_fields(part(at + 4, 16), 4).reshape(-1, 32) | fifth << 4
            m = rows(half(2)) if has_min else None
            return Codes(codes(q, 0 if has_min else 16), rows(half(0)), ones, m, ones)
        case GGMLType.Q8_0:
            return Codes(codes(part(2, 32).view(np.int8)), rows(half(0)), ones, None, ones)
        case GGMLType.Q2_K:
            sub = bit_fields(part(0, 16), 4)  # [blocks, (scale, min), 16]
            d, m = (rows(np.repeat(half(at), 8, axis=1)) for at in (80, 82))
            return Codes(codes(two_bits(16)), d, rows(sub[:, 0]), -m, rows(sub[:, 1]))
        case GGMLType.Q3_K:
            third = bit_fields(part(0, 32), 1).reshape(-1, 256)
            low = bit_fields(part(96, 8), 4).reshape(-1, 16)
            high = bit_fields(part(104, 4), 2).reshape(-1, 16)
            d = rows(np.repeat(half(108), 8, axis=1))
            return Codes(codes(two_bits(32) | third << 2, 4), d, rows(low | high << 4) - 32, None, ones)
        case GGMLType.Q4_K | GGMLType.Q5_K:
            low, mid, high = (part(at, 4).astype(np.int64) for at in (4, 8, 12))
            scale = np.hstack([low & 63, high & 15 | low >> 6 << 4])
            minimum = np.hstack([mid & 63, high >> 4 | mid >> 6 << 4])
            at = 16 if kind == GGMLType.Q4_K else 48
            q = bit_fields(part(at, 4, 32), 4).reshape(-1, 256)
            if kind == GGMLType.Q5_K:
                q |= bit_fields(part(16, 32), 1).reshape(-1, 256) << 4
            d, m = half(0) * scale.astype(np.float32), half(2) * minimum.astype(np.float32)  # exact
            return Codes(codes(q), rows(d), ones, -rows(m), ones)
        case GGMLType.Q6_K:
            low = bit_fields(part(0, 2, 64), 4).reshape(-1, 256)
            high = bit_fields(part(128, 2, 32), 2).reshape(-1, 256)
            scale = part(192, 16).view(np.int8).astype(np.int64)
            d = rows(np.repeat(half(208), 8, axis=1))
            return Codes(codes(low | high << 4, 32), d, rows(scale), None, ones)
    return decode_looked_up(blocks, kind, n, k)


# What D has beside d, for types whose codes are looked up or ternary; the sub-scales of some are for 16 weights.
UNITS = {GGMLType.IQ1_S: 0.125, GGMLType.IQ1_M: 0.125, GGMLType.IQ3_XXS: 0.25}
UNITS |= {GGMLType[name]: 0.125 for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S")}


def decode_looked_up(blocks: Array, kind: GGMLType, n: int, k: int) -> Codes:
    """Codes of blocks [blocks, bytes]: gguf looks them up with d = 1, where they are exact, times their sub-scales."""
    plain = blocks.copy()
    write_d(kind, plain, np.ones(len(blocks)))
    unit = UNITS.get(kind, 1.0)
    q = gguf.quants.dequantize(plain, kind).reshape(len(blocks), -1, 32) / np.float32(unit)

    def words(dtype: str, start: int, stop: int) -> Array:
        return np.ascontiguousarray(blocks[:, start:stop]).view(dtype).astype(np.int64)

    at = BLOCK_FIELDS[kind].d
    d = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)
    scale = np.ones((len(blocks), q.shape[1]), np.int64)  # of 32 weights; those of 16 stay in q
    match kind:
        case GGMLType.MXFP4:
            d = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
        case GGMLType.IQ1_M:
            d = (words("<u2", 48, 56) >> 12 << np.arange(0, 16, 4)).sum(axis=1, keepdims=True)
            d = d.astype("<u2").view("<f2").astype(np.float32)
        case GGMLType.IQ1_S:
            scale = 2 * (words("<u2", 34, 50) >> 12 & 7) + 1
        case GGMLType.IQ2_XXS:
            scale = 2 * (words("<u4", 2, 66)[:, 1::2] >> 28) + 1
        case GGMLType.IQ3_XXS:
            scale = 2 * (words("<u4", 66, 98) >> 28) + 1
        case GGMLType.IQ3_S:
            scale = 2 * (np.repeat(words("u1", 106, 110), 2, axis=1) >> np.tile([0, 4], 4) & 15) + 1
        case GGMLType.IQ4_XS:
            low = np.repeat(words("u1", 4, 8), 2, axis=1) >> np.tile([0, 4], 4) & 15
            scale = (low | (words("<u2", 2, 4) >> np.arange(0, 16, 2) & 3) << 4) - 32
    codes = np.divide(q, scale[:, :, None], out=np.zeros_like(q), where=scale[:, :, None] != 0)
    ones = np.ones((n, k // 16), np.int64)
    factors = d * np.float32(unit) * scale.astype(np.float32)
    return Codes(codes.astype(np.int64).reshape(n, k), factors.reshape(n, -1), ones, None, ones)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32 arrays, rounded once to float32 (to nearest even).

    The product is exact in float64. Its sum with c is rounded to odd there: with two bits to spare, rounding
    that gives the same as rounding once. Boldo and Melquiond, doi:10.1109/TC.2007.70819.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        c = np.asarray(c, np.float64)
        total = np.asarray(product + c)
        back = total - product
        error = (product - (total - back)) + (c - back)  # total + error is the exact sum (Knuth's TwoSum)
        bits = total.view(np.int64)
        even = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
        bits = np.where(even, bits + np.where((error > 0) == (total > 0), 1, -1), bits)
        return bits.view(np.float64).astype(np.float32)


def quantize_activations(x: Array) -> tuple[Array, Array]:
    """Quantize the rows of x [T, K] float32: codes [T, K] in [-127, 127] and scales [T, K / 32] float32."""
    blocks = np.asarray(x, np.float32).reshape(len(x), -1, BLOCK)
    amax = np.abs(blocks).max(axis=2)
    inverse = np.zeros_like(amax)
    np.divide(np.float32(127), amax, out=inverse, where=amax > TINY_AMAX)
    codes = np.rint(blocks * inverse[:, :, None]).astype(np.int64)
    return codes.reshape(len(x), -1), amax / np.float32(127)


def linear_int8(weight: Array | bytes, ggml_type: int, n: int, k: int, x: Array) -> Array:
    """x [T, K] float32 times the transpose of a matrix [N, K] given as ggml bytes: [T, N] float32.

    For each output, over the blocks of 32 k in ascending order, with s the activation scale of the block:
        sum = fma(I, D * s, sum)      I = sum of scale * q * a
        sum = fma(M, s * J, sum)      J = sum of min * a, for types with a minimum
    I and J are integers below 2^24, exact in float32. F32, F16, BF16: sum = fma(w, x, sum) over ascending k.
    """
    x = np.asarray(x, np.float32)
    total = np.zeros((len(x), n), np.float32)
    if GGMLType(ggml_type) in FLOAT_TYPES:
        w = dequantize(weight, ggml_type, n, k)
        for i in range(k):
            total = fma(w[:, i], x[:, i, None], total)
        return total
    codes = decode(weight, ggml_type, n, k)
    a, s = quantize_activations(x)
    a16 = a.reshape(len(x), -1, 16)  # [T, K / 16, 16]
    q16 = codes.q.reshape(n, -1, 16)  # [N, K / 16, 16]
    for b in range(k // BLOCK):
        i = j = np.zeros((len(x), n))
        for h in (2 * b, 2 * b + 1):
            # Products of such integers are exact in float64, and fast.
            i = i + a16[:, h].astype(np.float64) @ q16[:, h].T.astype(np.float64) * codes.scale[:, h]
            j = j + a16[:, h].sum(axis=1)[:, None] * codes.min[:, h]
        total = fma(i.astype(np.float32), codes.d[:, b] * s[:, b, None], total)
        if codes.m is not None:
            total = fma(codes.m[:, b], j.astype(np.float32) * s[:, b, None], total)
    return total


def dequantize(weight: Array | bytes, ggml_type: int, n: int, k: int) -> Array:
    """The matrix [N, K] of ggml bytes of any type, float32, by the gguf package."""
    data = np.frombuffer(weight, np.uint8).reshape(n, -1)
    return gguf.quants.dequantize(data, GGMLType(ggml_type)).reshape(n, k)
