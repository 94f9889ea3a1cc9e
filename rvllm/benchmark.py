"""Benchmark: times requests of a given shape, prefilled and then decoded together, through the engine itself.

The columns are those of llama-batched-bench: PP prompt tokens and TG decode steps of each of B requests, N_KV
tokens kept in the cache, T_* seconds, S_* tokens per second.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np

from rvllm.engine import LLMEngine
from rvllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class Workload:
    """Equal requests that run together; all lengths are in tokens.

    shared_prefix: the first tokens of the prompt, when they are the same in all requests. depth: tokens of context
    that are in the KV cache before the prompt begins; with a shared prefix it is one context for all.
    Raises ValueError for a value out of range.
    """

    batch_size: int
    prompt_len: int
    gen_len: int
    depth: int = 0
    shared_prefix: int = 0

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("prompt_len", 1), ("gen_len", 1), ("depth", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not 0 <= self.shared_prefix <= self.prompt_len:
            raise ValueError(
                f"shared_prefix must be between 0 and prompt_len {self.prompt_len}, got {self.shared_prefix}"
            )

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens to prefill, a shared prefix counted once."""
        return self.shared_prefix + self.batch_size * (self.prompt_len - self.shared_prefix)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens in the KV cache in the end, without the context that was there."""
        return self.num_prompt_tokens + self.batch_size * self.gen_len


@dataclass(frozen=True)
class Measurement:
    """One run. hit_rate: share of the prompts' tokens that were found in the prefix cache.

    kv_use: share of the KV cache's blocks in use in the end.
    """

    workload: Workload
    prefill_seconds: float
    decode_seconds: float
    hit_rate: float
    kv_use: float

    def row(self) -> dict[str, float]:
        """Keyed by column. HIT and KV are hit_rate and kv_use, between 0 and 1."""
        w = self.workload
        seconds = self.prefill_seconds + self.decode_seconds
        return {
            "PP": w.prompt_len,
            "TG": w.gen_len,
            "B": w.batch_size,
            "N_KV": w.num_kv_tokens,
            "T_PP": self.prefill_seconds,
            "S_PP": w.num_prompt_tokens / self.prefill_seconds,
            "T_TG": self.decode_seconds,
            "S_TG": w.batch_size * w.gen_len / self.decode_seconds,
            "T": seconds,
            "S": w.num_kv_tokens / seconds,
            "HIT": self.hit_rate,
            "KV": self.kv_use,
        }


class Benchmark:
    """Runs workloads on an engine that nothing else uses; prompts are random token ids, seeded."""

    def __init__(self, engine: LLMEngine, seed: int = 0) -> None:
        self.engine = engine
        self._seed = seed
        self._rng = np.random.default_rng(seed)

    def measure(self, workload: Workload, repeat: int = 1) -> Measurement:
        """The median of `repeat` runs. Raises ValueError if the engine cannot run the requests together.

        A run never finds the prompts of another in the prefix cache: each has its own.
        """
        runs = [self._run(workload) for _ in range(repeat)]
        return Measurement(
            workload,
            median(run.prefill_seconds for run in runs),
            median(run.decode_seconds for run in runs),
            median(run.hit_rate for run in runs),
            median(run.kv_use for run in runs),
        )

    def _run(self, workload: Workload) -> Measurement:
        engine, count = self.engine, workload.batch_size
        max_steps = self._max_prefill_steps(workload)
        if not workload.depth:  # its contexts are to be found again
            # From the first block on, as in the run before: memory costs more when it is written for the first time.
            engine.block_manager.reset()
        contexts = self._fill_contexts(workload)
        prompts = random_prompts(
            self._rng, engine.runner.vocab_size, [workload.prompt_len] * count, workload.shared_prefix
        )
        # Requests prefilled early decode while the others are prefilled, so none may end before all are counted.
        params = _params(max_steps + workload.gen_len + 1)
        before = engine.stats
        with _requests(
            engine, [a + b for a, b in zip(contexts, prompts, strict=True)], params
        ) as request_ids:
            start = time.perf_counter()
            for _ in range(max_steps):
                request_ids.difference_update(output.request_id for output in engine.step())
                if not request_ids:
                    break
            middle = time.perf_counter()
            together = not request_ids
            for _ in range(workload.gen_len if together else 0):
                together &= len(engine.step()) == count
            end = time.perf_counter()
            after = engine.stats
        depth_tokens = count * workload.depth
        hits = after.prefix_hits - before.prefix_hits - depth_tokens
        if not together or hits < 0:
            raise ValueError(
                f"{count} requests of {workload.depth + workload.prompt_len + workload.gen_len} tokens do not fit "
                f"the KV cache of {after.num_blocks * engine.runner.block_size} tokens together"
            )
        queries = after.prefix_queries - before.prefix_queries - depth_tokens
        return Measurement(
            workload, middle - start, end - middle, hits / max(1, queries), after.kv_cache_usage
        )

    def _max_prefill_steps(self, workload: Workload) -> int:
        """The most steps until every request has its first token, if all run together."""
        scheduler = self.engine.scheduler
        count, budget = workload.batch_size, scheduler.max_num_batched_tokens
        if count > scheduler.max_num_seqs:
            raise ValueError(f"batch size {count} is more than max_num_seqs {scheduler.max_num_seqs}")
        if count >= budget:
            raise ValueError(f"batch size {count} must be less than max_num_batched_tokens {budget}")
        block_size = self.engine.runner.block_size
        if workload.depth % block_size:
            raise ValueError(f"depth {workload.depth} is no multiple of the block size {block_size}")
        if workload.depth and not self.engine.block_manager.enable_prefix_caching:
            raise ValueError("depth needs prefix caching")
        # A step fills its budget while prompts are left; of it, requests already prefilled take one token each.
        max_steps = 1 - (-count * workload.prompt_len // (budget - count))
        length = workload.depth + workload.prompt_len + workload.gen_len + max_steps
        if length >= self.engine.max_model_len:
            raise ValueError(
                f"batch size {count} needs requests of up to {length + 1} tokens, more than max_model_len "
                f"{self.engine.max_model_len}"
            )
        return max_steps

    def _fill_contexts(self, workload: Workload) -> list[list[int]]:
        """The context of each request; afterwards they are in the prefix cache."""
        if not workload.depth:
            return [[]] * workload.batch_size
        num_contexts = 1 if workload.shared_prefix else workload.batch_size
        vocab_size = self.engine.runner.vocab_size
        # The same in every run: what the cache still holds is not computed again.
        generators = (np.random.default_rng((self._seed, i)) for i in range(num_contexts))
        contexts = [rng.integers(vocab_size, size=workload.depth).tolist() for rng in generators]
        with _requests(self.engine, contexts, _params(1)):
            while self.engine.has_unfinished:
                self.engine.step()
        return contexts * (workload.batch_size // num_contexts)


def random_prompts(
    rng: np.random.Generator, vocab_size: int, lengths: Sequence[int], shared_prefix: int = 0
) -> list[list[int]]:
    """Random token ids for each of the lengths; the first shared_prefix tokens are the same in all prompts."""
    prefix: list[int] = rng.integers(vocab_size, size=shared_prefix).tolist()
    return [
        prefix[:length] + rng.integers(vocab_size, size=max(0, length - shared_prefix)).tolist()
        for length in lengths
    ]


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)


@contextmanager
def _requests(
    engine: LLMEngine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> Iterator[set[str]]:
    """Queues a request for each prompt and drops what is left of them in the end; yields their ids."""
    request_ids = [f"benchmark-{i}" for i in range(len(prompts))]
    try:
        for request_id, prompt in zip(request_ids, prompts, strict=True):
            engine.add_request(request_id, prompt, params)
        yield set(request_ids)
    finally:
        for request_id in request_ids:
            engine.abort(request_id)
