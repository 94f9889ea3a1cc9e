"""What this process may use of the machine: processors and memory, within its affinity and control group."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_cpus() -> int:
    """Number of processors this process may run on: affinity, then the CPU quota of its control groups (at least 1)."""
    return max(1, int(min(affine_cpus(), cpu_quota())))


def affine_cpus() -> int:
    """Number of processors that this process's affinity allows."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota() -> float:
    """Processors whose time the control groups grant, such as 1.5; infinity without a limit."""
    quotas = [math.inf]
    for directory in _cgroup_directories("cpu"):
        quota, period = _read_words(directory / "cpu.max") or (
            _read_words(directory / "cpu.cfs_quota_us") + _read_words(directory / "cpu.cfs_period_us")
            or ["max", "100000"]
        )
        if quota not in ("max", "-1") and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas)


def available_memory() -> int:
    """Bytes this process can still allocate: the machine's available memory, or what its control groups leave."""
    available: int = psutil.virtual_memory().available
    for directory in _cgroup_directories("memory"):
        for limit_file, usage_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _read_words(directory / limit_file), _read_words(directory / usage_file)
            if limit and usage and limit[0] != "max":
                used = int(usage[0]) - _page_cache(directory)
                available = min(available, max(0, int(limit[0]) - used))
    return available


def _page_cache(directory: Path) -> int:
    """Bytes of files in a control group's memory: counted as used, but given up when they are needed."""
    words = _read_words(directory / "memory.stat")
    values = dict(zip(words[::2], words[1::2], strict=False))
    # Version 1 has those of the groups below apart.
    total = "total_" if "total_inactive_file" in values else ""
    return sum(int(values.get(f"{total}{kind}_file", 0)) for kind in ("inactive", "active"))


def _cgroup_directories(controller: str) -> list[Path]:
    """This process's control group and those above it, for version 2 and for a version 1 controller."""
    directories: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return directories
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP_ROOT / controller if controllers else _CGROUP_ROOT
        group = root / path.lstrip("/")
        directories += [
            group,
            *(parent for parent in group.parents if parent == root or root in parent.parents),
        ]
    return directories


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
