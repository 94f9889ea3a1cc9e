"""Thoughts and answer: where they are cut, however the text comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvllm.harmony import HarmonyParser
from rvllm.reasoning_formats import find_reasoning
from rvllm.reasoning_parser import ReasoningParser, held_back


def split(pieces: list[str], **options: object) -> tuple[str, str]:
    parser = ReasoningParser(**options)  # type: ignore[arg-type]
    parts = [parser.push(piece) for piece in pieces] + [parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nhm, 2 < 3\n</think>\n\nYes. ", False, ("hm, 2 < 3", "Yes. ")),
        ("hm\n</think>\n\nYes.", True, ("hm", "Yes.")),
        ("<think>hm</think>Yes.", True, ("hm", "Yes.")),  # a model that opens them once more
        (" \n<think></think>Yes.", False, ("", "Yes.")),
        ("</think>Yes.", True, ("", "Yes.")),
        ("hm", True, ("hm", "")),  # cut within the thoughts
        ("<think>a </thin", False, ("a </thin", "")),
        ("<think", False, ("", "<think")),
        ("  Yes. ", False, ("", "  Yes. ")),
        ("Yes <think>no</think>", False, ("", "Yes <think>no</think>")),
        ("a</think>", False, ("", "a</think>")),
        ("<think>a</think> b</think>", False, ("a", "b</think>")),
        ("", True, ("", "")),
        (" \n", True, ("", "")),
    ],
)
def test_parts(text: str, inside: bool, expected: tuple[str, str]) -> None:
    assert split([text], starts_inside=inside) == expected
    assert split(list(text), starts_inside=inside) == expected


PIECE = st.sampled_from(
    ["<think>", "</think>", "<thi", "nk>", "</", "think>", " ", "\n", "a", "b<", "<<think>"]
)


@given(pieces=st.lists(PIECE, max_size=12), inside=st.booleans(), data=st.data())
def test_the_cutting_never_matters(pieces: list[str], inside: bool, data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(parts, starts_inside=inside) == split([text], starts_inside=inside)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    parser = ReasoningParser()
    assert [parser.push(p) for p in ("<think>a", " b", " </thi", "s </think>", " c", "d")] == [
        ("a", ""),
        (" b", ""),
        ("", ""),
        (" </this", ""),
        ("", "c"),
        ("", "d"),
    ]


def test_other_marks() -> None:
    assert split(["[THINK]a[/THINK]b"], start="[THINK]", end="[/THINK]") == ("a", "b")
    assert held_back("abc<th", "<think>") == 3
    assert held_back("abc", "<think>") == 0


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|im_start|>' }}", None),
        ("{% if enable_thinking %}<think>{% endif %}", "think"),
        ("{{ content.split('</think>')[-1] }}", "think"),
        ("between <think></think> and <response></response>", "granite"),
        ("[THINK]", "mistral"),
        ("<|START_THINKING|><|END_THINKING|>", "cohere"),
        ("<|start|>assistant<|channel|>analysis", "harmony"),
    ],
)
def test_what_a_template_says(template: str, name: str | None) -> None:
    form = find_reasoning(template)
    assert (None if form is None else form.name) == name


def test_what_a_prompt_says() -> None:
    think, harmony = find_reasoning("<think>"), find_reasoning("<|channel|>")
    assert think is not None and harmony is not None
    assert think.is_thinking("<|im_start|>assistant\n<think>\n")
    assert not think.is_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not think.is_thinking("<|im_start|>assistant\n")
    assert not think.is_thinking("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n")
    begun = "<|im_start|>assistant\n<think>\nLet me"
    assert think.is_thinking(begun, continues=True) and not think.is_thinking(begun)
    assert not think.is_thinking(f"{begun}</think>\nIt", continues=True)
    assert harmony.is_thinking("<|channel|>final<|message|>Hi<|end|><|start|>assistant")
    assert not harmony.is_thinking("<|start|>assistant<|channel|>final<|message|>Hi")


# --- Marks around the answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think>\n<response> b </response>", ("a", "b")),
        ("<response>b</response>", ("", "b")),
        ("<think>a</think>b </response>", ("a", "b </response>")),
        ("<think>a</think><response>b", ("a", "b")),
        ("<think>a</think><resp", ("a", "<resp")),
        ("b", ("", "b")),
    ],
)
def test_marks_around_the_answer(text: str, expected: tuple[str, str]) -> None:
    for pieces in ([text], list(text)):
        assert split(pieces, answer=("<response>", "</response>")) == expected


# --- Harmony


def split_harmony(pieces: list[str], starts_inside: bool = True) -> tuple[str, str]:
    parser = HarmonyParser(starts_inside)
    parts = [parser.push(piece) for piece in pieces] + [parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
CALL = "<|start|>assistant to=functions.f<|message|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{ANALYSIS}hm<|end|><|start|>assistant{FINAL}Yes. ", ("hm", "Yes. ")),
        (f"{FINAL}Yes<|return|>", ("", "Yes")),
        (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|><|start|>assistant{FINAL}c", ("a\nb", "c")),
        (
            "<|channel|>commentary<|message|>First f.<|end|><|start|>assistant<|channel|>commentary"
            " to=functions.f <|constrain|>json<|message|>{}<|call|>",
            ("", f"First f.{CALL}{{}}<|call|>"),
        ),
        (f"{ANALYSIS}hm<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{{}}",
         ("hm", f"{CALL}{{}}")),
        (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", ("", f"{CALL}{{}}<|call|>")),
        (f"{ANALYSIS}hm{FINAL}Yes", ("hm", "Yes")),  # a message without its end
        (f"{ANALYSIS}hm<|start|>assistant{FINAL}Yes", ("hm", "Yes")),
        (f"{ANALYSIS}hm, a <|b", ("hm, a <|b", "")),
        ("<|channel|>analysis", ("", "")),  # cut within a header
        ('{"a": "<|end|>"}', ("", '{"a": "<|end|>"}')),  # no message
        ("to= is no header", ("", "to= is no header")),
        ("", ("", "")),
    ],
)  # fmt: skip
def test_harmony(text: str, expected: tuple[str, str]) -> None:
    assert split_harmony([text]) == split_harmony(list(text)) == expected


def test_harmony_in_a_message() -> None:
    text = f"es.<|end|><|start|>assistant{ANALYSIS}hm<|end|>"
    assert split_harmony([text], starts_inside=False) == ("hm", "es.")


HARMONY_PIECES = [
    "<|start|>",
    "assistant",
    "<|channel|>",
    "analysis",
    "final",
    "<|message|>",
    "<|end|>",
    "<|call|>",
]
HARMONY_PIECES += [" to=functions.f", " to=", "<|constrain|>json", "<|", "a", " ", "\n", "{}"]


@given(pieces=st.lists(st.sampled_from(HARMONY_PIECES), max_size=14), inside=st.booleans())
def test_the_cutting_of_harmony_never_matters(pieces: list[str], inside: bool) -> None:
    text = "".join(pieces)
    whole = split_harmony([text], inside)
    assert split_harmony(list(text), inside) == split_harmony(pieces, inside) == whole
