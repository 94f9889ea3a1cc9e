"""A small crafted GGUF file, and what tests of damaged ones share."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from gguf_writer import Tensor, encode_header, encode_key, encode_tensor_info

from rvllm.gguf_file import GGML_TYPES, GGUFError, GGUFFile


class Info(NamedTuple):
    name: str | bytes
    dims: Sequence[int]  # in GGUF order
    type_id: int
    offset: int


METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "tokenizer.ggml.tokens": ["a", "é", "<|end|>", ""],
    "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0],
    "tokenizer.ggml.add_bos_token": False,
}
# F32, Q4_1 (20 bytes for 32 elements) twice, F32: they fill DATA.
INFOS = [
    Info("token_embd.weight", (64, 8), 0, 0),
    Info("blk.0.attn_q.weight", (64, 16), 3, 2048),
    Info("blk.0.ffn_up.weight", (64, 16), 3, 2688),
    Info("output_norm.weight", (64,), 0, 3328),
]
DATA = np.random.default_rng(0).integers(0, 256, 3584, np.uint8).tobytes()
ENDS = [2048, 2688, 3328, 3584]
TENSORS: list[Tensor] = [
    (str(name), tuple(dims)[::-1], type_id, DATA[offset:end])
    for (name, dims, type_id, offset), end in zip(INFOS, ENDS, strict=True)
]


def craft(
    path: Path, metadata: Mapping[str, object] = METADATA, infos: Sequence[Info] = INFOS, data: bytes = DATA
) -> Path:
    """A small file whose tensor descriptions may be wrong."""
    keys = b"".join(encode_key(key, value) for key, value in metadata.items())
    tensors = b"".join(encode_tensor_info(*info) for info in infos)
    head = encode_header(len(infos), len(metadata)) + keys + tensors
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def change(index: int, **values: Any) -> list[Info]:
    """INFOS with other values of one tensor."""
    return [*INFOS[:index], INFOS[index]._replace(**values), *INFOS[index + 1 :]]


def refused(path: str | Path, *words: str) -> str:
    """Open a file that must be refused by one line that has all words, without a jump in memory."""
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError) as caught:
            GGUFFile(path)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.isprintable() and len(message) < 1000
    for word in words:
        assert word in message
    return message


def assert_same_tensors(path: Path) -> GGUFFile:
    """Open a file that holds TENSORS, in any order."""
    file = GGUFFile(path)
    assert file.tensors.keys() == {name for name, *_ in TENSORS}
    for name, shape, type_id, data in TENSORS:
        tensor = file.tensors[name]
        assert (tensor.name, tensor.shape, tensor.type_id) == (name, shape, type_id)
        assert tensor.type == GGML_TYPES[type_id]
        assert tensor.data.tobytes() == data and not tensor.data.flags.writeable
    return file
