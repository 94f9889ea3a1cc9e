"""Embeddings: pooled as the file says, to the bit the same in any company."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from tiny_gguf import VOCAB, write_tiny_model

from rvllm import LLM, SamplingParams, _core
from rvllm.async_engine import AsyncEngine

RNG = np.random.default_rng(6)
PROMPTS = [RNG.integers(0, 256, n).tolist() for n in (1, 3, 16, 17, 70, 150, 300)]


def write(path: Path, pooling: int | None = None, **settings: Any) -> Path:
    metadata = {} if pooling is None else {"llama.pooling_type": pooling}
    write_tiny_model(path, **{"quant": "Q8_0", "metadata": metadata, **settings})
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.mark.parametrize("pooling", [None, 0, 1, 2, 3])
def test_they_are_the_pooled_hidden_states(tmp_path: Path, pooling: int | None) -> None:
    path = write(tmp_path / "tiny.gguf", pooling, quant="F32")
    prompt = PROMPTS[4]
    states = reference.Transformer(path).hidden_states(prompt)
    pooled = {2: states[0], 3: states[-1]}.get(pooling or 1, states.mean(axis=0))
    vector = np.array(LLM(path, num_blocks=32).embed([prompt])[0])
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(vector, pooled / np.linalg.norm(pooled), atol=5e-3)


@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 7}, {"max_num_batched_tokens": 64}, {"max_num_seqs": 2}, {"num_blocks": 40}],
    ids=str,
)
def test_company_changes_nothing(path: Path, settings: dict[str, Any]) -> None:
    alone = LLM(path, num_blocks=64, isa="scalar", num_threads=1)
    expected = [alone.embed([prompt])[0] for prompt in PROMPTS]
    llm = LLM(path, **{"num_blocks": 128, **settings})
    stream = llm.stream([PROMPTS[3]] * 3, SamplingParams(max_tokens=60, ignore_eos=True))
    next(stream)
    for _ in range(2):
        assert llm.embed(PROMPTS) == expected
    assert sum(len(c.token_ids) for output in stream for c in output.outputs) > 0
    stats = llm.engine.stats
    assert (stats.free_blocks, stats.num_running) == (stats.num_blocks, 0)
    assert stats.generation_tokens == 180


def test_a_preempted_prompt_begins_anew(path: Path) -> None:
    """Low in priority and long, it gives its blocks to requests that grow."""
    alone = LLM(path, num_blocks=64).embed([PROMPTS[-1]])[0]
    llm = LLM(path, num_blocks=25, max_num_batched_tokens=8)
    engine = llm.engine
    for i in range(2):
        engine.add_request(f"r{i}", [i] * 16, SamplingParams(max_tokens=90, ignore_eos=True))
    engine.submit(engine.prepare_embedding("embedding", PROMPTS[-1], priority=1))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert engine.stats.preemptions > 0
    assert [c.embedding for o in outputs if o.request_id == "embedding" for c in o.outputs] == [alone]


def test_the_async_engine_embeds_in_company(path: Path) -> None:
    llm = LLM(path, num_blocks=128, max_num_seqs=3)
    expected = llm.embed(PROMPTS)

    async def run() -> list[tuple[list[float], int]]:
        engine = AsyncEngine(llm.engine, max_queue=2)  # room for the two that are dropped below
        engine.start()
        try:
            with pytest.raises(ValueError, match="empty"):
                await engine.embed([PROMPTS[0], []])
            return await engine.embed(PROMPTS)
        finally:
            engine.shutdown()

    assert asyncio.run(run()) == [(v, len(p)) for v, p in zip(expected, PROMPTS, strict=True)]


def test_text_is_embedded_too(path: Path) -> None:
    llm = LLM(path, num_blocks=32)
    assert llm.embed("hello") == llm.embed([llm.tokenizer.encode("hello")])
    assert llm.embed([]) == []


def test_bad_prompts_are_refused(path: Path, tmp_path: Path) -> None:
    llm = LLM(path, num_blocks=8)
    for prompts, message in (
        ([[1], []], "prompt 1: the prompt is empty"),
        ([[VOCAB]], f"prompt 0: prompt: {VOCAB}"),
        ([[1] * 513], "prompt 0: the prompt is too long: 513 tokens, but max_model_len is 512"),
        ([[1] * 129], "prompt 0: a prompt of 129 tokens needs 9 KV-cache blocks, 8 are available"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.embed(prompts)
    assert len(llm.embed([[1] * 128])[0]) == 64
    ranking = LLM(write(tmp_path / "ranking.gguf", pooling=4), num_blocks=8)
    with pytest.raises(ValueError, match=r"pooling type 4 is not 1 \(mean\), 2 \(cls\) or 3 \(last\)"):
        ranking.embed([[1]])


def test_what_is_no_number_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "poisoned.gguf", quant="F32", vocab=VOCAB + 1, tied=False, poisoned_token=VOCAB)
    llm = LLM(path, num_blocks=32)
    expected = llm.embed([PROMPTS[3]])
    with pytest.raises(RuntimeError, match="prompt 1: the model's hidden states are not finite numbers"):
        llm.embed([PROMPTS[3], [1, VOCAB, 2]])
    assert llm.embed([PROMPTS[3]]) == expected


def test_poolers_take_their_tokens_in_order() -> None:
    for arguments, message in (((0, 8, 1), "type 0"), ((1, 0, 1), "nothing"), ((1, 8, 0), "nothing")):
        with pytest.raises(ValueError, match=message):
            _core.Pooler(*arguments)
    with pytest.raises(ValueError, match="0 of 2 tokens have been added"):
        _core.Pooler(1, 8, 2).embedding()
