"""What a profiled run spent its time on, by operation and by thread, against what the machine could do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

from rvllm import _core
from rvllm.engine import LLMEngine

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rvllm.config import EngineConfig, ModelConfig
    from rvllm.model_runner import ModelRunner
    from rvllm.tokenizer import Tokenizer

_MAX_SPANS = 2**18  # kept for the trace; what comes later counts, but is not kept


class Operation(NamedTuple):
    """Totals of one operation."""

    name: str
    calls: int
    seconds: float
    num_bytes: float  # of weights and KV cache, read or written
    macs: float  # multiply-accumulates
    busy_seconds: list[float]  # of each thread, the engine's own first


class Profile:
    """Collects while the model runs. LLM(profile=True) has one; not to be read while a step runs.

    bytes_per_second, macs_per_second: the ceilings, reading memory and multiplying int8, with all threads.
    """

    def __init__(self, backend: _core.Backend) -> None:
        """Measures the ceilings, which takes about 0.2 s. The model must run on self.backend."""
        self.backend = _core.ProfiledBackend(backend)
        self.bytes_per_second, self.macs_per_second = self.backend.measure_ceilings()
        self.reset()

    def reset(self) -> None:
        """Forgets everything so far."""
        self.backend.reset()
        self._spans: list[tuple[str, int, int]] = []  # (name, start, stop), ns of the profiler's clock
        self._num_lost = 0
        self.reset_totals()

    def reset_totals(self) -> None:
        """Begins the next table(). The trace goes on."""
        self.backend.reset_totals()
        self.num_native_calls = self.num_tokens = self._step_ns = self._native_ns = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step of the engine, Python and native code."""
        start = _core.now_ns()
        try:
            yield
        finally:
            self._step_ns += self._add_span("step", start)

    @contextmanager
    def native_call(self, num_requests: int, num_tokens: int) -> Iterator[None]:
        """Around a native call, inside of a step."""
        start = _core.now_ns()
        try:
            yield
        finally:
            self._native_ns += self._add_span(f"native: {num_requests} requests, {num_tokens} tokens", start)
            self.num_native_calls += 1
            self.num_tokens += num_tokens

    def _add_span(self, name: str, start: int) -> int:
        stop = _core.now_ns()
        if len(self._spans) < _MAX_SPANS:
            self._spans.append((name, start, stop))
        else:
            self._num_lost += 1
        return stop - start

    @property
    def seconds(self) -> float:
        """Of all steps together; what is done between them is not the engine's."""
        return self._step_ns / 1e9

    @property
    def native_seconds(self) -> float:
        """Of all native calls together; the rest of `seconds` is Python's."""
        return self._native_ns / 1e9

    @property
    def python_share(self) -> float:
        """Share of the steps' time that is spent outside of native calls, from 0 to 1."""
        return 1 - self._native_ns / self._step_ns if self._step_ns else 0.0

    def operations(self) -> list[Operation]:
        """Those that ran, slowest first."""
        operations = [
            Operation(name, calls, ns / 1e9, num_bytes, macs, [t / 1e9 for t in busy])
            for name, calls, ns, num_bytes, macs, busy in self.backend.rows()
            if calls > 0
        ]
        return sorted(operations, key=lambda operation: -operation.seconds)

    def table(self) -> str:
        """The report, in lines: ceilings, operations, what lies between and outside of them, threads."""
        total, native, operations = self.seconds, self.native_seconds, self.operations()
        num_threads = self.backend.num_threads
        lines = [
            f"profile: {self.num_native_calls} native calls, {self.num_tokens} tokens, {num_threads} threads",
            f"ceilings: reading memory {self.bytes_per_second / 1e9:.1f} GB/s, "
            f"multiplying int8 {self.macs_per_second / 1e9:.1f} GMAC/s",
            "",
            f"{'operation':22}{'calls':>8}{'time s':>10}{'share':>8}{'busy':>7}"
            f"{'GB':>9}{'GB/s':>8}{'of max':>8}{'GMAC':>10}{'GMAC/s':>8}{'of max':>8}",
        ]
        for op in operations:
            lines.append(
                f"{op.name:22}{op.calls:8}{op.seconds:10.4f}{_percent(op.seconds, total, 8)}"
                f"{_percent(sum(op.busy_seconds), op.seconds * num_threads, 7)}"
                f"{_rate(op.num_bytes, op.seconds, self.bytes_per_second, 9)}"
                f"{_rate(op.macs, op.seconds, self.macs_per_second, 10)}".rstrip()
            )
        rest = native - sum(op.seconds for op in operations)
        for name, seconds in (("rest of native calls", rest), ("Python", total - native), ("total", total)):
            lines.append(f"{name:30}{seconds:10.4f}{_percent(seconds, total, 8)}")
        lines += ["", f"{'thread':22}{'busy s':>18}{'share':>8}"]
        for i in range(num_threads):
            seconds = sum(op.busy_seconds[i] for op in operations)
            lines.append(f"{i:<22}{seconds:18.4f}{_percent(seconds, total, 8)}")
        return "\n".join(lines)

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes Chrome's trace events (chrome://tracing, ui.perfetto.dev), a row for each thread. Raises OSError.

        The engine's row holds steps, in them native calls, in them operations; those of the other threads hold
        their work. otherData.num_lost: slices that came too late to be kept.
        """
        names = [row[0] for row in self.backend.rows()]
        threads = self.backend.thread_slices()
        starts = [start for _, start, _ in self._spans]
        starts += [int(slices[0, 1]) for slices, _ in threads if len(slices)]
        origin = min(starts, default=0)
        with Path(path).open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(_metadata("process_name", 0, "rvllm"))
            for thread in range(len(threads)):
                name = "thread 0 (engine)" if thread == 0 else f"thread {thread}"
                file.write(",\n" + _metadata("thread_name", thread, name))
            for name, start, stop in self._spans:
                file.write(",\n" + _event(name, "step", 0, start - origin, stop - origin))
            num_lost = self._num_lost
            for thread, (slices, num_lost_here) in enumerate(threads):
                _write_slices(file, slices, names, "operation" if thread == 0 else "work", thread, origin)
                num_lost += num_lost_here
            file.write(f'\n], "otherData": {{"num_lost": {num_lost}}}}}\n')


class ProfiledEngine(LLMEngine):
    """An engine whose steps are timed."""

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        tokenizer: Tokenizer,
        runner: ModelRunner,
        profile: Profile,
    ) -> None:
        super().__init__(model_config, engine_config, tokenizer, runner)
        self._profile = profile

    def advance(self) -> None:
        with self._profile.step():
            super().advance()

    def get_logits(self, token_ids: Sequence[int], first: int = 0) -> NDArray[np.float32]:
        with self._profile.step():
            return super().get_logits(token_ids, first)


def _write_slices(
    file: TextIO, slices: NDArray[np.int64], names: Sequence[str], category: str, thread: int, origin: int
) -> None:
    for operation, start, stop in slices.tolist():
        file.write(",\n" + _event(names[operation], category, thread, start - origin, stop - origin))


def _event(name: str, category: str, thread: int, start: int, stop: int) -> str:
    """A complete event; times are nanoseconds here and microseconds there."""
    return (
        f'{{"name": {json.dumps(name)}, "cat": "{category}", "ph": "X", "pid": 1, "tid": {thread}, '
        f'"ts": {start / 1e3:.3f}, "dur": {(stop - start) / 1e3:.3f}}}'
    )


def _metadata(kind: str, thread: int, name: str) -> str:
    return json.dumps({"name": kind, "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}})


def _percent(part: float, whole: float, width: int) -> str:
    return f"{100 * part / whole if whole > 0 else 0.0:{width - 2}.1f} %"


def _rate(amount: float, seconds: float, ceiling: float, width: int) -> str:
    """Giga, giga a second and percent of the ceiling, or blanks where the operation has none."""
    if amount == 0 or seconds == 0:
        return " " * (width + 16)
    rate = amount / seconds
    return f"{amount / 1e9:{width}.3f}{rate / 1e9:8.1f}{_percent(rate, ceiling, 8)}"
