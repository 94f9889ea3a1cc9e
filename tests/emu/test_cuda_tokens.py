"""Whole models on the CUDA backend: token for token what the CPU answers, for many requests at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from devices import CPU, DEVICES, VARIANT, Device, use_cuda
from tiny_gguf import FAMILIES, write_tiny_model

from rvllm import LLM, SamplingParams
from rvllm.request import RequestOutput

NUM_TOKENS = 16 if VARIANT == "plain" else 3
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=2, ignore_eos=True)
# Of log-probability: float products differ by their order, and more where that rounds a key to another F16.
MAX_ERROR = 1e-2

MODELS = {
    "llama-q4_1": {"quant": "Q4_1"},
    "llama-k-quants": {"quant": {"*.ffn_down.*": "Q6_K", "token_embd.*": "Q8_0", "*": "Q4_K"}},
    "qwen3-q8_0": {"arch": "qwen3", "quant": "Q8_0", "tied": False},
    "gemma3-windows": {"arch": "gemma3", "quant": "Q5_0", "layers": 7, "sliding_window": 24, "kv_heads": 1},
    "gpt-oss-mxfp4": {"arch": "gpt-oss", "quant": {"*_exps.*": "MXFP4", "*": "Q8_0"}, "tied": False},
    "wide-shared-expert": {
        "arch": "qwen2moe", "quant": "Q8_0", "tied": False, "layers": 1, "seed": 1,
        "family": FAMILIES["qwen2moe"]._replace(shared_experts=5),
    },
    "dense-and-sigmoid": {
        "arch": "glm4moe", "quant": "Q8_0", "tied": False, "layers": 3, "seed": 3,
        "family": FAMILIES["glm4moe"]._replace(experts_per_token=4),  # wider than the dense layer before them
    },
    "qwen2-f16": {"arch": "qwen2", "quant": "F16", "seed": 3},
}  # fmt: skip
# Whose products have an order of their own: of the first model all, of the others the router's.
FLOAT_MATRICES = ("qwen2-f16", "gpt-oss-mxfp4", "wide-shared-expert", "dense-and-sigmoid")
if VARIANT == "tsan":  # a hundred times slower
    MODELS = {"llama-q4_1": MODELS["llama-q4_1"]}


def prompts() -> list[list[int]]:
    """Prompts of 1 to 40 tokens; some share a prefix that ends inside a block."""
    rng = np.random.default_rng(11)
    prefix = rng.integers(0, 256, 21).tolist()
    return [
        (prefix if i % 3 == 0 else []) + rng.integers(0, 256, n).tolist()
        for i, n in enumerate([1, 17, 9, 4, 40] if VARIANT == "plain" else [1, 7])
    ]


def answers(outputs: list[RequestOutput]) -> tuple[list[list[int]], list[list[list[float]]]]:
    """Token ids of each request, and the best log-probabilities of each of its tokens."""
    choices = [output.outputs[0] for output in outputs]
    logprobs = [
        [[p.logprob for p in entry.values()] for entry in choice.logprobs or []] for choice in choices
    ]
    return [choice.token_ids for choice in choices], logprobs


def check_tokens(name: str, path: Path, device: str, use: Callable[[], None]) -> None:
    """A model of MODELS answers on a device of the engine, from use() on, as on the CPU."""
    write_tiny_model(path, **MODELS[name])
    settings = {
        "num_threads": 1,
        # Products by F16 weights and more tokens are the vendor's library's, in half precision.
        "max_num_batched_tokens": 16 if name.endswith("f16") else 32,
        "max_model_len": 128,
    }
    tokens, logprobs = answers(
        LLM(path, isa="scalar", **settings).generate(prompts(), PARAMS, use_tqdm=False)
    )
    use()
    out_tokens, out_logprobs = answers(
        LLM(path, device=device, **settings).generate(prompts(), PARAMS, use_tqdm=False)
    )
    assert out_tokens == tokens
    if name in FLOAT_MATRICES:
        assert min(best - second for request in logprobs for best, second, *_ in request) > 2 * MAX_ERROR
        np.testing.assert_allclose(out_logprobs, logprobs, atol=MAX_ERROR)
    else:
        assert out_logprobs == logprobs


@pytest.mark.parametrize("device", [d for d in DEVICES if d != CPU], ids=lambda device: device.name)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_those_of_the_cpu(
    name: str, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_tokens(name, tmp_path / "model.gguf", "cuda", partial(use_cuda, device, monkeypatch))
