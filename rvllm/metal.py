"""Finding what the Metal backend needs: its extension module, and its kernels."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from rvllm.extension import import_extension


def import_metal() -> ModuleType:
    """The extension module rvllm._metal. Raises ValueError saying how to get it when this installation has none."""
    missing = (
        "needs rvllm's Metal extension, which was not built: install Xcode's command line tools "
        "(xcode-select --install), and install rvllm again from its source"
        if sys.platform == "darwin"
        else "is an Apple GPU: rvllm's Metal extension is built on macOS alone"
    )
    return import_extension("_metal", f"device 'metal' {missing}")


def kernel_library() -> str:
    """The kernels: compiled where Metal's compiler was at hand when rvllm was built, else their source."""
    compiled = Path(__file__).with_name("metal_kernels.metallib")
    return str(compiled if compiled.exists() else compiled.with_suffix(".metal"))
