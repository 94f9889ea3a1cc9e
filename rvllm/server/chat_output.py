"""The text of an assistant's turn, split as it comes into reasoning, content and tool calls."""

from __future__ import annotations

from typing import Any


class ChatOutput:
    """One choice. push() and finish() return deltas of the API: {"content": ...} and the like."""

    def push(self, text: str) -> list[dict[str, Any]]:
        return [{"content": text}] if text else []

    def finish(self) -> list[dict[str, Any]]:
        return []

    @property
    def has_tool_calls(self) -> bool:
        return False
