"""Build the compiled parts of rvllm: Cython modules, the C++ core with one compiler flag set per ISA file, and, where
nvcc is found, the CUDA backend."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from Cython.Build import cythonize
from pybind11.setup_helpers import Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CORE_SOURCES = [
    "csrc/bind.cpp",
    "csrc/bind_ops.cpp",
    "csrc/bind_profiler.cpp",
    "csrc/model.cpp",
    "csrc/pooler.cpp",
    "csrc/profiler.cpp",
    "csrc/quant.cpp",
    "csrc/quant_iq.cpp",
    "csrc/sampler.cpp",
    "csrc/thread_pool.cpp",
    "csrc/weight_loader.cpp",
    "csrc/cpu/arena.cpp",
    "csrc/cpu/attention_plan.cpp",
    "csrc/cpu/cpu_attention.cpp",
    "csrc/cpu/ceilings.cpp",
    "csrc/cpu/cpu_backend.cpp",
    "csrc/cpu/cpu_experts.cpp",
    "csrc/cpu/cpu_features.cpp",
    "csrc/cpu/cpu_weight.cpp",
    "csrc/cpu/expert_plan.cpp",
    "csrc/cpu/repack.cpp",
    "csrc/cpu/isa/scalar.cpp",
]
# The CUDA backend: host code, and kernels for every architecture of CUDA 13, as PTX for later ones.
CUDA_SOURCES = [
    *sorted(str(path) for path in Path("csrc/cuda").glob("*.cpp")),
    "csrc/quant.cpp",
    "csrc/quant_iq.cpp",
    "csrc/thread_pool.cpp",
]
CUDA_ARCHS = ["75", "80", "90", "100", "120"]  # the code of 80 runs on 86 and 89, too
NVCC_FLAGS = [
    "-O3",
    "-std=c++17",
    "-fmad=false",  # a fused multiply-add is written out or not there, as on the CPU
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra",
]
METAL_SOURCES = [
    *sorted(str(path) for pattern in ("*.cpp", "*.mm") for path in Path("csrc/metal").glob(pattern)),
    "csrc/cuda/packed_weights.cpp",
    "csrc/quant.cpp",
    "csrc/quant_iq.cpp",
    "csrc/thread_pool.cpp",
]
# Without fast math, for the CPU's order of operations; for the oldest macOS that is supported, not that of the SDK.
METAL_FLAGS = ["-O2", "-mmacosx-version-min=14.0", "-ffp-contract=off", "-fno-fast-math"]
METAL_COMMAND = ["xcrun", "-sdk", "macosx", "metal", *METAL_FLAGS]
# Without CoreGraphics the system has no default device for a program of the command line.
METAL_FRAMEWORKS = ["Foundation", "CoreGraphics", "Metal", "MetalPerformanceShaders"]
CYTHON_MODULES = ["_batch", "_gguf", "_tokenizer"]
# Only these flags may raise the instruction set, each for its own file: everything else must run on any processor.
ISA_FLAGS = {
    "x86_64": {
        "csrc/cpu/isa/avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
        "csrc/cpu/isa/avx_vnni.cpp": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
        "csrc/cpu/isa/avx512_vnni.cpp": [
            "-mavx2",
            "-mfma",
            "-mf16c",  # -mavx512f implies the first alone
            "-mavx512f",
            "-mavx512bw",
            "-mavx512dq",
            "-mavx512vl",
            "-mavx512vnni",
            "-mprefer-vector-width=512",
            "-Wno-uninitialized",
            "-Wno-maybe-uninitialized",  # false in gcc 12: its intrinsics leave a placeholder unset
        ],
        "csrc/cpu/isa/amx.cpp": [
            "-mavx2",
            "-mfma",
            "-mf16c",  # -mavx512f implies the first alone
            "-mavx512f",
            "-mavx512bw",
            "-mavx512dq",
            "-mavx512vl",
            "-mavx512vnni",
            "-mamx-tile",
            "-mamx-int8",
            "-mprefer-vector-width=512",
            "-Wno-uninitialized",
            "-Wno-maybe-uninitialized",  # false in gcc 12: its intrinsics leave a placeholder unset
        ],
    },
    "aarch64": {
        "csrc/cpu/isa/neon.cpp": ["-march=armv8.2-a+dotprod"],
        "csrc/cpu/isa/neon_i8mm.cpp": ["-march=armv8.2-a+dotprod+i8mm"],
    },
}
MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}  # what some systems call them
CXX_FLAGS = [
    "-O3",
    "-Wall",
    "-Wextra",
    "-ffp-contract=off",  # the same bits on every ISA: a fused multiply-add is written out or not there
    "-fno-math-errno",
    "-fno-omit-frame-pointer",
]


def target_machines() -> list[str]:
    """The processors to compile for: macOS may name others than this machine's, and several at a time."""
    flags = os.environ.get("ARCHFLAGS") or sysconfig.get_config_var("CFLAGS") or ""
    # Its last part names the processor, also one that is compiled for on another.
    return re.findall(r"-arch\s+(\S+)", flags) or [sysconfig.get_platform().rpartition("-")[2]]


def isa_flags() -> dict[str, list[str]]:
    machines = target_machines()
    flags: dict[str, list[str]] = {}
    for machine in machines:
        for source, own in ISA_FLAGS.get(MACHINES.get(machine, machine), {}).items():
            # Compiled for all machines at once, a file is empty on those that it is not for.
            flags[source] = own if len(machines) == 1 else [w for f in own for w in (f"-Xarch_{machine}", f)]
    return flags


def sanitizer_flags() -> list[str]:
    kinds = os.environ.get("RVLLM_SANITIZE", "")  # "address,undefined" or "thread": for the native tests
    return [f"-fsanitize={kinds}", "-g", "-O1", "-fno-sanitize-recover=undefined"] if kinds else []


def find_cuda() -> Path | None:
    """The CUDA toolkit: CUDA_HOME if set, else where the nvcc on PATH lies or where toolkits are installed."""
    nvcc = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME")
    places = (
        [Path(home)] if home else [Path(nvcc).resolve().parents[1], Path("/usr/local/cuda")] if nvcc else []
    )
    return next(
        (p for p in places if (p / "bin/nvcc").exists() and (p / "include/cuda_runtime.h").exists()), None
    )


def cuda_archs() -> list[str] | None:
    """GPUs whose machine code is built, besides PTX for all others; None: no CUDA backend.

    RVLLM_CUDA_ARCHS is "all", as for a wheel, or names some ("90", "80 90"), or is empty: none. By default those of
    this machine: machine code takes minutes to compile.
    """
    wanted = os.environ.get("RVLLM_CUDA_ARCHS")
    if wanted is not None:
        archs = CUDA_ARCHS if wanted == "all" else wanted.split()
        for arch in archs:
            if not arch.isdigit() or int(arch) < 75:
                raise SystemExit(f'RVLLM_CUDA_ARCHS: {arch!r} is no architecture such as "90", from 75 on')
        return archs or None
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    except OSError:
        return []
    return sorted({major + minor for major, minor in re.findall(r"^(\d+)\.(\d)$", answer, re.MULTILINE)})


def nvcc_command(cuda: Path, archs: list[str], source: str, output: str) -> list[str]:
    """All from 8.0 on share one virtual architecture, which is compiled once: the kernels use nothing newer."""
    targets = []
    for name in ("75", "80"):
        real = [f"sm_{arch}" for arch in archs if min(arch, "80", key=int) == name]
        targets.append(f"-gencode=arch=compute_{name},code=[{','.join([*real, f'compute_{name}'])}]")
    # Of the host compiler, too, whose warnings differ from version to version: only where all of it is known.
    strict = ["-Werror=all-warnings"] if os.environ.get("CI") else []
    return [str(cuda / "bin/nvcc"), *NVCC_FLAGS, *strict, "-Icsrc", *targets, "-c", source, "-o", output]


def number_of_cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class BuildExt(build_ext):
    """Compiles the core's files side by side, gives each ISA file its own flags, and kernels to nvcc."""

    def build_extension(self, ext: Extension) -> None:
        if ext.name == "rvllm._cuda":
            ext.extra_objects = self.compile_kernels()
        super().build_extension(ext)

    def run(self) -> None:
        super().run()  # which says where modules lie only afterwards, when it was asked to build in place
        for ext in self.extensions:
            if ext.name == "rvllm._metal":
                make_metal_library(Path(self.get_ext_fullpath(ext.name)).parent)

    def compile_kernels(self) -> list[str]:
        cuda = find_cuda()
        archs = cuda_archs()
        assert cuda is not None and archs is not None
        directory = Path(self.build_temp, "csrc", "cuda")
        directory.mkdir(parents=True, exist_ok=True)
        headers = max(p.stat().st_mtime for pattern in ("*.h", "*.inl") for p in Path("csrc").rglob(pattern))

        def compile_one(source: Path) -> str:
            output = directory / f"{source.stem}.cu.o"
            changed = max(source.stat().st_mtime, headers)
            if self.force or not output.exists() or output.stat().st_mtime < changed:
                command = nvcc_command(cuda, archs, str(source), str(output))
                result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                print(" ".join(command), result.stdout, sep="\n")  # one source's messages together
                result.check_returncode()
            return str(output)

        with ThreadPoolExecutor(number_of_cpus()) as pool:
            return list(pool.map(compile_one, sorted(Path("csrc/cuda").glob("*.cu"))))

    def build_extensions(self) -> None:
        if ".mm" not in self.compiler.src_extensions:
            self.compiler.src_extensions.append(".mm")
        compile_one = self.compiler._compile

        def compile_with_isa_flags(obj, src, ext, cc_args, extra_postargs, pp_opts):
            compile_one(obj, src, ext, cc_args, [*extra_postargs, *isa_flags().get(src, [])], pp_opts)

        def compile_in_parallel(sources, output_dir=None, macros=None, include_dirs=None, debug=0,
                                extra_preargs=None, extra_postargs=None, depends=None):  # fmt: skip
            macros, objects, extra_postargs, pp_opts, build = self.compiler._setup_compile(
                output_dir, macros, include_dirs, sources, depends, extra_postargs
            )
            cc_args = self.compiler._get_cc_args(pp_opts, debug, extra_preargs)
            with ThreadPoolExecutor(number_of_cpus()) as pool:
                jobs = [
                    pool.submit(compile_with_isa_flags, obj, *build[obj], cc_args, extra_postargs, pp_opts)
                    for obj in objects
                    if obj in build
                ]
                for job in jobs:
                    job.result()
            return objects

        self.compiler.compile = compile_in_parallel
        super().build_extensions()


def core_extension() -> Extension:
    return Pybind11Extension(
        "rvllm._core",
        [*CORE_SOURCES, *isa_flags()],
        include_dirs=["csrc"],
        depends=[str(p) for pattern in ("*.h", "*.inl") for p in Path("csrc").rglob(pattern)],
        cxx_std=17,
        extra_compile_args=CXX_FLAGS + sanitizer_flags(),
        extra_link_args=["-pthread", *sanitizer_flags()],
    )


def cuda_extensions() -> list[Extension]:
    cuda = find_cuda()
    if cuda is None or cuda_archs() is None:
        print(
            "rvllm: built without the CUDA backend:",
            "no nvcc (CUDA_HOME, PATH)" if cuda is None else "no architecture",
        )
        return []
    libraries = [
        str(cuda / name) for name in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
    ]
    return [
        Pybind11Extension(
            "rvllm._cuda",
            CUDA_SOURCES,
            include_dirs=["csrc", str(cuda / "include")],
            library_dirs=libraries,
            libraries=["cudart_static", "dl", "rt", "pthread"],
            depends=[str(p) for pattern in ("*.h", "*.inl", "*.cu") for p in Path("csrc").rglob(pattern)],
            cxx_std=17,
            extra_compile_args=CXX_FLAGS,
        )
    ]


def metal_extensions() -> list[Extension]:
    if sys.platform != "darwin":
        return []
    return [
        Pybind11Extension(
            "rvllm._metal",
            METAL_SOURCES,
            include_dirs=["csrc"],
            depends=[str(p) for pattern in ("*.h", "*.metal") for p in Path("csrc").rglob(pattern)],
            cxx_std=17,
            extra_compile_args=CXX_FLAGS,
            extra_link_args=[w for name in METAL_FRAMEWORKS for w in ("-framework", name)],
            optional=True,  # rvllm runs on the CPU without it
        )
    ]


def make_metal_library(directory: Path) -> None:
    """The kernels beside the extension: as one source, and compiled where Metal's compiler is at hand."""
    source, library = directory / "metal_kernels.metal", directory / "metal_kernels.metallib"
    flatten = [sys.executable, "csrc/metal/flatten.py"]
    source.write_text(subprocess.run(flatten, check=True, capture_output=True, text=True).stdout)
    library.unlink(missing_ok=True)
    try:
        result = subprocess.run(
            [*METAL_COMMAND, "-o", str(library), str(source)], capture_output=True, text=True
        )
        message = result.stderr
    except OSError as error:
        message = str(error)
    if not library.exists():
        print(f"rvllm: Metal kernels are compiled when they are loaded: {message}")


setup(
    ext_modules=[
        core_extension(),
        *cuda_extensions(),
        *metal_extensions(),
        *cythonize(
            [Extension(f"rvllm.{name}", [f"rvllm/{name}.pyx"]) for name in CYTHON_MODULES],
            build_dir="build",
            language_level=3,
        ),
    ],
    cmdclass={"build_ext": BuildExt},
)
