"""LLMEngine: the only place where scheduler, runner and tokenizer meet.

A step is schedule -> run -> append: the scheduler chooses tokens, the runner computes them in one native call,
and the tokens that were sampled become text.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rvllm.block_manager import BlockManager, BlockTables, KVGroup
from rvllm.grammar import GrammarCompiler
from rvllm.request import CompletionOutput, Request, RequestOutput, SampledToken
from rvllm.request_group import RequestGroup
from rvllm.sampling_params import SamplingParams
from rvllm.scheduler import Scheduler, SchedulerOutput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rvllm._core import Pooler
    from rvllm.config import EngineConfig, ModelConfig
    from rvllm.tokenizer import Tokenizer

_UINT64 = 2**64 - 1


class Runner(Protocol):
    """What computes a step: ModelRunner, or a fake one in tests."""

    kv_groups: list[KVGroup]
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

    def make_pooler(self, num_tokens: int) -> Pooler: ...

    def run(self, scheduled: list[tuple[Request, int]]) -> list[SampledToken]: ...

    def get_logits(
        self, token_ids: Sequence[int], start: int, block_tables: BlockTables, first: int
    ) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made, and its state now.

    A step's time is shared out between prefill and decode by their numbers of tokens.
    """

    steps: int = 0
    prefill_tokens: int = 0  # computed, also anew after a preemption
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0  # of the prompts that have run, computed or from the cache
    generation_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # of those, tokens found
    allocated_blocks: int = 0  # blocks ever taken from the pool
    preemptions: int = 0
    num_running: int = 0
    num_waiting: int = 0
    free_blocks: int = 0  # of the first group of layers, as are num_blocks and allocated_blocks
    num_blocks: int = 0
    kv_cache_usage: float = 0.0  # share of the blocks that requests hold, in the fullest group


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
            runner.kv_groups,
            runner.block_size,
            engine_config.max_num_batched_tokens,
            engine_config.enable_prefix_caching,
        )
        self.scheduler = Scheduler(
            self.block_manager, engine_config.max_num_seqs, engine_config.max_num_batched_tokens
        )
        seed = engine_config.seed
        self._seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self.grammar_compiler = GrammarCompiler(tokenizer)
        self._request_numbers = itertools.count()
        self._groups: dict[str, RequestGroup] = {}
        self._outputs: list[RequestOutput] = []  # of requests without an inbox
        self._steps = self._prefill_tokens = self._decode_tokens = self._generation_tokens = 0
        self._prefill_seconds = self._decode_seconds = 0.0

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        arrival_step: int = 0,
        priority: float = 0,
    ) -> None:
        """Queues a prompt (text or token ids). Raises ValueError as prepare() does, and for an id in use.

        arrival_step: the number of steps from now until the request joins; steps in which nothing would run
        are skipped. priority: the lowest is served first.
        """
        self.submit(self.prepare(request_id, prompt, params, arrival_step, priority))

    def prepare(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        arrival_step: int = 0,
        priority: float = 0,
    ) -> RequestGroup:
        """Encodes and checks a request without queueing it.

        Raises ValueError for an empty prompt, a token id out of range, a structured output that cannot be compiled,
        and a request that can never fit the context or the KV cache.
        """
        params = params or SamplingParams()
        if isinstance(arrival_step, bool) or not isinstance(arrival_step, int) or arrival_step < 0:
            raise ValueError(f"arrival_step must be an integer from 0 on, got {arrival_step!r}")
        if (
            isinstance(priority, bool)
            or not isinstance(priority, (int, float))
            or not math.isfinite(priority)
        ):
            raise ValueError(f"priority must be a number, got {priority!r}")
        text, token_ids = self._encode(prompt)
        stop_token_ids = frozenset(self._checked_ids("stop_token_ids", params.stop_token_ids or ()))
        self._checked_ids("logit_bias", params.logit_bias or ())
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if count is not None and count > self.runner.vocab_size:
                raise ValueError(
                    f"{name} {count} is more than the vocabulary of {self.runner.vocab_size} tokens"
                )
        if not params.ignore_eos:
            stop_token_ids |= self.tokenizer.eog_token_ids
        if params.min_tokens and len(stop_token_ids) >= self.runner.vocab_size:
            raise ValueError(
                "stop_token_ids and min_tokens leave no token to sample: they ban the whole vocabulary"
            )
        max_num_tokens = self._max_num_tokens(len(token_ids), params.max_tokens)
        output = params.structured_output
        grammar = None if output is None else self.grammar_compiler.compile(output)
        seed = self._request_seed(params.seed)
        requests = []
        for index in range(params.n):
            sampler = self.runner.make_sampler(params, token_ids, stop_token_ids, seed, index)
            own = None if grammar is None else grammar.copy()
            requests.append(
                Request(
                    request_id,
                    token_ids,
                    params,
                    max_num_tokens,
                    arrival_step,
                    index,
                    sampler,
                    priority,
                    grammar=own,
                )
            )
        return RequestGroup(text, requests, self.tokenizer)

    def prepare_embedding(
        self, request_id: str, prompt: str | Sequence[int], priority: float = 0
    ) -> RequestGroup:
        """Encodes and checks a prompt to be embedded without queueing it: a request that samples nothing.

        Raises ValueError as prepare() does, and for a model whose kind of pooling is not supported.
        """
        text, token_ids = self._encode(prompt)
        num_tokens = len(token_ids)
        if num_tokens > self.max_model_len:
            raise ValueError(
                f"the prompt is too long: {num_tokens} tokens, but max_model_len is {self.max_model_len}"
            )
        self._check_fits(num_tokens, f"a prompt of {num_tokens} tokens needs")
        pooler = self.runner.make_pooler(num_tokens)
        request = Request(
            request_id, token_ids, SamplingParams(), num_tokens, priority=priority, pooler=pooler
        )
        return RequestGroup(text, [request], self.tokenizer)

    def submit(self, group: RequestGroup, inbox: deque[RequestOutput | BaseException] | None = None) -> None:
        """Queues a prepared request. Raises ValueError if its id is in use.

        inbox: gets the outputs, or the error of the step that dropped the request, whoever calls advance().
        """
        if group.request_id in self._groups:
            raise ValueError(f"request_id {group.request_id!r} is in use")
        self._groups[group.request_id] = group
        group.inbox = inbox
        for choice in group.choices:
            choice.request.arrival_step += self.scheduler.step
            self.scheduler.add(choice.request)

    def abort(self, request_id: str, finish_reason: str = "abort") -> RequestOutput | None:
        """Ends a request and frees its blocks at once; returns the rest of its text, held back until now.

        None if there is no such request (any more).
        """
        group = self._groups.pop(request_id, None)
        if group is None:
            return None
        output = group.output([])
        output.outputs, output.finished = group.end(finish_reason), True
        for choice in group.choices:
            self.scheduler.finish(choice.request)
        if group.inbox is not None:
            group.inbox.append(output)
        return output

    def has_request(self, request_id: str) -> bool:
        """Whether a request is queued or runs."""
        return request_id in self._groups

    @property
    def has_unfinished(self) -> bool:
        """Whether step() has anything left to do or to return."""
        return self.scheduler.has_unfinished or bool(self._outputs)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            steps=self._steps,
            prefill_tokens=self._prefill_tokens,
            prefill_seconds=self._prefill_seconds,
            decode_tokens=self._decode_tokens,
            decode_seconds=self._decode_seconds,
            prompt_tokens=self.scheduler.num_prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_queries=self.scheduler.prefix_queries,
            prefix_hits=self.scheduler.prefix_hits,
            allocated_blocks=self.block_manager.pools[0].num_allocations,
            preemptions=self.scheduler.num_preemptions,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            free_blocks=self.block_manager.num_free_blocks,
            num_blocks=self.block_manager.num_blocks,
            kv_cache_usage=self.block_manager.usage,
        )

    def step(self) -> list[RequestOutput]:
        """Computes one step; returns what is new: for each choice that sampled, its token and certain text.

        Raises as advance() does.
        """
        self.advance()
        outputs, self._outputs = self._outputs, []
        return outputs

    def advance(self) -> None:
        """Computes one step. Outputs go to the inboxes of their requests, or wait for step().

        If the step fails, the requests that took part in it are dropped, the others go on, and so does the error. An
        interrupt (KeyboardInterrupt) drops all. No request is left half-updated.
        """
        if not self.scheduler.has_unfinished:
            return
        step: SchedulerOutput | None = None
        try:
            step = self.scheduler.schedule()
            start = time.perf_counter()
            tokens = self.runner.run(step.scheduled)
            self._count(step, sum(token.token_id >= 0 for token in tokens), time.perf_counter() - start)
            self._append(step, tokens)
        except Exception as error:
            self._drop(step, error)
            raise
        except BaseException as error:
            self._drop(None, error)
            raise

    def get_logits(self, token_ids: Sequence[int], first: int = 0) -> NDArray[np.float32]:
        """Logits [T - first, vocab_size] float32 at the positions of token_ids from `first` on, computed apart
        from all requests.

        Raises ValueError for token ids out of range, none of them, or too many for context or KV cache.
        """
        ids = self._checked_ids("token_ids", token_ids)
        if not 0 < len(ids) <= self.max_model_len:
            raise ValueError(f"token_ids must hold 1 to {self.max_model_len} token ids, got {len(ids)}")
        if not 0 <= first <= len(ids):
            raise ValueError(f"first must be between 0 and the {len(ids)} tokens, got {first}")
        manager = self.block_manager
        self._check_fits(len(ids), f"{len(ids)} tokens need")
        logits = np.empty((len(ids) - first, self.runner.vocab_size), np.float32)
        block_tables = manager.empty_tables()
        try:
            for start in range(0, len(ids), manager.max_num_batched_tokens):
                part = ids[start : start + manager.max_num_batched_tokens]
                self.scheduler.make_room(block_tables, start, len(ids))
                rows = self.runner.get_logits(part, start, block_tables, first)
                logits[max(start - first, 0) : max(start + len(part) - first, 0)] = rows
        finally:
            manager.free(block_tables)
        return logits

    def _append(self, step: SchedulerOutput, tokens: list[SampledToken]) -> None:
        """Gives each request that has sampled its token, and everybody their outputs."""
        completions: dict[RequestGroup, list[CompletionOutput]] = {}
        for request, token in zip(self.scheduler.update(step), tokens, strict=True):
            group = self._groups[request.request_id]
            completion = group.append(request, token)
            completions.setdefault(group, []).append(completion)
            if completion.finish_reason is not None:
                self.scheduler.finish(request)
        for group, new in completions.items():
            output = group.output(new)
            if output.finished:
                del self._groups[output.request_id]
            if group.inbox is None:
                self._outputs.append(output)
            else:
                group.inbox.append(output)

    def _drop(self, step: SchedulerOutput | None, error: BaseException) -> None:
        """Drops the requests of a step that failed, or all where it is not known which it has touched."""
        if step is None:
            dropped = list(self._groups.values())
            self._groups.clear()
            self.scheduler.reset()
        else:
            request_ids = dict.fromkeys(request.request_id for request, _ in step.scheduled)
            dropped = [
                self._groups.pop(request_id) for request_id in request_ids if request_id in self._groups
            ]
            for choice in (choice for group in dropped for choice in group.choices):
                self.scheduler.finish(choice.request)
            self.block_manager.forget_prefixes()  # some of the step's blocks may lack their content
        for group in dropped:
            if group.inbox is not None:
                group.inbox.append(error)

    def _count(self, step: SchedulerOutput, num_sampled: int, seconds: float) -> None:
        prefill, decode = step.num_prefill_tokens, step.num_decode_tokens
        self._steps += 1
        self._generation_tokens += num_sampled
        self._prefill_tokens += prefill
        self._decode_tokens += decode
        self._prefill_seconds += seconds * prefill / (prefill + decode)
        self._decode_seconds += seconds * decode / (prefill + decode)

    def _encode(self, prompt: str | Sequence[int]) -> tuple[str | None, list[int]]:
        """The text of a prompt, None where it is token ids, and its token ids."""
        if isinstance(prompt, str):
            text, token_ids = prompt, self.tokenizer.encode(prompt, parse_special=True)
        elif isinstance(prompt, Iterable) and not isinstance(prompt, bytes):
            text, token_ids = None, self._checked_ids("prompt", prompt)
        else:
            raise ValueError(f"the prompt must be text or token ids, got {prompt!r}")
        if not token_ids:
            raise ValueError("the prompt is empty: it has no tokens")
        return text, token_ids

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
        """Length of prompt and answer at which a request ends; an answer's last token needs no slot in the KV cache."""
        if num_prompt_tokens + (max_tokens != 0) > self.max_model_len:
            raise ValueError(
                f"the prompt is too long: {num_prompt_tokens} tokens, but max_model_len is {self.max_model_len} for "
                "prompt and answer together"
            )
        if max_tokens is None:
            max_tokens = max(1, self.block_manager.max_num_tokens + 1 - num_prompt_tokens)
        length = min(num_prompt_tokens + max_tokens, self.max_model_len)
        self._check_fits(
            max(length - 1, num_prompt_tokens),
            f"a prompt of {num_prompt_tokens} tokens and max_tokens {max_tokens} need",
        )
        return length

    def _check_fits(self, num_tokens: int, what: str) -> None:
        """Refuses tokens that no request can ever hold in the KV cache."""
        most, blocks_for = self.block_manager.max_num_tokens, self.block_manager.blocks_for
        if num_tokens > most:
            raise ValueError(
                f"{what} {blocks_for(num_tokens)} KV-cache blocks, {blocks_for(most)} are available"
            )

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
