"""AsyncEngine with a fake runner: exact answers to any number of coroutines, and no request that hangs or leaks."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest
from async_engines import ENDLESS, SHORT, Gate, Observer, collect, drive, running, until
from fake_engine import make_engine
from fake_runner import tokens_alone
from hypothesis import given, settings
from hypothesis import strategies as st

from rvllm.engine_errors import QueueFullError
from rvllm.finishing_rate import FinishingRate
from rvllm.sampling_params import SamplingParams


def test_many_coroutines_get_what_each_would_get_alone() -> None:
    observer = Observer()

    async def main() -> None:
        with running(max_queue=100, observer=observer) as engine:
            streams = [engine.generate(f"r{i}", [5 + i, 6], SHORT) for i in range(40)]
            outputs = await asyncio.gather(*map(collect, streams))
            for i, output in enumerate(outputs):
                assert output.request_id == f"r{i}"
                assert output.outputs[0].token_ids == tokens_alone([5 + i, 6], 8)
                assert output.outputs[0].finish_reason == "length"
            await until(lambda: engine.num_waiting == 0)
            stats = engine.stats()
            assert (stats.num_running, stats.free_blocks, stats.generation_tokens) == (0, 4096, 320)

    drive(main)
    assert observer.finished == [("length", 2, 8)] * 40
    assert (len(observer.first_tokens), observer.num_gaps) == (40, 280)


def test_text_and_choices() -> None:
    async def main() -> None:
        with running() as engine:
            params = SamplingParams(n=3, seed=9, max_tokens=20, ignore_eos=True)
            output = await collect(engine.generate("a", "the cab", params))
            assert output.prompt == "the cab"
            expected = [tokens_alone(output.prompt_token_ids, 20, params, seed=9, index=k) for k in range(3)]
            by_index = sorted(output.outputs, key=lambda completion: completion.index)
            assert [completion.token_ids for completion in by_index] == expected

    drive(main)


def test_what_a_slow_reader_has_not_taken_is_one_output() -> None:
    async def main() -> None:
        with running() as engine:
            slow = engine.generate(
                "slow", [5], SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
            )
            first = await anext(slow)
            await until(lambda: engine.stats().generation_tokens >= 500)
            rest = [output async for output in slow]
            assert len(rest) <= 2  # the loop may have been woken for one of them before
            tokens = [t for output in [first, *rest] for t in output.outputs[0].token_ids]
            assert tokens == tokens_alone([5], 500)

    drive(main)


# Refusals


def test_bad_requests_are_refused_and_leave_nothing() -> None:
    async def main() -> None:
        with running() as engine:
            for arguments, message in (
                (([], SHORT), "the prompt is empty"),
                (([5] * 9000, SHORT), "max_model_len is 8192"),
                (([5, 64], SHORT), "64 is no token id"),
            ):
                with pytest.raises(ValueError, match=message):
                    await collect(engine.generate("bad", *arguments))
            for settings, message in (
                ({"priority": 1.5}, "priority must be an integer"),
                ({"priority": True}, "priority must be an integer"),
                ({"timeout": 0}, "timeout must be a positive number"),
                ({"timeout": float("nan")}, "timeout must be a positive number"),
            ):
                with pytest.raises(ValueError, match=message):
                    await collect(engine.generate("bad", [5], SHORT, **settings))
            stream = engine.generate("twice", [5], ENDLESS)
            await anext(stream)
            with pytest.raises(ValueError, match="'twice' is in use"):
                await collect(engine.generate("twice", [5], SHORT))
            await stream.aclose()
            await until(lambda: engine.num_waiting + engine.num_running == 0)

    drive(main)


def test_full_queue_says_when_to_come_again() -> None:
    async def main() -> None:
        llm_engine = make_engine(4096, context_length=8192, max_num_seqs=2)
        with running(llm_engine, max_queue=3) as engine:
            streams = [engine.generate(f"r{i}", [5 + i], ENDLESS) for i in range(5)]
            tasks = [asyncio.create_task(collect(stream)) for stream in streams]
            await until(lambda: engine.num_running == 2 and engine.num_waiting == 3)
            with pytest.raises(QueueFullError, match="5 requests are in flight, at most 5") as error:
                await collect(engine.generate("late", [5], SHORT))
            assert isinstance(error.value.retry_after, int) and 1 <= error.value.retry_after <= 60
            with pytest.raises(QueueFullError):
                await collect(engine.generate("late", [5], SamplingParams(n=2)))
            engine.abort("r0")
            assert (await tasks[0]).outputs[0].finish_reason == "abort"
            late = asyncio.create_task(collect(engine.generate("late", [5], SHORT, priority=-100)))
            for i in range(1, 5):
                engine.abort(f"r{i}")
            await asyncio.gather(*tasks, late)

    drive(main)


def test_retry_after_follows_the_rate_of_finishing() -> None:
    rate = FinishingRate()
    assert rate.retry_after(1) == 1
    rate.add_busy(30)
    assert rate.seconds_each == 30  # none has finished yet
    for _ in range(200):
        rate.add_busy(2)
        rate.add_finished(1)
    assert rate.seconds_each == pytest.approx(2)
    slow = FinishingRate()
    for _ in range(10):
        slow.add_busy(5)
        slow.add_finished(1)
    assert [slow.retry_after(1) for _ in range(3)] == [5, 10, 15]  # each gets a place of its own
    assert slow.retry_after(2) == 25
    assert slow.retry_after(1000) == 60


# Ends before the end


def test_closing_frees_the_blocks_before_the_next_step() -> None:
    async def main() -> None:
        llm_engine = make_engine(64, context_length=200, max_num_seqs=4)
        gate = Gate(llm_engine)
        with running(llm_engine) as engine:
            kept, closed = (engine.generate(name, [5] * 40, ENDLESS) for name in ("kept", "closed"))
            tokens = asyncio.gather(anext(kept), anext(closed))
            await gate.wait()
            while not tokens.done():
                await gate.step()
            assert engine.num_running == 2
            await closed.aclose()
            await gate.step()
            assert llm_engine.scheduler.num_running == 1
            assert [request.request_id for request in llm_engine.scheduler._running] == ["kept"]
            await kept.aclose()
            gate.open()
            await until(lambda: engine.num_running == 0)
            assert engine.stats().free_blocks == 64

    drive(main)


def test_closing_gives_places_back_at_once_and_blocks_after_the_step() -> None:
    async def main() -> None:
        llm_engine = make_engine(64, context_length=200, max_num_seqs=2)
        gate = Gate(llm_engine)
        with running(llm_engine, max_queue=3) as engine:
            streams = [engine.generate(f"r{i}", [5] * 40, ENDLESS) for i in range(5)]
            tokens = [asyncio.ensure_future(anext(stream)) for stream in streams]
            await gate.wait()
            while engine.num_running < 2:
                await gate.step()
            steps = len(llm_engine.runner.steps)  # type: ignore[attr-defined]
            for task in tokens:
                task.cancel()
            await asyncio.gather(*tokens, return_exceptions=True)
            for stream in streams:
                await stream.aclose()
            assert engine.num_waiting == 0  # though the step goes on
            late = [asyncio.ensure_future(collect(engine.generate(f"s{i}", [6], SHORT))) for i in range(5)]
            gate.open()
            for output in await asyncio.gather(*late):
                assert output.outputs[0].token_ids == tokens_alone([6], 8)
            later = {name for step in llm_engine.runner.steps[steps + 1 :] for name, _, _ in step}  # type: ignore[attr-defined]
            assert later == {f"s{i}" for i in range(5)}

    drive(main)


@pytest.mark.parametrize("when", ["before it runs", "while it runs"])
def test_cancelled_task_and_forgotten_generator_leave_nothing(when: str) -> None:
    async def main() -> None:
        with running(make_engine(4096, context_length=8192, max_num_seqs=1)) as engine:
            first = engine.generate("first", [5], ENDLESS)
            if when == "before it runs":
                await anext(first)
            task = asyncio.create_task(collect(engine.generate("a", [6], ENDLESS)))
            await until(lambda: engine.num_waiting + engine.num_running == 1 + (when == "before it runs"))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            forgotten = engine.generate("b", [7], ENDLESS)
            pending = asyncio.ensure_future(anext(forgotten))
            if when == "while it runs":
                await pending
            else:
                await asyncio.sleep(0)
                pending.cancel()
            del forgotten, pending
            gc.collect()
            await first.aclose()
            await until(lambda: engine.num_waiting + engine.num_running == 0)
            assert engine.stats().free_blocks == 4096

    drive(main)


def test_time_limit_keeps_what_there_is() -> None:
    async def main() -> None:
        with running(make_engine(4096, context_length=8192, max_num_seqs=1)) as engine:
            tokens: list[int] = []
            seconds = 0.1
            while not tokens:  # on a busy machine it may not have run by then
                output = await collect(engine.generate("a", [5], ENDLESS, timeout=seconds))
                assert output.outputs[0].finish_reason == "timeout"
                tokens, seconds = output.outputs[0].token_ids, 2 * seconds
            assert tokens == tokens_alone([5], len(tokens))
            blocker = engine.generate("blocker", [6], ENDLESS)
            await anext(blocker)
            waiting = await collect(engine.generate("b", [6], ENDLESS, timeout=0.01))
            assert (waiting.outputs[0].finish_reason, waiting.outputs[0].token_ids) == ("timeout", [])
            await blocker.aclose()
            in_time = await collect(engine.generate("c", [6], SHORT, timeout=1e6))
            assert in_time.outputs[0].token_ids == tokens_alone([6], 8)

    drive(main)


def test_abort_while_the_prompt_is_being_encoded() -> None:
    async def main() -> None:
        llm_engine = make_engine()
        prepare, may_go, has_begun = llm_engine.prepare, threading.Event(), threading.Event()

        def slow(*arguments: Any) -> Any:
            has_begun.set()
            may_go.wait()
            return prepare(*arguments)

        llm_engine.prepare = slow  # type: ignore[method-assign]
        with running(llm_engine) as engine:
            task = asyncio.create_task(collect(engine.generate("a", [5], ENDLESS)))
            await asyncio.to_thread(has_begun.wait)
            engine.abort("a")
            engine.abort("never there")
            assert (await task).outputs[0].finish_reason == "abort"  # at once, not when the prompt is there
            assert (await asyncio.wait_for(engine.drain(0.01), 10)) is None
            may_go.set()

    drive(main)


# Priority


def test_priority_and_age() -> None:
    async def order(aging_seconds: float) -> list[str]:
        llm_engine = make_engine(4096, context_length=8192, max_num_seqs=1)
        finished: list[str] = []
        with running(llm_engine, aging_seconds=aging_seconds) as engine:
            blocker = engine.generate("blocker", [5], ENDLESS)
            await anext(blocker)

            async def ask(name: str, priority: int) -> None:
                await collect(engine.generate(name, [6], SHORT, priority=priority))
                finished.append(name)

            tasks = []
            for i, priority in enumerate((5, 0, 5, -1)):
                tasks.append(asyncio.create_task(ask(f"r{i}", priority)))
                await until(lambda: llm_engine.scheduler.num_waiting == len(tasks))
            await blocker.aclose()
            await asyncio.gather(*tasks)
        return finished

    async def main() -> None:
        assert await order(1e9) == ["r3", "r1", "r0", "r2"]
        assert await order(1e-9) == ["r0", "r1", "r2", "r3"]  # any wait outweighs any priority

    drive(main)


# Anything at once

ACT = st.tuples(
    st.sampled_from(["read", "close", "abort", "timeout", "cancel"]),
    st.lists(st.integers(4, 6), min_size=1, max_size=30),
    st.integers(1, 2),  # choices
    st.integers(1, 60),  # tokens
    st.integers(-1, 1),  # priority
    st.integers(0, 5),  # outputs read before
)


@settings(max_examples=40, deadline=None)
@given(acts=st.lists(ACT, min_size=1, max_size=12), num_blocks=st.integers(24, 60), seqs=st.integers(1, 4))
def test_whatever_is_done_each_gets_its_own_tokens(acts: list[Any], num_blocks: int, seqs: int) -> None:
    async def main() -> None:
        with running(make_engine(num_blocks, max_num_seqs=seqs, max_num_batched_tokens=16)) as engine:

            async def act(i: int, act: Any) -> None:
                kind, prompt, n, max_tokens, priority, num_read = act
                params = SamplingParams(n=n, seed=i, max_tokens=max_tokens, ignore_eos=True)
                timeout = 0.005 if kind == "timeout" else None
                stream = engine.generate(str(i), prompt, params, priority=priority, timeout=timeout)
                tokens: dict[int, list[int]] = {k: [] for k in range(n)}
                reasons: set[str | None] = set()
                count = 0
                async for output in stream:
                    for completion in output.outputs:
                        tokens[completion.index] += completion.token_ids
                        reasons.add(completion.finish_reason)
                    count += 1
                    if count > num_read and kind == "close":
                        await stream.aclose()
                        break
                    if count > num_read and kind == "cancel":
                        raise asyncio.CancelledError
                    if count > num_read and kind == "abort":
                        engine.abort(str(i))
                for k in range(n):
                    alone = tokens_alone(prompt, max_tokens, params, seed=i, index=k)
                    assert tokens[k] == alone[: len(tokens[k])]
                    if kind == "read":
                        assert tokens[k] == alone and reasons <= {None, "length"}

            results = await asyncio.gather(*(act(*a) for a in enumerate(acts)), return_exceptions=True)
            for result in results:
                assert result is None or isinstance(result, asyncio.CancelledError), result
            await until(lambda: engine.num_running + engine.num_waiting == 0)
            assert engine.stats().free_blocks == num_blocks

    drive(main)
