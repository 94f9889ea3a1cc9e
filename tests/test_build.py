"""How the core is compiled: each instruction set in its own files, with flags of its own."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="needs the source tree")


@pytest.fixture(scope="module")
def setup() -> dict[str, Any]:
    """The constants and functions of setup.py, which is not run."""
    body = ast.parse((ROOT / "setup.py").read_text()).body
    kept = [node for node in body if isinstance(node, (ast.Assign, ast.FunctionDef))]
    names: dict[str, Any] = {
        module.__name__: module for module in (os, re, shutil, subprocess, sys, sysconfig)
    }
    names["Path"] = Path
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
    for platform, name in (
        ("linux-x86_64", "x86_64"),
        ("macosx-14.0-arm64", "aarch64"),
        ("linux-aarch64", "aarch64"),
        ("linux-riscv64", None),
    ):
        monkeypatch.setattr(setup["sysconfig"], "get_platform", lambda platform=platform: platform)
        assert setup["isa_flags"]() == setup["ISA_FLAGS"].get(name, {})


def test_warnings_of_the_users_compiler_do_not_end_a_build(
    setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def strict() -> bool:
        return any("-Werror" in flag for flag in setup["nvcc_command"](Path("cuda"), ["90"], "a.cu", "a.o"))

    monkeypatch.setenv("CI", "true")
    assert strict()
    monkeypatch.delenv("CI")
    assert not strict()


def test_metal_kernels_are_compiled_where_the_compiler_is(
    setup: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a stand-in for xcrun, which writes what it is asked for."""
    assert all((ROOT / source).is_file() for source in setup["METAL_SOURCES"])
    monkeypatch.chdir(ROOT)
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    setup["make_metal_library"](tmp_path)
    source = (tmp_path / "metal_kernels.metal").read_text()
    assert 'host_name("attention_f16_8")' in source and '#include "' not in source
    assert "compiled when they are loaded" in capsys.readouterr().out
    (tools / "xcrun").write_text('#!/bin/sh\ncase "$*" in *-fno-fast-math*) echo > "$9";; esac\n')
    (tools / "xcrun").chmod(0o755)
    setup["make_metal_library"](tmp_path)
    assert (tmp_path / "metal_kernels.metallib").exists()
    setup["METAL_COMMAND"][-1] = "-fast"
    setup["make_metal_library"](tmp_path)
    assert not (tmp_path / "metal_kernels.metallib").exists()


def test_metal_kernels_lie_beside_a_module_that_is_built_in_place(setup: dict[str, Any]) -> None:
    made: list[Any] = []
    base = type(
        "build_ext",
        (),
        {
            "run": lambda self: made.append("modules"),
            "get_ext_fullpath": lambda self, name: "rvllm/_metal.so",
        },
    )
    names = {**setup, "build_ext": base, "make_metal_library": made.append}
    body = ast.parse((ROOT / "setup.py").read_text()).body
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    kept = [node for node in body if isinstance(node, ast.ClassDef) and node.name == "BuildExt"]
    exec(compile(ast.fix_missing_locations(ast.Module([future, *kept], [])), "setup.py", "exec"), names)
    build = names["BuildExt"]()
    build.extensions = [SimpleNamespace(name="rvllm._core")]
    build.run()
    assert made == ["modules"]
    build.extensions.append(SimpleNamespace(name="rvllm._metal"))
    build.run()
    assert made == ["modules", "modules", Path("rvllm")]


def test_metal_is_built_on_macos_alone(setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(setup, "Pybind11Extension", lambda name, sources, **options: (name, options))
    monkeypatch.setattr(sys, "platform", "linux")
    assert setup["metal_extensions"]() == []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "platform", "darwin")
    ((name, options),) = setup["metal_extensions"]()
    assert name == "rvllm._metal" and options["optional"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nope"], "unknown option '--nope'"),
        (["--output"], "--output needs a value"),
        (["--machine", "sparc"], "--machine sparc: expected x86_64 or aarch64"),
        (["/no/python"], "'/no/python' is no Python 3.10 to 3.13"),
    ],
)
def test_build_wheel_refuses_in_one_line(arguments: list[str], message: str) -> None:
    result = subprocess.run([ROOT / "scripts/build_wheel.sh", *arguments], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (2, f"build_wheel.sh: {message}\n")
