"""Tools for models whose chat template knows less of them: told in the system message, calls written as text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rvllm.chat_messages import ChatTemplateError, text_of
from rvllm.tool_formats import ToolFormat

# A template that looks for tools in the system message, as JSON text (Phi-4-mini's).
TOOLS_IN_MESSAGE = re.compile(r"message(?:\.tools|\[['\"]tools['\"]\])")

_HEAD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TAIL = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def tell_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The messages with the tools in the system message, in the form that Qwen made common, calls as text and their
    results as the user's.
    """
    told = _HEAD + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _TAIL if tools else ""
    plain = [_plain_message(message) for message in messages]
    if not told:
        return plain
    if plain and plain[0].get("role") == "system":
        return [{**plain[0], "content": "\n\n".join(filter(None, (text_of(plain[0]), told)))}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text_of(message)}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    texts = [text] if (text := text_of(message)) else []
    for call in calls:
        texts.append(f"<tool_call>\n{json.dumps(_function(call), ensure_ascii=False)}\n</tool_call>")
    return {"role": "assistant", "content": "\n".join(texts)}


def put_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The messages with the tools as JSON text in the system message's key "tools"."""
    text = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    if messages and messages[0].get("role") == "system":
        return [{**messages[0], "tools": text}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": text}, *messages]


def write_calls(messages: Sequence[Mapping[str, Any]], form: ToolFormat) -> list[Mapping[str, Any]]:
    """The messages with calls as part of their contents, in a form of JSON between marks."""
    written = []
    for message in messages:
        if calls := message.get("tool_calls"):
            text = json.dumps([_function(call) for call in calls], ensure_ascii=False)
            text = "".join((text_of(message), *form.starts[:1], text, *form.ends[:1]))
            message = {**message, "content": text}
        written.append(message)
    return written


def _function(call: Any) -> dict[str, Any]:
    """{"name", "arguments"} of a call. Raises ChatTemplateError."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        raise ChatTemplateError("messages: a tool call needs a 'function' with a 'name' and 'arguments'")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ChatTemplateError("messages: the arguments of a tool call must be a JSON object") from None
    return {"name": function["name"], "arguments": arguments}
