"""How well a model predicts a text, and how far its predictions are from those of a reference.

Chunks, the tokens that count and the statistics are those of llama.cpp's perplexity, so that figures compare.
Letters: N scored tokens, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    FloatArray: TypeAlias = NDArray[np.float64]
    LogProbs: TypeAlias = Callable[[slice], FloatArray]  # log-probabilities [rows, V] of some of the N rows

MIN_CHUNK = 8
# What the reference thinks less likely than e^-16 does not count: llama.cpp's file of log-probabilities ends there.
MIN_LOG_PROB = -16.0
_BLOCK_ELEMENTS = 1 << 20  # worked on at a time: float64 copies stay small, whatever the vocabulary


class Scores(NamedTuple):
    """Of N tokens: how unlikely each was found, and how the model differs from the reference there, if there is one."""

    nll: FloatArray  # [N] negative log-likelihood, natural
    base_nll: FloatArray  # [N] of the reference; like the rest [0] without one
    kld: FloatArray  # [N] Kullback-Leibler divergence of the model's distribution from the reference's
    same_top: NDArray[np.bool_]  # [N] whether both have the same best token


def split(token_ids: Sequence[int], chunk_size: int, num_chunks: int | None = None) -> NDArray[np.int32]:
    """The first num_chunks (None: all) chunks of a text, int32 [chunks, chunk_size]; the rest is left out.

    Raises ValueError for chunks that are too short to score, and for a text shorter than a chunk.
    """
    if chunk_size < MIN_CHUNK:
        raise ValueError(f"a chunk must have at least {MIN_CHUNK} tokens, got {chunk_size}")
    count = len(token_ids) // chunk_size
    if count == 0:
        raise ValueError(f"the text has {len(token_ids)} tokens, less than a chunk of {chunk_size}")
    count = count if num_chunks is None else min(count, num_chunks)
    return np.asarray(token_ids[: count * chunk_size], np.int32).reshape(count, chunk_size)


def first_scored(chunk_size: int) -> int:
    """The position from which on predictions count: they have half a chunk of context at least."""
    return chunk_size // 2


def num_scored(chunk_size: int) -> int:
    """N for one chunk: the last position has nothing to predict."""
    return chunk_size - first_scored(chunk_size) - 1


def log_softmax(logits: NDArray[np.float32]) -> FloatArray:
    """Log-probabilities float64 of logits [..., V]."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def score(logits: NDArray[np.float32], targets: NDArray[np.int32], base: LogProbs | None = None) -> Scores:
    """Scores of the tokens that came next, targets [N], by logits [N, V] and the reference's log-probabilities."""
    count = len(targets)
    num_compared = 0 if base is None else count
    scores = Scores(
        np.empty(count), np.empty(num_compared), np.empty(num_compared), np.empty(num_compared, np.bool_)
    )
    for rows in _row_blocks(logits.shape):
        log_q = log_softmax(logits[rows])
        scores.nll[rows] = -_pick(log_q, targets[rows])
        if base is not None:
            log_p = base(rows)
            scores.base_nll[rows] = -_pick(log_p, targets[rows])
            scores.kld[rows] = np.where(log_p > MIN_LOG_PROB, np.exp(log_p) * (log_p - log_q), 0.0).sum(1)
            scores.same_top[rows] = log_p.argmax(1) == log_q.argmax(1)
    return scores


def concatenate(parts: Sequence[Scores]) -> Scores:
    return Scores(*(np.concatenate(fields) for fields in zip(*parts, strict=True)))


def mean_and_error(values: NDArray[np.float64 | np.bool_]) -> tuple[float, float]:
    """Mean of two values or more, and the standard error of it."""
    x = values.astype(np.float64)
    return float(x.mean()), float(x.std(ddof=1) / np.sqrt(len(x)))


def perplexity(nll: FloatArray) -> tuple[float, float]:
    """exp of the mean negative log-likelihood, and its standard error."""
    mean, error = mean_and_error(nll)
    return float(np.exp(mean)), float(np.exp(mean)) * error


def summary(scores: Scores) -> dict[str, float]:
    """Perplexity and, with a reference, statistics of the differences. An _error is the standard error of the mean
    before it. delta_p: how much likelier than the reference the model finds the text's next token.
    """
    means = {"ppl": perplexity(scores.nll)}
    others: dict[str, float] = {}
    if len(scores.kld) > 0:
        delta_p = np.exp(-scores.nll) - np.exp(-scores.base_nll)
        means |= {
            "base_ppl": perplexity(scores.base_nll),
            "log_ppl_ratio": mean_and_error(scores.nll - scores.base_nll),
            "kld": mean_and_error(scores.kld),
            "same_top": mean_and_error(scores.same_top),
            "delta_p": mean_and_error(delta_p),
        }
        others = {f"kld_{percent:g}": float(np.percentile(scores.kld, percent)) for percent in (50, 99, 99.9)}
        others |= {"kld_max": float(np.max(scores.kld)), "rms_delta_p": float(np.sqrt(np.mean(delta_p**2)))}
    out: dict[str, float] = {}
    for name, (mean, error) in means.items():
        out |= {name: mean, f"{name}_error": error}
    return out | others


def _pick(log_probs: FloatArray, targets: NDArray[np.int32]) -> FloatArray:
    picked: FloatArray = log_probs[np.arange(len(targets)), targets]
    return picked


def _row_blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    rows, vocab_size = shape
    step = max(1, _BLOCK_ELEMENTS // vocab_size)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
