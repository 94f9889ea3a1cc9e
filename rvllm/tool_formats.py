"""ToolFormat: how families of models write tool calls; one row for each form."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rvllm.harmony import CALL_END, CALL_START
from rvllm.tool_xml import ARG_KEY, FUNCTION, INVOKE, XMLForm


@dataclass(frozen=True)
class ToolFormat:
    """JSON objects or lists of them behind a mark, if nothing else is said.

    signs: texts of a chat template that tell of this form. starts: the marks. ends: marks that may follow, one or more.
    is_bare: an answer that is JSON from its first character on is a call as well, without a mark.
    name_pattern: matches what may come between the mark and the JSON, which then holds the arguments alone; its group
    1 is the name. xml: how calls are written that are not JSON. id_length: letters and digits of a call's id; some
    templates insist on a length. keys: of a call's name and arguments in the JSON that its models write; id_key: of a
    number that may come before. named: what comes before and behind a name in front of its JSON, in Lark's syntax.
    """

    name: str
    signs: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    is_bare: bool = False
    name_pattern: re.Pattern[str] | None = None
    xml: XMLForm | None = None
    id_length: int = 24
    keys: tuple[str, str] = ("name", "arguments")
    id_key: str | None = None
    named: tuple[str, str] | None = None

    @property
    def free_because(self) -> str:
        """Why calls cannot be held to a schema where a model need not write them; empty if they can."""
        if self.is_bare:
            return "need not begin with a mark"
        if self.xml is not None:
            return "are not written as JSON"
        if self.name_pattern is not None and self.named is None:
            return "are messages with headers of several kinds"
        return ""


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
        named=('""', '("[CALL_ID]" /[a-zA-Z0-9]{9}/)? "[ARGS]"'),
    ),
    ToolFormat(
        "cohere",
        ("<|START_ACTION|>",),
        ("<|START_ACTION|>",),
        ("<|END_ACTION|>",),
        keys=("tool_name", "parameters"),
        id_key="tool_call_id",
    ),
    ToolFormat(
        "deepseek",
        (_ALL_BEGIN,),
        (_ALL_BEGIN, _BEGIN),
        ("```", _END, _ALL_END),
        name_pattern=re.compile(rf"(?:{_BEGIN})?(?:function{_SEP})?([\w.-]+)(?:{_SEP}|\s*```json)\s*(?=\{{)"),
        named=(f'"{_BEGIN}"? ("function{_SEP}")?', f'("{_SEP}" | WS? "```json")'),
    ),
    ToolFormat("granite", ("<|tool_call|>",), ("<|tool_call|>", "<tool_call>"), ("</tool_call>",)),
    ToolFormat("phi4", ("<|tool|>",), ("<|tool_call|>",), ("<|/tool_call|>",)),
    ToolFormat(
        "seed_oss",
        ("<seed:tool_call>",),
        ("<seed:tool_call>", FUNCTION.start),
        ("</seed:tool_call>",),
        xml=FUNCTION,
    ),
    ToolFormat(
        "qwen3_coder", (FUNCTION.start,), ("<tool_call>", FUNCTION.start), ("</tool_call>",), xml=FUNCTION
    ),
    ToolFormat(
        "minimax",
        ("<minimax:tool_call>",),
        ("<minimax:tool_call>", INVOKE.start),
        ("</minimax:tool_call>",),
        xml=INVOKE,
    ),
    ToolFormat("glm", ("<arg_key>",), ("<tool_call>",), xml=ARG_KEY),
    HERMES,
    ToolFormat("llama3", ("<|python_tag|>", "ipython", '"parameters":'), ("<|python_tag|>",), is_bare=True),
    JSON,
)
FORMATS = {row.name: row for row in _ROWS}


def find_format(template: str) -> ToolFormat:
    """The form that a chat template's text teaches; hermes, the commonest, where it says nothing of tools."""
    return next((row for row in _ROWS if any(sign in template for sign in row.signs)), HERMES)
