"""What the CUDA backend needs: where it is looked for, and what is said when it is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rvllm.cuda import cublas_libraries, import_cuda


def test_cublas_of_the_environment_comes_before_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcublas.so.13").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", str(tmp_path)])
    assert cublas_libraries() == [str(folder / "libcublas.so.13"), "libcublas.so.13", "libcublas.so.12"]


def test_without_the_extension_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rvllm._cuda", None)
    with pytest.raises(ValueError, match=r"needs rvllm's CUDA extension.*CUDA_HOME"):
        import_cuda()


def test_an_extension_that_does_not_load_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_cuda.py").write_text("import no_such_module")
    import rvllm

    monkeypatch.delitem(sys.modules, "rvllm._cuda", raising=False)
    monkeypatch.setattr(rvllm, "__path__", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_cuda()
