"""AsyncEngine: one thread that steps the engine, and an asyncio stream for each request.

Callers live on event loops. What they want done goes to the engine thread as commands, which it takes between
two steps; what a step brings goes into the streams, and each loop is woken once for all of them.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from rvllm.engine import EngineStats, LLMEngine
from rvllm.engine_errors import EmbeddingError, EngineDeadError, EngineStoppedError
from rvllm.in_flight import InFlight
from rvllm.request import CompletionOutput, RequestOutput
from rvllm.request_group import RequestGroup
from rvllm.request_preparer import RequestPreparer
from rvllm.request_stream import EngineObserver, RequestStream, observe, wake
from rvllm.sampling_params import SamplingParams

T = TypeVar("T")

logger = logging.getLogger("rvllm")

_MAX_FAILED_STEPS = 3  # in a row: whatever is wrong then is not with the requests
_IDLE_SECONDS = 1.0  # after which the books of an idle engine are checked


class AsyncEngine:
    """Answers requests from any number of coroutines, on one engine thread.

    max_queue: requests that may wait beside the max_num_seqs that run; a request counts once for each choice.
    aging_seconds: a waiting request gains one level of priority in this time, so that none waits for ever.
    The engine belongs to the thread from start() on. A step that fails ends the requests it computed;
    several in a row end the thread and all requests.
    """

    def __init__(
        self,
        engine: LLMEngine,
        *,
        max_queue: int = 256,
        aging_seconds: float = 10.0,
        observer: EngineObserver | None = None,
    ) -> None:
        """Raises ValueError for a negative max_queue and an aging_seconds that is not positive."""
        if isinstance(max_queue, bool) or not isinstance(max_queue, int) or max_queue < 0:
            raise ValueError(f"max_queue must be an integer from 0 on, got {max_queue!r}")
        if not aging_seconds > 0:
            raise ValueError(f"aging_seconds must be positive, got {aging_seconds!r}")
        self.engine = engine
        self.max_in_flight = engine.scheduler.max_num_seqs + max_queue
        self._aging_seconds = aging_seconds
        self._observer = observer
        self._start_time = time.monotonic()
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        # All of the following are guarded by the lock.
        self._commands: list[Callable[[], None]] = []
        self._in_flight = InFlight(self.max_in_flight)
        self._is_stopping = False
        self._is_draining = False
        self._is_dead = False
        self._error: BaseException | None = None

        self._num_failed_steps = 0  # in a row
        self._stats = engine.stats
        self._thread: threading.Thread | None = None
        self._embedding_numbers = itertools.count()
        self._preparer = RequestPreparer(engine, self._refuse_if_over)

    def start(self) -> None:
        """Starts the engine thread; does nothing if it has been started."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rvllm-engine", daemon=True)
            self._thread.start()
            # A step that runs into the interpreter's end would abort the process.
            atexit.register(self._end, os.getpid())

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._thread is not None and not (self._is_dead or self._is_draining or self._is_stopping)

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def is_dead(self) -> bool:
        return self._is_dead

    @property
    def error(self) -> BaseException | None:
        """What the engine thread died of."""
        return self._error

    @property
    def num_running(self) -> int:
        return self._stats.num_running

    @property
    def num_waiting(self) -> int:
        """Choices in flight that do not run, also those whose prompts are still being encoded."""
        return max(0, self._in_flight.num_places - self._stats.num_running)

    def stats(self) -> EngineStats:
        """The engine's counters after its latest step. From any thread."""
        return self._stats

    def generate(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields what is new until an output is finished; what comes while nobody reads is merged into one.

        Closing the generator, or cancelling its task, drops the request before the next step. priority: the
        lowest is served first. timeout: seconds from now until the request ends with finish_reason "timeout".

        Raises, before the first output: ValueError for a bad request or an id in use, QueueFullError,
        EngineStoppedError; at any time EngineDeadError.
        """
        prepare = partial(self._preparer.prepare, request_id, prompt, params)
        return self._follow(request_id, params.n, prepare, priority, timeout)

    def generate_from(
        self,
        request_id: str,
        make: Callable[[], tuple[str | Sequence[int], SamplingParams]],
        n: int,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As generate(), of n choices for a prompt that is made once the request has been taken in.

        make: called on a thread of its own kind, so that others do not wait for it; what it raises is raised here.
        """

        async def prepare(priority: float) -> RequestGroup:
            prompt, params = await self._preparer.make(make)
            return await self._preparer.prepare(request_id, prompt, params, priority)

        return self._follow(request_id, n, prepare, priority, timeout)

    async def work(self, function: Callable[[], T]) -> T:
        """Result of a function, called where prompts are made; until then it counts as a request in flight.

        Raises what the function raises, QueueFullError and EngineStoppedError.
        """
        with self._place(1):
            return await self._preparer.make(function)

    async def embed(self, prompts: Iterable[str | Sequence[int]]) -> list[tuple[list[float], int]]:
        """Each prompt's embedding and number of tokens, computed beside whatever else runs.

        Raises as generate() does, and EmbeddingError for a model whose hidden states are not finite numbers.
        """
        room = asyncio.Semaphore(self.engine.scheduler.max_num_seqs)  # more would not be faster
        first = next(self._embedding_numbers)

        async def embed_one(i: int, prompt: str | Sequence[int]) -> tuple[list[float], int]:
            request_id = f"embedding-{first}-{i}"
            prepare = partial(self._preparer.prepare_embedding, request_id, prompt)
            async with room:
                outputs = [output async for output in self._follow(request_id, 1, prepare)]
            completion = outputs[-1].outputs[0]
            if completion.error is not None:
                raise EmbeddingError(completion.error)
            if completion.embedding is None:
                raise EngineStoppedError("the engine is draining: it has dropped the prompt")
            return completion.embedding, len(outputs[-1].prompt_token_ids)

        tasks = [asyncio.ensure_future(embed_one(i, prompt)) for i, prompt in enumerate(prompts)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def abort(self, request_id: str, finish_reason: str = "abort") -> None:
        """Ends a request before the next step. From any thread."""
        with self._lock:
            stream = self._in_flight.streams.get(request_id)
        if stream is not None:
            self._post_abort(stream, finish_reason)

    async def drain(self, timeout: float | None = None) -> None:
        """Refuses new requests and waits until those in flight are finished; aborts them after timeout seconds."""
        with self._lock:
            self._is_draining = True
        if await self._wait_until_empty(timeout):
            return
        with self._lock:
            streams = list(self._in_flight.streams.values())
        for stream in streams:
            self._post_abort(stream, "abort")
        await self._wait_until_empty(None)

    def shutdown(self) -> None:
        """Stops the engine thread after the step it is in; what is in flight fails with EngineStoppedError."""
        with self._lock:
            self._is_stopping = True
            self._has_work.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self._end)
        self._preparer.shutdown()
        self._fail_all(partial(EngineStoppedError, "the engine has been shut down"))

    def _end(self, pid: int) -> None:
        """At the end of the program, but not of a child of fork, which has none of the threads and processes."""
        if os.getpid() == pid:
            self.shutdown()

    # The callers' side.

    async def _follow(
        self,
        request_id: str,
        num_choices: int,
        prepare: Callable[[float], Awaitable[RequestGroup]],
        priority: float = 0,
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        _check(priority, timeout)
        stream = self._open(request_id, num_choices)
        timer: asyncio.TimerHandle | None = None
        try:
            # All that wait age at the same rate, so their order is known when they arrive.
            late = (stream.arrival - self._start_time) / self._aging_seconds
            if timeout is not None:
                timer = stream.loop.call_later(timeout, self._post_abort, stream, "timeout")
            group = await self._unless_ended(stream, prepare(priority + late))
            if group is not None:
                self._post(partial(self._submit, stream, group))
            stream.is_submitted = True
            finished = False
            while not finished:
                output = await self._take(stream)
                finished = output.finished
                yield output
        finally:
            if timer is not None:
                timer.cancel()
            if not stream.is_closed:
                self._close(stream)

    async def _unless_ended(
        self, stream: RequestStream, preparation: Awaitable[RequestGroup]
    ) -> RequestGroup | None:
        """The group, or None where the request has been ended before."""
        prepared, ended = asyncio.ensure_future(preparation), asyncio.ensure_future(stream.event.wait())
        try:
            await asyncio.wait((prepared, ended), return_when=asyncio.FIRST_COMPLETED)
            return prepared.result() if prepared.done() else None
        finally:
            prepared.cancel()
            ended.cancel()

    def _open(self, request_id: str, num_choices: int) -> RequestStream:
        """Takes a request in, if there is room for it."""
        stream = RequestStream(request_id, num_choices)
        with self._lock:
            self._refuse()
            self._in_flight.add(stream)
        return stream

    @contextmanager
    def _place(self, count: int) -> Iterator[None]:
        with self._lock:
            self._refuse()
            self._in_flight.take(count)
        try:
            yield
        finally:
            with self._lock:
                self._in_flight.num_places -= count

    def _close(self, stream: RequestStream) -> None:
        """Its consumer has left: others can have its place at once, its blocks after the step that is running."""
        with self._lock:
            self._in_flight.give_back(stream)
            if not stream.is_submitted and not stream.is_closed:
                self._in_flight.drop(stream)
        if stream.is_submitted:
            self._post_abort(stream, "abort")

    def _post_abort(self, stream: RequestStream, reason: str) -> None:
        self._post(partial(self._abort, stream, reason), even_if_stopped=True)

    def _post(self, command: Callable[[], None], even_if_stopped: bool = False) -> None:
        """Leaves a command for the engine thread. Without a thread there is nothing left to end or to drop."""
        with self._lock:
            if self._is_dead or self._is_stopping:
                if even_if_stopped:
                    return
                self._refuse()
            self._commands.append(command)
            self._has_work.notify()

    def _refuse(self) -> None:
        """Raises what a new request is refused with; returns if it may come in."""
        if self._is_dead:
            raise EngineDeadError(_dead(self._error))
        if self._is_stopping:
            raise EngineStoppedError("the engine has been shut down")
        if self._is_draining:
            raise EngineStoppedError("the engine is draining: it takes no new requests")
        if self._thread is None:
            raise EngineStoppedError("the engine has not been started")

    def _refuse_if_over(self) -> None:
        """Raises for work on the prompt of a request that can no longer be answered."""
        if self._is_dead or self._is_stopping:
            self._refuse()

    async def _take(self, stream: RequestStream) -> RequestOutput:
        while True:
            with self._lock:
                output, stream.output = stream.output, None
            if output is not None:
                return output
            if stream.error is not None:
                raise stream.error
            await stream.event.wait()
            stream.event.clear()

    async def _wait_until_empty(self, timeout: float | None) -> bool:
        with self._lock:
            if not self._in_flight.streams:
                return True
            emptied = self._in_flight.emptied()
        try:
            await asyncio.wait_for(asyncio.wrap_future(emptied), timeout)
        except asyncio.TimeoutError:
            return False
        return True

    # The engine thread's side.

    def _run(self) -> None:
        try:
            while self._obey():
                self._step()
        except BaseException as error:
            logger.critical("the engine has failed and answers no more requests", exc_info=error)
            with self._lock:
                self._is_dead, self._error = True, error
            self._fail_all(partial(EngineDeadError, _dead(error)))

    def _obey(self) -> bool:
        """Waits for work and does what has been asked for since the last step; False to stop."""
        with self._lock:
            is_idle = not self._has_work.wait_for(self._is_wanted, _IDLE_SECONDS)
        if is_idle:
            self.engine.scheduler.check_integrity()
        with self._lock:
            self._has_work.wait_for(self._is_wanted)
            commands, self._commands = self._commands, []
            if self._is_stopping:
                return False
        for command in commands:
            command()
        return True

    def _is_wanted(self) -> bool:
        return bool(self._commands) or self._is_stopping or self.engine.has_unfinished

    def _step(self) -> None:
        start = time.monotonic()
        is_busy = self.engine.has_unfinished
        try:
            outputs = self.engine.step()
        except Exception as error:
            self._num_failed_steps += 1
            if self._num_failed_steps == _MAX_FAILED_STEPS:
                raise
            logger.exception("a step has failed, and with it the requests that it computed")
            self._stats = self.engine.stats
            self._fail_dropped(partial(EngineDeadError, _dead(error)))
            return
        if is_busy:
            self._num_failed_steps = 0
        self._stats = self.engine.stats
        self._in_flight.rate.add_busy(time.monotonic() - start)
        self._deliver(outputs)

    def _submit(self, stream: RequestStream, group: RequestGroup) -> None:
        if stream.is_closed:
            return
        self.engine.submit(group)
        stream.is_queued = True

    def _abort(self, stream: RequestStream, reason: str) -> None:
        if stream.is_closed:
            return
        output = self.engine.abort(stream.request_id, reason)
        if output is None and not stream.is_queued:
            output = _ended(stream, reason)
        if output is not None:
            self._deliver([output])

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        with self._lock:  # where prompts are made, consumers may leave at any time
            in_flight = self._in_flight.streams
            outputs = [output for output in outputs if output.request_id in in_flight]
            streams = [in_flight[output.request_id] for output in outputs]
        if self._observer is not None:  # before the outputs are the consumers'
            observe(self._observer, streams, outputs)
        woken: dict[asyncio.AbstractEventLoop, list[RequestStream]] = {}
        with self._lock:
            for stream, output in zip(streams, outputs, strict=True):
                if stream.is_closed:
                    continue
                # A consumer that has not taken the output before this one has been woken already.
                if stream.output is None:
                    stream.output = output
                    woken.setdefault(stream.loop, []).append(stream)
                else:
                    stream.output.add(output)
                if output.finished:
                    self._in_flight.rate.add_finished(stream.num_choices)
                    self._in_flight.drop(stream)
        for loop, sleepers in woken.items():
            if not wake(loop, sleepers):
                for stream in sleepers:
                    self._abort(stream, "abort")

    def _fail_dropped(self, make_error: Callable[[], Exception]) -> None:
        """Ends the requests that the engine has dropped; those still to be submitted are none of them."""
        with self._lock:
            streams = list(self._in_flight.streams.values())
        self._fail(
            [s for s in streams if s.is_queued and not self.engine.has_request(s.request_id)], make_error
        )

    def _fail_all(self, make_error: Callable[[], Exception]) -> None:
        """Ends whatever still waits for the engine thread, which is gone."""
        with self._lock:
            streams = list(self._in_flight.streams.values())
            self._commands.clear()
        self._fail(streams, make_error)

    def _fail(self, streams: Iterable[RequestStream], make_error: Callable[[], Exception]) -> None:
        woken: dict[asyncio.AbstractEventLoop, list[RequestStream]] = {}
        with self._lock:
            for stream in streams:
                if stream.is_closed:  # its consumer has left meanwhile
                    continue
                stream.error = make_error()
                woken.setdefault(stream.loop, []).append(stream)
                self._in_flight.drop(stream)
        for loop, sleepers in woken.items():
            wake(loop, sleepers)


def _check(priority: object, timeout: object) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 2**31:
        raise ValueError(f"priority must be an integer between -2^31 and 2^31, got {priority!r}")
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")


def _ended(stream: RequestStream, reason: str) -> RequestOutput:
    """The end of a request whose prompt was still being made."""
    choices = [CompletionOutput(i, finish_reason=reason) for i in range(stream.num_choices)]
    return RequestOutput(stream.request_id, None, [], 0, choices, finished=True)


def _dead(error: BaseException | None) -> str:
    return f"the engine has failed: {type(error).__name__}: {error}"
