"""LLM on tiny real models: the API's shapes, and the same tokens and logprobs in any company."""

from __future__ import annotations

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import EOS_TOKEN_ID, write_tiny_model

from rvllm import LLM, SamplingParams
from rvllm.chat_template import ChatTemplateError

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for arch, quant, more in (
        ("llama", "Q4_1", {"metadata": {"tokenizer.chat_template": TEMPLATE}}),
        ("gemma3", "Q8_0", {"sliding_window": 16, "layers": 7}),
    ):
        write_tiny_model(folder / f"{arch}.gguf", arch, quant, **more)
    return {arch: folder / f"{arch}.gguf" for arch in ("llama", "gemma3")}


@pytest.fixture(scope="module")
def llm(paths: dict[str, Path]) -> LLM:
    return make_llm(paths["llama"])


def make_llm(path: Path, **settings: Any) -> LLM:
    return LLM(path, **{"num_blocks": 256, "num_threads": 1, "seed": 0, **settings})


def answers(llm: LLM, prompts: Any, params: Any = GREEDY, **more: Any) -> list[tuple[Any, ...]]:
    """Tokens and logprobs, to the bit, of each choice of each prompt."""
    return [
        tuple((c.text, c.token_ids, c.logprobs, c.finish_reason) for c in output.outputs)
        for output in llm.generate(prompts, params, **more)
    ]


def assert_empty(llm: LLM) -> None:
    stats = llm.engine.stats
    assert (stats.num_running, stats.num_waiting, stats.free_blocks) == (0, 0, stats.num_blocks)
    assert not llm.engine._groups
    llm.engine.scheduler.check_integrity()


# Exactness


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(5)
    prefix = rng.integers(0, 256, 37).tolist()
    prompts = [rng.integers(0, 256, n).tolist() for n in (1, 15, 16, 17, 33, 100)]
    prompts += [prefix + rng.integers(0, 256, 20).tolist() for _ in range(4)] + [prefix, prompts[5]]
    params = [
        SamplingParams(
            temperature=(0, 0.8, 1.5)[i % 3],
            top_k=(0, 20)[i % 2],
            top_p=(1.0, 0.9)[i % 2],
            seed=i,
            frequency_penalty=(0.0, 0.5)[i % 2],
            repetition_penalty=(1.0, 1.2)[i % 2],
            max_tokens=10 + 3 * i,
            logprobs=2,
            n=1 + (i == 4),
            min_tokens=i % 4,
        )
        for i in range(len(prompts))
    ]
    return prompts, params


@pytest.fixture(scope="module")
def alone(paths: dict[str, Path]) -> dict[str, list[tuple[Any, ...]]]:
    """What each request of the workload gets when it is the only one, without a prefix cache."""
    expected = {}
    for arch, path in paths.items():
        llm = make_llm(path, enable_prefix_caching=False)
        expected[arch] = [
            answers(llm, [prompt], params)[0] for prompt, params in zip(*workload(), strict=True)
        ]
    return expected


SETTINGS = {
    "together": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "small chunks": {"max_num_batched_tokens": 13},
    "one token a step": {"max_num_batched_tokens": 1},
    "three at a time": {"max_num_seqs": 3},
    "small blocks": {"block_size": 4, "num_blocks": 1024},
    "small pool": {"num_blocks": 12, "max_num_batched_tokens": 64},
    "two threads": {"num_threads": 2},
    "scalar": {"isa": "scalar"},
}


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("name", SETTINGS)
def test_company_changes_no_bit(
    paths: dict[str, Path], alone: dict[str, list[tuple[Any, ...]]], arch: str, name: str
) -> None:
    llm = make_llm(paths[arch], **SETTINGS[name])
    prompts, params = workload()
    assert answers(llm, prompts, params) == alone[arch]
    assert answers(llm, prompts[::-1], params[::-1]) == alone[arch][::-1]  # now with a warm prefix cache
    stats = llm.engine.stats
    assert (stats.preemptions > 0) == (name == "small pool")
    assert (stats.prefix_hits > 0) == (name != "no prefix cache")
    assert_empty(llm)


def test_arrival_steps_change_no_bit(paths: dict[str, Path], alone: dict[str, list[tuple[Any, ...]]]) -> None:
    llm = make_llm(paths["llama"])
    prompts, params = workload()
    for _ in range(2):  # the steps count from each call on
        steps = [(7 * i) % 20 for i in range(len(prompts))]
        assert answers(llm, prompts, params, arrival_steps=steps) == alone["llama"]


# The API


def test_one_prompt_or_many_text_or_ids(llm: LLM) -> None:
    (output,) = llm.generate("hello", GREEDY)
    assert (output.prompt, output.prompt_token_ids) == ("hello", list(b"hello"))
    assert output.finished and len(output.outputs) == 1
    (from_ids,) = llm.generate(list(b"hello"), GREEDY)
    assert from_ids.prompt is None
    assert from_ids.outputs == output.outputs
    outputs = llm.generate(["hello", list(b"bye"), np.array([1, 2])], GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [list(b"hello"), list(b"bye"), [1, 2]]
    assert outputs[0].outputs == output.outputs
    assert llm.generate([], GREEDY) == []


def test_default_params_are_vllms(llm: LLM) -> None:
    assert len(llm.generate("hello")[0].outputs[0].token_ids) <= 16


def test_control_tokens_in_a_text_prompt_are_parsed(llm: LLM) -> None:
    (output,) = llm.generate("<|im_end|>", GREEDY)
    assert output.prompt_token_ids == [EOS_TOKEN_ID]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["ok", ""], "prompt 1: the prompt is empty"),
        (["ok", []], "prompt 1: the prompt is empty"),
        (["ok", "ok", [300]], "prompt 2: prompt: 300 is no token id in"),
        (["x" * 600, "ok"], "prompt 0: the prompt is too long: 600 tokens, but max_model_len is 512"),
        (["ok", "\ud83e"], "prompt 1: .*surrogate"),
        (b"text", "prompts must be text, token ids, or a list of such, got b'text'"),
        (["ok", b"text"], "prompt 1: the prompt must be text or token ids, got b'text'"),
    ],
)
def test_bad_prompt_is_named_before_anything_runs(llm: LLM, prompts: Any, message: str) -> None:
    steps = llm.engine.stats.steps
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, GREEDY)
    with pytest.raises(ValueError, match=message):
        llm.stream(prompts, GREEDY)
    assert llm.engine.stats.steps == steps
    assert_empty(llm)


def test_lists_of_other_lengths_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(ValueError, match="arrival_steps has 3 entries for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, [0, 1, 2])


def test_what_is_no_params_and_no_messages_is_named(llm: LLM) -> None:
    for params in ({"max_tokens": 1}, ["max_tokens"], 5):
        with pytest.raises(ValueError, match=r"sampling_params must be SamplingParams, ") as refused:
            llm.generate("a", params)  # type: ignore[arg-type]
        assert str(refused.value).endswith(f"got {params!r}")
    for messages in (None, 5, [], "hi", [5], ["hi"], [None]):
        with pytest.raises(ValueError, match=r"messages must be a list of \{'role', 'content'\}"):
            llm.chat(messages)  # type: ignore[arg-type]


def test_stream_joins_to_what_generate_returns(llm: LLM) -> None:
    prompts, params = workload()
    expected = llm.generate(prompts, params)
    texts: dict[tuple[str, int], str] = {}
    entries: dict[tuple[str, int], list[Any]] = {}
    for output in llm.stream(prompts, params):
        for new in output.outputs:
            key = (output.request_id, new.index)
            texts[key] = texts.get(key, "") + new.text
            entries.setdefault(key, []).extend(new.logprobs or ())
    for i, output in enumerate(expected):
        for completion in output.outputs:
            assert texts[str(i), completion.index] == completion.text
            assert entries[str(i), completion.index] == completion.logprobs


def test_streams_may_be_read_in_turn_closed_or_never_read(llm: LLM) -> None:
    expected = llm.generate(["a", "b"], GREEDY)
    llm.stream("never read", GREEDY)
    closed = llm.stream("closed", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    next(closed)
    first, second = llm.stream("a", GREEDY), llm.stream("b", GREEDY)
    texts = ["", ""]
    for one, other in zip(first, second, strict=True):
        texts[0] += one.outputs[0].text
        texts[1] += other.outputs[0].text
    assert texts == [output.outputs[0].text for output in expected]
    assert llm.engine.stats.num_running == 1
    closed.close()  # type: ignore[attr-defined]
    assert_empty(llm)


def test_failed_step_reaches_every_stream_and_leaves_a_usable_llm(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(llm, "again")
    other = llm.stream("other", GREEDY)
    next(other)

    def fail(scheduled: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(llm.engine.runner, "run", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        llm.generate("again", GREEDY)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="dropped when a step of others failed"):
        next(other)
    assert_empty(llm)
    assert answers(llm, "again") == expected


def test_who_runs_the_failing_step_of_others_goes_on(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(paths["llama"], max_num_seqs=1)
    expected = answers(llm, "again")
    runs, waits = llm.stream("runs", GREEDY), llm.stream("again", GREEDY)
    next(runs)

    def fail_once(scheduled: Any) -> Any:
        monkeypatch.undo()
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(llm.engine.runner, "run", fail_once)
    text = "".join(output.outputs[0].text for output in waits)
    assert text == expected[0][0][0]
    with pytest.raises(RuntimeError, match="dropped when a step of others failed"):
        next(runs)
    assert_empty(llm)


def test_engine_may_be_used_directly_beside_streams(llm: LLM) -> None:
    expected = answers(llm, ["a", "b"])
    stream = llm.stream("a", GREEDY)
    outputs = [next(stream)]
    llm.engine.add_request("direct", "b", GREEDY)
    direct = [output for _ in range(6) for output in llm.engine.step()]  # brings the stream on as well
    outputs += stream
    while llm.engine.has_unfinished:
        direct += llm.engine.step()
    assert {output.request_id for output in direct} == {"direct"}
    for got, want in zip((outputs, direct), expected, strict=True):
        assert [i for output in got for i in output.outputs[0].token_ids] == want[0][1]
    aborted = llm.stream("a", GREEDY)
    next(aborted)
    for request_id in list(llm.engine._groups):
        llm.engine.abort(request_id)
    assert [output.outputs[0].finish_reason for output in aborted][-1] == "abort"
    assert_empty(llm)


def test_dropped_streams_leave_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that the garbage collector finds in the middle of a step."""
    endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    run_step = llm.engine.runner.run
    cycles: list[Any] = []

    def drop() -> None:
        stream = llm.stream("dropped", endless)
        next(stream)
        cycles.append([stream])
        cycles[-1].append(cycles[-1])
        cycles.clear()

    def collect(scheduled: Any) -> Any:
        gc.collect()
        return run_step(scheduled)

    expected = answers(llm, "a")
    gc.collect()
    gc.disable()
    try:
        drop()
        assert llm.engine.stats.num_running == 1
        monkeypatch.setattr(llm.engine.runner, "run", collect)
        assert answers(llm, "a") == expected
    finally:
        gc.enable()
    assert_empty(llm)


def test_threads_share_the_steps(llm: LLM) -> None:
    prompts = [f"thread {i}" for i in range(6)]
    expected = answers(llm, prompts)
    steps = llm.engine.stats.steps
    start = threading.Barrier(len(prompts))

    def ask(prompt: str) -> Any:
        start.wait()
        return [answers(llm, prompt)[0] for _ in range(3)]

    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(ask, prompts)) == [[answer] * 3 for answer in expected]
    assert llm.engine.stats.steps - steps <= 3 * len(prompts) * 13
    assert_empty(llm)


def test_priority(llm: LLM, paths: dict[str, Path]) -> None:
    one_at_a_time = make_llm(paths["llama"], max_num_seqs=1)
    prompts = ["a", "b", "c"]
    finished = [
        output.request_id
        for output in one_at_a_time.stream(prompts, GREEDY, priority=[2, 0, 1])
        if output.finished
    ]
    assert finished == ["1", "2", "0"]
    assert answers(one_at_a_time, prompts, priority=[0, -1, -2]) == answers(llm, prompts)
    with pytest.raises(ValueError, match="priority has 1 entries for 3 prompts"):
        llm.generate(prompts, GREEDY, priority=[1])
    with pytest.raises(ValueError, match="prompt 1: priority must be a number, got 'x'"):
        llm.generate(["a", "b"], GREEDY, priority=[1, "x"])  # type: ignore[list-item]


def test_seed_of_the_llm(paths: dict[str, Path]) -> None:
    params = SamplingParams(temperature=2, max_tokens=20, ignore_eos=True)
    runs = [answers(make_llm(paths["llama"], seed=seed), ["a"] * 3, params) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert len({str(answer) for run in (runs[0], runs[2]) for answer in run}) == 6


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi <|im_end|>"}]
    ids = llm.encode_chat(messages)
    assert ids.count(EOS_TOKEN_ID) == 1  # the template's own
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt_token_ids == ids
    assert [o.outputs for o in llm.chat([messages, messages], GREEDY)] == [output.outputs] * 2
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        llm.chat(messages, continue_final_message=True)


def test_chat_without_a_template(paths: dict[str, Path]) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        make_llm(paths["gemma3"]).chat([{"role": "user", "content": "hi"}])


def test_logits_agree_with_logprobs(llm: LLM) -> None:
    ids = list(b"some words")
    logits = llm.get_logits(ids)
    assert (logits.shape, logits.dtype) == ((10, 260), np.float32)
    (output,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, logprobs=3))
    logprobs = logits[-1].astype(np.float64) - np.log(np.exp(logits[-1].astype(np.float64)).sum())
    assert output.outputs[0].logprobs is not None
    for token_id, entry in output.outputs[0].logprobs[0].items():
        assert entry.logprob == pytest.approx(logprobs[token_id], abs=1e-5)
        assert entry.rank == 1 + int((logprobs > logprobs[token_id]).sum())
    assert_empty(llm)


def test_logits_from_a_position_on(paths: dict[str, Path]) -> None:
    llm = make_llm(paths["llama"], max_num_batched_tokens=8)
    ids = list(b"what is wanted begins in a later step")
    every = llm.get_logits(ids)
    for first in (0, 5, 8, 30, len(ids)):
        assert np.array_equal(llm.get_logits(ids, first), every[first:])
    with pytest.raises(ValueError, match="first must be between 0 and the 37 tokens, got 38"):
        llm.get_logits(ids, 38)


def test_progress_bar_on_a_terminal_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a"] * 6, GREEDY)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    expected = answers(llm, ["a"] * 6, use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    assert answers(llm, ["a"] * 6) == expected
    captured = capsys.readouterr()
    assert captured.out == "" and "6/6" in captured.err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"block_size": "16"}, "block_size"),
        ({"device": "gpu"}, "gpu"),
        ({"isa": "mmx"}, "mmx"),
        ({"kv_cache_memory": 10}, "kv_cache_memory"),
        ({"max_model_len": 1024}, "512"),
    ],
)
def test_bad_settings(paths: dict[str, Path], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(paths["llama"], **settings)


# A real model


def test_stop_strings_on_a_real_model(smollm2_path: Path) -> None:
    llm = LLM(smollm2_path, max_model_len=256, num_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=64)
    whole = llm.generate("Once upon a time", params)[0].outputs[0].text
    stops = [whole[k : k + 9] for k in range(5, 41)]
    stopped = [SamplingParams(temperature=0, max_tokens=64, stop=stop) for stop in stops]
    texts = [""] * len(stops)
    for output in llm.stream(["Once upon a time"] * len(stops), stopped):
        i = int(output.request_id)
        texts[i] += output.outputs[0].text
        assert whole[: whole.find(stops[i])].startswith(texts[i])
    assert texts == [whole[: whole.find(stop)] for stop in stops]


def test_forced_and_banned_tokens_on_a_real_model(smollm2_path: Path) -> None:
    llm = LLM(smollm2_path, max_model_len=256, num_blocks=64)
    france = "The capital of France is"
    one = {"temperature": 0, "max_tokens": 5}
    (output,) = llm.generate(france, SamplingParams(**one, logit_bias={33: 100}))
    assert output.outputs[0].text == "11111"
    paris, the = 7042, 260
    (output,) = llm.generate(france, SamplingParams(**one, logprobs=4))
    assert output.outputs[0].token_ids[0] == paris
    (output,) = llm.generate(france, SamplingParams(**one, logit_bias={paris: -100}, logprobs=4))
    assert output.outputs[0].token_ids[0] == the
    assert output.outputs[0].logprobs is not None
    values = {i: entry.logprob for i, entry in output.outputs[0].logprobs[0].items()}
    assert values[paris] == pytest.approx(-0.258, abs=0.1)  # the bias does not show in logprobs
    assert values[the] == pytest.approx(-2.741, abs=0.1)
    emoji_halves = SamplingParams(**one, logit_bias={10813: 100})
    assert llm.generate(france, emoji_halves)[0].outputs[0].text == "".join(
        output.outputs[0].text for output in llm.stream(france, emoji_halves)
    )
    for end in (0, 2):
        (output,) = llm.generate(france, SamplingParams(**one, logit_bias={end: 100}))
        completion = output.outputs[0]
        assert (completion.text, completion.finish_reason, completion.token_ids) == ("", "stop", [end])
    with pytest.raises(ValueError, match="empty"):
        llm.generate("\u0004")  # a byte that has no token in this vocabulary


def test_prompts_may_be_dicts_as_in_vllm(llm: LLM) -> None:
    outputs = llm.generate([{"prompt": "ab"}, {"prompt_token_ids": [97, 98]}], GREEDY)
    assert outputs[0].outputs == outputs[1].outputs
    assert llm.generate({"prompt": "ab"}, GREEDY)[0].outputs == outputs[0].outputs


@pytest.mark.parametrize("prompts", [5, None, [None], [5.5], ["a", {}], [[1], "b", 3]])
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ValueError, match="must be text"):
        llm.generate(prompts)


@pytest.mark.parametrize("messages", ["Hi", []])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValueError, match="messages must be a list"):
        llm.chat(messages)


def test_a_ban_of_every_token_is_refused(llm: LLM) -> None:
    every = list(range(llm.engine.runner.vocab_size))
    with pytest.raises(ValueError, match="ban the whole vocabulary"):
        llm.generate("ab", SamplingParams(min_tokens=1, stop_token_ids=every))
