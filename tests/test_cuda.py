"""What the CUDA backend needs: where it is looked for, and what is said when it is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_gguf import write_tiny_model

from rvllm import LLM
from rvllm.config import ModelConfig
from rvllm.cuda import cublas_libraries, import_cuda
from rvllm.gguf_file import GGUFFile


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


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_more_tokens_than_a_launch_can_take_are_refused(arch: str, tmp_path: Path) -> None:
    """At most 65,535 blocks with 8 rows of a product each, before which each expert may leave 7 of them empty."""
    write_tiny_model(path := tmp_path / "model.gguf", arch)
    shape = ModelConfig.from_gguf(GGUFFile(path))
    most = (8 * 65_535 - 7 - 7 * shape.num_experts) // max(1, shape.num_experts_per_tok)
    message = f"max_num_batched_tokens must be at most {most} on cuda for this model, not {most + 1}"
    with pytest.raises(ValueError, match=message):
        LLM(path, device="cuda", max_num_batched_tokens=most + 1)
