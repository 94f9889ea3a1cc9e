"""How the core is compiled: each instruction set in its own files, with flags of its own."""

from __future__ import annotations

import ast
import os
import platform
import re
import sysconfig
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
