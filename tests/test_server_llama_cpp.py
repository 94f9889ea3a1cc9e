"""llama.cpp's /completion, and /tokenize and /detokenize with the fields of both worlds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from server_client import TinyServer, data_of, error_of, make_llm

from rvllm import SamplingParams

PATH = "/completion"
CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    server = TinyServer(make_llm(tmp_path_factory.mktemp("model")))
    yield server
    server.close()


def generated(server: TinyServer, prompt: Any, **params: Any) -> str:
    defaults = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "max_tokens": 8, "seed": 4}
    return server.ok(
        "/v1/completions", prompt=prompt, **{**defaults, **params}
    )["choices"][0]["text"]  # fmt: skip


def test_the_answer_has_llama_cpps_shape_and_defaults(server: TinyServer) -> None:
    answer = server.ok(
        PATH, prompt="Once", n_predict=8, seed=4, return_tokens=True, n_probs=2, ignore_eos=True
    )
    assert answer["content"] == generated(server, "Once", ignore_eos=True)
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"], answer["prompt"]) == (
        True,
        "limit",
        "",
        "Once",
    )
    assert (answer["tokens_predicted"], answer["tokens_evaluated"], answer["truncated"]) == (8, 4, False)
    assert len(answer["tokens"]) == len(answer["completion_probabilities"]) == 8
    entry = answer["completion_probabilities"][0]
    assert (
        entry.keys() == {"id", "token", "bytes", "logprob", "top_logprobs"}
        and entry["id"] == answer["tokens"][0]
    )
    (best, second) = entry["top_logprobs"]
    assert best.keys() == second.keys() == {"id", "token", "bytes", "logprob"} and best["id"] != second["id"]
    assert (
        answer["generation_settings"]["top_k"] == 40 and answer["generation_settings"]["temperature"] == 0.8
    )
    timings = answer["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == 4 and timings["predicted_n"] == 8
    assert timings["predicted_per_token_ms"] * 7 == pytest.approx(timings["predicted_ms"])


def test_a_stream_ends_with_the_whole_objects_facts(server: TinyServer) -> None:
    body = {"prompt": "Once", "n_predict": 8, "seed": 4, "ignore_eos": True}
    events = [json.loads(data) for data in data_of(server.post(PATH, **body, stream=True).content)]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    whole = server.ok(PATH, **body, return_tokens=True)
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [token for event in events for token in event["tokens"]] == whole["tokens"]
    assert events[-1]["tokens_predicted"] == 8 and "timings" in events[-1]
    assert (events[-1]["content"], events[-1]["tokens"]) == ("", [])  # clients print what comes before it


def test_prompts_of_text_ids_and_both(server: TinyServer) -> None:
    ids = server.llm.tokenizer.encode("Once")
    expected = server.ok(PATH, prompt="Once", temperature=0, n_predict=5)["content"]
    for prompt in (ids, ["On", *ids[2:]], [*ids[:2], "ce"]):
        assert server.ok(PATH, prompt=prompt, temperature=0, n_predict=5)["content"] == expected
    several = server.ok(PATH, prompt=["Once", ids], temperature=0, n_predict=5)
    assert [answer["content"] for answer in several] == [expected, expected]
    assert [answer["index"] for answer in several] == [0, 1]
    assert len(server.ok(PATH, prompt="x", n_cmpl=3, n_predict=1)) == 3


def test_texts_that_cannot_fit_are_refused_without_encoding_them(
    server: TinyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "x" * (server.model.max_prompt_chars + 1)

    def fail(self: object, *arguments: object, **options: object) -> None:
        raise AssertionError("encoded")

    monkeypatch.setattr(type(server.llm.tokenizer), "encode", fail)
    for prompt in ([65, long], [[65, long]], [long]):
        assert server.refused(PATH, prompt=prompt)["code"] == "context_length_exceeded"
    assert "logit_bias" in server.refused(PATH, prompt="x", logit_bias=[[long, 1]])["message"]


def test_logit_bias_in_all_its_forms(server: TinyServer) -> None:
    for bias in ([[66, 100]], [["B", 100]], {"66": 100}, {"B": 100}):
        answer = server.ok(PATH, prompt="x", n_predict=3, logit_bias=bias)
        assert (answer["content"], answer["has_new_line"]) == ("BBB", False)
    assert server.ok(PATH, prompt="x", n_predict=3, logit_bias=[["\n", 100]])["has_new_line"]
    for bias in ([[66, 100], [66, False]], {"B": False}):
        assert (
            "B" not in server.ok(PATH, prompt="x", n_predict=20, logit_bias=bias, ignore_eos=True)["content"]
        )


def test_stopping(server: TinyServer) -> None:
    bias = {"logit_bias": [["a", 100]], "n_predict": 20}
    word = server.ok(PATH, prompt="x", stop=["aaa"], **bias)
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("", "word", "aaa")
    eos = server.ok(PATH, prompt="x", logit_bias=[[server.llm.tokenizer.eos_token_id, 100]])
    assert (eos["content"], eos["stop_type"]) == ("", "eos")
    assert server.ok(PATH, prompt="x", n_predict=0)["content"] == ""


def test_the_time_for_an_answer_begins_with_its_first_token(tmp_path: Path) -> None:
    llm = make_llm(tmp_path, context_length=16384, num_blocks=1024)
    with closing(TinyServer(llm)) as server:
        prompts = ["x", "y" * 3000]
        timed = server.ok(PATH, prompt=prompts, t_max_predict_ms=1, ignore_eos=True, cache_prompt=False)
        assert [answer["stop_type"] for answer in timed] == ["limit"] * 2
        assert all(0 < answer["tokens_predicted"] < 8000 for answer in timed)


def test_response_fields_choose(server: TinyServer) -> None:
    fields = ["content", "timings", "generation_settings/n_predict", "timings/nope", "content/a", "a/b"]
    answer = server.ok(PATH, prompt="x", n_predict=1, response_fields=fields)
    assert answer.keys() == {"content", "timings", "generation_settings/n_predict"}
    assert answer["generation_settings/n_predict"] == 1
    assert "generation_settings" in server.ok(PATH, prompt="x", n_predict=1, response_fields=[])


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"mirostat": 2}, "mirostat"), ({"dry_multiplier": 0.8}, "dry_multiplier"), ({"samplers": ["top_k"]}, "samplers"),
     ({"typical_p": 0.5}, "typical_p"), ({"id_slot": 3}, "id_slot"),
     ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
     ({"dynatemp_range": 0.5}, "dynatemp_range"), ({"lora": [{"id": 0}]}, "lora"), ({"n_probs": 21}, "n_probs"),
     ({"prompt": {"prompt_string": "x"}}, "prompt"), ({"prompt": []}, "prompt"),
     ({"logit_bias": [[1, 2, 3]]}, "logit_bias"), ({"logit_bias": [[1]]}, "logit_bias"),
     ({"logit_bias": [[1.5, 2]]}, "logit_bias"), ({"logit_bias": {"9" * 20: 1}}, "logit_bias"),
     ({"post_sampling_probs": True}, "post_sampling_probs"), ({"prompt": [1, None]}, "prompt"),
     ({"image_data": [{"data": "x", "id": 1}]}, "image_data"), ({"grammar_lazy": True}, "grammar_lazy"),
     ({"t_max_predict_ms": 10**400}, "t_max_predict_ms"),
     ({"n_cmpl": 0}, "n_cmpl"), ({"repeat_penalty": -1.0}, "repeat_penalty")],
)  # fmt: skip
def test_what_is_not_offered_is_named(server: TinyServer, fields: dict[str, Any], param: str) -> None:
    error = server.refused(PATH, **{"prompt": "x", "n_predict": 2, **fields})
    assert param in (error["param"] or error["message"])


def test_fields_that_ask_for_nothing_are_taken(server: TinyServer) -> None:
    body = {
        "mirostat": 0, "dry_multiplier": 0.0, "typical_p": 1.0, "id_slot": -1, "repeat_penalty": 1.0, "dry_base": 1.75,
        "repeat_last_n": 64, "xtc_probability": 0, "n_keep": 0, "cache_prompt": True, "samplers": None,
    }  # fmt: skip
    server.ok(PATH, prompt="x", n_predict=1, **body)


def test_repeat_penalty_is_repetition_penalty(server: TinyServer) -> None:
    answer = server.ok(PATH, prompt="aa", n_predict=8, seed=4, repeat_penalty=1.7, repeat_last_n=-1)
    assert answer["content"] == generated(server, "aa", repetition_penalty=1.7)
    assert SamplingParams(repetition_penalty=1.7) != SamplingParams()


# /tokenize and /detokenize


def test_tokenize_and_back(server: TinyServer) -> None:
    text = "caf\u00e9 <|im_end|>"
    ids = server.llm.tokenizer.encode(text, parse_special=True)
    assert ids[-1] == 258
    for name in ("prompt", "content"):
        answer = server.ok("/tokenize", **{name: text})
        assert answer == {"tokens": ids, "count": len(ids), "max_model_len": 512}
    plain = server.ok("/tokenize", content=text, parse_special=False)["tokens"]
    assert max(plain) < 256 and server.ok("/detokenize", tokens=plain)["content"] == text
    assert server.ok("/detokenize", tokens=ids) == {"prompt": text, "content": text}
    pieces = server.ok("/tokenize", content="ab", with_pieces=True, return_token_strs=True)
    assert pieces["tokens"] == [{"id": 65 + 32, "piece": "a"}, {"id": 66 + 32, "piece": "b"}]
    assert pieces["token_strs"] == ["a", "b"]
    split = server.ok("/tokenize", content="\xe9", with_pieces=True)["tokens"]
    assert [token["piece"] for token in split] == [[0xC3], [0xA9]]
    assert (
        server.ok("/tokenize", content="")["tokens"] == server.ok("/detokenize", tokens=[])["content"].split()
    )


def test_tokenizer_info_is_what_lm_eval_reads(server: TinyServer) -> None:
    info = server.request("GET", "/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"]) == ("<|im_end|>", "<|im_start|>")
    # Its client encodes the name to learn the id.
    ids = server.ok("/tokenize", prompt=info["eos_token"], add_special_tokens=False)["tokens"]
    assert ids == [server.llm.tokenizer.eos_token_id]
    assert server.llm.chat_template is not None
    assert info["chat_template"] == server.llm.chat_template.source


def test_bos_is_added_as_each_world_expects(tmp_path_factory: pytest.TempPathFactory) -> None:
    llm = make_llm(tmp_path_factory.mktemp("model"), extra={"tokenizer.ggml.add_bos_token": True})
    server = TinyServer(llm)
    try:
        count = lambda **f: len(server.ok("/tokenize", **f)["tokens"])  # noqa: E731
        assert count(prompt="a") == count(content="a", add_special=True) == 2
        assert count(content="a") == count(prompt="a", add_special_tokens=False) == 1
        echoed = server.ok("/v1/completions", prompt="ab", max_tokens=0, echo=True)["choices"][0]
        assert echoed["text"] == "ab"
    finally:
        server.close()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "a", "content": "b"}, "prompt"),
     ("/tokenize", {"prompt": 5}, "prompt"),
     ("/tokenize", {**CHAT, "add_special": True}, "add_special"),
     ("/tokenize", {**CHAT, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
     ("/tokenize", {**CHAT, "chat_template_kwargs": {"model": "x"}}, "chat_template_kwargs"),
     ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": [260]}, "tokens.0"),
     ("/detokenize", {"tokens": [0, -1]}, "tokens.1"),
     ("/detokenize", {"tokens": "x"}, "tokens"), ("/detokenize", {"tokens": [10**30]}, "tokens.0")],
)  # fmt: skip
def test_bad_texts_and_ids_are_named(server: TinyServer, path: str, body: dict[str, Any], param: str) -> None:
    assert server.refused(path, **body)["param"] == param


def test_timings_leave_out_the_time_in_the_queue(tmp_path: Path) -> None:
    with closing(TinyServer(make_llm(tmp_path, max_num_seqs=1))) as server:
        start = time.perf_counter()
        body = {"prompt": "one", "n_predict": 100, "ignore_eos": True}
        responses = server.requests([("POST", PATH, {"json": body})] * 4)
        seconds = time.perf_counter() - start
        timings = [response.json()["timings"] for response in responses]
        assert 0 < sum(t["prompt_ms"] + t["predicted_ms"] for t in timings) < 1e3 * seconds
        both = server.ok(PATH, prompt=["one", "seven"], n_predict=3, ignore_eos=True, cache_prompt=False)
        assert [answer["timings"]["prompt_n"] for answer in both] == [3, 5]
        assert [answer["timings"]["predicted_n"] for answer in both] == [3, 3]


def test_a_base_url_without_v1_or_with_two_is_told_the_route(server: TinyServer) -> None:
    for method, path, meant in (
        ("GET", "/models", "/v1/models"),
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("GET", "/v1/v1/models", "/v1/models"),
        ("GET", "/v1/health", "/health"),
    ):
        message = error_of(server.request(method, path), 404)["message"]
        assert message == f"{method} {path}: there is no such route; did you mean {meant}?"
    for path in ("/nope", "/v1/nope", "/v1/"):
        assert error_of(server.request("GET", path), 404)["message"].endswith("there is no such route")
