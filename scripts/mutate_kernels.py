"""Break the CUDA or Metal kernels, or Metal's host code, one place at a time, and report which breaks the emulator's
tests do not notice.

    python scripts/mutate_kernels.py                         every place of the CUDA kernels
    python scripts/mutate_kernels.py --kind barrier index --file norm.cu --sample 40
    python scripts/mutate_kernels.py --file many_tokens.h --format Q4_1 Q6_K Q2_K
    python scripts/mutate_kernels.py --device metal --each 6
    python scripts/mutate_kernels.py --device metal-host --file metal_device.mm

Kinds: barrier (removed), index (one further), bound (< becomes <=, and the reverse), scale (1 % more), sign (+= becomes
-=); of host code those of mutate_host.py. A mutant that does not compile does not count. Only what includes its file is
compiled again, and of the kernels' tests those of its operations run first; what survives them meets all tests. Where a
barrier is not missed, its tests run under ThreadSanitizer as well, since the emulator may happen to run threads in an
order that hides it, and where an index or bound is not, under AddressSanitizer. Prints what came of each mutant
(SURVIVES also where a break changes no result), and a table; the exit status is 1 if any survives.
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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from mutate_host import HOST_KINDS

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Target:
    folder: str
    build: str
    suffixes: set[str]
    others: set[str]  # files that are not broken
    kernels: tuple[str, str]  # their tests, and which of them are one schedule's
    near: dict[str, str]  # by file, which of the former are tried first; all for others
    rest: list[tuple[str, str]]  # what is tried then
    kinds: frozenset[str] = frozenset({"barrier", "index", "bound", "scale", "sign"})
    # By sanitizer, the kinds of mutants that get a second chance to be caught.
    sanitized: dict[str, set[str]] = field(default_factory=dict)


CUDA_NEAR = {
    "activation.cu": "activat",
    "async_copy.h": "test_linear_of_many",
    "attention.cu": "attention",
    "block_products.h": "linear and (Q4_1 or Q6_K or Q2_K or IQ2_S)",
    "dequantize.cu": "cublas or many_tokens",
    "dequantize.h": "cublas",
    "device_math.h": "activat or attention or mixture",
    "elementwise.cu": "test_add or scale_logits or cublas or many_tokens",
    "embedding.cu": "embedding",
    "experts.cu": "mixture",
    "few_tokens.h": "linear and (Q4_1 or Q6_K or IQ2_S)",
    "kv_elements.h": "attention",
    "many_tokens.h": "test_linear_of_many",
    "matvec.cu": "float",
    "mma.h": "linear and (Q4_1 or Q6_K or IQ2_S)",
    "norm.cu": "norm",
    "packed_weights.h": "linear and (Q4_1 or Q6_K or IQ2_S)",
    "quantize.cu": "linear and (Q4_1 or Q6_K or IQ2_S)",
    "quantized_linear.inl": "linear and (Q4_1 or Q6_K or IQ2_S)",
    "rope.cu": "rope",
    "rows.h": "norm or activat",
    "sampling.cu": "argmax",
    "store_kv.cu": "attention",
    "unpack.h": "embedding or test_linear_of_many",
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
METAL_NEAR = {
    "activation.metal": "activat",
    "attention.metal": "attention",
    "dequantize.metal": "mps or whole_numbers",
    "device_math.h": "activat or attention or mixture or norm or float",
    "elementwise.metal": "test_add or scale_logits",
    "embedding.metal": "embedding",
    "experts.metal": "mixture or experts",
    "kv_elements.h": "attention",
    "matmul.metal": "simdgroups or whole_numbers",
    "matvec.metal": "float",
    "norm.metal": "norm",
    "quantize.metal": "linear and (Q4_1 or Q6_K or IQ2_S or finite) or mixture",
    "quantized_linear.metal": "linear and (Q4_1 or Q6_K or IQ2_S) or mixture",
    "rope.metal": "rope",
    "sampling.metal": "argmax",
    "store_kv.metal": "attention",
    "unpack.h": "embedding or test_linear_of_many",
}
METAL_HOST_CODE = {
    "kernel_args.h",
    "metal_backend.h",
    "metal_device.h",
    "metal_kv_cache.h",
    "metal_weights.h",
}
METAL_KERNEL_CODE = {
    "device_math.h",
    "kernel_args.h",
    "kv_elements.h",
    "metal_backend.h",
    "metal_device.h",
    "metal_weights.h",
    "unpack.h",
}
TARGETS = {
    "cuda": Target(
        "csrc/cuda", "tests/emu/build_emulated.py", {".cu", ".inl", ".h"}, CUDA_HOST_CODE,
        ("tests/emu/test_cuda_ops.py", "emulator-random"), CUDA_NEAR,
        [
            ("tests/emu/test_cuda_ops.py", "emulator"),
            ("tests/emu/test_cuda_steps.py", "emulator"),
            ("tests/emu/test_cuda_tokens.py", "emulator-random"),
        ],
        sanitized={"tsan": {"barrier"}, "asan": {"index", "bound"}},
    ),
    "metal": Target(
        "csrc/metal", "tests/emu/build_emulated_metal.py", {".metal", ".h"}, METAL_HOST_CODE,
        ("tests/emu/test_metal_kernels.py", "metal-random"), METAL_NEAR,
        [
            ("tests/emu/test_metal_kernels.py", "not apple-gpu"),
            ("tests/emu/test_metal_tokens.py", "not apple-gpu"),
        ],
    ),
    "metal-host": Target(
        "csrc/metal", "tests/emu/build_emulated_metal.py", {".mm", ".cpp", ".h"}, METAL_KERNEL_CODE,
        ("tests/emu/test_metal_host.py", "not are_found and not stand_ins"), {},
        [
            ("tests/emu/test_metal_kernels.py", "metal-random"),
            ("tests/emu/test_metal_kernels.py", "not apple-gpu"),
            ("tests/emu/test_metal_tokens.py", "not apple-gpu"),
        ],
        kinds=frozenset(HOST_KINDS),
    ),
}  # fmt: skip


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
        for m in re.finditer(r"(__sync(threads|warp)|(threadgroup|simdgroup)_barrier)\([^()]*\)(?=;)", line)
    ]


def mutate_index(line: str) -> list[str]:
    """Every subscript of an expression, but not the extents of a declaration, captures or the operands of PTX."""
    if re.search(r'"[=+]?r"\(', line):
        return []
    if re.match(
        r"\s*(const |constexpr |static |using |typename |__shared__ )?[\w:<>]+ [\w, ]*\w\[[^=]*\];", line
    ):
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
        for m in re.finditer(r"\b(\w*scale|d|unit|eps|\w*cap)\b(?= \*|;|\))(?! \* \(?kUnit)", line)
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
    **HOST_KINDS,
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


def keep_formats(source: str, formats: list[str]) -> str:
    """A quantized_linear*.cu with a function that throws in place of every other format's kernels."""

    def replace(match: re.Match[str]) -> str:
        if match[1] in formats:
            return match[0]
        return f'template <> {match[0][9:-1]} {{ throw std::logic_error("{match[1]} was left out"); }}'

    found = re.sub(r"template void quantized_linear_of<Format(\w+)>\(.*\);", replace, source)
    return f"#include <stdexcept>\n{found}"


class Workplace:
    """A copy of the tree, in which one mutant at a time lives. With formats, products have only their kernels."""

    def __init__(
        self, directory: Path, target: Target, only_near: bool = False, formats: list[str] | None = None
    ) -> None:
        self.directory = directory
        self.target = target
        self.only_near = only_near or bool(formats)
        self.formats = formats or []
        for name in ("csrc", "tests", "rvllm", "scripts"):
            shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "setup.py"):
            shutil.copy(ROOT / name, directory / name)
        if target.sanitized and (built := ROOT / "build/emu").exists():
            # What is compiled there need not be again, except for Metal, whose dependencies name that folder.
            shutil.copytree(built, directory / "build", ignore=shutil.ignore_patterns("metal"))
        if formats:
            for path in (directory / "csrc/cuda").glob("quantized_linear*.cu"):
                path.write_text(keep_formats(path.read_text(), formats))

    def passes(self, variant: str, tests: list[tuple[str, str]]) -> bool | None:
        """Whether tests pass that are tried in turn until one fails; None when the kernels do not compile."""
        env = {
            **os.environ,
            "PYTHONPATH": str(self.directory),
            "RVLLM_EMU_BUILD": str(self.directory / "build"),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # they take longer than most of the tests
        }
        options = {"cwd": self.directory, "env": env, "capture_output": True}
        if subprocess.run([sys.executable, self.target.build, variant], **options).returncode:
            return None
        name = f"metal-{variant}" if self.target.folder == "csrc/metal" else variant
        pytest = [sys.executable, "tests/emu/run_sanitized.py", name, "-x", "-q", "-p", "no:cacheprovider"]
        for path, choice in tests:
            try:
                result = subprocess.run([*pytest, path, "-k", choice], **options, timeout=600)
            except subprocess.TimeoutExpired:
                return False
            if result.returncode:
                return False
        return True

    def near(self, file: str) -> list[tuple[str, str]]:
        path, schedule = self.target.kernels
        own = self.own_tests(file)
        return [(path, f"{schedule} and ({own})" if own else schedule)]

    def own_tests(self, file: str) -> str | None:
        own = self.target.near.get(file)
        return f"({own}) and ({' or '.join(self.formats)})" if own and self.formats else own

    def rest(self, file: str) -> list[tuple[str, str]]:
        if not self.only_near:
            return self.target.rest
        own = self.own_tests(file)
        return [(self.target.kernels[0], f"not gpu and ({own})")] if own else []

    def survives(self, mutant: Mutant, variant: str) -> bool | None:
        path = self.directory / self.target.folder / mutant.file
        original = path.read_text()
        lines = original.splitlines()
        lines[mutant.line - 1] = mutant.after
        path.write_text("\n".join(lines) + "\n")
        try:
            return self.passes(
                variant, self.near(mutant.file) + (self.rest(mutant.file) if variant == "plain" else [])
            )
        finally:
            path.write_text(original)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=list(TARGETS), default="cuda")
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), help="(default: all of the device)")
    parser.add_argument("--file", nargs="+", help="names of files of the device (default: all)")
    parser.add_argument("--sample", type=int, help="only so many, drawn at random")
    parser.add_argument("--each", type=int, help="only so many of each file and kind, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--near",
        action="store_true",
        help="with the tests of a file's own operations alone, in all schedules",
    )
    parser.add_argument(
        "--format", nargs="+", help="of CUDA's quantized products: with these types' kernels and tests alone"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    args = parser.parse_args()

    target = TARGETS[args.device]
    files = sorted(
        p
        for p in (ROOT / target.folder).iterdir()
        if p.suffix in target.suffixes and p.name not in target.others
    )
    if args.file:
        files = [p for p in files if p.name in args.file]
    draw = random.Random(args.seed)
    mutants = []
    for path in files:
        for kind in args.kind or sorted(target.kinds):
            found = mutants_of(path, [kind])
            mutants += draw.sample(found, min(args.each or len(found), len(found)))
    if args.sample and args.sample < len(mutants):
        mutants = draw.sample(mutants, args.sample)
    mutants.sort(key=lambda m: (m.file, m.line))
    if args.list:
        print(*mutants, sep="\n")
        return 0

    outcomes: dict[Mutant, bool | None] = {}
    with tempfile.TemporaryDirectory() as directory:
        workplace = Workplace(Path(directory), target, args.near, args.format)
        for variant in ("plain", *target.sanitized):
            kinds = target.sanitized.get(variant, set())
            tried = [m for m in mutants if variant == "plain" or (m.kind in kinds and outcomes[m])]
            for file in sorted({m.file for m in tried}):
                if not workplace.passes(variant, workplace.near(file)):
                    print(
                        f"the tests of {file} do not pass before it is changed ({variant})", file=sys.stderr
                    )
                    return 2
            for i, mutant in enumerate(tried, 1):
                outcomes[mutant] = workplace.survives(mutant, variant)
                state = {True: "SURVIVES", False: "caught", None: "does not compile"}[outcomes[mutant]]
                print(f"[{variant} {i}/{len(tried)}] {state} {mutant}", flush=True)
    counts = Counter((m.file, m.kind, survives) for m, survives in outcomes.items())
    print("\n| file | kind | mutants | caught |\n|---|---|---|---|")
    for name, kind in sorted({(m.file, m.kind) for m in mutants}):
        survived, caught = counts[name, kind, True], counts[name, kind, False]
        print(f"| `{name}` | {kind} | {survived + caught} | {caught} |")
    return 1 if any(outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
