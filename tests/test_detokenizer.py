"""Text as tokens come: whole characters at once, halves never, and the same text as in one piece."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import bpe_metadata, spm_metadata

from rvllm.detokenizer import Detokenizer
from rvllm.gguf_file import GGUFFile
from rvllm.tokenizer import Tokenizer

BYTES = Tokenizer.from_gguf(bpe_metadata())  # the id of a byte is the byte
SPM = Tokenizer.from_gguf(spm_metadata())


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile(smollm2_path).metadata)


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile(gemma3_path).metadata)


def pieces(tokenizer: Tokenizer, ids: Iterable[int], **options: bool) -> list[str]:
    """The text of each token, then that of finish()."""
    detokenizer = Detokenizer(tokenizer, **options)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        ([10813, 114, 241], ["", "", "\U0001f917", ""]),
        ([40303, 218], [" ", "\U0001f600", ""]),  # the first token is a blank and half a character
        ([156, 235], ["", "\u0451", ""]),
        ([2231, 321, 118, 2345], ["ok", "", "\u2028", "go", ""]),
        ([10813, 114], ["", "", "\ufffd"]),  # cut in mid-character: one mark
        ([10813, 10813, 10813], ["", "\ufffd", "\ufffd", "\ufffd"]),
    ],
)
def test_smollm2_characters(smollm2: Tokenizer, ids: list[int], texts: list[str]) -> None:
    assert pieces(smollm2, ids) == texts
    assert smollm2.decode(ids) == "".join(texts)


def test_gemma3_byte_tokens(gemma3: Tokenizer) -> None:
    assert pieces(gemma3, [479, 371, 391, 422]) == ["", "", "", "\U00045678", ""]


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_nothing_is_held_back(model: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(model)
    text = "x\U0001f917\U0001f600\u0451\u0449\u65e5\u672c\u8a9e\U0001f469\u200d\U0001f4bby, and a plain end x"
    detokenizer = Detokenizer(tokenizer)
    ids, shown = tokenizer.encode(text, add_special_tokens=False), ""
    for count, id in enumerate(ids, 1):
        shown += detokenizer.push(id)
        data = b"".join(tokenizer.token_bytes(id) for id in ids[:count])
        assert shown == data.decode("utf-8", "ignore")
    assert detokenizer.finish() == ""
    assert shown == text


@given(data=st.binary(max_size=40))
def test_joined_text_is_that_of_the_bytes(data: bytes) -> None:
    assert "".join(pieces(BYTES, data)) == data.decode("utf-8", "replace") == BYTES.decode(data)


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=20))
def test_smollm2_stream_is_decode(smollm2: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(smollm2, ids)) == smollm2.decode(ids)


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 262143), max_size=20))
def test_gemma3_stream_is_decode(gemma3: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(gemma3, ids)) == gemma3.decode(ids)


def test_special_tokens() -> None:
    ids = BYTES.encode("<|im_start|>a<think><|im_end|>", parse_special=True)
    assert pieces(BYTES, ids) == ["", "a", "<think>", "", ""]
    assert pieces(BYTES, ids, skip_special_tokens=False) == ["<|im_start|>", "a", "<think>", "<|im_end|>", ""]
    assert BYTES.decode(ids) == "a<think>"
    assert BYTES.decode(ids, skip_special_tokens=False) == "<|im_start|>a<think><|im_end|>"
    half = [0xF0, BYTES.eos_token_id, ord("a")]  # a special token between two bytes adds none
    assert "".join(pieces(BYTES, half)) == "\ufffda"


def test_blank_at_the_start() -> None:
    ids = SPM.encode("a b", add_special_tokens=False)
    assert pieces(SPM, ids) == [" a", " ", "b", ""]  # an answer goes on from its prompt
    assert pieces(SPM, ids, continues_text=False) == ["a", " ", "b", ""]
    assert SPM.decode(SPM.encode(" a")) == " a"
    assert SPM.decode(SPM.encode("a<mark>b <mark> b")) == "a<mark>b <mark> b"
    assert SPM.decode([]) == ""
