"""The messages of a chat in the ways that model families' templates want them, which they do not say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import Any

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
GOES_THROUGH_PARTS = re.compile(r"for\s+\w+\s+in\s+[\w.\[\]'\"]*content\b")
HAS_NONE = re.compile(r"(?<!\w)content(?:['\"]\])?\s+is\s+not\s+none", re.IGNORECASE)
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")  # in a message, by family
TOOL_ROLES = ("tool", "tool_response")  # of a tool's result, by family

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """A template that is broken, or that refuses the messages; one line."""


def with_texts(source: str, messages: Sequence[Message]) -> list[Message]:
    """Messages whose lists of content parts are one text each, unless the template goes through them itself."""
    plain = []
    for i, message in enumerate(messages):
        parts = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(parts, (list, tuple)):
            for j, part in enumerate(parts):
                kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
                if kind not in TEXT_PARTS:
                    where = f"messages.{i}.content.{j}"
                    raise ChatTemplateError(
                        f"{where}: parts of type {short(kind)} are not supported: the model reads text"
                    )
            texts = [part["text"] for part in parts if isinstance(part, Mapping) and "text" in part]
            if len(texts) == len(parts) and not GOES_THROUGH_PARTS.search(source):
                message = {**message, "content": "\n".join(map(str, texts))}
        plain.append(message)
    return plain


def text_of(message: Message) -> str:
    """The content as one text, whatever the template does with parts; nothing is no text."""
    (plain,) = with_texts("", [message])
    return str(plain.get("content") or "")


def adapt(source: str, message: Message) -> Message:
    """A message with the names and the kinds of values that a template looks for."""
    if not isinstance(message, Mapping):
        return message
    adapted = dict(message)
    calls = message.get("tool_calls")
    if calls:
        adapted["tool_calls"] = [_with_arguments(call) for call in calls]
        if not message.get("content"):
            adapted["content"] = None if HAS_NONE.search(source) else ""
    if message.get("role") == "tool":
        roles = (role for role in TOOL_ROLES if f"'{role}'" in source or f'"{role}"' in source)
        adapted["role"] = next(roles, "tool")
    thoughts = next((message[name] for name in REASONING_NAMES if message.get(name)), None)
    # gpt-oss's template refuses thoughts beside content where there is a call.
    if thoughts is not None and not (calls and message.get("content")):
        asked = (name for name in REASONING_NAMES if name in source)
        adapted = {**dict.fromkeys(asked, thoughts), **adapted}
    return adapted


def fold_system(messages: Sequence[Message]) -> list[Message]:
    """The messages with the system message, which is the first, before the text of the first user message."""
    system, *rest = messages
    at = next((i for i, message in enumerate(rest) if message.get("role") == "user"), None)
    if at is None:
        return [{**system, "role": "user"}, *rest]
    texts = [message.get("content") or "" for message in (system, rest[at])]
    parts = [text if isinstance(text, list) else [{"type": "text", "text": text}] for text in texts]
    joined: Any = parts[0] + parts[1]
    if all(isinstance(text, str) for text in texts):
        joined = "\n\n".join(text for text in texts if text)
    return [*rest[:at], {**rest[at], "content": joined}, *rest[at + 1 :]]


class _Arguments(dict[str, Any]):
    """Arguments of a call, for templates that print JSON as well as for those that join it to a text."""

    def __radd__(self, text: str) -> str:
        return text + json.dumps(self, ensure_ascii=False)


def _with_arguments(call: Any) -> Any:
    """A call whose arguments are an object, also where they were its JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return call
    if not isinstance(arguments, Mapping):
        return call
    return {**call, "function": {**function, "arguments": _Arguments(arguments)}}  # type: ignore[dict-item]
