"""Compares some operations of a `_metal` module with the CPU: metal_smoke.py MODULE KERNELS.

Prints `equal` when all are, and the number of Objective-C objects that live when the backend is gone.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys

import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from random_weights import random_weights
from test_ops import Step, normal

from rvllm import _core
from rvllm._core import ops


def results(backend: _core.Backend) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    q4_k = random_weights(GGMLType.Q4_K, 35, 512, 0.05, rng).tobytes()
    step = Step([1, 5], [40, 5], 16, 4, 2, 40)
    step.kv_type = _core.KVType.q8_0
    layer = ops.NormKind.layer
    return [
        ops.norm(backend, normal(3, 300) + 2, normal(300, seed=1), 1e-5, normal(300, seed=2), layer),
        ops.norm(backend, normal(3, 300) + 2, normal(300, seed=1), 1e-5),
        ops.rope(backend, normal(4, 48), 16, normal(4, 16, seed=1), True),
        ops.linear(backend, int(GGMLType.Q4_K), 35, q4_k, normal(1, 512)),
        ops.linear(backend, int(GGMLType.Q4_K), 35, q4_k, normal(9, 512)),
        ops.add(backend, normal(5, 370), normal(5, 370, seed=1)),
        *step.attend(backend),
    ]


def product_of_many_tokens(backend: _core.Backend) -> np.ndarray:
    weight = random_weights(GGMLType.F16, 70, 72, 0.1, np.random.default_rng(1)).tobytes()
    return ops.linear(backend, int(GGMLType.F16), 70, weight, normal(40, 72))


def main(path: str, kernels: str) -> None:
    spec = importlib.util.spec_from_file_location("seeded._metal", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cpu = _core.CpuBackend(1, "scalar")
    found, expected = results(module.make_backend(1, kernels)), results(cpu)
    equal = all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    many = product_of_many_tokens(cpu)
    for mps, tolerance in ((False, 1e-5), (True, 0.02)):
        own = product_of_many_tokens(module.make_backend(1, kernels, mps=mps))
        equal = equal and np.allclose(own, many, atol=tolerance)
    if equal:
        print("equal")
    print("live", ctypes.CDLL(path).rv_emu_live_objects())


if __name__ == "__main__":
    main(*sys.argv[1:])
