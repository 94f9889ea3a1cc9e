"""Runs of the command line within this process."""

from __future__ import annotations

import pytest

from rvllm.cli import main


class Run:
    """One run of the command: exit status and the two outputs."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *argv: str) -> None:
        capsys.readouterr()
        self.status = main(argv)
        self.out, self.err = capsys.readouterr()

    def assert_refused(self, *words: str) -> None:
        assert (self.status, self.out) == (2, "")
        assert self.err.startswith("rvllm: error: ") and self.err.count("\n") == 1
        for word in words:
            assert word in self.err
