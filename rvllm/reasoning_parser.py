"""ReasoningParser: splits what a model thinks from what it answers, as the text comes."""

from __future__ import annotations

from enum import Enum


class _State(Enum):
    BEFORE = 0  # the text may still turn out to begin with the start mark
    LEAD = 1  # white space behind the start mark
    REASONING = 2
    GAP = 3  # white space behind the end mark
    CONTENT = 4


class ReasoningParser:
    """Splits an answer that may begin with thoughts between two marks; what follows is content.

    answer: marks that the content may be between in turn; they are no part of it.
    starts_inside: the prompt has opened the thoughts. White space beside the marks belongs to neither part.
    The cutting of the text into pieces never matters, and no piece of a mark is ever returned.
    """

    def __init__(
        self,
        start: str = "<think>",
        end: str = "</think>",
        answer: tuple[str, str] | None = None,
        starts_inside: bool = False,
    ) -> None:
        self._start = start
        self._end = end
        # These are cut out in the same way; what is inside and behind them is content.
        self._answer = None if answer is None else ReasoningParser(*answer)
        self._starts_inside = starts_inside
        self._state = _State.BEFORE
        self._held = ""

    def push(self, delta: str) -> tuple[str, str]:
        """Returns what is now certain: (reasoning, content)."""
        self._held += delta
        if self._state is _State.BEFORE:
            self._look_for_start()
        reasoning = self._take_reasoning()
        if self._state is _State.GAP:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _State.CONTENT
        if self._state is not _State.CONTENT:
            return reasoning, ""
        content, self._held = self._held, ""
        return reasoning, self._unwrapped(content)

    def finish(self) -> tuple[str, str]:
        """The rest of an answer that ends here: (reasoning, content)."""
        held, self._held = self._held, ""
        if self._state is _State.BEFORE and not self._starts_inside:
            return "", self._unwrapped(held, is_final=True)
        return held.strip() if self._state is _State.BEFORE else held.rstrip(), self._unwrapped(
            "", is_final=True
        )

    def _unwrapped(self, content: str, is_final: bool = False) -> str:
        if self._answer is None:
            return content
        inner, outer = self._answer.push(content)
        rest = self._answer.finish() if is_final else ("", "")
        return inner + outer + rest[0] + rest[1]

    def _look_for_start(self) -> None:
        text = self._held.lstrip()
        if text.startswith(self._start):
            self._held, self._state = text[len(self._start) :], _State.LEAD
        elif not self._start.startswith(text):  # which "", so far nothing but white space, does
            self._state = _State.LEAD if self._starts_inside else _State.CONTENT

    def _take_reasoning(self) -> str:
        if self._state is _State.LEAD:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _State.REASONING
        if self._state is not _State.REASONING:
            return ""
        thoughts, mark, rest = self._held.partition(self._end)
        if mark:
            self._held, self._state = rest, _State.GAP
            return thoughts.rstrip()
        # White space is held as well: it may be what goes before the mark.
        certain = thoughts[: len(thoughts) - held_back(thoughts, self._end)].rstrip()
        self._held = thoughts[len(certain) :]
        return certain


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of text may be the beginning of mark."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
