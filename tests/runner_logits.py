"""The logits of a ModelRunner without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rvllm.block_manager import BlockManager
from rvllm.model_runner import ModelRunner


def get_logits(runner: ModelRunner, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits [T, vocab_size] of all tokens, computed in chunks; blocks that leave a window are used again."""
    chunk = runner.max_num_batched_tokens
    manager = BlockManager(runner.kv_groups, runner.block_size, chunk)
    block_tables, parts = manager.empty_tables(), []
    for start in range(0, len(token_ids), chunk):
        assert manager.append(block_tables, start, len(token_ids))
        parts.append(runner.get_logits(token_ids[start : start + chunk], start, block_tables, 0))
    return np.concatenate(parts)
