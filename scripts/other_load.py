"""What other processes took of the machine while something was measured: with more of it, figures mean less."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class OtherLoad:
    """The share of the machine's processors that went to other processes since it was made.

    measured: processor seconds so far of what is measured, beside the caller's own.
    """

    def __init__(self, measured: Callable[[], float]) -> None:
        self._measured = measured
        self._start = self._now()

    def share(self) -> float:
        wall, idle, own = (b - a for a, b in zip(self._start, self._now(), strict=True))
        capacity = wall * (psutil.cpu_count() or 1)
        return max(0.0, (capacity - idle - own) / capacity)

    def _now(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()._asdict()
        own = time.process_time() + self._measured()
        return time.perf_counter(), times["idle"] + times.get("iowait", 0.0), own
