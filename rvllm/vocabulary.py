"""Vocabulary: the token table of a GGUF file and its special ids, checked once."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from reprlib import repr as short
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rvllm._tokenizer import PieceTable

log = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."
TOKENS_KEY = PREFIX + "tokens"
TYPES_KEY = PREFIX + "token_type"

# Control tokens that end a generation, whatever ids the file names (the list that llama.cpp keeps).
END_TEXTS = frozenset(
    """<|im_end|> <|endoftext|> <|end_of_text|> <|eot_id|> <|eom_id|> <|end|> <|return|> <|call|> <end_of_turn>
    <eos> </s> <EOT> _<EOT> [EOT] [EOS] <end_of_utterance> <turn|> <|tool_response>
    <\uff5cend\u2581of\u2581sentence\uff5c> <|fim_pad|> <fim_pad> <fim-pad> <PAD> [PAD] <|repo_name|> <|fim_repo|>
    <fim-repo> <REPO> <reponame> <|file_sep|> <|calls|> <|flush|> [e~[""".split()  # noqa: SIM905
)
END_PAIRS = (
    {"<|return|>", "<|call|>"},
    {"<|calls|>", "<|flush|>"},
)  # beside which <|end|> ends a message, not the turn
HTML_TEXTS = frozenset(["</s>"])  # as a user-defined token it closes struck-out text (Gemma)

BYTE_TEXT = re.compile(r"<0x([0-9A-Fa-f]{2})>")

T = TypeVar("T", bool, str)


class TokenizerError(ValueError):
    """A vocabulary, key or text that cannot be used; one line that names it."""


class TokenType(IntEnum):
    """The types of tokenizer.ggml.token_type."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3  # found in text only when special tokens are parsed; no text of its own
    USER_DEFINED = 4  # always found in text, before anything else
    UNUSED = 5
    BYTE = 6  # "<0x0A>" stands for that byte


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tokens and special ids of a model. V is its number of tokens.

    A flag is None where the file does not say: the kind of tokenizer decides.
    """

    pieces: PieceTable  # V pieces; by text are found all but control, unknown and byte tokens
    types: NDArray[np.uint8]  # [V] of TokenType
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    eog_ids: frozenset[int]
    add_bos: bool | None
    add_eos: bool | None
    add_space_prefix: bool | None
    strip_left: frozenset[int] = frozenset()  # special tokens that take in the white space before them
    strip_right: frozenset[int] = frozenset()  # the same, behind them

    def __len__(self) -> int:
        return len(self.types)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Vocabulary:
        """Read the `tokenizer.ggml.*` keys. Raises TokenizerError naming the key, its value and the limit."""
        tokens = read_strings(metadata, TOKENS_KEY)
        if not tokens:
            raise TokenizerError(f"{TOKENS_KEY}: the vocabulary is empty")
        types = _read_types(metadata, tokens)
        return cls.from_tokens(tokens, types, metadata, strip_right=_phi3_strips(tokens, types, metadata))

    @classmethod
    def from_tokens(
        cls,
        tokens: list[str],
        types: NDArray[np.uint8],
        metadata: Mapping[str, object],
        strip_left: Iterable[int] = (),
        strip_right: Iterable[int] = (),
    ) -> Vocabulary:
        """A table of V tokens and types [V], with the special ids and flags of `metadata`."""
        ids = {
            name: read_token_id(metadata, PREFIX + name + "_token_id", len(tokens))
            for name in ("bos", "eos", "unknown", "eot", "eom")
        }
        if metadata.get(PREFIX + "model") == "llama":
            ids = {name: _default_id(name, types) if id is None else id for name, id in ids.items()}
        bos, eos, unknown, eot, eom = ids.values()
        ends = {tokens[id]: id for id in _special_ids(types) if _ends_generation(tokens[id], types[id])}
        if any(pair <= ends.keys() for pair in END_PAIRS):
            ends.pop("<|end|>", None)
        types[list(ends.values())] = TokenType.CONTROL
        hidden = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE)
        try:
            pieces = PieceTable(tokens, (~np.isin(types, hidden)).astype(np.uint8))
        except (TypeError, ValueError) as error:
            raise TokenizerError(f"{TOKENS_KEY}: {error}") from None
        return cls(
            pieces,
            types,
            bos,
            eos,
            unknown,
            frozenset(ends.values()) | {id for id in (eos, eot, eom) if id is not None},
            read(metadata, PREFIX + "add_bos_token", bool),
            read(metadata, PREFIX + "add_eos_token", bool),
            read(metadata, PREFIX + "add_space_prefix", bool),
            frozenset(strip_left),
            frozenset(strip_right),
        )

    def byte_ids(self) -> dict[int, int]:
        """Byte -> id of the token that stands for it, like "<0x0A>" for 10. Raises TokenizerError on a bad name."""
        ids: dict[int, int] = {}
        for id in np.flatnonzero(self.types == TokenType.BYTE).tolist():
            match = BYTE_TEXT.fullmatch(self.pieces.text(id))
            if match is None:
                problem = f"{self.pieces.text(id)!r} has the type byte, but not a name like '<0x0A>'"
                raise TokenizerError(f"{TOKENS_KEY}: token {id}, {problem}")
            ids[int(match[1], 16)] = id
        return ids

    def special_tokens(self) -> list[tuple[str, int, bool]]:
        """(text, id, is control) of each token that is searched for in text as a whole."""
        control = (self.types != TokenType.USER_DEFINED).tolist()
        return [(self.pieces.text(id), id, control[id]) for id in _special_ids(self.types)]


def read(metadata: Mapping[str, object], key: str, kind: type[T]) -> T | None:
    """The value of a key, None when absent. Raises TokenizerError when it is of another type."""
    value = metadata.get(key)
    if value is None or isinstance(value, kind):
        return value
    raise TokenizerError(f"{key}: must be {kind.__name__}, got {short(value)}")


def read_strings(metadata: Mapping[str, object], key: str) -> list[str]:
    """A list of strings, which must be there; it is not copied."""
    value = metadata.get(key)
    if not isinstance(value, list) or (value and not isinstance(value[0], str)):
        raise TokenizerError(f"{key}: must be an array of strings, got {short(value)}")
    return value


def read_numbers(
    metadata: Mapping[str, object], key: str, count: int, kinds: str
) -> NDArray[np.generic] | None:
    """An array [count] of NumPy kinds ('i', 'u', 'f'), None when absent."""
    value = metadata.get(key)
    if value is None:
        return None
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise TokenizerError(f"{key}: must be an array of numbers, got {short(value)}")
    if len(array) != count:
        raise TokenizerError(f"{key}: has {len(array)} entries, but {TOKENS_KEY} has {count}")
    return array


def read_token_id(metadata: Mapping[str, object], key: str, count: int) -> int | None:
    """None when absent, and with a warning when there is no such token, as in some published files."""
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TokenizerError(f"{key}: must be an integer, got {short(value)}")
    if not 0 <= value < count:
        log.warning("%s: %d is outside the vocabulary, 0 to %d: ignored", key, value, count - 1)
        return None
    return int(value)


def _default_id(name: str, types: NDArray[np.uint8]) -> int | None:
    """SentencePiece's own ids, for files that give none."""
    if name == "unknown":
        return 0 if types[0] == TokenType.UNKNOWN else None
    id = {"bos": 1, "eos": 2}.get(name, len(types))
    return id if id < len(types) else None


def _read_types(metadata: Mapping[str, object], tokens: list[str]) -> NDArray[np.uint8]:
    types = read_numbers(metadata, TYPES_KEY, len(tokens), "iu")
    if types is None:
        log.warning("%s: missing, so control tokens are taken for plain text", TYPES_KEY)
        kinds = (TokenType.BYTE if BYTE_TEXT.fullmatch(token) else TokenType.NORMAL for token in tokens)
        return np.fromiter(kinds, np.uint8, len(tokens))
    known = np.isin(types, list(TokenType))
    return np.where(known, types, TokenType.UNDEFINED).astype(np.uint8)


def _special_ids(types: NDArray[np.uint8]) -> list[int]:
    kinds = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    ids: list[int] = np.flatnonzero(np.isin(types, kinds)).tolist()
    return ids


def _phi3_strips(tokens: list[str], types: NDArray[np.uint8], metadata: Mapping[str, object]) -> list[int]:
    """Tokens that take in the white space behind them. GGUF has no key for it: these are Phi-3's tokenizer.json's."""
    if metadata.get("general.architecture") != "phi3" or metadata.get(PREFIX + "model") != "llama":
        return []
    return [id for id in _special_ids(types) if tokens[id] not in ("<unk>", "<s>", "<|endoftext|>")]


def _ends_generation(text: str, kind: int) -> bool:
    return text in END_TEXTS and not (kind == TokenType.USER_DEFINED and text in HTML_TEXTS)
