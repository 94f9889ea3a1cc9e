"""HFTokenizer: a Hugging Face `tokenizer.json` in place of the vocabulary that the GGUF file carries."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from rvllm.bpe_tokenizer import piece_bytes
from rvllm.sentencepiece_tokenizer import BLANK
from rvllm.tokenizer import Tokenizer
from rvllm.vocabulary import BYTE_TEXT, TOKENS_KEY, TYPES_KEY, TokenizerError, TokenType, Vocabulary


class HFTokenizer(Tokenizer):
    """Encodes as the library does with this file; the special ids come from the model, and so does what goes around
    a text. Where the model does not say whether BOS does, the file decides.

    metadata: of the GGUF file. Its token table may be longer than the file's by unused tokens only.
    """

    def __init__(
        self, path: str | os.PathLike[str], metadata: Mapping[str, object], vocab_size: int | None = None
    ) -> None:
        source = _read(Path(path))
        # Two views: the switch between them is a property of the library's object, which threads share.
        self._special, self._plain = _parse(path, source), _parse(path, source)
        self._plain.encode_special_tokens = True
        decoders = _decoders(json.loads(source).get("decoder"))
        steps = {decoder["type"] for decoder in decoders}
        self._is_byte_level = "ByteLevel" in steps
        tokens, types = _token_table(self._special, byte_tokens="ByteFallback" in steps)
        tokens, types = _fit(path, tokens, types, metadata, vocab_size)
        added = self._special.get_added_tokens_decoder().items()
        left, right = (id for id, token in added if token.lstrip), (id for id, token in added if token.rstrip)
        vocabulary = Vocabulary.from_tokens(tokens, types, metadata, left, right)
        bos = vocabulary.bos_id
        add_bos = bos is not None and self._special.encode("").ids[:1] == [bos]
        super().__init__(vocabulary, add_bos, add_space_prefix=any(map(_strips_blank, decoders)))

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        library = self._special if parse_special else self._plain
        # The library lets other threads run only while it encodes a batch.
        ids: list[int] = library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        return self._encode_text(text, parse_special=False)

    def _piece_bytes(self, piece: str) -> bytes:
        return piece_bytes(piece) if self._is_byte_level else piece.replace(BLANK, " ").encode()


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: {error}") from None


def _parse(path: str | os.PathLike[str], source: str) -> tokenizers.Tokenizer:
    try:
        library = tokenizers.Tokenizer.from_str(source)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path}: no tokenizer.json that can be used: {error}") from None
    kind = type(library.model).__name__
    if kind not in ("BPE", "Unigram"):
        raise TokenizerError(f"{path}: model type {kind} is not supported; supported are BPE and Unigram")
    library.no_truncation()
    library.no_padding()
    return library


def _decoders(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a decoder that may be a sequence."""
    if decoder is None:
        return []
    return [*decoder["decoders"]] if decoder["type"] == "Sequence" else [decoder]


def _strips_blank(decoder: dict[str, Any]) -> bool:
    if decoder["type"] == "Strip":
        return bool(decoder["start"] > 0)
    scheme = decoder.get("prepend_scheme", "always" if decoder.get("add_prefix_space") else "never")
    return bool(decoder["type"] == "Metaspace" and scheme != "never")


def _token_table(library: tokenizers.Tokenizer, byte_tokens: bool) -> tuple[list[str], NDArray[np.uint8]]:
    """Tokens by id and their types; ids that are not used have an empty text."""
    ids = library.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(ids.values(), default=-1) + 1)
    types = np.full(len(tokens), TokenType.UNUSED, np.uint8)
    for token, id in ids.items():
        tokens[id] = token
        types[id] = TokenType.BYTE if byte_tokens and BYTE_TEXT.fullmatch(token) else TokenType.NORMAL
    for id, added in library.get_added_tokens_decoder().items():
        types[id] = TokenType.CONTROL if added.special else TokenType.USER_DEFINED
    return tokens, types


def _fit(
    path: str | os.PathLike[str],
    tokens: list[str],
    types: NDArray[np.uint8],
    metadata: Mapping[str, object],
    vocab_size: int | None,
) -> tuple[list[str], NDArray[np.uint8]]:
    """The table at the length of the model's own, when the two agree."""
    model_tokens = metadata.get(TOKENS_KEY)
    if isinstance(model_tokens, list):
        vocab_size = len(model_tokens)
    size = len(tokens) if vocab_size is None else vocab_size
    surplus = size - len(tokens)
    model_types = np.asarray(metadata.get(TYPES_KEY, []))
    if surplus < 0 or np.any(model_types[len(tokens) :] == TokenType.NORMAL):
        raise TokenizerError(f"{path}: has {len(tokens)} tokens, but the model has {size}")
    return tokens + [""] * surplus, np.append(types, np.full(surplus, TokenType.UNUSED, np.uint8))
