"""Build csrc/cuda over the emulator: build_emulated.py [plain|asan|tsan] prints the path of a `_cuda` extension module.

Objects are kept in build/emu (or RVLLM_EMU_BUILD) and made again when something they include has changed. A module of
a sanitized variant loads only into a Python that has the sanitizer's library preloaded; `preload(variant)` names it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
INCLUDES = ["-Icsrc", "-Icsrc/emu/cuda/include"]
FLAGS = [
    "-std=c++17",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
    "-g1",
]
EMULATOR = sorted([*CSRC.glob("emu/*.cpp"), *CSRC.glob("emu/cuda/*.cpp")])
CORE = [
    CSRC / "thread_pool.cpp",
    CSRC / "quant.cpp",
    CSRC / "quant_iq.cpp",
]  # what the backend needs of the core
# Only device code and the host code around it are instrumented: the emulator switches stacks underneath.
# Compiling takes longer than running, so that little is optimized.
SANITIZERS = {
    "plain": ["-O1"],
    "asan": ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "tsan": ["-O1", "-fsanitize=thread"],
}
EMULATOR_FLAGS = {"plain": ["-O2"], "asan": ["-O2"], "tsan": ["-O2", "-DRV_EMU_TSAN"]}
LIBRARIES = {"plain": [], "asan": ["libasan.so", "libubsan.so"], "tsan": ["libtsan.so"]}


def compiler() -> list[str]:
    cache = ["ccache"] if shutil.which("ccache") else []
    return [*cache, *shlex.split(os.environ.get("CXX", "g++"))]


def build_directory(variant: str) -> Path:
    directory = Path(os.environ.get("RVLLM_EMU_BUILD", ROOT / "build" / "emu")) / variant
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def preload(variant: str) -> str:
    """The value of LD_PRELOAD that a Python needs to load a module of this variant; empty for none."""
    command = shlex.split(os.environ.get("CXX", "g++"))
    names = [
        subprocess.check_output([*command, f"-print-file-name={name}"], text=True)
        for name in LIBRARIES[variant]
    ]
    return " ".join(name.strip() for name in names)


def up_to_date(target: Path, depfile: Path) -> bool:
    if not target.exists() or not depfile.exists():
        return False
    names = depfile.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    built = target.stat().st_mtime
    return all((ROOT / name).exists() and (ROOT / name).stat().st_mtime <= built for name in names)


def compile_object(variant: str, source: Path, more: list[str]) -> Path:
    emulator = source in EMULATOR
    if source.is_relative_to(ROOT):  # so that a compiler cache finds it again in another checkout
        source = source.relative_to(ROOT)
    target = build_directory(variant) / f"{'_'.join(source.parts[-4:])}.o"
    depfile = target.with_suffix(".d")
    if not up_to_date(target, depfile):
        flags = EMULATOR_FLAGS[variant] if emulator else SANITIZERS[variant]
        language = ["-x", "c++"] if source.suffix == ".cu" else []
        command = [*compiler(), *FLAGS, *flags, *INCLUDES, *more, "-MMD", "-MF", str(depfile)]
        subprocess.run([*command, *language, "-c", str(source), "-o", str(target)], cwd=ROOT, check=True)
    return target


def link(variant: str, sources: list[Path], target: Path, more: list[str], link_flags: list[str]) -> Path:
    """Compile what is out of date, and link all of it into `target`."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(lambda source: compile_object(variant, source, more), sources))
    if not target.exists() or any(o.stat().st_mtime > target.stat().st_mtime for o in objects):
        command = [*shlex.split(os.environ.get("CXX", "g++")), *SANITIZERS[variant], "-pthread", *link_flags]
        subprocess.run([*command, *map(str, objects), "-o", str(target)], cwd=ROOT, check=True)
    return target


def build_module(variant: str = "plain") -> Path:
    """The extension module `_cuda` with the emulator in place of the CUDA runtime and cuBLAS."""
    import pybind11

    own = [*CSRC.glob("cuda/*.cu"), *(set(CSRC.glob("cuda/*.cpp")) - {CSRC / "cuda/blas_library.cpp"})]
    python = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
    target = build_directory(variant) / f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    return link(variant, [*sorted(own), *CORE, *EMULATOR], target, python, ["-shared"])


def build_program(variant: str, source: Path, directory: Path) -> Path:
    """One .cu file with a main, over the emulator alone."""
    sources = [source, CSRC / "cuda/gpu.cpp", *EMULATOR]
    return link(variant, sources, directory / f"{source.stem}-{variant}", [], [])


if __name__ == "__main__":
    print(build_module(*sys.argv[1:]))
