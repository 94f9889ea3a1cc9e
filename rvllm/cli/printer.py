"""Printing of many answers in the order of their prompts, whatever the order in which they finish."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rvllm.request import RequestOutput


class TextPrinter:
    """Prints each answer and a newline. stream: what is there of the first unfinished one as well."""

    def __init__(self, num_prompts: int, stream: bool) -> None:
        self._texts = [""] * num_prompts
        self._ends: list[str | None] = [None] * num_prompts  # what follows the text; None while it grows
        self._stream = stream
        self._first = 0  # the first that is not printed to its end
        self._num_printed = 0  # characters of it

    def add(self, output: RequestOutput) -> None:
        i = int(output.request_id)
        self._texts[i] += output.outputs[0].text
        if output.finished:
            self._ends[i] = "\n"
        self._print()

    def refuse(self, i: int, message: str) -> None:
        self._ends[i] = ""

    def _print(self) -> None:
        while self._first < len(self._texts):
            text, end = self._texts[self._first][self._num_printed :], self._ends[self._first]
            if end is None:
                if self._stream and text:
                    self._num_printed += len(text)
                    print(text, end="", flush=True)
                break
            print(text, end=end, flush=True)
            self._texts[self._first] = ""
            self._first += 1
            self._num_printed = 0


class JSONPrinter:
    """Prints a line of JSON for each prompt."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self._prompts = prompts
        self._outputs: dict[int, RequestOutput] = {}
        self._lines: dict[int, str] = {}
        self._first = 0

    def add(self, output: RequestOutput) -> None:
        i = int(output.request_id)
        if i in self._outputs:
            self._outputs[i].add(output)
        else:
            self._outputs[i] = output
        if output.finished:
            self._print(i, self._fields(self._outputs.pop(i)))

    def refuse(self, i: int, message: str) -> None:
        self._print(i, {"error": message})

    def _fields(self, output: RequestOutput) -> dict[str, object]:
        completion = output.outputs[0]
        fields: dict[str, object] = {
            "prompt_token_ids": output.prompt_token_ids,
            "num_cached_tokens": output.num_cached_tokens,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if completion.error is not None:
            fields["error"] = completion.error
        if completion.logprobs is not None:
            fields["logprobs"] = [
                {token_id: asdict(logprob) for token_id, logprob in entry.items()}
                for entry in completion.logprobs
            ]
        return fields

    def _print(self, i: int, fields: dict[str, object]) -> None:
        self._lines[i] = json.dumps({"prompt": self._prompts[i], **fields}, ensure_ascii=False)
        while self._first in self._lines:
            print(self._lines.pop(self._first), flush=True)
            self._first += 1


def use_utf8() -> None:
    """Makes standard output UTF-8 everywhere; half a surrogate pair, from an argument, shows as an escape."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
