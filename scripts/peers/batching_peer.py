"""BatchingPeer: an engine with continuous batching of its own, driven step by step as `rvllm bench` drives rvllm."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from peer import Load, Options, Peer, Setting

LEAST_LENGTH = 64  # tokens that a request of generate() may have


class BatchingPeer(Peer):
    def __init__(self, options: Options) -> None:
        self.options = options
        self._rng = np.random.default_rng(options.seed)

    @abstractmethod
    def start(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Queues a request for each prompt, to generate so many of the likeliest tokens, whichever they are."""

    @abstractmethod
    def step(self) -> None:
        """Computes one batch."""

    @abstractmethod
    def token_ids(self) -> Sequence[Sequence[int]]:
        """What was generated so far for each prompt."""

    @abstractmethod
    def stop(self) -> None:
        """Drops what is left of the requests; the prefix cache stays."""

    @property
    def prefix_caching(self) -> bool:
        """Only where the load has use of it: looking up prompts that are never found costs time."""
        return self.options.load.depth > 0 or self.options.load.shared_prefix > 0

    @property
    def max_length(self) -> int:
        """Tokens that a request may come to have."""
        return max(self._length(self.options.load), LEAST_LENGTH)

    def num_blocks(self, block_size: int) -> int:
        """Blocks of KV cache that the largest load takes, and as many for old prompts where they are kept.

        No more than that: an engine that goes round through its blocks would touch fresh memory in every run.
        """
        blocks = self.options.load.batch_size * (-(-self.max_length // block_size) + 1)
        return 2 * blocks if self.prefix_caching else blocks

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        self._run([prompt], num_tokens)
        return list(self.token_ids()[0])

    def measure(self, load: Load, setting: Setting) -> tuple[float, float]:
        contexts = self._fill_contexts(load)
        prefix = self._random_ids(load.shared_prefix)
        rest = load.prompt_len - load.shared_prefix
        max_steps = self._max_prefill_steps(load)
        # Requests prefilled early decode while the others are prefilled, so none may end before all are counted.
        self.start(
            [[*context, *prefix, *self._random_ids(rest)] for context in contexts], max_steps + load.gen_len
        )
        try:
            start = time.perf_counter()
            for _ in range(max_steps):
                self.step()
                if all(self.token_ids()):
                    break
            middle = time.perf_counter()
            counts = [len(ids) for ids in self.token_ids()]
            for _ in range(load.gen_len):
                self.step()
            end = time.perf_counter()
            together = all(counts) and all(
                len(ids) == count + load.gen_len for ids, count in zip(self.token_ids(), counts, strict=True)
            )
        finally:
            self.stop()
        if not together:
            raise ValueError(
                f"{load.batch_size} requests of {self._length(load)} tokens did not run together"
            )
        return middle - start, end - middle

    def _max_prefill_steps(self, load: Load) -> int:
        """Steps until every request has its first token, if all run together, with a margin."""
        budget = self.options.step_tokens - load.batch_size  # requests already prefilled take one token each
        if budget < 1:
            raise ValueError(
                f"batch size {load.batch_size} must be less than {self.options.step_tokens} tokens a step"
            )
        return 2 * -(-load.batch_size * load.prompt_len // budget) + 2

    def _length(self, load: Load) -> int:
        return load.depth + load.prompt_len + load.gen_len + self._max_prefill_steps(load)

    def _fill_contexts(self, load: Load) -> list[list[int]]:
        """The context of each request; afterwards they are in the prefix cache."""
        if not load.depth:
            return [[]] * load.batch_size
        num_contexts = 1 if load.shared_prefix else load.batch_size
        # The same in every run: what the cache still holds is not computed again.
        generators = (np.random.default_rng((self.options.seed, i)) for i in range(num_contexts))
        contexts = [rng.integers(self.options.vocab_size, size=load.depth).tolist() for rng in generators]
        self._run(contexts, 1)
        return contexts * (load.batch_size // num_contexts)

    def _random_ids(self, count: int) -> list[int]:
        ids: list[int] = self._rng.integers(self.options.vocab_size, size=count).tolist()
        return ids

    def _run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        self.start(prompts, num_tokens)
        while any(len(ids) < num_tokens for ids in self.token_ids()):
            self.step()
        self.stop()
