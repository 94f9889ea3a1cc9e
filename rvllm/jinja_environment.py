"""The Jinja environment of chat templates: a sandbox with the settings and helpers that Hugging Face gives them.

Templates come with models and may be hostile. The sandbox keeps them from running Python; a Budget keeps their loops,
calls and texts within bounds.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from functools import cache, wraps
from typing import Any, NoReturn, TypeVar, cast

from jinja2 import Environment, nodes, pass_environment
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.filters import do_format, do_indent, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

T = TypeVar("T")

MAX_STEPS = 1_000_000
MAX_SECONDS = 10.0
MAX_CHARACTERS = 2**24
MAX_BYTES = 2**28  # of all texts and lists that one rendering makes: nobody tells which of them it keeps

_WIDTH = re.compile(r"\d+")  # of a field, in a format
_NESTED = re.compile(r"%[^%]*\*|\{[^{}]*\{")  # fields whose width is an argument


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} marks what the model said, for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BudgetError(TemplateError):
    """A template that does too much."""


class Budget:
    """What one rendering may still do. Only those of the usual ways to do much are watched that a template has: loops,
    calls, filters, slices, and operators that join or repeat."""

    def __init__(self, is_abandoned: Callable[[], bool]) -> None:
        self._is_abandoned = is_abandoned
        self._steps = self._bytes = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        """Counts one turn of a loop, or one call."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise BudgetError(f"more than {MAX_STEPS} turns of loops and calls")
        if time.monotonic() > self._deadline:
            raise BudgetError(f"takes more than {MAX_SECONDS:g} seconds")
        if self._is_abandoned():
            raise BudgetError("nobody waits for it any more")

    def make(self, value: object) -> None:
        """Counts a text or list that was made, at a byte a character and eight an item."""
        if isinstance(value, (str, list, tuple, dict)):
            self._bytes += len(value) if isinstance(value, str) else 8 * len(value)
            if self._bytes > MAX_BYTES:
                raise BudgetError(f"makes texts and lists of more than {MAX_BYTES} bytes in all")

    @staticmethod
    def check_size(size: int) -> None:
        if size > MAX_CHARACTERS:
            raise BudgetError(f"makes a text or list of more than {MAX_CHARACTERS} parts")


budget: ContextVar[Budget | None] = ContextVar("budget", default=None)


class _Slices(NodeTransformer):
    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter("_made", node) if isinstance(node.arg, nodes.Slice) else node


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "//", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in list(template.find_all(nodes.For)):
            loop.iter = _filter("_counted", loop.iter)
        for concat in list(template.find_all(nodes.Concat)):
            # The parts of a ~ b as one list, so that their sizes are known before they are joined.
            concat.nodes = [_filter("_joined", nodes.List(concat.nodes, lineno=concat.lineno))]
        return cast(nodes.Template, _Slices().visit(template))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # They make bytes, whose sizes nobody watches.
        return attr not in ("encode", "to_bytes") and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        if current := budget.get():
            current.step()
        text = getattr(function, "__self__", None)
        if isinstance(text, str):
            _check_widths(*args, *kwargs.values())  # 'x'.center(10**12)
            _check_method(text, getattr(function, "__name__", ""), args)
        result = super().call(context, function, *args, **kwargs)
        if isinstance(result, str):
            Budget.check_size(len(result))
        return _made(result)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, function = value.__self__, wrapped

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_format(text, "{", [*args, *kwargs.values()])
            return function(*args, **kwargs)

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sized = (str, list, tuple)
        if operator == "+" and isinstance(left, sized) and isinstance(right, sized):
            Budget.check_size(len(left) + len(right))
        elif operator != "+" and isinstance(left, int) and isinstance(right, int):
            # Their time grows faster than the numbers' length, and other threads wait for its end.
            power = operator == "**"
            bits = left.bit_length() * right if power else left.bit_length() + right.bit_length()
            Budget.check_size(64 * bits)
        elif operator == "*":
            for some, count in ((left, right), (right, left)):
                if isinstance(some, sized) and isinstance(count, int):
                    Budget.check_size(len(some) * count)
        elif operator == "%" and isinstance(left, str):
            _check_format(left, "%", right if isinstance(right, tuple) else [right])
        return _made(super().call_binop(context, operator, left, right))


def _filter(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


def _made(value: T) -> T:
    if current := budget.get():
        current.make(value)
    return value


def _check_widths(*values: object) -> None:
    Budget.check_size(max((value for value in values if isinstance(value, int)), default=0))


def _size(values: Iterable[Any]) -> int:
    """Characters and items within, each as often as it is there. Raises BudgetError over the limit."""
    size, waiting = 0, list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, (str, list, tuple, dict)):
            size += len(value)
            Budget.check_size(size)
        if isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, dict):
            waiting += [*value, *value.values()]
    return size


def _check_format(text: str, field: str, values: Iterable[Any]) -> None:
    """Bounds the size of text % values, or of text.format(values): each field may be the largest."""
    values = [part for value in values for part in (value.values() if isinstance(value, dict) else [value])]
    largest = max((_size([value]) for value in values), default=0)
    if _NESTED.search(text):
        largest += max((abs(value) for value in values if isinstance(value, int)), default=0)
    widths = sum(int(width[:18]) for width in _WIDTH.findall(text))
    Budget.check_size(len(text) + widths + text.count(field) * largest)


def _check_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    if name == "replace" and len(args) > 1:
        _check_replace(text, *args)
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        Budget.check_size(_size(args) + len(text) * len(args[0]))
    elif name == "expandtabs" and args and isinstance(args[0], int):
        Budget.check_size(len(text) + text.count("\t") * args[0])
    elif name == "translate":
        Budget.check_size(len(text) * (1 + _size(args)))


def _check_replace(text: object, old: object, new: object, count: int | None = None) -> None:
    text, old, new = str(text), str(old), str(new)
    times = text.count(old)
    if count is not None and count >= 0:
        times = min(times, count)
    Budget.check_size(len(text) + times * (len(new) - len(old)))


def _concat(parts: Iterable[str]) -> str:
    """What a template or macro has written, as one text."""
    kept, size = [], 0
    for part in parts:
        size += len(part)
        Budget.check_size(size)
        kept.append(part)
    return _made("".join(kept))


def _finalize(value: Any) -> Any:
    """A value that is about to be written: [text] * 1000 is small until then."""
    if isinstance(value, (list, tuple, dict)):
        _size([value])
    return value


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of texts or lists that takes no large widths."""

    @wraps(function)
    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_widths(*args, *kwargs.values())
        return function(value, *args, **kwargs)

    return bounded


def _sized(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result is about as large as all that its arguments hold."""

    @wraps(function)
    def sized(*args: Any, **kwargs: Any) -> Any:
        _size(args)
        return function(*args, **kwargs)

    return sized


def _counting(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that counts what it makes."""

    @wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        if budget.get() is None:  # in the compiler, which folds constants
            raise nodes.Impossible
        return _made(function(*args, **kwargs))

    return counting


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    _check_replace(text, old, new, count)
    return str(text).replace(str(old), str(new), -1 if count is None else count)


@pass_environment
def _join(
    environment: Environment, value: Iterable[Any], d: Any = "", attribute: str | int | None = None
) -> str:
    parts = list(value if attribute is None else map(make_attrgetter(environment, attribute), value))
    Budget.check_size(_size(parts) + len(str(d)) * len(parts))
    return str(d).join(map(str, parts))


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    step = len(width) if isinstance(width, str) else width
    Budget.check_size(len(text) + step * (len(text.splitlines()) + 1))
    return do_indent(text, width, first, blank)


def _format(text: str, *args: Any, **kwargs: Any) -> str:
    _check_format(str(text), "%", [*args, *kwargs.values()])
    return do_format(text, *args, **kwargs)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    current = budget.get()
    for item in items:
        if current:
            current.step()
        yield item


def _joined(parts: list[Any]) -> str:
    _size(parts)
    return _concat(map(str, parts))


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@cache
def environment() -> ImmutableSandboxedEnvironment:
    made = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    made.concat = _concat  # type: ignore[method-assign]
    for name in ("batch", "center", "slice"):
        made.filters[name] = _bounded(made.filters[name])
    for name in ("pprint", "string", "sum", "urlencode", "xmlattr"):
        made.filters[name] = _sized(made.filters[name])
    made.filters |= {"format": _format, "indent": _indent, "join": _join, "replace": _replace}
    made.filters["tojson"] = _sized(_tojson)
    made.filters = {name: _counting(function) for name, function in made.filters.items()}
    made.filters |= {"_counted": _counted, "_joined": _joined, "_made": _made}
    del made.globals["lipsum"]  # texts of any length, in a loop of its own
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    return made
