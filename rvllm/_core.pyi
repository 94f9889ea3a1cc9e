"""Types of the native core. Shapes and meanings are in csrc/backend.h and csrc/sampler.h."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

def available_isas() -> list[str]: ...
def detect_isa() -> str: ...
def supports_type(ggml_type: int) -> bool: ...
def dequantize(ggml_type: int, data: bytes | NDArray[np.uint8]) -> NDArray[np.float32]: ...
def now_ns() -> int: ...

class Backend:
    @property
    def name(self) -> str: ...
    @property
    def num_threads(self) -> int: ...

class KVType:
    f16: KVType
    f32: KVType
    bf16: KVType
    q8_0: KVType
    @property
    def name(self) -> str: ...

class CpuBackend(Backend):
    def __init__(self, num_threads: int, isa: str = "") -> None: ...
    @property
    def isa(self) -> str: ...

class ProfiledBackend(Backend):
    def __init__(self, backend: Backend) -> None: ...
    def measure_ceilings(self) -> tuple[float, float]: ...
    def reset(self) -> None: ...
    def reset_totals(self) -> None: ...
    def rows(self) -> list[tuple[str, int, int, float, float, list[int]]]: ...
    def thread_slices(self) -> list[tuple[NDArray[np.int64], int]]: ...

class Sampler:
    def __init__(
        self,
        *,
        vocab_size: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int = 0,
        index: int = 0,
        min_tokens: int = 0,
        num_logprobs: int = -1,
        prompt_token_ids: Sequence[int] = (),
        stop_token_ids: Sequence[int] = (),
        logit_bias: Sequence[tuple[int, float]] = (),
    ) -> None: ...
    def sample(self, logits: NDArray[np.float32]) -> tuple[int, list[tuple[int, float, int]] | None]: ...
    def set_allowed(self, words: NDArray[np.int32]) -> None: ...

class Pooler:
    def __init__(self, pooling: int, hidden_size: int, num_tokens: int) -> None: ...
    def embedding(self) -> list[float]: ...

class StepArrays:
    def __init__(
        self,
        input_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        slot_mapping: NDArray[np.int32],
        query_start_loc: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        logits_indices: NDArray[np.int32],
    ) -> None: ...

class Model:
    def __init__(
        self,
        backend: Backend,
        config: dict[str, Any],
        find: Callable[[str], tuple[int, int, int, NDArray[np.uint8 | np.float32]] | None],
        consumed: Callable[[str, int], None],
    ) -> None: ...
    @property
    def windows(self) -> list[int]: ...
    def alloc_kv_cache(self, num_blocks: Sequence[int], block_size: int, type: KVType = ...) -> None: ...
    def kv_cache_bytes(self, group: int, num_blocks: int, block_size: int, type: KVType = ...) -> int: ...
    def step(
        self,
        arrays: StepArrays,
        readers: Sequence[Sampler | tuple[int, int]],
        pooled: Sequence[tuple[Pooler, int, int]] = (),
        before_sampling: Callable[[], None] | None = None,
    ) -> list[tuple[int, list[tuple[int, float, int]] | None, str | None]]: ...
    def logits(self, arrays: StepArrays) -> NDArray[np.float32]: ...

class ops:  # noqa: N801
    """The backend's operations on NumPy arrays, one by one: for tests and tools (csrc/bind_ops.cpp)."""

    def __getattr__(self, name: str) -> Callable[..., NDArray[np.float32]]: ...
