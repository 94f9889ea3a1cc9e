"""BPETokenizer: byte-level BPE (GPT-2's), through the `tokenizers` library, built in memory from a GGUF's arrays."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from reprlib import repr as short

import tokenizers
from tokenizers import models, pre_tokenizers

from rvllm.pre_tokenizers import DIGIT, PRE_TOKENIZERS, PreTokenizer
from rvllm.tokenizer import Tokenizer
from rvllm.vocabulary import PREFIX, TOKENS_KEY, TokenizerError, TokenType, Vocabulary, read, read_strings

log = logging.getLogger(__name__)

PRE_KEY = PREFIX + "pre"
MERGES_KEY = PREFIX + "merges"


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a piece: itself where it is visible, else one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()
_BYTES = {ord(character): byte for byte, character in enumerate(BYTE_CHARACTERS)}


class BPETokenizer(Tokenizer):
    """A byte for which the vocabulary has no token is dropped, as Hugging Face does, with one warning."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        rule = _pre_tokenizer(metadata)
        vocabulary = Vocabulary.from_gguf(metadata)
        super().__init__(vocabulary, rule.add_bos)
        self._library = _library(metadata, vocabulary, rule)
        find = vocabulary.pieces.find
        self._missing = bytes(byte for byte, piece in enumerate(BYTE_CHARACTERS) if find(piece) is None)

    def _encode_plain(self, text: str) -> list[int]:
        if self._missing:
            data = text.encode()
            if len(data.translate(None, self._missing)) < len(data):
                self._warn_once("bytes without a token are dropped from the text")
        # The library lets other threads run only while it encodes a batch.
        ids: list[int] = self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _piece_bytes(self, piece: str) -> bytes:
        return piece_bytes(piece)


def piece_bytes(piece: str) -> bytes:
    """Bytes of a byte-level piece; a character outside the alphabet counts as its own UTF-8."""
    try:
        return bytes([_BYTES[ord(character)] for character in piece])
    except KeyError:
        return b"".join(bytes([_BYTES[ord(c)]]) if ord(c) in _BYTES else c.encode() for c in piece)


def _pre_tokenizer(metadata: Mapping[str, object]) -> PreTokenizer:
    name = read(metadata, PRE_KEY, str)
    if name is None:
        log.warning(
            "%s: missing, taken as 'default': text may be cut in other ways than in training", PRE_KEY
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise TokenizerError(f"{PRE_KEY}: {name!r} is not known; known are {known}")
    return PRE_TOKENIZERS[name]


def _read_merges(metadata: Mapping[str, object]) -> list[tuple[str, str]]:
    merges = []
    for i, merge in enumerate(read_strings(metadata, MERGES_KEY)):
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise TokenizerError(
                f"{MERGES_KEY}: entry {i}, {merge!r}, is not two pieces with a blank between"
            )
        merges.append((left, right))
    return merges


def _library(
    metadata: Mapping[str, object], vocabulary: Vocabulary, rule: PreTokenizer
) -> tokenizers.Tokenizer:
    hidden = (TokenType.CONTROL, TokenType.UNKNOWN)  # never to be made by a merge
    tokens = read_strings(metadata, TOKENS_KEY)
    kinds = vocabulary.types.tolist()
    ids = {token: id for id, token in enumerate(tokens) if kinds[id] not in hidden}
    special = set(tokens) - ids.keys()
    merges = [pair for pair in _read_merges(metadata) if special.isdisjoint((*pair, "".join(pair)))]
    for left, right in merges:
        if left + right not in ids:  # the library panics on one longer than all tokens
            raise TokenizerError(f"{MERGES_KEY}: token {short(left + right)} is out of vocabulary")
    try:
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=rule.ignore_merges)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{MERGES_KEY}: {error}") from None
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(_splitter(expression) for expression in rule.expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return library


def _splitter(expression: str) -> pre_tokenizers.PreTokenizer:
    if expression == DIGIT:  # the same without a regular expression: a third less time on 1 MB of base64
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(tokenizers.Regex(expression), "isolated")
