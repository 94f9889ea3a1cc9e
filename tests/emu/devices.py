"""The devices that operations are tested on: the CPU, the CUDA backend over the emulator, and a GPU where there is one,
which takes each operation both as itself and as a small one.

RVLLM_EMU_VARIANT names a sanitized build of the emulated backend; such a test process is started by run_sanitized.py.
With RVLLM_REQUIRE_GPU a GPU that cannot be used fails its tests, which are skipped otherwise.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from dataclasses import dataclass, field
from functools import cache, partial
from types import ModuleType
from typing import Any

import build_emulated
import pytest

from rvllm import _core
from rvllm.cuda import cublas_libraries, import_cuda

pytest.importorskip("pybind11", reason="the emulator's tests need rvllm[dev] and a C++ compiler")
VARIANT = os.environ.get("RVLLM_EMU_VARIANT", "plain")


@dataclass(frozen=True)
class Device:
    name: str
    settings: dict[str, str] = field(default_factory=dict)  # of the emulator, by their names after RVLLM_EMU_
    options: dict[str, int] = field(default_factory=dict)  # of the backend

    @property
    def emulated(self) -> bool:
        return self.name.startswith("emulator")

    def backend(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
        """A new backend. Skips the test, saying why, when this is a GPU and there is none."""
        if self.name == "cpu":
            return _core.CpuBackend(1)
        for name, value in self.settings.items():
            monkeypatch.setenv(f"RVLLM_EMU_{name}", value)
        if self.emulated:
            reset_emulator()
            return emulated_module().make_backend(1, **options)
        try:
            return import_cuda().make_backend(1, cublas_libraries(), **{**self.options, **options})
        except (ImportError, ValueError, RuntimeError) as error:
            if os.environ.get("RVLLM_REQUIRE_GPU"):
                raise
            pytest.skip(str(error))


# Threads in order, in reverse, and at random; device memory guarded, and work done as late as it may be.
SCHEDULES = [
    Device("emulator", {"ORDER": "0"}),
    Device("emulator-reverse", {"ORDER": "1", "GUARD": "1" if VARIANT == "plain" else "0"}),
    Device("emulator-random", {"ORDER": "2", "LAZY": "1"}),
]
CPU = Device("cpu")
# Tests have too little work for a large GPU to take all kernels; for as many processors as the emulator's it does.
GPUS = [Device("gpu"), Device("gpu-small", options={"num_processors": 4})]
# Under a sanitizer the order hardly matters: what it finds, it finds in any.
DEVICES = [CPU, *SCHEDULES, *GPUS] if VARIANT == "plain" else SCHEDULES[-1:]


@cache
def emulated_module() -> ModuleType:
    """rvllm._cuda over the emulator; built when its sources have changed."""
    path = build_emulated.build_module(VARIANT)
    spec = importlib.util.spec_from_file_location("rvllm_emulated._cuda", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reset_emulator() -> None:
    """Forget errors of an earlier test, which would fail all that follow it, as on a GPU."""
    library = ctypes.CDLL(emulated_module().__file__)
    library.rv_emu_reset()


def use_cuda(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make device="cuda" of the engine mean this device. Skips the test where it is a GPU that is not there."""
    if not device.emulated:
        device.backend(monkeypatch)
        module = import_cuda()
        monkeypatch.setattr(module, "make_backend", partial(module.make_backend, **device.options))
        return
    for name, value in device.settings.items():
        monkeypatch.setenv(f"RVLLM_EMU_{name}", value)
    reset_emulator()
    monkeypatch.setitem(sys.modules, "rvllm._cuda", emulated_module())
