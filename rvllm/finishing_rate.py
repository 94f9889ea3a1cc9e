"""FinishingRate: how fast requests finish, and so when those that were refused may come again."""

from __future__ import annotations

import math
import time
from collections import deque

_WINDOW = 64  # finished requests that are looked back on
_MAX_RETRY_AFTER = 60


class FinishingRate:
    """Measured on the time that the engine is at work, so that idle hours do not count."""

    def __init__(self) -> None:
        self._busy_seconds = 0.0
        self._finished: deque[float] = deque([0.0], maxlen=_WINDOW + 1)  # busy_seconds at the end of each
        self._promised = 0.0  # time at which the one refused last may come again

    def add_busy(self, seconds: float) -> None:
        self._busy_seconds += seconds

    def add_finished(self, count: int) -> None:
        self._finished.extend([self._busy_seconds] * count)

    @property
    def seconds_each(self) -> float:
        """Seconds from one finished request to the next; before the first, the seconds spent so far."""
        return (self._busy_seconds - self._finished[0]) / max(1, len(self._finished) - 1)

    def retry_after(self, count: int) -> int:
        """Whole seconds until `count` places are free for this caller, behind the callers refused before it."""
        now = time.monotonic()
        self._promised = max(self._promised, now) + count * self.seconds_each
        self._promised = min(self._promised, now + _MAX_RETRY_AFTER)
        return max(1, math.ceil(self._promised - now))
