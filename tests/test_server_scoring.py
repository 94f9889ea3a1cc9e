"""Scores of prompts (echo with log probabilities, as evaluation harnesses ask for them) and embeddings."""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_client import TinyServer, make_llm

from rvllm import LLM, SamplingParams
from rvllm.request import CompletionOutput, RequestOutput

PATH = "/v1/completions"
PROMPT = "The capital of France"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return make_llm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[TinyServer]:
    server = TinyServer(llm)
    yield server
    server.close()


def log_softmax(logits: Any) -> Any:
    logits = logits.astype(np.float64)
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Log probability of each token of PROMPT after the first, from an engine of its own."""
    own = make_llm(tmp_path_factory.mktemp("model"))
    ids = own.tokenizer.encode(PROMPT)
    rows = log_softmax(own.get_logits(ids))
    return [float(rows[i, token_id]) for i, token_id in enumerate(ids[1:])]


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("prompt_is_text", [True, False])
def test_echo_scores_the_prompt(
    server: TinyServer, expected: list[float], max_tokens: int, prompt_is_text: bool
) -> None:
    prompt = PROMPT if prompt_is_text else list(PROMPT.encode())
    if not prompt_is_text:
        prompt = server.llm.tokenizer.encode(PROMPT)
    body = {
        "prompt": prompt,
        "echo": True,
        "logprobs": 3,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = server.ok(PATH, **body)
    choice, usage = answer["choices"][0], answer["usage"]
    logprobs, text, length = choice["logprobs"], choice["text"], len(PROMPT)
    assert text.startswith(PROMPT) and (max_tokens > 0 or text == PROMPT)
    assert {len(entries) for entries in logprobs.values()} == {length + max_tokens}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (length, max_tokens)
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:length] == pytest.approx(expected, abs=1e-4)
    assert logprobs["tokens"][:length] == list(PROMPT) and logprobs["text_offset"][:length] == list(
        range(length)
    )
    for own, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert 3 <= len(top) <= 4 and own in top.values() and sum(map(math.exp, top.values())) <= 1.0001
    assert choice["finish_reason"] == "length"


def test_a_harness_finds_the_score_of_a_continuation(server: TinyServer, expected: list[float]) -> None:
    """As lm-eval reads it: one token beyond the prompt, the context cut off, greedy where the best is the token."""
    ids = server.llm.tokenizer.encode(PROMPT)
    body = {
        "prompt": [ids, ids[:10]],
        "echo": True,
        "logprobs": 1,
        "max_tokens": 1,
        "temperature": 0,
        "seed": 1234,
    }
    choices = server.ok(PATH, model="tiny", **body)["choices"]
    for choice, prompt in zip(choices, body["prompt"], strict=True):  # type: ignore[call-overload]
        scores = choice["logprobs"]["token_logprobs"][8:-1]
        assert scores == pytest.approx(expected[7 : len(prompt) - 1], abs=1e-4)


def test_a_stream_has_the_same_entries(server: TinyServer) -> None:
    body = {
        "prompt": PROMPT,
        "echo": True,
        "logprobs": 2,
        "max_tokens": 5,
        "seed": 1,
        "n": 2,
        "prompt_logprobs": 1,
    }
    whole = server.ok(PATH, **body)["choices"]
    chunks = [chunk["choices"][0] for chunk in server.events(PATH, **body)]
    for index in range(2):
        mine = [choice for choice in chunks if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == whole[index]["text"]
        for name, entries in whole[index]["logprobs"].items():
            parts = [choice["logprobs"][name] for choice in mine if choice["logprobs"]]
            assert list(itertools.chain(*parts)) == entries
        assert mine[0]["prompt_logprobs"] == whole[index]["prompt_logprobs"]


def test_prompt_logprobs_have_vllms_shape(server: TinyServer, expected: list[float]) -> None:
    ids = server.llm.tokenizer.encode(PROMPT)
    for body, where in (
        ({"prompt": PROMPT}, "choice"),
        ({"messages": [{"role": "user", "content": "x"}]}, "answer"),
    ):
        path = PATH if where == "choice" else "/v1/chat/completions"
        answer = server.ok(path, **body, prompt_logprobs=2, max_tokens=1)
        entries = answer["choices"][0]["prompt_logprobs"] if where == "choice" else answer["prompt_logprobs"]
        assert entries[0] is None and all(2 <= len(entry) <= 3 for entry in entries[1:])
        if where == "choice":
            own = [entry[str(token_id)] for entry, token_id in zip(entries[1:], ids[1:], strict=True)]
            assert [entry["logprob"] for entry in own] == pytest.approx(expected, abs=1e-4)
            assert own[0].keys() == {"logprob", "rank", "decoded_token"}


def test_scores_do_not_depend_on_the_cache(server: TinyServer) -> None:
    body = {"prompt": "x" * 40, "echo": True, "logprobs": 1, "max_tokens": 0}
    first = server.ok(PATH, **body)["choices"]
    assert (
        server.ok(PATH, **body)["choices"] == first == server.ok(PATH, **body, cache_prompt=False)["choices"]
    )


def test_a_prompt_may_fill_the_context_where_nothing_is_generated(server: TinyServer) -> None:
    full = [65] * server.model.max_model_len
    for echo in ({}, {"echo": True}, {"echo": True, "logprobs": 1}):
        answer = server.ok(PATH, prompt=full, max_tokens=0, **echo)
        assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["prompt_tokens"] == len(full)
        if "logprobs" in echo:
            assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == len(full)
    assert server.ok("/completion", prompt=full, n_predict=0)["tokens_predicted"] == 0
    for prompt, max_tokens in ((full, 1), ([*full, 65], 0)):
        error = server.refused(PATH, prompt=prompt, max_tokens=max_tokens)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_echo_without_logprobs(server: TinyServer) -> None:
    plain = server.ok(PATH, prompt=["a", "b"], temperature=0, max_tokens=3)["choices"]
    echoed = server.ok(PATH, prompt=["a", "b"], temperature=0, max_tokens=3, echo=True)["choices"]
    assert [c["text"] for c in echoed] == ["a" + plain[0]["text"], "b" + plain[1]["text"]]
    assert SamplingParams(max_tokens=1).prompt_logprobs is None


# Embeddings


def test_both_encodings_hold_the_same_vectors(server: TinyServer) -> None:
    body = {"input": ["hello", "hello world"], "model": "tiny"}
    plain = server.ok("/v1/embeddings", **body)
    assert plain == server.ok("/v1/embeddings", **body, encoding_format="float")
    assert [item["index"] for item in plain["data"]] == [0, 1] and plain["object"] == "list"
    assert plain["usage"] == {"prompt_tokens": 16, "total_tokens": 16}
    packed = server.ok("/v1/embeddings", **body, encoding_format="base64")
    for item, other in zip(plain["data"], packed["data"], strict=True):
        vector = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        assert vector.tolist() == pytest.approx(item["embedding"], abs=1e-6) and len(vector) == 64
        assert float(np.linalg.norm(vector)) == pytest.approx(1, abs=1e-5)


def test_text_and_ids_have_the_same_vector(server: TinyServer) -> None:
    ids = server.llm.tokenizer.encode("hello")
    vectors = [
        server.ok("/v1/embeddings", input=given)["data"][0]["embedding"] for given in ("hello", ids, [ids])
    ]
    assert vectors[0] == vectors[1] == vectors[2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"encoding_format": "int8"}, "encoding_format"), ({"dimensions": 8}, "dimensions"),
     ({"dimensions": 10**6}, "dimensions"),
     ({"input": []}, "input"), ({"input": ""}, "input"), ({"input": None}, "input"), ({"input": ["a", 1]}, "input"),
     ({"input": "x" * 600}, "input"), ({"input": "x" * 60000}, "input"), ({"input": ["x"] * 2049}, "input"),
     ({"input": [260]}, "input")],
)  # fmt: skip
def test_bad_inputs_are_refused(server: TinyServer, fields: dict[str, Any], param: str) -> None:
    assert server.refused("/v1/embeddings", **{"input": "x", **fields})["param"] == param
    assert server.ok("/v1/embeddings", input="x", dimensions=64, user="me")["data"]


def test_streams_have_prompt_logprobs_in_their_first_chunk(server: TinyServer) -> None:
    body = {"max_tokens": 2, "ignore_eos": True, "prompt_logprobs": 1}
    chat = {**body, "messages": [{"role": "user", "content": "hi"}], "n": 2}
    first, *others = server.events("/v1/chat/completions", **chat)
    assert first["prompt_logprobs"] == server.ok("/v1/chat/completions", **chat)["prompt_logprobs"]
    assert all("prompt_logprobs" not in chunk for chunk in others)
    hidden = {**body, "prompt": "hi", "logit_bias": {"200": 100}}  # a byte that is no text by itself
    whole = server.ok("/v1/completions", **hidden)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in server.events("/v1/completions", **hidden)]
    found = [choice["prompt_logprobs"] for choice in chunks if "prompt_logprobs" in choice]
    assert found == [whole["prompt_logprobs"]]


def test_an_embedding_that_is_dropped_or_no_number_has_an_error_object(
    server: TinyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = [(None, 503, "shutting down"), ("not finite", 500, "not finite")]
    for reason, status, message in outcomes:
        completion = CompletionOutput(0, "", [], None, None, finish_reason="abort", error=reason)

        async def follow(*arguments: Any, _completion: CompletionOutput = completion) -> Any:
            yield RequestOutput("a", None, [1], 0, [_completion], finished=True)

        monkeypatch.setattr(server.engine, "_follow", follow)
        assert message in server.refused("/v1/embeddings", status, input="x")["message"]


PARIS = {
    " Paris": -0.258,
    " the": -2.741,
    " London": -4.384,
    " Le": -4.620,
    " New": -4.678,
}  # llama.cpp, in float32


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.01), ("auto", 0.1)])
def test_logprobs_of_a_real_model_are_its_own_at_every_temperature(
    smollm2_path: Path, dtype: str, tolerance: float
) -> None:
    """In float32 the five are the best. The sixth, " La", is nearer to the fifth than int8 activations are exact."""
    llm = LLM(smollm2_path, dtype=dtype, max_model_len=256, num_blocks=32)
    with closing(TinyServer(llm)) as server:
        body = {"prompt": "The capital of France is", "max_tokens": 3, "seed": 1}
        settings = [{"temperature": t} for t in (0, 0.2, 1, 2)]
        settings += [{"temperature": 0, "repetition_penalty": 1.5}, {"logit_bias": {"7042": -100}}]
        for others in settings:
            num_top = 5 if dtype == "float32" else 6
            logprobs = server.ok("/v1/completions", **body, **others, logprobs=num_top)["choices"][0][
                "logprobs"
            ]
            best = logprobs["top_logprobs"][0]
            for text, value in PARIS.items():
                assert best[text] == pytest.approx(value, abs=tolerance)
            for token, value, top in zip(
                logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
            ):
                assert top[token] == value <= 0 and sum(map(math.exp, top.values())) <= 1.0001
