"""The host code of the Metal backend, and that the emulator finds mistakes in it and in the kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import build_emulated_metal
import numpy as np
import pytest
from build_emulated_metal import CSRC
from gguf import GGMLQuantizationType as GGMLType
from metal_devices import METAL, REASON, kernels, live_objects
from random_weights import random_weights
from test_ops import normal

from rvllm._core import ops

pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
HEADERS = [
    CSRC / "emu/metal/objc" / name
    for name in ("Metal/Metal.h", "MetalPerformanceShaders/MetalPerformanceShaders.h")
]
PYOBJC = "12.2.2"
# Methods of classes whose arguments need no description there.
UNDESCRIBED = {
    "encodeToCommandBuffer:leftMatrix:rightMatrix:resultMatrix:",
    "matrixDescriptorWithRows:columns:rowBytes:dataType:",
    "setConstantValue:type:atIndex:",
}


def test_a_machine_without_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RVLLM_EMU_NO_DEVICE", "1")
    with pytest.raises(RuntimeError, match="this machine has no Metal device"):
        METAL.backend(monkeypatch)


def test_a_gpu_that_cannot_run_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RVLLM_EMU_OLD_DEVICE", "1")
    with pytest.raises(RuntimeError, match="need an Apple GPU, an M1's or later: 'CPU emulator' is none"):
        METAL.backend(monkeypatch)


def test_a_kernel_of_too_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RVLLM_EMU_THREADS", "512")
    with pytest.raises(RuntimeError, match="kernel 'sort_choices' with at most 512 threads, it needs 1024"):
        METAL.backend(monkeypatch)


@pytest.mark.parametrize("name", ["attention_q8_0_8", "norm"])
def test_a_kernel_that_the_library_lacks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("RVLLM_EMU_MISSING_KERNEL", name)
    with pytest.raises(RuntimeError, match=f"the Metal library has no kernel '{name}'"):
        METAL.backend(monkeypatch)


def test_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = METAL.module(monkeypatch)
    before, make_backend = live_objects(module), module.make_backend
    with pytest.raises(RuntimeError, match=r"cannot read the Metal kernels in .*none.metal"):
        make_backend(1, str(tmp_path / "none.metal"))
    compiled = tmp_path / "kernels.metallib"
    with pytest.raises(RuntimeError, match=r"Metal cannot load the kernels in .*no such file"):
        make_backend(1, str(compiled))
    compiled.touch()
    assert make_backend(1, str(compiled)).device_name == "CPU emulator"
    assert live_objects(module) == before


def test_a_failure_of_the_device_is_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = METAL.backend(monkeypatch)
    x = normal(2, 8)
    monkeypatch.setenv("RVLLM_EMU_FAILING_KERNEL", "add")
    with pytest.raises(RuntimeError, match="Metal failed: add"):
        ops.add(backend, x, x)
    monkeypatch.delenv("RVLLM_EMU_FAILING_KERNEL")
    np.testing.assert_array_equal(ops.add(backend, x, x), 2 * x)


@pytest.mark.parametrize(
    "refused", ["command queue", "command buffer", "command encoder", "matrix", "matrix product"]
)
def test_what_metal_does_not_give(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """Objective-C would go on with nil, and leave out work."""
    module = METAL.module(monkeypatch)
    before = live_objects(module)
    monkeypatch.setenv("RVLLM_EMU_REFUSED", refused)
    with pytest.raises(RuntimeError, match=f"Metal gives no {refused}$"):
        ops.linear(
            METAL.backend(monkeypatch, mps=True), int(GGMLType.F16), 4, bytes(4 * 8 * 2), normal(17, 8)
        )
    assert live_objects(module) == before


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    module = METAL.module(monkeypatch)
    before = live_objects(module)
    backend = METAL.backend(monkeypatch)
    free, total = backend.memory_info
    assert 0 < total - free < 1 << 20
    monkeypatch.setenv("RVLLM_EMU_MEMORY", "1")
    with pytest.raises(RuntimeError, match="activations: 800000 bytes, Metal allows 524288 in one buffer"):
        ops.add(backend, normal(200, 1000), normal(200, 1000))
    with pytest.raises(
        RuntimeError, match=r" bytes, but of the 1048576 that Metal recommends for all \d+ are left"
    ):
        ops.linear(backend, int(GGMLType.F32), 125, bytes(500_000), normal(125, 1000))
    ops.add(backend, normal(2, 8), normal(2, 8))
    del backend
    assert live_objects(module) == before


def test_a_step_that_ends_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is missing behind the first of two kernels: what is encoded is done later, or dropped with the backend."""
    module = METAL.module(monkeypatch)
    before = live_objects(module)
    backend = METAL.backend(monkeypatch)
    weight = random_weights(GGMLType.Q8_0, 1, 1024, 0.05, np.random.default_rng(1)).tobytes()
    args = int(GGMLType.Q8_0), 1, weight, normal(115, 1024), normal(1024, seed=1), 1e-5
    for _ in range(2):
        monkeypatch.setenv("RVLLM_EMU_MEMORY", "1")
        with pytest.raises(RuntimeError, match="quantized activations: 184320 bytes, but of the"):
            ops.norm_linear(backend, *args)
        monkeypatch.delenv("RVLLM_EMU_MEMORY")
        x = normal(2, 8)
        np.testing.assert_array_equal(ops.add(backend, x, x), 2 * x)
    monkeypatch.setenv("RVLLM_EMU_MEMORY", "1")
    with pytest.raises(RuntimeError, match="quantized activations"):
        ops.norm_linear(backend, *args)
    del backend
    assert live_objects(module) == before


# ---- what the stand-ins declare


def declared_selectors(text: str) -> set[str]:
    selectors = set()
    for declaration in re.findall(r"^[-+] ([^;{]*);", text, re.MULTILINE):
        words = re.sub(r"\((?:[^()]|\([^()]*\))*\)", "", declaration)
        parts = re.findall(r"(\w+)\s*:", words)
        selectors.add("".join(f"{part}:" for part in parts) if parts else words.strip())
    return selectors | set(re.findall(r"@property\([^)]*\)[^;]*?(\w+);", text))


def pyobjc_metadata() -> str:
    """What pyobjc's wheels say of Apple's headers, kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(base) / "rvllm-tests" / f"pyobjc-{PYOBJC}"
    cache.mkdir(parents=True, exist_ok=True)
    text = ""
    for framework in ("Metal", "MetalPerformanceShaders"):
        pattern = f"pyobjc_framework_{framework.lower()}-*.whl"
        if not list(cache.glob(pattern)):
            options = ["--no-deps", "--only-binary=:all:", "--platform=macosx_10_9_universal2"]
            package = f"pyobjc-framework-{framework}=={PYOBJC}"
            command = [sys.executable, "-m", "pip", "download", "-q", *options, "--python-version=3.11"]
            result = subprocess.run([*command, f"--dest={cache}", package], capture_output=True, text=True)
            if result.returncode:
                pytest.skip(f"{package} cannot be downloaded: {result.stderr.strip().splitlines()[-1]}")
        with ZipFile(next(cache.glob(pattern))) as wheel:
            text += wheel.read(f"{framework}/_metadata.py").decode()
    return text


def test_stand_ins_declare_what_apple_does() -> None:
    metadata = pyobjc_metadata()
    text = re.sub(r"//[^\n]*", "", "".join(header.read_text() for header in HEADERS))
    described = set(re.findall(r'b"([A-Za-z][\w:]*)"', metadata))
    assert declared_selectors(text) - described == UNDESCRIBED
    values = dict(re.findall(r"(\w+)@(-?\d+)", metadata))
    constants = re.findall(r"\b(M(?:TL|PS)\w+) = ([x0-9a-f |]+)", text)
    assert len(constants) == 9
    for name, expression in constants:
        value = 0
        for part in expression.split("|"):
            value |= int(part, 0)
        assert (name, value) == (name, int(values[name]))


# ---- mistakes seeded into kernels and host code

FAULTS = {
    "no barrier behind the load": (
        "metal/norm.metal",
        "chunk[i] = x[first + i];\n    threadgroup_barrier(mem_flags::mem_threadgroup);",
        "chunk[i] = x[first + i];",
    ),
    "no barrier behind the scores": (
        "metal/attention.metal",
        "soft_capped(s, args.soft_cap) : s;\n    }\n    threadgroup_barrier(mem_flags::mem_threadgroup);",
        "soft_capped(s, args.soft_cap) : s;\n    }",
    ),
    "index of a scale": ("metal/store_kv.metal", "? at * c.scales + int(simdgroup)", "? at * c.scales"),
    "write past a row": ("metal/elementwise.metal", "if (i < args.cols) x[", "if (i <= args.cols) x["),
    "sum of the wrong half": ("metal/quantize.metal", "lane < 16 ? 0 : code", "lane < 15 ? 0 : code"),
    "no barrier behind a tile": (
        "metal/matmul.metal",
        ": 0.0f;\n    }\n    threadgroup_barrier(mem_flags::mem_threadgroup);",
        ": 0.0f;\n    }",
    ),
    "lanes of a matrix, as they are said to be": (
        "metal/matmul.metal",
        "simdgroup_store(sums[i][j], results + 8 * i * kBlockRows + 8 * j, ulong(kBlockRows));",
        "for (int e = 0; e < 2; ++e)\n        results[(8 * i + (int(lane) / 4 & 4) + int(lane) / 2 % 4) * kBlockRows +"
        " 8 * j + (int(lane) / 4 & 2) * 2 + int(lane) % 2 * 2 + e] = sums[i][j].thread_elements()[e];",
    ),
    "no wait": ("metal/metal_device.mm", "[commands.get() waitUntilCompleted];\n  for", "(void)commands;\n  for"),
    "no commit": ("metal/metal_device.mm", "  [s.commands.get() commit];\n", ""),
    "encoder left open": ("metal/metal_device.mm", "  s.end_encoder();  // MPS opens one of its own\n", ""),
    "matrix not transposed": ("metal/metal_device.mm", "transposeRight:YES", "transposeRight:NO"),
    "index of a buffer": ("metal/metal_device.mm", "NSUInteger index = 1;", "NSUInteger index = 2;"),
    "no threadgroup memory": (
        "metal/metal_device.mm",
        "if (threadgroup_bytes > 0)",
        "if (threadgroup_bytes > 1 << 20)",
    ),
    "an object kept": (
        "metal/metal_device.mm",
        "pipeline([device newComputePipelineStateWithFunction:function.get() error:&error]);",
        "pipeline([[device newComputePipelineStateWithFunction:function.get() error:&error] retain]);",
    ),
    "fast math": ("metal/metal_device.mm", "setFastMathEnabled:NO", "setFastMathEnabled:YES"),
}  # fmt: skip


def run_smoke(module: Path) -> str:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}
    env |= {"RVLLM_EMU_ORDER": "2", "RVLLM_EMU_LAZY": "1", "RVLLM_EMU_GUARD": "1"}
    command = [sys.executable, str(Path(__file__).with_name("metal_smoke.py")), str(module), str(kernels())]
    return subprocess.run(command, env=env, capture_output=True, text=True).stdout


def test_without_a_fault_nothing_is_found() -> None:
    assert run_smoke(build_emulated_metal.build_module()) == "equal\nlive 0\n"


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, tmp_path: Path) -> None:
    name, before, after = FAULTS[fault]
    module = build_emulated_metal.build_changed(CSRC / name, before, after, tmp_path)
    assert run_smoke(module) != "equal\nlive 0\n"
