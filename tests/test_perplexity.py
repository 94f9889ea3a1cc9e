"""Perplexity and divergence: exact on small arrays, the file format, and the command on tiny models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from tiny_gguf import BOS_TOKEN_ID, write_tiny_model

from rvllm import LLM
from rvllm.cli import main
from rvllm.logits_file import LogitsReader, LogitsWriter
from rvllm.perplexity import (
    MIN_LOG_PROB,
    concatenate,
    first_scored,
    log_softmax,
    mean_and_error,
    num_scored,
    perplexity,
    score,
    split,
    summary,
)

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 3


def logits_of(probabilities: list[list[float]], shift: float = 0.0) -> np.ndarray:
    return (np.log(np.array(probabilities)) + shift).astype(np.float32)


# Numbers


def test_chunks_and_what_counts_of_them() -> None:
    chunks = split(list(range(35)), 16)
    assert chunks.tolist() == [list(range(16)), list(range(16, 32))]
    assert split(list(range(35)), 16, 1).tolist() == [list(range(16))]
    assert split(list(range(35)), 16, 9).shape == (2, 16)
    assert [(first_scored(n), num_scored(n)) for n in (8, 9, 512)] == [(4, 3), (4, 4), (256, 255)]
    with pytest.raises(ValueError, match="the text has 15 tokens, less than a chunk of 16"):
        split([1] * 15, 16)
    with pytest.raises(ValueError, match="at least 8 tokens, got 7"):
        split([1] * 15, 7)


def test_log_softmax_of_large_logits() -> None:
    out = log_softmax(np.array([[1e4, 1e4], [-1e4, 1e4]], np.float32))
    assert out == pytest.approx(np.array([[-math.log(2)] * 2, [-2e4, 0]]))


def test_perplexity_of_known_logits() -> None:
    # Whatever is added to all logits of a row, the probabilities are the same.
    logits = logits_of([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]], 7.0)
    nll = score(logits, np.array([0, 1], np.int32)).nll
    assert nll == pytest.approx([math.log(2), math.log(8)], abs=1e-6)
    # Mean ln 4; the two lie ln 2 from it: variance 2 ln(2)^2, over two values ln(2)^2.
    assert perplexity(nll) == pytest.approx((4, 4 * math.log(2)), rel=1e-6)


def test_uniform_logits_have_the_vocabulary_as_perplexity() -> None:
    nll = score(np.zeros((5, 300_000), np.float32), np.arange(5, dtype=np.int32)).nll
    assert perplexity(nll) == pytest.approx((300_000, 0), abs=1e-4)


def test_many_rows_are_the_sum_of_their_parts() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(50, 70_000)).astype(np.float32)  # more than is worked on at a time
    targets = rng.integers(0, 70_000, 50).astype(np.int32)
    nll = score(logits, targets).nll
    assert nll == pytest.approx(
        np.concatenate([score(logits[i : i + 1], targets[i : i + 1]).nll for i in range(50)])
    )


def test_divergence_of_known_distributions() -> None:
    p, q = [[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]], [[0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]
    base = log_softmax(logits_of(p))
    scores = score(logits_of(q, -3.0), np.array([0, 2], np.int32), lambda rows: base[rows])
    expected = [
        sum(a * math.log(a / b) for a, b in zip(*rows, strict=True)) for rows in zip(p, q, strict=True)
    ]
    assert scores.kld == pytest.approx(expected, abs=1e-6)
    assert scores.base_nll == pytest.approx([math.log(2), math.log(2)], abs=1e-6)
    assert scores.same_top.tolist() == [False, True]
    out = summary(scores)
    assert out["kld"] == pytest.approx(np.mean(expected), abs=1e-6)
    assert out["kld_max"] == pytest.approx(max(expected), abs=1e-6)
    assert (out["same_top"], out["same_top_error"]) == (0.5, 0.5)
    assert out["delta_p"] == pytest.approx(-0.125, abs=1e-6)  # 0.25 instead of 0.5, and 0.5 as it was
    assert out["rms_delta_p"] == pytest.approx(0.25 / math.sqrt(2), abs=1e-6)
    assert out["log_ppl_ratio"] == pytest.approx(math.log(2) / 2, abs=1e-6)
    assert out["ppl"] == pytest.approx(math.sqrt(8), abs=1e-5)


def test_a_distribution_does_not_diverge_from_itself() -> None:
    rng = np.random.default_rng(1)
    logits = (4 * rng.normal(size=(30, 1000))).astype(np.float32)
    targets = rng.integers(0, 1000, 30).astype(np.int32)
    out = summary(score(logits, targets, lambda rows: log_softmax(logits[rows])))
    assert out["ppl"] == out["base_ppl"] > 1
    assert out["same_top"] == 1
    for name in ("kld", "kld_error", "kld_max", "kld_99", "delta_p", "rms_delta_p", "log_ppl_ratio"):
        assert out[name] == 0


def test_what_the_reference_rules_out_does_not_count() -> None:
    base = np.array([[0.0, MIN_LOG_PROB - 1, -700.0]])
    scores = score(np.zeros((1, 3), np.float32), np.array([0], np.int32), lambda rows: base[rows])
    assert scores.kld == pytest.approx([math.log(3)])


def test_without_a_reference_there_is_only_perplexity() -> None:
    scores = score(np.zeros((4, 3), np.float32), np.zeros(4, np.int32))
    assert list(summary(scores)) == ["ppl", "ppl_error"]
    assert len(concatenate([scores, scores]).nll) == 8


def test_mean_and_error() -> None:
    assert mean_and_error(np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx((2.5, math.sqrt(5 / 3 / 4)))
    assert mean_and_error(np.array([True] * 7)) == (1, 0)


# Files


def write_reference(path: Path, logits: np.ndarray, chunk_size: int = 8) -> np.ndarray:
    """A file of logits [chunks, N, V] of which the tokens are 0, 1, 2, ..."""
    chunks = np.arange(len(logits) * chunk_size, dtype=np.int32).reshape(-1, chunk_size)
    with LogitsWriter(path, chunks, logits.shape[2]) as writer:
        for rows in logits:
            writer.write(rows)
    return chunks


@pytest.mark.parametrize("vocab_size", [64, 65])
def test_a_file_keeps_log_probabilities(tmp_path: Path, vocab_size: int) -> None:
    logits = (3 * np.random.default_rng(2).normal(size=(2, 3, vocab_size))).astype(np.float32)
    logits[0, 1, 5] = -40  # lies below what the file can hold
    chunks = write_reference(tmp_path / "base", logits)
    reader = LogitsReader(tmp_path / "base")
    assert (reader.chunk_size, reader.vocab_size) == (8, vocab_size)
    assert np.array_equal(reader.chunks, chunks)
    for i, rows in enumerate(logits):
        expected = log_softmax(rows)
        lowest = np.maximum(expected, expected.max(1, keepdims=True) - 16)
        assert reader.log_probs(i)(slice(0, 3)) == pytest.approx(lowest, abs=2e-4)
        assert np.array_equal(reader.log_probs(i)(slice(1, 2)), reader.log_probs(i)(slice(0, 3))[1:2])


def test_the_layout_of_a_file(tmp_path: Path) -> None:
    # Logits 0 and 16 are code 0 and 65535 of a range that is exact in binary.
    chunks = write_reference(tmp_path / "base", np.tile(np.array([0, 16, 16], np.float32), (1, 3, 1)))
    data = (tmp_path / "base").read_bytes()
    assert data[:8] == b"_logits_"
    assert np.frombuffer(data[8:20], "<i4").tolist() == [8, 3, 1]
    assert np.frombuffer(data[20:52], "<i4").tolist() == chunks[0].tolist()
    rows = np.frombuffer(data[52:], "<u2").reshape(3, 4 + 3 + 1)
    scale, lowest = rows[0, :4].view("<f4")
    assert scale == pytest.approx(16 / 65535) and lowest == pytest.approx(-16 - math.log(2 + math.exp(-16)))
    assert rows[:, 4:].tolist() == [[0, 65535, 65535, 0]] * 3


def test_equal_logits_have_a_range_of_nothing(tmp_path: Path) -> None:
    write_reference(tmp_path / "base", np.full((1, 3, 4), 2.5, np.float32))
    log_probs = LogitsReader(tmp_path / "base").log_probs(0)(slice(0, 3))
    assert log_probs == pytest.approx(np.full((3, 4), -math.log(4)))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "base"
    write_reference(path, np.zeros((1, 3, 4), np.float32))
    good = path.read_bytes()
    for data, message in (
        (b"", "no file of log-probabilities"),
        (b"GGUF" + good[4:], "no file of log-probabilities"),
        (good[:12], "bad header"),
        (good[:8] + np.array([8, -4, 1], "<i4").tobytes() + good[20:], "bad header"),
        (good[:8] + np.array([4, 4, 1], "<i4").tobytes() + good[20:], "bad header"),
        (good[:8] + np.array([8, 4, 2**30], "<i4").tobytes() + good[20:], "bytes, expected"),
        (good[:-1], f"it has {len(good) - 1} bytes, expected {len(good)}"),
        (good + b"\0", f"it has {len(good) + 1} bytes, expected {len(good)}"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message) as error:
            LogitsReader(path)
        assert str(path) in str(error.value)


# The command line

Run: TypeAlias = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and a text of 204 tokens: they are its bytes."""
    folder = tmp_path_factory.mktemp("perplexity")
    write_tiny_model(folder / "q4.gguf", quant="Q4_1")
    write_tiny_model(folder / "bos.gguf", metadata={"tokenizer.ggml.add_bos_token": True})
    write_tiny_model(folder / "wide.gguf", vocab=300)
    (folder / "text").write_text(TEXT + "\n")
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], folder: Path) -> Run:
    """Exit status, standard output and standard error of a run."""

    def run(*argv: str | Path, model: str = "q4.gguf") -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(["perplexity", "-m", str(folder / model), *map(str, argv)])
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize("model", ["q4.gguf", "bos.gguf"])
def test_perplexity_of_a_text(run: Run, folder: Path, model: str) -> None:
    status, out, err = run("-f", folder / "text", "-c", "64", "-b", "24", "--json", model=model)
    result = json.loads(out)
    assert (status, err) == (0, "")
    assert (result["chunks"], result["tokens"]) == (3, 192)
    llm = LLM(folder / model, num_blocks=64)
    nll = []
    for start in (0, 64, 128):
        ids = llm.tokenizer.encode(TEXT, add_special_tokens=False)
        # BOS comes first in the text of a model that wants it, and instead of the first token of every chunk.
        ids = ([BOS_TOKEN_ID, *ids] if model == "bos.gguf" else ids)[start : start + 64]
        logits = llm.get_logits([BOS_TOKEN_ID, *ids[1:]] if model == "bos.gguf" else ids)
        log_probs = log_softmax(logits)
        nll += [-log_probs[i, ids[i + 1]] for i in range(32, 63)]
    assert result["ppl"] == pytest.approx(math.exp(np.mean(nll)), rel=1e-12)
    assert result["ppl_error"] == pytest.approx(result["ppl"] * np.std(nll, ddof=1) / math.sqrt(93), rel=1e-9)
    assert result["tokens_per_second"] == pytest.approx(192 / result["seconds"])


def test_running_and_final_figures(run: Run, folder: Path) -> None:
    _, out, _ = run("-f", folder / "text", "-c", "64", "--chunks", "2")
    header, *rows, blank, final, speed = out.splitlines()
    assert header.split() == ["chunk", "PPL", "±"]
    assert [row.split()[0] for row in rows] == ["1", "2"]
    assert blank == "" and final.split() == ["PPL", rows[-1].split()[1], "±", rows[-1].split()[2]]
    assert speed.startswith("2 chunks, 128 tokens in ") and speed.endswith(" tokens/s")


def test_the_same_model_does_not_diverge_from_its_file(run: Run, folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    status, saved, _ = run("-f", folder / "text", "-c", "48", "--save-logits", base, "--json")
    assert status == 0
    # Tokens and size of the chunks come from the file; the text may be given to check them.
    for more in ((), ("-f", folder / "text"), ("-c", "48")):
        status, out, err = run("--kl-divergence", "--kl-divergence-base", base, "--json", *more)
        result = json.loads(out)
        assert (status, err, result["chunks"], result["tokens"]) == (0, "", 4, 192)
        assert result["ppl"] == json.loads(saved)["ppl"]
        assert abs(result["kld"]) < 1e-6 and result["rms_delta_p"] < 1e-4
        assert result["same_top"] > 0.98  # two best tokens may share a code
    assert (
        json.loads(run("--kl-divergence", "--kl-divergence-base", base, "--chunks", "1", "--json")[1])[
            "tokens"
        ]
        == 48
    )


def test_divergence_from_float32(run: Run, folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    status, out, err = run("-f", folder / "text", "-c", "64", "--kl-divergence-f32")
    assert (status, err) == (0, "")
    assert out.splitlines()[0].split() == ["chunk", "PPL", "±", "KLD", "±", "same", "top", "±"]
    for words in ("PPL of the reference", "mean KLD", "same top token", "mean Δp", "99 % of KLD", "tokens/s"):
        assert words in out
    result = json.loads(run("-f", folder / "text", "-c", "64", "--kl-divergence-f32", "--json")[1])
    assert 0 < result["kld"] < 0.1 and result["kld"] < result["kld_99"] <= result["kld_max"]
    # The same by way of a file.
    run("-f", folder / "text", "-c", "64", "--dtype", "float32", "--save-logits", base)
    other = json.loads(run("--kl-divergence", "--kl-divergence-base", base, "--json")[1])
    for name in ("ppl", "kld", "kld_max", "delta_p", "rms_delta_p"):
        assert other[name] == pytest.approx(result[name], rel=0.01, abs=1e-5)
    f32 = json.loads(
        run("-f", folder / "text", "-c", "64", "--dtype", "float32", "--kl-divergence-f32", "--json")[1]
    )
    assert f32["kld"] == 0 and f32["ppl"] == f32["base_ppl"] == pytest.approx(result["base_ppl"], rel=1e-12)


def test_full_disk_for_the_reference_is_one_line(run: Run, folder: Path) -> None:
    status, _, err = run("-f", folder / "text", "-c", "64", "--save-logits", "/dev/full", "--json")
    assert (status, err) == (1, "rvllm: error: cannot write /dev/full: No space left on device\n")


def test_mistakes_are_one_line(run: Run, folder: Path, tmp_path: Path) -> None:
    text, base = folder / "text", tmp_path / "base"
    (tmp_path / "other").write_text(TEXT[1:])
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert run("-f", text, "-c", "64", "--save-logits", base)[0] == 0
    compare = ("--kl-divergence", "--kl-divergence-base", base)
    cases: list[tuple[tuple[str | Path, ...], str]] = [
        ((), "no text: use -f FILE"),
        (("-f", "missing"), "missing: No such file"),
        (("-f", tmp_path / "latin"), "byte 3 is not UTF-8"),
        (("-f", text), "the text has 204 tokens, less than a chunk of 512"),
        (("-f", text, "-c", "7"), "a chunk must have at least 8 tokens, got 7"),
        (("-f", text, "-c", "0"), "--ctx-size must be at least 1, got 0"),
        (("-f", text, "-c", "1024"), "max_model_len 1024 is more than the model's context of 512"),
        (("-f", text, "-c", "64", "--chunks", "0"), "--chunks must be at least 1, got 0"),
        (("-f", text, "-c", "64", "--num-blocks", "2"), "64 tokens need 4 KV-cache blocks, 2 are available"),
        (("-f", text, "-c", "64", "--dtype", "int8"), "dtype must be 'auto' or 'float32', not 'int8'"),
        (("-f", text, "-c", "64", "--save-logits", tmp_path), "Is a directory"),
        (("-f", text, "--kl-divergence"), "need each other"),
        (("-f", text, "--kl-divergence-base", base), "need each other"),
        (("-f", text, *compare, "--save-logits", base), "not allowed with argument"),
        ((*compare[:2], text), "it is no file of log-probabilities"),
        ((*compare, "-c", "32"), "--ctx-size 32"),
        ((*compare, "-f", tmp_path / "other"), "its tokens are not those of"),
    ]
    for argv, words in cases:
        status, out, err = run(*argv)
        assert (status, out) == (2, ""), argv
        assert err.startswith("rvllm: error: ") and err.count("\n") == 1 and words in err
    assert "a vocabulary of 260 tokens, the model has 300" in run(*compare, model="wide.gguf")[2]


def test_the_default_model_stays_close_to_float32(smollm2_path: Path, folder: Path, run: Run) -> None:
    text = (
        "Permission is hereby granted, free of charge, to any person obtaining a copy of this software, to deal in "
        "the software without restriction, including the rights to use, copy, modify, merge, publish and distribute "
        "copies of it. The above copyright notice and this permission notice shall be included in all copies. "
    )
    (folder / "licence").write_text(text * 2)
    options = ("-f", folder / "licence", "-c", "64", "--kl-divergence-f32", "--json")
    result = json.loads(run(*options, model=str(smollm2_path))[1])
    assert 1 < result["ppl"] < 50
    assert result["kld"] < 0.05 and result["same_top"] > 0.85
