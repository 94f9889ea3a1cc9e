"""Tool calls in text: every form, what is none, and any cutting into pieces."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvllm.tool_formats import FORMATS, find_format
from rvllm.tool_parser import ToolCall, ToolCallParser

TOOLS = {
    "f": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": ["string", "null"]},
            "c": {"anyOf": [{"type": "array"}, {"type": "boolean"}]},
            "d": {"enum": ["1", "2"]},
        },
    },
    "g": {},
}
MAX = sys.float_info.max
Item = str | tuple[int, str, Any]


def parse(form: str, pieces: list[str], **options: Any) -> list[Item]:
    parser = ToolCallParser(FORMATS[form], TOOLS, **options)
    found: list[Item] = []
    for item in [x for piece in pieces for x in parser.push(piece)] + parser.finish():
        if isinstance(item, ToolCall):
            found.append((item.index, item.name, json.loads(item.arguments)))
        elif found and isinstance(found[-1], str):
            found[-1] += item
        else:
            found.append(item)
    return found


def call(name: str = "f", key: str = "arguments", **arguments: Any) -> str:
    return json.dumps({"name": name, key: arguments})


CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>"
CALL, END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEP, ALL_END = "<\uff5ctool\u2581sep\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CASES: list[tuple[str, str, list[Item]]] = [
    ("hermes", f"<tool_call>\n{call(a=1)}\n</tool_call>", [(0, "f", {"a": 1})]),
    (
        "hermes",
        f"One moment.\n<tool_call>{call(a='</tool_call>')}</tool_call>\n<tool_call>{call('g')}</tool_call> Done. ",
        ["One moment.", (0, "f", {"a": "</tool_call>"}), (1, "g", {}), "Done. "],
    ),
    ("hermes", f"<tool_call>[{call()}, {call('g')}]</tool_call>", [(0, "f", {}), (1, "g", {})]),
    ("hermes", f"<tool_call>\n{call()}\n{call('g')}\n</tool_call>", [(0, "f", {}), (1, "g", {})]),
    ("hermes", f"<tool_call>{call('unknown')}", [(0, "unknown", {})]),
    ("llama3", call(key="parameters", x=[1]), [(0, "f", {"x": [1]})]),
    ("llama3", f"<|python_tag|>{call(key='parameters')}", [(0, "f", {})]),
    ("llama3", f"{call()}; {call('g')}", [(0, "f", {}), (1, "g", {})]),
    ("mistral", f"[TOOL_CALLS][{call(a=[{'b': ']'}])}]", [(0, "f", {"a": [{"b": "]"}]})]),
    ("mistral", 'Hm.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', ["Hm.", (0, "f", {"a": 1}), (1, "g", {})]),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]abc123[ARGS]{}", [(0, "f", {})]),
    ("granite", f"<|tool_call|>[{call()}]", [(0, "f", {})]),
    ("granite", f"<tool_call>[{call()}]", [(0, "f", {})]),
    ("phi4", f"<|tool_call|>[{call()}, {call('g')}]<|/tool_call|>", [(0, "f", {}), (1, "g", {})]),
    (
        "cohere",
        'I plan.<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
        '    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
        ["I plan.", (0, "f", {"a": 1}), (1, "g", {})],
    ),
    ("deepseek", f'{CALLS}function{SEP}f\n```json\n{{"a": 1}}\n```{END}{ALL_END}', [(0, "f", {"a": 1})]),
    (
        "deepseek",
        f"Hm.\n\n{CALLS}function{SEP}f\n```json\n{{}}\n```{END}\n"
        f"{CALL}function{SEP}g\n```json\n{{}}\n```{END}{ALL_END}",
        ["Hm.", (0, "f", {}), (1, "g", {})],
    ),
    ("deepseek", f"{CALLS}f{SEP}{{}}{END}{CALL}g{SEP}{{}}{END}{ALL_END}.", [(0, "f", {}), (1, "g", {}), "."]),
    ("deepseek", f"{CALL}function{SEP}{{}}", [(0, "function", {})]),
    ("harmony", '<|start|>assistant to=functions.f<|message|>{"a": 1}<|call|>', [(0, "f", {"a": 1})]),
    ("harmony", "Wait.<|start|>assistant to=functions.g<|message|> {}", ["Wait.", (0, "g", {})]),
    (
        "qwen3_coder",
        "Let me see.\n<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n12\n</parameter>\n"
        "<parameter=c>\n[1, {}]\n</parameter>\n<parameter=e>\n1\n</parameter>\n</function>\n</tool_call>",
        ["Let me see.", (0, "f", {"a": 12, "b": "12", "c": [1, {}], "e": "1"})],
    ),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=b>\nif a < b:\n  </parameter> \n\n</parameter>\n<parameter=c>\nTrue\n</parameter>"
        "<parameter=a>x</parameter><parameter=d>1</parameter>\n</function>\n"
        "<tool_call>\n<function=f>\n<parameter=b>\nnull\n</parameter>\n</function></tool_call>",
        [
            (0, "f", {"b": "if a < b:\n  </parameter> \n", "c": True, "a": "x", "d": "1"}),
            (1, "f", {"b": None}),
        ],
    ),
    *(
        ("qwen3_coder", f"<function=f><parameter=a>{text}</parameter></function>", [(0, "f", {"a": text})])
        for text in ("NaN", "-Infinity", "1e999", '[{"b": 1e999}]')
    ),
    ("qwen3_coder", "<tool_call><function=g></function></tool_call> ok", [(0, "g", {}), "ok"]),
    (
        "seed_oss",
        "Hm.\n<seed:tool_call>\n<function=f>\n<parameter=a>12</parameter>\n<parameter=b>x\ny</parameter>\n</function>\n"
        "</seed:tool_call><seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>",
        ["Hm.", (0, "f", {"a": 12, "b": "x\ny"}), (1, "g", {})],
    ),
    (
        "minimax",
        'Hm.\n<minimax:tool_call>\n<invoke name="f"><parameter name="a">12</parameter>\n'
        '<parameter name="b">\n1 < 2</parameter>\n</invoke>\n<invoke name="g"></invoke>\n</minimax:tool_call>',
        ["Hm.", (0, "f", {"a": 12, "b": "\n1 < 2"}), (1, "g", {})],
    ),
    (
        "glm",
        "Hm.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>\n</tool_call>\n1 < 2</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
        ["Hm.", (0, "f", {"a": 12, "b": "\n</tool_call>\n1 < 2"}), (1, "g", {})],
    ),
    (
        "glm",
        "<tool_call>g<arg_key>x y</arg_key><arg_value>1</arg_value></tool_call>.",
        [(0, "g", {"x y": "1"}), "."],
    ),
    ("json", f"[{call()}, {call('g')}]", [(0, "f", {}), (1, "g", {})]),
    ("json", '{"name": "f", "arguments": "{\\"a\\": 1}"}', [(0, "f", {"a": 1})]),
    ("json", '{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', [(0, "f", {"a": 1})]),
    ("json", '{"name": "f", "arguments": {"a": [1e999, -1e999]}}', [(0, "f", {"a": [MAX, -MAX]})]),
    ("json", '{"name": "f", "arguments": "{\\"a\\": 1e999}"}', [(0, "f", {"a": MAX})]),
    ("json", '{"name": "f"}', [(0, "f", {})]),
    ("json", f"\n{call(text='é 😀')}\n", [(0, "f", {"text": "é 😀"})]),
]
NO_CALLS = [
    ("hermes", "just text, 1 < 2 "),
    ("hermes", "a <tool_call> and nothing </tool_call> b"),
    ("hermes", '<tool_call>{"name": }</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "argum'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": -Infinity}"}</tool_call>'),
    ("hermes", "<tool_call>" + "[" * 5000),
    ("hermes", "<tool_call>" + "[" * 5000 + "]" * 5000),
    ("hermes", "<tool_call>[]</tool_call>"),
    ("hermes", "<tool_call>{'name': 'f'}</tool_call>"),
    ("hermes", "<tool_ca"),
    ("llama3", '{"name": "Bob", "age": 3}'),  # an answer in JSON is no call
    ("llama3", "[1, 2] are numbers"),
    ("llama3", f"I would call {call()}"),
    ("llama3", "<|python_tag|>f.call(x=1)"),
    ("mistral", "[TOOL_CALLS] f"),
    ("mistral", "[TOOL_CALLS]f{"),
    ("deepseek", f"{CALLS}function{SEP}f\n```json\n{{"),
    ("deepseek", f"{CALLS}{CALL}{SEP}"),
    ("cohere", "<|START_ACTION|>[{}]<|END_ACTION|>"),
    ("harmony", "to=functions.f {}"),
    ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1"),
    ("glm", "<tool_call>no call at all</tool_call>"),
    ("glm", f"<tool_call>{call()}</tool_call>"),
    ("glm", "<tool_call>f\n<arg_key>a</arg_key>1</tool_call>"),
    ("minimax", '<minimax:tool_call>\n<invoke name="f"><parameter name="a">1</invoke></minimax:tool_call>'),
    ("seed_oss", "<seed:tool_call>f()</seed:tool_call>"),
    ("harmony", "<|start|>assistant to=functions.f{}"),
    ("qwen3_coder", "<tool_call>{}</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1"),
    ("qwen3_coder", "<function=f>\n<parameter=a>\n1</function>"),
    ("qwen3_coder", "if x <function= y"),
    ("json", ""),
    ("json", " \n x"),
    ("json", '{"name": "f"'),
    ("json", '{"name": 3}'),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls(form: str, text: str, expected: list[Item], size: int) -> None:
    assert parse(form, [text[i : i + size] for i in range(0, len(text), size)]) == expected


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_is_content(form: str, text: str) -> None:
    assert "".join(str(item) for item in parse(form, [text])) == text
    assert "".join(str(item) for item in parse(form, list(text))) == text


def test_broken_calls_do_not_hide_good_ones() -> None:
    text = f"<tool_call>{{'a'</tool_call> <tool_call>{call()}</tool_call>"
    assert parse("hermes", [text]) == ["<tool_call>{'a'</tool_call>", (0, "f", {})]


def test_one_call_at_most() -> None:
    text = f"<tool_call>{call()}</tool_call><tool_call>{call('g')}</tool_call>"
    assert parse("hermes", [text], parallel=False) == [(0, "f", {})]


PIECES = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<tool", "_call>"),
    *(call(), call("g", key="parameters", a="x </tool_call> \\ \""), "{", "}", "[", "]", ",", ";", '"', "\\"),
    *("f", " ", "\n", "text", "<", "[TOOL", CALLS, CALL, SEP, END, ALL_END, "```json", "```", "<|call|>"),
    *("<function=f>", "<parameter=a>", "</parameter>", "</function>", "<|START_ACTION|>", "<|END_ACTION|>"),
    *("<|message|>", "<|start|>assistant to=functions.f",),
]  # fmt: skip


@given(
    form=st.sampled_from(sorted(FORMATS)),
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    data=st.data(),
)
def test_the_cutting_never_matters(form: str, pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(form, parts) == parse(form, [text]) == parse(form, list(text))


def test_content_comes_as_soon_as_it_is_certain() -> None:
    parser = ToolCallParser(FORMATS["hermes"])
    assert [parser.push(p) for p in ("a", " b <tool", "s", " <tool_call>")] == [
        ["a"],
        [" b"],
        [" <tools"],
        [],
    ]
    parser = ToolCallParser(FORMATS["json"], {"f": {}})
    assert [parser.push(p) for p in (" ", "x", " y", "z")] == [[], [" x"], [" y"], ["z"]]


def test_ids() -> None:
    for form, length in (("hermes", 29), ("mistral", 9)):
        ids = set()
        for _ in range(3):
            parser = ToolCallParser(FORMATS[form], {"f": {}})
            [found] = parser.push(f"{FORMATS[form].starts[0]}[{call()}]") + parser.finish()
            assert isinstance(found, ToolCall)
            ids.add(found.id)
        assert len(ids) == 3 and {len(call_id) for call_id in ids} == {length}


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "hermes"),
        ("<tools> <tool_call></tool_call>", "hermes"),
        ("<|python_tag|>", "llama3"),
        ('Environment: ipython {"name": x, "parameters": y}', "llama3"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<|tool_call|>", "granite"),
        ("<|tool|>", "phi4"),
        ("<|START_ACTION|>", "cohere"),
        ("<|channel|>commentary", "harmony"),
        ("<tool_call> <function=name>", "qwen3_coder"),
        (CALLS, "deepseek"),
    ],
)
def test_the_template_tells_the_form(template: str, form: str) -> None:
    assert find_format(template).name == form
