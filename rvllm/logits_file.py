"""Files of a reference's log-probabilities, in the format of llama.cpp's --kl-divergence-base, one chunk at a time.

Little-endian: "_logits_", int32 chunk_size, int32 V, int32 num_chunks, int32 tokens [num_chunks, chunk_size] (as they
are in the text, without BOS); then, for each scored token, a row: float32 scale, float32 lowest, uint16 code [V], and
two bytes of padding if V is odd. A log-probability is lowest + scale * code; what lies more than 16 below the best has
code 0.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from rvllm.perplexity import MIN_CHUNK, num_scored

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rvllm.perplexity import LogProbs

_MAGIC = b"_logits_"
_RANGE = 16.0
_LARGEST_CODE = 65535
_PREFIX = 4  # uint16 words of scale and lowest


class LogitsWriter:
    """Writes the header at once and the rows as they come."""

    def __init__(self, path: str | os.PathLike[str], chunks: NDArray[np.int32], vocab_size: int) -> None:
        """chunks: int32 [num_chunks, chunk_size]. Raises OSError."""
        self._words = _row_words(vocab_size)
        self._file = open(path, "wb")  # noqa: SIM115 (closed by __exit__)
        num_chunks, chunk_size = chunks.shape
        self._file.write(_MAGIC + np.array([chunk_size, vocab_size, num_chunks], "<i4").tobytes())
        self._file.write(chunks.astype("<i4").tobytes())

    def write(self, logits: NDArray[np.float32]) -> None:
        """Appends the rows of logits [N, V], which are those of the next chunk."""
        for row in logits:
            self._file.write(_encode(row, self._words))

    def __enter__(self) -> LogitsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class LogitsReader:
    """Maps a file; chunks is int32 [num_chunks, chunk_size]."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises ValueError naming the file and what is wrong with it, and OSError."""
        self.path = Path(path)
        size = self.path.stat().st_size
        with open(self.path, "rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ValueError(f"{self.path}: it is no file of log-probabilities")
            sizes = np.frombuffer(file.read(12), "<i4")
            if len(sizes) != 3 or sizes.min() < 1 or sizes[0] < MIN_CHUNK:
                raise ValueError(f"{self.path}: bad header: chunk size, vocabulary, chunks: {sizes.tolist()}")
            self.chunk_size, self.vocab_size, num_chunks = (int(n) for n in sizes)
            start = len(_MAGIC) + 12 + 4 * num_chunks * self.chunk_size
            shape = (num_chunks, num_scored(self.chunk_size), _row_words(self.vocab_size))
            expected = start + 2 * shape[0] * shape[1] * shape[2]
            if size != expected:
                raise ValueError(f"{self.path}: it has {size} bytes, expected {expected}")
            tokens = np.frombuffer(file.read(start - file.tell()), "<i4")
        self.chunks = tokens.astype(np.int32).reshape(num_chunks, self.chunk_size)
        self._rows = np.memmap(self.path, "<u2", "r", start, shape)

    def log_probs(self, chunk: int) -> LogProbs:
        """What gives log-probabilities float64 [rows, V] of a chunk's scored tokens."""
        return lambda rows: _decode(self._rows[chunk, rows], self.vocab_size)


def _row_words(vocab_size: int) -> int:
    return _PREFIX + vocab_size + vocab_size % 2


def _encode(logits: NDArray[np.float32], words: int) -> bytes:
    best = np.max(logits)
    floor = max(np.min(logits), best - np.float32(_RANGE))
    log_sum = np.log(np.exp(logits - best).sum(dtype=np.float64))
    scale = (best - floor) / np.float32(_LARGEST_CODE)
    row = np.zeros(words, "<u2")
    row[:_PREFIX] = np.array([scale, floor - best - log_sum], "<f4").view("<u2")
    if scale > 0:
        codes = np.rint((logits - floor) / scale)
        row[_PREFIX : _PREFIX + len(logits)] = codes.clip(0, _LARGEST_CODE).astype("<u2")
    return row.tobytes()


def _decode(rows: NDArray[np.uint16], vocab_size: int) -> NDArray[np.float64]:
    scale, lowest = np.ascontiguousarray(rows[:, :_PREFIX]).view("<f4").astype(np.float64).T
    codes = rows[:, _PREFIX : _PREFIX + vocab_size]
    log_probs: NDArray[np.float64] = codes * scale[:, None] + lowest[:, None]
    return log_probs
