"""ChatSession: a conversation with a model, be it loaded here or served elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rvllm.sampling_params import SamplingParams

Message = dict[str, str]  # {"role", "content"}


class ChatError(Exception):
    """What the user can mend; the message is one line."""


class ChatTooLongError(ChatError):
    """The messages do not fit the context."""


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What is new of an answer: perhaps nothing, so that whoever reads can stop at any time.

    num_tokens: of the answer so far. finish_reason comes with the last one.
    """

    text: str = ""
    reasoning: str = ""
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None


class ChatBackend(Protocol):
    """What answers. name: of the model. max_model_len: its context in tokens, None if unknown."""

    name: str
    max_model_len: int | None

    def stream(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[ChatDelta]:
        """Starts an answer; closing the iterator stops it. Raises ChatError, ChatTooLongError."""

    def interrupt(self) -> None:
        """From another thread: whoever waits for what is next of the answer must not wait long."""


@dataclass(frozen=True)
class AnswerStats:
    """Figures of one answer; seconds are from the question on."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    first_token_seconds: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens behind the first: the time before it belongs to the prompt."""
        return (self.num_tokens - 1) / max(1e-9, self.seconds - self.first_token_seconds)


class ChatSession:
    """messages holds the turns, the system message apart. notify is called with a line for the user."""

    def __init__(
        self,
        backend: ChatBackend,
        params: SamplingParams,
        system: str | None = None,
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.backend = backend
        self.params = params
        self.system = system
        self.notify = notify
        self.messages: list[Message] = []
        self.stats: AnswerStats | None = None
        self.finish_reason: str | None = None

    def ask(self, text: str) -> Iterator[ChatDelta]:
        """Yields the answer as it comes. What came is kept when the iterator is closed before the end.

        A question without any answer (an error, or closed too early) is taken back. Raises ChatError.
        """
        self.messages.append({"role": "user", "content": text})
        yield from self._answer(instead=[])

    def regenerate(self) -> Iterator[ChatDelta]:
        """As ask(), of the last question again. Raises ChatError when there is none."""
        if not self.messages:
            raise ChatError("there is no question yet")
        if self.params.is_greedy or self.params.seed is not None:
            why = "temperature 0" if self.params.is_greedy else f"seed {self.params.seed}"
            self.notify(f"{why} gives the same answer again")
        yield from self._answer(instead=self.messages[-2:])

    def undo(self) -> str:
        """Takes back the last question and its answer; returns the question. Raises ChatError."""
        if not self.messages:
            raise ChatError("there is nothing to undo")
        question = self.messages[-2]["content"]
        del self.messages[-2:]
        return question

    def clear(self) -> None:
        """Forgets all turns; the system message stays."""
        self.messages.clear()
        self.stats = None

    def set(self, assignment: str) -> None:
        """Changes a sampling parameter: "temperature=0.5", "seed=none". Raises ChatError."""
        name, equals, text = (part.strip() for part in assignment.partition("="))
        if not equals or name not in SETTINGS:
            raise ChatError(f"{assignment!r}: must be NAME=VALUE, with one of {', '.join(SETTINGS)}")
        try:
            self.params = replace(self.params, **{name: SETTINGS[name](text)})
        except ValueError as error:
            message = str(error)
            raise ChatError(message if message.startswith(name) else f"{name}: {message}") from None

    def save(self, path: str) -> None:
        """Writes the conversation as JSON, in the form of a request's messages. Raises ChatError."""
        content = {"messages": self._all_messages()}
        try:
            Path(path).expanduser().write_text(
                json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8"
            )
        except OSError as error:
            raise ChatError(f"{path}: {error.strerror}") from None

    def load(self, path: str) -> None:
        """Goes on from a saved conversation. Raises ChatError, and then changes nothing."""
        try:
            content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            raise ChatError(f"{path}: {error.strerror}") from None
        except ValueError:
            raise ChatError(f"{path}: is no JSON") from None
        self.system, self.messages = _checked_messages(path, content)
        self.stats = None

    def _all_messages(self) -> list[Message]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + self.messages

    def _answer(self, instead: list[Message]) -> Iterator[ChatDelta]:
        """Answers the last question. instead: a turn to answer anew, put back if nothing comes."""
        if instead:
            del self.messages[-1]
        start = time.perf_counter()
        first_token: float | None = None
        text, last = "", ChatDelta()
        try:
            for delta in self._stream():
                if first_token is None and delta.num_tokens:
                    first_token = time.perf_counter() - start
                text, last = text + delta.text, delta
                yield delta
        finally:
            self.finish_reason = last.finish_reason
            if text or last.finish_reason:
                self.messages.append({"role": "assistant", "content": text})
                seconds = time.perf_counter() - start
                self.stats = AnswerStats(
                    last.num_prompt_tokens,
                    last.num_cached_tokens,
                    last.num_tokens,
                    seconds if first_token is None else first_token,
                    seconds,
                )
            else:
                self.messages[-1:] = instead

    def _stream(self) -> Iterator[ChatDelta]:
        """Leaves out the oldest turns until the rest fits."""
        num_dropped = 0
        kept = list(self.messages)
        while True:
            try:
                deltas = self.backend.stream(self._all_messages(), self.params)
                break
            except ChatTooLongError:
                if len(self.messages) < 3:
                    self.messages[:] = kept
                    raise
                del self.messages[:2]
                num_dropped += 1
        if num_dropped:
            turns = "turn" if num_dropped == 1 else f"{num_dropped} turns"
            self.notify(f"the context is full: the oldest {turns} of the conversation left out")
        return deltas


def _number(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)


def _integer(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


def _stop(text: str) -> str | None:
    return None if text.lower() == "none" else text.encode().decode("unicode_escape")


SETTINGS: dict[str, Callable[[str], Any]] = {
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "min_p": _number,
    "max_tokens": lambda text: None if text == "-1" else _integer(text),
    "seed": _integer,
    "stop": _stop,
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
}


def _checked_messages(path: str, content: object) -> tuple[str | None, list[Message]]:
    """System message and turns of a file. Raises ChatError."""
    messages = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(messages, list):
        raise ChatError(f"{path}: has no list of messages")
    plain: list[Message] = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ChatError(f"{path}: message {number} has no text as its content")
        plain.append({"role": str(message.get("role")), "content": message["content"]})
    system = plain.pop(0)["content"] if plain and plain[0]["role"] == "system" else None
    roles = [message["role"] for message in plain]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise ChatError(f"{path}: the messages must be of user and assistant in turn, and end with an answer")
    return system, plain
