"""LLMEngine with a fake runner: exact tokens under any load, clear refusals, nothing left behind."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import assert_drained, assert_usable, generate, make_engine, run
from fake_runner import tokens_alone
from fake_tokenizer import FakeTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from rvllm.block_manager import BlockTables
from rvllm.engine import LLMEngine
from rvllm.request import RequestOutput, SampledToken
from rvllm.sampling_params import SamplingParams

EOG = FakeTokenizer.eog_token_ids
PIECE_A = FakeTokenizer().encode("a")[0]

# Seeds and choices


def sampled(engine: LLMEngine, **params: Any) -> list[list[int]]:
    engine.add_request("a", [5, 6], SamplingParams(max_tokens=12, ignore_eos=True, **params))
    return [completion.token_ids for completion in run(engine)["a"].outputs]


def test_seed_decides_the_tokens() -> None:
    alone = tokens_alone([5, 6], 12, SamplingParams(), seed=42)
    assert sampled(make_engine(), seed=42) == [alone]
    assert sampled(make_engine(seed=7), seed=42) == [alone]
    assert sampled(make_engine(), seed=43) != [alone]
    assert sampled(make_engine(), seed=-5) == [tokens_alone([5, 6], 12, SamplingParams(), seed=2**64 - 5)]


@pytest.mark.parametrize("seed", [None, -1])
def test_without_a_seed_the_engine_seed_and_the_order_decide(seed: int | None) -> None:
    first, second, other = make_engine(seed=3), make_engine(seed=3), make_engine(seed=4)
    streams = [[sampled(engine, seed=seed)[0] for _ in range(4)] for engine in (first, second, other)]
    assert streams[0] == streams[1]
    tokens = {tuple(tokens) for stream in (streams[0], streams[2]) for tokens in stream}
    assert len(tokens) == 8
    assert sampled(make_engine(seed=None)) != sampled(make_engine(seed=None))


def test_choices_share_the_prompt_and_sample_apart() -> None:
    engine = make_engine()
    prompt = list(range(10, 30))
    engine.add_request("a", prompt, SamplingParams(n=4, seed=9, max_tokens=20, logprobs=1))
    output = run(engine)["a"]
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    for k, completion in enumerate(output.outputs):
        assert completion.token_ids == tokens_alone(prompt, 20, SamplingParams(), EOG, seed=9, index=k)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
    assert output.finished and output.num_cached_tokens == 0
    assert (engine.stats.prefix_queries, engine.stats.prefix_hits) == (80, 48)
    engine.add_request("b", prompt, SamplingParams(max_tokens=1, cache_prompt=False))
    run(engine)
    assert engine.stats.prefix_queries == 80
    assert_usable(engine)


def test_group_is_finished_with_its_last_choice() -> None:
    engine = make_engine()
    engine.add_request("a", [5], SamplingParams(n=3, seed=1, max_tokens=200))
    finished = []
    while engine.has_unfinished:
        finished += [output.finished for output in engine.step()]
    assert finished[-1] and not any(finished[:-1])


# Prefix cache


def test_prompt_that_is_all_in_the_cache_still_computes_a_token() -> None:
    text = [(7 * i) % 60 + 4 for i in range(66)]
    warm, cold = make_engine(256, 16), make_engine(256, 16, enable_prefix_caching=False)
    lengths = [n for n in range(1, 67) for _ in range(3)] + random.Random(0).sample(range(1, 67), 66)
    for n in lengths:
        params = {"max_tokens": 8, "logprobs": 1, "ignore_eos": True}
        with_cache, without = generate(warm, text[:n], **params), generate(cold, text[:n], **params)
        assert with_cache.outputs == without.outputs
        assert without.num_cached_tokens == 0
    assert generate(warm, text[:64]).num_cached_tokens == 48


@pytest.mark.parametrize("together", [True, False])
def test_shared_prefix_that_does_not_fill_a_block(together: bool) -> None:
    prefix, x, y = [10] * 37, [20 + i for i in range(20)], [40 + i for i in range(20)]
    engine = make_engine(256, 16)
    prompts = [prefix + x, prefix + y, prefix, prefix + x]
    outputs = []
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
        if together:
            engine.step()
        else:
            outputs.append(run(engine)[str(i)])
    if together:
        results = run(engine)
        assert len(results) == 4
    else:
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == tokens_alone(prompt, 10)
        assert [output.num_cached_tokens for output in outputs] == [0, 32, 32, 48]
        answer = outputs[0].outputs[0].token_ids
        again = generate(engine, prefix + x + answer + [5], max_tokens=5, ignore_eos=True)
        assert again.num_cached_tokens == 64
        assert again.outputs[0].token_ids == tokens_alone(prefix + x + answer + [5], 5)
    assert_usable(engine)


# Refusals


def refused(engine: LLMEngine, prompt: Any, **params: Any) -> str:
    before = engine.stats
    with pytest.raises(ValueError) as error:
        engine.add_request("bad", prompt, SamplingParams(**params))
    assert engine.stats == before
    message = str(error.value)
    assert "\n" not in message
    return message


def test_request_larger_than_the_pool_is_refused_and_others_run() -> None:
    engine = make_engine(num_blocks=16, block_size=16, context_length=8192)
    engine.add_request("good", [5, 6], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    message = refused(engine, [50] * 400, max_tokens=4)
    assert "26 KV-cache blocks" in message and "16 are available" in message
    assert "400" in refused(engine, [50] * 400, max_tokens=None)
    assert "17 KV-cache blocks" in refused(engine, [50] * 200, max_tokens=58)
    assert run(engine)["good"].outputs[0].token_ids == tokens_alone([5, 6], 4)
    assert len(generate(engine, [50] * 200, max_tokens=57, ignore_eos=True).outputs[0].token_ids) == 57
    assert "17 KV-cache blocks" in refused(engine, [50] * 257, max_tokens=0)
    assert generate(engine, [50] * 256, max_tokens=0).outputs[0].token_ids == []
    assert_usable(engine)


def test_bad_prompts() -> None:
    engine = make_engine(context_length=20)
    assert "empty" in refused(engine, "")
    assert "empty" in refused(engine, [])
    assert "64 is no token id in [0, 63]" in refused(engine, [5, 64])
    for bad in (-1, 10**11, 1.5, "a", None, True):
        assert f"prompt: {bad!r} is no token id" in refused(engine, [5, bad])
    message = refused(engine, [5] * 20)
    assert "20 tokens" in message and "max_model_len is 20" in message
    assert_usable(engine)


def test_bad_params_for_the_vocabulary() -> None:
    engine = make_engine()
    assert "stop_token_ids: 64" in refused(engine, [5], stop_token_ids=[64])
    assert "logit_bias: 64" in refused(engine, [5], logit_bias={64: 1})
    assert "logprobs 65" in refused(engine, [5], logprobs=65)
    assert_usable(engine)


@pytest.mark.parametrize("priority", [None, True, "1", float("nan"), float("inf")])
def test_bad_priority(priority: Any) -> None:
    with pytest.raises(ValueError, match="priority must be a number"):
        make_engine().add_request("a", [5], priority=priority)


def test_bad_arrival_step_and_double_id() -> None:
    engine = make_engine()
    for step in (-1, 1.5, True, None):
        with pytest.raises(ValueError, match="arrival_step"):
            engine.add_request("a", [5], None, step)  # type: ignore[arg-type]
    engine.add_request("a", [5])
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add_request("a", [5])
    run(engine)
    assert_usable(engine)


def test_context_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len 513 is more than the model's context of 512"):
        make_engine(max_model_len=513)


# Abort and failure


def test_abort_frees_everything_at_once() -> None:
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=16)
    for i in range(20):
        params = SamplingParams(n=1 + i % 3, max_tokens=400, ignore_eos=True)
        engine.add_request(f"a{i}", [5 + i] * 50, params, arrival_step=i % 4)
    for i in range(20):
        engine.step()
        free = engine.stats.free_blocks
        running = [r.request_id for r in engine.scheduler._running]
        assert engine.abort(f"a{i}")
        assert not engine.abort(f"a{i}")
        assert engine.stats.free_blocks > free or f"a{i}" not in running
        engine.scheduler.check_integrity()
    assert not engine.has_unfinished
    assert engine.step() == []
    assert not engine.abort("never there")
    assert_usable(engine)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("step", [0, 1, 7])
def test_failed_step_leaves_a_usable_engine(error: type[BaseException], step: int) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    prompts = [[5] * 30, [5] * 31, [6] * 3]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    run_step = engine.runner.run

    def fail(scheduled: Any) -> Any:
        if engine.stats.steps == step:
            raise error("the device is gone")
        return run_step(scheduled)

    engine.runner.run = fail  # type: ignore[method-assign]
    took_part: set[str] = set()
    schedule = engine.scheduler.schedule

    def watched() -> Any:
        output = schedule()
        took_part.clear()
        took_part.update(request.request_id for request, _ in output.scheduled)
        return output

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    tokens: dict[str, list[int]] = {str(i): [] for i in range(3)}
    with pytest.raises(error, match="the device is gone"):
        while True:
            for output in engine.step():
                tokens[output.request_id] += output.outputs[0].token_ids
    engine.runner.run = run_step  # type: ignore[method-assign]
    survivors = set(tokens) - took_part if error is RuntimeError else set()
    assert engine._groups.keys() == survivors
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.request_id] += output.outputs[0].token_ids
    for i in survivors:
        assert tokens[i] == tokens_alone(prompts[int(i)], 60)
    assert_usable(engine)
    output = generate(engine, prompts[0], max_tokens=9, ignore_eos=True)
    if not survivors:
        assert output.num_cached_tokens == 0  # what the failed step was to fill is not found
    assert output.outputs[0].token_ids == tokens_alone(prompts[0], 9)


def test_step_that_is_interrupted_while_it_is_planned_leaks_nothing() -> None:
    engine = make_engine()
    engine.add_request("a", [5] * 30, SamplingParams(max_tokens=20, ignore_eos=True))
    engine.step()
    allocate = engine.block_manager.append

    def interrupted(tables: BlockTables, start: int, num_tokens: int) -> bool:
        allocate(tables, start, num_tokens)
        raise KeyboardInterrupt

    engine.block_manager.append = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    engine.block_manager.append = allocate  # type: ignore[method-assign]
    assert_usable(engine)


def test_row_that_fails_ends_alone() -> None:
    engine = make_engine()
    for name in ("good", "bad"):
        params = SamplingParams(temperature=0, n=1 + (name == "bad"), max_tokens=9, ignore_eos=True)
        engine.add_request(name, [5, 6], params)
    run_step = engine.runner.run

    def spoil(scheduled: Any) -> Any:
        tokens = run_step(scheduled)
        if engine.stats.steps == 3:
            tokens[-1] = SampledToken(-1, error="the logits are not finite")
        return tokens

    engine.runner.run = spoil  # type: ignore[method-assign]
    results = run(engine)
    good, bad = results["good"].outputs[0], results["bad"].outputs
    assert (good.token_ids, good.finish_reason, good.error) == (tokens_alone([5, 6], 9), "length", None)
    assert (bad[0].token_ids, bad[0].finish_reason) == (tokens_alone([5, 6], 9), "length")
    assert (bad[1].token_ids, bad[1].finish_reason) == (tokens_alone([5, 6], 3), "error")
    assert bad[1].error == "the logits are not finite"
    assert results["bad"].finished
    assert_usable(engine)


def test_abort_returns_the_text_that_was_held_back() -> None:
    engine = make_engine()
    params = SamplingParams(temperature=0, stop="aab", logit_bias={PIECE_A: 100}, max_tokens=9)
    engine.add_request("a", [5], params)
    texts = [engine.step()[0].outputs[0].text for _ in range(3)]
    output = engine.abort("a", "timeout")
    assert output is not None and output.finished
    assert output.outputs[0].finish_reason == "timeout"
    assert ("".join(texts), output.outputs[0].text, output.outputs[0].token_ids) == ("a", "aa", [])
    assert_usable(engine)


def test_outputs_go_to_who_asked_whoever_runs_the_step() -> None:
    engine = make_engine()
    inbox: deque[RequestOutput | BaseException] = deque()
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    engine.submit(engine.prepare("inbox", [5], params), inbox=inbox)
    engine.add_request("direct", [6], params)
    engine.advance()
    assert [output.request_id for output in inbox if isinstance(output, RequestOutput)] == ["inbox"]
    assert [output.request_id for output in engine.step()] == ["direct", "direct"]
    engine.advance()
    assert engine.has_unfinished  # the last output has not been taken
    (output,) = engine.step()
    assert output.finished and not engine.has_unfinished
    assert len(inbox) == 3
    assert_usable(engine)


def test_lower_priority_number_is_answered_first() -> None:
    engine = make_engine(max_num_seqs=1)
    for i, priority in enumerate((0.5, 0, -3)):
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        engine.add_request(str(i), [5], params, priority=priority)
    finished = [output.request_id for output in iter_steps(engine) if output.finished]
    assert finished == ["2", "1", "0"]


def iter_steps(engine: LLMEngine) -> Iterator[RequestOutput]:
    while engine.has_unfinished:
        yield from engine.step()


def test_stats_count_prompts_once_and_every_token() -> None:
    engine = make_engine(num_blocks=20)
    for i in range(3):
        params = SamplingParams(n=2, seed=i, max_tokens=10, ignore_eos=True)
        engine.add_request(str(i), [5 + i] * 10, params)
    engine.step()
    assert 0 < engine.stats.kv_cache_usage <= 1
    list(iter_steps(engine))
    stats = engine.stats
    assert stats.preemptions > 0
    assert (stats.prompt_tokens, stats.generation_tokens, stats.kv_cache_usage) == (30, 60, 0.0)


def test_logits_take_blocks_only_for_the_call() -> None:
    engine = make_engine(num_blocks=4, context_length=64)
    assert engine.get_logits([5] * 16).shape == (16, 64)
    assert_usable(engine)
    for bad, message in (
        ([], "got 0"),
        ([5] * 65, "got 65"),
        ([64], "no token id"),
        ([5] * 17, "5 KV-cache blocks"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.get_logits(bad)
    assert_usable(engine)


def test_running_requests_give_way_to_logits() -> None:
    engine = make_engine(num_blocks=8)
    for i in range(3):
        engine.add_request(str(i), [5 + i] * 6, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    tokens: dict[str, list[int]] = {str(i): [] for i in range(3)}
    steps = 0
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.request_id] += output.outputs[0].token_ids
        steps += 1
        if steps in (2, 9):
            assert engine.get_logits([5] * 32).shape == (32, 64)
            engine.scheduler.check_integrity()
    assert engine.stats.preemptions >= 3
    for i in range(3):
        assert tokens[str(i)] == tokens_alone([5 + i] * 6, 20)
    assert_usable(engine)


# Load


def test_many_requests_leave_nothing_behind() -> None:
    for caching in (True, False):
        engine = make_engine(64, max_num_seqs=8, enable_prefix_caching=caching)
        for i in range(500):
            params = SamplingParams(seed=i, max_tokens=8, logprobs=i % 21)
            engine.add_request(str(i), [(i * 7 + k * k) % 60 + 4 for k in range(1 + i % 60)], params)
            if i % 8 == 7:
                run(engine, check=False)
        run(engine)
        assert_drained(engine)


def test_a_step_counts_prefill_and_decode_apart() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    generate(engine, [5] * 20, max_tokens=6, ignore_eos=True)
    stats = engine.stats
    assert (stats.steps, stats.prefill_tokens, stats.decode_tokens, stats.allocated_blocks) == (8, 20, 5, 7)
    assert stats.prefill_seconds >= 0 and stats.decode_seconds >= 0


SAMPLING = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 3),
        "n": st.integers(1, 3),
        "max_tokens": st.integers(1, 25),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([None, 0, 2]),
        "stop": st.sampled_from([None, "a", "ab", ["the", "e."]]),
        "min_tokens": st.sampled_from([0, 1]),
    }
)
REQUEST = st.tuples(st.lists(st.integers(4, 6), min_size=1, max_size=40), SAMPLING, st.integers(0, 9))


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=8),
    budget=st.sampled_from([1, 4, 16, 512]),
    seqs=st.integers(1, 8),
    num_blocks=st.integers(17, 40),
    window=st.sampled_from([0, 7, 20]),
    caching=st.booleans(),
)
def test_company_pool_and_chunks_change_nothing(
    requests: list[tuple[list[int], dict[str, Any], int]],
    budget: int,
    seqs: int,
    num_blocks: int,
    window: int,
    caching: bool,
) -> None:
    engine = make_engine(
        num_blocks,
        window=window,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        enable_prefix_caching=caching,
    )
    for i, (prompt, params, step) in enumerate(requests):
        engine.add_request(str(i), prompt, SamplingParams(**params), step)
    results = run(engine)
    assert_drained(engine)
    for i, (prompt, params, _) in enumerate(requests):
        alone = make_engine(512, enable_prefix_caching=False)
        alone.add_request("a", prompt, SamplingParams(**params))
        assert results[str(i)].outputs == run(alone, check=False)["a"].outputs


def test_cache_prompt_false_computes_a_cached_prefix_again_to_the_same_tokens() -> None:
    engine = make_engine(block_size=4)
    prompt = list(range(4, 24))
    first = generate(engine, prompt, max_tokens=4)
    uncached = generate(engine, prompt, max_tokens=4, cache_prompt=False)
    cached = generate(engine, prompt, max_tokens=4)
    assert [first.num_cached_tokens, uncached.num_cached_tokens, cached.num_cached_tokens] == [0, 0, 16]
    assert first.outputs[0].token_ids == uncached.outputs[0].token_ids == cached.outputs[0].token_ids
