"""scripts/mutate_kernels.py: which places it breaks, and how."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutate_kernels import ROOT, TARGETS, keep_formats, mutants_of


@pytest.mark.parametrize(
    ("kind", "code", "mutants"),
    [
        ("barrier", "if (warps > 1) __syncthreads();", ["if (warps > 1) ;"]),
        ("index", "y = x[i ? a : b[j]];", ["y = x[i ? a : b[j] + 1];", "y = x[i ? a : b[j + 1]];"]),
        ("index", "float sums[kUnit][4];", []),
        ("index", "typename F::Chunk scales[2][kTiles];", []),
        ("bound", "i < n && m >= 2;", ["i <= n && m >= 2;", "i < n && m > 2;"]),
        ("scale", "y = x * 0.5f;", ["y = x * (0.5f * 1.01f);"]),
        ("scale", "y = x * scale;  // x * 0.5f", ["y = x * scale * 1.01f;"]),
        ("sign", "sum += x;", ["sum -= x;"]),
        ("call", "~Own() { [object_ release]; }", ["~Own() { ; }"]),
        ("call", "const size_t bytes = size_of(x);", []),
        ("call", "if (!x) fail(x);", []),
        ("retain", "x = Own<T>::retained([queue y]);", ["x = Own<T>([queue y]);"]),
        ("retain", "Own<T> x([[T alloc] init]);", ["Own<T> x([[[T alloc] init] retain]);"]),
        ("argument", "f(a, g(b), 1);", ["f(g(b), a, 1);", "f(a, 1, g(b));"]),
        ("number", 'f(x2, 16, "of 3");', ['f(x2, 17, "of 3");']),
        ("flag", "if (f(x)) y = NO;", ["if (f(x)) y = YES;", "if (!(f(x))) y = NO;"]),
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
    assert files >= target.others | set(target.near)
    assert not target.others & set(target.near)
    broken = [ROOT / target.folder / name for name in files - target.others]
    mutants = [
        m for path in broken if path.suffix in target.suffixes for m in mutants_of(path, [*target.kinds])
    ]
    assert {m.kind for m in mutants} == target.kinds


def test_formats_that_are_left_out_throw() -> None:
    lines = [f"template void quantized_linear_of<Format{name}>(int);" for name in ("Q4_1", "Q4_K")]
    kept, left_out = keep_formats("\n".join(lines), ["Q4_1"]).splitlines()[1:]
    assert kept == lines[0]
    assert left_out.startswith("template <> void quantized_linear_of<FormatQ4_K>(int) { throw ")
