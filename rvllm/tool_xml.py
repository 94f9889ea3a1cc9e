"""Tool calls written as XML: a name, a key and a value for each argument, an end; an XMLForm for each way."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class XMLForm(NamedTuple):
    """What comes one after the other: start and end are texts, the rest regular expressions.

    name, key: their group 1 is the name of the function, and of an argument, whose value comes between key and
    value_end. A form without a start begins with the name.
    """

    start: str
    name: str
    key: str
    value_end: str
    end: str

    def find_end(self, text: str, at: int, mark: str) -> int | None:
        """The position behind the call that begins at a position; None while more text is needed, 0 if there is none.

        mark: what was taken before; it may be the start.
        """
        begin = text[at : at + len(self.start)]
        if mark != self.start and begin != self.start:
            return None if self.start.startswith(begin) else 0
        if not self.start and not re.match(rf"{self.name}|[\w.-]*[ \t]*\Z", text[at:]):
            return 0
        if text.find(self.end, at) < 0:  # much faster than the expression, and asked again for every token
            return None
        # A value may hold anything, its own end too: what follows tells where it ends.
        head = rf"(?:\A|{self.start}){self.name}" if self.start else rf"\A{self.name}"
        match = re.search(rf"(?:{self.value_end}|{head})\s*{self.end}", text[at:])
        return at + match.end() if match else None

    def read_call(self, text: str, tools: Mapping[str, Any]) -> tuple[str, str] | None:
        """(name, arguments as JSON text) of a call; None if it is broken. tools: JSON schemas of parameters by name."""
        begin = "" if text.startswith(self.start) else self.start
        call = re.search(rf"{self.start}{self.name}(.*){self.end}", begin + text, re.DOTALL)
        if call is None:
            return None
        name, body = call[1].strip(), call[2].rstrip()
        schema = tools.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        parameter = re.compile(rf"\s*{self.key}(.*?){self.value_end}(?=\s*(?:{self.key}|\Z))", re.DOTALL)
        arguments: dict[str, Any] = {}
        at = 0
        while match := parameter.match(body, at):
            key = match[1].strip()
            kind = properties.get(key) if isinstance(properties, Mapping) else None
            arguments[key] = _value(match[2], kind)
            at = match.end()
        return (name, json.dumps(arguments, ensure_ascii=False)) if at == len(body) else None


FUNCTION = XMLForm(
    "<function=", r"([^<>\n]+)>", r"<parameter=([^<>\n]+)>\n?", r"\n?</parameter>", "</function>"
)
INVOKE = XMLForm(
    '<invoke name="', r'([^"<>\n]+)">', r'<parameter name="([^"<>\n]+)">', "</parameter>", "</invoke>"
)
ARG_KEY = XMLForm(
    "",
    r"([\w.-]+)[ \t]*(?=\n|<)",
    r"<arg_key>([^<>\n]+)</arg_key>\s*<arg_value>",
    "</arg_value>",
    "</tool_call>",
)


def _value(text: str, schema: Any) -> Any:
    """The value that a text stands for: JSON, unless it may be a text."""
    types = _types(schema)
    if text == "null" and "null" in types:
        return None
    if not types or "string" in types:
        return text
    try:
        value = json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
        json.dumps(value, allow_nan=False)  # Python reads NaN, and 1e999 as an infinity
        return value
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
