"""The hyper-parameters that a GGUF file gives under its architecture's name, each checked against its limits."""

from __future__ import annotations

import reprlib

import numpy as np

from rvllm.gguf_file import GGUFError, GGUFFile

MAX_POSITION = 2**30  # positions are int32
FLOAT32 = np.finfo(np.float32)


class ArchitectureKeys:
    """Reads them; every error is a GGUFError that names the key."""

    def __init__(self, gguf: GGUFFile):
        self.gguf = gguf
        self.architecture = gguf.architecture

    def fail(self, key: str, problem: str) -> GGUFError:
        return GGUFError(f"{self.gguf.path}: {self.architecture}.{key}: {problem}")

    def keys(self) -> set[str]:
        prefix = f"{self.architecture}."
        return {key[len(prefix) :] for key in self.gguf.metadata if key.startswith(prefix)}

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = MAX_POSITION) -> int:
        value = self.gguf.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, np.ndarray):  # one value a layer: the same for all, or not one shape
            layers = self.integer("block_count", high=10_000) if key != "block_count" else 0
            if value.size != layers or value.dtype.kind not in "iu" or np.unique(value).size != 1:
                raise self.fail(
                    key, f"{value.size} values, expected one integer or one for each layer, all equal"
                )
            value = int(value[0])
        if value is None:
            raise self.fail(key, f"missing, expected an integer between {low} and {high}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"expected an integer, not {reprlib.repr(value)}")
        if not low <= value <= high:
            raise self.fail(key, f"{value} is not between {low} and {high}")
        return value

    def number(
        self, key: str, default: float | None = None, low: float | None = None, zero: float | None = None
    ) -> float:
        """A number that float32 holds: from `low` on, or above 0 and such that float32 holds its inverse too.

        zero: what 0 stands for, where it means that the file does not say.
        """
        value = self.gguf.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise self.fail(key, "missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(key, f"expected a number, not {reprlib.repr(value)}")
        if value == 0 and zero is not None:
            return zero
        tiny = float(FLOAT32.tiny)
        least, most = (tiny, 1 / tiny) if low is None else (low, float(FLOAT32.max))
        if not least <= value <= most:
            raise self.fail(key, f"{value} is not between {least:g} and {most:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.gguf.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, bool):
            raise self.fail(key, f"expected true or false, not {reprlib.repr(value)}")
        return value

    def rows(self, tensor: str) -> int:
        """Output size of a matrix, and 0 where it is missing: loading it will say so."""
        found = self.gguf.tensors.get(f"{tensor}.weight")
        return found.shape[0] if found is not None and len(found.shape) == 2 else 0
