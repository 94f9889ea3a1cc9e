"""What tool calls must look like where a model may, but need not, write them: each behind the mark of its form."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rvllm.structured_output import JSON_WHITESPACE, StructuredOutput
from rvllm.tool_choice import Tool, check_tools, parameters
from rvllm.tool_formats import ToolFormat

if TYPE_CHECKING:
    from rvllm.tokenizer import Tokenizer

_NAME = re.compile(r"[\w.-]+", re.ASCII)  # what a form that has names outside of JSON takes for one


def optional_calls(
    tools: Sequence[Tool],
    form: ToolFormat,
    tokenizer: Tokenizer,
    parallel: bool = True,
    thoughts: tuple[str, str] | None = None,
) -> StructuredOutput:
    """An answer that is free until a mark of the form, behind which it is calls to its end.

    Their arguments fit the schemas of tools that are strict, and are any JSON objects for the others. parallel: more
    than one call. thoughts: as in StructuredOutput. Raises ValueError for tools that are wrong in themselves, and for
    a form whose calls no mark or no JSON tells from other text.
    """
    names = check_tools(tools)
    if form.free_because:
        raise ValueError(f"calls in the form {form.name!r} {form.free_because}")
    rules = ["WS: / |\\n {0,15}/", f"mark: {_any(form.starts, tokenizer)}"]
    calls = []
    for i, (tool, name) in enumerate(zip(tools, names, strict=True)):
        rules += [f"arguments{i}: {_arguments(tool)}", f"call{i}: {_call(name, i, form)}"]
        if form.named and _NAME.fullmatch(name):
            before, behind = (_with_tokens(part, tokenizer) for part in form.named)
            rules.append(f"named{i}: {before} {_text(name)} {behind} WS? arguments{i}")
            calls.append(f"named{i}")
    listed = "call" + (' (WS? "," WS? call)*' if parallel else "")
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(names))))
    rules.append(f'calls: {" | ".join(["call", *calls])} | "[" WS? {listed} WS? "]"')
    ends = _any(form.ends, tokenizer)
    rules.append("turn: WS? calls" + (f" (WS? ({ends})){{0,{len(form.ends)}}}" if ends else ""))
    more = "WS? mark turn" if form.ends else "mark turn"
    rules.append("start: turn" + (f" ({more})*" if parallel else ""))
    return StructuredOutput(grammar="\n".join(rules), after=form.starts, is_optional=True, thoughts=thoughts)


def _arguments(tool: Tool) -> str:
    schema = parameters(tool) if tool["function"].get("strict") else {"type": "object"}
    StructuredOutput(json_schema=schema)  # whose limits hold for a part of a grammar, too
    settings = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
    return f"%json {json.dumps({**schema, **settings}, ensure_ascii=False)}"


def _call(name: str, index: int, form: ToolFormat) -> str:
    """A call as a JSON object."""
    colon, comma = ' WS? ":" WS? ', ' WS? "," WS? '
    name_key, arguments_key = (_text(json.dumps(key)) for key in form.keys)
    name_text = _text(json.dumps(name, ensure_ascii=False))
    number = f'({_text(json.dumps(form.id_key))}{colon}/"[0-9]{{1,3}}"/{comma})? ' if form.id_key else ""
    fields = f"{name_key}{colon}{name_text}{comma}{arguments_key}{colon}arguments{index}"
    return f'"{{" WS? {number}{fields} WS? "}}"'


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _with_tokens(text: str, tokenizer: Tokenizer) -> str:
    """Part of a grammar, with the control tokens in its quoted texts by their ids."""
    return re.sub(r'"([^"]*)"', lambda match: _mark(match[1], tokenizer) or '""', text)


def _any(marks: Sequence[str], tokenizer: Tokenizer) -> str:
    return " | ".join(filter(None, (_mark(mark, tokenizer) for mark in marks)))


def _mark(text: str, tokenizer: Tokenizer) -> str:
    """Empty if it ends the answer: a grammar that is complete allows that anyway."""
    pieces = tokenizer.split_control(text)
    if not tokenizer.eog_token_ids.isdisjoint(piece for piece in pieces if isinstance(piece, int)):
        return ""
    return " ".join(f"<[{piece}]>" if isinstance(piece, int) else _text(piece) for piece in pieces)
