"""What a file may say wrongly about its tokenizer: each is one error that names the key."""

from __future__ import annotations

import numpy as np
import pytest
from vocabularies import bpe_metadata, spm_metadata

from rvllm.tokenizer import Tokenizer, TokenizerError


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model: 'bert' .WordPiece. is not supported"),
        ({"model": "t5"}, "'t5'"),
        ({"model": "rwkv"}, "'rwkv'"),
        ({"model": 7}, "tokenizer.ggml.model: must be str, got 7"),
        ({"model": None}, "tokenizer.ggml.model: missing"),
        ({"pre": "nope"}, "'nope' is not known; known are .*llama-bpe.*smollm"),
        ({"pre": 1}, "tokenizer.ggml.pre: must be str"),
        ({"tokens": None}, "tokenizer.ggml.tokens: must be an array of strings"),
        ({"tokens": []}, "tokenizer.ggml.tokens: the vocabulary is empty"),
        ({"tokens": np.arange(3)}, "tokenizer.ggml.tokens: must be an array of strings"),
        ({"tokens": ["a"]}, "has 261 entries, but tokenizer.ggml.tokens has 1"),
        ({"tokens": ["x"] * 261}, "tokenizer.ggml.tokens: token 'x' has the ids 0 and 1"),
        ({"token_type": "abc"}, "tokenizer.ggml.token_type: must be an array of numbers"),
        ({"token_type": [1.5] * 261}, "tokenizer.ggml.token_type: must be an array of numbers"),
        ({"merges": None}, "tokenizer.ggml.merges: must be an array of strings"),
        ({"merges": ["ab"]}, "^tokenizer.ggml.merges: entry 0, 'ab', is not two pieces"),
        ({"merges": ["a b"]}, "tokenizer.ggml.merges: .*ab.* out of vocabulary"),
        ({"merges": ["a </think>"]}, "tokenizer.ggml.merges: .*a</think>.* out of vocabulary"),
        ({"eos_token_id": "2"}, "tokenizer.ggml.eos_token_id: must be an integer, got '2'"),
        ({"eos_token_id": True}, "tokenizer.ggml.eos_token_id: must be an integer"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token: must be bool, got 1"),
    ],
)
def test_bad_bpe_metadata(keys: dict[str, object], message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as error:
        Tokenizer.from_gguf(bpe_metadata(**keys))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"scores": None}, "tokenizer.ggml.scores: missing"),
        ({"scores": np.zeros(3, np.float32)}, "tokenizer.ggml.scores: has 3 entries"),
        ({"scores": ["x"]}, "tokenizer.ggml.scores: must be an array of numbers"),
        ({"scores": np.full(268, np.nan, np.float32)}, "tokenizer.ggml.scores: entry 0 is not a number"),
        ({"token_type": [6] * 268}, "token 0, '<unk>' has the type byte"),
    ],
)
def test_bad_spm_metadata(keys: dict[str, object], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf(spm_metadata(**keys))


def test_absent_special_ids() -> None:
    tokenizer = Tokenizer.from_gguf(bpe_metadata(bos_token_id=None, eos_token_id=None, add_bos_token=True))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)
    assert tokenizer.encode("a") == [ord("a")]
    assert tokenizer.decode(tokenizer.encode("a,b")) == "a,b"


@pytest.mark.parametrize("id", [-1, 261, 0xFFFFFFFF])
def test_special_ids_outside_the_vocabulary(id: int, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.from_gguf(bpe_metadata(bos_token_id=id, eos_token_id=id, add_bos_token=True))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)
    assert tokenizer.encode("a") == [ord("a")]
    assert f"tokenizer.ggml.eos_token_id: {id} is outside the vocabulary, 0 to 260: ignored" in caplog.text
    assert len(caplog.records) == 2


@pytest.mark.parametrize("id", [None, 1000])
def test_default_ids_of_sentencepiece(id: int | None) -> None:
    given = Tokenizer.from_gguf(spm_metadata(byte_tokens=False))
    keys = {"bos_token_id": id, "eos_token_id": id, "unknown_token_id": id}
    tokenizer = Tokenizer.from_gguf(spm_metadata(byte_tokens=False, **keys))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.encode("ab x") == given.encode("ab x")
    assert 0 in given.encode("ab x")


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_vocabulary_of_one_token(model: str) -> None:
    metadata = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.scores": np.zeros(1, np.float32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("a") == [0]
    assert tokenizer.encode("aba") == [0, 0]


def test_missing_token_types(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.from_gguf(spm_metadata(token_type=None, add_bos_token=False))
    assert tokenizer.decode(tokenizer.encode("a\u00e9")) == "a\u00e9"
    assert "tokenizer.ggml.token_type: missing" in caplog.text


def test_wrong_text_and_ids() -> None:
    tokenizer = Tokenizer.from_gguf(bpe_metadata())
    with pytest.raises(TokenizerError, match=r"lone surrogate U\+D800 at position 1"):
        tokenizer.encode("a\ud800")
    for id in (-1, tokenizer.vocab_size, 10**20):
        with pytest.raises(TokenizerError, match="outside the vocabulary, 0 to 260"):
            tokenizer.token_bytes(id)


def test_end_tokens_by_text() -> None:
    # A converter's mistake: the end of a turn as a user-defined token. It must end the turn and stay unwritten.
    metadata = bpe_metadata(eos_token_id=256)
    types = np.array(metadata["tokenizer.ggml.token_type"])
    types[258] = 4
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.token_type": types})
    assert tokenizer.eog_token_ids == {256, 258}
    assert tokenizer.is_special(258)
    assert types[258] == 4
