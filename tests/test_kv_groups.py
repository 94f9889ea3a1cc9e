"""The KV cache's memory goes where requests need it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvllm.block_manager import BlockManager, KVGroup, window_blocks
from rvllm.kv_groups import KVGroupSizes


def make_sizes(windows: list[int], block_bytes: list[int], **settings: Any) -> KVGroupSizes:
    limits = {"block_size": 16, "max_model_len": 32768, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    return KVGroupSizes(windows, block_bytes, **{**limits, **settings})


GEMMA_3_270M = make_sizes([0, 512], [3 << 14, 15 << 14])


@pytest.mark.parametrize("window", [0, 4096])
def test_one_group_gets_it_all(window: int) -> None:
    sizes = make_sizes([window], [1000])
    assert sizes.for_bytes(99_999) == [KVGroup(99, window)]
    assert sizes.for_blocks(7) == [KVGroup(7, window)]
    assert sizes.for_bytes(999)[0].num_blocks == 0


def test_a_number_of_blocks_is_that_of_the_first_group() -> None:
    assert GEMMA_3_270M.for_blocks(100) == [KVGroup(100), KVGroup(100, 512)]
    # 64 requests with a window of 33 blocks and a spare one, and 32 blocks for a step of a prompt
    assert GEMMA_3_270M.for_blocks(100_000) == [KVGroup(100_000), KVGroup(64 * 34 + 32, 512)]


def test_much_memory_goes_to_the_layers_that_see_all() -> None:
    full, windowed = GEMMA_3_270M.for_bytes(4 << 30)
    assert windowed.num_blocks == 64 * 34 + 32
    assert full.num_blocks == ((4 << 30) - windowed.num_blocks * (15 << 14)) // (3 << 14)
    assert full.num_blocks > 4 * ((4 << 30) // (18 << 14))  # of blocks of all layers


def test_both_run_out_together_with_requests_of_four_windows() -> None:
    full, windowed = GEMMA_3_270M.for_bytes(200 << 20)
    by_full = full.num_blocks // (4 * 512 // 16)
    by_window = (windowed.num_blocks - 32) // 34
    assert abs(by_full - by_window) <= 1


def test_little_memory_is_shared_out_evenly() -> None:
    assert GEMMA_3_270M.for_bytes(18 << 14) == [KVGroup(1), KVGroup(1, 512)]
    assert GEMMA_3_270M.for_bytes(30 * (18 << 14)) == [KVGroup(30), KVGroup(30, 512)]
    assert GEMMA_3_270M.for_bytes((18 << 14) - 1)[0].num_blocks == 0


@given(
    windows=st.lists(st.integers(1, 3000), max_size=3, unique=True).map(
        lambda rest: sorted(rest, reverse=True)
    ),
    full=st.booleans(),
    block_bytes=st.lists(st.integers(200, 20_000), min_size=4, max_size=4),
    num_bytes=st.integers(0, 2**21),
    settings=st.fixed_dictionaries(
        {
            "block_size": st.sampled_from([1, 5, 16, 256]),
            "max_model_len": st.integers(1, 2**17),
            "max_num_seqs": st.integers(1, 300),
            "max_num_batched_tokens": st.integers(1, 4096),
        }
    ),
)
def test_groups_fit_and_fit_together(
    windows: list[int], full: bool, block_bytes: list[int], num_bytes: int, settings: dict[str, int]
) -> None:
    windows = [0, *windows] if full or not windows else windows
    sizes = make_sizes(windows, block_bytes[: len(windows)], **settings)
    groups = sizes.for_bytes(num_bytes)
    assert sizes.num_bytes(groups) <= num_bytes
    first = groups[0].num_blocks
    if first == 0:
        assert num_bytes < sum(sizes.block_bytes)
        return
    assert all(0 < group.num_blocks <= first for group in groups)
    # What fits the first group fits the others.
    manager = BlockManager(groups, settings["block_size"], settings["max_num_batched_tokens"])
    assert manager.max_num_tokens >= first * settings["block_size"]
    # One more block would have been too many.
    more = [min(first + 1, group.num_blocks + (group.num_blocks == first)) for group in groups]
    assert sum(count * size for count, size in zip(more, sizes.block_bytes, strict=True)) > num_bytes


def test_blocks_of_a_window() -> None:
    assert window_blocks(512, 1, 16) == 33
