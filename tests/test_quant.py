"""The scalar decoding of every GGUF type equals the gguf package's, bit for bit."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType
from random_weights import random_weights

from rvllm import _core

QUANTIZED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
TYPES = ["F32", "F16", "BF16", *QUANTIZED]


@pytest.mark.parametrize("name", TYPES)
def test_decoding_equals_gguf(name: str) -> None:
    kind = GGMLType[name]
    data = random_weights(kind, 8, 512, 0.05, np.random.default_rng(0))
    expected = gguf.quants.dequantize(data, kind).ravel()
    np.testing.assert_array_equal(_core.ops.dequantize(int(kind), data.tobytes()), expected)


@pytest.mark.parametrize("name", QUANTIZED)
def test_decoding_of_any_bits_equals_gguf(name: str) -> None:
    kind = GGMLType[name]
    _, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(1).integers(0, 256, (2000, size), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, kind).ravel()
    np.testing.assert_array_equal(_core.ops.dequantize(int(kind), data.tobytes()), expected)


def test_every_half_is_read_right() -> None:
    halves = np.arange(65536, dtype=np.uint16)
    expected = halves.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(_core.ops.dequantize(int(GGMLType.F16), halves.tobytes()), expected)


def test_unsupported_type_is_named() -> None:
    with pytest.raises(ValueError, match="ggml type 99 is not supported"):
        _core.ops.dequantize(99, b"")
