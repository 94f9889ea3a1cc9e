"""OpenAI's own client against the server on a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from server_client import TinyServer, make_llm
from test_server_chat import TOOL

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
            {"tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}]},
            "tools.0.function.strict",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_responses_do_not_offer_is_named(
    client: openai.OpenAI, fields: dict[str, object], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "tiny", "input": "hi", **fields})
    assert caught.value.param == param


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
