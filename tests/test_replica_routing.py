"""Where requests go: the index of prompts' beginnings, the choice, and the shares of processors."""

from __future__ import annotations

import json
import os
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvllm.server.processors import format_processors, parse_processors, processor_shares
from rvllm.server.routing import Lane, PrefixIndex, choose, prompt_pieces

KEYS = st.lists(st.integers(0, 2), max_size=6)


def chain(letters: list[int]) -> list[int]:
    """Keys of the beginnings of a text."""
    return [hash(tuple(letters[: i + 1])) for i in range(len(letters))]


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.lists(KEYS), KEYS)
def test_an_index_finds_the_longest_known_beginning(known: list[list[int]], asked: list[int]) -> None:
    index = PrefixIndex(1000)
    for text in known:
        index.add(chain(text))
    assert index.match(chain(asked)) == max((common(text, asked) for text in known), default=0)


@given(st.lists(KEYS, min_size=1), st.integers(0, 8))
def test_a_full_index_loses_the_oldest_and_ends_first(texts: list[list[int]], capacity: int) -> None:
    index = PrefixIndex(capacity)
    for text in texts:
        keys = chain(text)
        index.add(keys)
        assert len(index) <= capacity
        assert index.match(keys) == min(len(keys), capacity)  # the latest is there
    for text in texts:
        keys = chain(text)
        found = index.match(keys)
        assert [index.match(keys[:i]) for i in range(len(keys) + 1)] == [
            min(i, found) for i in range(len(keys) + 1)
        ]


@given(st.binary() | st.text().map(str.encode) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["prompt", "messages", "x"]), inner),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_no_body_is_too_odd(body: bytes) -> None:
    assert all(isinstance(key, int) for key in prompt_pieces(body))


def test_prompts_are_known_by_their_beginnings_whatever_else_is_asked() -> None:
    def pieces(**body: Any) -> list[int]:
        return prompt_pieces(json.dumps(body).encode())

    turns = [{"role": "user", "content": f"question {i} " * 20} for i in range(6)]
    first, second = pieces(messages=turns[:3], temperature=1), pieces(seed=1, model="m", messages=turns)
    assert len(first) > 10 and common(first, second) >= len(first) - 1
    assert common(first, pieces(messages=turns[1:3])) == 0
    ids = list(range(1000, 1200))
    assert common(pieces(prompt=ids[:150]), pieces(prompt=ids)) >= 10
    assert pieces(prompt="short") == pieces(temperature=1) == prompt_pieces(b"{") == []


def simulate(num_lanes: int, prompts: list[list[int]], concurrency: int) -> tuple[int, list[int]]:
    """Pieces found in caches, and the requests of each lane, when answers come in random order."""
    lanes = {i: Lane(PrefixIndex(10_000)) for i in range(num_lanes)}
    rng = random.Random(0)
    hits, flights = 0, []
    for prompt in prompts:
        name = choose(lanes, prompt)
        hits += lanes[name].prefixes.match(prompt)
        flight = lanes[name].take(prompt)
        flight.__enter__().on_first_token()
        flights.append(flight)
        if len(flights) == concurrency:
            flights.pop(rng.randrange(concurrency)).__exit__(None, None, None)
    for flight in flights:
        flight.__exit__(None, None, None)
    assert all(lane.backlog == lane.num_in_flight == 0 for lane in lanes.values())
    return hits, [lane.num_sent for lane in lanes.values()]


def prompts_of(num_prefixes: int, count: int, prefix: int = 24, own: int = 6) -> list[list[int]]:
    return [
        chain([i % num_prefixes] * prefix + [1000 * (i + 1) + k for k in range(own)]) for i in range(count)
    ]


@pytest.mark.parametrize("concurrency", [1, 4, 16])
@pytest.mark.parametrize("num_prefixes", [1, 4, 8])
def test_shared_beginnings_are_found_nearly_as_often_as_by_one(num_prefixes: int, concurrency: int) -> None:
    prompts = prompts_of(num_prefixes, 128)
    alone, _ = simulate(1, prompts, concurrency)
    hits, sent = simulate(2, prompts, concurrency)
    assert hits >= 0.9 * alone
    if concurrency > 1:
        assert min(sent) >= 0.3 * sum(sent)


def test_a_long_beginning_that_all_share_is_soon_cached_by_all() -> None:
    _, sent = simulate(2, prompts_of(1, 64, prefix=200), 4)
    assert min(sent) >= 20


def test_a_short_common_opening_keeps_nobody_together() -> None:
    _, sent = simulate(2, prompts_of(1, 64, prefix=1), 2)
    assert min(sent) >= 20


def test_prompts_of_their_own_are_shared_out_evenly() -> None:
    for concurrency in (1, 4, 16):
        _, sent = simulate(4, prompts_of(256, 256), concurrency)
        assert min(sent) >= 0.6 * max(sent)


def test_a_long_prompt_keeps_others_away_until_its_answer_begins() -> None:
    lanes = {i: Lane(PrefixIndex(1000)) for i in range(2)}
    with ExitStack() as flights:
        ticket = flights.enter_context(lanes[0].take(chain([1] * 100)))
        for _ in range(5):
            assert choose(lanes, []) == 1
            flights.enter_context(lanes[1].take([]))
        ticket.on_first_token()
        assert choose(lanes, []) == 0


def machine(folder: Path, nodes: list[str], cores: list[int]) -> Path:
    """A /sys of processors with these cores; even ones are in package 0."""
    for i, processors in enumerate(nodes):
        (folder / f"node/node{i}").mkdir(parents=True)
        (folder / f"node/node{i}/cpulist").write_text(processors + "\n")
    for i, core in enumerate(cores):
        topology = folder / f"cpu/cpu{i}/topology"
        topology.mkdir(parents=True)
        (topology / "core_id").write_text(f"{core}\n")
        (topology / "physical_package_id").write_text("0\n")
    return folder


@pytest.fixture
def eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores of two threads each, on two nodes, and memory that has no processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return machine(tmp_path, ["0-1,4-5", "2-3,6-7", ""], [0, 1, 2, 3, 0, 1, 2, 3])


def test_replicas_share_whole_cores_of_one_node(eight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert processor_shares("numa", eight) == processor_shares(2, eight) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert processor_shares(4, eight) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert processor_shares(3, eight) == [[0, 4], [1, 5], [2, 3, 6, 7]]
    assert processor_shares(8, eight) == [[0], [4], [1], [5], [2], [6], [3], [7]]
    with pytest.raises(ValueError, match="9 replicas are more than the 8 processors"):
        processor_shares(9, eight)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3})
    assert processor_shares("numa", eight) == [[2, 3]]


def test_a_machine_that_tells_nothing_has_one_node(eight: Path, tmp_path: Path) -> None:
    assert processor_shares("numa", tmp_path / "none") == [list(range(8))]
    assert processor_shares(3, tmp_path / "none") == [[0, 1], [2, 3, 4], [5, 6, 7]]


@given(st.sets(st.integers(0, 300)))
def test_lists_of_processors_read_as_written(processors: set[int]) -> None:
    assert parse_processors(format_processors(processors)) == processors
