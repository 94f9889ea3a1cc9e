"""Load: sends requests to an OpenAI endpoint at a given rate, and measures what each client sees.

Names of the figures are those of vLLM's `bench serve`: TTFT, time to first token; TPOT, time per output token after
the first; ITL, inter-token latency, between two pieces of one stream; E2EL, end-to-end latency. Times are in seconds,
in results in milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from rvllm.http_client import Endpoint
from rvllm.load_prompts import LoadRequest

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
PERCENTILES = (50, 95, 99)
GOOD_ENDS = ("stop", "length", "tool_calls")
PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class LoadOptions:
    """How requests are sent. max_concurrency: most at a time. extra_body: further fields, or None to drop one.

    request_rate: requests a second, whose intervals are gamma-distributed; with burstiness 1 they are a Poisson
    process, with less they come in bursts. None: all at once. timeout: seconds for a whole request.
    Raises ValueError for a value out of range.
    """

    backend: str = "openai"
    model: str | None = None
    request_rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    path: str | None = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.backend not in PATHS:
            raise ValueError(f"backend must be one of {', '.join(PATHS)}, got {self.backend!r}")
        for name in ("request_rate", "burstiness", "max_concurrency", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive, got {value}")

    def body(self, request: LoadRequest) -> bytes:
        is_chat = self.backend == "openai-chat"
        fields: dict[str, Any] = {
            "model": self.model,
            **(
                {"messages": [{"role": "user", "content": request.prompt}]}
                if is_chat
                else {"prompt": request.prompt}
            ),
            "max_tokens": request.output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **self.extra_body,
        }
        return json.dumps({k: v for k, v in fields.items() if v is not None}).encode()


@dataclass
class RequestResult:
    """What one client saw. error: None, a status such as "429", "timeout", or the kind of failure; message explains it.

    piece_times: when each piece of text came, on the clock of time.perf_counter. Token counts are the server's own; of
    a server that gives none, the pieces count and the prompt has none.
    """

    start: float = 0.0
    end: float = 0.0
    piece_times: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    message: str = ""

    def latencies(self) -> dict[str, list[float]]:
        """Seconds by metric; lists that are empty where a metric does not apply."""
        pieces = self.piece_times
        if not pieces:
            return {"ttft": [], "tpot": [], "itl": [], "e2el": [self.end - self.start]}
        many = self.output_tokens > 1
        return {
            "ttft": [pieces[0] - self.start],
            "tpot": [(pieces[-1] - pieces[0]) / (self.output_tokens - 1)] if many else [],
            "itl": [b - a for a, b in pairwise(pieces)],
            "e2el": [self.end - self.start],
        }


async def send(
    endpoint: Endpoint, options: LoadOptions, request: LoadRequest, result: RequestResult | None = None
) -> RequestResult:
    """One request, streamed. What goes wrong is in the result; one that is given can be watched as it fills."""
    result = result or RequestResult()

    def on_event(data: bytes) -> None:
        if data != b"[DONE]":
            _read_event(data, time.perf_counter(), result)

    result.start = time.perf_counter()
    path = options.path or PATHS[options.backend]
    try:
        response = await asyncio.wait_for(
            endpoint.request("POST", path, options.body(request), on_event), options.timeout
        )
        if response.status != 200:
            result.error, result.message = str(response.status), _message(response.body)
        elif result.error is None and result.finish_reason not in GOOD_ENDS:
            result.error = f"finish_reason {result.finish_reason}"
            result.message = "the stream did not end as it should"
    except asyncio.TimeoutError:
        result.error, result.message = "timeout", f"no end within {options.timeout:g} s"
    except OSError as error:
        result.error, result.message = "connection", str(error) or type(error).__name__
    except ValueError as error:
        result.error, result.message = "bad response", str(error)
    result.end = time.perf_counter()
    result.output_tokens = result.output_tokens or len(result.piece_times)
    return result


def _read_event(data: bytes, now: float, result: RequestResult) -> None:
    event = json.loads(data)
    if not isinstance(event, dict):
        raise ValueError(f"an event that is no object: {data[:100]!r}")
    if "error" in event:
        result.error, result.message = "in stream", _message(data)
        return
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        thoughts = delta.get("reasoning_content") or delta.get("reasoning")  # vLLM's name
        text = choice.get("text") or delta.get("content") or thoughts or ""
        result.finish_reason = choice.get("finish_reason") or result.finish_reason
        # A token may have no text yet, but the role of an answer and the reason of its end are no tokens.
        if text or not (choice.get("finish_reason") or "role" in delta):
            result.piece_times.append(now)
            result.text += text
    if usage := event.get("usage"):
        result.prompt_tokens = usage.get("prompt_tokens") or 0
        result.output_tokens = usage.get("completion_tokens") or 0
        result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _message(body: bytes) -> str:
    text = body.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        text = error if isinstance(error, str) else error["message"]
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(str(text).split())[:300]


def arrival_times(count: int, options: LoadOptions, rng: np.random.Generator) -> list[float]:
    """Seconds from the start at which each request is sent."""
    if options.request_rate is None:
        return [0.0] * count
    shape = options.burstiness
    intervals = rng.gamma(shape, 1 / (options.request_rate * shape), size=count)
    times: list[float] = (np.cumsum(intervals) - intervals[0]).tolist()
    return times


async def drive(
    endpoint: Endpoint,
    options: LoadOptions,
    requests: Sequence[LoadRequest],
    arrivals: Sequence[float],
    on_done: Callable[[RequestResult], None] = lambda result: None,
) -> list[RequestResult]:
    """Sends all requests, each at its time, and waits for all answers.

    One that max_concurrency makes wait is timed from when it is sent.
    """
    slots = asyncio.Semaphore(options.max_concurrency or max(1, len(requests)))
    start = time.perf_counter()

    async def send_at(request: LoadRequest, arrival: float) -> RequestResult:
        await asyncio.sleep(start + arrival - time.perf_counter())
        async with slots:
            result = await send(endpoint, options, request)
        on_done(result)
        return result

    return await asyncio.gather(*(send_at(*pair) for pair in zip(requests, arrivals, strict=True)))


async def first_model(endpoint: Endpoint) -> str:
    """The first that the server lists. Raises OSError and ValueError."""
    response = await endpoint.request("GET", "/v1/models")
    if response.status != 200:
        raise ValueError(
            f"{endpoint.base_url}/v1/models: status {response.status}: {_message(response.body)}"
        )
    try:
        return str(json.loads(response.body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ValueError(f"{endpoint.base_url}/v1/models lists no model") from None


def summarize(results: Sequence[RequestResult]) -> dict[str, Any]:
    """Figures of one run under vLLM's names; latencies in milliseconds, of the requests that succeeded.

    A latency of which nothing was measured is None. errors: how many by kind; error_messages: the first of each.
    """
    good = [result for result in results if result.error is None]
    duration = max(r.end for r in results) - min(r.start for r in results)
    prompt_tokens, output_tokens = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    messages: dict[str, str] = {}
    for result in results:
        if result.error is not None:
            messages.setdefault(result.error, result.message)
    summary: dict[str, Any] = {
        "completed": len(good),
        "failed": len(results) - len(good),
        "errors": dict(Counter(r.error for r in results if r.error is not None)),
        "error_messages": messages,
        "max_concurrent_requests": peak_concurrency(results),
        "duration": duration,
        "total_input_tokens": prompt_tokens,
        "cached_input_tokens": sum(r.cached_tokens for r in good),
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (prompt_tokens + output_tokens) / duration,
    }
    latencies = [result.latencies() for result in good]
    for metric in METRICS:
        values = [1000 * value for row in latencies for value in row[metric]]
        summary[f"mean_{metric}_ms"] = float(np.mean(values)) if values else None
        for percentile in PERCENTILES:
            key = f"p{percentile}_{metric}_ms"
            summary[key] = float(np.percentile(values, percentile)) if values else None
        summary[f"max_{metric}_ms"] = max(values, default=None)
    return summary


def peak_concurrency(results: Sequence[RequestResult]) -> int:
    """Most requests that were in flight at a time."""
    changes = sorted([(r.start, 1) for r in results] + [(r.end, -1) for r in results])
    return int(np.cumsum([change for _, change in changes]).max(initial=0))
