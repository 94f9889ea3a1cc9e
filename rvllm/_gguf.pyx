# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Parse the header of a GGUF file (ggml's GGUF specification, versions 2 and 3, little-endian).

Every length and count is checked against the bytes that are left before it is used or anything is allocated for it.
"""

from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport uint64_t

import numpy as np

cdef uint64_t MAX_HEADER_SIZE = 64 << 20  # bytes; ten times that of a vocabulary of 262,144
cdef uint64_t MAX_COUNT = 1 << 16  # keys or tensors of a file
cdef uint64_t MAX_STRINGS = 1 << 21  # strings of an array; merges of the largest vocabularies are 0.5 million
cdef uint64_t MAX_KEY_SIZE = 65535  # bytes, by the specification
cdef uint64_t MAX_NAME_SIZE = 64  # bytes, by the specification
cdef uint64_t MAX_DIMS = 4

cdef enum:
    U32 = 4
    BOOL = 7
    STRING = 8
    ARRAY = 9

VALUE_TYPES = ("U8", "I8", "U16", "I16", "U32", "I32", "F32", "BOOL", "STRING", "ARRAY", "U64", "I64", "F64")
DTYPES = tuple(
    np.dtype(code) if code else None
    for code in ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "u1", "", "", "<u8", "<i8", "<f8")
)


class HeaderError(ValueError):
    """What is wrong in a GGUF header: "<field>: <problem>"."""


cdef class Reader:
    """A position in the header; every read names the field it is for."""

    cdef object buffer
    cdef const unsigned char[::1] view
    cdef uint64_t position, end
    cdef str end_name

    def __init__(self, buffer):
        self.buffer = buffer
        self.view = buffer
        self.position = 0
        self.end = min(<uint64_t>self.view.shape[0], MAX_HEADER_SIZE)
        self.end_name = "the file" if self.end == <uint64_t>self.view.shape[0] else "the largest header allowed"

    cdef int require(self, str field, uint64_t count, uint64_t size) except -1:
        """Raise unless count items of at least `size` bytes each lie ahead."""
        if count > (self.end - self.position) // size:
            raise HeaderError(
                f"{field}: {count} x {size} bytes from byte {self.position} on, "
                f"but {self.end_name} ends at byte {self.end}"
            )
        return 0

    cdef uint64_t integer(self, str field, int size) except? 0:
        cdef uint64_t value = 0
        cdef int i
        self.require(field, 1, size)
        for i in range(size):
            value |= <uint64_t>self.view[self.position + i] << (8 * i)
        self.position += size
        return value

    cdef uint64_t count(self, str field, uint64_t limit, uint64_t size) except? 0:
        """Read a number of items of at least `size` bytes each."""
        cdef uint64_t value = self.integer(field, 8)
        if value > limit:
            raise HeaderError(f"{field}: {value} is more than the limit of {limit}")
        self.require(field, value, size)
        return value

    cdef str string(self, str field, uint64_t limit, const char* errors = "strict"):
        cdef uint64_t length = self.count(field, limit, 1)
        cdef const unsigned char* start = &self.view[0] + self.position
        try:
            text = PyUnicode_DecodeUTF8(<const char*>start, length, errors)
        except UnicodeDecodeError as error:
            raise HeaderError(f"{field}: invalid UTF-8 at byte {self.position + <uint64_t>error.start}") from None
        self.position += length
        return text

    cdef object numbers(self, str field, uint64_t value_type, uint64_t count):
        """Copy `count` numbers or booleans to a new array."""
        dtype = DTYPES[value_type]
        self.require(field, count, dtype.itemsize)
        array = np.frombuffer(self.buffer, dtype, count, self.position).copy()
        self.position += count * <uint64_t>dtype.itemsize
        if value_type != BOOL:
            return array
        if count and array.max() > 1:
            raise HeaderError(f"{field}: a boolean is {array.max()}, not 0 or 1")
        return array.view(np.bool_)

    cdef str text(self, str field):
        # No answer depends on the name of an author, say.
        cdef const char* errors = "replace"
        if field.startswith("tokenizer."):
            errors = "strict"
        return self.string(field, MAX_HEADER_SIZE, errors)

    cdef object array(self, str field):
        cdef uint64_t value_type = self.integer(field, 4)
        cdef uint64_t count, i
        cdef list strings
        check_value_type(field, value_type)
        if value_type == ARRAY:
            raise HeaderError(f"{field}: arrays of arrays are not supported")
        if value_type != STRING:
            return self.numbers(field, value_type, self.integer(field, 8))
        count = self.count(field, MAX_STRINGS, 8)
        strings = []
        for i in range(count):
            strings.append(self.text(field))
        return strings

    cdef object value(self, str field, uint64_t value_type):
        check_value_type(field, value_type)
        if value_type == STRING:
            return self.text(field)
        if value_type == ARRAY:
            return self.array(field)
        return self.numbers(field, value_type, 1)[0].item()

    cdef dict metadata(self, uint64_t count):
        cdef uint64_t i, value_type
        cdef dict result = {}
        for i in range(count):
            key = self.string(f"metadata key {i + 1} of {count}", MAX_KEY_SIZE)
            field = key if len(key) <= 80 else key[:77] + "..."
            if not key:
                raise HeaderError(f"metadata key {i + 1} of {count}: empty")
            if key in result:
                raise HeaderError(f"{field}: duplicate key")
            value_type = self.integer(field, 4)
            if key == "general.alignment" and value_type != U32:
                raise HeaderError(f"{field}: type {type_name(value_type)}, must be U32")
            result[key] = self.value(field, value_type)
        return result

    cdef list tensors(self, uint64_t count):
        cdef uint64_t i, num_dims
        cdef set names = set()
        cdef list result = []
        for i in range(count):
            field = f"tensor {i + 1} of {count}"
            name = self.string(field, MAX_NAME_SIZE)
            if not name:
                raise HeaderError(f"{field}: empty name")
            if name in names:
                raise HeaderError(f"{name}: duplicate tensor")
            names.add(name)
            num_dims = self.integer(name, 4)
            if num_dims > MAX_DIMS:
                raise HeaderError(f"{name}: {num_dims} dimensions, at most {MAX_DIMS} are allowed")
            dims = tuple([self.integer(name, 8) for _ in range(num_dims)])
            result.append((name, dims, self.integer(name, 4), self.integer(name, 8)))
        return result


cdef str type_name(uint64_t value_type):
    return VALUE_TYPES[value_type] if value_type < <uint64_t>len(VALUE_TYPES) else str(value_type)


cdef int check_value_type(str field, uint64_t value_type) except -1:
    if value_type >= <uint64_t>len(VALUE_TYPES):
        raise HeaderError(f"{field}: unknown value type {value_type}")
    return 0


def parse_header(buffer):
    """Parse the header at the start of `buffer` (read-only bytes of the whole file, more than zero).

    Returns (version, metadata: dict[str, value], tensors: list[(name, dims in GGUF order, type id, offset)],
    header size in bytes). Numbers of an array are copied to NumPy, strings of an array are a list.
    Raises HeaderError, naming the field.
    """
    cdef Reader reader = Reader(buffer)
    if bytes(buffer[:4]) != b"GGUF":
        raise HeaderError("magic: not a GGUF file")
    reader.position = 4
    version = reader.integer("version", 4)
    if version and version & 0xFFFF == 0:
        raise HeaderError("version: the file is big-endian, only little-endian files are supported")
    if version not in (2, 3):
        raise HeaderError(f"version: {version} is not supported, only 2 and 3 are")
    num_tensors = reader.count("tensor count", MAX_COUNT, 24)
    num_keys = reader.count("metadata count", MAX_COUNT, 13)
    metadata = reader.metadata(num_keys)
    tensors = reader.tensors(num_tensors)
    return version, metadata, tensors, reader.position
