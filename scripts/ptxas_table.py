"""Show what each CUDA kernel takes of a GPU, from the output of a build with NVCC_APPEND_FLAGS=-Xptxas=-v.

    NVCC_APPEND_FLAGS=-Xptxas=-v pip wheel -v --no-deps . 2>&1 | python scripts/ptxas_table.py

One line a kernel, the worst of all architectures: registers a thread, static shared memory a block, bytes spilled to
local memory. Exits with 1 when a kernel spills, or when the output names no kernel.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


@dataclass
class Kernel:
    registers: int = 0
    shared_bytes: int = 0
    spill_bytes: int = 0
    archs: set[str] = field(default_factory=set)
    spilling: set[str] = field(default_factory=set)


def parse(lines: Iterable[str]) -> dict[str, Kernel]:
    """The kernels by their mangled names."""
    kernels: dict[str, Kernel] = {}
    kernel, arch = Kernel(), ""
    for line in lines:
        if entry := ENTRY.search(line):
            kernel, arch = kernels.setdefault(entry[1], Kernel()), entry[2]
            kernel.archs.add(arch)
        elif spills := SPILLS.search(line):
            spilled = int(spills[2]) + int(spills[3])
            kernel.spill_bytes = max(kernel.spill_bytes, spilled)
            if spilled:
                kernel.spilling.add(arch)
        elif used := USED.search(line):
            kernel.registers = max(kernel.registers, int(used[1]))
            if shared := SHARED.search(line):
                kernel.shared_bytes = max(kernel.shared_bytes, int(shared[1]))
    return kernels


def readable(names: list[str]) -> list[str]:
    """The names as in the source, without namespaces and parameters."""
    if not shutil.which("c++filt"):
        return names
    output = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout
    short = [re.sub(r"\(anonymous namespace\)::|rvllm::|^void ", "", line) for line in output.splitlines()]
    return [line.split(">(")[0] + ">" if ">(" in line else line.split("(")[0] for line in short]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", nargs="?", type=argparse.FileType(), default=sys.stdin)
    kernels = parse(parser.parse_args().log)
    if not kernels:
        print("the output names no kernel: was it built with NVCC_APPEND_FLAGS=-Xptxas=-v?", file=sys.stderr)
        return 1
    names = readable(list(kernels))
    print(f"{'registers':>9} {'shared':>6} {'spilled':>7}  kernel")
    for name, kernel in sorted(zip(names, kernels.values(), strict=True)):
        note = f"  (spills on sm_{', sm_'.join(sorted(kernel.spilling))})" if kernel.spilling else ""
        print(f"{kernel.registers:>9} {kernel.shared_bytes:>6} {kernel.spill_bytes:>7}  {name}{note}")
    archs = sorted({arch for kernel in kernels.values() for arch in kernel.archs}, key=int)
    spilling = sum(bool(kernel.spilling) for kernel in kernels.values())
    print(f"{len(kernels)} kernels for sm_{', sm_'.join(archs)}; {spilling} of them spill")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
