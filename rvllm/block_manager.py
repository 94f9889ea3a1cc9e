"""BlockManager: who owns which block of the KV cache, and which blocks hold a prefix that can be shared.

It deals in block ids only and never touches K or V (PagedAttention, arXiv:2309.06180). A block is free, or
held by as many block tables as its reference count says. Every operation is O(1) a block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

# A full block is known by the content before it and its own exact tokens; no hash ever decides.
BlockKey = tuple[int, tuple[int, ...]]

_START = 0  # content id before the first block


class Prefix:
    """The longest known beginning of some tokens: its blocks, and the content ids these had when they were found."""

    __slots__ = ("blocks", "content_ids")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.content_ids: list[int] = []


class BlockManager:
    """Hands out the num_blocks blocks of block_size tokens each.

    Free blocks that still hold a findable prefix are reused last, least recently used first.
    num_allocations counts the blocks ever taken from the free list.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_allocations = 0
        self.reset()

    def reset(self) -> None:
        """Takes all blocks back and forgets what they hold, whatever state an interrupted call has left."""
        num_blocks = self.num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # reused from the front
        self._index: dict[BlockKey, int] = {}
        self._keys: list[BlockKey | None] = [None] * num_blocks  # a block's entry in the index
        # Content ids are never given twice, so a reused block cannot be taken for the parent it once was.
        self._content_ids = [_START] * num_blocks
        self._last_content_id = _START

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that num_tokens tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def match(self, token_ids: Sequence[int], prefix: Prefix | None = None) -> Prefix:
        """Finds the blocks that hold the longest known prefix of token_ids, never all of it.

        One token at least is left to compute: without it there would be no logits to sample from.
        prefix: what was found for these tokens before. It is brought up to date in place, and only what has
        become known since is looked up.
        """
        prefix = Prefix() if prefix is None else prefix
        blocks, content_ids, size = prefix.blocks, prefix.content_ids, self.block_size
        for i, (block, content_id) in enumerate(zip(blocks, content_ids, strict=True)):
            if self._content_ids[block] != content_id or self._keys[block] is None:  # reused since
                del blocks[i:], content_ids[i:]
                break
        for start in range(len(blocks) * size, (len(token_ids) - 1) // size * size, size):
            parent = content_ids[-1] if content_ids else _START
            found = self._index.get((parent, tuple(token_ids[start : start + size])))
            if found is None:
                break
            blocks.append(found)
            content_ids.append(self._content_ids[found])
        return prefix

    def cost(self, shared: Sequence[int], num_tokens: int) -> int:
        """Free blocks that allocate(shared, num_tokens) would take."""
        revived = sum(self._ref_counts[block] == 0 for block in shared)
        return self.blocks_for(num_tokens) - len(shared) + revived

    def allocate(self, shared: Sequence[int], num_tokens: int) -> list[int]:
        """A new block table for num_tokens tokens that begins with the matched blocks `shared`.

        Raises RuntimeError, with nothing changed, where too few blocks are free.
        """
        self._require(self.cost(shared, num_tokens))
        for block in shared:  # all of them first, so that none is reused for the rest of the table
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1
        table = list(shared)
        self._extend(table, num_tokens)
        return table

    def can_append(self, block_table: Sequence[int], num_tokens: int) -> bool:
        return self.blocks_for(num_tokens) - len(block_table) <= len(self._free)

    def append(self, block_table: list[int], num_tokens: int) -> None:
        """Grows block_table in place until it holds num_tokens tokens; raises as allocate does."""
        self._require(self.blocks_for(num_tokens) - len(block_table))
        self._extend(block_table, num_tokens)

    def register(self, block_table: Sequence[int], token_ids: Sequence[int], start: int, stop: int) -> None:
        """Makes the blocks that tokens [start, stop) complete findable, when these tokens are scheduled.

        Others may share them in the same step: K and V of all its tokens are stored before any are read.
        """
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        for i in range(start // size, stop // size):
            parent = self._content_ids[block_table[i - 1]] if i else _START
            key = (parent, tuple(token_ids[i * size : (i + 1) * size]))
            block = block_table[i]
            owner = self._index.setdefault(key, block)
            if owner == block:
                self._last_content_id += 1
                self._content_ids[block] = self._last_content_id
                self._keys[block] = key
            else:  # computed twice: the copy is not findable, but what follows it continues the same content
                self._content_ids[block] = self._content_ids[owner]

    def free(self, block_table: list[int]) -> None:
        """Empties block_table and gives its blocks back, tail first: a prefix outlives what follows it."""
        for block in reversed(block_table):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)
        block_table.clear()

    def forget_prefixes(self) -> None:
        """Empties the prefix index: no block is found again before it is filled again."""
        self._index.clear()
        self._keys = [None] * self.num_blocks

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raises RuntimeError naming the first invariant that does not hold for the tables in use."""
        held = Counter(block for table in block_tables for block in table)
        for block, count in enumerate(self._ref_counts):
            if count != held[block]:
                raise RuntimeError(f"block {block}: reference count {count}, held by {held[block]} tables")
            if (count == 0) != (block in self._free):
                raise RuntimeError(f"block {block}: reference count {count}, free: {block in self._free}")
        if len(self._free) + len(held) != self.num_blocks:
            raise RuntimeError(f"{len(self._free)} free + {len(held)} used blocks are not {self.num_blocks}")
        keys = {key: block for block, key in enumerate(self._keys) if key is not None}
        if keys != self._index:
            raise RuntimeError(f"prefix index has {len(self._index)} entries, the blocks {len(keys)} keys")

    def _require(self, count: int) -> None:
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks needed, {len(self._free)} free")

    def _extend(self, block_table: list[int], num_tokens: int) -> None:
        for _ in range(self.blocks_for(num_tokens) - len(block_table)):
            block, _ = self._free.popitem(last=False)
            key = self._keys[block]
            if key is not None:
                del self._index[key]
                self._keys[block] = None
            self._ref_counts[block] = 1
            self.num_allocations += 1
            block_table.append(block)
