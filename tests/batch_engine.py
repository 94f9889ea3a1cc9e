"""Continuous batching without a model: what the fake vllm and openvino_genai have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Request:
    """Its answer counts on from the last token of the prompt."""

    prompt: Sequence[int]
    max_tokens: int
    num_computed: int = 0
    token_ids: list[int] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return len(self.token_ids) == self.max_tokens


class BatchEngine:
    """Steps of at most max_num_batched_tokens: a token of each running request, then prompts in their order."""

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.requests: dict[object, Request] = {}

    def add(self, request_id: object, prompt: Sequence[int], max_tokens: int) -> None:
        assert request_id not in self.requests
        self.requests[request_id] = Request(prompt, max_tokens)

    def step(self) -> list[object]:
        """The ids of the requests that got a token."""
        unfinished = {key: r for key, r in self.requests.items() if not r.is_finished}
        admitted = list(unfinished.items())[: self.max_num_seqs]
        budget = self.max_num_batched_tokens
        done = []
        for key, request in sorted(admitted, key=lambda item: not item[1].token_ids):
            count = min(budget, 1 if request.token_ids else len(request.prompt) - request.num_computed)
            budget -= count
            request.num_computed += count
            if count and request.num_computed >= len(request.prompt):
                request.token_ids.append(int(request.prompt[-1]) + len(request.token_ids) + 1)
                done.append(key)
        return done

    @property
    def has_unfinished(self) -> bool:
        return any(not request.is_finished for request in self.requests.values())
