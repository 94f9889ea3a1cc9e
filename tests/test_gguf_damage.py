"""What the GGUF reader refuses, and how: cases of public failure reports, hostile headers, random damage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf_writer import (
    ARR,
    BOOL,
    F32,
    F64,
    I32,
    STR,
    U8,
    U64,
    Typed,
    encode_header,
    encode_key,
    encode_string,
    encode_tensor_info,
    write_gguf,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from small_gguf import DATA, INFOS, METADATA, TENSORS, assert_same_tensors, change, craft, refused

from rvllm.gguf_file import GGUFError, GGUFFile

# Tensors (reports GGUF-01, GGUF-07, GGUF-13)


@pytest.mark.parametrize(
    ("index", "dims"),
    [
        (0, (576, 2**42 + 1)),
        (0, (2**63, 2)),
        (0, (2**32, 2**32)),
        (0, (576, 2**64 // 576 + 1)),
        (1, (2**61, 16)),
        (0, (2**62, 2)),
        (0, (2**64 - 1,) * 4),
        (0, (64, 0)),
        (1, (0, 16)),
        (1, (48, 16)),
        (1, ()),
        (0, (64, 1000)),
    ],
)
def test_impossible_dimensions(tmp_path: Path, index: int, dims: tuple[int, ...]) -> None:
    refused(craft(tmp_path / "f.gguf", infos=change(index, dims=dims)), f"f.gguf: {TENSORS[index][0]}: ")


def test_number_of_dimensions(tmp_path: Path) -> None:
    four = craft(tmp_path / "four.gguf", infos=change(0, dims=(2, 4, 8, 8)))
    assert GGUFFile(four).tensors["token_embd.weight"].shape == (8, 8, 4, 2)
    for dims in ((64, 8, 1), (64, 8, 1, 1)):
        longer = craft(tmp_path / "longer.gguf", infos=change(0, dims=dims))
        assert GGUFFile(longer).tensors["token_embd.weight"].shape == (8, 64)
    column = craft(tmp_path / "column.gguf", infos=change(0, dims=(512, 1, 1, 1)))
    assert GGUFFile(column).tensors["token_embd.weight"].shape == (1, 512)
    scalar = craft(tmp_path / "scalar.gguf", infos=change(3, dims=()))
    assert GGUFFile(scalar).tensors["output_norm.weight"].data.size == 4
    for count in (5, 2**32 - 1):
        info = encode_tensor_info("w", (1, 1, 1, 1, 1), 0, 0, num_dims=count)
        (tmp_path / "many.gguf").write_bytes(encode_header(1, 0) + info + bytes(64))
        refused(tmp_path / "many.gguf", f"w: {count} dimensions, at most 4")


@pytest.mark.parametrize("offset", [len(DATA), 10**6, 2**63, 2**64 - 32, 2048 + 16, 2048, 2048 + 32, 0, 3328])
def test_offsets_outside_overlapping_or_unaligned(tmp_path: Path, offset: int) -> None:
    message = refused(craft(tmp_path / "f.gguf", infos=change(2, offset=offset)))
    assert "blk.0.ffn_up.weight" in message


def test_any_order_and_gaps_are_fine(tmp_path: Path) -> None:
    reverse = craft(tmp_path / "reverse.gguf", infos=INFOS[::-1])
    assert list(assert_same_tensors(reverse).tensors) == [name for name, *_ in TENSORS[::-1]]
    moved = [info._replace(offset=info.offset + (1 << 20 if info.offset else 0)) for info in INFOS]
    gap = craft(tmp_path / "gap.gguf", infos=moved, data=DATA[:2048] + bytes(1 << 20) + DATA[2048:] + b"tail")
    assert_same_tensors(gap)


@pytest.mark.parametrize(
    ("type_id", "word"),
    [
        (31, "Q4_0_4_4"),
        (36, "IQ4_NL_4_4"),
        (4, "Q4_2"),
        (42, "unknown"),
        (99, "unknown"),
        (2**32 - 1, "unknown"),
    ],
)
def test_unknown_tensor_type(tmp_path: Path, type_id: int, word: str) -> None:
    path = craft(tmp_path / "f.gguf", infos=change(1, type_id=type_id))
    assert "corrupt" not in refused(path, "blk.0.attn_q.weight", str(type_id), word)


def test_tensor_names(tmp_path: Path) -> None:
    refused(
        craft(tmp_path / "f.gguf", infos=change(1, name="token_embd.weight")), "token_embd.weight: duplicate"
    )
    refused(craft(tmp_path / "f.gguf", infos=change(1, name="")), "tensor 2 of 4: empty")
    refused(craft(tmp_path / "f.gguf", infos=change(1, name="x" * 65)), "tensor 2 of 4: 65", "64")
    refused(craft(tmp_path / "f.gguf", infos=change(1, name=b"a\xff")), "tensor 2 of 4: invalid UTF-8")
    refused(craft(tmp_path / "f.gguf", infos=change(1, name="evil\n\x1b[2J", type_id=99)), "evil\\n\\x1b[2J")
    assert "x" * 64 in GGUFFile(craft(tmp_path / "f.gguf", infos=change(1, name="x" * 64))).tensors


def test_missing_architecture_is_named(tmp_path: Path) -> None:
    file = GGUFFile(craft(tmp_path / "f.gguf", metadata={}))
    with pytest.raises(GGUFError, match=r"general\.architecture: missing key"):
        _ = file.architecture


# Alignment (report GGUF-05)


@pytest.mark.parametrize(
    "value",
    [0, 3, 7, 4, 33, 2**31, Typed(STR, "32"), Typed(U64, 32), Typed(I32, -32), Typed(F32, 32.0), [32]],
)
def test_bad_alignment(tmp_path: Path, value: object) -> None:
    refused(craft(tmp_path / "f.gguf", {**METADATA, "general.alignment": value}), "general.alignment")


@pytest.mark.parametrize("alignment", [8, 16, 24, 64, 128, 4096])
def test_good_alignment(tmp_path: Path, alignment: int) -> None:
    write_gguf(tmp_path / "f.gguf", METADATA, TENSORS, alignment=alignment)
    assert_same_tensors(tmp_path / "f.gguf")


@pytest.mark.parametrize("pad", range(9))
def test_alignment_that_the_tensors_do_not_have(tmp_path: Path, pad: int) -> None:
    # Whatever the length of the header, the file must not be read with its data shifted.
    metadata = {**METADATA, "general.alignment": 256, "pad": "x" * (pad * 32)}
    refused(craft(tmp_path / "f.gguf", metadata), "weight")


# Metadata


def u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def u64(number: int) -> bytes:
    return number.to_bytes(8, "little")


def key(value_type: int, value: bytes) -> bytes:
    return encode_string("k") + u32(value_type) + value


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (key(STR, u64(2**60)), "k: 1152921504606846976 is more than"),
        (key(STR, u64(2**64 - 1)), "k: 18446744073709551615 is more than"),
        (key(STR, u64(1000)), "k: 1000 x 1 bytes from byte 45 on, but the file ends at byte 109"),
        (key(ARR, u32(STR) + u64(2**60)), "k: 1152921504606846976 is more than"),
        (key(ARR, u32(STR) + u64(1000)), "k: 1000 x 8 bytes"),
        (key(ARR, u32(U8) + u64(1000)), "k: 1000 x 1 bytes"),
        (key(ARR, u32(F64) + u64(2**61)), "k: 2305843009213693952 x 8 bytes"),
        (key(ARR, u32(F64) + u64(2**64 - 1)), "k: 18446744073709551615 x 8 bytes"),
        (key(ARR, u32(ARR) + u64(1) + u32(U8) + u64(1)), "k: arrays of arrays"),
        (key(ARR, u32(77) + u64(1)), "k: unknown value type 77"),
        (key(13, b""), "k: unknown value type 13"),
        (key(2**32 - 1, b""), "k: unknown value type 4294967295"),
        (key(BOOL, b"\2"), "k: a boolean is 2"),
        (key(ARR, u32(BOOL) + u64(3) + b"\0\1\xff"), "k: a boolean is 255"),
        (encode_key("tokenizer.k", Typed(STR, b"a\xffb")), "tokenizer.k: invalid UTF-8 at byte 56"),
        (encode_key("tokenizer.k", ["a", b"\xc3"]), "tokenizer.k: invalid UTF-8"),
        (
            encode_key("tokenizer.evil\n\x1b[2J", Typed(STR, b"\xff")),
            "tokenizer.evil\\n\\x1b[2J: invalid UTF-8",
        ),
        (encode_key("", 1), "metadata key 1 of 1: empty"),
        (encode_key(b"\xff\xfe", 1), "metadata key 1 of 1: invalid UTF-8"),
        (encode_key("k" * 65536, 1), "metadata key 1 of 1: 65536 is more than the limit of 65535"),
        (u64(2**64 - 1) + b"k", "metadata key 1 of 1: 18446744073709551615"),
    ],
)
def test_hostile_metadata(tmp_path: Path, keys: bytes, message: str) -> None:
    (tmp_path / "f.gguf").write_bytes(encode_header(0, 1) + keys + bytes(64))
    refused(tmp_path / "f.gguf", f"f.gguf: {message}")


def test_duplicate_and_longest_keys(tmp_path: Path) -> None:
    (tmp_path / "f.gguf").write_bytes(encode_header(0, 2) + encode_key("k", 1) * 2)
    refused(tmp_path / "f.gguf", "k: duplicate key")
    write_gguf(tmp_path / "f.gguf", {"k" * 65535: 1})
    assert list(GGUFFile(tmp_path / "f.gguf").metadata) == ["k" * 65535]


@pytest.mark.parametrize("count", [60, 2**17, 2**63, 2**64 - 1])
def test_hostile_counts(tmp_path: Path, count: int) -> None:
    for num_tensors, num_keys, field in ((count, 0, "tensor count"), (0, count, "metadata count")):
        (tmp_path / "f.gguf").write_bytes(encode_header(num_tensors, num_keys) + bytes(64))
        refused(tmp_path / "f.gguf", f"f.gguf: {field}: {count}")


def test_claims_are_limited_in_a_huge_file(tmp_path: Path) -> None:
    claims = [key(STR, u64(2**28)), key(ARR, u32(U8) + u64(2**28)), key(ARR, u32(STR) + u64(2**22))]
    for claim in claims:
        (tmp_path / "f.gguf").write_bytes(encode_header(0, 1) + claim)
        os.truncate(tmp_path / "f.gguf", 1 << 32)  # zero bytes without end, on no disk
        refused(tmp_path / "f.gguf", "f.gguf: k: ")


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (encode_header(0, 0, version=1), ("version", "1 is not supported")),
        (encode_header(0, 0, version=0), ("version", "0 is not supported")),
        (encode_header(0, 0, version=4), ("version", "4 is not supported")),
        (encode_header(0, 0, version=3 << 24), ("version", "big-endian")),
        (encode_header(0, 0, version=2 << 24), ("version", "big-endian")),
        (encode_header(0, 0, magic=b"tjgg"), ("magic", "before GGUF")),
        (encode_header(0, 0, magic=b"FUGG"), ("magic", "FUGG")),
        (b"  \n<!DOCTYPE html><html>", ("magic", "HTML")),
        (b"version https://git-lfs.github.com/spec/v1\n", ("magic", "Git LFS")),
        (b"PK\x03\x04....", ("magic", "zip")),
        (b"G", ("magic", "G")),
        (b"GGUF", ("version", "the file ends at byte 4")),
        (b"", ("file", "empty")),
    ],
)
def test_files_that_are_not_gguf(tmp_path: Path, head: bytes, words: Sequence[str]) -> None:
    (tmp_path / "f.gguf").write_bytes(head)
    refused(tmp_path / "f.gguf", "f.gguf: ", *words)


# Random damage


def read_all(path: Path) -> None:
    """Open a damaged file: it is refused by a GGUFError, or all of it can be read."""
    try:
        file = GGUFFile(path)
    except GGUFError as error:
        assert str(error).isprintable()
        return
    for tensor in file.tensors.values():
        blocks = int(np.prod(tensor.shape, dtype=object)) // tensor.type.block_size
        assert tensor.data.size == blocks * tensor.type.type_size
        tensor.data.sum()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return craft(tmp_path_factory.mktemp("fuzz") / "f.gguf").read_bytes()


EDITS = st.tuples(
    st.integers(0, 511),  # the header and a little more
    st.one_of(
        st.integers(0, 255).map(lambda n: bytes([n])),
        st.integers(0, 2**32 - 1).map(lambda n: n.to_bytes(4, "little")),
        st.sampled_from([0, 1, 2**21, 2**31, 2**32, 2**60, 2**63, 2**64 - 1]).map(
            lambda n: n.to_bytes(8, "little")
        ),
    ),
)


@settings(max_examples=500, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(EDITS, max_size=4), size=st.one_of(st.none(), st.integers(0, 4096)))
@example(edits=[], size=None)
def test_random_damage(
    tmp_path: Path, original: bytes, edits: list[tuple[int, bytes]], size: int | None
) -> None:
    content = bytearray(original)
    for position, new in edits:
        content[position : position + len(new)] = new
    (tmp_path / "f.gguf").write_bytes(content[:size])
    read_all(tmp_path / "f.gguf")


def test_every_single_bit_and_every_length(tmp_path: Path, original: bytes) -> None:
    path = tmp_path / "f.gguf"
    path.write_bytes(original)
    with path.open("r+b", buffering=0) as file:
        for position, byte in enumerate(original[: -len(DATA)]):
            for damaged in (byte ^ 1 << bit for bit in range(8)):
                file.seek(position)
                file.write(bytes([damaged]))
                read_all(path)
            file.seek(position)
            file.write(bytes([byte]))
    for size in range(len(original)):
        os.truncate(path, len(original) - 1 - size)
        with pytest.raises(GGUFError):
            GGUFFile(path)
