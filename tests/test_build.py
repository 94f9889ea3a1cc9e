"""How the core is compiled: each instruction set in its own files, whatever else the linker finds in them."""

from __future__ import annotations

import ast
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="needs the source tree")


@pytest.fixture(scope="module")
def setup() -> dict[str, Any]:
    """The constants and functions of setup.py, which is not run."""
    body = ast.parse((ROOT / "setup.py").read_text()).body
    kept = [node for node in body if isinstance(node, (ast.Assign, ast.FunctionDef))]
    names: dict[str, Any] = {"os": os, "platform": platform, "re": re, "sysconfig": sysconfig, "Path": Path}
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    exec(compile(ast.fix_missing_locations(ast.Module([future, *kept], [])), "setup.py", "exec"), names)
    return names


def test_files_of_an_instruction_set_leave_the_linker_no_choice(
    setup: dict[str, Any], tmp_path: Path
) -> None:
    """A weak symbol compiled for a newer processor could become the one copy that all others call."""
    compiler, nm = shutil.which("g++"), shutil.which("nm")
    if compiler is None or nm is None:
        pytest.skip("needs g++ and nm")
    machine = setup["MACHINES"].get(platform.machine(), platform.machine())

    def symbols(source: str) -> list[str]:
        object_file = tmp_path / f"{Path(source).stem}.o"
        flags = [
            *setup["CXX_FLAGS"],
            *setup["ISA_FLAGS"][machine][source],
            "-w",
            "-std=c++17",
            "-fPIC",
            "-Icsrc",
        ]
        subprocess.run([compiler, *flags, "-c", source, "-o", object_file], cwd=ROOT, check=True)
        return subprocess.check_output([nm, "-C", object_file], text=True).splitlines()

    sources = list(setup["ISA_FLAGS"].get(machine, {}))
    with ThreadPoolExecutor(2) as pool:
        for source, lines in zip(sources, pool.map(symbols, sources), strict=True):
            assert [line for line in lines if re.search(r" [uvVwW] ", line)] == [], source
            assert any(" T rvllm::kernels_" in line for line in lines), source


def test_flags_of_one_processor_do_not_reach_another(
    setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = {source: flags for files in setup["ISA_FLAGS"].values() for source, flags in files.items()}
    for arch, machine in (("arm64", "aarch64"), ("x86_64", "x86_64")):
        monkeypatch.setenv("ARCHFLAGS", f"-arch {arch}")
        assert setup["isa_flags"]() == setup["ISA_FLAGS"][machine]
    monkeypatch.setenv("ARCHFLAGS", "-arch arm64 -arch x86_64")
    universal = setup["isa_flags"]()
    assert universal.keys() == every.keys()
    for source, flags in universal.items():
        arch = "arm64" if source in setup["ISA_FLAGS"]["aarch64"] else "x86_64"
        assert flags[::2] == [f"-Xarch_{arch}"] * len(every[source]) and flags[1::2] == every[source]


def test_this_machines_flags_are_the_default(setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARCHFLAGS", raising=False)
    monkeypatch.setattr(setup["sysconfig"], "get_config_var", lambda name: "-O2 -march-unrelated")
    for machine, name in (
        ("AMD64", "x86_64"),
        ("arm64", "aarch64"),
        ("aarch64", "aarch64"),
        ("riscv64", None),
    ):
        monkeypatch.setattr(setup["platform"], "machine", lambda machine=machine: machine)
        assert setup["isa_flags"]() == setup["ISA_FLAGS"].get(name, {})
