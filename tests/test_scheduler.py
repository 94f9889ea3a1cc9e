"""Scheduler: exact tokens whatever runs beside a request, limits kept in every step, nobody starves."""

from __future__ import annotations

from typing import Any

import pytest
from fake_runner import tokens_alone
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_harness import Harness, assert_exact

from rvllm.block_manager import KVGroup
from rvllm.request import Request, RequestStatus


def test_batch_equals_alone() -> None:
    harness = Harness()
    requests = [harness.add([i + 1] * (1 + 7 * i), max_tokens=3 + i) for i in range(6)]
    harness.run()
    for request in requests:
        assert_exact(request)
    assert harness.scheduler.block_manager.num_free_blocks == 64


@pytest.mark.parametrize("budget", [1, 7, 32, 2048])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 96, 97])
def test_prompt_longer_than_a_step_is_computed_in_chunks(length: int, budget: int) -> None:
    harness = Harness(budget=budget, seqs=4)
    prompt = [i % 50 for i in range(length)]
    requests = [harness.add(prompt), harness.add([5] * length), harness.add([9, 9])]
    harness.run(most_steps=3000)
    for request in requests:
        assert_exact(request)


def test_chunks_fill_the_budget() -> None:
    harness = Harness(budget=32)
    harness.add(list(range(50)) * 2, max_tokens=1)
    assert [step["r0"] for step in harness.run()] == [32, 32, 32, 4]


def test_long_prompt_does_not_stop_running_requests() -> None:
    harness = Harness(num_blocks=256, budget=16)
    harness.add([1, 2, 3], max_tokens=30)
    harness.step()
    harness.add(list(range(60)) * 5, max_tokens=1)
    harness.add([4, 4], max_tokens=1)
    steps = harness.run()
    assert all("r0" in step for step in steps[:29])
    assert "r2" in steps[0]  # passes the long prompt
    assert steps[0] == {"r0": 1, "r1": 13, "r2": 2}
    assert steps[1] == {"r0": 1, "r1": 15}


def test_second_long_prompt_waits_for_the_first_and_then_shares_it() -> None:
    harness = Harness(num_blocks=256, budget=16)
    prompt = list(range(60)) * 2
    first, second = harness.add(prompt, max_tokens=2), harness.add([*prompt, 1], max_tokens=2)
    steps = harness.run()
    assert sum(step.get("r1", 0) for step in steps) == 2  # one new prompt token and one decode
    assert second.num_cached_tokens == 120
    assert_exact(first)
    assert_exact(second)


def test_identical_prompts_share_in_the_same_step() -> None:
    harness = Harness(budget=64)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    requests = [harness.add(prompt) for _ in range(4)]
    assert harness.step() == {"r0": 9, "r1": 1, "r2": 1, "r3": 1}
    harness.run()
    for request in requests:
        assert_exact(request)
    assert [r.num_cached_tokens for r in requests] == [0, 8, 8, 8]
    assert (harness.scheduler.prefix_queries, harness.scheduler.prefix_hits) == (36, 24)


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_request_gets_the_same_tokens(caching: bool) -> None:
    harness = Harness(num_blocks=12, budget=16, caching=caching)
    requests = [harness.add([i] * 6, max_tokens=30) for i in range(4)]
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    assert requests[0].num_preemptions == 0  # the oldest always goes on
    for request in requests:
        assert_exact(request)
    assert harness.scheduler.block_manager.num_free_blocks == 12


def test_prompt_is_preempted_in_the_middle() -> None:
    harness = Harness(num_blocks=24, block_size=1, budget=4)
    running, partly = harness.add([1], max_tokens=20), harness.add([2] * 20, max_tokens=3)
    while not partly.num_preemptions:
        harness.step()
    assert harness.runner.steps[-2][-1][2] > 0 and partly.status is RequestStatus.WAITING
    harness.run()
    assert_exact(running)
    assert_exact(partly)


def test_spare_blocks_are_left_for_those_that_run() -> None:
    harness = Harness(num_blocks=10, block_size=4, caching=False)
    for _ in range(2):
        harness.add([1] * 4, max_tokens=16)
        harness.step()
    waiting = harness.add([2] * 20, max_tokens=1)  # 5 of the 6 free blocks, and 2 run
    harness.step()
    assert waiting.status is RequestStatus.WAITING
    harness.run()
    assert harness.scheduler.num_preemptions == 0


def test_latest_is_preempted_first_and_resumes_first() -> None:
    harness = Harness(num_blocks=9, budget=32, caching=False)
    requests = [harness.add([i] * 8, max_tokens=20) for i in range(3)]
    late = harness.add([7] * 4, max_tokens=2)
    harness.run()
    finished = [
        max(i for i, step in enumerate(harness.runner.steps) for r in step if r[0] == f"r{k}")
        for k in range(3)
    ]
    assert finished == sorted(finished)
    assert requests[2].num_preemptions >= requests[1].num_preemptions >= requests[0].num_preemptions == 0
    assert_exact(late)


def test_lowest_priority_is_served_first_and_of_equals_the_earliest() -> None:
    harness = Harness(seqs=1)
    order = [harness.add([i], 2, priority=priority) for i, priority in enumerate((0, 5, -1, 5, -1, 0))]
    steps = harness.run()
    served = list(dict.fromkeys(request_id for step in steps for request_id in step))
    assert served == ["r2", "r4", "r0", "r5", "r1", "r3"]
    for request in order:
        assert_exact(request)


def test_priority_gives_way_to_no_one_and_the_lowest_is_preempted() -> None:
    harness = Harness(num_blocks=9, budget=32, caching=False)
    requests = [harness.add([i] * 8, 20, priority=priority) for i, priority in enumerate((2, 0, 1))]
    harness.run()
    preemptions = [request.num_preemptions for request in requests]
    assert preemptions[0] >= preemptions[2] >= preemptions[1] == 0 < preemptions[0]
    for request in requests:
        assert_exact(request)


def test_urgent_prompt_takes_over_the_chunks_of_a_long_one() -> None:
    harness = Harness(num_blocks=256, budget=16, caching=False)
    slow = harness.add(list(range(60)) * 4, 2, priority=1)
    harness.step()
    urgent = harness.add([7] * 40, 2, priority=0)
    steps = harness.run()
    assert [step.get("r1") for step in steps[:5]] == [16, 16, 8, 1, None]
    assert [step.get("r0") for step in steps[:5]] == [None, None, 8, 15, 16]
    assert_exact(slow)
    assert_exact(urgent)


def test_short_prompts_pass_several_long_ones_while_one_is_computed() -> None:
    harness = Harness(num_blocks=512, budget=16)
    for i in range(4):
        harness.add([i] * 160, 1)
    harness.add([9, 9], 1)
    assert harness.step() == {"r0": 14, "r4": 2}
    assert list(harness.step()) == ["r0"]  # but none of the long ones is begun before its turn
    harness.run()


def test_nobody_passes_a_prompt_that_waits_for_blocks() -> None:
    harness = Harness(num_blocks=8, block_size=4, caching=False)
    harness.add([1] * 20, 4)
    harness.step()
    waiting, small = harness.add([2] * 16, 1), harness.add([3], 1)
    harness.step()
    assert waiting.status is small.status is RequestStatus.WAITING
    harness.run()


class CountingTokens(list[int]):
    """Token ids that count how often a block of them is looked at."""

    num_slices = 0

    def __getitem__(self, index: Any) -> Any:
        CountingTokens.num_slices += isinstance(index, slice)
        return super().__getitem__(index)


@pytest.mark.parametrize("waiting_for", ["blocks", "seat", "turn"])
def test_waiting_prompt_is_not_matched_anew_in_every_step(waiting_for: str) -> None:
    seqs, budget = (1, 64) if waiting_for == "seat" else (8, 16 if waiting_for == "turn" else 400)
    harness = Harness(num_blocks=136, block_size=4, seqs=seqs, budget=budget)
    prompt = [i % 50 for i in range(300)]
    first = harness.add(prompt, 60)
    long = harness.add([i % 47 for i in range(320)], 1) if waiting_for == "turn" else None
    while first.num_output_tokens == 0 and waiting_for != "turn":
        harness.step()
    last = harness.add([*prompt[:40], *([5] * 300)], 1)
    last.token_ids = CountingTokens(last.token_ids)
    CountingTokens.num_slices = 0
    for num_steps in range(1, 16):
        harness.step()
        assert last.status is RequestStatus.WAITING
        assert CountingTokens.num_slices <= 10 + num_steps  # its ten known blocks, and one look for the next
    harness.run()
    assert last.num_cached_tokens == 40
    for request in filter(None, (first, last, long)):
        assert_exact(request)


def test_ten_thousand_waiting_requests_are_not_looked_at() -> None:
    harness = Harness(seqs=4, budget=16)
    requests = [harness.add([i % 60, 1, 2, 3, 4], 6) for i in range(10_000)]
    for request in requests:
        request.token_ids = CountingTokens(request.token_ids)
    harness.step()
    CountingTokens.num_slices = 0
    for _ in range(5):
        harness.step()
    assert CountingTokens.num_slices < 100
    for request in requests[::-1]:
        harness.scheduler.finish(request)
    harness.scheduler.check_integrity()
    assert not harness.scheduler.has_unfinished


def test_request_that_needs_the_whole_pool_waits_and_runs() -> None:
    harness = Harness(num_blocks=8, block_size=4, budget=64)
    small = [harness.add([i] * 4, max_tokens=8) for i in range(3)]
    large = harness.add([9] * 30, max_tokens=3)
    after = harness.add([8] * 4, max_tokens=2)
    harness.run()
    for request in [*small, large, after]:
        assert_exact(request)


def test_arrival_steps() -> None:
    harness = Harness()
    early, late = harness.add([1], max_tokens=10), harness.add([2], max_tokens=2, arrival_step=4)
    steps = harness.run()
    assert [i for i, step in enumerate(steps) if "r1" in step] == [4, 5]
    assert_exact(early)
    assert_exact(late)


def test_idle_steps_are_skipped() -> None:
    harness = Harness()
    harness.add([1], max_tokens=2)
    harness.add([2], max_tokens=2, arrival_step=10**9)
    aborted = harness.add([3], max_tokens=2, arrival_step=10**6)
    harness.scheduler.finish(aborted)
    assert len(harness.run()) == 4
    assert harness.scheduler.step == 10**9 + 2


def test_abort_frees_blocks_at_once_in_every_state() -> None:
    harness = Harness(budget=8)
    running, partly, waiting = harness.add([1, 2], 50), harness.add([3] * 40), harness.add([4] * 40)
    future = harness.add([5], arrival_step=99)
    harness.step()
    assert [r.status.name for r in (running, partly, waiting, future)] == [
        "RUNNING",
        "RUNNING",
        "WAITING",
        "WAITING",
    ]
    for request in (waiting, partly, future, running):
        harness.scheduler.finish(request)
        harness.scheduler.finish(request)  # twice is harmless
        harness.scheduler.check_integrity()
    assert not harness.scheduler.has_unfinished
    assert harness.scheduler.block_manager.num_free_blocks == 64
    assert_exact_after = harness.add([3] * 40)
    harness.run()
    assert_exact(assert_exact_after)


def test_reset_drops_everything_and_what_was_never_filled() -> None:
    harness = Harness()
    harness.add([1] * 9)
    harness.add([2], arrival_step=50)
    harness.scheduler.schedule()  # the step fails: its blocks are registered and not filled
    harness.scheduler.reset()
    harness.scheduler.check_integrity()
    assert not harness.scheduler.has_unfinished
    again = harness.add([1] * 9)
    harness.run()
    assert again.num_cached_tokens == 0
    assert_exact(again)


def test_pool_too_small_is_an_error_not_a_hang() -> None:
    harness = Harness(num_blocks=2, block_size=4)
    harness.add([1] * 9)
    with pytest.raises(RuntimeError, match="nothing can run"):
        harness.step()


class Scheduling(RuleBasedStateMachine):
    """Random arrivals, aborts and steps on small pools; prompts of three tokens, so that prefixes meet."""

    @initialize(
        num_blocks=st.integers(6, 24),
        windows=st.lists(st.tuples(st.integers(6, 24), st.integers(1, 16)), max_size=2),
        block_size=st.sampled_from([1, 2, 3, 4]),
        seqs=st.integers(1, 6),
        budget=st.sampled_from([1, 2, 3, 5, 8, 16, 64]),
        caching=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        windows: list[tuple[int, int]],
        block_size: int,
        seqs: int,
        budget: int,
        caching: bool,
    ) -> None:
        groups = [KVGroup(*window) for window in sorted(windows, key=lambda group: -group[1])]
        self.harness = Harness([KVGroup(num_blocks), *groups], block_size, seqs, budget, caching)
        self.requests: list[Request] = []
        self.aborted: set[Request] = set()

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        max_tokens=st.integers(1, 12),
        wait=st.integers(0, 6),
        priority=st.integers(-1, 1),
    )
    def add(self, prompt: list[int], max_tokens: int, wait: int, priority: int) -> None:
        manager = self.harness.scheduler.block_manager
        slots = manager.max_num_tokens
        prompt = prompt[:slots]
        max_tokens = min(max_tokens, slots + 1 - len(prompt))
        step = self.harness.scheduler.step + wait
        self.requests.append(self.harness.add(prompt, max_tokens, step, priority))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 3), priority=st.integers(-1, 1))
    def fork(self, data: st.DataObject, count: int, priority: int) -> None:
        """Requests that go on from all that another one has so far."""
        tokens = data.draw(st.sampled_from(self.requests)).token_ids
        for _ in range(count):
            self.add(list(tokens), 4, 0, priority)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if not request.is_finished:
            self.aborted.add(request)
            self.harness.scheduler.finish(request)
            assert request.block_tables == []

    @precondition(lambda self: self.harness.scheduler.has_unfinished)
    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.harness.scheduler.has_unfinished:
                counts = self.harness.step()
                first = min(self.served(counts), key=lambda request: request.key)
                running = self.harness.scheduler._running
                assert all(first.key <= request.key for request in running), "the first must go on"

    def served(self, counts: dict[str, int]) -> list[Request]:
        return [request for request in self.requests if request.request_id in counts]

    @invariant()
    def integrity(self) -> None:
        self.harness.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.run()
            for request in self.requests:
                expected = tokens_alone(
                    request.prompt_token_ids, request.max_num_tokens - request.num_prompt_tokens
                )
                if request in self.aborted:
                    expected = expected[: request.num_output_tokens]
                assert request.output_token_ids == expected
            manager = self.harness.scheduler.block_manager
            assert all(len(pool.free) == pool.num_blocks for pool in manager.pools)


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
