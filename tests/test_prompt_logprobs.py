"""Log-probabilities of prompts: to the bit those of get_logits, in any chunks, in any company."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import VOCAB, write_tiny_model

from rvllm import LLM, SamplingParams, _core
from rvllm.request import Logprob, RequestOutput

Scores = list[dict[int, tuple[float, int]] | None]

RNG = np.random.default_rng(5)
PROMPT = RNG.integers(0, 256, 150).tolist()
OTHERS = [RNG.integers(0, 256, n).tolist() for n in (1, 2, 30, 90)]


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "prompt_logprobs": 3, **settings}
    )


def scores(output: RequestOutput) -> Scores:
    assert output.prompt_logprobs is not None
    return [
        None if entry is None else {i: (p.logprob, p.rank) for i, p in entry.items()}
        for entry in output.prompt_logprobs
    ]


def expected(llm: LLM, prompt: list[int], num_best: int) -> Scores:
    """What a sampler says that is biased to the token that comes next."""
    out: Scores = [None]
    for row, token in zip(llm.get_logits(prompt)[:-1], prompt[1:], strict=True):
        sampler = _core.Sampler(
            vocab_size=VOCAB, temperature=0.0, num_logprobs=num_best, logit_bias=[(token, 100.0)]
        )
        sampled, entries = sampler.sample(row)
        assert sampled == token and entries is not None
        out.append({i: (logprob, rank) for i, logprob, rank in entries})
    return out


@pytest.fixture(scope="module")
def path(tiny_model: Path) -> Path:
    return tiny_model


@pytest.mark.parametrize("num_best", [0, 3, VOCAB])
def test_they_are_those_of_get_logits(path: Path, num_best: int) -> None:
    llm = LLM(path, num_blocks=64)
    output = llm.generate([PROMPT], params(prompt_logprobs=num_best))[0]
    assert scores(output) == expected(llm, PROMPT, num_best)
    assert output.prompt_logprobs is not None
    entry = output.prompt_logprobs[1]
    assert entry is not None and next(iter(entry)) == PROMPT[1]
    assert entry[PROMPT[1]] == Logprob(*scores(output)[1][PROMPT[1]], llm.tokenizer.token_text(PROMPT[1]))  # type: ignore[index]


@pytest.mark.parametrize(
    "settings", [{"max_num_batched_tokens": n} for n in (1, 7, 64, 65, 149, 150)], ids=str
)
def test_chunks_and_company_change_nothing(path: Path, settings: dict[str, Any]) -> None:
    alone = LLM(path, num_blocks=64, isa="scalar", num_threads=1)
    prompts = [*OTHERS[:2], PROMPT, *OTHERS[2:], PROMPT]
    llm = LLM(path, num_blocks=96, **settings)
    for _ in range(2):  # the second time with all of them in the prefix cache
        outputs = llm.generate(prompts, params())
        for prompt, output in zip(prompts, outputs, strict=True):
            assert scores(output) == expected(alone, prompt, 3)
            assert output.num_cached_tokens == 0
    plain = llm.generate(prompts, params(prompt_logprobs=None))
    assert [o.outputs for o in plain] == [o.outputs for o in outputs]
    assert all(o.prompt_logprobs is None for o in plain)
    assert plain[2].num_cached_tokens > 0  # what was scored can be found by others


@pytest.mark.parametrize("chunk", [16, 512])
def test_preemption_changes_nothing(path: Path, chunk: int) -> None:
    prompts = [PROMPT[i : i + 40] for i in range(6)]
    settings = params(max_tokens=60, logprobs=1)
    roomy = LLM(path, num_blocks=128).generate(prompts, settings)
    tight = LLM(path, num_blocks=20, max_num_batched_tokens=chunk)
    outputs = tight.generate(prompts, settings)
    assert tight.engine.stats.preemptions > 0
    for output, other in zip(outputs, roomy, strict=True):
        assert scores(output) == scores(other)
        assert output.outputs == other.outputs


def test_they_come_once_with_the_first_token(path: Path) -> None:
    llm = LLM(path, num_blocks=64)
    outputs = list(llm.stream([PROMPT], params(n=2, temperature=1.0, seed=1)))
    with_scores = [output for output in outputs if output.prompt_logprobs is not None]
    assert len(outputs) > 1 and len(with_scores) == 1
    assert [len(c.token_ids) for c in with_scores[0].outputs if c.index == 0] == [1]
    assert scores(with_scores[0]) == expected(llm, PROMPT, 3)


def test_they_do_not_come_again_with_an_abort(path: Path) -> None:
    engine = LLM(path, num_blocks=64).engine
    engine.add_request("a", PROMPT, params())
    (first,) = engine.step()
    last = engine.abort("a")
    assert last is not None
    assert (first.prompt_logprobs is None, last.prompt_logprobs) == (False, None)


def test_a_prompt_of_one_token_has_one_empty_entry(path: Path) -> None:
    assert LLM(path, num_blocks=8).generate([[5]], params())[0].prompt_logprobs == [None]


@pytest.mark.parametrize("value", [-1, 1.5, True, VOCAB + 1])
def test_bad_numbers_are_refused(path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match="prompt_logprobs"):
        LLM(path, num_blocks=8).generate([[5]], params(prompt_logprobs=value))


def test_what_is_no_number_in_the_prompt_is_an_error(tmp_path: Path) -> None:
    """Also where the last token does not see it any more."""
    path = tmp_path / "poisoned.gguf"
    write_tiny_model(
        path, "gemma3", layers=1, sliding_window=8, vocab=VOCAB + 1, tied=False, poisoned_token=VOCAB
    )
    llm = LLM(path, num_blocks=64)
    prompt = [VOCAB, *PROMPT[:60]]
    assert llm.generate([prompt], params(prompt_logprobs=None))[0].outputs[0].finish_reason == "length"
    output = llm.generate([prompt], params())[0]
    assert (output.outputs[0].finish_reason, output.prompt_logprobs) == ("error", None)
    assert output.outputs[0].error == "the model's logits are not finite numbers"
