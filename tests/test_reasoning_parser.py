"""Thoughts and answer: where they are cut, however the text comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvllm.reasoning_parser import ReasoningParser, find_markers, held_back, is_thinking


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


def test_what_a_template_says() -> None:
    assert find_markers("{{ '<|im_start|>' }}") is None
    assert find_markers("{% if enable_thinking %}<think>{% endif %}") == ("<think>", "</think>")
    assert find_markers("[THINK]") == ("[THINK]", "[/THINK]")
    assert is_thinking("<|im_start|>assistant\n<think>\n", "<think>", "</think>")
    assert not is_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n", "<think>", "</think>")
    assert not is_thinking("<|im_start|>assistant\n", "<think>", "</think>")
