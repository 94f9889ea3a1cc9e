"""The prompts of one HTTP request in the engine: admitted or refused together, read as they go on."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request

from rvllm.engine_errors import EmbeddingError, EngineDeadError, EngineStoppedError, QueueFullError
from rvllm.grammar import TOO_COMPLEX
from rvllm.request import CompletionOutput, RequestOutput
from rvllm.sampling_params import SamplingParams
from rvllm.server.errors import APIError, bad_request, from_value_error
from rvllm.server.metrics import Metrics
from rvllm.server.streaming import while_connected

if TYPE_CHECKING:
    from rvllm.server.served_model import ServedModel

Prompt = str | list[int]
T = TypeVar("T")


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


@dataclass
class _Clock:
    """Of one prompt, in seconds of time.monotonic(): when it began to be computed, its first and latest token."""

    start: float
    first_token: float
    last_token: float


class Generation:
    """Iterates over (index of the prompt, what is new of it) after start().

    prompts: as far as they are known. n: choices of each. results: everything so far, one RequestOutput a prompt.
    Leaving before the end needs close(): what still runs is aborted.
    """

    def __init__(self, request: Request, model: ServedModel, request_id: str, n: int) -> None:
        """A generation without prompts; use one of the two below."""
        request.state.generation = self  # what the log reports
        self._request = request
        self.model = model
        self.request_id = request_id
        self.n = n
        self.prompts: list[Prompt] = []
        self.results: list[RequestOutput] = []
        self.seconds_to_first_token = 0.0
        self._arrival = time.monotonic()
        self._clocks: list[_Clock] = []
        self._iterators: list[AsyncGenerator[RequestOutput, None]] = []
        self._first: list[RequestOutput] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._predict_seconds: float | None = None
        self._timers: list[asyncio.TimerHandle] = []

    @classmethod
    def of_prompts(
        cls,
        request: Request,
        model: ServedModel,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        priority: int | None = None,
        predict_seconds: float | None = None,
    ) -> Generation:
        """predict_seconds: time from a prompt's first token until its text ends.

        Raises APIError for more than can be in flight, and for a text that cannot fit.
        """
        generation = cls(request, model, request_id, params.n)
        generation._predict_seconds = predict_seconds
        generation._check_count(len(prompts))
        for prompt in prompts:
            model.check_length(prompt)
        generation.prompts += prompts
        generate = partial(
            model.engine.generate, params=params, priority=priority or 0, timeout=model.timeout
        )
        generation._iterators += [generate(f"{request_id}-{i}", prompt) for i, prompt in enumerate(prompts)]
        return generation

    @classmethod
    def of_source(
        cls,
        request: Request,
        model: ServedModel,
        request_id: str,
        source: Callable[[], tuple[Prompt, SamplingParams]],
        n: int | None,
        priority: int | None = None,
    ) -> Generation:
        """Of one prompt, which source makes on a thread when the request has been admitted; it may raise APIError."""
        generation = cls(request, model, request_id, 1 if n is None else n)
        generation._check_count(1)

        def make() -> tuple[Prompt, SamplingParams]:
            prompt, params = source()
            generation.prompts.append(prompt)
            return prompt, params

        stream = model.engine.generate_from(
            f"{request_id}-0", make, generation.n, priority=priority or 0, timeout=model.timeout
        )
        generation._iterators.append(stream)
        return generation

    def _check_count(self, num_prompts: int) -> None:
        limit = self.model.engine.max_in_flight
        if self.n < 1:
            raise bad_request(f"n must be at least 1, got {self.n}", "n")
        if num_prompts * self.n > limit:
            raise bad_request(
                f"{num_prompts} prompts with n {self.n} are more than the {limit} requests that may be in flight "
                "(--max-num-seqs and --max-queue)"
            )

    async def start(self) -> None:
        """Returns when every prompt has its first output, so that a refusal of any is an HTTP status.

        Raises APIError.
        """
        waits = [asyncio.ensure_future(self._first_of(i)) for i in range(len(self._iterators))]
        try:
            self._first = list(await asyncio.gather(*waits))
        except Exception as error:
            raise refusal(self._request, error) from error
        finally:
            if len(self._first) < len(waits):
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
                await self.close()
        for output in self._first:
            _check_started(output)
        now = time.monotonic()
        self.seconds_to_first_token = now - self._arrival
        self._clocks = [_Clock(output.start_time or now, now, now) for output in self._first]
        choices = range(self.n)
        self.results = [
            replace(output, outputs=[CompletionOutput(i) for i in choices], finished=False)
            for output in self._first
        ]

    async def _first_of(self, i: int) -> RequestOutput:
        output = await anext(self._iterators[i])
        if self._predict_seconds is not None:
            end = partial(self.model.engine.abort, f"{self.request_id}-{i}", "timeout")
            self._timers.append(asyncio.get_running_loop().call_later(self._predict_seconds, end))
        return output

    async def __aiter__(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Raises APIError when the engine fails."""
        try:
            for i, output in enumerate(self._first):
                yield i, self._record(i, output)
            rest = self._merged() if len(self._iterators) > 1 else self._only()
            async for i, output in rest:
                yield i, self._record(i, output)
        except APIError:
            raise
        except Exception as error:
            raise api_error(error) from error

    async def finish(self) -> list[RequestOutput]:
        """All results, complete. Raises APIError."""
        try:
            await self.start()
            async for _ in self:
                pass
        finally:
            await self.close()
        return self.results

    async def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for iterator in self._iterators:
            await iterator.aclose()

    def _record(self, i: int, output: RequestOutput) -> RequestOutput:
        self._clocks[i].last_token = time.monotonic()
        self.results[i].add(output)
        for completion in output.outputs:
            if completion.finish_reason == "error":
                raise _failure(completion.error or "").renamed(self._request.state.names)
        return output

    async def _only(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        async for output in self._iterators[0]:
            yield 0, output

    async def _merged(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of all prompts in the order in which they come."""
        inbox: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(
            len(self._iterators)
        )

        async def pump(i: int, iterator: AsyncGenerator[RequestOutput, None]) -> None:
            try:
                async for output in iterator:
                    await inbox.put((i, output))
                await inbox.put((i, None))
            except Exception as error:
                await inbox.put((i, error))

        self._pumps = [asyncio.ensure_future(pump(i, iterator)) for i, iterator in enumerate(self._iterators)]
        running = len(self._pumps)
        while running:
            i, output = await inbox.get()
            if isinstance(output, Exception):
                raise output
            if output is None:
                running -= 1
            else:
                yield i, output

    # What the answers report

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self.results)

    @property
    def num_cached_tokens(self) -> int:
        return sum(output.num_cached_tokens for output in self.results)

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(completion.token_ids) for output in self.results for completion in output.outputs)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        prompt, completion = self.num_prompt_tokens, self.num_generated_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def timings(self, i: int | None = None) -> dict[str, float]:
        """llama.cpp's timings object, of prompt i or of all together; waiting in the queue is no part of it."""
        chosen = range(len(self.results)) if i is None else [i]
        results, clocks = [self.results[k] for k in chosen], [self._clocks[k] for k in chosen]
        cache_n = sum(result.num_cached_tokens for result in results)
        prompt_n = sum(len(result.prompt_token_ids) for result in results) - cache_n
        prompt_ms = 1e3 * sum(clock.first_token - clock.start for clock in clocks)
        predicted_n = sum(len(choice.token_ids) for result in results for choice in result.outputs)
        predicted_ms = 1e3 * sum(clock.last_token - clock.first_token for clock in clocks)
        later_n = max(0, predicted_n - self.n * len(results))  # the first tokens came with the prompt
        return {
            "cache_n": cache_n,
            "prompt_n": prompt_n,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(1, prompt_n),
            "prompt_per_second": 1e3 * prompt_n / max(1e-3, prompt_ms),
            "predicted_n": predicted_n,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / max(1, later_n),
            "predicted_per_second": 1e3 * later_n / max(1e-3, predicted_ms),
        }


async def work(request: Request, model: ServedModel, function: Callable[[], T]) -> T:
    """Result of a function that may take long: called on a thread, as a request in flight that its client may leave.

    Raises APIError, ClientGoneError.
    """
    try:
        return await while_connected(request, model.engine.work(function))
    except Exception as error:
        raise refusal(request, error) from error


def refusal(request: Request, error: Exception) -> APIError:
    """As api_error(), counted if it is for want of room."""
    if isinstance(error, QueueFullError):
        metrics: Metrics = request.app.state.metrics
        metrics.on_rejected("queue_full")
    return api_error(error)


def api_error(error: Exception) -> APIError:
    """The HTTP status of what the engine raises."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": str(error.retry_after)}
        return APIError(429, str(error), code="rate_limit_exceeded", headers=headers)
    if isinstance(error, EngineStoppedError):
        return APIError(
            503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"}
        )
    if isinstance(error, EngineDeadError):
        return APIError(500, f"the engine has failed: {error}", code="engine_dead")
    if isinstance(error, EmbeddingError):
        return APIError(500, f"the engine failed: {error}")
    if isinstance(error, ValueError):
        return from_value_error(error)
    raise error


def _failure(message: str) -> APIError:
    if message.startswith(TOO_COMPLEX):
        return bad_request(message, "structured_outputs", "grammar_too_complex")
    return APIError(500, f"the engine failed: {message}")


def _check_started(output: RequestOutput) -> None:
    """Raises APIError for a request that ended before it had a token."""
    if any(completion.token_ids for completion in output.outputs):
        return
    reasons = {completion.finish_reason for completion in output.outputs}
    if "timeout" in reasons:
        raise APIError(408, "the request had no token within its time limit (--timeout)", code="timeout")
    if "abort" in reasons:
        raise APIError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})
