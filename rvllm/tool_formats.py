"""ToolFormat: how families of models write tool calls; one row for each form."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rvllm.harmony import CALL_END, CALL_START


@dataclass(frozen=True)
class ToolFormat:
    """JSON objects or lists of them behind a mark, if nothing else is said.

    signs: texts of a chat template that tell of this form. starts: the marks. ends: marks that may follow, one or more.
    is_bare: an answer that is JSON from its first character on is a call as well, without a mark.
    name_pattern: matches what may come between the mark and the JSON, which then holds the arguments alone; its group
    1 is the name. is_xml: calls are written <function=...>. id_length: letters and digits of a call's id; some
    templates insist on a length.
    """

    name: str
    signs: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    is_bare: bool = False
    name_pattern: re.Pattern[str] | None = None
    is_xml: bool = False
    id_length: int = 24


_BEGIN, _SEP, _END = (
    f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581begin", "sep", "call\u2581end")
)
_ALL_BEGIN, _ALL_END = (f"<\uff5ctool\u2581calls\u2581{name}\uff5c>" for name in ("begin", "end"))

HERMES = ToolFormat("hermes", ("<tool_call>",), ("<tool_call>",), ("</tool_call>",))
JSON = ToolFormat("json", is_bare=True)

# The first row that a template has a sign of is its model's.
_ROWS = (
    ToolFormat(
        "harmony",
        ("<|channel|>",),
        (CALL_START + "functions.",),
        (CALL_END,),
        name_pattern=re.compile(r"([\w.-]+)<\|message\|>\s*(?=\{)"),
    ),
    ToolFormat(
        "mistral",
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]",),
        name_pattern=re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*(?=\{)"),
        id_length=9,
    ),
    ToolFormat("cohere", ("<|START_ACTION|>",), ("<|START_ACTION|>",), ("<|END_ACTION|>",)),
    ToolFormat(
        "deepseek",
        (_ALL_BEGIN,),
        (_ALL_BEGIN, _BEGIN),
        ("```", _END, _ALL_END),
        name_pattern=re.compile(rf"(?:{_BEGIN})?(?:function{_SEP})?([\w.-]+)(?:{_SEP}|\s*```json)\s*(?=\{{)"),
    ),
    ToolFormat("granite", ("<|tool_call|>",), ("<|tool_call|>", "<tool_call>"), ("</tool_call>",)),
    ToolFormat("phi4", ("<|tool|>",), ("<|tool_call|>",), ("<|/tool_call|>",)),
    ToolFormat("qwen3_coder", ("<function=",), ("<tool_call>", "<function="), ("</tool_call>",), is_xml=True),
    HERMES,
    ToolFormat("llama3", ("<|python_tag|>", "ipython", '"parameters":'), ("<|python_tag|>",), is_bare=True),
    JSON,
)
FORMATS = {row.name: row for row in _ROWS}


def find_format(template: str) -> ToolFormat:
    """The form that a chat template's text teaches; hermes, the commonest, where it says nothing of tools."""
    return next((row for row in _ROWS if any(sign in template for sign in row.signs)), HERMES)
