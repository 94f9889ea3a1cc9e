"""Detokenizer: the text of one answer, as its tokens come."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rvllm.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns token ids into text, each character as soon as its last byte is there.

    Bytes that can no longer become a character show as U+FFFD; so does, once, a character that is incomplete
    when the tokens end. The joined text is that of the joined bytes.

    skip_special_tokens: control tokens leave no text; else they show by name.
    continues_text: the tokens go on from a prompt, so a blank at the start is theirs; else it is the one that
    encode() put there (only where tokenizer.add_space_prefix).
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, continues_text: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = _utf8_decoder("replace")
        self._drop_blank = tokenizer.add_space_prefix and not continues_text

    def push(self, token_id: int) -> str:
        """Text completed by this token, "" while a character is unfinished. Raises TokenizerError on a bad id."""
        data = self._tokenizer.token_bytes(token_id, special=not self._skip_special_tokens)
        if self._tokenizer.add_space_prefix:
            if self._tokenizer.stands_alone(token_id):
                self._drop_blank = True
            elif self._drop_blank and data:
                data = data.removeprefix(b" ")
                self._drop_blank = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """The rest of the text: "", or U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)
