"""scripts/gpu_check.sh with stand-ins for Python and the driver: what is reported, also when it is cut short."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"
NVIDIA_SMI = 'case "$*" in *compute_cap*) echo 9.0 ;; *compute_mode*) echo Default ;; *) echo "GPU 9" ;; esac'
# Fails as the variable FAILS says, by a part of its arguments, and hangs as HANGS says.
PYTHON = """
case "$*" in
  *"${FAILS:-no such command}"*) echo "no luck" >&2; exit 1 ;;
  *"${HANGS:-no such command}"*) exec sleep 60 ;;
  *make_model.py*) : >"$3" ;;
  *--collect-only*) echo "tests/emu/test_cuda_ops.py::test_norm[gpu-1]"; echo "tests/emu/test_cuda_ops.py::test_rope" ;;
  *-v*) echo "tests/emu/test_cuda_ops.py::test"; echo "==== 2 passed, 1 skipped in 0.1s ====" ;;
  *) echo "$*" ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("timeout") is None, reason="needs GNU's timeout")


def run(tmp_path: Path, **settings: str) -> tuple[int, str, str]:
    """The exit status, what is printed, and the results."""
    stubs = tmp_path / "stubs"
    stubs.mkdir(parents=True)
    for name, text in (
        ("nvidia-smi", NVIDIA_SMI),
        ("python", PYTHON),
        ("compute-sanitizer", "echo 'ERROR SUMMARY: 0'"),
    ):
        (stubs / name).write_text(f"#!/bin/bash\n{text}\n")
        (stubs / name).chmod(0o755)
    results = tmp_path / "results.md"
    env = os.environ | {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "PYTHON": str(stubs / "python"),
        "COMMIT": "abc",
    }
    done = subprocess.run(
        ["bash", str(SCRIPT), str(results)], env=env | {"MODELS": "a:F16 b:Q8_0"} | settings, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=100,
    )  # fmt: skip
    return done.returncode, done.stdout, results.read_text() if results.exists() else ""


def test_every_part_is_reported(tmp_path: Path) -> None:
    status, _, results = run(tmp_path)
    assert status == 0
    assert re.search(
        r"^Last run: \S+, GPU 9, driver GPU 9, commit abc, `scripts/gpu_check.sh`, \d+ s\.$", results, re.M
    )
    assert re.findall("^## (.*)$", results, re.M) == [
        "Tests on the device",
        "Greedy tokens of random models, GPU against CPU",
        "The device against the emulator, operation by operation",
        "Speed of a-F16",
        "Speed of b-Q8_0",
        "Tests in the emulator, on the same machine",
        "compute-sanitizer",
    ]
    assert results.count("- 4 passed") == results.count("- 2 skipped") == 2


def test_what_fails_is_named_and_the_rest_still_runs(tmp_path: Path) -> None:
    status, output, results = run(tmp_path, FAILS="a-F16.gguf")  # it cannot be made either
    assert status == 1 and "failed: making models" in output
    assert "**Failed:** making models\n" in results and "Speed of b-Q8_0" in results
    status, _, results = run(tmp_path / "again", FAILS="test_rope")
    assert "`test_cuda_ops.py::test_rope`: status 1" in results and "- 2 passed" in results


def test_what_hangs_is_ended_in_time_and_the_rest_still_runs(tmp_path: Path) -> None:
    status, _, results = run(tmp_path, HANGS="test_rope", LIMIT="14")
    assert status == 1
    assert "Tests on the device (status 124)" in results and "No time was left." in results
