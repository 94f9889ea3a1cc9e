"""Tool calls in what a model writes: found as the text comes, in the form that its chat template teaches."""

from __future__ import annotations

import json
import secrets
import string
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import copysign, isfinite
from typing import Any, NoReturn

from rvllm.reasoning_parser import held_back
from rvllm.tool_formats import ToolFormat
from rvllm.tool_xml import XMLForm

_SPACE = " \t\r\n"
_JSON_CHARACTERS = frozenset('{}[],:+-."0123456789truefalsnE \t\r\n')  # that it is made of outside of strings


@dataclass(frozen=True)
class ToolCall:
    """One call. arguments: a JSON object as text."""

    index: int
    id: str
    name: str
    arguments: str


class ToolCallParser:
    """Takes the text of an answer in pieces; returns content (str) and calls (ToolCall) in their order.

    A call is returned when it is complete, so what turns out to be none can still come as content: JSON that is broken
    or something else, and a mark with nothing behind it. White space around calls belongs to nothing. The cutting of
    the text into pieces never matters.

    tools: the tools that there are, with the JSON schemas of their parameters. JSON without a mark is a call only of
    one of them; the schemas tell what the values of an XML call are.
    parallel: False keeps only the first call.
    """

    def __init__(
        self, tool_format: ToolFormat, tools: Mapping[str, Any] | None = None, parallel: bool = True
    ) -> None:
        self._format = tool_format
        self._tools = tools or {}
        self._parallel = parallel
        self._held = ""
        self._is_final = False
        self._found: list[str | ToolCall] = []
        self._parse = self._parsed()  # goes on whenever there is more text
        self.num_calls = 0

    def push(self, delta: str) -> list[str | ToolCall]:
        """Returns what is now certain."""
        self._held += delta
        next(self._parse, None)
        found, self._found = self._found, []
        return found

    def finish(self) -> list[str | ToolCall]:
        """The rest of an answer that ends here."""
        self._is_final = True
        return self.push("")

    def _parsed(self) -> Iterator[None]:
        if self._format.is_bare:
            yield from self._calls("", "")
        while True:
            before, mark = yield from self._content()
            if not mark:
                return
            yield from self._calls(before, mark)

    def _content(self) -> Generator[None, None, tuple[str, str]]:
        """Passes text on as content until a mark; takes that, and returns it, behind the white space before it."""
        while True:
            marks = [(at, mark) for mark in self._format.starts if (at := self._held.find(mark)) >= 0]
            if marks:
                at, mark = min(marks)
                certain = self._held[:at].rstrip()
                before, end = self._held[len(certain) : at], at + len(mark)
            elif self._is_final:
                certain, before, mark, end = self._held, "", "", len(self._held)
            else:
                kept = max((held_back(self._held, mark) for mark in self._format.starts), default=0)
                certain = self._held[: len(self._held) - kept].rstrip()
                end = len(certain)
            self._held = self._held[end:]
            self._add_content(certain)
            if marks or self._is_final:
                return before, mark
            yield

    def _calls(self, before: str, mark: str) -> Iterator[None]:
        """Takes the calls that begin here. before and mark: what was taken already, content if there is none."""
        is_marked = mark != ""
        while True:
            at = yield from self._skip(_SPACE)
            if self._format.xml is not None and is_marked:
                end, calls = yield from self._xml_call(self._format.xml, at, mark)
            else:
                end, calls = yield from self._json_calls(at, is_marked)
            if not calls:
                self._add_content(before + mark)
                return
            for name, arguments in calls:
                if self._parallel or self.num_calls == 0:
                    call_id = make_call_id(self._format.id_length)
                    self._found.append(ToolCall(self.num_calls, call_id, name, arguments))
                    self.num_calls += 1
            self._held = self._held[end:]
            if is_marked and (yield from self._take_ends()):
                return
            at = yield from self._skip(_SPACE + ";,")
            if self._held[at : at + 1] not in ("{", "["):
                self._held = self._held.lstrip()
                return
            before, mark, self._held = self._held[:at], "", self._held[at:]

    def _json_calls(
        self, at: int, is_marked: bool
    ) -> Generator[None, None, tuple[int, list[tuple[str, str]]]]:
        """(the position behind them, calls): of JSON that begins at a position, perhaps behind a name."""
        name = ""
        if self._format.name_pattern is not None and is_marked and self._held[at : at + 1] not in ("{", "["):
            while "{" not in self._held[at:] and not self._is_final:
                yield
            match = self._format.name_pattern.match(self._held, at)
            name, at = (match[1], match.end()) if match else ("", at)
        scan = JSONScan(at)
        while scan.end is None and not self._is_final:
            scan.take(self._held)
            if scan.end is None:
                yield
        scan.take(self._held)
        end = scan.end or 0
        return end, self._read(self._held[at:end], name, is_marked)

    def _xml_call(
        self, form: XMLForm, at: int, mark: str
    ) -> Generator[None, None, tuple[int, list[tuple[str, str]]]]:
        """As _json_calls(), of a call in XML; the mark may be its beginning."""
        while (end := form.find_end(self._held, at, mark)) is None and not self._is_final:
            yield
        call = form.read_call(self._held[at:end], self._tools) if end else None
        return (end or 0), ([] if call is None else [call])

    def _take_ends(self) -> Generator[None, None, bool]:
        """Takes the marks that end calls, and white space around them; whether there was one."""
        found = False
        while True:
            at = yield from self._skip(_SPACE)
            rest = self._held[at:]
            end = next((end for end in self._format.ends if rest.startswith(end)), None)
            if end is not None:
                self._held, found = rest[len(end) :], True
            elif self._is_final or not any(end.startswith(rest) for end in self._format.ends):
                self._held = rest if found else self._held
                return found
            else:
                yield

    def _skip(self, characters: str) -> Generator[None, None, int]:
        """The position of the first other character."""
        at = 0
        while True:
            while at < len(self._held) and self._held[at] in characters:
                at += 1
            if at < len(self._held) or self._is_final:
                return at
            yield

    def _add_content(self, text: str) -> None:
        if text and self._found and isinstance(self._found[-1], str):
            self._found[-1] += text
        elif text:
            self._found.append(text)

    def _read(self, text: str, name: str, is_marked: bool) -> list[tuple[str, str]]:
        """(name, arguments) of every call in JSON; none if it is broken, or any of it is no call."""
        try:
            value = _loads(text)
        except (ValueError, RecursionError):
            return []
        if name:
            value = {"name": name, "arguments": value}
        calls = [_call(item) for item in (value if isinstance(value, list) else [value])]
        known = [c for c in calls if c is not None and (is_marked or c[0] in self._tools)]
        return known if len(known) == len(calls) else []


class JSONScan:
    """Finds where the JSON object or list ends that begins at a position of a text that grows.

    end: the position behind it; None while more text is needed, 0 when there is no such thing.
    """

    def __init__(self, at: int) -> None:
        self.end: int | None = None
        self._at = self._begin = at
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def take(self, text: str) -> None:
        for at in range(self._at, len(text)):
            if self.end is not None:
                return
            self._take(text[at], at)
        self._at = len(text)

    def _take(self, char: str, at: int) -> None:
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char in "{[":
            self._depth += 1
        elif at == self._begin or char not in _JSON_CHARACTERS:
            self.end = 0
        elif char == '"':
            self._in_string = True
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self.end = at + 1


def make_call_id(length: int) -> str:
    letters = string.ascii_letters + string.digits
    text = "".join(secrets.choice(letters) for _ in range(length))
    return text if length < 12 else f"call_{text}"


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _number(text: str) -> float:
    """The nearest that is finite: 1e999 is JSON, and a grammar lets it pass, but written back it would be none."""
    number = float(text)
    return number if isfinite(number) else copysign(sys.float_info.max, number)


_loads = partial(json.loads, parse_constant=_refuse, parse_float=_number)


def _call(value: Any) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a call in one of its usual shapes."""
    if not isinstance(value, dict):
        return None
    function = value.get("function")
    if isinstance(function, dict):  # as the API itself has it
        value = function
    name = value.get("name", value.get("tool_name"))
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = _loads(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        arguments = {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
