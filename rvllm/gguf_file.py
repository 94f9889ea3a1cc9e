"""A checked reader of GGUF files: metadata as Python values, tensors as views of the mapped file.

Nothing in a file is trusted: every length, count, type, dimension and offset is checked before it is used,
and what is wrong is one GGUFError that names file and field.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import reprlib
import stat
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from rvllm._gguf import HeaderError, parse_header

T = TypeVar("T")

SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 24
MAX_PARTS = 99999  # five digits in the name of a part
MAX_ELEMENTS = (1 << 63) - 1  # ggml counts them in int64


class GGUFError(ValueError):
    """A file that cannot be used; the message is one line, "<path>: <field>: <what is wrong>"."""


class GGMLType(NamedTuple):
    """How a tensor is stored: blocks of `block_size` elements in `type_size` bytes."""

    name: str
    block_size: int
    type_size: int


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 36),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
}
REMOVED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
# First bytes of what is often found under a model's name instead of the model.
FOREIGN_FILES = {
    b"<": "this is a web page (HTML or XML), not a model: the download went wrong",
    b"version https://git-lfs": "this is a Git LFS pointer, not the model it stands for",
    b"PK\x03\x04": "this is a zip archive, not a GGUF file",
    b"lmgg": "a GGML file from before GGUF: convert the model again",
    b"fmgg": "a GGML file from before GGUF: convert the model again",
    b"tjgg": "a GGML file from before GGUF: convert the model again",
}


@dataclass(frozen=True, eq=False)
class TensorInfo:
    """A tensor of a file. shape is in NumPy order, so a matrix is (N out, K in)."""

    name: str
    type: GGMLType
    type_id: int
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]  # [bytes] uint8, a read-only view of the mapped file


class _Part(NamedTuple):
    """One file of a model that may be split over several."""

    path: Path
    mapped: mmap.mmap
    version: int
    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]
    offsets: dict[str, int]  # bytes from the start of the file


def printable(text: str) -> str:
    """`text` on one line: control characters, surrogates and the like as Python escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class GGUFFile:
    """A GGUF model, opened and checked; the parts of a split model are found beside the first and merged.

    The views in `tensors` keep the mapping alive, also after close(). The file must not shrink meanwhile.
    Raises GGUFError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        first = _open_part(Path(os.fsdecode(path)))
        self.path = first.path
        self.version = first.version
        self.metadata = first.metadata
        self._parts = [first]
        split_count = self.get("split.count", 0, int)
        if split_count > 1:
            self._parts += self._open_other_parts(split_count)
        self.tensors: dict[str, TensorInfo] = {}
        for part in self._parts:
            for name, tensor in part.tensors.items():
                if name in self.tensors:
                    raise _error(part.path, f"{name}: tensor is in an earlier part of the model, too")
                self.tensors[name] = tensor
        expected = self.get("split.tensors.count", len(self.tensors), int)
        if split_count > 1 and expected != len(self.tensors):
            raise _error(self.path, f"split.tensors.count: {expected}, the parts hold {len(self.tensors)}")

    @property
    def architecture(self) -> str:
        return self.require("general.architecture", str)

    @overload
    def get(self, key: str, default: None, type_: type[T]) -> T | None: ...
    @overload
    def get(self, key: str, default: T, type_: type[T]) -> T: ...
    def get(self, key: str, default: T | None, type_: type[T]) -> T | None:
        """The value of `key`, or `default` where the file has no such key.

        type_ is int, float, bool, str, list (of str) or np.ndarray; an integer is taken for a float, too.
        Raises GGUFError, naming the key, where the value is of another type.
        """
        return self.require(key, type_) if key in self.metadata else default

    def require(self, key: str, type_: type[T]) -> T:
        """Like `get`, but a missing key is a GGUFError."""
        if key not in self.metadata:
            raise _error(self.path, f"{key}: missing key")
        value = self.metadata[key]
        if type_ is float and type(value) is int:
            value = float(value)
        if type(value) is not type_:
            found = f"{type(value).__name__} {reprlib.repr(value)}"
            raise _error(self.path, f"{key}: must be of type {type_.__name__}, is {found}")
        return value

    def release(self, tensor: TensorInfo, num_bytes: int | None = None) -> None:
        """Give back the memory of the whole pages of the first num_bytes (None: all) bytes of `tensor`.

        To touch them again reads the file again.
        """
        if sys.platform == "win32":
            return
        part = next(p for p in self._parts if p.tensors.get(tensor.name) is tensor)
        start = part.offsets[tensor.name]
        size = tensor.data.size if num_bytes is None else min(num_bytes, tensor.data.size)
        end = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if start < end:
            part.mapped.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Drop the tensors; the file is unmapped when the last view of one is gone."""
        self.tensors = {}
        self._parts = []

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_other_parts(self, count: int) -> list[_Part]:
        if count > MAX_PARTS:
            raise _error(self.path, f"split.count: {count} is more than the limit of {MAX_PARTS}")
        match = SPLIT_NAME.fullmatch(self.path.name)
        stem = match["stem"] if match else "NAME"
        names = [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
        number = self.get("split.no", 0, int)
        if number != 0:
            raise _error(self.path, f"split.no: part {number + 1} of {count}, open the first one: {names[0]}")
        if self.path.name != names[0]:
            raise _error(self.path, f"split.count: part 1 of {count} must be named {names[0]}")
        parts = []
        for number, name in enumerate(names[1:], 1):
            part = _open_part(self.path.with_name(name))
            found = part.metadata.get("split.no"), part.metadata.get("split.count")
            if found != (number, count):
                problem = f"split.no, split.count: {reprlib.repr(found)}, must be {(number, count)}"
                raise _error(part.path, problem)
            parts.append(part)
        return parts


def _error(path: Path, problem: str) -> GGUFError:
    return GGUFError(printable(f"{path}: {problem}"))


def _open_part(path: Path) -> _Part:
    try:
        mapped = _map(path)
        _check_magic(mapped)
        version, metadata, infos, header_size = parse_header(mapped)
        tensors, offsets = _place_tensors(mapped, header_size, _alignment(metadata), infos)
    except HeaderError as error:
        raise _error(path, str(error)) from None
    except OSError as error:
        raise _error(path, f"file: {error.strerror or error}") from None
    return _Part(path, mapped, version, metadata, tensors, offsets)


def _map(path: Path) -> mmap.mmap:
    if "\0" in str(path):
        raise HeaderError("file: a name cannot hold a zero byte")
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise HeaderError("file: is a folder, not a GGUF file")
    if not stat.S_ISREG(mode):  # to open a FIFO or a device could block for ever
        raise HeaderError("file: is a device, FIFO or socket, not a regular file")
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise HeaderError("file: is empty")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _check_magic(mapped: mmap.mmap) -> None:
    head = mapped[:64]
    if head.startswith(b"GGUF"):
        return
    for start, problem in FOREIGN_FILES.items():
        if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(start):
            raise HeaderError(f"magic: {problem}")
    raise HeaderError(f"magic: not a GGUF file, it starts with {head[:4]!r} instead of b'GGUF'")


def _alignment(metadata: dict[str, object]) -> int:
    alignment = cast(int, metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    if alignment % 8 or not 8 <= alignment <= MAX_ALIGNMENT:
        limits = f"a multiple of 8 from 8 to {MAX_ALIGNMENT}"
        raise HeaderError(f"general.alignment: {alignment} must be {limits}")
    return alignment


def _tensor_type(name: str, type_id: int) -> GGMLType:
    if type_id in GGML_TYPES:
        return GGML_TYPES[type_id]
    if type_id in REMOVED_TYPES:
        raise HeaderError(f"{name}: type {type_id} ({REMOVED_TYPES[type_id]}) was removed from GGUF")
    raise HeaderError(f"{name}: unknown tensor type {type_id}")


def _tensor_size(name: str, type_: GGMLType, dims: tuple[int, ...]) -> int:
    """Size in bytes. dims are in GGUF order: the first is the length of a row, stored in whole blocks."""
    elements = math.prod(dims)
    if not 0 < elements <= MAX_ELEMENTS:
        raise HeaderError(f"{name}: dimensions {dims} have {elements} elements, must be 1 to 2^63 - 1")
    row = dims[0] if dims else 1
    if row % type_.block_size:
        blocks = f"blocks of {type_.block_size} ({type_.name})"
        raise HeaderError(f"{name}: dimensions {dims}: a row of {row} elements is not made of {blocks}")
    return elements // type_.block_size * type_.type_size


def _place_tensors(
    mapped: mmap.mmap, header_size: int, alignment: int, infos: list[tuple[str, tuple[int, ...], int, int]]
) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """View every tensor in the file, once it is known to lie inside it and to overlap no other."""
    data_start = -(-header_size // alignment) * alignment
    tensors, offsets = {}, {}
    for name, dims, type_id, offset in infos:
        type_ = _tensor_type(name, type_id)
        size = _tensor_size(name, type_, dims)
        if offset % alignment:
            raise HeaderError(f"{name}: offset {offset} is not a multiple of the alignment, {alignment}")
        start = data_start + offset
        if start + size > len(mapped):
            raise HeaderError(f"{name}: ends at byte {start + size}, but the file ends at byte {len(mapped)}")
        data = np.frombuffer(mapped, np.uint8, size, start)
        while len(dims) > 2 and dims[-1] == 1:  # some writers keep them
            dims = dims[:-1]
        tensors[name] = TensorInfo(name, type_, type_id, dims[::-1], data)
        offsets[name] = start
    by_offset = sorted(offsets, key=offsets.__getitem__)
    for name, following in pairwise(by_offset):
        if offsets[name] + tensors[name].data.size > offsets[following]:
            raise HeaderError(f"{following}: overlaps the tensor {name} of type {tensors[name].type.name}")
    return tensors, offsets
