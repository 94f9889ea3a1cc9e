"""SentencePieceTokenizer: the BPE of SentencePiece (arXiv:1808.06226), as in Llama 2 and Gemma."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rvllm.tokenizer import Tokenizer
from rvllm.vocabulary import PREFIX, TokenizerError, Vocabulary, read_numbers

SCORES_KEY = PREFIX + "scores"
BLANK = "\u2581"  # stands for a blank in pieces, so this character itself decodes to a blank
NO_TOKEN = -1


class SentencePieceTokenizer(Tokenizer):
    """Merges by score, with byte tokens for what is no piece; a blank is put first unless the file says no.

    A character with neither piece nor byte tokens becomes the unknown token; without one it is dropped, with
    one warning.
    """

    def __init__(self, metadata: Mapping[str, object]) -> None:
        vocabulary = Vocabulary.from_gguf(metadata)
        super().__init__(vocabulary, add_bos=True, add_space_prefix=vocabulary.add_space_prefix is not False)
        self._scores = _read_scores(metadata, len(vocabulary))
        self._unknown_id = NO_TOKEN if vocabulary.unknown_id is None else vocabulary.unknown_id
        self._byte_ids = np.full(256, NO_TOKEN, np.int32)
        for byte, id in vocabulary.byte_ids().items():
            self._byte_ids[byte] = id

    def _encode_plain(self, text: str) -> list[int]:
        blank = BLANK if self.add_space_prefix else ""
        data = (blank + text.replace(" ", BLANK)).encode()
        ids = self.vocabulary.pieces.merge(data, self._scores, self._byte_ids, self._unknown_id)
        if self._unknown_id == NO_TOKEN and NO_TOKEN in ids:
            self._warn_once("characters without a token are dropped from the text")
            ids = [id for id in ids if id != NO_TOKEN]
        return ids

    def _piece_bytes(self, piece: str) -> bytes:
        return piece.replace(BLANK, " ").encode()


def _read_scores(metadata: Mapping[str, object], count: int) -> NDArray[np.float32]:
    scores = read_numbers(metadata, SCORES_KEY, count, "iuf")
    if scores is None:
        raise TokenizerError(f"{SCORES_KEY}: missing, a 'llama' tokenizer needs them")
    values = np.ascontiguousarray(scores, np.float32)
    if np.isnan(values).any():
        raise TokenizerError(f"{SCORES_KEY}: entry {np.flatnonzero(np.isnan(values))[0]} is not a number")
    return values
