"""What is said when the Metal backend is missing, and where its kernels are looked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import rvllm.metal
from rvllm.metal import import_metal, kernel_library


@pytest.mark.parametrize(
    ("platform", "words"), [("linux", "built on macOS alone"), ("darwin", "xcode-select --install")]
)
def test_without_the_extension_it_is_said_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, platform: str, words: str
) -> None:
    monkeypatch.setitem(sys.modules, "rvllm._metal", None)
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(ValueError, match=words):
        import_metal()


def test_compiled_kernels_come_before_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rvllm.metal, "__file__", str(tmp_path / "metal.py"))
    assert kernel_library() == str(tmp_path / "metal_kernels.metal")
    (tmp_path / "metal_kernels.metallib").touch()
    assert kernel_library() == str(tmp_path / "metal_kernels.metallib")
