from typing import Any

from rvllm.request import Request

def fill(scheduled: list[tuple[Request, int]], block_size: int) -> tuple[Any, ...]: ...
