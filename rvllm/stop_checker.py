"""StopChecker: finds stop strings in text that arrives in pieces, and holds back what may still become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Looks at one character after the other (Knuth, Morris, Pratt), so the cutting of the pieces never matters.

    The stop string that is complete first wins; of several that end at the same character, the longest.
    """

    def __init__(self, stop_strings: Sequence[str], include_stop: bool = False) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stop_strings]
        self._matched = [0] * len(self._stops)  # characters of each stop string that the text ends with
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, search: bool = True) -> tuple[str, str | None]:
        """Returns the text that is now certain and the stop string that ended it, if one did.

        search: False lets stop strings that are completed by this text pass.
        """
        if not self._stops:
            return text, None
        start = len(self._held)
        self._held += text
        for end, char in enumerate(text, start + 1):
            complete = self._advance(char)
            if complete and search:
                stop = max(complete, key=len)
                return self._held[: end if self._include_stop else end - len(stop)], stop
        certain = len(self._held) - max(self._matched)
        text, self._held = self._held[:certain], self._held[certain:]
        return text, None

    def finish(self) -> str:
        """The text still held back: it has become no stop string."""
        text, self._held = self._held, ""
        return text

    def _advance(self, char: str) -> list[str]:
        """Takes in one character; returns the stop strings it completes."""
        complete = []
        for i, (stop, borders) in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                complete.append(stop)
                matched = borders[matched - 1]
            self._matched[i] = matched
        return complete


def _borders(text: str) -> list[int]:
    """For each prefix of text, the length of the longest shorter prefix that it also ends with."""
    borders = [0] * len(text)
    for i in range(1, len(text)):
        length = borders[i - 1]
        while length and text[i] != text[length]:
            length = borders[length - 1]
        borders[i] = length + (text[i] == text[length])
    return borders
