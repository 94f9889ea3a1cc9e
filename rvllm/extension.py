"""Importing the extension modules of devices, which not every installation has."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def import_extension(name: str, missing: str) -> ModuleType:
    """The module rvllm.`name`. Raises ValueError with the text `missing` when this installation has none."""
    try:
        return import_module(f"rvllm.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"rvllm.{name}":  # it is there, and cannot be loaded
            raise
        raise ValueError(missing) from None
