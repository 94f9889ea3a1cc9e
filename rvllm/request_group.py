"""RequestGroup: the choices of one prompt, and how the tokens of each become text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rvllm.detokenizer import Detokenizer
from rvllm.request import CompletionOutput, Logprob, Request, RequestOutput, SampledToken
from rvllm.stop_checker import StopChecker

if TYPE_CHECKING:
    from rvllm.tokenizer import Tokenizer


class Choice:
    """A request, the state of its text, and the rules that end it."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        params = request.params
        self.request = request
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stop_checker = StopChecker(params.stop_strings, params.include_stop_str_in_output)
        self._eog_token_ids = frozenset() if params.ignore_eos else tokenizer.eog_token_ids
        self._stop_token_ids = frozenset(params.stop_token_ids or ())

    def append(self, token: SampledToken) -> CompletionOutput:
        """Adds a token; returns it with the text that is now certain, and finish_reason if it was the last."""
        request, params, token_id = self.request, self.request.params, token.token_id
        if params.max_tokens == 0:  # a prompt that is computed to its end gives one all the same
            return self.end("length")
        request.token_ids.append(token_id)
        is_complete = False
        if request.grammar is not None:
            request.grammar.advance(token_id)
            is_complete = request.grammar.is_finished
        is_eog = token_id in self._eog_token_ids
        is_stop = not is_eog and token_id in self._stop_token_ids
        is_last = is_eog or is_stop or is_complete or request.num_tokens >= request.max_num_tokens
        is_hidden = is_eog or (is_stop and not params.include_stop_str_in_output)
        text = "" if is_hidden else self._detokenizer.push(token_id)
        if is_last:
            text += self._detokenizer.finish()
        text, stop = self._stop_checker.push(text, search=request.num_output_tokens > params.min_tokens)
        if stop is not None:
            request.finish_reason, request.stop_reason = "stop", stop
        elif is_last:
            text += self._stop_checker.finish()
            request.finish_reason = "stop" if is_eog or is_stop or is_complete else "length"
            request.stop_reason = token_id if is_stop else None
        logprobs = self._logprobs(token.logprobs)
        return CompletionOutput(
            index=request.index,
            text=text,
            token_ids=[token_id],
            logprobs=None if logprobs is None else [logprobs],
            cumulative_logprob=None if logprobs is None else logprobs[token_id].logprob,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            text_lengths=[len(text)],
        )

    def end(self, finish_reason: str, error: str | None = None) -> CompletionOutput:
        """Ends the choice without a token; returns the text that was still held back."""
        self.request.finish_reason = finish_reason
        text, _ = self._stop_checker.push(self._detokenizer.finish(), search=False)
        return CompletionOutput(
            self.request.index, text + self._stop_checker.finish(), [], None, None, finish_reason, error=error
        )

    def take(self, token: SampledToken) -> CompletionOutput:
        """Adds a token, or ends the choice with the embedding or the error that has come instead."""
        if token.error is not None:
            return self.end("error", token.error)
        if token.embedding is not None:
            completion = self.end("stop")
            completion.embedding = token.embedding
            return completion
        return self.append(token)

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Of the whole prompt, if they were asked for."""
        entries = self.request.prompt_logprobs
        if entries is None or len(entries) < self.request.num_prompt_tokens:
            return None
        return [self._logprobs(entry) for entry in entries]

    def _logprobs(self, entry: dict[int, tuple[float, int]] | None) -> dict[int, Logprob] | None:
        if entry is None:
            return None
        text = self._tokenizer.token_text
        return {i: Logprob(logprob, rank, text(i)) for i, (logprob, rank) in entry.items()}


class RequestGroup:
    """The n choices of one prompt. prompt: its text, None where it was given as token ids.

    inbox: where the engine puts what is new, and the error of a step that failed; None to get it from step().
    """

    def __init__(self, prompt: str | None, requests: Sequence[Request], tokenizer: Tokenizer) -> None:
        self.request_id = requests[0].request_id
        self.prompt = prompt
        self.prompt_token_ids = requests[0].prompt_token_ids
        self.choices = [Choice(request, tokenizer) for request in requests]
        self.num_unfinished = len(requests)
        self.inbox: deque[RequestOutput | BaseException] | None = None

    def append(self, request: Request, token: SampledToken) -> CompletionOutput:
        """Adds a token, or the reason why there is none, to the choice of request."""
        choice = self.choices[request.index]
        completion = choice.take(token)
        if completion.finish_reason is not None:
            self.num_unfinished -= 1
        return completion

    def end(self, finish_reason: str) -> list[CompletionOutput]:
        """Ends all choices that are not finished."""
        self.num_unfinished = 0
        return [c.end(finish_reason) for c in self.choices if c.request.finish_reason is None]

    def empty_output(self) -> RequestOutput:
        """What the outputs of the group's steps can be added to."""
        return self.output([CompletionOutput(i) for i in range(len(self.choices))])

    def output(self, completions: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            num_cached_tokens=self.choices[0].request.num_cached_tokens,
            outputs=completions,
            finished=self.num_unfinished == 0,
            prompt_logprobs=self._new_prompt_logprobs(completions),
            start_time=self.choices[0].request.start_time,
        )

    def _new_prompt_logprobs(
        self, completions: list[CompletionOutput]
    ) -> list[dict[int, Logprob] | None] | None:
        """With the first output of the first choice, which has computed them."""
        choice = self.choices[0]
        new = next((completion for completion in completions if completion.index == 0), None)
        if new is None or new.finish_reason == "error":  # they may be no numbers
            return None
        is_first = choice.request.num_output_tokens == len(new.token_ids)
        return choice.prompt_logprobs() if is_first else None
