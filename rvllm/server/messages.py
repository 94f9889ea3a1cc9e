"""The messages of a chat, checked, and in the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict

from rvllm.server.errors import bad_request, unsupported
from rvllm.server.schemas import Items, one_of


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None
    refusal: str | None = None


class Function(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    arguments: Annotated[str | dict[str, Any], one_of("a JSON object, or one as a string")]


class ToolCall(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(BaseModel):
    """Keys that are not named here reach the template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Items[ContentPart] | None, one_of("a string or a list of parts of text")] = None
    tool_calls: Items[ToolCall] | None = None


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as plain objects: parts joined by newlines, arguments of tool calls parsed, developer as system.

    Raises APIError naming the message.
    """
    if not messages:
        raise bad_request("messages must hold at least one message", "messages")
    return [template_message(f"messages.{i}", message) for i, message in enumerate(messages)]


def template_message(where: str, message: Message) -> dict[str, Any]:
    """Raises APIError naming the field, by its path from where on."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _content_text(where, message)}
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(
                        f"{where}.tool_calls.{i}.function.arguments", call.function.arguments
                    ),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    extra = {name: value for name, value in (message.model_extra or {}).items() if value is not None}
    if "function_call" in extra:
        raise unsupported(f"{where}.function_call", "use tool_calls")
    return plain | extra


def _content_text(where: str, message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise bad_request(f"{where}.content is missing", f"{where}.content", "missing_required_parameter")
    texts = []
    for i, part in enumerate(message.content):
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise bad_request(
                f"{where}.content.{i}: parts of type {part.type[:50]!r} are not supported: the model reads text",
                f"{where}.content.{i}.type",
                "unsupported_parameter",
            )
        name = "refusal" if part.type == "refusal" else "text"
        text = getattr(part, name)
        if text is None:
            raise bad_request(f"{where}.content.{i}.{name} is missing", f"{where}.content.{i}.{name}")
        texts.append(text)
    return "\n".join(texts)


def _arguments(where: str, arguments: str | Mapping[str, Any]) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise bad_request(f"{where} must be a JSON object", where)
    return parsed
