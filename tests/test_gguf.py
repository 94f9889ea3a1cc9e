"""The GGUF reader: values, tensors, split files (report GGUF-11) and odd paths (report CPU-03)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf_writer import (
    ARR,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STR,
    U8,
    U16,
    U32,
    U64,
    Typed,
    write_gguf,
)
from small_gguf import DATA, METADATA, TENSORS, assert_same_tensors, craft, refused

from rvllm.gguf_file import GGML_TYPES, GGUFError, GGUFFile


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return craft(tmp_path / "small.gguf")


# Reading


def test_reads_tensors_and_architecture(small: Path) -> None:
    file = assert_same_tensors(small)
    assert (file.path, file.version, file.architecture) == (small, 3, "llama")


@pytest.mark.parametrize("version", [2, 3])
def test_reads_values_of_every_type(tmp_path: Path, version: int) -> None:
    numbers = {
        U8: 255, I8: -128, U16: 65535, I16: -32768, U32: 2**32 - 1, I32: -(2**31), U64: 2**64 - 1, I64: -(2**63),
        F32: 0.5, F64: 0.1,
    }  # fmt: skip
    metadata: dict[str, object] = {f"scalar.{t}": Typed(t, v) for t, v in numbers.items()}
    metadata |= {f"array.{t}": Typed(ARR, Typed(t, [v, 1])) for t, v in numbers.items()}
    metadata |= {"yes": True, "text": "é\n", "bools": [True, False], "texts": ["", "中"]}
    metadata |= {"none": Typed(ARR, Typed(F32, [])), "no.texts": Typed(ARR, Typed(STR, []))}
    write_gguf(tmp_path / "values.gguf", metadata, version=version)
    file = GGUFFile(tmp_path / "values.gguf")
    assert (file.version, file.tensors) == (version, {})
    for value_type, number in numbers.items():
        scalar, array = file.metadata[f"scalar.{value_type}"], file.metadata[f"array.{value_type}"]
        assert scalar == number and type(scalar) is type(number)
        assert isinstance(array, np.ndarray) and array.tolist() == [number, 1] and array.flags.writeable
    bools = file.get("bools", None, np.ndarray)
    assert bools is not None and bools.dtype == np.bool_ and bools.tolist() == [True, False]
    assert (file.metadata["yes"], file.metadata["text"], file.metadata["texts"]) == (True, "é\n", ["", "中"])
    assert file.require("none", np.ndarray).size == 0 and file.metadata["no.texts"] == []


def test_texts_that_are_no_utf8(tmp_path: Path) -> None:
    """Of which no answer depends on any but the tokenizer's."""
    values = {"general.author": Typed(STR, b"a\xffb"), "general.tags": Typed(ARR, Typed(STR, [b"\xc3", "x"]))}
    file = GGUFFile(craft(tmp_path / "f.gguf", metadata={**METADATA, **values}))
    assert (file.metadata["general.author"], file.metadata["general.tags"]) == ("a\ufffdb", ["\ufffd", "x"])


def test_typed_getter(small: Path) -> None:
    file = GGUFFile(small)
    assert file.get("llama.block_count", 7, int) == 1
    assert file.get("llama.block_count", 7.0, float) == 1.0
    assert file.get("absent", 7, int) == 7
    assert file.get("absent", None, str) is None
    assert file.get("tokenizer.ggml.tokens", None, list) == ["a", "é", "<|end|>", ""]
    wrong: list[tuple[str, type]] = [
        ("general.architecture", int), ("tokenizer.ggml.add_bos_token", int), ("tokenizer.ggml.tokens", str),
        ("tokenizer.ggml.scores", float), ("llama.block_count", bool),
    ]  # fmt: skip
    for key, type_ in wrong:
        with pytest.raises(GGUFError, match=rf"small.gguf: {key}: must be of type {type_.__name__}"):
            file.get(key, None, type_)
    with pytest.raises(GGUFError, match=r"small.gguf: absent: missing key"):
        file.require("absent", int)


def test_reads_what_another_writer_writes(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path, matrix = tmp_path / "other.gguf", np.arange(12, dtype=np.float32).reshape(3, 4)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokens", ["a", "b"])
    writer.add_float32("eps", 0.25)
    writer.add_tensor("matrix", matrix)
    writer.add_tensor("vector", matrix[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(path) as file:
        assert (file.architecture, file.metadata["tokens"], file.metadata["eps"]) == (
            "llama",
            ["a", "b"],
            0.25,
        )
        assert file.tensors["matrix"].shape == (3, 4)
        np.testing.assert_array_equal(file.tensors["matrix"].data.view("<f4").reshape(3, 4), matrix)
    for type_id, (block_size, type_size) in gguf.GGML_QUANT_SIZES.items():
        type_ = GGML_TYPES[int(type_id)]
        assert (type_.name, type_.block_size) == (type_id.name, block_size)
        # ggml stores the two scales of Q8_1 as halves; the Python package still counts floats.
        assert type_.type_size == (36 if type_.name == "Q8_1" else type_size)


def test_views_outlive_close_and_release(tmp_path: Path) -> None:
    data = np.arange(40000, dtype="<f4")
    write_gguf(tmp_path / "big.gguf", METADATA, [("w", data.shape, 0, data.tobytes())])
    with GGUFFile(tmp_path / "big.gguf") as file:
        tensor = file.tensors["w"]
        file.release(tensor)
        np.testing.assert_array_equal(tensor.data.view("<f4"), data)
    assert file.tensors == {}
    np.testing.assert_array_equal(tensor.data.view("<f4"), data)


def test_reads_the_real_models(smollm2_path: Path, gemma3_path: Path) -> None:
    with GGUFFile(smollm2_path) as file:
        assert (file.architecture, len(file.tensors)) == ("llama", 272)
        assert len(file.require("tokenizer.ggml.tokens", list)) == 49152
        assert file.tensors["blk.29.ffn_up.weight"].shape == (1536, 576)
        assert {t.type.name for t in file.tensors.values()} == {"Q4_1", "Q8_0", "F32"}
        assert sum(t.data.size for t in file.tensors.values()) < 98_362_432
    with GGUFFile(gemma3_path) as file:
        assert (file.architecture, file.get("gemma3.attention.key_length", 0, int)) == ("gemma3", 256)
        assert file.require("tokenizer.ggml.scores", np.ndarray).shape == (262144,)
        assert {t.type.name for t in file.tensors.values()} == {"Q4_K", "Q5_0", "Q6_K", "Q8_0", "F32"}


# Split files (report GGUF-11)


def split(folder: Path, stem: str = "m", count: int = 3) -> list[Path]:
    """A model in three parts."""
    paths = [folder / f"{stem}-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for number, tensors in enumerate((TENSORS[:2], TENSORS[2:3], TENSORS[3:])):
        keys = {
            "split.no": Typed(U16, number),
            "split.count": Typed(U64, count),
            "split.tensors.count": Typed(I32, 4),
        }
        write_gguf(paths[number], METADATA | keys if number == 0 else keys, tensors)
    return paths


def test_split_file_is_merged(tmp_path: Path) -> None:
    file = assert_same_tensors(split(tmp_path, "a-00002-of-00003 é")[0])
    assert file.architecture == "llama"
    for tensor in file.tensors.values():
        file.release(tensor)


def test_damaged_splits_name_the_part(tmp_path: Path) -> None:
    one, two, three = split(tmp_path)
    refused(two, two.name, "part 2 of 3", one.name)
    (tmp_path / "glued.gguf").write_bytes(b"".join(path.read_bytes() for path in (one, two, three)))
    refused(tmp_path / "glued.gguf", "glued.gguf: split.count", "NAME-00001-of-00003.gguf")
    shutil.move(two, tmp_path / "t")
    shutil.move(three, two)
    shutil.move(tmp_path / "t", three)
    refused(one, two.name, "split.no", "(2, 3)", "(1, 3)")
    three.unlink()
    split(tmp_path)
    three.unlink()
    refused(one, three.name, "No such file")
    split(tmp_path)
    two.rename(tmp_path / "n-00002-of-00003.gguf")
    refused(one, two.name, "No such file")
    craft(two)
    refused(one, two.name, "split.no", "None")
    split(tmp_path)
    keys = {"split.no": Typed(U16, 1), "split.count": Typed(U16, 3)}
    write_gguf(two, keys, [("token_embd.weight", (8, 64), 0, DATA[:2048])])
    refused(one, two.name, "token_embd.weight", "earlier part")
    write_gguf(two, keys)
    refused(one, "split.tensors.count: 4", "3")


@pytest.mark.parametrize("count", [65535, 2, 100_000, 2**60])
def test_wrong_split_count(tmp_path: Path, count: int) -> None:
    one, *_ = split(tmp_path, count=count)
    refused(one, "split.count", str(count))


def test_single_files_with_split_names_or_keys(tmp_path: Path) -> None:
    assert_same_tensors(craft(tmp_path / "x-00001-of-00001.gguf"))
    keys = {"split.no": Typed(U16, 0), "split.tensors.count": Typed(I32, 4)}
    for count in (0, 1):  # a merge leaves the count at 0
        assert_same_tensors(
            craft(tmp_path / "merged.gguf", METADATA | keys | {"split.count": Typed(U16, count)})
        )


# Paths (report CPU-03)

NAMES = [
    "Загрузки 模型/m o d é l.gguf",
    "new\nline.gguf",
    "n" * 245 + ".gguf",
    "-m",
    " ",
    "\udcff.gguf",  # the byte FF, as Python spells it
]
OPEN = """
import sys
from rvllm.gguf_file import GGUFError, GGUFFile
for path in sys.argv[1:]:
    try:
        print(len(GGUFFile(path).tensors))
    except GGUFError as error:
        print(error, file=sys.stderr)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes need a file system of Linux")
@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "ascii"])
def test_odd_names_under_any_locale(tmp_path: Path, locale: str) -> None:
    good = [tmp_path / name for name in NAMES]
    for path in good:
        path.parent.mkdir(exist_ok=True)
        craft(path)
    broken = [path.with_name("bad \udcff\n\u0416.gguf") for path in good[:2]]
    for path in broken:
        path.write_bytes(b"no")
    (tmp_path / "link").symlink_to(good[0])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LC_ALL": locale.replace("ascii", "C")}
    if locale == "ascii":
        env |= {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", OPEN, *map(str, good), "link", *map(str, broken)]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=60)
    assert result.stdout.split() == [b"4"] * (len(good) + 1), result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == len(broken)
    assert all(b"bad \\udcff\\n" in line and b"magic: not a GGUF file" in line for line in lines)


def test_relative_path(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small.parent)
    assert_same_tensors(Path(small.name))


def test_things_that_are_no_file(tmp_path: Path, small: Path) -> None:
    refused(tmp_path, "folder")
    refused(tmp_path / "absent.gguf", "absent.gguf: file: No such file")
    refused("a\0b", "zero byte")
    refused(tmp_path / ("n" * 300), "File name too long")
    refused(small / "x", "small.gguf/x: file: Not a directory")


@pytest.mark.skipif(sys.platform == "win32", reason="special files of POSIX")
def test_special_files_do_not_block(tmp_path: Path, small: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    refused(tmp_path / "fifo", "not a regular file")
    refused("/dev/zero", "not a regular file")
    os.symlink("loop", tmp_path / "loop")
    refused(tmp_path / "loop", "symbolic links")
    os.symlink("/dev/zero", tmp_path / "zero.gguf")
    refused(tmp_path / "zero.gguf", "not a regular file")
    if os.geteuid() != 0:  # root may read anything
        small.chmod(0)
        refused(small, "Permission denied")
