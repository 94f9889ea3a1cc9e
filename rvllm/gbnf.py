"""GBNF, llama.cpp's grammars, in the form that llguidance takes: read into a tree, written as one regular expression
where no rule needs itself, else as rules over single characters.

Longer pieces are never made tokens of a lexer: it would take the longest that fits, where GBNF tries them all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

MAX_DEPTH = 100  # of parentheses, of repetitions of repetitions, and of rules within rules
MAX_REPEAT = 10_000
MAX_REGEX = 2**16  # characters; a grammar that would need more is written as rules

_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)  # anchored, so that a search is linear
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_REPEAT = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]", "-": "-", "^": "^"}
_CODES = {"x": 2, "u": 4, "U": 8}  # hexadecimal digits of an escape


@dataclass(frozen=True)
class Chars:
    """One character in (negated: outside of) the ranges, pairs of first and last code point."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False


@dataclass(frozen=True)
class Ref:
    name: str


@dataclass(frozen=True)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    item: Node
    low: int
    high: int | None


Node: TypeAlias = "Chars | Ref | Sequence | Choice | Repeat"


def is_gbnf(text: str) -> bool:
    return _RULE.search(text) is not None


def to_lark(text: str) -> str:
    """A GBNF grammar in Lark's syntax. Raises ValueError naming line and fault."""
    try:
        return _to_lark(Parser(text).rules())
    except RecursionError:  # each limit was kept, but not all of them at once
        raise ValueError("grammar: too much is within each other: parentheses, repetitions, rules") from None


def _to_lark(rules: dict[str, Node]) -> str:
    regex = Regex(rules).of(Ref("root"))
    if regex is not None:
        return f"start: /{regex}/"
    names = {name: "start" if name == "root" else f"r{i}" for i, name in enumerate(rules)}
    return "\n".join(f"{names[name]}: {_lark(node, names)}" for name, node in rules.items())


class Parser:
    """Reads rules by descent."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip(newlines=True)
        while self._at < len(self._text):
            name = self._name()
            if name in rules:
                raise self._error(f"rule {name!r} is there twice")
            self._skip()
            if not self._text.startswith("::=", self._at):
                raise self._error("expected ::=")
            self._at += 3
            self._skip(newlines=True)
            rules[name] = self._choice(nested=False)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._error(f"unexpected {self._text[self._at]!r}")
            self._skip(newlines=True)
        if "root" not in rules:
            raise ValueError("grammar: there is no rule 'root'")
        for name in sorted({ref for node in rules.values() for ref in _refs(node)}):
            if name not in rules:
                raise ValueError(f"grammar: rule {name!r} is not defined")
        return rules

    def _choice(self, nested: bool) -> Node:
        options = [self._sequence(nested)]
        while self._peek() == "|":
            self._at += 1
            self._skip(newlines=True)
            options.append(self._sequence(nested))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, nested: bool) -> Node:
        items: list[Node] = []
        while True:
            char = self._peek()
            if char == '"':
                literal = self._literal()
            elif char == "[":
                literal = [self._class()]
            elif char == "(":
                literal = [self._group()]
            elif char == ".":
                self._at += 1
                literal = [Chars((), negated=True)]
            elif char and char not in "<!" and _NAME.match(char):
                literal = [Ref(self._name())]
            elif char and char in "<!":
                raise self._error("tokens (<...>) are not supported")
            else:
                return items[0] if len(items) == 1 else Sequence(tuple(items))
            self._skip(nested)
            items += self._repeated(literal, nested)

    def _repeated(self, literal: list[Node], nested: bool) -> list[Node]:
        for _ in range(MAX_DEPTH + 1):  # Repeat upon Repeat
            char = self._peek()
            if char and char in "*+?":
                self._at += 1
                low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
            elif char == "{":
                low, high = self._bounds()
            else:
                return literal
            item = literal[0] if len(literal) == 1 else Sequence(tuple(literal))
            literal = [Repeat(item, low, high)]
            self._skip(nested)
        raise self._error(f"more than {MAX_DEPTH} repetitions of repetitions")

    def _bounds(self) -> tuple[int, int | None]:
        match = _REPEAT.match(self._text, self._at)
        if match is None or not (match[1] or match[3]):
            raise self._error("expected a repetition such as {3}, {1,} or {1,3}")
        low = int(match[1] or 0)
        high = int(match[3]) if match[3] else None if match[2] else low
        if max(low, high or 0) > MAX_REPEAT:
            raise self._error(f"a repetition may be at most {MAX_REPEAT} times")
        if high is not None and high < low:
            raise self._error(f"{match[0]} ends below its beginning")
        self._at = match.end()
        return low, high

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} parentheses within each other")
        self._at += 1
        self._skip(newlines=True)
        node = self._choice(nested=True)
        if self._peek() != ")":
            raise self._error("expected )")
        self._at += 1
        self._depth -= 1
        return node

    def _literal(self) -> list[Node]:
        start, chars = self._at, []
        self._at += 1
        while self._peek() != '"':
            code = self._char(start, '"')
            chars.append(Chars(((code, code),)))
        self._at += 1
        return [*chars] if len(chars) == 1 else [Sequence(tuple(chars))]

    def _class(self) -> Node:
        start, ranges = self._at, []
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        while self._peek() != "]":
            first = last = self._char(start, "]")
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._char(start, "]")
            if last < first:
                raise self._error(f"the range {chr(first)!r} to {chr(last)!r} is empty")
            ranges.append((first, last))
        self._at += 1
        if not ranges and not negated:
            raise self._error("[] matches nothing")
        return Chars(tuple(ranges), negated)

    def _char(self, start: int, end: str) -> int:
        """Code point of the next character, which may be escaped."""
        char = self._peek()
        if not char or char in "\r\n":
            self._at = start
            raise self._error(f"{self._text[start]} is not closed by {end}")
        self._at += 1
        if char != "\\":
            return ord(char)
        kind = self._peek()
        self._at += 1
        if kind in _ESCAPES:
            return ord(_ESCAPES[kind])
        digits = self._text[self._at : self._at + _CODES.get(kind, 0)]
        if kind not in _CODES or not re.fullmatch(rf"[0-9a-fA-F]{{{_CODES[kind]}}}", digits):
            raise self._error(f"the escape \\{kind}{digits} is not known")
        self._at += len(digits)
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._error(f"\\{kind}{digits} is no character")
        return code

    def _name(self) -> str:
        match = _NAME.match(self._text, self._at)
        if match is None:
            raise self._error("expected a rule's name")
        self._at = match.end()
        return match[0]

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, newlines: bool = False) -> None:
        """Passes blanks and comments."""
        while char := self._peek():
            if char == "#":
                while self._peek() not in ("", "\r", "\n"):
                    self._at += 1
            elif char in " \t" or (newlines and char in "\r\n"):
                self._at += 1
            else:
                return

    def _error(self, problem: str) -> ValueError:
        return ValueError(f"grammar, line {self._text.count(chr(10), 0, self._at) + 1}: {problem}")


def _refs(node: Node) -> set[str]:
    if isinstance(node, Ref):
        return {node.name}
    if isinstance(node, Repeat):
        return _refs(node.item)
    if isinstance(node, Chars):
        return set()
    return {name for item in node.items for name in _refs(item)}


class Regex:
    """Rules as regular expressions: of() gives None where a rule needs itself, and where it gets too long."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._known: dict[str, str | None] = {}

    def of(self, node: Node, depth: int = MAX_DEPTH) -> str | None:
        if isinstance(node, Chars):
            return _class(node)
        if isinstance(node, Ref):
            if node.name not in self._known:
                self._known[node.name] = None  # what it is while it is being made
                self._known[node.name] = self.of(self._rules[node.name], depth - 1) if depth else None
            return self._known[node.name]
        parts: list[str] = []
        size = 0
        for item in [node.item] if isinstance(node, Repeat) else node.items:
            part = self.of(item, depth)
            if part is None or size + len(part) > MAX_REGEX:
                return None
            size += len(part)
            parts.append(part)
        if isinstance(node, Repeat):
            return f"(?:{parts[0]}){_bounds(node)}"
        return f"(?:{'|'.join(parts)})" if isinstance(node, Choice) else "".join(parts)


def _lark(node: Node, names: dict[str, str]) -> str:
    if isinstance(node, Chars):
        return f"/{_class(node)}/"
    if isinstance(node, Ref):
        return names[node.name]
    if isinstance(node, Repeat):
        return f"({_lark(node.item, names)}){_bounds(node)}"
    if not node.items:
        return '""'
    separator = " | " if isinstance(node, Choice) else " "
    return f"({separator.join(_lark(item, names) for item in node.items)})"


def _bounds(node: Repeat) -> str:
    return f"{{{node.low},{'' if node.high is None else node.high}}}"


def _class(node: Chars) -> str:
    if not node.ranges:
        return r"(?s:.)"
    ranges = "".join(
        rf"\x{{{first:x}}}" + (rf"-\x{{{last:x}}}" if last > first else "") for first, last in node.ranges
    )
    if len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1] and not node.negated:
        return ranges
    return f"[{'^' if node.negated else ''}{ranges}]"
