"""Peer: an engine under comparison. One class an engine, each run by worker.py in a process of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

Setting = Mapping[str, object]


@dataclass(frozen=True)
class Options:
    """What holds for all measurements. step_tokens: prompt tokens computed in one step."""

    model: str
    threads: int
    max_batch_size: int
    step_tokens: int
    seed: int
    isa: str | None = None


@dataclass(frozen=True)
class Load:
    """batch_size requests, prefilled, then decoded together; lengths in tokens, as in `rvllm bench`.

    copy_prefix: an engine that cannot share a prefix among requests computes it once and copies it.
    """

    batch_size: int
    prompt_len: int
    gen_len: int
    depth: int
    shared_prefix: int
    copy_prefix: bool


class Peer(ABC):
    """Loads one model when it is made."""

    settings: tuple[Setting, ...]  # to be tried on every load: the best one counts

    @abstractmethod
    def version(self) -> str:
        """Version and build, in one line."""

    @abstractmethod
    def measure(self, load: Load, setting: Setting) -> tuple[float, float]:
        """Seconds of prefill, until every request has its first token, and of gen_len decode steps.

        Raises ValueError or RuntimeError if the engine cannot run the load.
        """
