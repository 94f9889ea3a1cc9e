"""Build the test of kernels with the flags of setup.py: build_test_kernels.py COMPILER MACHINE OUTPUT [FLAG...]."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [
    "tests/native/test_attention_kernels.cpp",
    "tests/native/test_attention_plan.cpp",
    "tests/native/test_kernels.cpp",
    "tests/native/test_linear_kernels.cpp",
    "csrc/quant.cpp",
    "csrc/quant_iq.cpp",
    "csrc/cpu/attention_plan.cpp",
    "csrc/cpu/cpu_features.cpp",
    "csrc/cpu/repack.cpp",
    "csrc/cpu/isa/scalar.cpp",
]


def setup_constant(name: str):
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise SystemExit(f"setup.py: no {name}")


def check_symbols(source: str, object_file: str) -> None:
    """A weak symbol compiled for a newer processor could become the one copy that all others call."""
    symbols = subprocess.check_output(["nm", "-C", object_file], text=True).splitlines()
    weak = [line for line in symbols if re.search(r" [uvVwW] ", line)]
    if weak or not any(" T rvllm::kernels_" in line for line in symbols):
        raise SystemExit(f"{source}: weak symbols, or no kernel table: {weak}")


def main(compiler: str, machine: str, output: str, *more_flags: str) -> None:
    isa_flags = setup_constant("ISA_FLAGS").get(setup_constant("MACHINES").get(machine, machine), {})
    flags = ["-std=c++17", "-Icsrc", *setup_constant("CXX_FLAGS"), *more_flags]

    def compile_one(source: str, object_file: str) -> str:
        command = [compiler, *flags, *isa_flags.get(source, []), "-c", source, "-o", object_file]
        subprocess.run(command, cwd=ROOT, check=True)
        if source in isa_flags and not any(flag.startswith("-fsanitize") for flag in more_flags):
            check_symbols(source, object_file)
        return object_file

    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(2) as pool:
        sources = [*SOURCES, *isa_flags]
        objects = [f"{directory}/{i}.o" for i in range(len(sources))]
        subprocess.run(
            [compiler, *more_flags, *pool.map(compile_one, sources, objects), "-o", output], check=True
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
