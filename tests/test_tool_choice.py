"""Forced tool calls: any answer that the constraint allows is a call with valid arguments."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from grammars import compiler, matches, walk

from rvllm.tool_choice import MAX_PARALLEL_CALLS, forced_calls, tool_names
from rvllm.tool_formats import JSON
from rvllm.tool_parser import ToolCall, ToolCallParser


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


WEATHER = tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}, "unit": {"enum": ["c", "f"]}},
        "required": ["city"],
        "$defs": {"City": {"enum": ["Paris", "Rome"]}},
    },
)
TOOLS = [WEATHER, tool("now"), tool("tree", {"type": "object", "properties": {"kid": {"$ref": "#"}}})]


def calls_of(text: str, names: list[str]) -> list[tuple[str, dict[str, Any]]]:
    parser = ToolCallParser(JSON, dict.fromkeys(names))
    found = parser.push(text) + parser.finish()
    calls = [item for item in found if isinstance(item, ToolCall)]
    assert len(calls) == len(found)
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    "options", [{}, {"parallel": False}, {"name": "get_weather"}, {"name": "now"}], ids=str
)
def test_every_answer_is_a_call(options: dict[str, Any]) -> None:
    output = forced_calls(TOOLS, **options)
    texts = [text for seed in range(8) if (text := walk(compiler().compile(output), seed))]
    assert texts
    for text in texts:
        calls = calls_of(text, tool_names(TOOLS))
        assert 1 <= len(calls) <= (1 if options else MAX_PARALLEL_CALLS)
        for name, arguments in calls:
            assert name == options.get("name", name)
            if name == "get_weather":
                assert arguments["city"] in ("Paris", "Rome") and arguments.get("unit", "c") in ("c", "f")
            elif name == "now":
                assert arguments == {}


def test_references_count_from_the_tool() -> None:
    output = forced_calls(TOOLS, "tree")
    assert matches(output, '{"name": "tree", "arguments": {"kid": {"kid": {}}}}')
    assert not matches(output, '{"name": "tree", "arguments": {"kid": 3}}')
    assert not matches(output, '{"name": "now", "arguments": {}}')


NESTED = {"A": {"properties": {"n": {"$ref": "#/$defs/B"}}, "required": ["n"]}, "B": {"enum": [1, 2]}}


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/A", "$defs": NESTED},
        {"$id": "https://example.org/f", "$ref": "#/$defs/A", "$defs": NESTED},
        {"type": "object", "anyOf": [{"$ref": "#/$defs/A"}], "$defs": NESTED},
        {"allOf": [{"$ref": "#/$defs/A"}], "$defs": NESTED},
        {"type": ["object", "null"], "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]},
        {"type": "object", "required": ["n"]},
        {"type": "object", "enum": [{"n": 1}, {"n": 2}]},
        {"const": {"n": 1}},
    ],
    ids=lambda parameters: next(iter(parameters)),
)
def test_properties_may_be_named_elsewhere(parameters: dict[str, Any]) -> None:
    output = forced_calls([tool("f", parameters)], "f")
    assert matches(output, '{"name": "f", "arguments": {"n": 1}}')
    assert not matches(output, '{"name": "f", "arguments": {}}')
    assert not matches(output, '{"name": "f", "arguments": null}')


@pytest.mark.parametrize(
    "key", ["if", "then", "else", "dependentSchemas", "dependentRequired", "not", "$dynamicRef"]
)
def test_what_a_call_cannot_be_held_to_is_refused(key: str) -> None:
    output = forced_calls(
        [tool("f", {"type": "object", "properties": {"a": {}}, key: {"required": ["b"]}})], "f"
    )
    with pytest.raises(ValueError, match=re.escape(key)):
        compiler().compile(output)


def test_behind_thoughts() -> None:
    output = forced_calls([tool("now")], "now", after="</think>")
    assert matches(output, 'Which? </think>{"name": "now", "arguments": {}}')


@pytest.mark.parametrize(
    ("tools", "name", "message"),
    [
        ([], None, "tool_choice needs tools"),
        ([tool("f")], "g", "there is no tool 'g'"),
        ([tool("f"), tool("f")], None, r"tools\.1\.function\.name: 'f' is there twice"),
        ([{"type": "function"}], None, r"tools\.0 must be of type 'function'"),
        ([{"type": "browser", "function": {"name": "f"}}], None, r"tools\.0 must be of type 'function'"),
        ([tool("")], None, r"tools\.0\.function\.name must be a text"),
        ([{"function": {"name": "f", "parameters": 3}}], None, r"tools\.0\.function\.parameters must be a JSON schema"),
        ([tool("f", {"type": "string"})], None, r"tools\.0\.function\.parameters must be of type 'object', got 'str"),
        ([tool(f"f{i}") for i in range(200)], None, "tools has 200 entries, at most 128"),
    ],
)  # fmt: skip
def test_bad_tools(tools: list[dict[str, Any]], name: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        forced_calls(tools, name)


def test_bad_parameters_are_named() -> None:
    output = forced_calls([tool("f", {"type": "object", "properties": {"a": {"type": "zork"}}})])
    with pytest.raises(ValueError, match="json_schema: Invalid type: zork"):
        compiler().compile(output)
