"""Seeded random weights in any format: legal bytes that decode to numbers of a given spread."""

from __future__ import annotations

from typing import NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from numpy.typing import NDArray


class BlockFields(NamedTuple):
    """Where a block keeps its float16 factors, and what its weights are when all other bits are random.

    IQ1_M and MXFP4 keep d in ways of their own: see write_d.
    """

    d: int  # offset of d, bytes
    m: int | None  # offset of the minimum's factor, None if there is none
    m_per_d: float  # the factor that makes the mean of the weights zero
    spread: float  # root mean square of the weights when d is 1


# Uniform codes and sub-scales. Q4_K: w = scale q - 7.5 min over scale, min in 0..63 and q in 0..15.
BLOCK_FIELDS = {
    GGMLType.Q4_0: BlockFields(0, None, 0.0, 4.64),
    GGMLType.Q4_1: BlockFields(0, 2, -7.5, 4.61),
    GGMLType.Q5_0: BlockFields(0, None, 0.0, 9.25),
    GGMLType.Q5_1: BlockFields(0, 2, -15.5, 9.23),
    GGMLType.Q8_0: BlockFields(0, None, 0.0, 73.9),
    GGMLType.Q2_K: BlockFields(80, 82, 1.5, 13.1),
    GGMLType.Q3_K: BlockFields(108, None, 0.0, 43.3),
    GGMLType.Q4_K: BlockFields(0, 2, 7.5, 258.0),
    GGMLType.Q5_K: BlockFields(0, 2, 15.5, 525.0),
    GGMLType.Q6_K: BlockFields(208, None, 0.0, 1366.0),
    GGMLType.TQ1_0: BlockFields(52, None, 0.0, 0.817),
    GGMLType.TQ2_0: BlockFields(64, None, 0.0, 1.22),
    GGMLType.IQ1_S: BlockFields(0, None, 0.0, 7.18),
    GGMLType.IQ1_M: BlockFields(48, None, 0.0, 7.19),
    GGMLType.IQ2_XXS: BlockFields(0, None, 0.0, 53.3),
    GGMLType.IQ2_XS: BlockFields(0, None, 0.0, 56.2),
    GGMLType.IQ2_S: BlockFields(0, None, 0.0, 56.4),
    GGMLType.IQ3_XXS: BlockFields(0, None, 0.0, 142.0),
    GGMLType.IQ3_S: BlockFields(0, None, 0.0, 140.0),
    GGMLType.IQ4_NL: BlockFields(0, None, 0.0, 67.5),
    GGMLType.IQ4_XS: BlockFields(0, None, 0.0, 1244.0),
    GGMLType.MXFP4: BlockFields(0, None, 0.0, 5.84),
}


def write_d(kind: GGMLType, blocks: NDArray[np.uint8], d: NDArray[np.float64]) -> None:
    """Set the scale d of each block; MXFP4 has powers of two: |d| is rounded up or down so that d^2 keeps its mean."""
    if kind == GGMLType.MXFP4:
        exponent, part = np.floor(np.log2(np.abs(d))), np.random.default_rng(len(d)).random(len(d))
        up = part < (d**2 / 4**exponent - 1) / 3
        blocks[:, 0] = exponent + up + 128
        return
    half = d.astype("<f2")
    if kind == GGMLType.IQ1_M:  # four bits of d in the high ones of each 16 of scales
        nibbles = half.view("<u2")[:, None] >> np.arange(0, 16, 4) & 15
        scales = blocks[:, 48:56].copy().view("<u2")
        blocks[:, 48:56] = (scales & 0xFFF | nibbles << 12).astype("<u2").view(np.uint8)
        return
    at = BLOCK_FIELDS[kind].d
    blocks[:, at : at + 2] = half[:, None].view(np.uint8)


def random_weights(
    ggml_type: int, n: int, k: int, spread: float, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Bytes [N, row bytes] of a random matrix [N, K] with mean 0 and root mean square `spread`.

    Every code and sub-scale occurs, and d of either sign. Raises ValueError when a block does not divide K.
    """
    kind = GGMLType(ggml_type)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if k % block:
        raise ValueError(f"K = {k} is no multiple of {block}, the block of {kind.name}")
    if kind not in BLOCK_FIELDS:
        values = rng.standard_normal((n, k), np.float32) * np.float32(spread)
        return np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8).reshape(n, -1)
    fields = BLOCK_FIELDS[kind]
    count = n * (k // block)
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    d = rng.uniform(0.5, 1.5, count) * rng.choice([-1.0, 1.0], count) * spread / fields.spread
    write_d(kind, blocks, d)
    if fields.m is not None:
        blocks[:, fields.m : fields.m + 2] = (d * fields.m_per_d).astype("<f2")[:, None].view(np.uint8)
    return blocks.reshape(n, -1)
