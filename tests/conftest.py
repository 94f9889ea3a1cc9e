"""Fixtures shared by all tests: the real models, fetched once into rvllm's normal cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from tiny_gguf import write_tiny_model

from rvllm import _core
from rvllm.models import DEFAULT_MODEL, ModelError, pull

# How long an example takes says more of the machine than of the code.
hypothesis.settings.register_profile("rvllm", deadline=None)
hypothesis.settings.load_profile("rvllm")


def fetch(name: str) -> Path:
    try:
        return pull(name)
    except ModelError as error:
        # In CI a model that cannot be had is a failure: a suite that skips its main tests must not look green.
        if os.environ.get("CI"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`python -m rvllm` in the checkout would find the sources there, which are not compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        yield


@pytest.fixture
def own_logging() -> Iterator[None]:
    """For tests that start a server in this process, which takes all logging for itself."""
    loggers = [logging.getLogger(), logging.getLogger("rvllm")]
    before = [(logger.handlers[:], logger.level) for logger in loggers]
    yield
    for logger, (handlers, level) in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct in Q4_1 and Q8_0, BPE tokenizer, with a chat template: the default model."""
    return fetch(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M in Q4_K, Q5_0, Q6_K and Q8_0, SentencePiece tokenizer, no chat template."""
    return fetch("gemma3-270m-q4_k_m")


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def tiny_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers must be exact in any company: with one kind of layer, or with windows and two kinds."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    if request.param == "llama":
        write_tiny_model(path, quant="Q4_1")
    else:
        write_tiny_model(path, arch="gemma3", quant="Q8_0", layers=7, sliding_window=24, kv_heads=1)
    return path


# How threads share work is the same on every instruction set, and the scalar kernels take the longest.
_BACKENDS = [
    (isa, threads) for isa in _core.available_isas() for threads in ((1,) if isa == "scalar" else (1, 2))
]


@pytest.fixture(params=_BACKENDS, ids=lambda p: f"{p[0]}-{p[1]}")
def backend(request: pytest.FixtureRequest) -> _core.CpuBackend:
    """The CPU with each instruction set of this machine, alone and, but for the scalar one, with two threads."""
    isa, threads = request.param
    return _core.CpuBackend(threads, isa)
