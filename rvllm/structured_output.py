"""StructuredOutput: what an answer must look like. Checked once, then never changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

MAX_SCHEMA_CHARACTERS = 2**20
MAX_GRAMMAR_CHARACTERS = 2**16  # also of a regex
MAX_GRAMMAR_LINES = 2000  # a much longer chain of rules would overflow the compiler's stack
MAX_SCHEMA_DEPTH = 120  # levels of JSON; the compiler's parser stops at 128
MAX_SCHEMA_LEVELS = 5000  # the same, by references: as many of them as differ, times the levels of the schema
MAX_CHOICES = 10_000

# One blank, or one line break with its indentation: a small model left free here fills its answer with white space.
JSON_WHITESPACE = r" |\n {0,15}"

_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class StructuredOutput:
    """What an answer must be; exactly one of the first five is given.

    json_schema: JSON that this schema describes (an object, or its JSON text; kept as text).
    json_object: any JSON object. regex: text that the expression matches as a whole (Rust's syntax,
    no look-around; \\d and \\w are ASCII).
    choice: one of these texts. grammar: text of a context-free grammar, in Lark's syntax as llguidance knows it, or
    in llama.cpp's GBNF (with a rule `root ::=`).
    after: the constraint begins behind the first occurrence of this text, or of any of several; what comes before is
    free, except that the answer may not end there. For models that think first: "</think>".
    is_optional: the answer may end there as well: a text of `after` need never come.
    thoughts: (start, end) of thoughts that the answer may begin with, in which no text of `after` counts; start is ""
    where the prompt has begun them.

    Raises ValueError for none or two of them, a wrong type, JSON that is none, and what is larger than the limits
    above.
    """

    json_schema: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    after: str | Sequence[str] | None = None
    is_optional: bool = False
    thoughts: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if _is_given(getattr(self, name))]
        if self.json_schema is False:
            raise ValueError("json_schema: false allows nothing")
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ValueError(f"structured output needs exactly one of {', '.join(_KINDS)}; given: {found}")
        if not isinstance(self.json_object, bool):
            raise ValueError(f"json_object must be True or False, got {self.json_object!r}")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        for name in ("regex", "grammar"):
            _check_text(name, getattr(self, name))
        if self.after is not None and not isinstance(self.after, str):
            object.__setattr__(self, "after", tuple(self.after))
        for text in self.after_texts:
            _check_text("after", text)
        if (self.is_optional or self.thoughts is not None) and not self.after_texts:
            raise ValueError("is_optional and thoughts need after")
        if self.thoughts is not None:
            start, end = self.thoughts
            _check_text("thoughts", start or None)
            _check_text("thoughts", end)
        if self.choice is not None:
            object.__setattr__(self, "choice", _checked_choices(self.choice))

    @property
    def after_texts(self) -> tuple[str, ...]:
        return (self.after,) if isinstance(self.after, str) else tuple(self.after or ())

    @property
    def constraint(self) -> StructuredOutput:
        """The same without what is said of the text before it."""
        return replace(self, after=None, is_optional=False, thoughts=None)

    @property
    def kind(self) -> str:
        """Which of the five it is."""
        return next(f.name for f in fields(self) if _is_given(getattr(self, f.name)))


def _is_given(value: object) -> bool:
    return value is not None and value is not False  # which 0 equals


def _check_text(name: str, text: object) -> None:
    if text is None:
        return
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name} must be a text that is not empty, got {text!r}")
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise ValueError(f"{name} has {len(text)} characters, at most {MAX_GRAMMAR_CHARACTERS} are allowed")
    if text.count("\n") >= MAX_GRAMMAR_LINES:
        raise ValueError(
            f"{name} has {text.count(chr(10)) + 1} lines, at most {MAX_GRAMMAR_LINES} are allowed"
        )
    _check_unicode(name, text)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: lone surrogate U+{ord(text[error.start]):04X}") from None


def _checked_choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise ValueError(f"choice must be a list of texts, got {choices!r}")
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"choice has {len(choices)} entries, at most {MAX_CHOICES} are allowed")
    for text in choices:
        if not isinstance(text, str) or not text:
            raise ValueError(f"choice must hold texts that are not empty, got {text!r}")
        _check_unicode("choice", text)
    if sum(map(len, choices)) > MAX_SCHEMA_CHARACTERS:
        raise ValueError(f"choice holds more than {MAX_SCHEMA_CHARACTERS} characters")
    return tuple(choices)


def _schema_text(schema: object) -> str:
    """A JSON schema as text. Raises ValueError."""
    if isinstance(schema, str):
        if len(schema) > MAX_SCHEMA_CHARACTERS:
            raise ValueError(
                f"json_schema has {len(schema)} characters, at most {MAX_SCHEMA_CHARACTERS} are allowed"
            )
        try:
            schema = json.loads(schema)
        except RecursionError:
            raise ValueError(f"json_schema: nested more than {MAX_SCHEMA_DEPTH} levels deep") from None
        except ValueError as error:
            raise ValueError(f"json_schema is no JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise ValueError(f"json_schema must be a JSON object, got {schema!r:.100}")
    _check_depth(schema)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"json_schema is no JSON: {error}") from None
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise ValueError(
            f"json_schema has {len(text)} characters, at most {MAX_SCHEMA_CHARACTERS} are allowed"
        )
    _check_unicode("json_schema", text)
    return text


def _check_depth(schema: Mapping[str, object]) -> None:
    """Refuses what would overflow the compiler's stack."""
    refs: set[object] = set()
    depth = 0
    level: list[Any] = [schema]
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise ValueError(f"json_schema: nested more than {MAX_SCHEMA_DEPTH} levels deep")
        below: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                refs.update(v for v in (value.get("$ref"), value.get("$dynamicRef")) if isinstance(v, str))
                below.extend(value.values())
            else:
                below.extend(value)
        level = [value for value in below if isinstance(value, (Mapping, list, tuple))]
    if depth * len(refs) > MAX_SCHEMA_LEVELS:
        raise ValueError(
            f"json_schema: {len(refs)} different $refs in {depth} levels; their product may be at most "
            f"{MAX_SCHEMA_LEVELS}"
        )
