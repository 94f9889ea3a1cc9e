"""The scripts that make models and check them against reference answers, on models small enough for a test."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import reference
from gguf import GGMLQuantizationType as GGMLType
from tiny_gguf import write_tiny_model

from rvllm import LLM
from rvllm.gguf_file import GGUFFile


def load(name: str) -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_model = load("make_model")
check_reference = load("check_reference")
requantize = load("requantize")


def small(name: str) -> Any:
    """A shape of the real proportions, cut down."""
    shape = make_model.SHAPES[name]
    return replace(shape, num_layers=3, vocab_size=300, intermediate_size=512)


@pytest.mark.parametrize("name", make_model.SHAPES)
def test_made_models_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(make_model.SHAPES, name, small(name))
    monkeypatch.setattr(make_model, "CHUNK_BYTES", 10_000)
    path = tmp_path / "model.gguf"
    assert make_model.main([name, str(path), "--quant", "Q4_K_M", "--seed", "3"]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]
    logits = reference.forward(path, [72, 101, 108])
    assert logits.shape == (3, 300) and np.isfinite(logits).all() and logits.std() > 0.01
    again = tmp_path / "again.gguf"
    make_model.main([name, str(again), "--quant", "Q4_K_M", "--seed", "3"])
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("quant", [*make_model.MIXTURES, *make_model.UNIFORM])
def test_every_type_fits_every_shape(quant: str) -> None:
    for shape in make_model.SHAPES.values():
        for tensor in make_model.model_tensors(shape, quant):
            assert tensor.shape[-1] % gguf.GGML_QUANT_SIZES[tensor.type][0] == 0


def test_types_are_those_of_the_published_files() -> None:
    def count(name: str, quant: str) -> dict[str, int]:
        tensors = make_model.model_tensors(make_model.SHAPES[name], quant)
        return {
            kind.name: sum(t.type == kind for t in tensors)
            for kind in GGMLType
            if any(t.type == kind for t in tensors)
        }

    assert count("smollm2-135m", "Q4_1") == {"F32": 61, "Q4_1": 210, "Q8_0": 1}
    assert count("gemma-3-270m", "Q4_K_M") == {"F32": 109, "Q5_0": 81, "Q8_0": 10, "Q4_K": 27, "Q6_K": 9}


def test_parameters_are_those_of_the_published_models() -> None:
    published = {  # millions
        "smollm2-135m": 134.5, "smollm2-360m": 361.8, "smollm2-1.7b": 1711.4, "llama-3.2-1b": 1235.8,
        "qwen3-0.6b": 596.0, "gemma-3-270m": 268.1, "gemma-3-1b": 999.9,
    }  # fmt: skip
    for name, millions in published.items():
        tensors = make_model.model_tensors(make_model.SHAPES[name], "F32")
        # rope_freqs.weight is a table of the file, not a parameter.
        parameters = sum(np.prod(t.shape) for t in tensors if t.name != "rope_freqs.weight")
        assert parameters / 1e6 == pytest.approx(millions, abs=0.1)


def test_llama3_rope_factors() -> None:
    factors = make_model.llama3_rope_factors(make_model.SHAPES["llama-3.2-1b"])
    assert factors.shape == (32,) and (np.diff(factors) >= 0).all()
    assert factors[0] == 1 and factors[-1] == 32


def test_tokenizer_is_copied_and_filled_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(make_model.SHAPES, "smollm2-135m", small("smollm2-135m"))
    source, path = tmp_path / "source.gguf", tmp_path / "model.gguf"
    write_tiny_model(source, metadata={"tokenizer.chat_template": "{{ messages }}"})
    make_model.main(["smollm2-135m", str(path), "--tokenizer-from", str(source)])
    old, new = gguf.GGUFReader(source), gguf.GGUFReader(path)
    keys = [key for key in old.fields if key.startswith("tokenizer.")]
    assert "tokenizer.chat_template" in keys
    for key in keys:
        value, copy = old.fields[key].contents(), new.fields[key].contents()
        assert copy[: len(value)] == value if isinstance(value, list) else copy == value
    assert len(new.fields["tokenizer.ggml.tokens"].contents()) == 300
    assert new.fields["tokenizer.ggml.token_type"].contents()[260:] == [5] * 40


def test_larger_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(make_model.SHAPES, "smollm2-135m", small("smollm2-135m"))
    write_tiny_model(tmp_path / "source.gguf", vocab=301)
    with pytest.raises(SystemExit):
        make_model.main(
            ["smollm2-135m", str(tmp_path / "m.gguf"), "--tokenizer-from", str(tmp_path / "source.gguf")]
        )
    assert "has 301 tokens, more than the 300 of the shape" in capsys.readouterr().err
    assert not (tmp_path / "m.gguf").exists()


class Answers:
    """A tiny model and a reference file of its own answers."""

    def __init__(self, folder: Path):
        self.model = folder / "tiny.gguf"
        write_tiny_model(self.model)
        self.json = folder / "reference.json"
        self.prompt_ids, self.token_ids = list(b"Hello"), [*b", you"]
        logprobs = reference.log_softmax(reference.forward(self.model, self.prompt_ids + self.token_ids))[
            4:-1
        ]
        best = np.argsort(-logprobs, axis=1)[:, :5]
        self.steps = [
            {"id": token, "logprob": float(row[token]), "top": [[int(i), float(row[i])] for i in ids]}
            for token, row, ids in zip(self.token_ids, logprobs, best, strict=True)
        ]

    def check(self) -> int:
        entry = {
            "prompt": "Hello", "prompt_ids": self.prompt_ids, "token_ids": self.token_ids, "steps": self.steps
        }  # fmt: skip
        self.json.write_text(json.dumps([entry]))
        return check_reference.main([str(self.model), str(self.json), "--oracle"])


@pytest.fixture
def answers(tmp_path: Path) -> Answers:
    return Answers(tmp_path)


def test_own_answers_pass(answers: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    assert answers.check() == 0
    assert "1 prompts, mean delta 0.0000, prompt ids not checked: 0 failures" in capsys.readouterr().out
    del answers.steps[1]  # a token that ends within a character has no step
    assert answers.check() == 0


def test_other_logprob_fails(answers: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    answers.steps[2]["top"][0][1] += 0.5
    assert answers.check() == 1
    assert "step 2: token" in capsys.readouterr().out


def test_nearly_tied_tokens_may_swap() -> None:
    logprobs = np.log([[0.45, 0.55]])
    steps = [{"id": 0, "logprob": -0.60, "top": [[0, -0.60], [1, -0.80]]}]
    entry = {"prompt": "Hi", "prompt_ids": [1], "token_ids": [0], "steps": steps}
    result = check_reference.check_entry(entry, lambda ids: logprobs, None)
    assert not result.failures and result.num_near_ties == 1
    steps[0]["top"][1][1] = -0.95
    assert check_reference.check_entry(entry, lambda ids: logprobs, None).failures


def test_other_best_token_fails(answers: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    top = answers.steps[0]["top"]
    top[0][1], top[1][1] = top[0][1] - 1, top[1][1] + 1
    top[0], top[1] = top[1], top[0]
    assert answers.check() == 1
    assert "step 0: best token is" in capsys.readouterr().out


def test_mean_is_limited(answers: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    for step in answers.steps:
        step["top"][0][1] += 0.05
    assert answers.check() == 1
    assert "mean delta 0.0500 is more than 0.04" in capsys.readouterr().out


def test_prompt_ids_are_compared() -> None:
    steps = [{"id": 0, "logprob": -0.6931, "top": [[0, -0.6931], [1, -0.6931]]}]
    entry = {"prompt": "Hi", "prompt_ids": [1, 2], "token_ids": [0], "steps": steps}
    result = check_reference.check_entry(entry, lambda ids: np.zeros((3, 2)), lambda prompt: [1, 3])
    assert result.failures == ["prompt ids are [1, 3], the reference has [1, 2]"]
    nan = check_reference.check_entry(entry, lambda ids: np.full((3, 2), np.nan), lambda prompt: [1, 2])
    assert nan.failures


@pytest.mark.parametrize("name", ["Q5_1", "MXFP4", "BF16"])
def test_requantized_weights_are_those_of_gguf(tmp_path: Path, name: str) -> None:
    source, output = tmp_path / "source.gguf", tmp_path / "output.gguf"
    write_tiny_model(source, quant="Q8_0", metadata={"tokenizer.chat_template": "{{ messages }}"})
    assert requantize.main([str(source), str(output), name]) == 0
    with GGUFFile(source) as old, GGUFFile(output) as new:
        assert old.metadata.keys() <= new.metadata.keys()
        assert new.metadata["tokenizer.chat_template"] == "{{ messages }}"
        assert new.metadata["tokenizer.ggml.tokens"] == old.metadata["tokenizer.ggml.tokens"]
        assert list(new.tensors) == list(old.tensors)
        for key, tensor in new.tensors.items():
            if len(tensor.shape) == 1:
                np.testing.assert_array_equal(tensor.data, old.tensors[key].data)
                continue
            weights = reference.dequantize(old.tensors[key].data, GGMLType.Q8_0, *tensor.shape)
            expected = gguf.quants.quantize(weights, GGMLType[name]).view(np.uint8).ravel()
            assert tensor.type.name == name
            np.testing.assert_array_equal(tensor.data, expected)


def test_requantizing_takes_small_blocks_where_large_ones_do_not_fit(tmp_path: Path) -> None:
    output = tmp_path / "output.gguf"
    write_tiny_model(tmp_path / "source.gguf", ff=512)
    assert requantize.main([str(tmp_path / "source.gguf"), str(output), "TQ2_0"]) == 0
    with GGUFFile(output) as model:
        types = {tensor.name: tensor.type.name for tensor in model.tensors.values()}
    assert types["blk.0.ffn_down.weight"] == "TQ2_0" and types["blk.0.ffn_up.weight"] == "Q4_0"


def test_requantizing_without_llama_cpp_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    write_tiny_model(tmp_path / "source.gguf")
    assert requantize.main([str(tmp_path / "source.gguf"), str(tmp_path / "output.gguf"), "Q4_K_M"]) == 1
    assert "Q4_K_M takes llama.cpp: pip install llama-cpp-python" in capsys.readouterr().err
    assert requantize.main([str(tmp_path / "none.gguf"), str(tmp_path / "output.gguf"), "Q4_0"]) == 1
    assert "none.gguf" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["source.gguf"]


@pytest.mark.parametrize(("name", "largest"), [("Q8_0", 0.02), ("Q5_1", 0.3)])
def test_real_weights_requantized_stay_near(
    smollm2_path: Path, tmp_path: Path, name: str, largest: float
) -> None:
    output = tmp_path / "output.gguf"
    assert requantize.main([str(smollm2_path), str(output), name]) == 0
    ids = LLM(smollm2_path, num_blocks=8).tokenizer.encode(
        "The capital of France is Paris, and the Seine runs through it."
    )
    old, new = (score_rows(path, ids) for path in (smollm2_path, output))
    divergence = (np.exp(old) * (old - new)).sum(axis=1)
    assert 1e-5 < divergence.mean() < largest


def score_rows(path: Path, ids: list[int]) -> Any:
    """Log-probabilities [T, V] of a model after each token."""
    return reference.log_softmax(LLM(path, num_blocks=8).get_logits(ids).astype(np.float64))
