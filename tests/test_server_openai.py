"""OpenAI's own client against the server on a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from gguf_writer import ARR, I32, Typed
from pydantic import BaseModel
from server_client import TEMPLATE, TinyServer, make_llm
from test_server_chat import TOOL
from tiny_gguf import (
    CONTROL_TOKEN,
    CONTROL_TOKENS,
    EOS_TOKEN_ID,
    NORMAL_TOKEN,
    USER_DEFINED_TOKEN,
    VOCAB,
    byte_level_tokenizer,
    write_tiny_model,
)

from rvllm import LLM

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    server = TinyServer(make_llm(tmp_path_factory.mktemp("model"), context_length=4096), api_keys=("key",))
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(server: TinyServer) -> Iterator[openai.OpenAI]:
    with (
        server.on_socket() as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client,
    ):
        yield client


def test_completions_and_their_stream(client: openai.OpenAI) -> None:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 8, "seed": 1, "logprobs": 2}
    whole = client.completions.create(**body).choices[0]
    assert len(whole.logprobs.tokens) == 8 or whole.finish_reason == "stop"
    chunks = list(client.completions.create(**body, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text


def test_chat_and_its_stream(client: openai.OpenAI) -> None:
    body = {"model": "tiny", "messages": HI, "max_tokens": 8, "seed": 1, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**body)
    assert (
        whole.choices[0].message.role == "assistant" and whole.usage.prompt_tokens_details.cached_tokens >= 0
    )
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    stream = client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
    *chunks, last = stream
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    )
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_the_stream_helper_builds_the_same_message(client: openai.OpenAI) -> None:
    body = {"model": "tiny", "messages": HI, "max_tokens": 8, "seed": 1}
    text = client.chat.completions.create(**body).choices[0].message.content
    body["stop"] = text[5]  # the helper refuses what the limit has cut off
    with client.chat.completions.stream(**body) as stream:
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**body)
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_responses_and_their_stream(client: openai.OpenAI) -> None:
    body = {
        "model": "tiny",
        "input": "hi",
        "max_output_tokens": 8,
        "temperature": 0,
        "instructions": "Be brief",
    }
    whole = client.responses.create(**body)
    assert whole.id.startswith("resp_") and whole.status in ("completed", "incomplete")
    assert [item.status for item in whole.output] == [whole.status]
    events = list(client.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        f"response.{whole.status}",
    ]  # fmt: skip
    stop = whole.output_text[5]
    with client.responses.stream(**body, extra_body={"stop": stop}) as stream:
        assert stream.get_final_response().output_text == whole.output_text.partition(stop)[0]


def test_responses_take_items_tools_and_logprobs(client: openai.OpenAI) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"place": "Bern"}'},
        {"type": "function_call_output", "call_id": "1", "output": "sunny"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is"}]},
        {"role": "user", "content": "and?"},
    ]
    tool = {"type": "function", **TOOL["function"]}
    answer = client.responses.create(
        model="tiny", input=items, tools=[tool], max_output_tokens=4, top_logprobs=2,
        include=["message.output_text.logprobs"], temperature=0,
    )  # fmt: skip
    logprobs = [
        entry for item in answer.output if item.type == "message" for entry in item.content[0].logprobs
    ]
    assert logprobs and all(len(entry.top_logprobs) == 2 for entry in logprobs)
    assert answer.store is False and answer.usage.output_tokens == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input.0.output"),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "x"}]},
            "input.0.arguments",
        ),
        (
            {"input": [{"type": "function_call", "call_id": 1, "name": "f", "arguments": ""}]},
            "input.0.call_id",
        ),
        ({"input": [{"role": "king", "content": "x"}]}, "input.0.role"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"generate_summary": "auto"}}, "reasoning.generate_summary"),
        (
            {
                "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}],
                "text": {"format": {"type": "json_object"}},
            },
            "tools",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"input": []}, "input"),
    ],
)
def test_what_responses_do_not_offer_is_named(
    client: openai.OpenAI, fields: dict[str, object], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "tiny", "input": "hi", **fields})
    assert caught.value.param == param


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]


@pytest.fixture(scope="module")
def tool_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Of a model that has the mark of a call as a token, so that a bias makes it call, or not."""
    metadata = byte_level_tokenizer(VOCAB + 1)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokens[VOCAB] = "<tool_call>"
    types = [NORMAL_TOKEN] * 256 + [CONTROL_TOKEN] * len(CONTROL_TOKENS) + [USER_DEFINED_TOKEN]
    metadata |= {
        "tokenizer.ggml.token_type": Typed(ARR, Typed(I32, types)),
        "tokenizer.chat_template": TEMPLATE,
    }
    path = tmp_path_factory.mktemp("tools") / "tiny.gguf"
    write_tiny_model(path, vocab=VOCAB + 1, context_length=4096, metadata=metadata)
    llm = LLM(path, num_blocks=256, seed=0, num_threads=1)
    server = TinyServer(llm)
    with (
        server.on_socket() as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client,
    ):
        yield client
    server.close()


CALLS, ENDS = {str(VOCAB): 100}, {str(VOCAB): -100, str(EOS_TOKEN_ID): 100}
STRICT = openai.pydantic_function_tool(GetWeather)


def test_a_strict_tool_may_be_called(tool_client: openai.OpenAI) -> None:
    body = {
        "model": "tiny",
        "messages": HI,
        "tools": [STRICT],
        "parallel_tool_calls": False,
        "max_tokens": 400,
    }
    for seed in range(3):
        whole = tool_client.chat.completions.parse(**body, seed=seed, logit_bias=CALLS).choices[0]
        (call,) = whole.message.tool_calls
        assert isinstance(call.function.parsed_arguments, GetWeather)
        assert whole.finish_reason == "tool_calls" and whole.message.content is None
        with tool_client.chat.completions.stream(**body, seed=seed, logit_bias=CALLS) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.message.tool_calls[0].function.parsed_arguments == call.function.parsed_arguments
    text = tool_client.chat.completions.parse(**body, logit_bias=ENDS).choices[0]
    assert (text.finish_reason, text.message.content, text.message.tool_calls) == ("stop", "", None)
    free = {**STRICT, "function": {**STRICT["function"], "strict": None}}
    body["tools"] = [free]
    loose = tool_client.chat.completions.create(**{**body, "max_tokens": 4}, logit_bias=CALLS).choices[0]
    assert loose.finish_reason == "length" and not loose.message.tool_calls  # the mark, again and again


def test_strict_calls_one_after_another(tool_client: openai.OpenAI) -> None:
    body = {
        "model": "tiny",
        "messages": HI,
        "tools": [STRICT],
        "max_tokens": 300,
        "logit_bias": CALLS,
        "seed": 1,
    }
    calls = tool_client.chat.completions.create(**body).choices[0].message.tool_calls
    assert len(calls) > 1
    assert all(GetWeather.model_validate_json(call.function.arguments) for call in calls)
    response = tool_client.responses.create(
        model="tiny", input="hi", max_output_tokens=300, parallel_tool_calls=False,
        tools=[{"type": "function", **STRICT["function"]}], extra_body={"logit_bias": CALLS},
    )  # fmt: skip
    (item,) = response.output
    assert item.type == "function_call" and GetWeather.model_validate_json(item.arguments)


def test_errors_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HI, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nope", messages=HI)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_closing_a_stream_frees_its_request(server: TinyServer, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="tiny", prompt="x", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    server.assert_idle()


def test_many_streams_of_the_async_client(client: openai.OpenAI) -> None:
    body = {"model": "tiny", "max_tokens": 8, "seed": 3, "stream": True}

    async def text(async_client: openai.AsyncOpenAI, i: int) -> str:
        stream = await async_client.completions.create(prompt=f"{i} bottles", **body)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="key") as async_client:
            return await asyncio.gather(*(text(async_client, i) for i in range(16)))

    texts = asyncio.run(run())
    for i in (0, 7, 15):
        alone = client.completions.create(**{**body, "stream": False}, prompt=f"{i} bottles")
        assert alone.choices[0].text == texts[i]
