"""The prompts of one HTTP request in the engine: admitted or refused together, read as they go on."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request

from rvllm.async_engine import EmbeddingError, EngineDeadError, EngineStoppedError, QueueFullError
from rvllm.request import CompletionOutput, RequestOutput
from rvllm.sampling_params import SamplingParams
from rvllm.server.errors import APIError, bad_request, from_value_error
from rvllm.server.metrics import Metrics

if TYPE_CHECKING:
    from rvllm.server.served_model import ServedModel


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


class Generation:
    """Iterates over (index of the prompt, what is new of it) after start().

    results: everything so far, one RequestOutput a prompt. Leaving before the end needs close(): what still runs
    is aborted.
    """

    def __init__(
        self,
        request: Request,
        model: ServedModel,
        request_id: str,
        prompts: Sequence[str | list[int]],
        params: SamplingParams,
        priority: int | None = None,
        timeout: float | None = None,
    ) -> None:
        request.state.generation = self  # what the log reports
        self._metrics: Metrics = request.app.state.metrics
        self.model = model
        self.request_id = request_id
        self.params = params
        self.prompts = prompts
        self.results: list[RequestOutput] = []
        self.arrival_time = time.perf_counter()
        self.first_token_time = self.last_token_time = self.arrival_time
        if len(prompts) * params.n > model.engine.max_in_flight:
            raise bad_request(
                f"{len(prompts)} prompts with n {params.n} are more than the {model.engine.max_in_flight} "
                "requests that may be in flight (--max-num-seqs and --max-queue)"
            )
        for prompt in prompts:
            model.check_length(prompt)
        self._iterators = [
            model.engine.generate(
                f"{request_id}-{i}",
                prompt,
                params,
                priority=priority or 0,
                timeout=model.timeout if timeout is None else timeout,
            )
            for i, prompt in enumerate(prompts)
        ]
        self._first: list[RequestOutput] = []
        self._pumps: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when every prompt has its first output, so that a refusal of any is an HTTP status.

        Raises APIError.
        """
        waits = [asyncio.ensure_future(anext(iterator)) for iterator in self._iterators]
        try:
            self._first = list(await asyncio.gather(*waits))
        except Exception as error:
            if isinstance(error, QueueFullError):
                self._metrics.on_rejected("queue_full")
            raise api_error(error) from error
        finally:
            if len(self._first) < len(waits):
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
                await self.close()
        self.first_token_time = self.last_token_time = time.perf_counter()
        for output in self._first:
            _check_started(output)
        self.results = [_empty_output(output, self.params.n) for output in self._first]

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
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for iterator in self._iterators:
            await iterator.aclose()

    def _record(self, i: int, output: RequestOutput) -> RequestOutput:
        self.last_token_time = time.perf_counter()
        self.results[i].add(output)
        for completion in output.outputs:
            if completion.finish_reason == "error":
                raise APIError(500, f"the engine failed: {completion.error}")
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

    def usage(self, num_hidden_tokens: int = 0) -> dict[str, Any]:
        """OpenAI's usage object. num_hidden_tokens: sampled, but not part of the answer."""
        prompt, completion = self.num_prompt_tokens, self.num_generated_tokens - num_hidden_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def timings(self) -> dict[str, float]:
        """llama.cpp's timings object; waiting in the queue counts as part of the prompt's time."""
        prompt_ms = 1e3 * (self.first_token_time - self.arrival_time)
        predicted_ms = 1e3 * (self.last_token_time - self.first_token_time)
        prompt_n = self.num_prompt_tokens - self.num_cached_tokens
        predicted_n = self.num_generated_tokens
        later_n = max(
            0, predicted_n - self.params.n * len(self.prompts)
        )  # the first tokens came with the prompt
        return {
            "cache_n": self.num_cached_tokens,
            "prompt_n": prompt_n,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(1, prompt_n),
            "prompt_per_second": 1e3 * prompt_n / max(1e-3, prompt_ms),
            "predicted_n": predicted_n,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / max(1, later_n),
            "predicted_per_second": 1e3 * later_n / max(1e-3, predicted_ms),
        }


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


def _check_started(output: RequestOutput) -> None:
    """Raises APIError for a request that ended before it had a token."""
    if any(completion.token_ids for completion in output.outputs):
        return
    reasons = {completion.finish_reason for completion in output.outputs}
    if "timeout" in reasons:
        raise APIError(408, "the request had no token within its time limit (--timeout)", code="timeout")
    if "abort" in reasons:
        raise APIError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})


def _empty_output(first: RequestOutput, n: int) -> RequestOutput:
    """What the outputs of a request can be added to."""
    return RequestOutput(
        request_id=first.request_id,
        prompt=first.prompt,
        prompt_token_ids=first.prompt_token_ids,
        num_cached_tokens=first.num_cached_tokens,
        outputs=[CompletionOutput(i, "", [], None, None) for i in range(n)],
        finished=False,
        prompt_logprobs=first.prompt_logprobs,
    )
