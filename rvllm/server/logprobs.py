"""Log probabilities in both of OpenAI's shapes, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rvllm.detokenizer import Detokenizer
from rvllm.request import Logprob

if TYPE_CHECKING:
    from rvllm.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON has not


class CompletionLogprobs:
    """The shape of /v1/completions, made piece by piece: one entry a token, also for the one that ended the text.

    text_offset counts characters of the text as the tokens make it: text[offset[i]:offset[i + 1]] is token i.
    A token that leaves no text (control tokens, the first bytes of a character) has no width; one that is no whole
    characters is named by its bytes.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int, offset: int, detokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = offset
        self._detokenizer = detokenizer

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob] | None]
    ) -> dict[str, list[Any]]:
        entries: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, alternatives in zip(token_ids, logprobs, strict=True):
            text = self._detokenizer.push(token_id)
            own = None if alternatives is None else alternatives[token_id]
            entries["tokens"].append(self._name(token_id))
            entries["token_logprobs"].append(None if own is None else max(own.logprob, LOWEST))
            entries["top_logprobs"].append(
                None if alternatives is None else self._top(token_id, alternatives)
            )
            entries["text_offset"].append(self._offset)
            self._offset += len(text)
        return entries

    def _top(self, own_id: int, alternatives: Mapping[int, Logprob]) -> dict[str, float]:
        """The num_top best and the token itself."""
        top: dict[str, float] = {}
        for token_id, logprob in sorted(alternatives.items(), key=lambda item: item[1].rank):
            if logprob.rank <= self._num_top or token_id == own_id:
                top.setdefault(self._name(token_id), max(logprob.logprob, LOWEST))
        return top

    def _name(self, token_id: int) -> str:
        """The token's text; the bytes of one that is no whole characters, as OpenAI shows them."""
        data = self._tokenizer.token_bytes(token_id, special=True)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def join_logprobs(first: dict[str, list[Any]] | None, second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return second if first is None else {name: first[name] + second[name] for name in first}


def chat_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, Logprob]],
    num_top: int,
    with_ids: bool = False,
) -> list[dict[str, Any]]:
    """The entries of /v1/chat/completions; with_ids: as llama.cpp has them."""

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        return {
            **({"id": token_id} if with_ids else {}),
            "token": logprob.decoded_token,
            "logprob": max(logprob.logprob, LOWEST),
            "bytes": list(tokenizer.token_bytes(token_id, special=True)),
        }

    entries = []
    for token_id, alternatives in zip(token_ids, logprobs, strict=True):
        best = sorted(alternatives.items(), key=lambda item: item[1].rank)[:num_top]
        top = [entry(other_id, logprob) for other_id, logprob in best]
        entries.append({**entry(token_id, alternatives[token_id]), "top_logprobs": top})
    return entries


def prompt_logprobs(
    entries: Sequence[Mapping[int, Logprob] | None] | None,
) -> list[dict[str, dict[str, Any]] | None] | None:
    """vLLM's shape: for each token of the prompt but the first, the alternatives by token id."""
    if entries is None:
        return None
    return [
        None
        if alternatives is None
        else {
            str(token_id): {
                "logprob": max(logprob.logprob, LOWEST),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for token_id, logprob in alternatives.items()
        }
        for alternatives in entries
    ]
