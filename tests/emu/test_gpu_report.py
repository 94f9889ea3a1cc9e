"""scripts/gpu_report.py, with the emulator in place of the GPU."""

from __future__ import annotations

from pathlib import Path

import gpu_report
import numpy as np
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
    assert gpu_report.compare() == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert {row.split("|")[1].split()[0].strip(",") for row in rows} >= {
        "linear",
        "norm",
        "rope",
        "activation",
        "attention",
    }
    assert all(row.split("|")[3:5] == [" 0, 0, 0 ", " 0 "] for row in rows)


@pytest.mark.parametrize(("name", "status"), [("linear F16, 24 rows", 0), ("linear F16, 1 rows", 1)])
def test_other_bits_than_the_emulators_are_a_failure(
    name: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But where cuBLAS multiplies."""
    monkeypatch.setattr(gpu_report, "BLOCK_FIELDS", [])
    (operation,) = (o for o in gpu_report.operations() if o.name == name)
    results = iter(np.float32([[1, 2], [1, 2], [1, 3], [1, 2]]))  # of three GPUs and the emulator
    monkeypatch.setattr(
        gpu_report, "operations", lambda: [operation._replace(run=lambda backend: next(results))]
    )
    assert gpu_report.compare() == status
    output = capsys.readouterr().out
    assert f"| {name} | 2 | 0, 0, 1 | 1 | 0.5 |" in output and f"do not: {status}." in output


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


def test_the_model_follows_the_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_report, "speed", lambda model, seconds: (str(model), seconds))
    assert gpu_report.main(["speed", "--seconds", "50", "a.gguf"]) == ("a.gguf", 50)
    with pytest.raises(SystemExit):
        gpu_report.main(["speed", "a.gguf", "b.gguf"])
    assert "speed takes one model, not 2" in capsys.readouterr().err


def test_tokens_and_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "tiny.gguf"
    write_tiny_model(model, quant="Q4_1")
    monkeypatch.setattr(gpu_report, "NUM_TOKENS", 2)
    assert gpu_report.tokens([model]) == 0
    assert "| tiny | 8 of 8 |" in capsys.readouterr().out
    for name, value in (
        ("PROMPT_LEN", 8),
        ("GEN_LEN", 2),
        ("PROFILED_LEN", 2),
        ("BATCH_SIZES", (2,)),
        ("PROFILED", (1, 2)),
    ):
        monkeypatch.setattr(gpu_report, name, value)
    monkeypatch.setattr(gpu_report, "cublas_bf16_macs_per_second", lambda: 1e12)
    monkeypatch.setattr(
        gpu_report,
        "kernel_seconds",
        lambda _, workload: {"norm_kernel": 1.0} if workload.batch_size == 1 else {},
    )
    assert gpu_report.speed(model, float("inf")) == 0
    output = capsys.readouterr().out
    assert "| 2 | " in output and "With --prefill-compute f16, 16 requests: prefill " in output
    assert "| norm_kernel | 100.0% |" in output and "The profiler saw no kernel with 2 requests." in output
