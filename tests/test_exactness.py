"""The whole engine on models: exact answers in any company, and the reference paths of real models.

Log-probabilities come from the logits by one fixed computation, so equal ones mean equal logits.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from rvllm import LLM, SamplingParams
from rvllm._core import available_isas
from rvllm.request import RequestOutput

DATA = Path(__file__).parent / "data"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=5, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.2, seed=5, max_tokens=12, logprobs=5, ignore_eos=True)

Prompts = list[list[int]]
Answer = tuple[list[int], list[dict[int, float]]]


def answer(output: RequestOutput) -> Answer:
    choice = output.outputs[0]
    assert choice.logprobs is not None
    return choice.token_ids, [{i: p.logprob for i, p in entry.items()} for entry in choice.logprobs]


def answers(llm: LLM, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams]) -> list[Answer]:
    return [answer(output) for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Path:
    return tiny_model


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    """64 prompts of 1 to 90 tokens; some share a prefix that ends inside a block."""
    rng = np.random.default_rng(11)
    prefix = rng.integers(0, 256, 37).tolist()
    sizes = rng.integers(1, 90, 64)
    return [(prefix if i % 3 == 0 else []) + rng.integers(0, 256, n).tolist() for i, n in enumerate(sizes)]


@pytest.fixture(scope="module")
def alone(model: Path, prompts: Prompts) -> dict[str, list[Answer]]:
    """Each prompt by itself, nothing cached, on the scalar kernels with one thread."""
    llm = LLM(model, isa="scalar", num_threads=1, enable_prefix_caching=False)
    return {
        name: [answers(llm, [prompt], params)[0] for prompt in prompts]
        for name, params in (("greedy", GREEDY), ("seeded", SEEDED))
    }


@pytest.mark.parametrize("batch", [2, 8, 64])
def test_batched_equals_alone(
    model: Path, prompts: Prompts, alone: dict[str, list[Answer]], batch: int
) -> None:
    llm = LLM(model, enable_prefix_caching=False)
    for start in range(0, 64, batch):
        part = slice(start, start + batch)
        assert answers(llm, prompts[part], GREEDY) == alone["greedy"][part]
        assert answers(llm, prompts[part], SEEDED) == alone["seeded"][part]


def test_mixed_sampling_in_one_batch(model: Path, prompts: Prompts, alone: dict[str, list[Answer]]) -> None:
    params = [GREEDY if i % 2 else SEEDED for i in range(64)]
    expected = [alone["greedy" if i % 2 else "seeded"][i] for i in range(64)]
    assert answers(LLM(model), prompts, params) == expected


@pytest.mark.parametrize(
    "settings",
    [
        *[{"max_num_batched_tokens": n} for n in (1, 7, 16, 2048)],
        *[{"num_threads": n} for n in (1, 2)],
        *[{"isa": isa} for isa in available_isas()],
        *[{"block_size": n} for n in (1, 5, 32)],
        {"max_num_seqs": 3},
        {"num_blocks": 14},  # about two of the longest requests
    ],
    ids=str,
)
def test_equal_under_every_setting(
    model: Path, prompts: Prompts, alone: dict[str, list[Answer]], settings: dict[str, object]
) -> None:
    llm = LLM(model, **settings)  # type: ignore[arg-type]
    assert answers(llm, prompts, GREEDY) == alone["greedy"]
    assert answers(llm, prompts, SEEDED) == alone["seeded"]
    assert llm.engine.stats.free_blocks == llm.engine.stats.num_blocks


@pytest.mark.parametrize("kv_cache_dtype", ["f16", "f32", "bf16", "q8_0"])
def test_a_long_shared_prefix_answers_as_alone(model: Path, kv_cache_dtype: str) -> None:
    prefix, rng = np.random.default_rng(3).integers(0, 256, 300).tolist(), np.random.default_rng(4)
    prompts = [prefix + rng.integers(0, 256, n).tolist() for n in (3, 40, 90, 17)]
    alone = LLM(
        model, kv_cache_dtype=kv_cache_dtype, isa="scalar", num_threads=1, enable_prefix_caching=False
    )
    expected = [answers(alone, [prompt], SEEDED)[0] for prompt in prompts]
    llm = LLM(model, kv_cache_dtype=kv_cache_dtype)
    assert answers(llm, prompts, SEEDED) == expected
    assert llm.engine.stats.prefix_hits >= 3 * 288


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 16}, {"enable_prefix_caching": False}], ids=str
)
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0, "seed": 3, "logprobs": 3},
        {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 1.0, "seed": 4, "n": 2},
        {"temperature": 0.0, "min_tokens": 100, "ignore_eos": False},
    ],
    ids=str,
)
def test_preempted_requests_go_on_as_if_nothing_happened(
    model: Path, prompts: Prompts, params: dict[str, object], settings: dict[str, object]
) -> None:
    sampling = SamplingParams(**{"max_tokens": 120, "ignore_eos": True, **params})  # type: ignore[arg-type]
    some = [prompt[:40] for prompt in prompts[:6]]
    roomy = LLM(model).generate(some, sampling, use_tqdm=False)
    tight = LLM(model, num_blocks=24, **settings)  # type: ignore[arg-type]
    for output, expected in zip(tight.generate(some, sampling, use_tqdm=False), roomy, strict=True):
        assert output.outputs == expected.outputs
    stats = tight.engine.stats
    assert stats.preemptions > 0 and stats.free_blocks == 24


def test_prefix_hits_equal_cold_runs(model: Path, prompts: Prompts, alone: dict[str, list[Answer]]) -> None:
    llm = LLM(model)
    for _ in range(3):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [answer(output) for output in outputs] == alone["greedy"]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    assert llm.engine.stats.prefix_hits > 0


def test_every_length_around_a_block(model: Path) -> None:
    """A prompt that is all in the cache still leaves a token to compute."""
    tokens = np.random.default_rng(3).integers(0, 256, 66).tolist()
    cold = LLM(model, enable_prefix_caching=False)
    warm = LLM(model)
    expected = {n: answers(cold, [tokens[:n]], GREEDY)[0] for n in range(1, 67)}
    order = np.random.default_rng(4).permutation(np.repeat(np.arange(1, 67), 2)).tolist()
    for n in [*range(1, 67), *order]:
        assert answers(warm, [tokens[:n]], GREEDY)[0] == expected[n]


def test_a_prefix_that_ends_inside_a_block_is_shared_up_to_it(model: Path) -> None:
    rng = np.random.default_rng(8)
    prefix, x, y = (rng.integers(0, 256, n).tolist() for n in (37, 20, 20))
    cold, warm = LLM(model, enable_prefix_caching=False), LLM(model)
    first = warm.generate([prefix + x], GREEDY, use_tqdm=False)[0]
    second = warm.generate([prefix + y], GREEDY, use_tqdm=False)[0]
    assert second.num_cached_tokens == 32
    assert answer(second) == answers(cold, [prefix + y], GREEDY)[0]
    longer = prefix + x + first.outputs[0].token_ids + [10]
    third = warm.generate([longer], GREEDY, use_tqdm=False)[0]
    assert third.num_cached_tokens >= 64  # generated blocks are found, too
    assert answer(third) == answers(cold, [longer], GREEDY)[0]


def test_arrival_steps_change_nothing(model: Path, prompts: Prompts, alone: dict[str, list[Answer]]) -> None:
    arrivals = [(7 * i) % 40 for i in range(64)]
    outputs = LLM(model).generate(prompts, GREEDY, arrival_steps=arrivals, use_tqdm=False)
    assert [answer(output) for output in outputs] == alone["greedy"]


def test_choices_are_streams_of_one_seed(model: Path, prompts: Prompts) -> None:
    params = SamplingParams(n=3, temperature=1.2, seed=5, max_tokens=12, ignore_eos=True)
    one, again = (LLM(model).generate(prompts[:2], params, use_tqdm=False) for _ in range(2))
    for a, b in zip(one, again, strict=True):
        assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]
        assert len({tuple(c.token_ids) for c in a.outputs}) == 3
    single = LLM(model).generate(prompts[:2], SEEDED, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in single] == [o.outputs[0].token_ids for o in one]


def test_get_logits_equals_what_generation_saw(model: Path, prompts: Prompts) -> None:
    llm = LLM(model)
    output = llm.generate([prompts[0]], GREEDY, use_tqdm=False)[0]
    tokens = prompts[0] + output.outputs[0].token_ids
    logits = llm.get_logits(tokens)
    assert logits.shape == (len(tokens), llm.engine.runner.vocab_size) and logits.dtype == np.float32
    for i, token in enumerate(output.outputs[0].token_ids):
        assert logits[len(prompts[0]) - 1 + i].argmax() == token


def teacher_forced(llm: LLM, reference: str) -> None:
    """Along the recorded path the best token agrees unless two are close, and its log-probability is near."""
    differences = []
    for case in json.loads((DATA / reference).read_text()):
        output = llm.generate(case["prompt"], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)[
            0
        ]
        assert output.prompt_token_ids == case["prompt_ids"], case["prompt"]
        logits = llm.get_logits(case["prompt_ids"] + case["token_ids"]).astype(np.float64)
        for position, (best, logprob, second) in case["steps"].items():
            row = logits[len(case["prompt_ids"]) - 1 + int(position)]
            log_p = row - row.max() - np.log(np.exp(row - row.max()).sum())
            if logprob - second > 0.3:
                assert row.argmax() == best, (case["prompt"], position)
            differences.append(abs(log_p[best] - logprob))
    assert max(differences) <= 0.4
    assert np.mean(differences) <= 0.04


def test_smollm2_follows_the_reference(smollm2_path: Path) -> None:
    teacher_forced(LLM(smollm2_path), "smollm2_greedy.json")


def test_gemma3_follows_the_reference(gemma3_path: Path) -> None:
    teacher_forced(LLM(gemma3_path), "gemma3_greedy.json")


def test_real_model_is_exact_in_company(smollm2_path: Path) -> None:
    prompts = [
        "The capital of France is",
        "Once upon a time",
        "def fibonacci(n):",
        "2 + 2 =",
        "Water boils at",
    ]
    llm = LLM(smollm2_path, num_blocks=512)
    alone = [llm.generate(p, SEEDED, use_tqdm=False)[0] for p in prompts]
    for isa in available_isas()[1:]:
        llm = LLM(smollm2_path, num_blocks=512, isa=isa)
        together = llm.generate(prompts * 4, SEEDED, use_tqdm=False)
        assert [answer(o) for o in together] == [answer(o) for o in alone] * 4


def test_text_is_what_the_model_says(smollm2_path: Path) -> None:
    llm = LLM()  # the default model
    output = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=2))[0]
    assert output.outputs[0].text == " Paris."
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 2)
    pieces = [
        o.outputs[0].text
        for o in llm.stream("Once upon a time", SamplingParams(temperature=0.0, max_tokens=30))
    ]
    whole = (
        llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=30))[0].outputs[0].text
    )
    assert "".join(pieces) == whole


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate([[1], []]), "prompt 1"),
        (lambda llm: llm.generate([[1], [999]]), "999"),
        (lambda llm: llm.generate([[1] * 600]), "600"),
        (lambda llm: llm.generate([[1]], [GREEDY, GREEDY]), "2"),
        (lambda llm: llm.generate([[1]], SamplingParams(max_tokens=5000)), None),
        (lambda llm: llm.get_logits([]), "token_ids"),
    ],
)
def test_bad_input_leaves_the_engine_usable(
    model: Path, call: Callable[[LLM], object], message: str | None
) -> None:
    llm = LLM(model, num_blocks=64)
    if message is None:
        call(llm)
    else:
        with pytest.raises(ValueError, match=message):
            call(llm)
    assert llm.engine.stats.free_blocks == 64
    assert len(llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12
