"""Tool calls that need not come: text stays free, and what a mark of the form begins is calls with valid arguments."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from grammars import allowed_ids, compiler, matches, tokenizer, walk
from test_tool_choice import tool
from tiny_gguf import CONTROL_TOKEN, CONTROL_TOKENS, NORMAL_TOKEN, byte_level_tokenizer

from rvllm.free_text import overrun_words
from rvllm.grammar import GrammarCompiler
from rvllm.structured_output import StructuredOutput
from rvllm.tokenizer import Tokenizer
from rvllm.tool_formats import FORMATS, HERMES
from rvllm.tool_grammar import optional_calls
from rvllm.tool_parser import ToolCallParser

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "$defs": {"City": {"enum": ["Paris", "Rome"]}},
}
WEATHER = tool("get_weather", CITY)
WEATHER["function"]["strict"] = True
TOOLS = [WEATHER, tool("now")]
MARKED = [name for name, form in FORMATS.items() if not form.free_because]
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OSLO = PARIS.replace("Paris", "Oslo")


def hermes(**options: Any) -> StructuredOutput:
    return optional_calls(TOOLS, HERMES, tokenizer(), **options)


def tokenizer_with(tokens: list[str], kind: int) -> Tokenizer:
    """The bytes, the control tokens of the tiny models, and more tokens of a kind."""
    metadata = byte_level_tokenizer()
    types = [NORMAL_TOKEN] * 256 + [CONTROL_TOKEN] * len(CONTROL_TOKENS) + [kind] * len(tokens)
    old = metadata["tokenizer.ggml.tokens"]
    assert isinstance(old, list)
    return Tokenizer.from_gguf(
        metadata
        | {
            "tokenizer.ggml.tokens": old + tokens,
            "tokenizer.ggml.token_type": np.array(types, np.int32),
        }
    )


def test_text_is_free_and_calls_are_not() -> None:
    output = hermes()
    for text in ("", "Hi.", '{"name": "x"}', "<tool_cal", PARIS, f"Sure.\n{PARIS}", f"{PARIS}\n{PARIS}"):
        assert matches(output, text), text
    for text in (OSLO, f"{PARIS}\n{OSLO}", PARIS + " Done.", "<tool_call>hm", "<tool_call>"):
        assert not matches(output, text), text
    assert matches(output, PARIS.replace("get_weather", "now")), "what is not strict takes any object"
    assert not matches(output, PARIS.replace("get_weather", "nonsense"))


def test_one_call_where_they_are_not_parallel() -> None:
    state = compiler().compile(hermes(parallel=False))
    for byte in PARIS.encode():
        state.advance(byte)
    assert state.is_finished


@pytest.mark.parametrize("start", ["<think>", ""])
def test_no_mark_counts_within_thoughts(start: str) -> None:
    output = hermes(thoughts=(start, "</think>"))
    for text in (f"{start}{OSLO}</think>Hi", f"{start}{OSLO}", f"{start}</think>{PARIS}"):
        assert matches(output, text), text
    assert not matches(output, f"{start}</think>{OSLO}")
    assert matches(output, f"Hi <think>{OSLO}") == (start == ""), "thoughts come first, or not at all"


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", MARKED)
def test_the_parser_finds_every_call(name: str, parallel: bool) -> None:
    form = FORMATS[name]
    output = optional_calls(TOOLS, form, tokenizer(), parallel)
    texts = []
    for seed in range(6):
        state = compiler().compile(output)
        for byte in form.starts[0].encode():
            state.advance(byte)
        if text := walk(state, seed):
            texts.append(form.starts[0] + text)
    assert texts
    for text in texts:
        parser = ToolCallParser(form, {"get_weather": CITY, "now": None})
        found = parser.push(text) + parser.finish()
        assert found and (parallel or len(found) == 1)
        for call in found:
            assert not isinstance(call, str), text
            arguments = json.loads(call.arguments)
            assert call.name == "now" or arguments in ({"city": "Paris"}, {"city": "Rome"})


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - set(MARKED)))
def test_forms_without_a_mark_or_json_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"calls in the form '{name}' (need not|are)"):
        optional_calls(TOOLS, FORMATS[name], tokenizer())


def test_marks_that_are_control_tokens() -> None:
    """The grammar names them by their ids, which the trial of another vocabulary takes as well."""
    special = tokenizer_with(["[TOOL_CALLS]", "[ARGS]"], CONTROL_TOKEN)
    start, args = special.vocab_size - 2, special.vocab_size - 1
    grammars = GrammarCompiler(special)
    grammars.isolate()
    try:
        state = grammars.compile(optional_calls(TOOLS, FORMATS["mistral"], special))
        for token_id in [start, *b"get_weather", args, *b'{"city": "Rome"}', start, *b"now", args, *b"{}"]:
            assert token_id in allowed_ids(state)
            state.advance(token_id)
        assert special.eog_token_ids < {*allowed_ids(state)}
    finally:
        grammars.close()


def test_no_token_goes_on_behind_a_mark() -> None:
    merged = tokenizer_with(["l>{", "l>\u010a", "<tool_call>x"], NORMAL_TOKEN)
    bad, good, whole = range(merged.vocab_size - 3, merged.vocab_size)
    rows = overrun_words(merged, "<tool_call>")
    banned = [
        np.flatnonzero(np.unpackbits((~row).view(np.uint8), bitorder="little")).tolist() for row in rows
    ]
    assert banned == [[whole], *[[]] * 8, [bad], []]
    state = GrammarCompiler(merged).compile(optional_calls(TOOLS, HERMES, merged))
    for byte in b"<tool_cal":
        assert bad in allowed_ids(state) and whole not in allowed_ids(state)
        state.advance(byte)
    assert bad not in allowed_ids(state)
    state.advance(good)
    assert ord("{") in allowed_ids(state) and ord("x") not in allowed_ids(state)


def test_bad_parameters_are_named() -> None:
    bad = tool("f", {"type": "object", "properties": {"a": {"type": "zork"}}})
    bad["function"]["strict"] = True
    with pytest.raises(ValueError, match="failed to compile JSON schema: Invalid type: zork"):
        compiler().compile(optional_calls([bad], HERMES, tokenizer()))
