"""Scheduler: decides which tokens of which requests the next step computes.

Plain ints; the only resource it knows is the BlockManager's blocks.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter

from rvllm.block_manager import BlockManager, BlockTables, Prefix
from rvllm.request import Request, RequestStatus

_key = attrgetter("key")

_MAX_PASSED = 8  # prompts too long for a step that shorter ones behind them are let past


@dataclass(slots=True)
class SchedulerOutput:
    """One step. scheduled: the requests that take part, each with its number of tokens.

    A request samples in this step if these are its last known tokens. num_decode_tokens counts the tokens that
    were sampled in the step before, num_prefill_tokens all others.
    """

    scheduled: list[tuple[Request, int]]
    num_prefill_tokens: int
    num_decode_tokens: int


class Scheduler:
    """Runs at most max_num_seqs requests, at most max_num_batched_tokens tokens a step.

    Requests are served in the order of (priority, arrival). A step gives every running request its one token,
    then spends the rest of the budget on prompts. A prompt too long for that is computed in chunks, one such
    prompt at a time; half of the rest is offered to the prompts behind it that it suffices for, so that short ones
    pass. When blocks run out, the last running request in the order is preempted: it gives up its blocks, waits at
    its place in the order, and computes all its tokens anew later. The first one always goes on, so nobody
    starves, as long as not every new request has a better priority.

    The caller alternates schedule() and update(); add() and finish() may be called between the two pairs.
    """

    def __init__(self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        # A request joins with a token in the same step, so all that run find one in the budget of every step.
        self._num_seats = min(max_num_seqs, max_num_batched_tokens)
        self.step = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of the requests that have run; once for all choices of a prompt
        self.prefix_queries = 0  # prompt tokens looked up in the prefix cache
        self.prefix_hits = 0  # of those, tokens found
        self._num_added = 0
        self._num_arrived = 0
        self._num_unfinished = 0
        self._future: list[tuple[int, int, Request]] = []  # heap of (arrival_step, order of add, request)
        self._waiting: list[Request] = []  # in order, as are those that run
        self._running: list[Request] = []

    @property
    def has_unfinished(self) -> bool:
        return self._num_unfinished > 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that do not run, whether they have arrived or not."""
        return self._num_unfinished - len(self._running)

    def add(self, request: Request) -> None:
        """Queues request from step request.arrival_step on. It must fit the pool when it is alone."""
        self._num_unfinished += 1
        if request.arrival_step <= self.step:
            self._enqueue(request)
        else:
            self._num_added += 1
            heapq.heappush(self._future, (request.arrival_step, self._num_added, request))

    def finish(self, request: Request) -> None:
        """Takes request out, whatever its state, and frees its blocks at once."""
        if request.is_finished:
            return
        queue = self._running if request.status is RequestStatus.RUNNING else self._waiting
        i = bisect_left(queue, request.key, key=_key)
        if i < len(queue) and queue[i] is request:
            del queue[i]
        # else it has not arrived, and is dropped from the heap later
        self.block_manager.free(request.block_tables)
        request.status = RequestStatus.FINISHED
        self._num_unfinished -= 1

    def reset(self) -> None:
        """Forgets every request and the prefix cache, whatever state an interrupted call has left."""
        self._future.clear()
        self._waiting.clear()
        self._running.clear()
        self._num_unfinished = 0
        self.block_manager.reset()

    def make_room(self, block_tables: BlockTables, start: int, num_tokens: int) -> None:
        """Appends to tables that are no request's; preempts the last running ones until there are enough blocks."""
        while not self.block_manager.append(block_tables, start, num_tokens):
            if not self._running:
                raise RuntimeError(f"too few blocks for {num_tokens} tokens, and nothing runs")
            self._preempt(self._running.pop())

    def schedule(self) -> SchedulerOutput:
        """Chooses the tokens of the next step and gives them their blocks.

        Steps in which nothing would run are skipped: the clock jumps to the next arrival.
        """
        self._admit_arrivals()
        scheduled: list[tuple[Request, int]] = []
        prompts: list[Request] = []  # partly computed
        num_decode_tokens = 0
        for request in self._running:  # loses only those at its end
            if not self._append_blocks(request):
                continue
            if len(request.token_ids) - request.num_computed_tokens > 1:
                prompts.append(request)
            else:
                self._schedule(request, 1, scheduled)
                num_decode_tokens += request.num_output_tokens > 0
        num_prefill_tokens = len(scheduled) - num_decode_tokens
        num_prefill_tokens += self._schedule_prompts(prompts, scheduled)
        if not scheduled and (self._running or self._waiting):
            raise RuntimeError(f"nothing can run: {self.num_running} running, {self.num_waiting} waiting")
        self.step += 1
        return SchedulerOutput(scheduled, num_prefill_tokens, num_decode_tokens)

    def update(self, output: SchedulerOutput) -> list[Request]:
        """Records that the step has been computed; returns the requests that have sampled, in order."""
        sampling = []
        for request, num_tokens in output.scheduled:
            request.num_computed_tokens += num_tokens
            if request.num_computed_tokens == len(request.token_ids):
                sampling.append(request)
        return sampling

    def check_integrity(self) -> None:
        """Raises RuntimeError naming the first invariant that does not hold."""
        for request in self._running:
            if request.status is not RequestStatus.RUNNING or not request.block_tables:
                raise RuntimeError(
                    f"running request with {len(request.block_tables)} block tables is {request!r}"
                )
        for request in self._waiting:
            if request.status is not RequestStatus.WAITING or request.block_tables:
                raise RuntimeError(
                    f"waiting request with {len(request.block_tables)} block tables is {request!r}"
                )
            if request.num_computed_tokens:
                raise RuntimeError(f"waiting request has computed tokens: {request!r}")
        for queue in (self._running, self._waiting):
            if any(queue[i].key >= queue[i + 1].key for i in range(len(queue) - 1)):
                raise RuntimeError(f"requests are out of order: {queue!r}")
        if len(self._running) > self._num_seats:
            raise RuntimeError(f"{len(self._running)} requests run, at most {self._num_seats} may")
        num_future = sum(not entry[2].is_finished for entry in self._future)
        if len(self._running) + len(self._waiting) + num_future != self._num_unfinished:
            raise RuntimeError(f"{self._num_unfinished} unfinished requests are not all queued or running")
        self.block_manager.check_integrity(
            (request.block_tables, request.num_computed_tokens) for request in self._running
        )

    def _admit_arrivals(self) -> None:
        while self._future and self._future[0][2].is_finished:
            heapq.heappop(self._future)
        if self._future and not self._waiting and not self._running:
            self.step = max(self.step, self._future[0][0])
        while self._future and self._future[0][0] <= self.step:
            request = heapq.heappop(self._future)[2]
            if not request.is_finished:
                self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        self._num_arrived += 1
        request.key = (request.priority, self._num_arrived)
        insort(self._waiting, request, key=_key)

    def _append_blocks(self, request: Request) -> bool:
        """Makes room for what a step computes of request; False if request itself had to be preempted."""
        tables, num_tokens = request.block_tables, len(request.token_ids)
        if num_tokens <= len(tables[-1]) * self.block_manager.block_size:  # no other table is shorter
            return True
        while not self.block_manager.append(tables, request.num_computed_tokens, num_tokens):
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.block_manager.free(request.block_tables)
        request.prefix = Prefix()
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, request, key=_key)

    def _schedule_prompts(self, prompts: list[Request], scheduled: list[tuple[Request, int]]) -> int:
        """Spends the rest of the budget on prompts, in order: partly computed ones, and waiting ones that blocks and
        seats suffice for. Returns the number of tokens spent."""
        seats = self._num_seats - len(self._running)
        waiting = self._waiting[: seats + _MAX_PASSED] if seats > 0 else []
        prompts = [request for request in prompts if request.status is RequestStatus.RUNNING]
        budget = room = rest = self.max_num_batched_tokens - len(scheduled)
        long_prompt: Request | None = None
        num_passed = 0
        for request in heapq.merge(prompts, waiting, key=_key) if prompts else waiting:
            if room == 0:
                break
            is_waiting = request.status is RequestStatus.WAITING
            if is_waiting and num_passed > _MAX_PASSED:
                continue
            num_tokens = self._num_tokens_left(request)
            if long_prompt is not None and num_tokens > room:
                num_passed += is_waiting
                continue
            if is_waiting and not self._admit(request):
                num_passed = _MAX_PASSED + 1  # nobody passes a prompt that waits for a seat or blocks
                continue
            if num_tokens <= room:
                self._schedule(request, num_tokens, scheduled)
                rest -= num_tokens
                room -= num_tokens
            else:
                long_prompt = request
                room //= 2
        if long_prompt is not None:
            self._schedule(long_prompt, rest, scheduled)
            rest = 0
        return budget - rest

    def _num_tokens_left(self, request: Request) -> int:
        """Tokens to compute of a prompt, after what of it is in the prefix cache."""
        if request.status is RequestStatus.RUNNING:
            return len(request.token_ids) - request.num_computed_tokens
        if not request.reads_prefix_cache:
            return len(request.token_ids)
        prefix = self.block_manager.match(request.token_ids, request.prefix)
        return len(request.token_ids) - prefix.num_blocks * self.block_manager.block_size

    def _admit(self, request: Request) -> bool:
        """Lets a waiting request run, whose prefix has just been matched, if there is a seat and blocks suffice."""
        if len(self._running) >= self._num_seats:
            return False
        # Blocks for all known tokens at once, so that no prompt is stuck half-way, and a spare block for each
        # request that runs, so that none is preempted soon after.
        manager, num_tokens = self.block_manager, len(request.token_ids)
        if not manager.can_allocate(request.prefix, num_tokens, len(self._running)):
            return False
        del self._waiting[bisect_left(self._waiting, request.key, key=_key)]
        insort(self._running, request, key=_key)
        request.status = RequestStatus.RUNNING
        request.block_tables = manager.allocate(request.prefix, num_tokens)
        request.num_computed_tokens = request.prefix.num_blocks * manager.block_size
        if request.num_preemptions == 0:
            request.start_time = time.monotonic()
            request.num_cached_tokens = request.num_computed_tokens
            self.num_prompt_tokens += request.num_prompt_tokens if request.index == 0 else 0
            if request.reads_prefix_cache and manager.enable_prefix_caching:
                self.prefix_queries += request.num_prompt_tokens
            self.prefix_hits += request.num_cached_tokens
        return True

    def _schedule(self, request: Request, num_tokens: int, scheduled: list[tuple[Request, int]]) -> None:
        start = request.num_computed_tokens
        stop = start + num_tokens
        self.block_manager.register(request.prefix, request.block_tables, request.token_ids, start, stop)
        scheduled.append((request, num_tokens))
