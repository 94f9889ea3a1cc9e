"""RequestPreparer: what is done for a request before the engine has it, in three stages with threads of their own.

A prompt that has to be made (a chat template may loop for seconds) and a grammar that has to be compiled (which may
take as long) hold up those that need the same, never a plain prompt.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from rvllm.chat_template import is_abandoned
from rvllm.engine import LLMEngine
from rvllm.engine_errors import QueueFullError
from rvllm.grammar import Grammar
from rvllm.request_group import RequestGroup
from rvllm.sampling_params import SamplingParams
from rvllm.structured_output import StructuredOutput

T = TypeVar("T")

_NUM_THREADS = 2  # of a stage
_MAX_COMPILING = 64  # grammars that are being compiled or wait for it
_COMPILE_SECONDS = 10.0  # for the wait and the compilation


class RequestPreparer:
    """Turns prompts and parameters into groups that engine.submit() takes.

    refuse: called on the threads before each piece of work; raises when it is of no use any more. A coroutine that
    is cancelled takes its work back: what waits for a thread is not begun, a chat template that runs is stopped.
    """

    def __init__(self, engine: LLMEngine, refuse: Callable[[], None]) -> None:
        self._engine = engine
        self._refuse = refuse
        engine.grammar_compiler.isolate()
        self._makers = ThreadPoolExecutor(_NUM_THREADS, "rvllm-prompt")
        self._encoders = ThreadPoolExecutor(_NUM_THREADS, "rvllm-prepare")

    def shutdown(self) -> None:
        self._makers.shutdown(wait=False)
        self._encoders.shutdown(wait=False)
        self._engine.grammar_compiler.close()

    async def make(self, function: Callable[[], T]) -> T:
        """Result of a function that makes a prompt, or anything else that may take long."""
        return await self._run(self._makers, function)

    async def prepare(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams, priority: float
    ) -> RequestGroup:
        """As LLMEngine.prepare(). Raises QueueFullError when too many grammars are being compiled."""
        prepare = partial(self._engine.prepare, request_id, prompt, params, 0, priority)
        if params.structured_output is None:
            return await self._run(self._encoders, prepare)
        return await self._prepare_with_grammar(params.structured_output, prepare)

    async def prepare_embedding(
        self, request_id: str, prompt: str | Sequence[int], priority: float
    ) -> RequestGroup:
        """As LLMEngine.prepare_embedding()."""
        prepare = partial(self._engine.prepare_embedding, request_id, prompt, priority)
        return await self._run(self._encoders, prepare)

    async def _prepare_with_grammar(
        self, output: StructuredOutput, prepare: Callable[[], RequestGroup]
    ) -> RequestGroup:
        compiler = self._engine.grammar_compiler
        busy = QueueFullError("too many grammars wait to be compiled", math.ceil(_COMPILE_SECONDS))
        if compiler.num_compiling >= _MAX_COMPILING and not compiler.is_known(output):
            raise busy
        with compiler.compiling(output) as future:
            compiled = asyncio.wrap_future(future)
            compiled.add_done_callback(_ignore)
            try:
                await asyncio.wait_for(asyncio.shield(compiled), _COMPILE_SECONDS)
            except asyncio.TimeoutError:
                if not future.running():
                    raise busy from None
                seconds = f"{_COMPILE_SECONDS:g} seconds"
                raise ValueError(f"{output.kind}: takes more than {seconds} to compile") from None
            return await self._run(self._encoders, prepare)

    async def _run(self, executor: ThreadPoolExecutor, function: Callable[[], T]) -> T:
        abandoned = threading.Event()
        context = contextvars.copy_context()
        context.run(is_abandoned.set, abandoned.is_set)

        def work() -> T:
            self._refuse()
            return context.run(function)

        try:
            return await asyncio.get_running_loop().run_in_executor(executor, work)
        finally:
            abandoned.set()


def _ignore(compiled: asyncio.Future[Grammar]) -> None:
    """Takes note of an error that nobody may be left to hear of."""
    if not compiled.cancelled():
        compiled.exception()
