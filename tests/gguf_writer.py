"""Write GGUF files for tests: whole ones with write_gguf, parts of damaged ones with the encode functions.

Layout: ggml's GGUF specification, versions 2 and 3, little-endian. Nothing is checked, so that tests can
write what is wrong.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
_DTYPES: dict[int, np.dtype[Any]] = {
    U8: np.dtype("u1"),
    I8: np.dtype("i1"),
    U16: np.dtype("<u2"),
    I16: np.dtype("<i2"),
    U32: np.dtype("<u4"),
    I32: np.dtype("<i4"),
    F32: np.dtype("<f4"),
    BOOL: np.dtype("?"),
    U64: np.dtype("<u8"),
    I64: np.dtype("<i8"),
    F64: np.dtype("<f8"),
}


class Typed(NamedTuple):
    """Force a GGUF type: Typed(U16, 3). An array of a chosen element type: Typed(ARR, Typed(I32, [1, 2]))."""

    value_type: int
    value: Any


Tensor = tuple[str, Sequence[int], int, bytes]


def infer(value: object) -> Typed:
    """The GGUF type of a Python value: bool BOOL, int U32, float F32, str STR, list and ndarray ARR."""
    if isinstance(value, Typed):
        return value
    if isinstance(value, bool):
        return Typed(BOOL, value)
    if isinstance(value, int):
        return Typed(U32, value)
    if isinstance(value, float):
        return Typed(F32, value)
    if isinstance(value, (str, bytes)):
        return Typed(STR, value)
    if isinstance(value, np.ndarray):
        return Typed(ARR, Typed(next(t for t, dtype in _DTYPES.items() if dtype == value.dtype), value))
    if isinstance(value, (list, tuple)):
        element_type = infer(value[0]).value_type if value else STR
        return Typed(ARR, Typed(I32 if element_type == U32 else element_type, value))
    raise TypeError(f"no GGUF type for {type(value).__name__}")


def encode_string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def encode_value(value: object) -> bytes:
    """The bytes of a value, without the type in front of it."""
    value_type, content = infer(value)
    if value_type == STR:
        return encode_string(content)
    if value_type != ARR:
        return bytes(np.array(content, _DTYPES[value_type]).tobytes())
    element_type, items = infer(content)
    head = struct.pack("<IQ", element_type, len(items))
    if element_type in _DTYPES:
        return head + bytes(np.array(items, _DTYPES[element_type]).tobytes())
    return head + b"".join(encode_value(Typed(element_type, item)) for item in items)


def encode_key(key: str | bytes, value: object) -> bytes:
    return encode_string(key) + struct.pack("<I", infer(value).value_type) + encode_value(value)


def encode_header(num_tensors: int, num_keys: int, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_keys)


def encode_tensor_info(
    name: str | bytes, dims: Sequence[int], type_id: int, offset: int, num_dims: int | None = None
) -> bytes:
    """dims in GGUF order (fastest first: K, N), offset in bytes from the start of the tensor data."""
    count = len(dims) if num_dims is None else num_dims
    return encode_string(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, type_id, offset)


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, object],
    tensors: Sequence[Tensor] = (),
    alignment: int = 32,
    version: int = 3,
) -> None:
    """Write a file of tensors (name, shape in NumPy order, ggml type id, bytes), each padded to alignment.

    Another alignment than 32 adds the key general.alignment, unless the metadata has one of its own.
    """
    metadata = dict(metadata)
    if alignment != 32:
        metadata.setdefault("general.alignment", alignment)
    head = bytearray(encode_header(len(tensors), len(metadata), version))
    for key, value in metadata.items():
        head += encode_key(key, value)
    offset = 0
    for name, shape, type_id, data in tensors:
        head += encode_tensor_info(name, tuple(shape)[::-1], type_id, offset)
        offset += len(data) + -len(data) % alignment
    with open(path, "wb") as file:
        file.write(head + bytes(-len(head) % alignment))
        for *_, data in tensors:
            file.write(data)
            file.write(bytes(-len(data) % alignment))
