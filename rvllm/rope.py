"""RoPE (arXiv:2104.09864) and the ways to stretch it over longer contexts, as GGUF files describe them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SCALING_TYPES = ("none", "linear", "yarn", "longrope")


class RopeTable(NamedTuple):
    """Element pair i of a head at position p is rotated by p * inv_freq[i], and scaled."""

    inv_freq: tuple[float, ...]  # [dim / 2]
    scale: float = 1.0


class RopeScaling(NamedTuple):
    """rope.scaling.* of a file. factors divide the frequencies: [dim / 2], or 1 for all."""

    type: str = "none"
    factor: float = 1.0
    factors: NDArray[np.float64] | float = 1.0
    original_context_length: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_multiplier: float = 0.0


def rope_table(dim: int, theta: float, scaling: RopeScaling) -> RopeTable:
    """Frequencies of the first dim elements of a head."""
    inv_freq = theta ** -(np.arange(0, dim, 2) / dim) / scaling.factors
    scale = scaling.attention_factor
    stretched = inv_freq if scaling.type == "none" else inv_freq / scaling.factor
    if scaling.type == "yarn":
        kept = _yarn_kept(dim, theta, scaling)
        stretched = stretched * (1 - kept) + inv_freq * kept
        scale *= _yarn_magnitude(scaling.factor, 1.0)
        if scaling.log_multiplier:
            scale /= _yarn_magnitude(scaling.factor, scaling.log_multiplier)
    return RopeTable(tuple(float(f) for f in stretched), scale)


def _yarn_kept(dim: int, theta: float, scaling: RopeScaling) -> NDArray[np.float64]:
    """How much of each frequency YaRN leaves as it is: 1 for the fastest, 0 for the slowest. arXiv:2309.00071"""

    def pair_that_turns(turns: float) -> float:  # so many times within the original context
        return dim * math.log(scaling.original_context_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(0, math.floor(pair_that_turns(scaling.beta_fast)))
    high = min(dim - 1, math.ceil(pair_that_turns(scaling.beta_slow)))
    return 1 - np.clip((np.arange(dim // 2) - low) / max(0.001, high - low), 0, 1)


def _yarn_magnitude(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1
