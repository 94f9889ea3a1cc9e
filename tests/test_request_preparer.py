"""What is done for a request before the engine has it: slow prompts and grammars hold up nobody else."""

from __future__ import annotations

import asyncio
import threading

import pytest
from async_engines import ENDLESS, SHORT, collect, drive, running, until
from fake_engine import make_engine
from fake_runner import tokens_alone

from rvllm.async_engine import AsyncEngine
from rvllm.chat_template import ChatTemplate, ChatTemplateError, is_abandoned
from rvllm.engine_errors import QueueFullError
from rvllm.grammar_source import GrammarTrial
from rvllm.sampling_params import SamplingParams
from rvllm.structured_output import StructuredOutput

PLAIN = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def constrained(regex: str) -> SamplingParams:
    return SamplingParams(max_tokens=4, structured_output=StructuredOutput(regex=regex))


class SlowCompiler:
    """Compiles only when the test says so; then every grammar is found to be bad."""

    def __init__(self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str | None] = []
        self.gate = threading.Event()

        def source(trial: GrammarTrial, output: StructuredOutput) -> str:
            self.begun.append(output.regex)
            self.gate.wait()
            raise ValueError(f"regex: {output.regex} is bad")

        monkeypatch.setattr(GrammarTrial, "source", source)


async def is_served(engine: AsyncEngine, name: str) -> None:
    assert (await collect(engine.generate(name, [5, 6], PLAIN))).outputs[0].token_ids == tokens_alone(
        [5, 6], 4
    )


def test_slow_grammars_hold_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with running(max_queue=100) as engine:
            compiler = SlowCompiler(engine, monkeypatch)
            tasks = [
                asyncio.create_task(collect(engine.generate(f"g{i}", [5], constrained(f"{i % 4}"))))
                for i in range(8)
            ]
            try:
                await until(lambda: len(compiler.begun) == 1)
                for i in range(4):
                    await is_served(engine, f"plain-{i}")
                tasks[3].cancel()
                tasks[7].cancel()  # both that need the last grammar, which has not begun
                await until(lambda: engine.num_waiting == 6)
            finally:
                compiler.gate.set()
            for task in [*tasks[:3], *tasks[4:7]]:
                with pytest.raises(ValueError, match=r"regex: \d is bad"):
                    await task
            assert sorted(map(str, compiler.begun)) == ["0", "1", "2"]  # each once, and none for nobody

    drive(main)


def test_compilations_are_limited_in_time_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rvllm.request_preparer._MAX_COMPILING", 3)

    async def main() -> None:
        with running(max_queue=100) as engine:
            compiler = SlowCompiler(engine, monkeypatch)
            try:
                tasks = [
                    asyncio.create_task(collect(engine.generate(f"g{i}", [5], constrained(f"{i}"))))
                    for i in range(3)
                ]
                await until(
                    lambda: len(compiler.begun) == 1 and engine.engine.grammar_compiler.num_compiling == 3
                )
                with pytest.raises(QueueFullError, match="too many grammars"):
                    await collect(engine.generate("more", [5], constrained("9")))
                monkeypatch.setattr("rvllm.request_preparer._COMPILE_SECONDS", 0.01)
                with pytest.raises(ValueError, match=r"regex: takes more than 0\.01 seconds to compile"):
                    await collect(engine.generate("slow", [5], constrained("0")))
                with pytest.raises(QueueFullError, match="too many grammars"):
                    await collect(engine.generate("behind", [5], constrained("2")))
            finally:
                compiler.gate.set()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: engine.num_waiting == 0)

    drive(main)


def test_a_prompt_is_made_once_the_request_is_in_and_holds_up_nobody_else() -> None:
    async def main() -> None:
        gate, begun = threading.Event(), threading.Semaphore(0)

        def make() -> tuple[list[int], SamplingParams]:
            begun.release()
            gate.wait()
            return [5, 6], SHORT

        with running(make_engine(4096, context_length=8192, max_num_seqs=2), max_queue=3) as engine:
            tasks = [asyncio.create_task(collect(engine.generate_from(f"m{i}", make, 1))) for i in range(4)]
            try:
                for _ in range(2):
                    await asyncio.to_thread(begun.acquire)
                await is_served(engine, "plain")
                assert engine.num_waiting == 4
                with pytest.raises(QueueFullError):
                    await collect(engine.generate_from("late", make, 2))
                work = asyncio.create_task(engine.work(lambda: 7))
                await until(lambda: engine.num_waiting == 5)
                with pytest.raises(QueueFullError):
                    await engine.work(lambda: 7)
            finally:
                gate.set()
            assert await work == 7
            for task in tasks:
                assert (await task).outputs[0].token_ids == tokens_alone([5, 6], 8)

    drive(main)


def test_what_making_a_prompt_raises_is_raised_and_leaves_nothing() -> None:
    def make() -> tuple[list[int], SamplingParams]:
        raise LookupError("no such template")

    async def main() -> None:
        with running() as engine:
            with pytest.raises(LookupError, match="no such template"):
                await collect(engine.generate_from("a", make, 1))
            with pytest.raises(LookupError, match="no such template"):
                await engine.work(make)
            assert engine.num_waiting == 0
            await is_served(engine, "b")

    drive(main)


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_a_prompt_that_nobody_waits_for_is_told_so(how: str) -> None:
    async def main() -> None:
        begun, ended = threading.Event(), threading.Event()

        def make() -> tuple[list[int], SamplingParams]:
            begun.set()
            while not is_abandoned.get()():
                pass
            ended.set()
            return [5], ENDLESS

        with running() as engine:
            timeout = 0.05 if how == "late" else None
            task = asyncio.create_task(collect(engine.generate_from("a", make, 1, timeout=timeout)))
            await asyncio.to_thread(begun.wait)
            if how == "cancelled":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                assert (await task).outputs[0].finish_reason == "timeout"
            await asyncio.to_thread(ended.wait)
            await until(lambda: engine.num_waiting == 0)

    drive(main)


def test_a_template_that_nobody_waits_for_ends() -> None:
    turns = iter(range(5))
    token = is_abandoned.set(lambda: next(turns) == 4)
    try:
        with pytest.raises(ChatTemplateError, match="nobody waits"):
            ChatTemplate("{% for i in range(100) %}{% endfor %}").render([])
    finally:
        is_abandoned.reset(token)
    assert next(turns, None) is None
