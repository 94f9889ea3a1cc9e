"""Peer: an engine under comparison. One class an engine, each run by worker.py in a process of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Setting = Mapping[str, object]


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


@dataclass(frozen=True)
class Options:
    """What holds for all measurements. step_tokens: prompt tokens computed in one step.

    load: the one with the most requests; the others differ from it in their number alone.
    """

    model: str
    vocab_size: int
    threads: int
    step_tokens: int
    seed: int
    load: Load
    isa: str | None = None


class Peer(ABC):
    """Loads one model when it is made."""

    settings: tuple[Setting, ...] = ({},)  # to be tried on every load: the best one counts

    @classmethod
    def environment(cls, options: Options) -> dict[str, str]:
        """Variables that its process must be started with, unless they are set already."""
        return {}

    @abstractmethod
    def version(self) -> str:
        """Version and build, in one line."""

    @abstractmethod
    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The next token ids, each the likeliest: those of another engine, if both compute the same model."""

    @abstractmethod
    def measure(self, load: Load, setting: Setting) -> tuple[float, float]:
        """Seconds of prefill, until every request has its first token, and of gen_len decode steps.

        Raises ValueError or RuntimeError if the engine cannot run the load.
        """
