"""Show what rvllm finds on this machine and in this installation, what it makes of it, and what would be faster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rvllm.cli.info import mib, section
from rvllm.cli.printer import use_utf8

HELP = "show what rvllm finds on this machine, and what would make it faster"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from rvllm.diagnosis import diagnose

    facts = diagnose()
    use_utf8()
    print(json.dumps(facts, ensure_ascii=False, indent=2) if args.json else "\n".join(_lines(facts)))
    return 0


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    show = {
        "processor": _processor,
        "cores": _cores,
        "memory": _memory,
        "cuda": _gpu,
        "metal": _gpu,
        "cache": _cache,
    }
    titles = {"cuda": "CUDA", "metal": "Metal"}
    for name, found in facts.items():
        if name == "hints":
            continue
        entries = {"error": found["error"]} if found.keys() == {"error"} else show.get(name, dict)(found)
        yield from section(titles.get(name, name.capitalize()), entries)
    yield "What would make it faster"
    yield from (f"  - {hint}" for hint in facts["hints"] or ["nothing that can be seen from here"])


def _processor(found: Mapping[str, Any]) -> dict[str, Any]:
    chosen = found["isa"] if found["problem"] is None else f"none: {found['problem']}"
    why = f"RVLLM_ISA={found['forced']}" if found["forced"] else "the best this machine can run"
    lines = {"name": found["name"], "architecture": found["architecture"], "ISA": f"{chosen} ({why})"}
    lines["can run"] = ", ".join(found["available_isas"])
    return lines | {f"not {isa}": reason for isa, reason in found["unavailable_isas"].items()}


def _cores(found: Mapping[str, Any]) -> dict[str, Any]:
    quota = "no limit" if found["quota"] is None else f"{found['quota']:g}"
    return {
        "of the machine": f"{found['logical']} ({found['physical'] or 'an unknown number of'} physical)",
        "by affinity": found["affinity"],
        "by control group": quota,
        "threads": f"{found['threads']} by default",
        "NUMA nodes": found["numa_nodes"],
        "load": "unknown" if found["load"] is None else f"{found['load']:.1f} in the last minute",
    }


def _memory(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "of the machine": f"{mib(found['total'])}, {mib(found['machine_available'])} available",
        "for rvllm": f"{mib(found['available'])} (within its control groups)",
        "huge pages": found["huge_pages"] or "unknown: this system does not tell",
    }


def _gpu(found: Mapping[str, Any]) -> dict[str, Any]:
    state = "usable" if found["problem"] is None else f"not usable: {found['problem']}"
    lines = {"state": state, "extension": "built" if found["built"] else "not built"}
    if "driver" in found:
        lines["driver"] = found["driver"] or "none found"
    lines["devices"] = ", ".join(found["devices"]) or "none found"
    if found["memory"] is not None:
        free, total = found["memory"]
        lines["memory"] = f"{mib(free)} free of {mib(total)}"
    return lines


def _cache(found: Mapping[str, Any]) -> dict[str, Any]:
    writable = "" if found["writable"] else ", which cannot be written: set RVLLM_CACHE to another"
    return {
        "folder": f"{found['folder']}{writable}",
        "free space": mib(found["free"]),
        "default model": f"{found['default_model']} ({found['default_model_state']})",
        "models": f"{found['num_models']} files, {mib(found['bytes'])}",
    }
