"""LLMEngine: the only place where scheduler, runner and tokenizer meet.

A step is schedule -> run -> append: the scheduler chooses tokens, the runner computes them in one native call,
and the tokens that were sampled become text.
"""

from __future__ import annotations

import itertools
import operator
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from rvllm.block_manager import BlockManager
from rvllm.request import CompletionOutput, Request, RequestOutput, SampledToken
from rvllm.request_group import Choice, RequestGroup
from rvllm.sampling_params import SamplingParams
from rvllm.scheduler import Scheduler, SchedulerOutput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rvllm.config import EngineConfig, ModelConfig
    from rvllm.tokenizer import Tokenizer

_UINT64 = 2**64 - 1


class Runner(Protocol):
    """What computes a step: ModelRunner, or a fake one in tests."""

    num_blocks: int
    block_size: int
    vocab_size: int

    def make_sampler(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_token_ids: Iterable[int],
        seed: int,
        index: int,
    ) -> object: ...

    def run(self, scheduled: list[tuple[Request, int]]) -> list[SampledToken]: ...

    def get_logits(
        self, token_ids: Sequence[int], block_table: Sequence[int], first: int = 0
    ) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made, and its state now.

    A step's time is shared out between prefill and decode by their numbers of tokens.
    """

    steps: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # of those, tokens found
    allocated_blocks: int = 0  # blocks ever taken from the pool
    preemptions: int = 0
    num_running: int = 0
    num_waiting: int = 0
    free_blocks: int = 0
    num_blocks: int = 0


class LLMEngine:
    """Runs many requests at once. Not thread-safe, except for prepare()."""

    def __init__(
        self, model_config: ModelConfig, engine_config: EngineConfig, tokenizer: Tokenizer, runner: Runner
    ) -> None:
        """Raises ValueError if engine_config asks for a longer context than the model has."""
        self.tokenizer = tokenizer
        self.runner = runner
        self.max_model_len = engine_config.max_model_len or model_config.context_length
        if self.max_model_len > model_config.context_length:
            raise ValueError(
                f"max_model_len {self.max_model_len} is more than the model's context of "
                f"{model_config.context_length} tokens"
            )
        self.block_manager = BlockManager(
            runner.num_blocks, runner.block_size, engine_config.enable_prefix_caching
        )
        self.scheduler = Scheduler(
            self.block_manager, engine_config.max_num_seqs, engine_config.max_num_batched_tokens
        )
        seed = engine_config.seed
        self._seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self._request_numbers = itertools.count()
        self._groups: dict[str, RequestGroup] = {}
        self._choices: dict[Request, Choice] = {}
        self._stats = EngineStats()

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        arrival_step: int = 0,
    ) -> None:
        """Queues a prompt (text or token ids). Raises ValueError as prepare() does, and for an id in use.

        arrival_step: the number of steps from now until the request joins; steps in which nothing would run
        are skipped.
        """
        self.submit(self.prepare(request_id, prompt, params, arrival_step))

    def prepare(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        arrival_step: int = 0,
    ) -> RequestGroup:
        """Encodes and checks a request without queueing it.

        Raises ValueError for an empty prompt, a token id out of range, and a request that can never fit the
        context or the KV cache.
        """
        params = params or SamplingParams()
        if isinstance(arrival_step, bool) or not isinstance(arrival_step, int) or arrival_step < 0:
            raise ValueError(f"arrival_step must be an integer from 0 on, got {arrival_step!r}")
        if isinstance(prompt, str):
            text, token_ids = prompt, self.tokenizer.encode(prompt, parse_special=True)
        elif isinstance(prompt, Iterable):
            text, token_ids = None, self._checked_ids("prompt", prompt)
        else:
            raise ValueError(f"the prompt must be text or token ids, got {prompt!r}")
        if not token_ids:
            raise ValueError("the prompt is empty: it has no tokens")
        stop_token_ids = frozenset(self._checked_ids("stop_token_ids", params.stop_token_ids or ()))
        self._checked_ids("logit_bias", params.logit_bias or ())
        if params.logprobs is not None and params.logprobs > self.runner.vocab_size:
            raise ValueError(
                f"logprobs {params.logprobs} is more than the vocabulary of {self.runner.vocab_size} tokens"
            )
        if not params.ignore_eos:
            stop_token_ids |= self.tokenizer.eog_token_ids
        if params.min_tokens and len(stop_token_ids) >= self.runner.vocab_size:
            raise ValueError(
                "stop_token_ids and min_tokens leave no token to sample: they ban the whole vocabulary"
            )
        max_num_tokens = self._max_num_tokens(len(token_ids), params.max_tokens)
        seed = self._request_seed(params.seed)
        requests = []
        for index in range(params.n):
            sampler = self.runner.make_sampler(params, token_ids, stop_token_ids, seed, index)
            requests.append(
                Request(request_id, token_ids, params, max_num_tokens, arrival_step, index, sampler)
            )
        return RequestGroup(text, requests, self.tokenizer)

    def submit(self, group: RequestGroup, priority: float = 0.0) -> None:
        """Queues a prepared request; the lowest priority is served first. Raises ValueError if its id is in use."""
        if group.request_id in self._groups:
            raise ValueError(f"request_id {group.request_id!r} is in use")
        self._groups[group.request_id] = group
        for choice in group.choices:
            self._choices[choice.request] = choice
            choice.request.arrival_step += self.scheduler.step
            choice.request.priority = priority
            self.scheduler.add(choice.request)

    def abort(self, request_id: str, finish_reason: str = "abort") -> RequestOutput | None:
        """Ends a request and frees its blocks at once; returns the rest of its text, held back until now.

        None if there is no such request (any more).
        """
        group = self._groups.pop(request_id, None)
        if group is None:
            return None
        completions = []
        for choice in group.choices:
            if self._choices.pop(choice.request, None):
                completions.append(choice.end(finish_reason))
                self.scheduler.finish(choice.request)
        return group.output(completions)

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    @property
    def stats(self) -> EngineStats:
        return replace(
            self._stats,
            prefix_queries=self.scheduler.prefix_queries,
            prefix_hits=self.scheduler.prefix_hits,
            allocated_blocks=self.block_manager.num_allocations,
            preemptions=self.scheduler.num_preemptions,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            free_blocks=self.block_manager.num_free_blocks,
            num_blocks=self.block_manager.num_blocks,
        )

    def step(self) -> list[RequestOutput]:
        """Computes one step; returns what is new: for each choice that sampled, its token and certain text.

        Whatever fails, no request is left half-updated: all are dropped, the error goes on to the caller, and
        the engine takes new requests.
        """
        if not self.has_unfinished:
            return []
        try:
            return self._step()
        except BaseException:
            self._groups.clear()
            self._choices.clear()
            self.scheduler.reset()
            raise

    def get_logits(self, token_ids: Sequence[int], first: int = 0) -> NDArray[np.float32]:
        """Logits [T - first, vocab_size] float32 at the positions of token_ids from `first` on, computed apart
        from all requests.

        Raises ValueError for token ids out of range, none of them, or too many for context or free KV cache.
        """
        ids = self._checked_ids("token_ids", token_ids)
        if not 0 < len(ids) <= self.max_model_len:
            raise ValueError(f"token_ids must hold 1 to {self.max_model_len} token ids, got {len(ids)}")
        if not 0 <= first <= len(ids):
            raise ValueError(f"first must be between 0 and the {len(ids)} tokens, got {first}")
        needed, free = self.block_manager.blocks_for(len(ids)), self.block_manager.num_free_blocks
        if needed > free:
            raise ValueError(f"{len(ids)} tokens need {needed} KV-cache blocks, {free} are free")
        block_table = self.block_manager.allocate((), len(ids))
        try:
            return self.runner.get_logits(ids, block_table, first)
        finally:
            self.block_manager.free(block_table)

    def _step(self) -> list[RequestOutput]:
        step = self.scheduler.schedule()
        start = time.perf_counter()
        tokens = self.runner.run(step.scheduled)
        self._count(step, time.perf_counter() - start)
        completions: dict[str, list[CompletionOutput]] = {}
        for request, token in zip(self.scheduler.update(step), tokens, strict=True):
            choice = self._choices[request]
            completion = choice.append(token) if token.error is None else choice.end("error", token.error)
            completions.setdefault(request.request_id, []).append(completion)
            if completion.is_finished:
                del self._choices[request]
                self.scheduler.finish(request)
        outputs = [self._groups[request_id].output(new) for request_id, new in completions.items()]
        for output in outputs:
            if output.finished:
                del self._groups[output.request_id]
        return outputs

    def _count(self, step: SchedulerOutput, seconds: float) -> None:
        stats, prefill, decode = self._stats, step.num_prefill_tokens, step.num_decode_tokens
        self._stats = replace(
            stats,
            steps=stats.steps + 1,
            prefill_tokens=stats.prefill_tokens + prefill,
            decode_tokens=stats.decode_tokens + decode,
            prefill_seconds=stats.prefill_seconds + seconds * prefill / (prefill + decode),
            decode_seconds=stats.decode_seconds + seconds * decode / (prefill + decode),
        )

    def _checked_ids(self, name: str, token_ids: Iterable[object]) -> list[int]:
        vocab_size = self.runner.vocab_size
        checked = []
        for value in token_ids:
            try:
                token_id = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
            except TypeError:
                token_id = -1
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"{name}: {value!r} is no token id in [0, {vocab_size - 1}]")
            checked.append(token_id)
        return checked

    def _max_num_tokens(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Length of prompt and answer at which a request ends; the last token needs no slot in the KV cache."""
        if num_prompt_tokens >= self.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens, but max_model_len is {self.max_model_len} for "
                "prompt and answer together"
            )
        num_slots = self.runner.num_blocks * self.runner.block_size
        if max_tokens is None:
            max_tokens = max(1, num_slots + 1 - num_prompt_tokens)
        length = min(num_prompt_tokens + max_tokens, self.max_model_len)
        if length - 1 > num_slots:
            raise ValueError(
                f"a prompt of {num_prompt_tokens} tokens and max_tokens {max_tokens} need "
                f"{self.block_manager.blocks_for(length - 1)} KV-cache blocks, {self.runner.num_blocks} are "
                "available"
            )
        return length

    def _request_seed(self, seed: int | None) -> int:
        number = next(self._request_numbers)
        return _splitmix64(self._seed, number) if seed is None or seed == -1 else seed & _UINT64


def _splitmix64(seed: int, number: int) -> int:
    """Value `number` of the SplitMix64 stream of `seed` (doi:10.1145/2660193.2660195).

    Engines with neighbouring seeds share no request seeds, as they would if the two were added.
    """
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _UINT64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _UINT64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _UINT64
    return z ^ (z >> 31)
