"""A chat backend whose answers are the questions."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from rvllm import SamplingParams
from rvllm.chat_session import ChatDelta, ChatError, Message


class EchoBackend:
    """Says what it was asked, one word a step."""

    name = "echo"
    max_model_len = 100

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.error = ""

    def stream(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[ChatDelta]:
        if self.error:
            raise ChatError(self.error)
        self.asked.append([dict(message) for message in messages])
        return self._run(messages[-1]["content"].split())

    def interrupt(self) -> None:
        pass

    def _run(self, words: list[str]) -> Iterator[ChatDelta]:
        yield ChatDelta(num_prompt_tokens=7)
        for i, word in enumerate(words, 1):
            yield ChatDelta(word if i == 1 else f" {word}", num_tokens=i, num_prompt_tokens=7)
            while not self.go_on.wait(0.01):
                yield ChatDelta(num_tokens=i, num_prompt_tokens=7)
        yield ChatDelta(num_tokens=len(words), num_prompt_tokens=7, finish_reason="stop")
