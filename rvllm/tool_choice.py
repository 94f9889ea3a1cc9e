"""tool_choice: when a model must call a tool, the calls that it can write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rvllm.structured_output import StructuredOutput

MAX_TOOLS = 128
MAX_PARALLEL_CALLS = 8  # of forced ones: a small model might go on for ever

_ELSEWHERE = frozenset({"$ref", "allOf", "anyOf", "oneOf", "const", "enum"})  # these may name properties

Tool = Mapping[str, Any]


def tool_names(tools: Sequence[Tool]) -> list[str]:
    """Names of {"type": "function", "function": {"name", "description", "parameters"}} tools. Raises ValueError."""
    names: list[str] = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise ValueError(f"tools.{i} must be of type 'function' and have a 'function'")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"tools.{i}.function.name must be a text that is not empty, got {name!r}")
        if name in names:
            raise ValueError(f"tools.{i}.function.name: {name!r} is there twice")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise ValueError(f"tools.{i}.function.parameters must be a JSON schema")
        kind = (parameters or {}).get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise ValueError(f"tools.{i}.function.parameters must be of type 'object', got {kind!r:.100}")
        names.append(name)
    return names


def forced_calls(
    tools: Sequence[Tool], name: str | None = None, parallel: bool = True, after: Sequence[str] = ()
) -> StructuredOutput:
    """What an answer must be when a tool has to be called: the one named, or any.

    It is plain JSON (tool_parser.JSON), whatever form the model was taught: {"name", "arguments"}, or, when any may be
    called and parallel, a list of 1 to 8 of them. after: as in StructuredOutput. Raises ValueError, also when there is
    no such tool.
    """
    names = check_tools(tools)
    if name is not None and name not in names:
        raise ValueError(f"tool_choice: there is no tool {name!r}")
    calls, definitions = [], {}
    for i, (tool, tool_name) in enumerate(zip(tools, names, strict=True)):
        if name not in (None, tool_name):
            continue
        # The parameters' own references count from their own root, by whatever $id they call it.
        schema = {key: value for key, value in parameters(tool).items() if key != "$id"}
        definitions[str(i)] = _moved(schema, f"#/$defs/{i}")
        properties = {"name": {"const": tool_name}, "arguments": {"$ref": f"#/$defs/{i}"}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    answer: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if name is None and parallel:
        answer = {"type": "array", "items": answer, "minItems": 1, "maxItems": MAX_PARALLEL_CALLS}
    return StructuredOutput(json_schema={**answer, "$defs": definitions}, after=after or None)


def check_tools(tools: Sequence[Tool]) -> list[str]:
    """As tool_names(), of tools that become a constraint."""
    names = tool_names(tools)
    if not names:
        raise ValueError("tool_choice needs tools")
    if len(names) > MAX_TOOLS:
        raise ValueError(f"tools has {len(names)} entries, at most {MAX_TOOLS} are allowed")
    return names


def parameters(tool: Tool) -> Mapping[str, Any]:
    """The JSON schema of a tool's arguments, which are those that it names; without one of its own it takes none."""
    schema = tool["function"].get("parameters") or {}
    is_closed = not _ELSEWHERE & schema.keys() and ("properties" in schema or "required" not in schema)
    closed = {"properties": {}, "additionalProperties": False} if is_closed else {}
    return {**closed, **schema, "type": "object"}


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to itself are those of a part of another one."""
    if isinstance(schema, Mapping):
        moved = {key: _moved(value, root) for key, value in schema.items()}
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref.startswith("#"):
            moved["$ref"] = root + ref[1:]
        return moved
    if isinstance(schema, (list, tuple)):
        return [_moved(item, root) for item in schema]
    return schema
