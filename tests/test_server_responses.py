"""/v1/responses: what is reported of an answer is the same, however its tokens come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from server_client import TinyServer, data_of, make_llm

from rvllm.reasoning_formats import find_reasoning
from rvllm.request import CompletionOutput
from rvllm.server.chat_output import ChatOutput, TurnFormat
from rvllm.server.responses_input import input_messages
from rvllm.server.responses_output import ResponseOutput
from rvllm.tool_formats import HERMES


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    server = TinyServer(make_llm(tmp_path_factory.mktemp("model")))
    yield server
    server.close()


def response_of(pieces: list[str], groups: list[int]) -> dict[str, Any]:
    """A response of a model that thinks, whose tokens have these texts and come so many at a time."""
    usage = {
        "prompt_tokens": 1,
        "prompt_tokens_details": {},
        "completion_tokens": len(pieces),
        "total_tokens": 1,
    }
    generation: Any = SimpleNamespace(usage=lambda: usage)
    turn = TurnFormat(find_reasoning("<think>"), is_thinking=True, tool_format=HERMES, tools={"f": {}})
    response = ResponseOutput(generation, ChatOutput(turn), {}, 0)
    while groups:
        count, *groups = groups
        now, pieces = pieces[:count], pieces[count:]
        completion = CompletionOutput(0, "".join(now), [0] * len(now), text_lengths=[len(p) for p in now])
        completion.finish_reason = None if groups else "stop"
        generation.results = [SimpleNamespace(outputs=[completion])]
        whole = response.whole()
    return whole


def test_tokens_of_thoughts_are_counted_however_many_come_at_a_time() -> None:
    pieces = [
        "I",
        " see",
        "",
        "</th",
        "ink>",
        "\n\n",
        "Yes",
        ".",
        "<tool_call>",
        '{"name": "f"}',
        "</tool_call>",
    ]
    for groups in ([11], [1] * 11, [5, 6], [2, 7, 2]):
        whole = response_of(pieces, groups)
        assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
        kinds = [(item["type"], item.get("content", [{}])[0].get("text")) for item in whole["output"]]
        assert kinds == [("reasoning", "I see"), ("message", "Yes."), ("function_call", None)]


@pytest.mark.parametrize(
    "fields", [{}, {"text": {"format": {"type": "json_object"}}}, {"stop": "e"}], ids=str
)
def test_a_response_has_the_logprobs_of_all_its_tokens_in_both_modes(
    server: TinyServer, fields: dict[str, Any]
) -> None:
    for seed in range(3):
        body = {"input": "hi", "max_output_tokens": 40, "seed": seed, "top_logprobs": 1, **fields}
        whole = server.ok("/v1/responses", **body)
        content = server.post("/v1/responses", **body, stream=True).content
        streamed = json.loads(data_of(content)[-1])["response"]
        (part,), (same,) = whole["output"][0]["content"], streamed["output"][0]["content"]
        assert part == same and len(part["logprobs"]) == whole["usage"]["output_tokens"]
        assert whole["usage"]["output_tokens_details"] == streamed["usage"]["output_tokens_details"]


def test_the_items_of_a_turn_are_one_message() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}

    text = {"type": "message", "role": "assistant", "content": "I look."}
    thoughts = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    result = {"type": "function_call_output", "call_id": "f", "output": "1"}
    items = [thoughts, text, call("f"), call("g"), result, call("f"), thoughts, call("g")]
    turns = [
        (
            m.role,
            m.content,
            (m.model_extra or {}).get("reasoning_content"),
            [c.id for c in m.tool_calls or ()],
        )
        for m in input_messages(None, items)
    ]
    assert turns == [
        ("assistant", "I look.", "hm", ["f", "g"]),
        ("tool", "1", None, []),
        ("assistant", None, None, ["f"]),
        ("assistant", None, "hm", ["g"]),
    ]
