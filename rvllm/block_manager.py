"""BlockManager: who owns which block of the KV cache, and which blocks hold a prefix that can be shared.

It deals in block ids only and never touches K or V (PagedAttention, arXiv:2309.06180). A block is free, or
held by as many block tables as its reference count says. Every operation is O(1) a block.

Layers of the same sliding window form a group, and each group has a pool of blocks of its own: so a request keeps all
its blocks where layers see all tokens, and elsewhere those that its window still needs.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# A full block is known by the content before it and its own exact tokens; no hash ever decides.
BlockKey = tuple[int, tuple[int, ...]]

# One for each group, by the positions of tokens: position p is in block p // block_size of its table.
BlockTables = list[list[int]]

_START = 0  # content id before the first block
_GONE = -1  # in place of a block that has left the window


class KVGroup(NamedTuple):
    """Layers that share a pool of blocks. window: the last tokens that they see, itself included; 0: all."""

    num_blocks: int
    window: int = 0


def window_blocks(window: int, num_tokens: int, block_size: int) -> int:
    """The most blocks that num_tokens tokens in a row and the windows before them touch."""
    return (window + num_tokens + block_size - 3) // block_size + 1


class Prefix:
    """What is known of the beginning of some tokens: the content ids of its full blocks.

    num_blocks: how many of them, from the first on, a request can start with: each group has those in its window.
    """

    __slots__ = ("content_ids", "num_blocks")

    def __init__(self) -> None:
        self.content_ids: list[int] = []
        self.num_blocks = 0


class BlockPool:
    """The blocks of one group.

    Free blocks whose content can still be found are reused last, least recently used first.
    num_allocations counts the blocks ever taken from the free list.
    """

    def __init__(self, group: KVGroup, block_size: int) -> None:
        self.num_blocks, self.window = group
        self.block_size = block_size
        self.num_allocations = 0
        self.reset()

    def reset(self) -> None:
        self.ref_counts = [0] * self.num_blocks
        # In the order in which they are reused.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        self.found: dict[int, int] = {}  # content id -> the block in which it is found
        self.content_ids = [_START] * self.num_blocks  # the other way round

    def first_visible(self, position: int) -> int:
        """The first block of a table that the token at position, or a later one, sees."""
        return max(0, position + 1 - self.window) // self.block_size if self.window else 0

    def take(self) -> tuple[int, int]:
        """A free block, now held once, and the content id that is no longer found, or _START."""
        block, _ = self.free.popitem(last=False)
        lost = self.content_ids[block]
        if lost != _START:
            del self.found[lost]
            self.content_ids[block] = _START
        self.ref_counts[block] = 1
        self.num_allocations += 1
        return block, lost

    def share(self, block: int) -> None:
        """Holds a block once more, which may be free."""
        if self.ref_counts[block] == 0:
            del self.free[block]
        self.ref_counts[block] += 1

    def release(self, table: list[int], stop: int) -> None:
        """Gives back the blocks [..., stop) of a table, last first: a prefix outlives what follows it."""
        for i in range(min(stop, len(table)) - 1, -1, -1):
            block = table[i]
            if block == _GONE:  # and so are those before it
                break
            table[i] = _GONE
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free[block] = None
                if self.content_ids[block] == _START:
                    self.free.move_to_end(block, last=False)

    def fill(self, block: int, content_id: int) -> None:
        """Says what a block holds. Where that is found in another one already, this is a copy that is not."""
        if self.found.setdefault(content_id, block) == block:
            self.content_ids[block] = content_id

    def drop(self, content_id: int) -> None:
        """Finds a content no longer."""
        block = self.found.pop(content_id, None)
        if block is not None:
            self.content_ids[block] = _START
            if self.ref_counts[block] == 0:
                self.free.move_to_end(block, last=False)

    def forget(self) -> None:
        self.found.clear()
        self.content_ids = [_START] * self.num_blocks

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        held = Counter(block for table in tables for block in table if block != _GONE)
        for block, count in enumerate(self.ref_counts):
            if count != held[block]:
                raise RuntimeError(f"block {block}: reference count {count}, held by {held[block]} tables")
            if (count == 0) != (block in self.free):
                raise RuntimeError(f"block {block}: reference count {count}, free: {block in self.free}")
        if len(self.free) + len(held) != self.num_blocks:
            raise RuntimeError(f"{len(self.free)} free + {len(held)} used blocks are not {self.num_blocks}")
        contents = {
            content_id: block for block, content_id in enumerate(self.content_ids) if content_id != _START
        }
        if contents != self.found:
            raise RuntimeError(f"{len(self.found)} contents are found, the blocks hold {len(contents)}")


class BlockManager:
    """Hands out the blocks of block_size tokens of each group, the widest window first.

    max_num_batched_tokens: the most tokens of a request that a step computes. Where there is a window, a request has
    blocks for these, but not yet for those after them.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        block_size: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.pools = [BlockPool(group, block_size) for group in groups]
        self.reset()

    def reset(self) -> None:
        """Takes all blocks back and forgets what they hold, whatever state an interrupted call has left."""
        for pool in self.pools:
            pool.reset()
        # A content lives as long as it is found in the first group; the others look theirs up by its id, as what is
        # before their window may be gone. Ids are never given twice, so no content is taken for another.
        self._index: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._last_content_id = _START

    @property
    def num_blocks(self) -> int:
        """Of the first group, as is num_free_blocks."""
        return self.pools[0].num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self.pools[0].free)

    @property
    def usage(self) -> float:
        """Share of its blocks that requests hold, 0 to 1, in the group that has the fewest left."""
        return max((pool.num_blocks - len(pool.free)) / pool.num_blocks for pool in self.pools)

    @property
    def max_num_tokens(self) -> int:
        """Tokens of the longest request that can run when it is alone."""
        size, chunk = self.block_size, self.max_num_batched_tokens
        limits = (
            pool.num_blocks * size
            for pool in self.pools
            if not pool.window or pool.num_blocks < window_blocks(pool.window, chunk, size)
        )
        return min(limits, default=sys.maxsize)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that num_tokens tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def empty_tables(self) -> BlockTables:
        return [[] for _ in self.pools]

    def match(self, token_ids: Sequence[int], prefix: Prefix | None = None) -> Prefix:
        """Finds the longest known prefix of token_ids, never all of it.

        One token at least is left to compute: without it there would be no logits to sample from.
        prefix: what was found for these tokens before. It is brought up to date in place, and only what has
        become known since is looked up.
        """
        prefix = Prefix() if prefix is None else prefix
        content_ids, size = prefix.content_ids, self.block_size
        for i, content_id in enumerate(content_ids):
            if content_id not in self._keys:  # its block was reused since
                del content_ids[i:]
                break
        for start in range(len(content_ids) * size, (len(token_ids) - 1) // size * size, size):
            parent = content_ids[-1] if content_ids else _START
            content_id = self._index.get((parent, tuple(token_ids[start : start + size])), _START)
            if content_id == _START:
                break
            content_ids.append(content_id)
        prefix.num_blocks = self._num_shared(content_ids)
        return prefix

    def can_allocate(self, prefix: Prefix, num_tokens: int, num_spare: int = 0) -> bool:
        """Whether allocate(prefix, num_tokens) would leave num_spare free blocks in each group."""
        start = prefix.num_blocks * self.block_size
        for pool in self.pools:
            shared = self._shared(pool, prefix)
            revived = sum(block != _GONE and pool.ref_counts[block] == 0 for block in shared)
            if self._length(pool, start, num_tokens) - len(shared) + revived + num_spare > len(pool.free):
                return False
        return True

    def allocate(self, prefix: Prefix, num_tokens: int) -> BlockTables:
        """New block tables for num_tokens tokens that begin with the matched blocks of prefix.

        Raises RuntimeError, with nothing changed, where too few blocks are free.
        """
        if not self.can_allocate(prefix, num_tokens):
            free = ", ".join(str(len(pool.free)) for pool in self.pools)
            raise RuntimeError(f"too few free blocks for {num_tokens} tokens: {free}")
        start = prefix.num_blocks * self.block_size
        tables = [self._shared(pool, prefix) for pool in self.pools]
        for pool, table in zip(self.pools, tables, strict=True):
            for block in table:  # all of them first, so that none is reused for the rest of the table
                if block != _GONE:
                    pool.share(block)
            self._extend(pool, table, self._length(pool, start, num_tokens) - len(table))
        del prefix.content_ids[prefix.num_blocks :]
        return tables

    def append(self, block_tables: BlockTables, start: int, num_tokens: int) -> bool:
        """Makes room for the tokens [start, num_tokens) in tables that hold those before, in place.

        Blocks that none of these tokens sees are given back. False where too few are free; then no table has grown.
        """
        missing = []
        for pool, table in zip(self.pools, block_tables, strict=True):
            pool.release(table, pool.first_visible(start))
            missing.append(self._length(pool, start, num_tokens) - len(table))
        if any(count > len(pool.free) for pool, count in zip(self.pools, missing, strict=True)):
            return False
        for pool, table, count in zip(self.pools, block_tables, missing, strict=True):
            self._extend(pool, table, count)
        return True

    def register(
        self, prefix: Prefix, block_tables: BlockTables, token_ids: Sequence[int], start: int, stop: int
    ) -> None:
        """Makes the blocks that tokens [start, stop) complete findable, when these tokens are scheduled.

        prefix: of the tokens before, and in the end of these. Others may share the blocks in the same step: K and V of
        all its tokens are stored before any are read.
        """
        size = self.block_size
        if start // size == stop // size or not self.enable_prefix_caching:
            return
        content_ids = prefix.content_ids
        for i in range(start // size, stop // size):
            key = (content_ids[-1] if content_ids else _START, tuple(token_ids[i * size : (i + 1) * size]))
            content_id = self._index.get(key, _START)
            if content_id == _START:
                self._last_content_id += 1
                content_id = self._index[key] = self._last_content_id
                self._keys[content_id] = key
            content_ids.append(content_id)
            for pool, table in zip(self.pools, block_tables, strict=True):
                pool.fill(table[i], content_id)

    def free(self, block_tables: BlockTables) -> None:
        """Gives all blocks of the tables back and empties them."""
        for pool, table in zip(self.pools, block_tables, strict=False):  # a request that waits has no tables
            pool.release(table, len(table))
        block_tables.clear()

    def forget_prefixes(self) -> None:
        """Empties the prefix index: no block is found again before it is filled again."""
        self._index.clear()
        self._keys.clear()
        for pool in self.pools:
            pool.forget()

    def check_integrity(self, requests: Iterable[tuple[BlockTables, int]]) -> None:
        """Raises RuntimeError naming the first invariant that does not hold for the tables in use.

        requests: of each, its tables and the number of its tokens that are stored in them.
        """
        requests = list(requests)
        for g, pool in enumerate(self.pools):
            pool.check_integrity(tables[g] for tables, _ in requests)
            for tables, num_tokens in requests:
                seen = tables[g][pool.first_visible(num_tokens) : self.blocks_for(num_tokens)]
                if len(tables[g]) < self.blocks_for(num_tokens) or _GONE in seen:
                    raise RuntimeError(f"group {g}: table {tables[g]} lacks blocks of {num_tokens} tokens")
        if self._index != {key: content_id for content_id, key in self._keys.items()}:
            raise RuntimeError(
                f"prefix index has {len(self._index)} entries, {len(self._keys)} contents have keys"
            )
        if self._keys.keys() != self.pools[0].found.keys():
            raise RuntimeError(f"{len(self._keys)} contents are known, {len(self.pools[0].found)} are found")
        if any(pool.found.keys() - self._keys.keys() for pool in self.pools):
            raise RuntimeError("contents are found that are not known")

    def _num_shared(self, content_ids: Sequence[int]) -> int:
        """How many of these blocks to start with: the most for which each group has those in its window."""
        count = len(content_ids)
        for i in range(count - 1, -1, -1):
            needing = [pool for pool in self.pools[1:] if i >= pool.first_visible(count * self.block_size)]
            if not needing:
                break
            if any(content_ids[i] not in pool.found for pool in needing):
                count = i
        return count

    def _shared(self, pool: BlockPool, prefix: Prefix) -> list[int]:
        """What a table begins with."""
        first = pool.first_visible(prefix.num_blocks * self.block_size)
        return [_GONE] * first + [pool.found[i] for i in prefix.content_ids[first : prefix.num_blocks]]

    def _length(self, pool: BlockPool, start: int, num_tokens: int) -> int:
        """Blocks of a table with room for tokens [start, num_tokens): with a window, for those of the next step."""
        if pool.window:
            num_tokens = min(num_tokens, start + self.max_num_batched_tokens)
        return self.blocks_for(num_tokens)

    def _extend(self, pool: BlockPool, table: list[int], count: int) -> None:
        for _ in range(count):
            block, lost = pool.take()
            if lost != _START and pool is self.pools[0]:
                del self._index[self._keys.pop(lost)]
                for other in self.pools[1:]:
                    other.drop(lost)
            table.append(block)
