"""Measure the time to open GGUF files (metadata parsed, every tensor checked and viewed); medians in milliseconds.

python scripts/bench_open.py [--repeat N] [FILE ...]      default: the two models that the tests use
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from rvllm.gguf_file import GGUFFile
from rvllm.models import KNOWN_MODELS, pull


def time_open(path: Path) -> float:
    """Seconds."""
    start = time.perf_counter()
    GGUFFile(path)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to open GGUF files.")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--repeat", type=int, default=11)
    arguments = parser.parse_args()
    for path in arguments.files or [pull(name) for name in KNOWN_MODELS]:
        seconds = [time_open(path) for _ in range(arguments.repeat)]
        median, first = statistics.median(seconds) * 1e3, seconds[0] * 1e3
        print(f"{path.name}: median {median:.1f} ms of {len(seconds)}, first {first:.1f} ms")


if __name__ == "__main__":
    main()
