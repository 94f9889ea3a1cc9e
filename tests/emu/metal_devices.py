"""The Metal backend over the emulator and on an Apple GPU where there is one, as devices of devices.py."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import build_emulated_metal
import pytest
from devices import VARIANT

from rvllm.metal import import_metal, kernel_library

REASON = build_emulated_metal.missing_compiler()


@dataclass(frozen=True)
class MetalDevice:
    name: str
    settings: dict[str, str] = field(default_factory=dict)  # of the emulator, by their names after RVLLM_EMU_

    def backend(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
        """A new backend. Skips the test, saying why, where it cannot be built."""
        module = self.module(monkeypatch)
        try:
            return module.make_backend(1, self.library(), **options)
        except RuntimeError as error:
            if self == APPLE and str(error) == "this machine has no Metal device":
                pytest.skip(str(error))
            raise

    def library(self) -> str:
        return kernel_library() if self == APPLE else str(kernels())

    def module(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        if self == APPLE:
            try:
                return import_metal()
            except ValueError as error:
                pytest.skip(str(error))
        if REASON:
            pytest.skip(REASON)
        for name, value in self.settings.items():
            monkeypatch.setenv(f"RVLLM_EMU_{name}", value)
        return emulated_module()

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make device="metal" of the engine mean this device."""
        monkeypatch.setitem(sys.modules, "rvllm._metal", self.module(monkeypatch))
        monkeypatch.setattr("rvllm.model_runner.kernel_library", self.library)


# Threads in order; in reverse, with guarded buffers; at random, with work done as late as it may be, and with the
# smallest numbers taken for zero.
METAL = MetalDevice("metal", {"ORDER": "0"})
SCHEDULES = [
    METAL,
    MetalDevice("metal-reverse", {"ORDER": "1", "GUARD": "1"}),
    MetalDevice("metal-random", {"ORDER": "2", "LAZY": "1", "FLUSH": "1"}),
]
APPLE = MetalDevice("apple-gpu")
DEVICES = [*SCHEDULES, APPLE] if VARIANT == "plain" else SCHEDULES[-1:]


@cache
def kernels() -> Path:
    """The source of all kernels in one file."""
    path = build_emulated_metal.DIRECTORY / "kernels.metal"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = build_emulated_metal.flattened_source()
    if not path.exists() or path.read_text() != text:  # other tests may be reading it
        path.write_text(text)
    return path


@cache
def emulated_module() -> ModuleType:
    """rvllm._metal over the emulator; built when its sources have changed."""
    path = build_emulated_metal.build_module(VARIANT)
    spec = importlib.util.spec_from_file_location("rvllm_emulated._metal", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def live_objects(module: ModuleType) -> int:
    """Objective-C objects that have not been freed."""
    assert module.__file__ is not None
    count: int = ctypes.CDLL(module.__file__).rv_emu_live_objects()
    return count
