"""Beyond 256 positions attention merges partitions of the context: the same bits in any company all the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import write_tiny_model

from rvllm import LLM, SamplingParams
from rvllm._core import available_isas

RNG = np.random.default_rng(12)
PREFIX = RNG.integers(0, 256, 250).tolist()
PROMPTS = [PREFIX + RNG.integers(0, 256, n).tolist() for n in (1, 5, 6, 7, 60, 262, 270, 330)]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=10, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    more = {"llama": {"quant": "Q4_0"}, "gemma3": {"quant": "Q8_0", "layers": 6, "sliding_window": 270}}
    write_tiny_model(path, request.param, context_length=1024, **more[request.param])  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="module")
def alone(path: Path) -> list[Any]:
    """Each by itself, nothing cached, on the scalar kernels with one thread."""
    llm = LLM(
        path,
        isa="scalar",
        num_threads=1,
        num_blocks=64,
        enable_prefix_caching=False,
        max_num_batched_tokens=37,
    )
    return [llm.generate([prompt], PARAMS)[0].outputs for prompt in PROMPTS]


@pytest.mark.parametrize(
    "settings",
    [
        *[{"isa": isa} for isa in available_isas()[1:]],
        *[{"max_num_batched_tokens": n} for n in (50, 256, 2048)],
        *[{"block_size": n} for n in (7, 64)],
    ],
    ids=str,
)
def test_company_changes_nothing(path: Path, alone: list[Any], settings: dict[str, Any]) -> None:
    llm = LLM(path, **{"num_blocks": 512, "num_threads": 2, **settings})
    for _ in range(2):  # cold, then with the prefix cache warm
        assert [output.outputs for output in llm.generate(PROMPTS, PARAMS)] == alone
    assert llm.engine.stats.prefix_hits > 0


def test_preemption_changes_nothing(path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=50, logprobs=2, ignore_eos=True)
    roomy, tight = LLM(path, num_blocks=512), LLM(path, num_blocks=26, max_num_batched_tokens=64)
    expected = [output.outputs for output in roomy.generate(PROMPTS[:4], params)]
    assert [output.outputs for output in tight.generate(PROMPTS[:4], params)] == expected
    assert tight.engine.stats.preemptions > 0 == roomy.engine.stats.preemptions
