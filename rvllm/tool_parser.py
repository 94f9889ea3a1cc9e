"""Tool calls in what a model writes: found as the text comes, in the form that its chat template teaches."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from rvllm.reasoning_parser import held_back

_SPACE = " \t\r\n"
_NAME = re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*(?=\{)")
_JSON_CHARACTERS = frozenset('{}[],:+-."0123456789truefalsnE \t\r\n')  # that it is made of outside of strings


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls: as JSON objects or lists of them, behind a mark.

    starts: the marks. end: a mark that may follow; "" for none. is_bare: an answer that is JSON from its first
    character on is a call as well, without a mark. has_names: `name[ARGS]{...}`, with the arguments alone as JSON, is
    a call as well. id_length: letters and digits of a call's id; some templates insist on a length.
    """

    name: str
    starts: tuple[str, ...] = ()
    end: str = ""
    is_bare: bool = False
    has_names: bool = False
    id_length: int = 24


HERMES = ToolFormat("hermes", ("<tool_call>",), "</tool_call>")
LLAMA3 = ToolFormat("llama3", ("<|python_tag|>",), is_bare=True)
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",), has_names=True, id_length=9)
GRANITE = ToolFormat("granite", ("<|tool_call|>", "<tool_call>"))
JSON = ToolFormat("json", is_bare=True)

FORMATS = {tool_format.name: tool_format for tool_format in (HERMES, LLAMA3, MISTRAL, GRANITE, JSON)}


@dataclass(frozen=True)
class ToolCall:
    """One call. arguments: a JSON object as text."""

    index: int
    id: str
    name: str
    arguments: str


def find_format(template: str) -> ToolFormat:
    """The form that a chat template's text teaches; hermes, the commonest, where it says nothing of tools."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|tool_call|>" in template:
        return GRANITE
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in template or "ipython" in template or '"parameters":' in template:
        return LLAMA3
    return HERMES


class ToolCallParser:
    """Takes the text of an answer in pieces; returns content (str) and calls (ToolCall) in their order.

    A call is returned when it is complete, so what turns out to be none can still come as content: JSON that is broken
    or something else, and a mark with nothing behind it. White space around calls belongs to nothing. The cutting of
    the text into pieces never matters.

    tool_names: the tools that there are; JSON without a mark is a call only of one of them.
    parallel: False keeps only the first call.
    """

    def __init__(
        self, tool_format: ToolFormat, tool_names: Collection[str] = (), parallel: bool = True
    ) -> None:
        self._format = tool_format
        self._tool_names = frozenset(tool_names)
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
            yield from self._calls("", is_marked=False)
        while True:
            mark = yield from self._content()
            if not mark:
                return
            yield from self._calls(mark, is_marked=True)

    def _content(self) -> Generator[None, None, str]:
        """Passes text on as content until a mark; takes that, and returns it with the white space before it."""
        while True:
            marks = [(at, mark) for mark in self._format.starts if (at := self._held.find(mark)) >= 0]
            if marks:
                at, mark = min(marks)
                certain = self._held[:at].rstrip()
                end = at + len(mark)
            elif self._is_final:
                certain, end = self._held, len(self._held)
            else:
                kept = max((held_back(self._held, mark) for mark in self._format.starts), default=0)
                certain = self._held[: len(self._held) - kept].rstrip()
                end = len(certain)
            rest = self._held[len(certain) : end]
            self._held = self._held[end:]
            self._add_content(certain)
            if marks or self._is_final:
                return rest
            yield

    def _calls(self, before: str, is_marked: bool) -> Iterator[None]:
        """Takes the calls that begin here. before: what was taken already, content if there is none."""
        while True:
            at = yield from self._skip(_SPACE)
            name = ""
            if self._format.has_names and is_marked and self._held[at : at + 1] not in ("{", "["):
                while "{" not in self._held[at:] and not self._is_final:
                    yield
                match = _NAME.match(self._held, at)
                name, at = (match[1], match.end()) if match else ("", at)
            scan = JSONScan(at)
            while scan.end is None and not self._is_final:
                scan.take(self._held)
                if scan.end is None:
                    yield
            scan.take(self._held)
            calls = self._read(self._held[at : scan.end], name, is_marked) if scan.end else []
            if not calls:
                self._add_content(before)
                return
            for call_name, arguments in calls:
                if self._parallel or self.num_calls == 0:
                    call_id = make_call_id(self._format.id_length)
                    self._found.append(ToolCall(self.num_calls, call_id, call_name, arguments))
                    self.num_calls += 1
            self._held = self._held[scan.end :]
            at = yield from self._skip(_SPACE + ";,")
            end = self._format.end if is_marked else ""
            while end and not self._is_final and len(self._held) - at < len(end):
                if not end.startswith(self._held[at:]):
                    break
                yield
            if end and self._held.startswith(end, at):
                self._held = self._held[at + len(end) :]
                at = yield from self._skip(_SPACE)
                self._held = self._held[at:]
                return
            if self._held[at : at + 1] not in ("{", "["):
                self._held = self._held.lstrip()
                return
            before, self._held = self._held[:at], self._held[at:]

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
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return []
        if name:
            value = {"name": name, "arguments": value}
        calls = [_call(item) for item in (value if isinstance(value, list) else [value])]
        known = [c for c in calls if c is not None and (is_marked or c[0] in self._tool_names)]
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


def _call(value: Any) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a call in one of its usual shapes."""
    if not isinstance(value, dict):
        return None
    function = value.get("function")
    if isinstance(function, dict):  # as the API itself has it
        value = function
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}", parse_constant=_refuse)
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        arguments = {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
