"""An engine on the fake runner and the fake tokenizer, and what its tests share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fake_runner import FakeRunner, tokens_alone
from fake_tokenizer import FakeTokenizer

from rvllm.block_manager import KVGroup
from rvllm.config import EngineConfig
from rvllm.engine import LLMEngine
from rvllm.request import RequestOutput
from rvllm.sampling_params import SamplingParams


def make_engine(
    num_blocks: int = 128, block_size: int = 4, context_length: int = 512, window: int = 0, **config: Any
) -> LLMEngine:
    """window: of some of the model's layers."""
    groups = [KVGroup(num_blocks), KVGroup(num_blocks, window)] if window else num_blocks
    runner = FakeRunner(groups, block_size)
    engine_config = EngineConfig(block_size=block_size, **{"seed": 0, **config})
    return LLMEngine(SimpleNamespace(context_length=context_length), engine_config, FakeTokenizer(), runner)


def run(engine: LLMEngine, check: bool = True) -> dict[str, RequestOutput]:
    """Steps until nothing is left; returns each request's joined output."""
    results = {request_id: group.empty_output() for request_id, group in engine._groups.items()}
    while engine.has_unfinished:
        for output in engine.step():
            results[output.request_id].add(output)
        if check:
            engine.scheduler.check_integrity()
    return results


def generate(engine: LLMEngine, prompt: list[int] | str, **params: Any) -> RequestOutput:
    engine.add_request("only", prompt, SamplingParams(**{"temperature": 0, **params}))
    return run(engine)["only"]


def assert_drained(engine: LLMEngine) -> None:
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting, stats.free_blocks) == (0, 0, stats.num_blocks)
    assert not engine._groups
    engine.scheduler.check_integrity()


def assert_usable(engine: LLMEngine) -> None:
    assert_drained(engine)
    output = generate(engine, [5, 6, 7], ignore_eos=True, max_tokens=4)
    assert output.outputs[0].token_ids == tokens_alone([5, 6, 7], 4)
