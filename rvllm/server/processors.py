"""How replicas share the processors that this process may use: whole cores, and no more than one NUMA node each."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path

_SYSTEM = Path("/sys/devices/system")


def processor_shares(replicas: int | str, system: Path = _SYSTEM) -> list[list[int]]:
    """The processors of each replica. replicas: how many, or "numa": one for each node that has processors here.

    Neighbours stay together: threads of a core, then cores of a package, then packages of a node. Raises ValueError for
    more replicas than processors.
    """
    processors = sorted(
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    nodes = _nodes(system)
    if replicas == "numa":
        shares = [[p for p in processors if p in node] for node in nodes]
        return [share for share in shares if share] or [processors]
    count = int(replicas)
    if count > len(processors):
        raise ValueError(f"{count} replicas are more than the {len(processors)} processors at hand")
    places = {p: _place(system, nodes, p) for p in processors}
    cores: dict[tuple[int, ...], list[int]] = {}
    for processor in sorted(processors, key=lambda p: (places[p], p)):
        cores.setdefault(places[processor], []).append(processor)
    # Threads of one core part only when there are more replicas than cores.
    units = list(cores.values()) if count <= len(cores) else [[p] for core in cores.values() for p in core]
    bounds = [len(units) * i // count for i in range(count + 1)]
    return [
        sorted(p for unit in units[start:stop] for p in unit) for start, stop in itertools.pairwise(bounds)
    ]


def pin(processors: Iterable[int]) -> None:
    """Keeps the calling thread, and what it starts from now on, on these processors, where the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, processors)


def format_processors(processors: Iterable[int]) -> str:
    """As in /sys: 0-3,8."""
    runs: list[list[int]] = []
    for processor in sorted(processors):
        if runs and processor == runs[-1][1] + 1:
            runs[-1][1] = processor
        else:
            runs.append([processor, processor])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_processors(text: str) -> set[int]:
    """The other way round."""
    found: set[int] = set()
    for match in re.finditer(r"(\d+)(?:-(\d+))?", text):
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def _nodes(system: Path) -> list[set[int]]:
    """Processors of each NUMA node, in the order of their numbers; those of memory alone are empty."""
    files = sorted(
        (system / "node").glob("node[0-9]*/cpulist"),
        key=lambda file: int(file.parent.name.removeprefix("node")),
    )
    return [parse_processors(file.read_text()) for file in files]


def _place(system: Path, nodes: list[set[int]], processor: int) -> tuple[int, ...]:
    """Node, package and core; a machine that does not tell has a core for each processor."""
    node = next((i for i, processors in enumerate(nodes) if processor in processors), 0)
    topology = system / "cpu" / f"cpu{processor}" / "topology"
    try:
        package, core = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        package, core = 0, processor
    return node, package, core
