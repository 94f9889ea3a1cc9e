"""StopChecker: the same cut however the text is cut into pieces, and nothing leaks before it is certain."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rvllm.stop_checker import StopChecker


def push_all(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    checker = StopChecker(stops, include)
    deltas = []
    for piece in pieces:
        text, stop = checker.push(piece)
        deltas.append(text)
        if stop is not None:
            return deltas, stop
    return [*deltas, checker.finish()], None


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule, spelled out: first end, then longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=5), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
)
def test_any_cutting_gives_the_same_text(pieces: list[str], stops: list[str], include: bool) -> None:
    deltas, stop = push_all(pieces, stops, include)
    assert ("".join(deltas), stop) == cut("".join(pieces), stops, include)


def test_text_is_held_back_no_longer_than_needed() -> None:
    checker = StopChecker(["abc"])
    assert checker.push("xa") == ("x", None)
    assert checker.push("b") == ("", None)
    assert checker.push("ab") == ("ab", None)
    assert checker.push("x") == ("abx", None)
    assert checker.finish() == ""


def test_without_stop_strings_text_passes() -> None:
    assert StopChecker([]).push("abc") == ("abc", None)


def test_stop_string_that_ends_before_the_search_begins_passes() -> None:
    checker = StopChecker(["aa"])
    assert checker.push("aa", search=False) == ("a", None)
    assert checker.push("b", search=False) == ("ab", None)
    assert checker.push("a", search=False) == ("", None)
    assert checker.push("a") == ("", "aa")


@pytest.mark.parametrize("stop", ["z" * 10_000, "a" * 10_000 + "b"])
def test_very_long_stop_string(stop: str) -> None:
    deltas, found = push_all(["a" * 7] * 3000, [stop])
    assert ("".join(deltas), found) == ("a" * 21_000, None)
