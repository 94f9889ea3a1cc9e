"""How many blocks of the KV cache each group of layers gets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from rvllm.block_manager import KVGroup, window_blocks

_EXPECTED_WINDOWS = 4


@dataclass(frozen=True)
class KVGroupSizes:
    """windows: of each group, the widest first (0: all tokens). block_bytes: of one block in each group.

    The others are settings of EngineConfig.
    """

    windows: Sequence[int]
    block_bytes: Sequence[int]
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def for_blocks(self, num_blocks: int, num_seqs: int | None = None) -> list[KVGroup]:
        """num_blocks for the first group, for the others the most that num_seqs requests (default: max_num_seqs) hold.

        That is as many as in the first group, or a window for each, a spare block, and one step of a prompt.
        """
        num_seqs, size = num_seqs or self.max_num_seqs, self.block_size
        chunk = -(-self.max_num_batched_tokens // size)
        most = [num_seqs * (window_blocks(window, 1, size) + 1) + chunk for window in self.windows[1:]]
        counts = [num_blocks, *(min(num_blocks, count) for count in most)]
        return [KVGroup(count, window) for count, window in zip(counts, self.windows, strict=True)]

    def for_bytes(self, num_bytes: int) -> list[KVGroup]:
        """The largest groups that fit in num_bytes; the first has no blocks where not one of each fits."""
        # All groups run out together when the requests are as long as four windows, and as many as fit. With shorter
        # ones the windows' blocks run out first, with longer ones those of the first group.
        length = min(_EXPECTED_WINDOWS * max(self.windows), self.max_model_len)
        blocks = [-(-length // self.block_size)]
        blocks += [min(blocks[0], window_blocks(window, 1, self.block_size)) for window in self.windows[1:]]
        num_seqs = num_bytes // max(1, self._bytes(blocks))
        num_seqs = max(1, min(num_seqs, self.max_num_seqs))

        def cost(num_blocks: int) -> int:
            return self._bytes([group.num_blocks for group in self.for_blocks(num_blocks, num_seqs)])

        most = num_bytes // self.block_bytes[0]
        return self.for_blocks(bisect_right(range(1, most + 1), num_bytes, key=cost), num_seqs)

    def num_bytes(self, groups: Sequence[KVGroup]) -> int:
        return self._bytes([group.num_blocks for group in groups])

    def _bytes(self, counts: Sequence[int]) -> int:
        return sum(count * size for count, size in zip(counts, self.block_bytes, strict=True))
