"""scripts/peers: how vLLM and OpenVINO are driven, with fakes of both, and what they are given of a GGUF file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from batch_engine import BatchEngine
from test_compare import LOAD, make_worker, script
from tiny_gguf import write_tiny_model

TESTS = Path(__file__).resolve().parent
sys.path.append(str(script.WORKER.parent))
import batching_peer  # noqa: E402
import hf_model  # noqa: E402
from peer import Load, Options  # noqa: E402

THREE_STEPS = Load(batch_size=2, prompt_len=10, gen_len=5, depth=0, shared_prefix=0, copy_prefix=False)


class FakePeer(batching_peer.BatchingPeer):
    """A step takes a second."""

    def __init__(self, load: Load, max_num_seqs: int = 99) -> None:
        super().__init__(Options("", vocab_size=50, threads=1, step_tokens=8, seed=0, load=load))
        self.engine = BatchEngine(8, max_num_seqs)
        self.seconds = 0.0
        self.prompts: list[list[Sequence[int]]] = []

    def version(self) -> str:
        return "fake"

    def start(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        self.prompts.append(list(prompts))
        self.engine.requests.clear()
        for i, prompt in enumerate(prompts):
            self.engine.add(i, prompt, num_tokens)

    def step(self) -> None:
        self.engine.step()
        self.seconds += 1

    def token_ids(self) -> list[list[int]]:
        return [request.token_ids for request in self.engine.requests.values()]

    def stop(self) -> None:
        self.seconds += 100


def measure(peer: FakePeer, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    monkeypatch.setattr(batching_peer, "time", SimpleNamespace(perf_counter=lambda: peer.seconds))
    return peer.measure(peer.options.load, {})


def test_prefill_ends_with_the_last_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    # 8 tokens of the first prompt; its other 2 and 6 of the second; a token of the first and the other 4.
    peer = FakePeer(THREE_STEPS)
    assert measure(peer, monkeypatch) == (3, 5)
    assert [len(prompt) for prompt in peer.prompts[0]] == [10, 10]
    assert not peer.prefix_caching


def test_requests_that_wait_for_others_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="2 requests of 25 tokens did not run together"):
        measure(FakePeer(THREE_STEPS, max_num_seqs=1), monkeypatch)
    with pytest.raises(ValueError, match="batch size 8 must be less than 8 tokens a step"):
        measure(FakePeer(replace(THREE_STEPS, batch_size=8)), monkeypatch)


def test_contexts_are_computed_before_and_prefixes_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = FakePeer(replace(THREE_STEPS, depth=6))
    seconds = measure(peer, monkeypatch)
    again = measure(peer, monkeypatch)
    assert seconds == again and seconds[1] == 5
    contexts, prompts, same_contexts, others = peer.prompts
    assert contexts == same_contexts and contexts[0] != contexts[1] and prompts != others
    assert [prompt[:6] for prompt in prompts] == contexts
    assert peer.prefix_caching

    peer = FakePeer(replace(THREE_STEPS, depth=6, shared_prefix=4))
    measure(peer, monkeypatch)
    (context,), (first, second) = peer.prompts
    assert first[:6] == context and first[:10] == second[:10] and first != second


def test_answers_are_those_of_the_engine() -> None:
    assert FakePeer(THREE_STEPS).generate([1, 7], 4) == [8, 9, 10, 11]


@pytest.fixture(params=["vllm", "openvino"])
def worker(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "vllm" and sys.platform != "linux":
        pytest.skip("vLLM's peer binds threads as Linux does")
    monkeypatch.setenv("PYTHONPATH", f"{TESTS / 'fake_peers'}:{TESTS}")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    worker = make_worker(request.param, tmp_path)
    yield worker
    worker.close()


def test_engines_are_driven(worker: Any) -> None:
    if worker.engine == "vllm":
        assert "OMP_NUM_THREADS=1" in worker.version and "VLLM_ENABLE_V1_MULTIPROCESSING=0" in worker.version
    assert worker.settings == [{}]
    assert worker.generate([5, 6], 3) == [7, 8, 9]
    for load in (LOAD, {**LOAD, "batch_size": 4}):
        assert min(worker.measure(load, {}).values()) > 0
    with pytest.raises(RuntimeError, match=f"{worker.engine}: 5 requests of .* did not run together"):
        worker.measure({**LOAD, "batch_size": 5}, {})


def test_an_engine_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "openvino.py").write_text('raise ImportError("none\\nhere")')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="openvino: none here"):
        make_worker("openvino", tmp_path)


def test_config_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_model(path, "qwen2", heads=4, kv_heads=2, layers=3, tied=False)
    config = hf_model.GGUFModel(str(path)).config()
    sizes = (
        "num_attention_heads",
        "num_key_value_heads",
        "num_hidden_layers",
        "hidden_size",
        "head_dim",
        "vocab_size",
    )
    assert [config[name] for name in sizes] == [4, 2, 3, 64, 16, 260]
    assert (config["tie_word_embeddings"], config["attention_bias"]) == (False, True)
    assert config["rope_parameters"]["rope_type"] == "default"

    write_tiny_model(path, rope_freqs=[1, 1, 1, 1, 2, 4, 8, 8])
    config = hf_model.GGUFModel(str(path)).config()
    assert config["tie_word_embeddings"] and not config["attention_bias"]
    assert (config["rope_parameters"]["rope_type"], config["rope_parameters"]["factor"]) == ("llama3", 8.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"arch": "gemma3"}, "gemma3 is none of llama, qwen2, qwen3"),
        ({"rope_dim": 8}, "RoPE of a part of each head would be left out"),
        ({"metadata": {"llama.rope.scaling.type": "linear"}}, "llama.rope.scaling would be left out"),
    ],
)
def test_what_would_be_left_out_is_an_error(arguments: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_model(path, **arguments)
    with pytest.raises(ValueError, match=words):
        hf_model.GGUFModel(str(path)).config()


@pytest.mark.parametrize("quant", ["F32", "Q4_1"])
def test_query_rows_turn_as_hugging_face_turns_them(quant: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_model(path, quant=quant)
    ours, theirs = hf_model.GGUFModel(str(path)), hf_model.GGUFModel(str(path))
    x = np.random.default_rng(0).standard_normal(64)
    angles = np.linspace(0.1, 1.5, 8)
    turn = np.exp(1j * angles)  # of the pairs of a head of 16
    theirs.architecture = "qwen2"  # whose rows stay as they are
    for name, heads in (("blk.0.attn_q.weight", 4), ("blk.1.attn_k.weight", 2)):
        pairs = (theirs.take(name) @ x).reshape(heads, 8, 2)
        halves = (ours.take(name) @ x).reshape(heads, 2, 8)
        expected = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
        found = (halves[:, 0] + 1j * halves[:, 1]) * turn
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert name not in ours.tensors
    with pytest.raises(ValueError, match=r"blk\.0\.attn_q\.weight is missing"):
        ours.take("blk.0.attn_q.weight")
