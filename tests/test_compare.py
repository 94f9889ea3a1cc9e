"""scripts/compare_llama_cpp.py: how the engines are driven and the ratios formed. rvllm stands in for llama.cpp."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_gguf import write_tiny_model

from rvllm.benchmark import Workload

LOAD = {"batch_size": 2, "prompt_len": 20, "gen_len": 3, "depth": 0, "shared_prefix": 0, "copy_prefix": False}
SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "compare_llama_cpp.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[SCRIPT.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path)
    return path


def make_worker(engine: str, model: Path) -> Any:
    options = {
        "model": str(model),
        "vocab_size": 260,
        "threads": 1,
        "step_tokens": 64,
        "seed": 0,
        "load": {**LOAD, "batch_size": 4},
        "isa": None,
    }
    return script.Worker(sys.executable, engine, options)


@pytest.fixture
def worker(model: Path) -> Iterator[Any]:
    worker = make_worker("rvllm", model)
    yield worker
    worker.close()


class FakeWorker:
    """An engine that takes the seconds its settings say: [prefill, decode]."""

    def __init__(self, engine: str, log: list[str], *settings: Mapping[str, object]) -> None:
        self.engine = engine
        self.log = log
        self.settings = settings

    def measure(self, load: Mapping[str, object], setting: Mapping[str, Any]) -> dict[str, float]:
        self.log.append(self.engine)
        prefill, decode = setting["seconds"]
        return {"prefill": prefill, "decode": decode, "total": prefill + decode}

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        return [len(self.settings)] * 2 + list(range(2, num_tokens))

    def cpu_seconds(self) -> float:
        return 0.0


def test_best_setting_of_each_phase_counts() -> None:
    log: list[str] = []
    settings = [{"seconds": s} for s in ([4.0, 9.0], [8.0, 4.0], [7.0, 7.0])]
    ours, peer = FakeWorker("rvllm", log, {"seconds": [2.0, 1.0]}), FakeWorker("peer", log, *settings)
    row = script.compare(ours, peer, Workload(2, 10, 5, shared_prefix=4), pairs=3)
    assert [row[phase]["ratio"] for phase in script.PHASES] == [2.0, 4.0, 4.0]
    assert [row[phase]["setting"]["seconds"] for phase in script.PHASES] == [
        [4.0, 9.0],
        [8.0, 4.0],
        [8.0, 4.0],
    ]
    assert (row["prefill"]["rvllm"], row["prefill"]["peer"]) == (8.0, 4.0)  # 4 + 2 * 6 tokens
    assert (row["decode"]["rvllm"], row["decode"]["peer"]) == (10.0, 2.5)
    assert (row["total"]["rvllm"], row["total"]["peer"]) == (26 / 3, 26 / 12)
    assert row["decode"]["ratios"] == [4.0] * 3
    # A trial of each setting, then pairs in alternating order, without the setting that won nothing.
    pairs = ["rvllm", "peer", "peer", "peer", "peer", "rvllm", "rvllm", "peer", "peer"]
    assert log == ["rvllm", "peer", "peer", "peer", *pairs]


def test_worker_measures(worker: Any) -> None:
    assert worker.version.startswith("rvllm ")
    seconds = worker.measure({**LOAD, "depth": 16, "shared_prefix": 4}, worker.settings[0])
    assert list(seconds) == list(script.PHASES) and min(seconds.values()) > 0
    assert seconds["total"] == seconds["prefill"] + seconds["decode"]


def test_engines_are_asked_the_same(worker: Any, capsys: pytest.CaptureFixture[str]) -> None:
    token_ids = worker.generate([72, 101, 108], 5)
    assert len(token_ids) == 5 and worker.generate([72, 101, 108], 3) == token_ids[:3]
    assert script.same_greedy_tokens(worker, worker, [72, 101]) == 16
    assert capsys.readouterr().err == ""
    assert script.same_greedy_tokens(FakeWorker("a", []), FakeWorker("b", [], {}), [1]) == 0
    assert capsys.readouterr().err.startswith("warning: b gives another first token")


def test_engine_errors_are_reported(worker: Any) -> None:
    with pytest.raises(RuntimeError, match="rvllm: batch size 9 is more than max_num_seqs 4"):
        worker.measure({**LOAD, "batch_size": 9}, worker.settings[0])


def test_the_whole_script(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_worker = script.Worker
    # The peer is a second rvllm: llama.cpp is not there where tests run.
    monkeypatch.setattr(
        script, "Worker", lambda python, engine, options: make_worker(python, "rvllm", options)
    )
    argv = ["-m", str(model), "--batch-sizes", "1,3", "--prompt-len", "8", "--gen-len", "2", "--pairs", "2"]
    assert script.main([*argv, "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert [row["batch_size"] for row in result["rows"]] == [1, 3]
    assert result["same_greedy_tokens"] == "16 of 16" and set(result["tensors"]) == {"F32"}
    for row in result["rows"]:
        assert 0 <= row["other_load"] <= 1
        for phase in script.PHASES:
            assert len(row[phase]["ratios"]) == 2 and row[phase]["rvllm"] > 0
    assert script.main(argv) == 0
    table = [line for line in capfd.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 4 and len({line.count("|") for line in table}) == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--shared-prefix", "200"], "shared_prefix must be between 0 and prompt_len 128, got 200"),
        (["--model", "missing.gguf"], "missing.gguf"),
        (["--peer-python", "/missing/python"], "/missing/python"),
        (["--peer", "vllm", "--copy-prefix"], "--copy-prefix: vllm shares a prefix by itself"),
    ],
)
def test_errors_are_one_line(
    model: Path, argv: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["-m", str(model), *argv]) == 2
    out, err = capfd.readouterr()
    assert (
        out == ""
        and err.startswith("compare_llama_cpp.py: error: ")
        and err.count("\n") == 1
        and words in err
    )
