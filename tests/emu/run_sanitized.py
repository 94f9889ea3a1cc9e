"""Run pytest on the emulated backends under a sanitizer: run_sanitized.py VARIANT [PYTEST ARGUMENT...].

Variants are plain, asan and tsan, of the CUDA backend, and metal-plain, metal-asan and metal-fast, with fast math.

A report of ThreadSanitizer is a failure too, though the process goes on after it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import build_emulated
import build_emulated_metal


def main(variant: str, *arguments: str) -> None:
    backend = build_emulated_metal if variant.startswith("metal-") else build_emulated
    variant = variant.removeprefix("metal-")
    backend.build_module(variant)
    os.environ["RVLLM_EMU_VARIANT"] = variant
    if variant in ("asan", "tsan"):
        os.environ["LD_PRELOAD"] = build_emulated.preload(variant)
        os.environ["ASAN_OPTIONS"] = "detect_leaks=0:detect_stack_use_after_return=0"
        os.environ["TSAN_OPTIONS"] = "halt_on_error=1:exitcode=66"
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
    # Not -m pytest, which would import the checkout's uncompiled rvllm before the installed one.
    os.execv(sys.executable, [sys.executable, str(Path(sys.executable).with_name("pytest")), *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
