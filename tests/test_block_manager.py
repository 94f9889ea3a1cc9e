"""BlockManager: prefixes are found by their exact tokens alone, and no block is lost or handed out twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rvllm.block_manager import BlockManager, Prefix


def match(manager: BlockManager, token_ids: list[int]) -> list[int]:
    return manager.match(token_ids).blocks


def filled(manager: BlockManager, token_ids: list[int]) -> list[int]:
    """A table for token_ids, with every full block registered."""
    shared = match(manager, token_ids)
    table = manager.allocate(shared, len(token_ids))
    manager.register(table, token_ids, len(shared) * manager.block_size, len(token_ids))
    return table


def test_all_but_the_last_token_can_match() -> None:
    manager = BlockManager(num_blocks=16, block_size=4)
    table = filled(manager, list(range(16)))
    for length in range(1, 17):
        assert match(manager, list(range(length))) == table[: (length - 1) // 4]
    assert match(manager, list(range(20))) == table


def test_part_of_a_block_is_never_shared() -> None:
    manager = BlockManager(num_blocks=16, block_size=4)
    prefix = [7] * 6
    table = filled(manager, [*prefix, 1, 2, 3])
    assert match(manager, [*prefix, 9, 9, 9, 9]) == table[:1]


def test_same_block_after_another_parent_is_another_content() -> None:
    manager = BlockManager(num_blocks=16, block_size=2)
    filled(manager, [1, 1, 5, 5])
    assert len(match(manager, [2, 2, 5, 5, 0])) == 0
    assert len(match(manager, [5, 5, 0])) == 0


def test_freed_prefix_is_found_until_reused_least_recently_used_first() -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    first, second = filled(manager, [1, 1]), filled(manager, [2, 2])
    manager.free(first)
    manager.free(second)
    other = manager.allocate([], 4)  # two blocks that held nothing are taken before the cached ones
    assert match(manager, [1, 1, 0]) and match(manager, [2, 2, 0])
    third = manager.allocate([], 2)
    assert not match(manager, [1, 1, 0])
    assert match(manager, [2, 2, 0])
    manager.check_integrity([other, third])


def test_freed_block_without_a_prefix_is_reused_first() -> None:
    manager = BlockManager(num_blocks=2, block_size=2)
    cached, partial = filled(manager, [1, 1]), filled(manager, [2])
    manager.free(cached)
    manager.free(partial)
    manager.allocate([], 2)
    assert match(manager, [1, 1, 0])


def test_tail_of_a_freed_table_is_reused_before_its_head() -> None:
    manager = BlockManager(num_blocks=3, block_size=2)
    manager.free(filled(manager, [1, 1, 2, 2, 3, 3]))
    manager.allocate([], 2)
    assert len(match(manager, [1, 1, 2, 2, 3, 3, 4])) == 2


def test_reused_parent_is_not_mistaken_for_its_former_content() -> None:
    manager = BlockManager(num_blocks=2, block_size=2)
    parent = filled(manager, [1, 1])
    child = manager.allocate(parent, 4)
    manager.register(child, [1, 1, 2, 2], 2, 4)
    manager.free(parent)
    manager.free(child)
    manager.allocate([], 4)  # both blocks are reused
    assert match(manager, [1, 1, 2, 2, 0]) == []


def test_prefix_computed_twice_goes_on_as_one_content() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    tokens = [1, 1, 2, 2]
    first, second = manager.allocate([], 4), manager.allocate([], 4)
    manager.register(first, tokens, 0, 2)
    manager.register(second, tokens, 0, 4)
    assert match(manager, [*tokens, 0]) == [first[0], second[1]]
    manager.check_integrity([first, second])
    manager.free(second)
    manager.free(first)
    manager.check_integrity([])


def test_shared_free_block_is_revived_not_reused() -> None:
    manager = BlockManager(num_blocks=3, block_size=2)
    manager.free(filled(manager, [1, 1, 2, 2]))
    shared = match(manager, [1, 1, 2, 2, 3, 3])
    assert manager.cost(shared, 6) == 3
    table = manager.allocate(shared, 6)
    assert table[:2] == shared
    assert len(set(table)) == 3
    manager.check_integrity([table])


def test_out_of_blocks_changes_nothing() -> None:
    manager = BlockManager(num_blocks=2, block_size=2)
    table = filled(manager, [1, 1])
    with pytest.raises(RuntimeError, match="2 blocks needed, 1 free"):
        manager.allocate(table, 6)
    with pytest.raises(RuntimeError, match="2 blocks needed, 1 free"):
        manager.append(table, 6)
    assert not manager.can_append(table, 6)
    manager.check_integrity([table])


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = BlockManager(num_blocks=4, block_size=2, enable_prefix_caching=False)
    table = filled(manager, [1, 1, 2, 2])
    assert match(manager, [1, 1, 2, 2, 3]) == []
    manager.free(table)
    assert manager.num_free_blocks == 4


def test_forgotten_prefixes_are_not_found() -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    table = filled(manager, [1, 1, 2, 2])
    manager.forget_prefixes()
    assert match(manager, [1, 1, 2, 2, 3]) == []
    manager.check_integrity([table])


@pytest.mark.parametrize("damage", ["leak", "double", "index"])
def test_check_integrity_sees_damage(damage: str) -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    table = filled(manager, [1, 1, 2, 2])
    tables = {"leak": [table[:1]], "double": [table, table], "index": [table]}[damage]
    if damage == "index":
        manager._index.clear()
    with pytest.raises(RuntimeError):
        manager.check_integrity(tables)


class Blocks(RuleBasedStateMachine):
    """Random tables over two distinct tokens, so that prefixes meet often; each block's content is known."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(num_blocks=12, block_size=2)
        self.tables: list[tuple[list[int], list[int]]] = []  # table, tokens
        self.stored: dict[int, list[int]] = {}  # block -> all tokens up to its end
        self.prefixes: list[tuple[list[int], Prefix]] = []  # tokens, what was found of them at some time

    def store(self, table: list[int], tokens: list[int], start: int) -> None:
        self.manager.register(table, tokens, start, len(tokens))
        for i in range(start // 2, len(tokens) // 2):
            self.stored[table[i]] = tokens[: 2 * i + 2]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def allocate(self, tokens: list[int]) -> None:
        shared = match(self.manager, tokens)
        assert 2 * len(shared) < len(tokens)
        for i, block in enumerate(shared):
            assert self.stored[block] == tokens[: 2 * i + 2]
        free = self.manager.num_free_blocks
        cost = self.manager.cost(shared, len(tokens))
        if cost > free:
            with pytest.raises(RuntimeError):
                self.manager.allocate(shared, len(tokens))
            return
        table = self.manager.allocate(shared, len(tokens))
        assert self.manager.num_free_blocks == free - cost
        assert len(table) == self.manager.blocks_for(len(tokens))
        for block in table[len(shared) :]:
            self.stored.pop(block, None)
        self.store(table, tokens, 2 * len(shared))
        self.tables.append((table, tokens))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        table, tokens = data.draw(st.sampled_from(self.tables))
        if self.manager.can_append(table, len(tokens) + 1):
            length = len(table)
            self.manager.append(table, len(tokens) + 1)
            for block in table[length:]:
                self.stored.pop(block, None)
            tokens.append(token)
            self.store(table, tokens, len(tokens) - 1)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.manager.free(table)
        assert table == []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def wait(self, tokens: list[int]) -> None:
        self.prefixes.append((tokens, self.manager.match(tokens)))

    @invariant()
    def kept_prefixes_are_as_good_as_new(self) -> None:
        for tokens, prefix in self.prefixes[-3:]:
            new = self.manager.match(tokens)
            kept = self.manager.match(tokens, prefix)
            assert (kept.blocks, kept.content_ids) == (new.blocks, new.content_ids)

    @rule()
    def forget(self) -> None:
        self.manager.forget_prefixes()

    @invariant()
    def integrity(self) -> None:
        self.manager.check_integrity([table for table, _ in self.tables])


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
