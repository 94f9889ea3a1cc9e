"""Finding what the CUDA backend needs: its extension module, and cuBLAS."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from rvllm.extension import import_extension

_CUBLAS_NAMES = ("libcublas.so.13", "libcublas.so.12")


def import_cuda() -> ModuleType:
    """The extension module rvllm._cuda. Raises ValueError saying how to get it when this installation has none."""
    return import_extension(
        "_cuda",
        "device 'cuda' needs rvllm's CUDA extension, which was not built: install the CUDA 13 toolkit, set CUDA_HOME "
        "to it (or put nvcc on PATH), and install rvllm[cuda] again from its source",
    )


def cublas_libraries() -> list[str]:
    """Where cuBLAS may be, in the order to try: the wheels of this environment, then the system's library path."""
    found = [
        str(library)
        for name in _CUBLAS_NAMES
        for entry in dict.fromkeys(sys.path)
        for library in sorted(Path(entry).glob(f"nvidia/*/lib/{name}"))
    ]
    return [*found, *_CUBLAS_NAMES]
