"""scripts/gpu_report.py, with the emulator in place of the GPU."""

from __future__ import annotations

from pathlib import Path

import gpu_report
import pytest
from devices import SCHEDULES, VARIANT, use_cuda
from gguf import GGMLQuantizationType as GGMLType
from tiny_gguf import write_tiny_model

pytestmark = pytest.mark.skipif(VARIANT != "plain", reason="not of kernels")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda(SCHEDULES[0], monkeypatch)


def test_every_operation_is_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_report, "BLOCK_FIELDS", [GGMLType.Q4_K])
    monkeypatch.setattr(gpu_report, "attend", lambda backend, kv_type: gpu_report.normal(4))
    gpu_report.compare()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert {row.split("|")[1].split()[0].strip(",") for row in rows} >= {
        "linear",
        "norm",
        "rope",
        "activation",
        "attention",
    }
    assert all(row.split("|")[3:5] == [" 0 ", " 0 "] for row in rows)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (
            "rvllm::cuda::(anonymous namespace)::norm_kernel(float*, long, rvllm::cuda::NormRow)",
            "norm_kernel",
        ),
        ("void rvllm::cuda::(anonymous namespace)::pack_kernel<(int)4, ns::T>(float*)", "pack_kernel"),
        ("void plain<float>(float*)", "plain"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD"),
    ],
)
def test_kernels_are_told_apart(key: str, name: str) -> None:
    assert gpu_report.kernel_name(key) == name


def test_models_follow_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "speed", lambda models, seconds: len(models) * seconds)
    assert gpu_report.main(["speed", "--seconds", "50", "a.gguf", "b.gguf"]) == 100


def test_tokens_and_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "tiny.gguf"
    write_tiny_model(model, quant="Q4_1")
    monkeypatch.setattr(gpu_report, "NUM_TOKENS", 2)
    assert gpu_report.tokens([model]) == 0
    assert "| tiny | 8 of 8 |" in capsys.readouterr().out
    for name, value in (("PROMPT_LEN", 8), ("GEN_LEN", 2), ("BATCH_SIZES", (2,)), ("PROFILED", (1,))):
        monkeypatch.setattr(gpu_report, name, value)
    monkeypatch.setattr(gpu_report, "kernel_seconds", lambda benchmark, workload: {"norm_kernel": 1.0})
    gpu_report.measure_model(model, 1e12, float("inf"))
    output = capsys.readouterr().out
    assert "| 2 | " in output and "| norm_kernel | 100.0% |" in output
    assert "With --prefill-compute f16, 16 requests: prefill " in output
