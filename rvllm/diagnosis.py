"""What can be known of a machine and an installation before a model is loaded, and what it advises."""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from rvllm.models import DEFAULT_MODEL, KNOWN_MODELS, models_dir
from rvllm.system import affine_cpus, available_cpus, available_memory, cpu_quota
from rvllm.version import __version__

_CPUINFO = Path("/proc/cpuinfo")
_NVIDIA = Path("/proc/driver/nvidia")
_NUMA = Path("/sys/devices/system/node")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_PACKAGES = ("numpy", "tokenizers", "llguidance", "jinja2", "fastapi", "uvicorn", "pydantic")
# What csrc/cpu/cpu_features.cpp asks for, by the names of /proc/cpuinfo, slowest first.
_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx2": ("avx2", "fma", "f16c"),
        "avx_vnni": ("avx_vnni",),
        "avx512_vnni": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"),
        "amx": ("amx_tile", "amx_int8"),
    },
    "arm64": {"neon": ("asimddp",), "neon_i8mm": ("i8mm",)},
}
_ARCHITECTURES = {"amd64": "x86_64", "aarch64": "arm64"}  # other names of the same


def diagnose() -> dict[str, Any]:
    """Facts by section, as JSON takes them; a section that cannot be had is {"error": reason}. "hints": advice."""
    probes: dict[str, Callable[[], dict[str, Any]]] = {
        "versions": _versions,
        "processor": _processor,
        "cores": _cores,
        "memory": _memory,
        "cuda": _cuda,
        "metal": _metal,
        "cache": _cache,
    }
    facts: dict[str, Any] = {name: _try(probe) for name, probe in probes.items()}
    facts["hints"] = find_hints(facts)
    return facts


def _try(probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return probe()
    except Exception as error:  # a machine that is ill in a new way must not silence the other sections
        return {"error": _reason(error)}


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _versions() -> dict[str, Any]:
    found = {"rvllm": __version__, "python": platform.python_version(), "system": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _processor() -> dict[str, Any]:
    from rvllm import _core

    available = list(_core.available_isas())
    isa, problem = None, None
    try:
        isa = _core.detect_isa()
    except ValueError as error:
        problem = _reason(error)
    architecture = _ARCHITECTURES.get(platform.machine().lower(), platform.machine().lower())
    levels = _FLAGS.get(architecture, {})
    better = list(levels)
    if available[-1] in better:
        del better[: better.index(available[-1]) + 1]
    name, flags = _cpuinfo()
    return {
        "name": name,
        "architecture": architecture,
        "isa": isa,
        "problem": problem,
        "forced": os.environ.get("RVLLM_ISA") or None,
        "available_isas": available,
        "unavailable_isas": {isa: _why_not(levels[isa], flags) for isa in better},
    }


def _why_not(needed: tuple[str, ...], flags: set[str]) -> str:
    if not flags:
        return "the processor or the system lacks it"
    missing = [flag for flag in needed if flag not in flags]
    if missing:
        return f"the processor does not show {', '.join(missing)}"
    return "the processor has it, the system does not allow it (or a level below it is missing)"


def _cpuinfo() -> tuple[str, set[str]]:
    """Name and flags of the first processor; no flags where the system does not tell."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip(), set()
    fields: dict[str, str] = {}
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", ""))
    return fields.get("model name", "unknown"), set(flags.split())


def _cores() -> dict[str, Any]:
    quota = cpu_quota()
    return {
        "logical": psutil.cpu_count(),
        "physical": psutil.cpu_count(logical=False),
        "affinity": affine_cpus(),
        "quota": None if math.isinf(quota) else quota,
        "threads": available_cpus(),
        "numa_nodes": max(1, len(list(_NUMA.glob("node[0-9]*")))),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def _memory() -> dict[str, Any]:
    machine = psutil.virtual_memory()
    pages = re.search(r"\[(\w+)\]", _HUGE_PAGES.read_text()) if _HUGE_PAGES.exists() else None
    return {
        "total": machine.total,
        "machine_available": machine.available,
        "available": available_memory(),
        "huge_pages": None if pages is None else pages[1],
    }


def _cuda() -> dict[str, Any]:
    from rvllm.cuda import cublas_libraries, import_cuda

    models = [
        re.search(r"^Model:\s*(.+)$", file.read_text(), re.M) for file in _NVIDIA.glob("gpus/*/information")
    ]
    version = _NVIDIA / "version"
    driver = re.search(r"\d+\.\d+(?:\.\d+)*", version.read_text()) if version.exists() else None
    state = _gpu(import_cuda, lambda module: module.make_backend(1, cublas_libraries()))
    return {
        **state,
        "driver": None if driver is None else driver[0],
        "devices": [model[1].strip() if model else "an NVIDIA GPU" for model in models],
    }


def _metal() -> dict[str, Any]:
    from rvllm.metal import import_metal, kernel_library

    return _gpu(import_metal, lambda module: module.make_backend(1, kernel_library()))


def _gpu(load: Callable[[], ModuleType], make_backend: Callable[[ModuleType], Any]) -> dict[str, Any]:
    """Whether the backend can be had; what it raises says what is missing."""
    state: dict[str, Any] = {"built": False, "problem": None, "devices": [], "memory": None}
    try:
        module = load()
        state["built"] = True
        backend = make_backend(module)
        state["memory"] = list(backend.memory_info)
        state["devices"] = [name for name in [getattr(backend, "device_name", None)] if name]
    except Exception as error:
        state["problem"] = _reason(error)
    return state


def _cache() -> dict[str, Any]:
    folder = models_dir()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    model = KNOWN_MODELS[DEFAULT_MODEL]
    file = folder / f"{model.name}.gguf"
    if not file.is_file():
        state = "not there yet: fetched at its first use"
    elif file.stat().st_size != model.size:
        state = f"damaged: {file.stat().st_size} bytes of {model.size}; fetched again at its next use"
    else:
        state = "there"
    sizes = [path.stat().st_size for path in folder.rglob("*.gguf")]
    return {
        "folder": str(folder),
        "writable": there.is_dir() and os.access(there, os.W_OK),
        "free": shutil.disk_usage(there).free,
        "default_model": model.name,
        "default_model_state": state,
        "num_models": len(sizes),
        "bytes": sum(sizes),
    }


def find_hints(facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What would make generation faster, as far as the facts of diagnose() tell; a section may be an error."""
    known = {name: found for name, found in facts.items() if found.keys() != {"error"}}
    hints: list[str] = []
    for name, advise in (
        ("processor", _advise_isa),
        ("cores", _advise_cores),
        ("memory", _advise_memory),
        ("cuda", _advise_cuda),
        ("metal", _advise_metal),
    ):
        if name in known:
            hints += advise(known[name])
    return hints


def _advise_isa(found: Mapping[str, Any]) -> list[str]:
    best = found["available_isas"][-1]
    if found["forced"] and found["isa"] != best:
        return [f"RVLLM_ISA={found['forced']} is set: without it rvllm would take {best}"]
    if best == "scalar" and found["architecture"] in _FLAGS:
        levels = " or ".join(_FLAGS[found["architecture"]])
        return [f"a processor with {levels}: plain C++ is many times slower"]
    return []


def _advise_cores(found: Mapping[str, Any]) -> list[str]:
    hints = []
    threads = found["threads"]
    if found["affinity"] < found["logical"]:
        hints.append(f"its affinity keeps rvllm on {found['affinity']} of {found['logical']} processors")
    if found["quota"] is not None and found["quota"] < found["affinity"]:
        hints.append(f"a control group's quota grants the time of {found['quota']:g} processors (cpu.max)")
    if found["load"] is not None and found["load"] > max(1.0, threads / 2):
        hints.append(
            f"the load is {found['load']:.1f} with {threads} threads to use: whatever competes slows all of them"
        )
    return hints


def _advise_memory(found: Mapping[str, Any]) -> list[str]:
    hints = []
    if found["huge_pages"] == "never":
        hints.append(f"huge pages are off: as root, echo madvise > {_HUGE_PAGES}")
    if found["available"] < 2**30:
        hints.append("less than 1 GiB of memory is left: the KV cache holds few requests at a time")
    return hints


def _advise_cuda(found: Mapping[str, Any]) -> list[str]:
    if found["problem"] is None:
        return ["--device cuda: computes on the NVIDIA GPU"]
    return [f"the NVIDIA GPU cannot be used: {found['problem']}"] if found["devices"] else []


def _advise_metal(found: Mapping[str, Any]) -> list[str]:
    if found["problem"] is None:
        return ["--device metal: computes on the Apple GPU"]
    return [f"the Apple GPU cannot be used: {found['problem']}"] if sys.platform == "darwin" else []
