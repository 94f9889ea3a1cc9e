"""Every operation of the Metal backend, by the tests of the CUDA backend: in several schedules of the emulator, and
on an Apple GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from metal_devices import APPLE, SCHEDULES, MetalDevice
from test_cuda_ops import *  # noqa: F403
from test_cuda_steps import (  # noqa: F401
    test_attention_of_single_tokens,
    test_attention_of_the_last_tokens_of_long_contexts,
    test_experts_that_are_chosen,
)
from test_ops import Step

from rvllm import _core
from rvllm._core import ops


@pytest.fixture(params=[*SCHEDULES, APPLE], ids=lambda device: device.name)
def device(request: pytest.FixtureRequest) -> MetalDevice:
    """In place of the one that the imported tests take their backend from."""
    return request.param


@pytest.mark.parametrize("window", [0, 300])
def test_attention_where_a_group_goes_through_all_partitions(backend: Any, window: int) -> None:
    """Of so many heads that partitions get no groups of their own; with the window, some tokens skip the first one."""
    step = Step([17], [566], 16, 32, 32, 8)
    positions = np.arange(566)
    args = (
        np.vstack(step.q), np.vstack(step.k), np.vstack(step.v), positions[-17:],
        step.tables[0][positions // 16] * 16 + positions % 16, np.array([0, 17]), np.array(step.contexts),
        step.tables, step.num_blocks, 16, 32, 32, window,
    )  # fmt: skip
    np.testing.assert_array_equal(
        ops.attention(backend, *args), ops.attention(_core.CpuBackend(1, "scalar"), *args)
    )
