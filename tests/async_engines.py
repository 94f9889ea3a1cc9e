"""AsyncEngines on the fake runner, and what their tests share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fake_engine import assert_drained, make_engine

from rvllm.async_engine import AsyncEngine
from rvllm.engine import LLMEngine
from rvllm.request import RequestOutput
from rvllm.sampling_params import SamplingParams

SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)


class Gate:
    """Lets the engine run a step only when the test says so."""

    def __init__(self, engine: LLMEngine) -> None:
        self.entered = threading.Semaphore(0)
        self._open = threading.Event()
        self._permits = threading.Semaphore(0)
        run = engine.runner.run

        def gated(scheduled: Any) -> Any:
            self.entered.release()
            if not self._open.is_set():
                self._permits.acquire()
            return run(scheduled)

        engine.runner.run = gated  # type: ignore[method-assign]

    async def step(self) -> None:
        """Returns when the step that waits at the gate is over, and the next one waits there."""
        self._permits.release()
        await asyncio.to_thread(self.entered.acquire)

    async def wait(self) -> None:
        await asyncio.to_thread(self.entered.acquire)

    def open(self) -> None:
        self._open.set()
        self._permits.release()


class Observer:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.first_tokens: list[float] = []
        self.num_gaps = 0
        self.finished: list[tuple[str, int, int]] = []

    def on_first_token(self, seconds: float, n: int) -> None:
        self.first_tokens.append(seconds)

    def on_tokens(self, itl_seconds: float, n: int) -> None:
        assert itl_seconds >= 0
        self.num_gaps += n

    def on_finished(
        self, reason: str, e2e_seconds: float, prompt_tokens: int, generation_tokens: int
    ) -> None:
        self.finished.append((reason, prompt_tokens, generation_tokens))


@contextmanager
def running(engine: LLMEngine | None = None, **settings: Any) -> Iterator[AsyncEngine]:
    engine = engine or make_engine(4096, context_length=8192, max_num_seqs=4)
    async_engine = AsyncEngine(engine, **settings)
    async_engine.start()
    try:
        yield async_engine
    finally:
        async_engine.shutdown()
        if not async_engine.is_dead:
            for request_id in list(engine._groups):
                engine.abort(request_id)
            assert_drained(engine)


async def collect(stream: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    """All of a request's output, joined."""
    joined: RequestOutput | None = None
    async for output in stream:
        if joined is None:
            joined = output
        else:
            joined.add(output)
    assert joined is not None and joined.finished
    return joined


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # the test's own time limit ends it
        await asyncio.sleep(0.001)


def drive(main: Callable[[], Awaitable[None]]) -> None:
    """Runs a test on a loop of its own; nothing here takes long, unless it hangs."""

    async def limited() -> None:
        await asyncio.wait_for(main(), 60)

    asyncio.run(limited())
