"""The input of /v1/responses as messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from rvllm.server.chat_prompt import NamedFunction, NamedTool, Tool, ToolChoice
from rvllm.server.errors import APIError, bad_request, from_validation_error, unsupported
from rvllm.server.messages import Message, template_message

_ITEM_NAMES = {  # of a message's fields
    "function_call": {"tool_calls.0.function.": "", "tool_calls.0.id": "call_id"},
    "function_call_output": {"content": "output"},
}


def input_messages(instructions: str | None, items: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Raises APIError naming the item at fault."""
    messages = [] if instructions is None else [Message(role="system", content=instructions)]
    if isinstance(items, str):
        return [*messages, Message(role="user", content=items)]
    reasoning: str | None = None
    for i, item in enumerate(items):
        kind = "message" if item.get("type") is None else item["type"]
        if kind == "reasoning":
            reasoning = _text(f"input.{i}", item)
            continue
        fields = _message_fields(f"input.{i}", kind, item)
        thinks = reasoning is not None and fields["role"] == "assistant"
        if thinks:
            fields["reasoning_content"] = reasoning
        reasoning = None
        message = _message(f"input.{i}", kind, fields)
        if message.tool_calls and not thinks and messages and messages[-1].role == "assistant":
            # A turn is its thoughts, its text and its calls, each of which is an item here.
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), *message.tool_calls]
        else:
            messages.append(message)
    if not messages:
        raise bad_request("input must hold at least one message", "input")
    return messages


def _message(where: str, kind: object, fields: Mapping[str, Any]) -> Message:
    """Raises APIError that calls the fields what the item calls them."""
    try:
        message = Message.model_validate(fields)
        template_message(where, message)
        return message
    except ValidationError as error:
        problem = from_validation_error(error, fields)
        text, param = f"{where}: {problem.message}", f"{where}.{problem.param}" if problem.param else where
    except APIError as error:
        problem, text, param = error, error.message, error.param or where
    for name, item_name in _ITEM_NAMES.get(str(kind), {}).items():
        text, param = text.replace(name, item_name, 1), param.replace(name, item_name, 1)
    raise APIError(400, text, param, problem.code)


def _message_fields(where: str, kind: object, item: Mapping[str, Any]) -> dict[str, Any]:
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    raise unsupported(f"{where}.type", f"items of type {str(kind)[:50]!r} cannot be read")


def _text(where: str, item: Mapping[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts
    ):
        raise bad_request(f"{where}.content must be a list of parts with text", f"{where}.content")
    return "\n".join(part["text"] for part in parts)


def chat_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Tool] | None:
    """The tools in the form of /v1/chat/completions. Raises APIError for one that is no function."""
    if tools is None:
        return None
    converted = []
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise unsupported(f"tools.{i}.type", f"{str(tool.get('type'))[:50]!r} is no function")
        fields = {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        try:
            converted.append(Tool.model_validate(fields))
        except ValidationError as error:
            problem = from_validation_error(error, fields)
            name = problem.param or ""
            raise problem.renamed({name: f"tools.{i}.{name.removeprefix('function.')}"}) from None
    return converted


def chat_tool_choice(choice: str | Mapping[str, Any] | None) -> ToolChoice | None:
    if choice is None or choice in ("none", "auto", "required"):
        return choice  # type: ignore[return-value]
    if (
        isinstance(choice, Mapping)
        and choice.get("type") == "function"
        and isinstance(choice.get("name"), str)
    ):
        return NamedTool(type="function", function=NamedFunction(name=choice["name"]))
    raise bad_request(
        "tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'name': ...}", "tool_choice"
    )
