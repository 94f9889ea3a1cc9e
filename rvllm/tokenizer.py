"""Tokenizer: text to token ids and back, for every kind of vocabulary.

Special tokens are cut out of the text here, in one way for all kinds; the plain text between them is the
subclass's affair.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property

from rvllm._tokenizer import SpecialTokens
from rvllm.detokenizer import Detokenizer
from rvllm.vocabulary import BYTE_TEXT, PREFIX, TokenizerError, TokenType, Vocabulary, read

__all__ = ["Tokenizer", "TokenizerError"]

log = logging.getLogger(__name__)

MODEL_KEY = PREFIX + "model"
SUPPORTED = "'gpt2' (byte-level BPE) and 'llama' (SentencePiece's BPE)"
UNSUPPORTED = {
    "bert": "WordPiece",
    "gemma4": "BPE without bytes",
    "plamo2": "PLaMo-2's",
    "rwkv": "RWKV's",
    "t5": "SentencePiece's unigram",
}


class Tokenizer(ABC):
    """Encodes and decodes text for one model.

    eog_token_ids: every token that ends a generation. add_bos_token, add_eos_token: what encode() adds.
    add_space_prefix: a blank goes before each run of plain text (SentencePiece), and decode() takes it away.
    """

    def __init__(self, vocabulary: Vocabulary, add_bos: bool, add_space_prefix: bool = False) -> None:
        self.vocabulary = vocabulary
        self.vocab_size = len(vocabulary)
        self.bos_token_id = vocabulary.bos_id
        self.eos_token_id = vocabulary.eos_id
        self.eog_token_ids = vocabulary.eog_ids
        wants_bos = add_bos if vocabulary.add_bos is None else vocabulary.add_bos
        self.add_bos_token = wants_bos and vocabulary.bos_id is not None
        self.add_eos_token = bool(vocabulary.add_eos) and vocabulary.eos_id is not None
        self.add_space_prefix = add_space_prefix
        self._types = vocabulary.types.tobytes()  # bytes are indexed faster than an array
        self._special_tokens = SpecialTokens(vocabulary.special_tokens())
        self._warned: set[str] = set()

    @staticmethod
    def from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
        """The tokenizer that a GGUF file describes. Raises TokenizerError."""
        model = read(metadata, MODEL_KEY, str)
        if model == "gpt2":
            from rvllm.bpe_tokenizer import BPETokenizer

            return BPETokenizer(metadata)
        if model == "llama":
            from rvllm.sentencepiece_tokenizer import SentencePieceTokenizer

            return SentencePieceTokenizer(metadata)
        if model is None:
            raise TokenizerError(f"{MODEL_KEY}: missing, the file has no tokenizer")
        kind = f" ({UNSUPPORTED[model]})" if model in UNSUPPORTED else ""
        raise TokenizerError(f"{MODEL_KEY}: {model!r}{kind} is not supported; supported are {SUPPORTED}")

    @staticmethod
    def from_file(
        path: str | os.PathLike[str], metadata: Mapping[str, object], vocab_size: int | None = None
    ) -> Tokenizer:
        """The tokenizer of a Hugging Face `tokenizer.json`, for the model that `metadata` describes.

        vocab_size: the model's, where metadata has no table of tokens; None: that of the file.
        Raises TokenizerError, also when its vocabulary is not the model's.
        """
        from rvllm.hf_tokenizer import HFTokenizer

        return HFTokenizer(path, metadata, vocab_size)

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        add_special_tokens: begin with BOS and end with EOS where the model wants them, never with two of them.
        parse_special: control tokens written in the text become those tokens; else they are plain text.
        Raises TokenizerError on text that is not Unicode (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            bad = text[error.start]
            raise TokenizerError(f"text: lone surrogate U+{ord(bad):04X} at position {error.start}") from None
        ids = self._encode_text(text, parse_special)
        return self._add_special(ids) if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids: the inverse of encode(). Bytes that are no UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self, skip_special_tokens, continues_text=False)
        pieces = [detokenizer.push(id) for id in ids]
        return "".join(pieces) + detokenizer.finish()

    def is_special(self, token_id: int) -> bool:
        """Whether the token is control (or unknown): it has no text of its own."""
        return self._kind(token_id) in (TokenType.CONTROL, TokenType.UNKNOWN)

    def stands_alone(self, token_id: int) -> bool:
        """Whether encode() finds the token as a whole in the text: control, unknown or user-defined."""
        return self.is_special(token_id) or self._kind(token_id) == TokenType.USER_DEFINED

    def token_bytes(self, token_id: int, special: bool = False) -> bytes:
        """Bytes the token adds to the text; a token without text of its own gives its name if `special`."""
        kind = self._kind(token_id)
        if kind == TokenType.NORMAL:
            return self._piece_bytes(self.vocabulary.pieces.text(token_id))
        piece = self.vocabulary.pieces.raw(token_id)
        if kind == TokenType.BYTE:
            match = BYTE_TEXT.fullmatch(piece.decode())
            return b"" if match is None else bytes.fromhex(match[1])
        return piece if special or kind == TokenType.USER_DEFINED else b""

    def token_text(self, token_id: int) -> str:
        """Text of one token for display, special ones included; half characters show as U+FFFD."""
        return self.token_bytes(token_id, special=True).decode("utf-8", "replace")

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the token that adds most to the text."""
        return max(len(self.token_bytes(token_id, special=True)) for token_id in range(self.vocab_size))

    def split_control(self, text: str) -> list[str | int]:
        """Cut text at its control tokens: plain pieces (str) and token ids (int)."""
        return self._split(text, control=True, user_defined=False)

    def has_control(self, text: str) -> bool:
        """Whether a control token is in the text."""
        return any(isinstance(piece, int) for piece in self.split_control(text))

    def control_starts(self, text: str) -> list[int]:
        """Positions where a control token begins, also one of which only the beginning is left before the end."""
        return self._special_tokens.control_starts(text)

    @abstractmethod
    def _encode_plain(self, text: str) -> list[int]:
        """Ids of text that holds no special token."""

    @abstractmethod
    def _piece_bytes(self, piece: str) -> bytes:
        """Bytes that a normal piece stands for."""

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        for piece in self._split(text, control=parse_special, user_defined=True):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._encode_plain(piece)
        return ids

    def _split(self, text: str, control: bool, user_defined: bool) -> list[str | int]:
        pieces = self._special_tokens.split(text, control, user_defined)
        left, right = self.vocabulary.strip_left, self.vocabulary.strip_right
        if not left and not right:
            return pieces
        for at, piece in enumerate(pieces):
            if isinstance(piece, str):
                if at and pieces[at - 1] in right:
                    piece = piece.lstrip()
                if pieces[at + 1 : at + 2] and pieces[at + 1] in left:
                    piece = piece.rstrip()
                pieces[at] = piece
        return [piece for piece in pieces if piece != ""]

    def _add_special(self, ids: list[int]) -> list[int]:
        bos, eos = self.bos_token_id, self.eos_token_id
        if self.add_bos_token and bos is not None:
            if ids[:1] == [bos]:
                self._warn_once("the text begins with the BOS token: no second one is added")
            else:
                ids.insert(0, bos)
        if self.add_eos_token and eos is not None and ids[-1:] != [eos]:
            ids.append(eos)
        return ids

    def _kind(self, token_id: int) -> int:
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"token id {token_id} is outside the vocabulary, 0 to {self.vocab_size - 1}")
        return self._types[token_id]

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message)
