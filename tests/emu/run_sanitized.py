"""Run pytest on the emulated backend under a sanitizer: run_sanitized.py plain|asan|tsan [PYTEST ARGUMENT...].

A report of ThreadSanitizer is a failure too, though the process goes on after it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import build_emulated


def main(variant: str, *arguments: str) -> None:
    build_emulated.build_module(variant)
    os.environ["RVLLM_EMU_VARIANT"] = variant
    if variant != "plain":
        os.environ["LD_PRELOAD"] = build_emulated.preload(variant)
        os.environ["ASAN_OPTIONS"] = "detect_leaks=0:detect_stack_use_after_return=0"
        os.environ["TSAN_OPTIONS"] = "halt_on_error=1:exitcode=66"
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
    # Not -m pytest, which would import the checkout's uncompiled rvllm before the installed one.
    os.execv(sys.executable, [sys.executable, str(Path(sys.executable).with_name("pytest")), *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
