"""Prompts to load a server with: random ones of given lengths, or those of a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# With the blank before it, each is one token of the usual vocabularies: a prompt of N words is N tokens long.
_TEXT = (
    "the of and to in is was for that with as his on be at by had not are but from or have they which one you were "
    "all her she there would their we him been has when who will no more if out so up said what its about than into "
    "them can only other time new some could these two may first then do any like my now over such our man me even "
    "most made after also did many off before must well back through years where much your way down should because "
    "long each just state those people too how little good world make very year still see own work men day get here "
    "old between life both under never same another know while last might us great since against go came right "
    "states used take three"
)
WORDS = _TEXT.split()


@dataclass(frozen=True)
class LoadRequest:
    """output_len: tokens to ask for."""

    prompt: str
    output_len: int


@dataclass(frozen=True)
class RandomPrompts:
    """Lengths are in words, of one token each, and uniform in [length (1 - range_ratio), length (1 + range_ratio)].

    Each prompt is one of num_prefixes prefixes of prefix_len words, then words of its own.
    Raises ValueError for a value out of range.
    """

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1

    def __post_init__(self) -> None:
        for name, least in (("input_len", 1), ("output_len", 1), ("prefix_len", 0), ("num_prefixes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"range_ratio must be at least 0 and less than 1, got {self.range_ratio}")

    def sample(self, count: int, rng: np.random.Generator) -> list[LoadRequest]:
        prefixes = [self._words(self.prefix_len, rng) for _ in range(self.num_prefixes)]
        requests = []
        for i in range(count):
            words = prefixes[i % self.num_prefixes] + self._words(self._length(self.input_len, rng), rng)
            requests.append(LoadRequest(" ".join(words), self._length(self.output_len, rng)))
        return requests

    def _length(self, mean: int, rng: np.random.Generator) -> int:
        low, high = int(mean * (1 - self.range_ratio)), int(mean * (1 + self.range_ratio))
        return int(rng.integers(max(1, low), max(1, high) + 1))

    def _words(self, count: int, rng: np.random.Generator) -> list[str]:
        return [WORDS[i] for i in rng.integers(len(WORDS), size=count)]


@dataclass(frozen=True)
class FilePrompts:
    """Prompts in random order, each once before any comes again."""

    requests: list[LoadRequest]

    def sample(self, count: int, rng: np.random.Generator) -> list[LoadRequest]:
        chosen: list[LoadRequest] = []
        while len(chosen) < count:
            chosen += [self.requests[i] for i in rng.permutation(len(self.requests))]
        return chosen[:count]


def read_prompts(path: Path, form: str | None = None, output_len: int | None = None) -> FilePrompts:
    """Reads a file of one of FORMS; None: by its suffix. output_len: of all requests, whatever the file says.

    Raises ValueError naming file and line or entry.
    """
    form = form or {".jsonl": "custom", ".json": "sharegpt"}.get(path.suffix, "text")
    try:
        text = path.read_text("utf-8-sig")
        requests = [
            LoadRequest(prompt, output_len or length) for prompt, length in FORMS[form](text) if prompt
        ]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not requests:
        raise ValueError(f"{path}: no prompts in it")
    return FilePrompts(requests)


DEFAULT_OUTPUT_LEN = 128

_Entries = Iterable[tuple[str, int]]


def _read_text(text: str) -> _Entries:
    """A prompt a line."""
    return ((line, DEFAULT_OUTPUT_LEN) for line in text.splitlines())


def _read_custom(text: str) -> _Entries:
    """A line each: {"prompt": "...", "output_tokens": 64}, the second if it is there."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        entry = _parse(line, f"line {number}")
        prompt, length = entry.get("prompt"), entry.get("output_tokens", DEFAULT_OUTPUT_LEN)
        if not isinstance(prompt, str):
            raise ValueError(f"line {number}: it has no text under 'prompt'")
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"line {number}: output_tokens must be an integer from 1 on, got {length!r}")
        yield prompt, length


def _read_sharegpt(text: str) -> _Entries:
    """[{"conversations": [{"value": question}, {"value": answer}, ...]}, ...]: the first two turns of each."""
    entries = _parse(f'{{"entries": {text}}}', "it")["entries"]
    if not isinstance(entries, list):
        raise ValueError("it is no list of conversations")
    for number, entry in enumerate(entries, 1):
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        values = [turn.get("value") if isinstance(turn, dict) else None for turn in turns or []]
        if turns is None or not all(isinstance(value, str) for value in values):
            raise ValueError(f"entry {number}: it has no 'conversations' of turns with a 'value'")
        if len(values) >= 2:
            # Only a tokenizer knows the length; of English text, a token is about four characters.
            yield str(values[0]), max(1, len(str(values[1])) // 4)


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{where} is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not a JSON object")
    return value


FORMS: dict[str, Callable[[str], _Entries]] = {
    "custom": _read_custom,
    "sharegpt": _read_sharegpt,
    "text": _read_text,
}
