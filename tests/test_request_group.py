"""How the tokens of a request become text, and what ends it: lengths, end tokens, stop strings, logprobs."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import assert_drained, assert_usable, generate, make_engine, run
from fake_runner import tokens_alone
from fake_tokenizer import EMOJI, END_OF_TURN, EOS, FIRST_HALF, SECOND_HALF, FakeTokenizer, text_of

from rvllm.engine import LLMEngine
from rvllm.request import SampledToken
from rvllm.sampling_params import SamplingParams

EOG = FakeTokenizer.eog_token_ids
PIECE_A = FakeTokenizer().encode("a")[0]

# Finishing


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 40])
def test_exactly_max_tokens(max_tokens: int) -> None:
    completion = generate(make_engine(), [9, 8], max_tokens=max_tokens, ignore_eos=True).outputs[0]
    assert completion.token_ids == tokens_alone([9, 8], max_tokens)
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)


def test_text_is_the_text_of_the_tokens() -> None:
    output = generate(make_engine(), "the cab", max_tokens=100, ignore_eos=True)
    assert output.prompt == "the cab"
    assert output.prompt_token_ids == FakeTokenizer().encode("the cab")
    assert output.outputs[0].text == text_of(output.outputs[0].token_ids)
    assert output.finished


def test_context_end_is_length() -> None:
    completion = generate(make_engine(context_length=20), [5] * 15, max_tokens=None, ignore_eos=True).outputs[
        0
    ]
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")
    completion = generate(make_engine(context_length=20), [5] * 15, max_tokens=99, ignore_eos=True).outputs[0]
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")


def test_without_max_tokens_the_pool_is_the_limit() -> None:
    completion = generate(make_engine(num_blocks=4), [5] * 10, max_tokens=None, ignore_eos=True).outputs[0]
    assert (len(completion.token_ids), completion.finish_reason) == (7, "length")


@pytest.mark.parametrize("token_id", [EOS, END_OF_TURN])
def test_every_end_token_stops_and_is_not_printed(token_id: int) -> None:
    completion = generate(make_engine(), [5], logit_bias={token_id: 100}, max_tokens=20).outputs[0]
    assert (completion.token_ids, completion.text, completion.finish_reason) == ([token_id], "", "stop")
    assert completion.stop_reason is None


def test_end_token_is_not_printed_even_with_special_tokens() -> None:
    completion = generate(make_engine(), [5], logit_bias={EOS: 100}, skip_special_tokens=False).outputs[0]
    assert (completion.text, completion.finish_reason) == ("", "stop")
    completion = generate(
        make_engine(), [5], logit_bias={EOS: 100}, skip_special_tokens=False, ignore_eos=True, max_tokens=2
    ).outputs[0]
    assert (completion.text, completion.finish_reason) == ("<0><0>", "length")


def test_ignore_eos_goes_on() -> None:
    completion = generate(make_engine(), [5], logit_bias={EOS: 100}, ignore_eos=True, max_tokens=7).outputs[0]
    assert (completion.token_ids, completion.finish_reason) == ([EOS] * 7, "length")


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_ids(include: bool) -> None:
    alone = tokens_alone([5, 5], 30)
    token_id = next(t for t in alone[3:] if t not in alone[:3] and t > SECOND_HALF)
    end = alone.index(token_id) + 1
    completion = generate(
        make_engine(),
        [5, 5],
        stop_token_ids=[token_id, 60],
        include_stop_str_in_output=include,
        ignore_eos=True,
        max_tokens=30,
    ).outputs[0]
    assert completion.token_ids == alone[:end]
    assert completion.text == text_of(alone[: end if include else end - 1])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", token_id)


def test_min_tokens_bans_end_and_stop_tokens_until_then() -> None:
    params = SamplingParams(temperature=0, min_tokens=6, max_tokens=50, stop_token_ids=[7, 8, 9])
    engine = make_engine()
    engine.add_request("a", [5], params)
    completion = run(engine)["a"].outputs[0]
    assert completion.token_ids == tokens_alone([5], 50, params, EOG | {7, 8, 9})
    assert not (EOG | {7, 8, 9}) & set(completion.token_ids[:6])


# Stop strings


def test_stop_string_across_tokens_streams_as_it_is_returned() -> None:
    whole = generate(make_engine(), "once upon", max_tokens=64, ignore_eos=True).outputs[0].text
    for start in range(2, 40):
        stop = whole[start : start + 5]
        engine = make_engine()
        engine.add_request(
            "a", "once upon", SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, stop=stop)
        )
        text, expected = "", whole[: whole.find(stop)]
        completion = None
        while engine.has_unfinished:
            for output in engine.step():
                completion = output.outputs[0]
                text += completion.text
                assert expected.startswith(text)
        assert completion is not None
        assert (text, completion.finish_reason, completion.stop_reason) == (expected, "stop", stop)
        assert_drained(engine)


def test_text_lengths_say_which_token_made_what_certain() -> None:
    params = {"max_tokens": 30, "ignore_eos": True}
    engine = make_engine()
    engine.add_request("a", "once", SamplingParams(temperature=0, stop="zz", **params))
    pieces = []
    while engine.has_unfinished:
        pieces += [output.outputs[0].text for output in engine.step()]
    whole = generate(make_engine(), "once", stop="zz", **params).outputs[0]
    assert whole.text_lengths == [len(piece) for piece in pieces] and sum(whole.text_lengths) == len(
        whole.text
    )


def test_stop_string_can_be_kept() -> None:
    whole = generate(make_engine(), "once", max_tokens=64, ignore_eos=True).outputs[0].text
    stop = whole[20:24]
    completion = generate(
        make_engine(), "once", max_tokens=64, ignore_eos=True, stop=stop, include_stop_str_in_output=True
    ).outputs[0]
    assert completion.text == whole[: whole.find(stop) + len(stop)]


def test_stop_string_in_the_last_token_is_stop_not_length() -> None:
    whole = generate(make_engine(), "once", max_tokens=8, ignore_eos=True).outputs[0].text
    completion = generate(make_engine(), "once", max_tokens=8, ignore_eos=True, stop=whole[-1]).outputs[0]
    assert completion.finish_reason == "stop"
    assert completion.text == whole[: whole.find(whole[-1])]


def test_text_held_back_comes_out_at_the_end() -> None:
    whole = generate(make_engine(), "once", max_tokens=8, ignore_eos=True).outputs[0]
    completion = generate(
        make_engine(), "once", max_tokens=8, ignore_eos=True, stop=whole.text + "!"
    ).outputs[0]
    assert (completion.text, completion.finish_reason) == (whole.text, "length")


def test_min_tokens_lets_early_stop_strings_pass() -> None:
    bias = {PIECE_A: 100}
    completion = generate(make_engine(), [5], logit_bias=bias, stop="a", min_tokens=5, max_tokens=20).outputs[
        0
    ]
    assert (completion.text, len(completion.token_ids)) == ("aaaaa", 6)


@pytest.mark.parametrize("stop", [None, [], "zzzz", ["zz", "\n\n\n"]])
def test_stop_strings_that_do_not_occur_change_nothing(stop: Any) -> None:
    text = generate(make_engine(), "once", max_tokens=50).outputs[0].text
    assert generate(make_engine(), "once", max_tokens=50, stop=stop).outputs[0].text == text


# Unicode


def test_no_half_characters_in_a_stream() -> None:
    engine = make_engine()
    engine.add_request("a", [5], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    engine.runner.run = lambda scheduled: [_forced(engine, [FIRST_HALF, SECOND_HALF])]  # type: ignore[method-assign]
    texts = []
    while engine.has_unfinished:
        texts += [output.outputs[0].text for output in engine.step()]
    assert texts == ["", EMOJI]


def _forced(engine: LLMEngine, tokens: list[int]) -> Any:
    request = next(iter(engine._groups.values())).choices[0].request
    return SampledToken(tokens[request.num_output_tokens])


@pytest.mark.parametrize("max_tokens", range(1, 6))
def test_ending_in_mid_character_is_one_replacement_in_both_modes(max_tokens: int) -> None:
    params = SamplingParams(temperature=0, logit_bias={FIRST_HALF: 100}, max_tokens=max_tokens)
    engine = make_engine()
    engine.add_request("a", [5], params)
    completion = run(engine)["a"].outputs[0]
    assert completion.text == "\ufffd" * max_tokens
    assert len(completion.token_ids) == max_tokens
    assert_usable(engine)


# Logprobs


def test_logprobs_have_one_entry_a_token_also_where_a_stop_cuts_the_text() -> None:
    whole = generate(make_engine(), "once", max_tokens=30, ignore_eos=True).outputs[0].text
    for stop in (None, whole[9:13], whole[10:12], [whole[11:15], whole[10:16]]):
        completion = generate(
            make_engine(), "once", max_tokens=30, ignore_eos=True, stop=stop, logprobs=2
        ).outputs[0]
        assert completion.logprobs is not None
        assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids
        assert all(len(entry) == 3 for entry in completion.logprobs)
        assert text_of(completion.token_ids).startswith(completion.text)
        first = completion.logprobs[0][completion.token_ids[0]]
        assert first.decoded_token == FakeTokenizer().token_text(completion.token_ids[0])
        assert (first.logprob, first.rank) == (-0.25, 1)
        assert completion.cumulative_logprob == -0.25 * len(completion.token_ids)


def test_no_logprobs_unless_asked() -> None:
    completion = generate(make_engine(), "once").outputs[0]
    assert completion.logprobs is None and completion.cumulative_logprob is None
    completion = generate(make_engine(), "once", logprobs=0).outputs[0]
    assert completion.logprobs is not None and all(len(entry) == 1 for entry in completion.logprobs)
