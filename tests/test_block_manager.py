"""BlockManager: prefixes are found by their exact tokens alone, and no block is lost or handed out twice."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rvllm.block_manager import BlockManager, KVGroup, Prefix, window_blocks

CHUNK = 64  # tokens of a step


def make_manager(num_blocks: int, block_size: int, caching: bool = True) -> BlockManager:
    return BlockManager([KVGroup(num_blocks)], block_size, CHUNK, caching)


def match(manager: BlockManager, token_ids: list[int]) -> list[int]:
    """The blocks of the first group that a request for token_ids would begin with."""
    prefix = manager.match(token_ids)
    return [manager.pools[0].found[i] for i in prefix.content_ids[: prefix.num_blocks]]


class Tables:
    """What a request holds of a manager's blocks."""

    def __init__(self, manager: BlockManager, token_ids: list[int]) -> None:
        self.manager = manager
        self.token_ids = token_ids
        self.prefix = manager.match(token_ids)
        self.tables = manager.allocate(self.prefix, len(token_ids))
        self.num_computed = self.prefix.num_blocks * manager.block_size

    def compute(self, stop: int | None = None) -> Tables:
        """Computes the tokens up to stop (default: all), as many as a step may at a time."""
        stop = len(self.token_ids) if stop is None else stop
        while self.num_computed < stop:
            start = self.num_computed
            end = min(stop, start + self.manager.max_num_batched_tokens)
            assert self.manager.append(self.tables, start, len(self.token_ids))
            self.manager.register(self.prefix, self.tables, self.token_ids, start, end)
            self.num_computed = end
        return self

    def free(self) -> None:
        self.manager.free(self.tables)


def check(manager: BlockManager, *requests: Tables) -> None:
    manager.check_integrity((request.tables, request.num_computed) for request in requests)


def filled(manager: BlockManager, token_ids: list[int]) -> Tables:
    return Tables(manager, token_ids).compute()


def test_all_but_the_last_token_can_match() -> None:
    manager = make_manager(16, 4)
    (table,) = filled(manager, list(range(16))).tables
    for length in range(1, 17):
        assert match(manager, list(range(length))) == table[: (length - 1) // 4]
    assert match(manager, list(range(20))) == table


def test_part_of_a_block_is_never_shared() -> None:
    manager = make_manager(16, 4)
    prefix = [7] * 6
    (table,) = filled(manager, [*prefix, 1, 2, 3]).tables
    assert match(manager, [*prefix, 9, 9, 9, 9]) == table[:1]


def test_same_block_after_another_parent_is_another_content() -> None:
    manager = make_manager(16, 2)
    filled(manager, [1, 1, 5, 5])
    assert len(match(manager, [2, 2, 5, 5, 0])) == 0
    assert len(match(manager, [5, 5, 0])) == 0


def test_freed_prefix_is_found_until_reused_least_recently_used_first() -> None:
    manager = make_manager(4, 2)
    first, second = filled(manager, [1, 1]), filled(manager, [2, 2])
    first.free()
    second.free()
    other = Tables(manager, [8] * 4)  # two blocks that held nothing are taken before the cached ones
    assert match(manager, [1, 1, 0]) and match(manager, [2, 2, 0])
    third = Tables(manager, [9] * 2)
    assert not match(manager, [1, 1, 0])
    assert match(manager, [2, 2, 0])
    check(manager, other, third)


def test_freed_block_without_a_prefix_is_reused_first() -> None:
    manager = make_manager(2, 2)
    cached, partial = filled(manager, [1, 1]), filled(manager, [2])
    cached.free()
    partial.free()
    Tables(manager, [8] * 2)
    assert match(manager, [1, 1, 0])


def test_tail_of_a_freed_table_is_reused_before_its_head() -> None:
    manager = make_manager(3, 2)
    filled(manager, [1, 1, 2, 2, 3, 3]).free()
    Tables(manager, [8] * 2)
    assert len(match(manager, [1, 1, 2, 2, 3, 3, 4])) == 2


def test_reused_parent_is_not_mistaken_for_its_former_content() -> None:
    manager = make_manager(2, 2)
    parent = filled(manager, [1, 1])
    child = filled(manager, [1, 1, 2, 2])
    parent.free()
    child.free()
    Tables(manager, [8] * 4)  # both blocks are reused
    assert match(manager, [1, 1, 2, 2, 0]) == []


def test_prefix_computed_twice_goes_on_as_one_content() -> None:
    manager = make_manager(8, 2)
    tokens = [1, 1, 2, 2]
    first, second = Tables(manager, tokens), Tables(manager, tokens)
    first.compute(2)
    second.compute(4)
    assert match(manager, [*tokens, 0]) == [first.tables[0][0], second.tables[0][1]]
    check(manager, first, second)
    second.free()
    first.free()
    check(manager)


def test_shared_free_block_is_revived_not_reused() -> None:
    manager = make_manager(3, 2)
    filled(manager, [1, 1, 2, 2]).free()
    shared = match(manager, [1, 1, 2, 2, 3, 3])
    prefix = manager.match([1, 1, 2, 2, 3, 3])
    assert manager.can_allocate(prefix, 6) and not manager.can_allocate(prefix, 6, 1)
    request = Tables(manager, [1, 1, 2, 2, 3, 3])
    assert request.tables[0][:2] == shared
    assert len(set(request.tables[0])) == 3
    check(manager, request)


def test_out_of_blocks_changes_nothing() -> None:
    manager = make_manager(2, 2)
    request = filled(manager, [1, 1])
    with pytest.raises(RuntimeError, match="too few free blocks for 6 tokens: 1"):
        Tables(manager, [1, 1, 2, 2, 3, 3])
    assert not manager.append(request.tables, 2, 6)
    check(manager, request)


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = make_manager(4, 2, caching=False)
    request = filled(manager, [1, 1, 2, 2])
    assert match(manager, [1, 1, 2, 2, 3]) == []
    request.free()
    assert manager.num_free_blocks == 4


def test_forgotten_prefixes_are_not_found() -> None:
    manager = make_manager(4, 2)
    request = filled(manager, [1, 1, 2, 2])
    manager.forget_prefixes()
    assert match(manager, [1, 1, 2, 2, 3]) == []
    check(manager, request)


@pytest.mark.parametrize("damage", ["leak", "double", "index", "window", "content"])
def test_check_integrity_sees_damage(damage: str) -> None:
    manager = BlockManager([KVGroup(4), KVGroup(4, 3)], 2, CHUNK)
    request = filled(manager, [1, 1, 2, 2])
    requests = [request, request] if damage == "double" else [request]
    if damage == "leak":
        request.tables[1].pop()
    elif damage == "index":
        manager._index.clear()
    elif damage == "content":
        manager.pools[1].found.popitem()
    elif damage == "window":
        manager.pools[1].release(request.tables[1], 2)
    with pytest.raises(RuntimeError):
        check(manager, *requests)


# Windows


def windowed(num_blocks: int = 32, in_window: int = 32, window: int = 8, chunk: int = 8) -> BlockManager:
    return BlockManager([KVGroup(num_blocks), KVGroup(in_window, window)], 4, chunk)


def test_a_window_keeps_the_blocks_that_its_tokens_see() -> None:
    manager = windowed()
    request = Tables(manager, list(range(40)))
    full, table = request.tables
    assert (len(full), len(table)) == (10, 2)  # all known tokens; the first step's
    request.compute(8)
    assert manager.append(request.tables, 8, 40)
    assert (len(table), table.count(-1)) == (4, 0)  # token 8 sees 1 to 8
    request.compute()
    assert manager.append(request.tables, 40, 41)
    assert [block >= 0 for block in table] == [False] * 8 + [True] * 3  # token 40 sees 33 to 40
    assert (len(full), full.count(-1)) == (11, 0)
    check(manager, request)
    assert len(manager.pools[1].free) == 32 - 3


@pytest.mark.parametrize(("window", "chunk"), [(1, 1), (1, 8), (5, 1), (8, 8), (9, 3), (64, 64), (17, 200)])
def test_a_request_holds_no_more_than_window_and_chunk_need(window: int, chunk: int) -> None:
    manager = windowed(300, 300, window, chunk)
    request, most = Tables(manager, list(range(1000))), 0
    for stop in range(chunk, 1000 + chunk, chunk):
        request.compute(min(stop, 1000))
        most = max(most, 300 - len(manager.pools[1].free))
    assert most <= window_blocks(window, chunk, 4) <= (window + chunk) // 4 + 2
    for length in range(1001, 1100):
        request.token_ids.append(length)
        request.compute()
    assert 300 - len(manager.pools[1].free) <= window_blocks(window, 1, 4)
    check(manager, request)


def test_window_blocks_are_those_that_any_tokens_in_a_row_touch() -> None:
    for window, count, size in itertools.product(range(1, 12), range(1, 9), range(1, 6)):
        touched = [
            (start + count - 1) // size - max(0, start + 1 - window) // size + 1 for start in range(60)
        ]
        assert window_blocks(window, count, size) == max(touched)


def test_a_prefix_needs_all_blocks_where_all_are_seen_and_the_last_in_a_window() -> None:
    manager = windowed()
    request = filled(manager, list(range(41)))
    request.free()
    found = filled(manager, [*range(40), 99])
    assert found.prefix.content_ids == request.prefix.content_ids[:10]
    assert found.tables[0][:10] == manager_blocks(manager, found)[0]
    assert found.tables[1][:8] == [-1] * 8
    assert found.tables[1][8:10] == manager_blocks(manager, found)[1][8:]
    check(manager, found)


def manager_blocks(manager: BlockManager, request: Tables) -> list[list[int]]:
    return [[pool.found[i] for i in request.prefix.content_ids] for pool in manager.pools]


def test_a_prefix_ends_where_every_window_is_at_hand() -> None:
    manager = windowed(in_window=8)
    filled(
        manager, list(range(40))
    ).free()  # its last 8 blocks of the windowed group remain: those from block 2 on
    known = [manager.match([*range(4 * n), 99]).num_blocks for n in range(1, 11)]
    assert known == [0, 0, 0, 4, 5, 6, 7, 8, 9, 10]
    other = filled(manager, [77] * 20)
    other.free()
    known = [manager.match([*range(4 * n), 99]).num_blocks for n in range(1, 11)]
    assert len(set(known)) < 8 and all(n <= i for i, n in enumerate(known, 1))
    check(manager)


def test_what_has_lost_its_prefix_is_found_in_no_group() -> None:
    manager = windowed(num_blocks=4, in_window=32)
    filled(manager, list(range(16))).free()
    assert len(manager.pools[1].found) == 4
    request = filled(manager, [77] * 16)
    assert manager.match([*range(16), 99]).num_blocks == 0
    assert len(manager.pools[1].found) == 4
    check(manager, request)


def test_a_block_that_left_one_window_stays_with_who_sees_it() -> None:
    manager = windowed(in_window=5, chunk=4)
    first = filled(manager, list(range(8)))
    second = filled(manager, [*range(8), 99])
    assert first.tables[1][:2] == second.tables[1][:2]
    first.token_ids += range(8, 17)
    first.compute(16)
    assert not manager.append(
        first.tables, 16, 17
    )  # the first blocks have left its window, not that of the other
    assert first.tables[1][0] == -1 and second.tables[1][0] >= 0
    second.free()
    first.compute()
    check(manager, first)


def test_longest_request_by_the_group_that_runs_out_first() -> None:
    assert windowed(num_blocks=32, in_window=5).max_num_tokens == 128  # 8 + 8 tokens touch 5 blocks
    assert windowed(num_blocks=32, in_window=4).max_num_tokens == 16
    assert windowed(num_blocks=3, in_window=4).max_num_tokens == 12
    alone = BlockManager([KVGroup(5, 8)], 4, 8)
    request = filled(alone, list(range(1000)))
    assert alone.max_num_tokens > 10**9
    check(alone, request)


def test_usage_is_that_of_the_fullest_group() -> None:
    manager = windowed(num_blocks=20, in_window=4)
    request = filled(manager, list(range(12)))
    assert manager.usage == 0.75
    request.free()
    assert manager.usage == 0.0


class Blocks(RuleBasedStateMachine):
    """Random requests over two distinct tokens, so that prefixes meet often; what each block holds is known.

    A request reads, in each group, what its next token sees: blocks that hold its own tokens, whoever filled them.
    """

    @initialize(
        groups=st.sampled_from(
            [
                [KVGroup(12)],
                [KVGroup(12), KVGroup(12, 5)],
                [KVGroup(12), KVGroup(5, 3)],
                [KVGroup(14), KVGroup(8, 6), KVGroup(5, 1)],
                [KVGroup(6, 4)],
                [KVGroup(9, 7), KVGroup(6, 2)],
            ]
        ),
        chunk=st.integers(1, 4),
    )
    def start(self, groups: list[KVGroup], chunk: int) -> None:
        self.manager = BlockManager(groups, 2, chunk)
        self.requests: list[Tables] = []
        self.stored: list[dict[int, list[int]]] = [{} for _ in groups]  # block -> all tokens up to its end
        self.prefixes: list[tuple[list[int], Prefix]] = []  # tokens, what was found of them at some time

    def store(self, request: Tables, start: int) -> None:
        for stored, table in zip(self.stored, request.tables, strict=True):
            for i in range(start // 2, -(-request.num_computed // 2)):
                stored[table[i]] = request.token_ids[: min(2 * i + 2, request.num_computed)]

    def assert_readable(self, request: Tables) -> None:
        position = request.num_computed
        for pool, stored, table in zip(self.manager.pools, self.stored, request.tables, strict=True):
            for p in range(max(0, position + 1 - pool.window) if pool.window else 0, position):
                known = stored[table[p // 2]]
                assert known[: p + 1] == request.token_ids[: p + 1]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def allocate(self, tokens: list[int]) -> None:
        prefix = self.manager.match(tokens)
        assert 2 * prefix.num_blocks < len(tokens)
        free = [len(pool.free) for pool in self.manager.pools]
        if not self.manager.can_allocate(prefix, len(tokens)):
            with pytest.raises(RuntimeError):
                self.manager.allocate(prefix, len(tokens))
            assert [len(pool.free) for pool in self.manager.pools] == free
            return
        request = Tables(self.manager, tokens)
        assert len(request.tables[0]) == self.manager.blocks_for(len(tokens)) or self.manager.pools[0].window
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 4), token=st.integers(0, 1))
    def compute(self, data: st.DataObject, count: int, token: int) -> None:
        """Some tokens of a request as one step; a new one where all are computed."""
        request = data.draw(st.sampled_from(self.requests))
        start = request.num_computed
        if start == len(request.token_ids):
            request.token_ids.append(token)
        if not self.manager.append(request.tables, start, len(request.token_ids)):
            return
        request.compute(min(len(request.token_ids), start + min(count, self.manager.max_num_batched_tokens)))
        self.store(request, start)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        request.free()
        assert request.tables == []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def wait(self, tokens: list[int]) -> None:
        self.prefixes.append((tokens, self.manager.match(tokens)))

    @rule()
    def forget(self) -> None:
        self.manager.forget_prefixes()

    @invariant()
    def kept_prefixes_are_as_good_as_new(self) -> None:
        for tokens, prefix in getattr(self, "prefixes", [])[-3:]:
            new = self.manager.match(tokens)
            kept = self.manager.match(tokens, prefix)
            assert (kept.content_ids, kept.num_blocks) == (new.content_ids, new.num_blocks)

    @invariant()
    def everybody_reads_what_it_needs(self) -> None:
        for request in getattr(self, "requests", []):
            self.assert_readable(request)

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "manager"):
            check(self.manager, *self.requests)
            held = [
                len(set().union(*(r.tables[g] for r in self.requests)) - {-1})
                for g in range(len(self.stored))
            ]
            assert [pool.num_blocks - len(pool.free) for pool in self.manager.pools] == held


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
