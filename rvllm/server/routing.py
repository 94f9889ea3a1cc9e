"""Which replica a request goes to: where its beginning is cached, as long as that one is not much busier than others.

What a replica's prefix cache holds is guessed from the requests it was sent, by their text in pieces of about a block.
A wrong guess costs time, never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic_core import from_json, to_json

PIECE_BYTES = 64  # of a prompt's JSON: about 16 tokens, a block of the KV cache
MAX_PIECES = 2**16  # remembered of a replica, in up to 11 MiB
ANSWER_PIECES = 8  # the work of an answer, in pieces of a prompt: answers of a batch are computed together
# Of the rules that were simulated, with these both throughput and hits were within a few percent of the best at
# 1 to 32 shared beginnings of 1 to 128 pieces and 2 to 16 requests in flight.
MAX_DETOUR = 4
SLACK = 2 * ANSWER_PIECES

# In the order in which chat templates place them.
_PROMPT_FIELDS = ("tools", "documents", "instructions", "messages", "input", "prompt", "content")


def prompt_pieces(body: bytes) -> list[int]:
    """Keys of the beginnings of a request's prompt, one for each further piece. Empty for a body without a prompt."""
    try:
        fields = from_json(body)
        found = (
            [fields[name] for name in _PROMPT_FIELDS if name in fields] if isinstance(fields, dict) else []
        )
        prompt = to_json(found)
    except ValueError:
        return []  # the replica says what is wrong with it
    keys = []
    key = 0
    for start in range(0, min(len(prompt), MAX_PIECES * PIECE_BYTES) - PIECE_BYTES + 1, PIECE_BYTES):
        key = hash((key, prompt[start : start + PIECE_BYTES]))
        keys.append(key)
    return keys


class PrefixIndex:
    """The beginnings of prompts that a cache of `capacity` pieces would still hold: the latest used."""

    def __init__(self, capacity: int) -> None:
        self._capacity = min(capacity, MAX_PIECES)
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def match(self, keys: Sequence[int]) -> int:
        """How many pieces, from the first on, are held."""
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def add(self, keys: Sequence[int]) -> None:
        for key in reversed(keys[: self._capacity]):  # a beginning outlives what follows it
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)


@dataclass
class Lane:
    """The requests that one replica has been sent. backlog: pieces of work that are not done."""

    prefixes: PrefixIndex = field(default_factory=lambda: PrefixIndex(0))
    backlog: int = 0
    num_in_flight: int = 0
    num_sent: int = 0

    @contextmanager
    def take(self, keys: Sequence[int]) -> Iterator[Ticket]:
        """While a request is in flight."""
        ticket = Ticket(self, len(keys) - self.prefixes.match(keys))
        self.prefixes.add(keys)
        self.num_sent += 1
        self.num_in_flight += 1
        self.backlog += ANSWER_PIECES
        try:
            yield ticket
        finally:
            ticket.on_first_token()
            self.num_in_flight -= 1
            self.backlog -= ANSWER_PIECES


class Ticket:
    """The prompt of a request in flight, which is work until its answer begins."""

    def __init__(self, lane: Lane, num_pieces: int) -> None:
        self._lane = lane
        self._num_pieces = num_pieces
        lane.backlog += num_pieces

    def on_first_token(self) -> None:
        self._lane.backlog -= self._num_pieces
        self._num_pieces = 0


T = TypeVar("T")


def choose(lanes: dict[T, Lane], keys: Sequence[int]) -> T:
    """Of at least one, the one that has most of the prompt cached, unless the least busy has so much less to do.

    That is: less by more than MAX_DETOUR times what the cache saves, or less than half, beyond SLACK.
    """
    matches = {name: lane.prefixes.match(keys) for name, lane in lanes.items()}
    best = min(lanes, key=lambda name: (-matches[name], lanes[name].backlog, lanes[name].num_sent))
    idlest = min(lanes, key=lambda name: (lanes[name].backlog, -matches[name], lanes[name].num_sent))
    saved, least = matches[best] - matches[idlest], lanes[idlest].backlog
    is_worth_it = lanes[best].backlog - least <= min(MAX_DETOUR * saved, least + SLACK)
    return best if is_worth_it else idlest
