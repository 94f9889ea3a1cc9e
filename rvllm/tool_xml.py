"""Tool calls as Qwen3-Coder writes them: <function=NAME>, a <parameter=KEY> for each argument, </function>."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

START = "<function="

_END = re.compile(r"(?:</parameter>|(?:\A|<function=)[^<>\n]+>)\s*</function>")
_CALL = re.compile(r"<function=([^<>\n]+)>(.*)</function>", re.DOTALL)
# A value may hold anything, </parameter> too: what follows tells where it ends.
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)


def find_end(text: str, at: int, mark: str) -> int | None:
    """The position behind the call that begins at a position; None while more text is needed, 0 if there is none.

    mark: what was taken before; it may be START.
    """
    begin = text[at : at + len(START)]
    if mark != START and begin != START:
        return None if START.startswith(begin) else 0
    if text.find("</function>", at) < 0:  # much faster than the expression, and asked again for every token
        return None
    match = _END.search(text[at:])
    return at + match.end() if match else None


def read_call(text: str, tools: Mapping[str, Any]) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a call; None if it is broken. tools: JSON schemas of parameters by name."""
    call = _CALL.search(text)
    if call is None:
        return None
    name, body = call[1].strip(), call[2].rstrip()
    schema = tools.get(name)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    arguments: dict[str, Any] = {}
    at = 0
    while match := _PARAMETER.match(body, at):
        key = match[1].strip()
        kind = properties.get(key) if isinstance(properties, Mapping) else None
        arguments[key] = _value(match[2], kind)
        at = match.end()
    return (name, json.dumps(arguments, ensure_ascii=False)) if at == len(body) else None


def _value(text: str, schema: Any) -> Any:
    """The value that a text stands for: JSON, unless it may be a text."""
    types = _types(schema)
    if text == "null" and "null" in types:
        return None
    if not types or "string" in types:
        return text
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except (ValueError, RecursionError):
        return text


def _types(schema: Any) -> set[str]:
    """Names of the JSON types that a schema allows; none if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type", ())
    types = {kind} if isinstance(kind, str) else {name for name in kind if isinstance(name, str)}
    for key in ("anyOf", "oneOf"):
        for part in schema.get(key) or ():
            types |= _types(part)
    if "enum" in schema and not types:
        types = {"string" if isinstance(value, str) else "other" for value in schema["enum"]}
    return types
