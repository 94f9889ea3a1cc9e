"""`rvllm doctor`: what it finds is what rvllm uses, and no machine makes it fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_run import Run

from rvllm import _core, diagnosis, system
from rvllm.models import DEFAULT_MODEL, KNOWN_MODELS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RVLLM_ISA", raising=False)
    monkeypatch.setenv("RVLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Callable[[], dict[str, Any]]:
    """Runs it, and returns its JSON; the text must come without an error too."""

    def run() -> dict[str, Any]:
        text = Run(capsys, "doctor")
        assert (text.status, text.err) == (0, "")
        assert all(f"\n{title}\n" in f"\n{text.out}" for title in ("Processor", "CUDA", "Metal", "Cache"))
        found = Run(capsys, "doctor", "--json")
        assert (found.status, found.err) == (0, "")
        facts: dict[str, Any] = json.loads(found.out)
        assert all(hint in text.out for hint in facts["hints"])
        return facts

    return run


def test_it_reports_what_rvllm_uses(doctor: Callable[[], dict[str, Any]]) -> None:
    facts = doctor()
    processor = facts["processor"]
    assert processor["isa"] == _core.detect_isa() and processor["problem"] is None
    assert processor["available_isas"] == list(_core.available_isas())
    assert not processor["unavailable_isas"].keys() & set(processor["available_isas"])
    assert facts["cores"]["threads"] == system.available_cpus()
    assert 0 < facts["memory"]["available"] <= facts["memory"]["total"]
    assert facts["versions"]["rvllm"] and facts["versions"]["numpy"][0].isdigit()


def test_it_says_what_a_better_isa_lacks(
    doctor: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(diagnosis.sys, "platform", "linux")
    monkeypatch.setattr(diagnosis.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(_core, "available_isas", lambda: ["scalar", "avx2"])
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "model name\t: Some CPU\nflags\t\t: avx2 fma f16c avx512f avx512bw amx_tile amx_int8\n\nflags : x\n"
    )
    monkeypatch.setattr(diagnosis, "_CPUINFO", cpuinfo)
    processor = doctor()["processor"]
    assert processor["name"] == "Some CPU"
    assert processor["unavailable_isas"] == {
        "avx_vnni": "the processor does not show avx_vnni",
        "avx512_vnni": "the processor does not show avx512dq, avx512vl, avx512_vnni",
        "amx": "the processor has it, the system does not allow it (or a level below it is missing)",
    }


def test_a_forced_isa_is_named(doctor: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "available_isas", lambda: ["scalar", "fast"])
    monkeypatch.setenv("RVLLM_ISA", "scalar")
    facts = doctor()
    assert facts["processor"]["isa"] == facts["processor"]["forced"] == "scalar"
    assert "RVLLM_ISA=scalar is set: without it rvllm would take fast" in facts["hints"]
    monkeypatch.setenv("RVLLM_ISA", "sse9")
    processor = doctor()["processor"]
    assert processor["isa"] is None and "sse9" in processor["problem"]


def test_limits_of_the_control_group(
    doctor: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(system, "_cgroup_directories", lambda controller: [tmp_path])
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(f"{500 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{400 << 20}\n")
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    monkeypatch.setattr(diagnosis, "_HUGE_PAGES", tmp_path / "enabled")
    facts = doctor()
    assert (facts["cores"]["quota"], facts["cores"]["threads"]) == (0.5, 1)
    assert facts["memory"]["available"] <= 100 << 20
    assert facts["memory"]["huge_pages"] == "never"
    hints = "\n".join(facts["hints"])
    for words in ("the time of 0.5 processors", "huge pages are off", "less than 1 GiB"):
        assert words in hints


def test_a_gpu_is_told_of_with_what_it_lacks(
    doctor: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gpus" / "0").mkdir(parents=True)
    (tmp_path / "gpus" / "0" / "information").write_text("Model: \t\t Some GPU\nIRQ: 1\n")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Kernel Module  580.65.06  Sun\nGCC version: 12\n"
    )
    monkeypatch.setattr(diagnosis, "_NVIDIA", tmp_path)

    def fail(num_threads: int, libraries: list[str]) -> None:
        raise RuntimeError("the driver\nis too old")

    monkeypatch.setattr("rvllm.cuda.import_cuda", lambda: SimpleNamespace(make_backend=fail))
    facts = doctor()
    assert facts["cuda"] == {
        "built": True,
        "problem": "the driver is too old",
        "devices": ["Some GPU"],
        "memory": None,
        "driver": "580.65.06",
    }
    assert "the NVIDIA GPU cannot be used: the driver is too old" in facts["hints"]

    backend = SimpleNamespace(memory_info=(1 << 30, 2 << 30))
    usable = SimpleNamespace(make_backend=lambda num_threads, libraries: backend)
    monkeypatch.setattr("rvllm.cuda.import_cuda", lambda: usable)
    facts = doctor()
    assert (facts["cuda"]["problem"], facts["cuda"]["memory"]) == (None, [1 << 30, 2 << 30])
    assert "--device cuda: computes on the NVIDIA GPU" in facts["hints"]


def test_the_default_model_in_the_cache(doctor: Callable[[], dict[str, Any]], cache: Path) -> None:
    assert doctor()["cache"]["default_model_state"].startswith("not there yet")
    cache.mkdir(parents=True)
    file = cache / f"{DEFAULT_MODEL}.gguf"
    file.write_bytes(b"GGUF")
    assert doctor()["cache"]["default_model_state"].startswith("damaged: 4 bytes")
    with file.open("r+b") as whole:
        whole.truncate(KNOWN_MODELS[DEFAULT_MODEL].size)
    found = doctor()["cache"]
    assert found["default_model_state"] == "there" and found["num_models"] == 1


def test_what_cannot_be_found_out_is_said_and_harms_nothing(
    doctor: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **settings: Any) -> Any:
        raise OSError("no such luck")

    for module, name in (
        (diagnosis.psutil, "cpu_count"),
        (diagnosis.psutil, "virtual_memory"),
        (diagnosis.shutil, "disk_usage"),
        (diagnosis.metadata, "version"),
        (_core, "available_isas"),
    ):
        monkeypatch.setattr(module, name, fail)
    facts = doctor()
    for section in ("versions", "processor", "cores", "memory", "cache"):
        assert facts[section] == {"error": "no such luck"}
    assert facts["cuda"].keys() >= {"built", "problem"}


def test_without_the_compiled_core(
    doctor: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import rvllm

    monkeypatch.delattr(rvllm, "_core")
    monkeypatch.setitem(__import__("sys").modules, "rvllm._core", None)
    assert "_core" in doctor()["processor"]["error"]


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="flags are read from /proc/cpuinfo")
def test_flags_and_core_agree() -> None:
    """A level whose flags are all there, and whose lower levels can run, can run but for the system's permission."""
    processor = diagnosis.diagnose()["processor"]
    for isa, reason in processor["unavailable_isas"].items():
        assert isa == "amx" or "does not show" in reason, (isa, reason)
    _, flags = diagnosis._cpuinfo()
    for isa in processor["available_isas"][1:]:
        assert set(diagnosis._FLAGS[processor["architecture"]][isa]) <= flags
