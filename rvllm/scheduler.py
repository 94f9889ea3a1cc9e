"""Scheduler: decides which tokens of which requests the next step computes.

Plain ints; the only resource it knows is the BlockManager's blocks. Requests are served in order of arrival.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

from rvllm.block_manager import BlockManager
from rvllm.request import Request, RequestStatus


@dataclass(slots=True)
class SchedulerOutput:
    """One step. scheduled: the requests that take part, each with its number of tokens.

    A request samples in this step if these are its last known tokens. num_decode_tokens counts the tokens that
    were sampled in an earlier step and are new to the model, num_prefill_tokens all others.
    """

    scheduled: list[tuple[Request, int]]
    num_prefill_tokens: int
    num_decode_tokens: int


class Scheduler:
    """Runs at most max_num_seqs requests, at most max_num_batched_tokens tokens a step.

    A step gives every running request its one token, oldest first, then spends the rest of the budget on
    prompts in order of arrival. A prompt too long for that is computed in chunks, one such prompt at a time;
    half of the rest is offered to the prompts behind it that it suffices for, so that short ones pass.
    When blocks run out, the latest running request is preempted: it gives up its blocks, goes to the front of
    the queue, and computes all its tokens anew later. The oldest one always goes on, so nobody starves.

    The caller alternates schedule() and update(); add() and finish() may be called between the two pairs.
    """

    def __init__(self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.step = 0
        self.num_preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up in the prefix cache
        self.prefix_hits = 0  # of those, tokens found
        self._num_added = 0
        self._num_unfinished = 0
        self._future: list[tuple[int, int, Request]] = []  # heap of (arrival_step, order of add, request)
        self._waiting: OrderedDict[Request, None] = OrderedDict()
        self._running: OrderedDict[Request, None] = OrderedDict()  # oldest first

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
        heapq.heappush(self._future, (request.arrival_step, self._num_added, request))
        self._num_added += 1
        self._num_unfinished += 1

    def finish(self, request: Request) -> None:
        """Takes request out, whatever its state, and frees its blocks at once."""
        if request.is_finished:
            return
        self._running.pop(request, None)
        self._waiting.pop(request, None)
        self.block_manager.free(request.block_table)
        request.status = RequestStatus.FINISHED  # one that has not arrived is dropped from the heap later
        self._num_unfinished -= 1

    def reset(self) -> None:
        """Drops every request and the prefix cache: after a failed step its blocks may lack their content."""
        for request in [*self._running, *self._waiting, *(entry[2] for entry in self._future)]:
            self.finish(request)
        self._future.clear()
        self.block_manager.forget_prefixes()

    def schedule(self) -> SchedulerOutput:
        """Chooses the tokens of the next step and gives them their blocks.

        Steps in which nothing would run are skipped: the clock jumps to the next arrival.
        """
        self._admit_arrivals()
        scheduled: list[tuple[Request, int]] = []
        partly_computed: Request | None = None
        for request in list(self._running):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an older one
            if request.num_tokens - request.num_computed_tokens > 1:
                partly_computed = request
            elif self._append_block(request):
                self._schedule(request, 1, scheduled)
        self._schedule_prompts(partly_computed, scheduled)
        if not scheduled and (self._running or self._waiting):
            raise RuntimeError(f"nothing can run: {self.num_running} running, {self.num_waiting} waiting")
        self.step += 1
        num_tokens = sum(count for _, count in scheduled)
        num_decode_tokens = sum(
            r.num_output_tokens > 0 and r.num_computed_tokens == r.num_tokens - 1 for r, _ in scheduled
        )
        return SchedulerOutput(scheduled, num_tokens - num_decode_tokens, num_decode_tokens)

    def update(self, output: SchedulerOutput) -> list[Request]:
        """Records that the step has been computed; returns the requests that have sampled, in order."""
        sampling = []
        for request, num_tokens in output.scheduled:
            request.num_computed_tokens += num_tokens
            if request.num_computed_tokens == request.num_tokens:
                sampling.append(request)
        return sampling

    def check_integrity(self) -> None:
        """Raises RuntimeError naming the first invariant that does not hold."""
        for request in self._running:
            num_slots = len(request.block_table) * self.block_manager.block_size
            if request.status is not RequestStatus.RUNNING or request.num_computed_tokens > num_slots:
                raise RuntimeError(f"running request with {num_slots} slots is {request!r}")
        for request in self._waiting:
            if request.status is not RequestStatus.WAITING or request.block_table:
                raise RuntimeError(f"waiting request with {len(request.block_table)} blocks is {request!r}")
            if request.num_computed_tokens:
                raise RuntimeError(f"waiting request has computed tokens: {request!r}")
        # A request joins with a token in the same step, so all that run find one in the budget of every step.
        if len(self._running) > min(self.max_num_seqs, self.max_num_batched_tokens):
            raise RuntimeError(f"{len(self._running)} requests run, more than a step can serve")
        if sum(r.num_tokens - r.num_computed_tokens > 1 for r in self._running) > 1:
            raise RuntimeError("more than one running request is partly computed")
        num_future = sum(not entry[2].is_finished for entry in self._future)
        if len(self._running) + len(self._waiting) + num_future != self._num_unfinished:
            raise RuntimeError(f"{self._num_unfinished} unfinished requests are not all queued or running")
        self.block_manager.check_integrity(request.block_table for request in self._running)

    def _admit_arrivals(self) -> None:
        while self._future and self._future[0][2].is_finished:
            heapq.heappop(self._future)
        if self._future and not self._waiting and not self._running:
            self.step = max(self.step, self._future[0][0])
        while self._future and self._future[0][0] <= self.step:
            request = heapq.heappop(self._future)[2]
            if not request.is_finished:
                self._waiting[request] = None

    def _append_block(self, request: Request) -> bool:
        """Makes room for the last token of request; False if request itself had to be preempted."""
        while not self.block_manager.can_append(request.block_table, request.num_tokens):
            victim = next(reversed(self._running))
            self._preempt(victim)
            if victim is request:
                return False
        self.block_manager.append(request.block_table, request.num_tokens)
        return True

    def _preempt(self, request: Request) -> None:
        self.block_manager.free(request.block_table)
        del self._running[request]
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting[request] = None
        self._waiting.move_to_end(request, last=False)

    def _schedule_prompts(self, request: Request | None, scheduled: list[tuple[Request, int]]) -> None:
        """Spends the rest of the budget on the partly computed request, then on waiting ones."""
        budget = room = self.max_num_batched_tokens - len(scheduled)
        long_prompt: Request | None = None
        while room:
            request = request or self._admit(room if long_prompt else None)
            if request is None:
                break
            num_tokens = request.num_tokens - request.num_computed_tokens
            if num_tokens <= room:
                self._schedule(request, num_tokens, scheduled)
                budget -= num_tokens
                room -= num_tokens
            else:
                long_prompt = request
                room //= 2
            request = None
        if long_prompt:
            self._schedule(long_prompt, budget, scheduled)

    def _admit(self, most_tokens: int | None) -> Request | None:
        """Lets the first waiting request run if blocks suffice and it has at most most_tokens to compute."""
        if not self._waiting or len(self._running) >= self.max_num_seqs:
            return None
        request = next(iter(self._waiting))
        shared = self.block_manager.match(request.token_ids)
        num_cached_tokens = len(shared) * self.block_manager.block_size
        if most_tokens is not None and request.num_tokens - num_cached_tokens > most_tokens:
            return None
        # Blocks for all known tokens at once, so that no prompt is stuck half-way, and a spare block for each
        # request that runs, so that none is preempted soon after.
        needed = self.block_manager.cost(shared, request.num_tokens) + len(self._running)
        if needed > self.block_manager.num_free_blocks:
            return None
        del self._waiting[request]
        self._running[request] = None
        request.status = RequestStatus.RUNNING
        request.block_table = self.block_manager.allocate(shared, request.num_tokens)
        request.num_computed_tokens = num_cached_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached_tokens
            self.prefix_queries += request.num_prompt_tokens
            self.prefix_hits += num_cached_tokens
        return request

    def _schedule(self, request: Request, num_tokens: int, scheduled: list[tuple[Request, int]]) -> None:
        start = request.num_computed_tokens
        self.block_manager.register(request.block_table, request.token_ids, start, start + num_tokens)
        scheduled.append((request, num_tokens))
