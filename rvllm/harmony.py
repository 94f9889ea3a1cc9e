"""HarmonyParser: the turns of gpt-oss, whose messages each name a channel (OpenAI's harmony format)."""

from __future__ import annotations

import re
from enum import Enum

from rvllm.reasoning_parser import held_back

MESSAGE = "<|message|>"
CALL_START = (
    "<|start|>assistant to="  # before a call's name in what push() returns, wherever the model wrote it
)
CALL_END = "<|call|>"
HEADER_STARTS = ("<|start|>", "<|channel|>", "<|constrain|>", "to=", MESSAGE)
NEXT_STARTS = ("<|start|>", "<|channel|>")  # these end a message as well, where a model leaves its end out
ENDS = ("<|end|>", CALL_END, "<|return|>", *NEXT_STARTS)

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
_END = re.compile("|".join(map(re.escape, ENDS)))


class _Kind(Enum):
    REASONING = 0
    CONTENT = 1
    CALL = 2
    PLAIN = 3  # text that is no message, up to the end of the turn


class HarmonyParser:
    """Splits a turn into thoughts (the channel "analysis") and content (all others), as ReasoningParser does.

    A call comes as content between CALL_START and CALL_END, as ToolCallParser expects it. Messages of one kind are
    joined by line breaks. starts_inside: a header comes first; else the prompt has begun a message of content.
    """

    def __init__(self, starts_inside: bool = True) -> None:
        self._kind = None if starts_inside else _Kind.CONTENT  # of the message; None within a header
        self._held = ""
        self._gap = ""
        self._seen: set[_Kind] = set()

    def push(self, delta: str) -> tuple[str, str]:
        """Returns what is now certain: (reasoning, content)."""
        self._held += delta
        return self._take(is_final=False)

    def finish(self) -> tuple[str, str]:
        """The rest of a turn that ends here: (reasoning, content). A header without its message is nothing."""
        return self._take(is_final=True)

    def _take(self, is_final: bool) -> tuple[str, str]:
        reasoning = content = ""
        while True:
            if self._kind is None:
                content += self._take_header(is_final)
            if self._kind is None:
                return reasoning, content
            text, is_complete = self._take_body(is_final)
            if text:
                text, self._gap = self._gap + text, ""
            if self._kind is _Kind.REASONING:
                reasoning += text
            else:
                content += text
            if not is_complete:
                return reasoning, content
            if self._kind is _Kind.CALL:
                content += CALL_END
            self._seen.add(self._kind)
            self._kind = None

    def _take_header(self, is_final: bool) -> str:
        """Finds the kind of the message that begins here, if it can be told; returns what begins a call."""
        text = self._held.lstrip()
        if not any(text.startswith(start) or start.startswith(text) for start in HEADER_STARTS):
            self._kind = _Kind.PLAIN
            return ""
        head, mark, body = text.partition(MESSAGE)
        if not mark:
            if is_final and not text.startswith("<"):
                self._kind = _Kind.PLAIN
            return ""
        self._held = body
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        if recipient is not None:
            self._kind = _Kind.CALL
            return f"{CALL_START}{recipient[1]}{MESSAGE}"
        is_reasoning = channel is not None and channel[1] == "analysis"
        self._kind = _Kind.REASONING if is_reasoning else _Kind.CONTENT
        self._gap = "\n" if self._kind in self._seen else ""
        return ""

    def _take_body(self, is_final: bool) -> tuple[str, bool]:
        """(text, whether the message ends with it)."""
        if self._kind is _Kind.PLAIN:
            text, self._held = self._held, ""
            return text, False
        end = _END.search(self._held)
        if end is not None:
            text = self._held[: end.start()]
            self._held = self._held[end.start() if end[0] in NEXT_STARTS else end.end() :]
            return text, True
        kept = 0 if is_final else max(held_back(self._held, mark) for mark in ENDS)
        size = len(self._held) - kept
        text, self._held = self._held[:size], self._held[size:]
        return text, False
