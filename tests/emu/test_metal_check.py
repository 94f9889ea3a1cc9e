"""scripts/metal_check.sh with stand-ins for macOS and for what it installs: which parts run, and what is reported."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "metal_check.sh"
# What the script may call of macOS: not GNU's timeout, readlink -f and others, and no Python that happens to be there.
MACOS = [
    "basename",
    "bash",
    "cat",
    "cp",
    "cut",
    "date",
    "diff",
    "dirname",
    "env",
    "git",
    "grep",
    "head",
    "mkdir",
]
MACOS += ["mktemp", "rm", "sort", "tail", "tee", "uniq"]
SYSTEM = {
    "uname": "echo Darwin",
    "sw_vers": 'case "$*" in *productVersion*) echo ${VERSION:-14.6} ;; *) echo "ProductName: macOS" ;; esac',
    "sysctl": "echo Apple M9",
    "xcrun": 'case "$*" in *metal*) exit 72 ;; *) echo clang ;; esac',
    "wc": 'printf "%8d\\n" "$(/usr/bin/wc "$@")"',  # BSD's has blanks before the number
    "llama-batched-bench": 'echo "llama $*"',
    "python": 'case "$*" in -c*) exit ${OLD_PYTHON:-0} ;; *venv*) eval "venv=\\${$#}"; mkdir -p "$venv"; '
    'cp -r "$STUBS/venv" "$venv/bin" ;; *) echo Python 3.12 ;; esac',
}
# Fails as the variable FAILS says, by a part of its arguments or its input.
COMMAND = """
all="$(basename "$0") $*"
case "$*" in -) all="$all $(cat)" ;; esac
case "$all" in *"${FAILS:-no such command}"*) echo "$all failed"; exit 1 ;; esac
case "$all" in
  *pull*) echo "a progress bar"; echo /cache/model.gguf ;;
  *generate*) echo Paris ;;
  *) echo "$all" | head -n 1 ;;
esac
"""


def run(tmp_path: Path, **settings: str) -> tuple[int, str, str]:
    """The exit status, what is printed, and the report."""
    stubs = tmp_path / "stubs"
    commands = dict.fromkeys(("venv/pip", "venv/python", "venv/rvllm"), COMMAND)
    for name, text in (SYSTEM | commands).items():
        path = stubs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
    macos = tmp_path / "macos"
    macos.mkdir(exist_ok=True)
    for name in MACOS:
        found = shutil.which(name)
        assert found, name
        (macos / name).symlink_to(found)
    env = {
        **os.environ,
        "PATH": f"{stubs}:{macos}",
        "PYTHON": str(stubs / "python"),
        "STUBS": str(stubs),
    }
    result = subprocess.run(
        ["bash", str(SCRIPT), "report.md"], cwd=tmp_path, env=env | settings, capture_output=True, text=True
    )
    report = tmp_path / "report.md"
    return result.returncode, result.stdout + result.stderr, report.read_text() if report.exists() else ""


def test_all_parts(tmp_path: Path) -> None:
    status, _, report = run(tmp_path)
    assert (status, report.rstrip().rsplit("\n", 1)[1]) == (0, "All parts passed.")
    assert "no Metal compiler: kernels are compiled when they are loaded" in report
    assert "the same 64 tokens" in report
    assert "rvllm bench -m /cache/model.gguf --device metal --batch-sizes 1,4,8" in report
    assert "llama -m /cache/model.gguf" in report


@pytest.mark.parametrize(
    ("fails", "failed", "left_out"),
    [
        ("pip install", "Build (status 1)", "## Kernels"),
        ("make_backend(1, kernel_library())\nprint(f", "Kernels", "## Greedy tokens"),
        ("test_metal_kernels", "Operations and whole models on the GPU", None),
        ("--device metal --temperature", "Greedy tokens", None),
    ],
)
def test_a_part_that_fails_is_named(tmp_path: Path, fails: str, failed: str, left_out: str | None) -> None:
    status, _, report = run(tmp_path, FAILS=fails)
    assert status == 1
    assert report.splitlines()[-1].startswith(f"- failed: {failed}")
    assert left_out is None or left_out not in report
    assert "All parts passed" not in report


def test_without_a_network_a_model_is_made(tmp_path: Path) -> None:
    status, _, report = run(tmp_path, FAILS="pull default")
    assert status == 0
    assert "python scripts/make_model.py smollm2-135m" in report


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"VERSION": "13.5"}, "macOS 14 or later is needed"), ({"OLD_PYTHON": "1"}, "no Python 3.10 or later")],
)
def test_what_is_missing_is_said_at_once(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    status, printed, report = run(tmp_path, **settings)
    assert status == 1
    assert message in printed
    assert report == ""


def test_the_script_needs_no_more_than_macos_has() -> None:
    """Its bash is 3.2, and its tools are BSD's."""
    text = re.sub(r"(^|\s)#.*", "", SCRIPT.read_text())
    newer = r"mapfile|readarray|coproc|declare -[An]|local -n|&>>|\|&|;;?&|\$\{\w+[\^,@]|wait -n|EPOCH"
    other = r"sed -i|readlink -f|realpath|stat -c|date -d|sort -V|grep -P|head -c|cp -a|mktemp -[^d]|timeout|nproc|tac"
    assert re.findall(rf"(?:^|[^\w-])({newer}|{other})", text) == []
