"""Every operation of the Metal backend, by the tests of the CUDA backend: in several schedules of the emulator, and
on an Apple GPU.
"""

from __future__ import annotations

import pytest
from metal_devices import APPLE, SCHEDULES, MetalDevice
from test_cuda_ops import *  # noqa: F403
from test_cuda_steps import (  # noqa: F401
    test_attention_of_single_tokens,
    test_attention_of_the_last_tokens_of_long_contexts,
    test_experts_that_are_chosen,
)


@pytest.fixture(params=[*SCHEDULES, APPLE], ids=lambda device: device.name)
def device(request: pytest.FixtureRequest) -> MetalDevice:
    """In place of the one that the imported tests take their backend from."""
    return request.param
