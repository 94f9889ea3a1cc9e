"""The end of an AsyncEngine: drained, shut down, or dead."""

from __future__ import annotations

import asyncio
import atexit
import threading
from typing import Any

import pytest
from async_engines import ENDLESS, SHORT, Observer, collect, drive, running, until
from fake_engine import make_engine
from fake_runner import FakeRunner, tokens_alone

from rvllm.async_engine import AsyncEngine
from rvllm.engine_errors import EngineDeadError, EngineStoppedError
from rvllm.request import RequestOutput
from rvllm.sampling_params import SamplingParams


def test_drain_refuses_new_requests_and_finishes_old_ones() -> None:
    async def main() -> None:
        with running() as engine:
            params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
            tasks = [
                asyncio.create_task(collect(engine.generate(f"r{i}", [5 + i], params))) for i in range(6)
            ]
            await until(lambda: engine.num_running > 0)
            assert engine.is_ready
            drained = asyncio.create_task(engine.drain(None))
            await asyncio.sleep(0)
            assert engine.is_draining and not engine.is_ready
            with pytest.raises(EngineStoppedError, match="draining"):
                await collect(engine.generate("late", [5], SHORT))
            await drained
            for i, task in enumerate(tasks):
                assert (await task).outputs[0].token_ids == tokens_alone([5 + i], 300)

    drive(main)


def test_drain_aborts_what_takes_too_long() -> None:
    async def main() -> None:
        with running() as engine:
            tasks = [asyncio.create_task(collect(engine.generate(f"r{i}", [5], ENDLESS))) for i in range(6)]
            await until(lambda: engine.num_running == 4)
            await engine.drain(0.01)
            assert [(await task).outputs[0].finish_reason for task in tasks] == ["abort"] * 6
            await engine.drain(None)

    drive(main)


def test_death_of_the_thread_reaches_everybody() -> None:
    async def main() -> None:
        llm_engine = make_engine(4096, context_length=8192, max_num_seqs=2)
        with running(llm_engine) as engine:
            read = engine.generate("read", [5], ENDLESS)
            await anext(read)
            tasks = [asyncio.create_task(collect(engine.generate(f"r{i}", [5], ENDLESS))) for i in range(5)]
            await until(lambda: engine.num_waiting == 4)

            def fail(scheduled: object) -> None:
                raise RuntimeError("the device is gone")

            llm_engine.runner.run = fail  # type: ignore[assignment, method-assign]
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(error, EngineDeadError)
                assert str(error) == "the engine has failed: RuntimeError: the device is gone"
            with pytest.raises(EngineDeadError):
                await collect(read)
            assert engine.is_dead and not engine.is_ready
            assert isinstance(engine.error, RuntimeError)
            with pytest.raises(EngineDeadError, match="the device is gone"):
                await collect(engine.generate("late", [5], SHORT))
            await engine.drain(None)  # nothing is left to wait for

    drive(main)


def test_drain_does_not_wait_for_a_prompt_that_is_being_made() -> None:
    async def main() -> None:
        may_go, has_begun = threading.Event(), threading.Event()

        def slow() -> tuple[list[int], SamplingParams]:
            has_begun.set()
            may_go.wait()
            return [5], SHORT

        with running() as engine:
            task = asyncio.create_task(collect(engine.generate_from("slow", slow, 2)))
            await asyncio.to_thread(has_begun.wait)
            await asyncio.wait_for(engine.drain(0.01), 20)
            may_go.set()
            assert [choice.finish_reason for choice in (await task).outputs] == ["abort", "abort"]

    drive(main)


def test_death_of_the_thread_while_a_consumer_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the list of those who are to be told and its use."""

    async def main() -> None:
        may_go, has_failed, has_left = threading.Event(), threading.Event(), threading.Event()
        fail = AsyncEngine._fail

        def slow() -> tuple[list[int], SamplingParams]:
            may_go.wait()
            return [5], SHORT

        def late(self: AsyncEngine, streams: Any, make_error: Any) -> None:
            has_failed.set()
            has_left.wait()
            fail(self, streams, make_error)

        def die(scheduled: Any) -> None:
            raise KeyboardInterrupt("the device is gone")

        monkeypatch.setattr(AsyncEngine, "_fail", late)
        llm_engine = make_engine(4096, context_length=8192)
        with running(llm_engine) as engine:
            leaver = asyncio.create_task(collect(engine.generate_from("leaver", slow, 1)))
            stays = asyncio.create_task(collect(engine.generate("stays", [5], ENDLESS)))
            await until(lambda: engine.num_running == 1)
            llm_engine.runner.run = die  # type: ignore[method-assign, assignment]
            await asyncio.to_thread(has_failed.wait)
            leaver.cancel()
            await asyncio.wait([leaver])
            has_left.set()
            with pytest.raises(EngineDeadError, match="the device is gone"):
                await asyncio.wait_for(stays, 20)
            may_go.set()

    drive(main)


def test_the_time_runs_while_a_prompt_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    observer, gate = Observer(), threading.Event()

    async def main() -> None:
        with running(observer=observer) as engine:
            prepare = engine.engine.prepare

            def slow(*arguments: Any) -> Any:
                gate.wait()
                return prepare(*arguments)

            monkeypatch.setattr(engine.engine, "prepare", slow)
            params = SamplingParams(n=2, max_tokens=8)
            try:
                output = await collect(engine.generate("a", [5], params, timeout=0.01))
            finally:
                gate.set()
            assert [choice.finish_reason for choice in output.outputs] == ["timeout"] * 2
            assert observer.finished == [("timeout", 0, 0)]
            assert (await collect(engine.generate("a", [5], SHORT, timeout=1e6))).finished
            assert engine.num_waiting == 0

    drive(main)


def test_a_step_that_fails_ends_its_own_requests_alone() -> None:
    async def main() -> None:
        llm_engine = make_engine(4096, context_length=8192, max_num_seqs=2)
        with running(llm_engine) as engine:
            tasks = [asyncio.create_task(collect(engine.generate(f"r{i}", [5 + i], SHORT))) for i in range(6)]
            assert isinstance(llm_engine.runner, FakeRunner)
            llm_engine.runner.fail_at = 1
            results = await asyncio.gather(*tasks, return_exceptions=True)
            ran = {int(request_id[1:]) for request_id, _, _ in llm_engine.runner.steps[1]}
            for i, result in enumerate(results):
                if i in ran:
                    assert isinstance(result, EngineDeadError)
                else:
                    assert isinstance(result, RequestOutput)
                    assert result.outputs[0].token_ids == tokens_alone([5 + i], 8)
            assert engine.is_ready

    drive(main)


def test_the_end_of_the_program_stops_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that comes back into Python after its end would abort the process."""
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda end, pid: at_exit.append(end))
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    with running() as engine:
        assert at_exit == [engine._end]
    assert at_exit == []


def test_shutdown_in_the_middle_and_before_the_start() -> None:
    async def main() -> None:
        engine = AsyncEngine(make_engine(4096, context_length=8192))
        with pytest.raises(EngineStoppedError, match="not been started"):
            await collect(engine.generate("a", [5], SHORT))
        engine.start()
        engine.start()
        task = asyncio.create_task(collect(engine.generate("a", [5], ENDLESS)))
        await until(lambda: engine.num_running == 1)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineStoppedError, match="shut down"):
            await task
        with pytest.raises(EngineStoppedError, match="shut down"):
            await collect(engine.generate("b", [5], SHORT))
        engine.shutdown()

    drive(main)


def test_two_loops_and_one_that_is_closed() -> None:
    with running() as engine:

        def ask(name: str) -> None:
            async def main() -> None:
                output = await collect(engine.generate(name, [5, 6], SHORT))
                assert output.outputs[0].token_ids == tokens_alone([5, 6], 8)

            drive(main)

        threads = [threading.Thread(target=ask, args=(f"r{i}",)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        loop = asyncio.new_event_loop()
        stream = engine.generate("left behind", [5], ENDLESS)
        loop.run_until_complete(anext(stream))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()  # without closing its generators
        assert engine.stats().num_running in (0, 1)
        engine.abort("left behind")
        drive(lambda: until(lambda: engine.num_running == 0))


def test_broken_books_of_an_idle_engine_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rvllm.async_engine._IDLE_SECONDS", 0.01)

    async def main() -> None:
        llm_engine = make_engine()
        with running(llm_engine) as engine:
            await collect(engine.generate("a", [5], SHORT))
            llm_engine.block_manager.pools[0].ref_counts[3] += 1
            await until(lambda: engine.is_dead)
            assert "block 3: reference count 1" in str(engine.error)

    drive(main)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"max_queue": -1}, "max_queue"), ({"max_queue": True}, "max_queue"), ({"aging_seconds": 0}, "aging")],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AsyncEngine(make_engine(), **settings)
