"""/v1/completions: fields, shapes, and errors by name."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from server_client import TinyServer, data_of, error_of, make_llm

from rvllm import SamplingParams

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    server = TinyServer(make_llm(tmp_path_factory.mktemp("model")), max_body_size=2**20)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def drained(server: TinyServer) -> Iterator[None]:
    """Whatever a test sends, the server is idle and answers afterwards."""
    yield
    server.assert_idle()
    assert server.ok(PATH, prompt="Hi", max_tokens=1)["usage"]["completion_tokens"] == 1


def text_of(server: TinyServer, prompt: str | list[int], **fields: Any) -> str:
    body = {"temperature": 0, "max_tokens": 8, **fields}
    return server.ok(PATH, prompt=prompt, **body)["choices"][0]["text"]


# Answers


def test_the_answer_has_openais_shape(server: TinyServer) -> None:
    answer = server.ok(PATH, model="tiny", prompt="one two", max_tokens=4, temperature=0)
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    assert answer["model"] == "tiny" and isinstance(answer["created"], int)
    (choice,) = answer["choices"]
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "length")
    assert answer["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 4,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": answer["usage"]["prompt_tokens_details"]["cached_tokens"]},
    }


def test_sixteen_tokens_unless_a_limit_is_given(server: TinyServer) -> None:
    count = lambda **f: server.ok(PATH, prompt="x", ignore_eos=True, **f)["usage"]["completion_tokens"]  # noqa: E731
    assert count() == 16
    assert count(max_tokens=3) == count(max_completion_tokens=3) == count(n_predict=3) == 3
    assert count(max_tokens=None) == 16
    assert count(n_predict=-1) == count(max_tokens=-1) == server.model.max_model_len - 1
    assert server.refused(PATH, prompt="x", max_tokens=3, n_predict=4)["param"] == "max_tokens"
    assert server.refused(PATH, prompt="x", max_tokens=-2)["param"] == "max_tokens"


def test_text_and_ids_in_lists_or_alone_give_the_same(server: TinyServer) -> None:
    texts = ["The capital", "1 2 3", "x = foo("]
    ids = [server.llm.tokenizer.encode(text) for text in texts]
    alone = [text_of(server, text) for text in texts]
    for prompts in (texts, ids):
        answer = server.ok(PATH, prompt=prompts, temperature=0, max_tokens=8)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert [choice["text"] for choice in answer["choices"]] == alone
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert text_of(server, ids[0]) == alone[0]


@pytest.mark.parametrize("stream", [False, True])
def test_the_index_of_choice_k_of_a_prompt_is_prompt_times_n_plus_k(server: TinyServer, stream: bool) -> None:
    body = {"prompt": ["one", "two", "three"], "n": 2, "seed": 3, "temperature": 1, "max_tokens": 6}
    texts = [""] * 6
    if stream:
        for chunk in server.events(PATH, **body):
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    else:
        choices = server.ok(PATH, **body)["choices"]
        assert [choice["index"] for choice in choices] == list(range(6))
        texts = [choice["text"] for choice in choices]
    for i, prompt in enumerate(body["prompt"]):  # type: ignore[arg-type, var-annotated]
        solo = server.ok(PATH, **{**body, "prompt": prompt})["choices"]
        assert texts[2 * i : 2 * i + 2] == [choice["text"] for choice in solo]


def test_every_sampling_field_reaches_the_sampler(server: TinyServer) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.9, "top_p": 0.8, "top_k": 30, "min_p": 0.02, "seed": 11, "presence_penalty": 0.5,
        "frequency_penalty": 0.4, "repetition_penalty": 1.2, "min_tokens": 3, "ignore_eos": True, "max_tokens": 12,
        "stop": ["zz", "\n\n"], "stop_token_ids": [250], "include_stop_str_in_output": True,
    }  # fmt: skip
    expected = server.llm.tokenizer.decode([])
    answer = server.ok(PATH, prompt="Once", logit_bias={"40": 5, "41": -100}, **fields)
    params = SamplingParams(logit_bias={40: 5.0, 41: -100.0}, **fields)
    seen = []
    server.engine.engine.prepare = lambda *a, original=server.engine.engine.prepare: (
        seen.append(a[2]) or original(*a)
    )  # type: ignore[method-assign]
    try:
        again = server.ok(PATH, prompt="Once", logit_bias={"40": 5, "41": -100}, **fields)
    finally:
        del server.engine.engine.prepare
    assert seen == [params] and expected == ""
    assert answer["choices"] == again["choices"]


def test_fields_of_llama_cpp_are_known_in_every_api(server: TinyServer) -> None:
    body = {"prompt": "aa", "seed": 4}
    penalized = server.ok(PATH, **body, repeat_penalty=1.7, repeat_last_n=-1)["choices"]
    assert penalized == server.ok(PATH, **body, repetition_penalty=1.7)["choices"]
    assert penalized != server.ok(PATH, **body, repeat_penalty=1.0, repeat_last_n=64)["choices"]
    bodies = {PATH: body, "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
              "/v1/responses": {"input": "x"}}  # fmt: skip
    for path, prompt in bodies.items():
        for name, value in (("repeat_penalty", -1.0), ("samplers", ["top_k"]), ("dynatemp_range", 0.5)):
            assert server.refused(path, **prompt, **{name: value})["param"] == name
        error = server.refused(path, **prompt, repeat_penalty=1.1, repeat_last_n=64)
        assert error["param"] == "repeat_last_n"
    assert server.ok(PATH, **body, repeat_penalty=1.7, repetition_penalty=1.7)["choices"] == penalized
    error = server.refused(PATH, **body, repeat_penalty=1.7, repetition_penalty=1.6)
    assert error["param"] == "repeat_penalty" and "differ" in error["message"]
    for name in ("n_probs", "n_cmpl", "t_max_predict_ms"):
        assert server.refused(PATH, **body, **{name: 2})["param"] == name


def test_null_is_the_same_as_absent(server: TinyServer) -> None:
    names = (
        "temperature",
        "top_p",
        "n",
        "stop",
        "stream",
        "logit_bias",
        "logprobs",
        "seed",
        "echo",
        "suffix",
    )
    answer = server.ok(PATH, prompt="x", max_tokens=2, **dict.fromkeys(names))
    assert len(answer["choices"]) == 1 and answer["choices"][0]["logprobs"] is None


def test_cached_tokens_are_reported_and_cache_prompt_false_finds_none(server: TinyServer) -> None:
    prompt = list(range(100, 140))
    cached = lambda **f: server.ok(PATH, prompt=prompt, max_tokens=1, **f)["usage"]["prompt_tokens_details"]  # noqa: E731
    assert cached() == {"cached_tokens": 0}
    assert cached() == {"cached_tokens": 32}
    assert cached(cache_prompt=False) == {"cached_tokens": 0}


def test_max_tokens_0_gives_no_text(server: TinyServer) -> None:
    answer = server.ok(PATH, prompt="one", max_tokens=0)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "length")
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["total_tokens"] == 3
    chunks = server.events(PATH, prompt="one", max_tokens=0)
    assert [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks] == [("", "length")]


def test_a_stop_string_ends_the_text_in_both_modes(server: TinyServer) -> None:
    text = text_of(server, "Once upon", max_tokens=40)
    for k in range(4, min(24, len(text) - 3)):
        stop = text[k : k + 3]
        body = {"prompt": "Once upon", "temperature": 0, "max_tokens": 40, "stop": [stop]}
        whole = server.ok(PATH, **body)["choices"][0]
        chunks = [chunk["choices"][0] for chunk in server.events(PATH, **body)]
        assert whole["text"] == "".join(c["text"] for c in chunks) == text[: text.find(stop)]
        assert whole["finish_reason"] == chunks[-1]["finish_reason"] == "stop"
        assert whole["stop_reason"] == chunks[-1]["stop_reason"] == stop


# Streams


@pytest.mark.parametrize("usage", [None, False, True])
def test_the_stream_has_the_shape_that_clients_accept(server: TinyServer, usage: bool | None) -> None:
    options = {} if usage is None else {"stream_options": {"include_usage": usage}}
    chunks = server.events(PATH, prompt="one", max_tokens=5, temperature=0, ignore_eos=True, **options)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    if usage:
        last = chunks.pop()
        assert last["choices"] == [] and last["usage"]["total_tokens"] == 8
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(
        server, "one", max_tokens=5, ignore_eos=True
    )


def test_continuous_usage_and_timings(server: TinyServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.events(
        PATH, prompt="one", max_tokens=3, ignore_eos=True, stream_options=options, timings_per_token=True
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 3
    assert chunks[0]["timings"]["prompt_n"] + chunks[0]["timings"]["cache_n"] == 3
    assert (
        server.ok(PATH, prompt="one", max_tokens=3, ignore_eos=True, timings_per_token=True)["timings"][
            "predicted_n"
        ]
        == 3
    )


def test_unknown_stream_options_are_named(server: TinyServer) -> None:
    options = {"include_obfuscation": True}
    error = server.refused(PATH, prompt="x", stream=True, stream_options=options)
    assert error["param"] == "stream_options.include_obfuscation"
    assert server.events(PATH, prompt="x", max_tokens=1, stream_options={"include_obfuscation": False})


def test_a_prompt_that_never_fits_the_cache_is_named(tmp_path: Path) -> None:
    with closing(TinyServer(make_llm(tmp_path, num_blocks=4))) as small:
        for path, param, body in (
            (PATH, "prompt", {"prompt": "x" * 100}),
            ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": "x" * 100}]}),
            ("/v1/responses", "input", {"input": "x" * 100}),
            ("/v1/embeddings", "input", {"input": "x" * 100}),
        ):
            error = small.refused(path, **body)
            assert error["param"] == param and "KV-cache blocks, 4 are available" in error["message"]


def test_stream_options_need_a_stream(server: TinyServer) -> None:
    assert (
        server.refused(PATH, prompt="x", stream_options={"include_usage": True})["param"] == "stream_options"
    )


# Log probabilities


def test_logprobs_have_one_entry_a_token_and_the_same_in_a_stream(server: TinyServer) -> None:
    body = {"prompt": "one", "max_tokens": 6, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    choice = server.ok(PATH, **body)["choices"][0]
    logprobs = choice["logprobs"]
    assert {len(entries) for entries in logprobs.values()} == {6}
    for token, own, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert own <= 0 and 2 <= len(top) <= 3
        assert max(top.values()) == own and (token in top or token == "")
    joined: dict[str, list[Any]] = {name: [] for name in logprobs}
    for chunk in server.events(PATH, **body):
        for name, entries in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[name] += entries
    assert joined == logprobs


def test_offsets_are_tied_to_the_text(server: TinyServer) -> None:
    """All tokens are single bytes: bias keeps the answer to ASCII."""
    bias = {str(token_id): -100 for token_id in (*range(32), *range(127, 260))}
    body = {"prompt": "a", "max_tokens": 30, "seed": 5, "logprobs": 0, "ignore_eos": True, "logit_bias": bias}
    choice = server.ok(PATH, **body)["choices"][0]
    offsets = [*choice["logprobs"]["text_offset"], len(choice["text"])]
    assert offsets[0] == 0
    assert [choice["text"][a:b] for a, b in itertools.pairwise(offsets)] == choice["logprobs"]["tokens"]


def test_at_most_twenty_alternatives(server: TinyServer) -> None:
    assert "20" in server.refused(PATH, prompt="x", logprobs=21)["message"]
    assert server.refused(PATH, prompt="x", logprobs=-1)["param"] == "logprobs"
    assert server.refused(PATH, prompt="x", logprobs=True)["param"] == "logprobs"


# Refusals


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b'"x"', b"null", b"", b"\xff\xfe", b"{\"prompt\": \"\xff\"}", b"[" * 100_000,
     b'{"prompt": "\\ud800"}',
     b'{"prompt": "x", "whatever": NaN}', b'{"prompt": "x", "temperature": Infinity}', b'{"a": 1,}',
     b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_what_is_no_json_object_is_a_400(server: TinyServer, body: bytes) -> None:
    error_of(server.request("POST", PATH, content=body))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", ["0.5", -1, True, [], {}]),
        ("top_p", [-0.1, 1.0001, "0.9"]),
        ("top_k", [-5, 1.5, "3"]),
        ("n", [0, -1, 10**6, 1.5, "1", True]),
        ("max_tokens", ["5", 1.5, True]),
        ("stream", ["true", 1]),
        ("stop", [{"a": 1}, [1], "", [""], 3]),
        ("seed", ["1", 2**64, 0.5]),
        (
            "logit_bias",
            [{"260": 1}, {"-1": 1}, {"99999999999": 1}, {"abc": 1}, {"33": 1e9}, {"33": None}, []],
        ),
        ("logprobs", ["1", 1.5]),
        ("prompt", ["", [], [[]], [""], ["a", [1]], [1, "a"], 5, {"a": 1}, [260], [-1], [10**30], None]),
        ("model", [1, ["tiny"]]),
        ("min_tokens", [-1, 100]),
        ("repetition_penalty", [0, -1]),
        ("presence_penalty", [2.1]),
        ("stop_token_ids", [[260], ["a"], 5]),
        ("priority", ["high", 1.5]),
        ("echo", ["yes"]),
        ("best_of", [2]),
    ],
)
def test_a_bad_value_is_a_400_that_names_its_field(
    server: TinyServer, field: str, values: list[object]
) -> None:
    for value in values:
        error = server.refused(PATH, **{"prompt": "x", "max_tokens": 4, field: value})
        assert re.match(rf"(the )?{field}", error["message"]), (value, error)
        assert (error["param"] or "").split(".")[0] == field, (value, error)


@pytest.mark.parametrize(
    ("field", "value"),
    [("suffix", "end"), ("use_beam_search", True), ("length_penalty", 0.5), ("bad_words", ["x"]), ("best_of", 3),
     ("truncate_prompt_tokens", 5), ("guided_json", {}), ("messages", []), ("return_token_ids", True)],
)  # fmt: skip
def test_a_known_field_that_is_not_offered_is_a_400(server: TinyServer, field: str, value: object) -> None:
    error = server.refused(PATH, prompt="x", **{field: value})
    assert field in error["message"] and error["param"] == field and error["code"] == "unsupported_parameter"


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_what_is_not_offered_names_its_successor(server: TinyServer, kind: str) -> None:
    message = server.refused(PATH, prompt="x", **{f"guided_{kind}": "x"})["message"]
    assert message == f"guided_{kind} is not supported: use structured_outputs.{kind}"


def test_a_known_field_that_asks_for_nothing_is_taken(server: TinyServer) -> None:
    server.ok(
        PATH,
        prompt="x",
        max_tokens=1,
        best_of=1,
        use_beam_search=False,
        user="me",
        suffix="",
        length_penalty=1.0,
    )


def test_an_unknown_field_is_taken_and_logged_once(
    server: TinyServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        server.ok(PATH, prompt="x", max_tokens=1, some_new_field=[1])
    assert sum("some_new_field" in record.message for record in caplog.records) == 1


def test_a_prompt_that_does_not_fit_is_a_400_with_openais_code(server: TinyServer) -> None:
    for prompt in ([65] * 513, "A" * 600, "A" * 200_000):
        error = server.refused(PATH, prompt=prompt)
        assert error["code"] == "context_length_exceeded" and "512" in error["message"]


def test_more_than_can_ever_be_in_flight_is_a_400(server: TinyServer) -> None:
    error = server.refused(PATH, prompt=["x"] * 321)
    assert "321 prompts" in error["message"] and "320" in error["message"]


def test_one_bad_prompt_refuses_all(server: TinyServer) -> None:
    for stream in (False, True):
        server.refused(PATH, prompt=["good", "A" * 600], stream=stream)


def test_an_unknown_model_is_a_404(server: TinyServer) -> None:
    error = server.refused(PATH, 404, prompt="x", model="gpt-4")
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert server.ok(PATH, prompt="x", max_tokens=1, model="other")["model"] == "tiny"


def test_a_body_that_is_too_large_is_a_413(server: TinyServer) -> None:
    large = json.dumps({"prompt": "x" * 2**20}).encode()
    assert str(2**20) in error_of(server.request("POST", PATH, content=large), 413)["message"]

    async def parts() -> Any:
        for start in range(0, len(large), 2**16):
            yield large[start : start + 2**16]

    error_of(server.request("POST", PATH, content=parts()), 413)


def test_the_content_type_does_not_matter(server: TinyServer) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json; charset=utf-8"):
        assert server.request("POST", PATH, content=body, headers={"Content-Type": kind}).status_code == 200


def test_unknown_routes_and_methods_have_error_objects(server: TinyServer) -> None:
    assert error_of(server.request("POST", "/v1/nope"), 404)["code"] == "not_found"
    assert error_of(server.request("GET", "/nope%0A%FF"), 404)
    response = server.request("GET", PATH)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    error_of(server.request("OPTIONS", PATH), 405)


def test_surrogates_and_control_characters_in_names_do_no_harm(server: TinyServer) -> None:
    body = {"prompt": "x", "max_tokens": 1, "model\n\x00": 1}
    assert server.request("POST", PATH, content=json.dumps(body).encode()).status_code == 200
    assert data_of(server.post(PATH, prompt="x", max_tokens=2, stream=True).content)[-1] == "[DONE]"
