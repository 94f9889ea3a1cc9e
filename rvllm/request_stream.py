"""RequestStream: what of a request's output its consumer has not taken yet, and what observers hear of it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from rvllm.request import RequestOutput


class EngineObserver(Protocol):
    """Hears of all that is worth a metric, on the engine thread: its methods must be quick."""

    def on_first_token(self, seconds: float, n: int) -> None:
        """A request's first n tokens, one for each choice at most, came `seconds` after the request."""

    def on_tokens(self, itl_seconds: float, n: int) -> None:
        """n tokens came, each itl_seconds after the one before it in its request."""

    def on_finished(
        self, reason: str, e2e_seconds: float, prompt_tokens: int, generation_tokens: int
    ) -> None: ...


class RequestStream:
    """A request in flight. output: what its consumer has not taken yet, merged into one."""

    __slots__ = (
        "arrival",
        "error",
        "event",
        "is_closed",
        "is_queued",
        "is_submitted",
        "last_token",
        "loop",
        "num_choices",
        "num_places",
        "num_tokens",
        "output",
        "request_id",
    )

    def __init__(self, request_id: str, num_choices: int) -> None:
        self.request_id = request_id
        self.num_choices = num_choices
        self.num_places = num_choices  # that it takes among those in flight
        self.loop = asyncio.get_running_loop()
        self.event = asyncio.Event()
        self.output: RequestOutput | None = None
        self.error: Exception | None = None
        self.is_submitted = False
        self.is_queued = False  # the engine has it, or has had it
        self.is_closed = False  # the engine has no more to do for it
        self.arrival = time.monotonic()
        self.last_token = 0.0  # time of its latest token, 0 before the first
        self.num_tokens = 0


def wake(loop: asyncio.AbstractEventLoop, streams: Sequence[RequestStream]) -> bool:
    """Wakes the consumers of streams, which live on loop; False if it is closed."""

    def set_events() -> None:
        for stream in streams:
            stream.event.set()

    try:
        loop.call_soon_threadsafe(set_events)
    except RuntimeError:
        return False
    return True


def observe(
    observer: EngineObserver, streams: Sequence[RequestStream], outputs: Sequence[RequestOutput]
) -> None:
    now = time.monotonic()
    gaps: Counter[float] = Counter()  # time of the token before -> tokens
    for stream, output in zip(streams, outputs, strict=True):
        count = sum(len(completion.token_ids) for completion in output.outputs)
        if count:
            if stream.last_token:
                gaps[stream.last_token] += count
            else:
                observer.on_first_token(now - stream.arrival, count)
            stream.last_token = now
            stream.num_tokens += count
        if output.finished:
            reason = output.outputs[-1].finish_reason or ""
            seconds = now - stream.arrival
            observer.on_finished(reason, seconds, len(output.prompt_token_ids), stream.num_tokens)
    for last_token, count in gaps.items():
        observer.on_tokens(now - last_token, count)
