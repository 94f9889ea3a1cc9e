"""scripts/ptxas_table.py reads what ptxas -v says, finds the worst of all architectures, and fails on spills."""

import io
import sys

import ptxas_table
import pytest

LOG = """\
nvcc -O3 -c csrc/cuda/norm.cu -o norm.o
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3sumPfPKfi' for 'sm_75'
ptxas info    : Function properties for _Z3sumPfPKfi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 11 registers, used 1 barriers, 128 bytes smem, 372 bytes cmem[0]
ptxas info    : Compiling entry function '_Z3sumPfPKfi' for 'sm_90'
ptxas info    : Function properties for _Z3sumPfPKfi
    {frame} bytes stack frame, {frame} bytes spill stores, {frame} bytes spill loads
ptxas info    : Used 13 registers, used 1 barriers
"""


def run(monkeypatch: pytest.MonkeyPatch, log: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ptxas_table.py"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(log))
    return ptxas_table.main()


def test_worst_of_all_architectures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, LOG.format(frame=0)) == 0
    header, row, summary = capsys.readouterr().out.splitlines()
    assert header.split() == ["registers", "shared", "spilled", "kernel"]
    assert row.split()[:3] == ["13", "128", "0"]
    assert summary == "1 kernels for sm_75, sm_90; 0 of them spill"


def test_a_spill_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, LOG.format(frame=8)) == 1
    assert "16" in (row := capsys.readouterr().out.splitlines()[1])
    assert row.endswith("(spills on sm_90)")


def test_a_log_without_kernels_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "gcc -c x.c\n") == 1
    assert "names no kernel" in capsys.readouterr().err
