"""Build csrc/metal over the emulator: build_emulated_metal.py [plain|asan|fast] prints the path of a `_metal` module.

Needs clang 19 and its Objective-C headers (Debian: clang-19), which compiles the host code over stand-ins for
Foundation, Metal and Metal Performance Shaders.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from build_emulated import CORE, CSRC, ROOT, up_to_date
from metal_source import broken_rules, to_cpp, to_opencl

CLANG = "clang++-19"
DIRECTORY = Path(os.environ.get("RVLLM_EMU_BUILD", ROOT / "build" / "emu")) / "metal"
EMULATOR = sorted([*CSRC.glob("emu/*.cpp"), *CSRC.glob("emu/metal/*.cpp"), *CSRC.glob("emu/metal/*.mm")])
HOST = sorted([*CSRC.glob("metal/*.cpp"), *CSRC.glob("metal/*.mm"), CSRC / "cuda" / "packed_weights.cpp"])
KERNELS = sorted(CSRC.glob("metal/*.metal"))
FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
# Only kernels and host code are instrumented: the emulator switches stacks underneath. gcc's libraries, which such a
# process preloads, do not know clang's checks of functions' and objects' types.
VARIANTS = {
    "plain": ["-O1"],
    "asan": [
        "-O0",
        "-g1",
        "-fsanitize=address,undefined",
        "-fno-sanitize=function,vptr",
        "-fno-sanitize-recover=all",
    ],
    # Of kernels alone: what Metal's compiler does unless it is told not to, with products and sums fused.
    "fast": [
        "-O2",
        "-ffast-math",
        "-ffp-contract=fast",
        *(["-mfma"] if platform.machine() == "x86_64" else []),
    ],
}
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-parameter"]
MODULE = f"_metal{sysconfig.get_config_var('EXT_SUFFIX')}"
STRICT = [
    "-x", "cl", "-cl-std=clc++2021", "--target=spir64", "-cl-no-stdinc", "-fsyntax-only", "-Icsrc/emu/metal/strict",
    "-Xclang", "-cl-ext=" + ",".join(
        f"-__opencl_c_{name}"
        for name in ("generic_address_space", "program_scope_global_variables", "pipes", "device_enqueue")
    ),
    "-Wall", "-Wextra", "-Wconversion", "-Wdouble-promotion", "-Wglobal-constructors", "-Wno-sign-conversion",
    "-Wno-implicit-int-float-conversion",
    "-Wno-missing-prototypes", "-Wno-unknown-pragmas",
]  # fmt: skip


def missing_compiler() -> str | None:
    """Why Metal's host code cannot be built here, or None."""
    if not KERNELS:
        return "the Metal kernels are not beside these tests"
    return None if shutil.which(CLANG) else f"{CLANG} is not installed"


def objective_c_headers() -> list[str]:
    """Where gcc keeps objc/objc.h."""
    gcc = subprocess.check_output(["gcc", "-print-file-name=include"], text=True).strip()
    return [f"-idirafter{gcc}"]


def flattened_source() -> str:
    spec = importlib.util.spec_from_file_location("flatten", CSRC / "metal" / "flatten.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text: str = module.flatten()
    return text


def check_strictly(source: str, directory: Path) -> str:
    """What clang says of kernels as C++ for OpenCL, which has Metal's address spaces, and which rules it leaves
    unchecked that they break; empty when all is well."""
    path = directory / "kernels.cl"
    path.write_text(to_opencl(source))
    result = subprocess.run(
        ["clang-19", *STRICT, "-Werror", str(path)], cwd=ROOT, capture_output=True, text=True
    )
    return result.stderr + "\n".join(broken_rules(source))


def compile_object(source: Path, directory: Path, text: str | None = None, variant: str = "plain") -> Path:
    """The object of a source, or of `text` in its place."""
    import pybind11

    target = directory / (str(source.relative_to(ROOT)).replace("/", "_") + ".o")
    depfile = target.with_suffix(".d")
    includes = [
        "-Icsrc",
        "-Icsrc/emu/metal/objc",
        f"-I{pybind11.get_include()}",
        f"-I{sysconfig.get_path('include')}",
    ]
    if source in EMULATOR or (variant == "fast" and source not in KERNELS):
        variant = "plain"
    flags = [*FLAGS, *WARNINGS, *VARIANTS[variant]]
    if source.suffix == ".metal":
        includes.append("-Icsrc/emu/metal/include")
        text = to_cpp(text or source.read_text(), str(source.relative_to(ROOT)))
    elif source.suffix == ".mm":
        flags += [
            "-x",
            "objective-c++",
            "-fobjc-runtime=gcc",
            "-Wno-deprecated-objc-isa-usage",
            *objective_c_headers(),
        ]
    compiled = source
    if text is not None:
        compiled = directory / f"{source.name}.cpp"
        if not compiled.exists() or compiled.read_text() != text:
            compiled.write_text(text)
    if not up_to_date(target, depfile):
        cache = ["ccache"] if shutil.which("ccache") else []
        command = [*cache, CLANG, *flags, *includes, "-MMD", "-MF", str(depfile)]
        subprocess.run([*command, "-c", str(compiled), "-o", str(target)], cwd=ROOT, check=True)
    return target


def link(objects: list[Path], target: Path) -> Path:
    if not target.exists() or any(o.stat().st_mtime > target.stat().st_mtime for o in objects):
        command = [CLANG, "-shared", "-pthread", *map(str, objects), "-l:libobjc.so.4", "-o", str(target)]
        subprocess.run(command, check=True)
    return target


def all_objects(directory: Path, variant: str = "plain") -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    sources = [*KERNELS, *HOST, *CORE, *EMULATOR]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda source: compile_object(source, directory, variant=variant), sources))


def build_module(variant: str = "plain") -> Path:
    """The extension module `_metal` with the emulator in place of Apple's frameworks."""
    directory = DIRECTORY if variant == "plain" else DIRECTORY / variant
    return link(all_objects(directory, variant), directory / MODULE)


def build_changed(source: Path, before: str, after: str, directory: Path) -> Path:
    """The same with one change of one source."""
    text = source.read_text()
    if text.count(before) < 1:
        raise ValueError(f"{source.name} has no {before!r}")
    objects = [o for o in all_objects(DIRECTORY) if o != compile_object(source, DIRECTORY)]
    return link(
        [*objects, compile_object(source, directory, text.replace(before, after, 1))], directory / MODULE
    )


if __name__ == "__main__":
    print(build_module(*sys.argv[1:]))
