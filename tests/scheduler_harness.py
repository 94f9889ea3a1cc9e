"""A scheduler with a fake runner: the engine's loop without text, and what its tests share."""

from __future__ import annotations

from fake_runner import FakeRunner, tokens_alone

from rvllm.block_manager import BlockManager, KVGroup
from rvllm.request import Request, RequestStatus
from rvllm.sampling_params import SamplingParams
from rvllm.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0)


class Harness:
    def __init__(
        self,
        num_blocks: int | list[KVGroup] = 64,
        block_size: int = 4,
        seqs: int = 8,
        budget: int = 32,
        caching: bool = True,
    ) -> None:
        self.runner = FakeRunner(num_blocks, block_size)
        self.scheduler = Scheduler(
            BlockManager(self.runner.kv_groups, block_size, budget, caching), seqs, budget
        )
        self.num_added = 0

    def add(
        self, prompt: list[int], max_tokens: int = 8, arrival_step: int = 0, priority: float = 0
    ) -> Request:
        sampler = self.runner.make_sampler(GREEDY, prompt, (), 0, 0)
        length = len(prompt) + max_tokens
        request = Request(f"r{self.num_added}", prompt, GREEDY, length, arrival_step, 0, sampler, priority)
        self.num_added += 1
        self.scheduler.add(request)
        return request

    def step(self) -> dict[str, int]:
        """Runs one step, checks its limits, and returns the number of tokens of each request in it."""
        output = self.scheduler.schedule()
        requests = [request for request, _ in output.scheduled]
        counts = {request.request_id: count for request, count in output.scheduled}
        assert len(counts) == len(requests) <= self.scheduler.max_num_seqs
        assert sum(counts.values()) <= self.scheduler.max_num_batched_tokens
        assert all(request.status is RequestStatus.RUNNING for request in requests)
        tokens = self.runner.run(output.scheduled)
        for request, token in zip(self.scheduler.update(output), tokens, strict=True):
            request.token_ids.append(token.token_id)
            if request.num_tokens == request.max_num_tokens:
                self.scheduler.finish(request)
        self.scheduler.check_integrity()
        return counts

    def run(self, most_steps: int = 2000) -> list[dict[str, int]]:
        steps = []
        while self.scheduler.has_unfinished:
            steps.append(self.step())
            assert len(steps) <= most_steps, "not finished"
        return steps


def assert_exact(request: Request) -> None:
    expected = tokens_alone(request.prompt_token_ids, request.max_num_tokens - request.num_prompt_tokens)
    assert request.output_token_ids == expected
