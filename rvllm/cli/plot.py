"""Draws what the benchmarks measured. The only place that needs matplotlib, an optional dependency."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rvllm.cli.errors import CommandError

if TYPE_CHECKING:
    from rvllm.load import RequestResult


def require_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib: pip install 'rvllm[bench]'")


def plot(rows: Sequence[dict[str, float]], path: Path) -> None:
    """Tokens per second of prefill and decode over the batch size, in the format of path's suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    batch_sizes = [row["B"] for row in rows]
    for axes, key, title in zip(figure.subplots(1, 2), ("S_PP", "S_TG"), ("prefill", "decode"), strict=True):
        speeds = [row[key] for row in rows]
        axes.plot(batch_sizes, speeds, marker="o")
        axes.set(title=title, xlabel="requests together", ylabel="tokens/s", ylim=(0, 1.1 * max(speeds)))
        axes.set_xscale("log", base=2)
        axes.set_xticks(batch_sizes, [f"{size:g}" for size in batch_sizes])
        axes.grid(alpha=0.3)
    figure.suptitle(f"prompt {rows[0]['PP']:g}, generated {rows[0]['TG']:g} tokens")
    figure.savefig(path, dpi=150)


def plot_load(results: dict[str, list[RequestResult]], path: Path) -> None:
    """Shares of requests by time to first token and of gaps by inter-token latency, one line a server."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = (("ttft", "time to first token"), ("itl", "inter-token latency"), ("e2el", "end-to-end latency"))
    for axes, (metric, title) in zip(figure.subplots(1, 3), panels, strict=True):
        for name, runs in results.items():
            rows = [result.latencies()[metric] for result in runs if result.error is None]
            values = np.sort(1000 * np.array([value for row in rows for value in row]))
            axes.plot(values, np.arange(1, len(values) + 1) / max(1, len(values)), label=name)
        axes.set(title=title, xlabel="ms", ylabel="share", ylim=(0, 1.02))
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)
