"""Trace: replays requests that arrive over time, and reports how long each took."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np

from rvllm.benchmark import random_prompts
from rvllm.engine import EngineStats, LLMEngine
from rvllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class TraceEntry:
    """A request of prompt_len tokens that generates gen_len tokens and joins in step arrival_step."""

    prompt_len: int
    gen_len: int
    arrival_step: int = 0


@dataclass
class RequestTimes:
    """Times count from the beginning of the step in which the request could first run. num_steps counts it too."""

    entry: TraceEntry
    arrival: float = 0.0  # on the clock of time.perf_counter
    first_token_seconds: float = 0.0
    seconds: float = 0.0
    num_steps: int = 0

    def row(self) -> dict[str, float]:
        return {
            "PP": self.entry.prompt_len,
            "TG": self.entry.gen_len,
            "ARRIVAL": self.entry.arrival_step,
            "STEPS": self.num_steps,
            "T_FIRST": self.first_token_seconds,
            "T": self.seconds,
        }


@dataclass(frozen=True)
class TraceResult:
    """One replay. hit_rate and kv_use as in Measurement, kv_use at its highest."""

    requests: list[RequestTimes]
    num_steps: int
    seconds: float
    num_preemptions: int
    hit_rate: float
    kv_use: float

    def summary(self) -> dict[str, float]:
        """S counts prompt and generated tokens, S_TG generated ones, both per second of the whole replay."""
        num_prompt_tokens = sum(r.entry.prompt_len for r in self.requests)
        num_generated = sum(r.entry.gen_len for r in self.requests)
        return {
            "PP": num_prompt_tokens,
            "TG": num_generated,
            "B": len(self.requests),
            "STEPS": self.num_steps,
            "T": self.seconds,
            "S": (num_prompt_tokens + num_generated) / self.seconds,
            "S_TG": num_generated / self.seconds,
            "HIT": self.hit_rate,
            "KV": self.kv_use,
            "PREEMPTIONS": self.num_preemptions,
        }


def parse_trace(lines: Iterable[str]) -> list[TraceEntry]:
    """Entries from lines of JSON. Raises ValueError naming line and field."""
    entries = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entries.append(_parse_entry(line))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    if not entries:
        raise ValueError("no requests in it")
    return entries


def _parse_entry(line: str) -> TraceEntry:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(fields, dict):
        raise ValueError("it is not a JSON object")
    least = {"prompt_len": 1, "gen_len": 1, "arrival_step": 0}
    fields = {"arrival_step": 0, **fields}
    if unknown := set(fields) - set(least):
        raise ValueError(f"unknown field {min(unknown)!r}; the fields are {', '.join(least)}")
    for name, low in least.items():
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"{name} must be an integer from {low} on, got {value!r}")
    return TraceEntry(**fields)


class Trace:
    """Replays entries on an engine that nothing else uses; prompts are random token ids, seeded."""

    def __init__(
        self, engine: LLMEngine, entries: Sequence[TraceEntry], shared_prefix: int = 0, seed: int = 0
    ) -> None:
        """shared_prefix: number of first tokens that are the same in all prompts."""
        self.engine = engine
        self.entries = entries
        self._shared_prefix = shared_prefix
        self._rng = np.random.default_rng(seed)

    def measure(self, repeat: int = 1) -> TraceResult:
        """The run of median duration of `repeat` runs, each with prompts of its own.

        Raises ValueError for an entry that can never fit the context or the KV cache, before anything runs.
        """
        results = [self._run() for _ in range(repeat)]
        seconds = median_low(result.seconds for result in results)
        return next(result for result in results if result.seconds == seconds)

    def _run(self) -> TraceResult:
        engine = self.engine
        requests = {f"trace-{i}": RequestTimes(entry) for i, entry in enumerate(self.entries)}
        lengths = [entry.prompt_len for entry in self.entries]
        self._submit(
            requests, random_prompts(self._rng, engine.runner.vocab_size, lengths, self._shared_prefix)
        )
        coming = deque(sorted(requests.values(), key=lambda request: request.entry.arrival_step))
        before, first_step = engine.stats, engine.scheduler.step
        kv_use = 0.0
        start = now = time.perf_counter()
        while engine.has_unfinished:
            step_start = now
            outputs = engine.step()
            now = time.perf_counter()
            step = engine.scheduler.step - 1 - first_step  # the scheduler skips steps in which nothing runs
            while coming and coming[0].entry.arrival_step <= step:
                coming.popleft().arrival = step_start
            for output in outputs:
                request = requests[output.request_id]
                request.seconds = now - request.arrival
                request.num_steps = step + 1 - request.entry.arrival_step
                request.first_token_seconds = request.first_token_seconds or request.seconds
            kv_use = max(kv_use, engine.block_manager.usage)
        return _result(list(requests.values()), before, engine.stats, now - start, kv_use)

    def _submit(self, requests: dict[str, RequestTimes], prompts: Sequence[Sequence[int]]) -> None:
        groups = []
        for i, (request_id, prompt) in enumerate(zip(requests, prompts, strict=True)):
            entry = self.entries[i]
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=entry.gen_len)
            length = entry.prompt_len + entry.gen_len
            if length > self.engine.max_model_len:
                raise ValueError(
                    f"request {i + 1}: {length} tokens are more than max_model_len {self.engine.max_model_len}"
                )
            try:
                groups.append(self.engine.prepare(request_id, prompt, params, entry.arrival_step))
            except ValueError as error:
                raise ValueError(f"request {i + 1}: {error}") from None
        for group in groups:
            self.engine.submit(group)


def _result(
    requests: list[RequestTimes], before: EngineStats, after: EngineStats, seconds: float, kv_use: float
) -> TraceResult:
    hits, queries = after.prefix_hits - before.prefix_hits, after.prefix_queries - before.prefix_queries
    return TraceResult(
        requests,
        after.steps - before.steps,
        seconds,
        after.preemptions - before.preemptions,
        hits / max(1, queries),
        kv_use,
    )
