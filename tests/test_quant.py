"""The scalar decoding of every GGUF type equals the gguf package's, bit for bit."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType
from random_weights import BLOCK_FIELDS, random_weights

from rvllm import _core

QUANTIZED = [kind.name for kind in BLOCK_FIELDS]
TYPES = ["F32", "F16", "BF16", *QUANTIZED]


@pytest.mark.parametrize("name", TYPES)
def test_decoding_equals_gguf(name: str) -> None:
    kind = GGMLType[name]
    data = random_weights(kind, 8, 512, 0.05, np.random.default_rng(0))
    expected = gguf.quants.dequantize(data, kind).ravel()
    np.testing.assert_array_equal(_core.dequantize(int(kind), data.tobytes()), expected)


@pytest.mark.parametrize("name", QUANTIZED)
def test_decoding_of_any_bits_equals_gguf(name: str) -> None:
    kind = GGMLType[name]
    _, size = gguf.GGML_QUANT_SIZES[kind]
    # So many blocks that each of the up to 2048 points of a grid comes up: 64,000 are drawn.
    data = np.random.default_rng(1).integers(0, 256, (2000, size), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, kind).ravel()
    np.testing.assert_array_equal(_core.dequantize(int(kind), data.tobytes()), expected)


def test_every_half_is_read_right() -> None:
    halves = np.arange(65536, dtype=np.uint16)
    expected = halves.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(_core.dequantize(int(GGMLType.F16), halves.tobytes()), expected)


def test_unsupported_type_is_named() -> None:
    with pytest.raises(ValueError, match="ggml type 99 is not supported"):
        _core.dequantize(99, b"")


@pytest.mark.parametrize(
    "data", [bytes(17), bytes(19), np.zeros((4, 36), np.uint8)[:, :18]], ids=("17", "19", "apart")
)
def test_only_whole_blocks_on_end_are_read(data: bytes) -> None:
    with pytest.raises(ValueError, match="bytes are no whole Q4_0 blocks of 18 on end"):
        _core.dequantize(int(GGMLType.Q4_0), data)
