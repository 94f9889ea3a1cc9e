"""Layers with a sliding window keep only the blocks that it needs; answers are the same bits all the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scheduler_harness import Harness, assert_exact
from tiny_gguf import write_tiny_model

from rvllm import LLM, SamplingParams
from rvllm.block_manager import KVGroup, window_blocks

WINDOW = 40
RNG = np.random.default_rng(21)
PREFIX = RNG.integers(0, 256, 330).tolist()
PROMPTS = [
    PREFIX[:n] + RNG.integers(0, 256, m).tolist()
    for n, m in ((330, 5), (330, 90), (200, 30), (64, 1), (0, 300))
]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=12, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module", params=["gemma3", "llama"])
def arch(request: pytest.FixtureRequest) -> str:
    """Some layers with a window, or, as in Mistral, all of them."""
    return str(request.param)


@pytest.fixture(scope="module")
def path(arch: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    layers = 6 if arch == "gemma3" else 2
    write_tiny_model(
        path, arch, "Q8_0", layers=layers, kv_heads=1, sliding_window=WINDOW, context_length=8192
    )
    return path


@pytest.fixture(scope="module")
def alone(path: Path) -> list[Any]:
    """Each by itself, in one chunk, nothing cached, on the scalar kernels with one thread."""
    llm = LLM(path, isa="scalar", num_threads=1, num_blocks=64, enable_prefix_caching=False)
    return [llm.generate([prompt], PARAMS)[0].outputs for prompt in PROMPTS]


def num_held(llm: LLM) -> int:
    """Blocks of the layers with a window that requests hold."""
    pool = llm.engine.block_manager.pools[-1]
    return pool.num_blocks - len(pool.free)


@pytest.mark.parametrize(
    "settings",
    [
        *[{"max_num_batched_tokens": n} for n in (7, 64, 2048)],
        *[{"block_size": n, "num_blocks": 4096 // n, "max_num_batched_tokens": 50} for n in (1, 5, 32)],
        {"num_blocks": 27, "max_num_batched_tokens": 64},  # hardly more than the longest request
        {"max_num_seqs": 1, "max_num_batched_tokens": 32},  # 7 blocks in the window
        {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 60},
    ],
    ids=str,
)
def test_company_chunks_hits_and_small_pools_change_nothing(
    path: Path, alone: list[Any], settings: dict[str, Any]
) -> None:
    llm = LLM(path, **{"num_blocks": 256, "num_threads": 2, **settings})
    for _ in range(2):  # cold, then with the prefix cache warm
        assert [output.outputs for output in llm.generate(PROMPTS, PARAMS)] == alone
    assert num_held(llm) == 0
    llm.engine.scheduler.check_integrity()


def test_preempted_requests_and_choices_go_on(arch: str, path: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=60, logprobs=2, ignore_eos=True)
    roomy = LLM(path, num_blocks=512)
    tight = LLM(path, num_blocks=32 if arch == "gemma3" else 10, max_num_batched_tokens=48)
    expected = [output.outputs for output in roomy.generate(PROMPTS[:3], params)]
    assert [output.outputs for output in tight.generate(PROMPTS[:3], params)] == expected
    assert tight.engine.stats.preemptions > 0 == roomy.engine.stats.preemptions


def test_a_long_conversation_is_found_again(path: Path) -> None:
    """Each turn begins with all that was said before, of which the window has kept the end."""
    cold = LLM(path, num_blocks=64, enable_prefix_caching=False)
    warm = LLM(path, num_blocks=64, max_num_batched_tokens=48)
    tokens = list(PREFIX)
    for turn in range(3):
        output, expected = (llm.generate([tokens], PARAMS)[0] for llm in (warm, cold))
        assert output.outputs == expected.outputs
        assert output.num_cached_tokens >= (turn and (len(tokens) - 30) // 16 * 16)
        tokens += output.outputs[0].token_ids + PREFIX[turn : turn + 9]
    early = warm.generate([PREFIX[:100] + [7] * 9], PARAMS)[0]  # its window may be gone
    assert early.outputs == cold.generate([PREFIX[:100] + [7] * 9], PARAMS)[0].outputs


def test_4000_tokens_hold_no_more_than_window_and_chunk_need(arch: str, path: Path) -> None:
    llm = LLM(path, num_blocks=256, max_num_batched_tokens=256)
    prompt = np.random.default_rng(5).integers(0, 256, 4000).tolist()
    engine, held = llm.engine, []
    engine.add_request("long", prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
        held.append(num_held(llm))
    assert max(held) <= window_blocks(WINDOW, 256, 16) == 20
    assert max(held[-19:]) <= window_blocks(WINDOW, 1, 16) + 1 == 5
    windows = [group.window for group in engine.runner.kv_groups]
    assert windows == ([0, WINDOW] if arch == "gemma3" else [WINDOW])


def test_logits_of_a_long_text_take_a_window_at_a_time(arch: str, path: Path) -> None:
    num_blocks = 40 if arch == "gemma3" else 6
    llm = LLM(path, num_blocks=num_blocks, max_num_seqs=1, max_num_batched_tokens=16)
    assert llm.engine.runner.kv_groups[-1].num_blocks == 6
    tokens = PROMPTS[1]
    expected = LLM(path, num_blocks=40, enable_prefix_caching=False).get_logits(tokens)
    np.testing.assert_array_equal(llm.get_logits(tokens), expected)
    np.testing.assert_array_equal(llm.get_logits(tokens, 100), expected[100:])
    assert num_held(llm) == 0


# The scheduler alone


def test_a_long_request_holds_what_window_and_chunk_need() -> None:
    groups = [KVGroup(300), KVGroup(300, window=40)]
    harness = Harness(groups, block_size=4, budget=32)
    request, most = harness.add([i % 60 for i in range(1000)], max_tokens=100), 0
    pool = harness.scheduler.block_manager.pools[1]
    while harness.scheduler.has_unfinished:
        harness.step()
        most = max(most, pool.num_blocks - len(pool.free))
        assert (
            request.is_finished
            or request.num_output_tokens < 8
            or 300 - len(pool.free) <= window_blocks(40, 1, 4)
        )
    assert most <= window_blocks(40, 32, 4) == 19
    assert_exact(request)


def test_a_request_runs_in_the_fewest_blocks_of_a_window() -> None:
    harness = Harness([KVGroup(300), KVGroup(window_blocks(40, 32, 4), window=40)], block_size=4, budget=32)
    requests = [harness.add([i] * 300 + list(range(60)) * 4, max_tokens=20) for i in range(4)]
    harness.run()
    for request in requests:
        assert_exact(request)


def test_running_requests_that_share_what_leaves_a_window_are_preempted_not_stuck() -> None:
    harness = Harness([KVGroup(300), KVGroup(19, window=40)], block_size=4, budget=32, seqs=4)
    prompt = [i % 60 for i in range(64)]
    first = harness.add(prompt, 60)
    harness.step()
    rest = [harness.add([*prompt, i], 60) for i in range(3)]
    harness.run()
    assert harness.scheduler.num_preemptions > 0 == first.num_preemptions
    for request in (first, *rest):
        assert_exact(request)


def test_forks_of_a_long_prompt_are_found_beyond_the_window() -> None:
    harness = Harness([KVGroup(300), KVGroup(60, window=24)], block_size=4, budget=32)
    prompt = [i % 60 for i in range(400)]
    requests = [harness.add(prompt, 40) for _ in range(3)]
    harness.run()
    assert [request.num_cached_tokens for request in requests] == [0, 396, 396]
    again = harness.add([*requests[0].token_ids, 5, 5], 4)
    other = harness.add([*prompt[:200], 7, 7], 4)
    harness.run()
    assert again.num_cached_tokens == 436
    assert other.num_cached_tokens in range(201)  # whether what has left the window is at hand or not
    for request in (*requests, again, other):
        assert_exact(request)


def test_gemma3_is_exact_beyond_its_window(gemma3_path: Path) -> None:
    text = RNG.integers(1000, 200_000, 560).tolist()
    prompts = [[*text, 5000, 6000, 7000], [*text, 8000], text[:513], [*text[:100], 9000]]
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, ignore_eos=True)
    cold = LLM(gemma3_path, num_blocks=80, enable_prefix_caching=False)
    expected = [cold.generate([prompt], params)[0].outputs for prompt in prompts]
    for settings in (
        {"num_blocks": 256, "max_num_batched_tokens": 200},
        {"num_blocks": 80, "max_num_seqs": 1},
    ):
        llm = LLM(gemma3_path, **settings)
        assert [output.outputs for output in llm.generate(prompts, params)] == expected
        assert llm.engine.stats.prefix_hits > 0
    answer = expected[0][0].token_ids
    longer = prompts[0] + answer + [777]
    (output,) = llm.generate([longer], params)
    assert output.outputs == cold.generate([longer], params)[0].outputs
