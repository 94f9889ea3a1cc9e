"""FreeText: what comes of an answer before its constraint begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rvllm.structured_output import StructuredOutput

if TYPE_CHECKING:
    from rvllm.tokenizer import Tokenizer


class FreeText:
    """Looks for a mark behind which a constraint begins. Its attributes are never changed in place."""

    def __init__(
        self, output: StructuredOutput, eog_token_ids: Sequence[int], overruns: Sequence[NDArray[np.int32]]
    ) -> None:
        """overruns: what overrun_words() gives for each of the output's texts of `after`."""
        self._marks = tuple(text.encode() for text in output.after_texts)
        self._overruns = tuple(overruns)
        self._eog_token_ids = () if output.is_optional else tuple(eog_token_ids)
        self._start, self._end = (text.encode() for text in output.thoughts or ("", ""))
        self._is_thinking: bool | None = None if output.thoughts else False  # None: not known yet
        self._held = b""  # text that may be part of a mark
        self.push(b"")

    def push(self, data: bytes) -> bool:
        """Takes more of the text; whether a mark was in it."""
        self._held += data
        if self._is_thinking is None:
            text = self._held.lstrip()
            if text.startswith(self._start):
                self._is_thinking, self._held = True, text[len(self._start) :]
            elif not self._start.startswith(text):
                self._is_thinking = False
        if self._is_thinking:
            thoughts, end, rest = self._held.partition(self._end)
            self._is_thinking, self._held = not end, rest if end else thoughts[-len(self._end) :]
        if self._is_thinking is not False:
            return False
        if any(mark in self._held for mark in self._marks):
            return True
        self._held = self._held[-max(map(len, self._marks)) :]
        return False

    def fill(self, words: NDArray[np.int32]) -> None:
        """Sets the bits [ceil(V / 32)] of the tokens that may come next."""
        words.fill(-1)
        for token_id in self._eog_token_ids:
            words[token_id // 32] &= np.int32(~np.uint32(1 << token_id % 32).view(np.int32))
        if self._is_thinking:
            return
        for mark, overruns in zip(self._marks, self._overruns, strict=True):
            for size, row in enumerate(overruns):
                if self._held.endswith(mark[:size]):
                    words &= row


def overrun_words(tokenizer: Tokenizer, text: str) -> NDArray[np.int32]:
    """Words [bytes of the text, ceil(V / 32)]; row i is for where the first i bytes of the text have been written.

    A bit is 0 for a token that writes the rest of it, or all of it, and goes on: what it adds would escape the
    constraint. White space may follow; no constraint needs it.
    """
    mark = text.encode()
    banned = np.zeros((len(mark), -(-tokenizer.vocab_size // 32) * 32), bool)
    for token_id in range(tokenizer.vocab_size):
        token = tokenizer.token_bytes(token_id, special=True)
        if mark[-1] in token:
            banned[0, token_id] = token.partition(mark)[2].strip() != b""
            for size in range(1, len(mark)):
                rest = token[len(mark) - size :] if token.startswith(mark[size:]) else b""
                banned[size, token_id] = rest.strip() != b""
    return ~np.packbits(banned, axis=1, bitorder="little").view(np.int32)
