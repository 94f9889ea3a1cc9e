"""Finding what the Metal backend needs: its extension module, and its kernels."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType


def import_metal() -> ModuleType:
    """The extension module rvllm._metal. Raises ValueError saying how to get it when this installation has none."""
    try:
        return import_module("rvllm._metal")
    except ModuleNotFoundError as error:
        if error.name != "rvllm._metal":
            raise
        if sys.platform != "darwin":
            raise ValueError(
                "device 'metal' is an Apple GPU: rvllm's Metal extension is built on macOS alone"
            ) from None
        raise ValueError(
            "device 'metal' needs rvllm's Metal extension, which was not built: install Xcode's command line tools "
            "(xcode-select --install), and install rvllm again from its source"
        ) from None


def kernel_library() -> str:
    """The kernels: compiled where Metal's compiler was at hand when rvllm was built, else their source."""
    compiled = Path(__file__).with_name("metal_kernels.metallib")
    return str(compiled if compiled.exists() else compiled.with_suffix(".metal"))
