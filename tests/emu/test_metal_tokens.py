"""Whole models on the Metal backend: token for token what the CPU answers, for many requests at once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from devices import VARIANT
from metal_devices import APPLE, METAL, SCHEDULES, MetalDevice
from test_cuda_tokens import MODELS, check_tokens
from tiny_gguf import write_tiny_model

from rvllm import LLM

RUNS = [
    *((name, METAL) for name in MODELS),
    *((name, APPLE) for name in MODELS),
    *(("gemma3-windows", device) for device in SCHEDULES[1:]),
]


@pytest.mark.parametrize(("name", "device"), RUNS, ids=lambda value: getattr(value, "name", value))
def test_tokens_equal_those_of_the_cpu(
    name: str, device: MetalDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if VARIANT == "fast":
        monkeypatch.setattr("test_cuda_tokens.FLOAT_MATRICES", tuple(MODELS))
    check_tokens(name, tmp_path / "model.gguf", "metal", partial(device.use, monkeypatch))


def test_kv_cache_leaves_memory_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_model(path, quant="Q8_0")
    METAL.use(monkeypatch)
    monkeypatch.setattr("rvllm.model_runner._DEFAULT_KV_CACHE_BYTES", 1 << 20)

    def num_blocks(**settings: float) -> int:
        return LLM(path, device="metal", num_threads=1, **settings).engine.runner.kv_groups[0].num_blocks

    assert num_blocks() < num_blocks(gpu_memory_utilization=0.5)
