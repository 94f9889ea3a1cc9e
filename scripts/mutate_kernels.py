"""Break the CUDA or Metal kernels one place at a time, and report which breaks the emulator's tests do not notice.

    python scripts/mutate_kernels.py                         every place of the CUDA kernels
    python scripts/mutate_kernels.py --kind barrier index --file norm.cu --sample 40
    python scripts/mutate_kernels.py --device metal --sample 40

Kinds: barrier (removed), index (one further), bound (< becomes <=, and the reverse), scale (1 % more), sign (+= becomes
-=). A mutant that does not compile does not count. For a removed barrier the tests of CUDA run under ThreadSanitizer as
well, since the emulator may happen to run threads in an order that hides it. Survivors are printed, also those that
change no result; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Target:
    folder: str
    build: str
    suffixes: set[str]
    host_code: set[str]
    # By a variant of run_sanitized.py; tried in turn, the quickest first, until one fails.
    tests: dict[str, list[list[str]]]


CUDA_TESTS = {
    "plain": [
        ["tests/emu/test_cuda_ops.py", "-k", "emulator-random"],
        ["tests/emu/test_cuda_ops.py", "-k", "emulator"],
        ["tests/emu/test_cuda_tokens.py", "-k", "emulator-random"],
    ],
    "tsan": [["tests/emu/test_cuda_ops.py"]],
}
METAL_TESTS = {
    "metal-plain": [
        ["tests/emu/test_metal_kernels.py", "-k", "metal-random"],
        ["tests/emu/test_metal_kernels.py", "-k", "not apple-gpu"],
        ["tests/emu/test_metal_tokens.py", "-k", "not apple-gpu"],
    ],
}
CUDA_HOST_CODE = {
    "blas.h",
    "cuda_backend.cu",
    "cuda_backend.h",
    "cuda_kv_cache.h",
    "cuda_products.cu",
    "cuda_weights.h",
    "device_buffer.h",
    "gpu.h",
    "kernels.h",
    "operations.h",
    "step_graphs.h",
}
METAL_HOST_CODE = {
    "kernel_args.h",
    "metal_backend.h",
    "metal_device.h",
    "metal_kv_cache.h",
    "metal_weights.h",
}
TARGETS = {
    "cuda": Target(
        "csrc/cuda", "tests/emu/build_emulated.py", {".cu", ".inl", ".h"}, CUDA_HOST_CODE, CUDA_TESTS
    ),
    "metal": Target(
        "csrc/metal", "tests/emu/build_emulated_metal.py", {".metal", ".h"}, METAL_HOST_CODE, METAL_TESTS
    ),
}


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int  # from 1
    kind: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind}: {self.before.strip()}  ->  {self.after.strip()}"


def matching_bracket(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += {"[": 1, "]": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return -1


def mutate_barrier(line: str) -> list[str]:
    return [
        line[: m.start()] + line[m.end() :]
        for m in re.finditer(r"(__sync(threads|warp)|(threadgroup|simdgroup)_barrier)\([^()]*\);", line)
    ]


def mutate_index(line: str) -> list[str]:
    """Every subscript of an expression, but not the extents of a declaration, captures or the operands of PTX."""
    if '"r"(' in line or '"+r"(' in line:
        return []
    if re.match(r"\s*(const |constexpr |static |using |__shared__ )?[\w:<>]+ [\w, ]*\w\[[^=]*\];", line):
        return []
    mutants = []
    for m in re.finditer(r"[\w)\]]\[", line):
        end = matching_bracket(line, m.end() - 1)
        inside = line[m.end() : end]
        declares = re.search(
            r"\(&\w*\)(\[[^]]*\])*$|^\s*(const )?[\w:]+ \w+(\[\w+\])*$|= \{\}, \w+$", line[: m.end() - 1]
        )
        if end > 0 and inside and not declares:
            mutants.append(f"{line[: m.end()]}{inside} + 1{line[end:]}")
    return mutants


def mutate_bound(line: str) -> list[str]:
    if "template" in line or "#" in line or "<<" in line:
        return []
    swaps = {" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > "}
    return [line[: m.start()] + swaps[m[0]] + line[m.end() :] for m in re.finditer(r" [<>]=? ", line)]


def mutate_scale(line: str) -> list[str]:
    mutants = [
        line[: m.end()] + " * 1.01f" + line[m.end() :]
        for m in re.finditer(r"\b(\w*scale|d|unit|eps|\w*cap)\b(?= \*|;|\))", line)
        if re.search(r"[*=] $|\($", line[: m.start()]) and "int" not in line
    ]
    literals = re.finditer(r"(?<![\w.])\d+\.\d*(e-?\d+)?f", line)
    return mutants + [
        f"{line[: m.start()]}({m[0]} * 1.01f){line[m.end() :]}" for m in literals if float(m[0][:-1])
    ]


def mutate_sign(line: str) -> list[str]:
    if "for (" in line:
        return []
    return [line[: m.start()] + " -= " + line[m.end() :] for m in re.finditer(r" \+= ", line)]


KINDS = {
    "barrier": mutate_barrier,
    "index": mutate_index,
    "bound": mutate_bound,
    "scale": mutate_scale,
    "sign": mutate_sign,
}


def mutants_of(path: Path, kinds: list[str]) -> list[Mutant]:
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        code = line.split("//")[0].rstrip()
        if not code or code.lstrip().startswith(("#", "static_assert")):
            continue
        found += [
            Mutant(path.name, number, kind, line, m) for kind in kinds for m in KINDS[kind](code) if m != code
        ]
    return found


class Workplace:
    """A copy of the tree, in which one mutant at a time lives."""

    def __init__(self, directory: Path, target: Target) -> None:
        self.directory = directory
        self.target = target
        for name in ("csrc", "tests", "rvllm", "scripts"):
            shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "setup.py"):
            shutil.copy(ROOT / name, directory / name)

    def passes(self, variant: str) -> bool | None:
        """Whether the tests pass; None when the kernels do not compile."""
        env = {
            **os.environ,
            "PYTHONPATH": str(self.directory),
            "RVLLM_EMU_BUILD": str(self.directory / "build"),
        }
        build = [sys.executable, self.target.build, variant.removeprefix("metal-")]
        if subprocess.run(build, cwd=self.directory, env=env, capture_output=True).returncode:
            return None
        pytest = [sys.executable, "tests/emu/run_sanitized.py", variant, "-x", "-q", "-p", "no:cacheprovider"]
        for tests in self.target.tests[variant]:
            try:
                result = subprocess.run(
                    [*pytest, *tests], cwd=self.directory, env=env, capture_output=True, timeout=600
                )
            except subprocess.TimeoutExpired:
                return False
            if result.returncode:
                return False
        return True

    def survives(self, mutant: Mutant) -> bool | None:
        path = self.directory / self.target.folder / mutant.file
        original = path.read_text()
        lines = original.splitlines()
        lines[mutant.line - 1] = mutant.after
        path.write_text("\n".join(lines) + "\n")
        try:
            plain, *tsan = self.target.tests
            survives = self.passes(plain)
            return self.passes(tsan[0]) if survives and tsan and mutant.kind == "barrier" else survives
        finally:
            path.write_text(original)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=list(TARGETS), default="cuda")
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument(
        "--file", nargs="+", help="names of files in csrc/DEVICE (default: all with device code)"
    )
    parser.add_argument("--sample", type=int, help="only so many, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    args = parser.parse_args()

    target = TARGETS[args.device]
    files = sorted(
        p
        for p in (ROOT / target.folder).iterdir()
        if p.suffix in target.suffixes and p.name not in target.host_code
    )
    if args.file:
        files = [p for p in files if p.name in args.file]
    mutants = [m for path in files for m in mutants_of(path, args.kind)]
    if args.sample and args.sample < len(mutants):
        mutants = sorted(
            random.Random(args.seed).sample(mutants, args.sample), key=lambda m: (m.file, m.line)
        )
    if args.list:
        print(*mutants, sep="\n")
        return 0

    survived, caught, invalid = 0, 0, 0
    with tempfile.TemporaryDirectory() as directory:
        workplace = Workplace(Path(directory), target)
        variants = list(target.tests)[: 2 if any(m.kind == "barrier" for m in mutants) else 1]
        for variant in variants:
            if not workplace.passes(variant):
                print(f"the tests do not pass before anything is changed ({variant})", file=sys.stderr)
                return 2
        for i, mutant in enumerate(mutants, 1):
            survives = workplace.survives(mutant)
            invalid += survives is None
            caught += survives is False
            if survives:
                survived += 1
                print(f"[{i}/{len(mutants)}] SURVIVES {mutant}", flush=True)
    print(f"{caught} of {caught + survived} mutants caught; {invalid} do not compile")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
