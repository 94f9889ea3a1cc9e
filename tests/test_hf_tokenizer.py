"""A tokenizer.json gives the ids of the same vocabulary in a GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tiny_gguf import write_tiny_model
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from vocabularies import bpe_metadata, spm_metadata

from rvllm import LLM
from rvllm.tokenizer import Tokenizer, TokenizerError

TEXTS = [
    "",
    "in 2024, don't",
    "a\n\n\n  b\t\tc",
    "\u65e5\u672c\u8a9e \U0001f642\U0001f680",
    "\r\n \u2028 \u0301",
]


def library_file(folder: Path, metadata: dict[str, object], size: int = 258) -> Path:
    """tokenizer.json of the byte-level pieces of `metadata`, with <|im_start|> control and <think> user-defined."""
    tokens = metadata["tokenizer.ggml.tokens"][:size]
    library = tokenizers.Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[("a", "b")])
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens[257:260]])
    library.add_tokens([AddedToken(t, special=False, normalized=False) for t in tokens[260:]])
    library.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_tokenizer_file(tmp_path: Path) -> None:
    metadata = bpe_metadata(("a b",), add_bos_token=True)
    tokenizer = Tokenizer.from_file(library_file(tmp_path, metadata, 262), metadata)
    own = Tokenizer.from_gguf(metadata)
    assert tokenizer.vocab_size == own.vocab_size
    assert tokenizer.eog_token_ids == own.eog_token_ids
    for text in ["ab<think>ab", "<|im_start|>user\nab<|im_end|>", *TEXTS]:
        for parse_special in (False, True):
            ids = own.encode(text, parse_special=parse_special)
            assert tokenizer.encode(text, parse_special=parse_special) == ids
            assert tokenizer.decode(ids) == own.decode(ids)


@pytest.mark.parametrize("add_bos_token", [None, False, True])
def test_bos_of_a_tokenizer_file(tmp_path: Path, add_bos_token: bool | None) -> None:
    metadata = bpe_metadata(("a b",), pre="llama-bpe", add_bos_token=add_bos_token)
    path = library_file(tmp_path, metadata, 262)
    assert Tokenizer.from_file(path, metadata).add_bos_token is (add_bos_token is True)
    library = tokenizers.Tokenizer.from_file(str(path))
    bos = ("<|im_start|>", library.token_to_id("<|im_start|>"))
    library.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[bos])
    library.save(str(path))
    tokenizer, own = Tokenizer.from_file(path, metadata), Tokenizer.from_gguf(metadata)
    assert tokenizer.add_bos_token is (add_bos_token is not False)
    assert tokenizer.encode("ab") == own.encode("ab")


def test_tokenizer_file_of_sentencepiece_kind(tmp_path: Path) -> None:
    metadata = spm_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [("a", "b"), ("b", "c"), ("\u2581", "a"), ("ab", "c")]  # in the order of the scores
    library = tokenizers.Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(tokens)}, merges=merges, byte_fallback=True, unk_token="<unk>"
        )
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens[:3]])
    library.add_tokens([AddedToken("<mark>", special=False, normalized=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(
        tmp_path / "tokenizer.json", metadata | {"tokenizer.ggml.add_bos_token": True}
    )
    own = Tokenizer.from_gguf(metadata)
    for text in ["abc", " a  bc", "caf\u00e9 \U0001f642", "</s>a", "a<mark>b"]:
        for parse_special in (False, True):
            ids = own.encode(text, parse_special=parse_special)
            assert tokenizer.encode(text, parse_special=parse_special) == ids
            assert tokenizer.decode(ids) == own.decode(ids)


def test_tokenizer_file_must_fit_the_model(tmp_path: Path) -> None:
    metadata = bpe_metadata(("a b",))
    small = metadata | {
        "tokenizer.ggml.tokens": metadata["tokenizer.ggml.tokens"][:200],
        "tokenizer.ggml.token_type": metadata["tokenizer.ggml.token_type"][:200],
        "tokenizer.ggml.bos_token_id": None,
        "tokenizer.ggml.eos_token_id": None,
    }
    path = library_file(tmp_path, metadata, 257)
    with pytest.raises(TokenizerError, match="has 257 tokens, but the model has 200"):
        Tokenizer.from_file(path, small)
    assert Tokenizer.from_file(path, metadata).vocab_size == 262  # what the file lacks is no ordinary token
    bare = {key: value for key, value in metadata.items() if "token" not in key}
    assert [Tokenizer.from_file(path, bare, size).vocab_size for size in (None, 257, 320)] == [257, 257, 320]
    with pytest.raises(TokenizerError, match="has 257 tokens, but the model has 256"):
        Tokenizer.from_file(path, bare, 256)
    path.write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: "):
        Tokenizer.from_file(path, metadata)
    with pytest.raises(TokenizerError, match=r"none\.json"):
        Tokenizer.from_file(tmp_path / "none.json", metadata)


def test_a_wrong_tokenizer_is_named_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, metadata={"tokenizer.ggml.eos_token_id": "2"})
    with pytest.raises(
        ValueError, match=r"^\S+/tiny\.gguf: tokenizer\.ggml\.eos_token_id: must be an integer, got '2'"
    ):
        LLM(path, num_blocks=4)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^\S+/tokenizer\.json: no tokenizer\.json that can be used: "):
        LLM(path, num_blocks=4, tokenizer=tmp_path / "tokenizer.json")
