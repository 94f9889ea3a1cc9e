"""scripts/mutate_kernels.py: which places it breaks, and how."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutate_kernels import KINDS, ROOT, TARGETS, mutants_of


@pytest.mark.parametrize(
    ("kind", "code", "mutants"),
    [
        ("barrier", "if (warps > 1) __syncthreads();", ["if (warps > 1) ;"]),
        ("index", "y = x[i ? a : b[j]];", ["y = x[i ? a : b[j] + 1];", "y = x[i ? a : b[j + 1]];"]),
        ("index", "float sums[kUnit][4];", []),
        ("bound", "i < n && m >= 2;", ["i <= n && m >= 2;", "i < n && m > 2;"]),
        ("scale", "y = x * 0.5f;", ["y = x * (0.5f * 1.01f);"]),
        ("scale", "y = x * scale;  // x * 0.5f", ["y = x * scale * 1.01f;"]),
        ("sign", "sum += x;", ["sum -= x;"]),
    ],
)
def test_each_place_is_broken(kind: str, code: str, mutants: list[str], tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text(f"#pragma once\n{code}\n")
    found = mutants_of(path, [kind])
    assert [(m.line, m.after) for m in found] == [(2, text) for text in mutants]


@pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="needs the source tree")
@pytest.mark.parametrize("device", TARGETS)
def test_every_file_has_tests_and_every_kind_places(device: str) -> None:
    target = TARGETS[device]
    files = {p.name for p in (ROOT / target.folder).iterdir()}
    assert files >= target.host_code | set(target.near)
    assert not target.host_code & set(target.near)
    mutants = [
        m for name in files - target.host_code for m in mutants_of(ROOT / target.folder / name, [*KINDS])
    ]
    assert {m.kind for m in mutants if Path(m.file).suffix in target.suffixes} == set(KINDS)
