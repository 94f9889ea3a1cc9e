"""rvllm: serve GGUF language models to many requests at once, on the machine you have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rvllm.version import __version__

if TYPE_CHECKING:
    from rvllm.llm import LLM
    from rvllm.request import RequestOutput
    from rvllm.sampling_params import SamplingParams
    from rvllm.structured_output import StructuredOutput

__all__ = ["LLM", "RequestOutput", "SamplingParams", "StructuredOutput", "__version__"]

_MODULES = {
    "LLM": "rvllm.llm",
    "RequestOutput": "rvllm.request",
    "SamplingParams": "rvllm.sampling_params",
    "StructuredOutput": "rvllm.structured_output",
}


def __getattr__(name: str) -> object:
    # Loaded at first use: `rvllm --help` must not pay for numpy, the tokenizer and the native core.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("rvllm._"):
            raise
        raise ImportError(
            f"{error.name} is not compiled: this is rvllm's source folder, {__path__[0]}. Run from another folder "
            "after `pip install .`, or compile here with `pip install -e .`"
        ) from None
