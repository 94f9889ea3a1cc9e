"""The native step refuses what would make it read or write elsewhere: one line for each, and the model goes on."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import VOCAB, write_tiny_model

from rvllm import _core
from rvllm._core import ops
from rvllm.config import EngineConfig, ModelConfig
from rvllm.gguf_file import GGUFFile
from rvllm.model_runner import ModelRunner

INT_MAX = 2**31 - 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> _core.Model:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_model(path)
    return runner(path)._model


def runner(path: Path) -> ModelRunner:
    gguf = GGUFFile(path)
    return ModelRunner(gguf, ModelConfig.from_gguf(gguf), EngineConfig(num_blocks=8))


def arrays(**changes: Any) -> _core.StepArrays:
    """Two requests: three first tokens, and one after sixteen others."""
    good = {
        "input_ids": [1, 2, 3, 4],
        "positions": [0, 1, 2, 16],
        "slot_mapping": [[32, 33, 34, 80]],
        "query_start_loc": [0, 3, 4],
        "context_lens": [3, 17],
        "block_tables": [[[2, 0], [4, 5]]],
        "logits_indices": [2, 3],
    }
    return _core.StepArrays(
        **{name: np.array(value, np.int32) for name, value in {**good, **changes}.items()}
    )


def sampler(vocab_size: int = VOCAB) -> _core.Sampler:
    return _core.Sampler(vocab_size=vocab_size, temperature=0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": [1, 2, 3, VOCAB]}, f"token id {VOCAB} is outside the vocabulary"),
        ({"input_ids": [1, 2, 3]}, "do not agree in length"),
        ({"input_ids": [], "positions": [], "slot_mapping": [[]]}, "the batch is empty"),
        ({"positions": [0, 1, 1, 16]}, "position 1 where 2 would end a context of 3"),
        ({"positions": [1, 0, 2, 16]}, "position 1 where 0 would end a context of 3"),
        ({"positions": [0, 1, 2, 17]}, "position 17 where 16 would end a context of 17"),
        ({"slot_mapping": [[32, 33, 34, 128]]}, "slot 128 is outside the 8 blocks of 16"),
        ({"slot_mapping": [[32, 33, -1, 80]]}, "slot -1 is outside"),
        ({"query_start_loc": [0, 3, 3]}, "query_start_loc does not span the 4 tokens"),
        ({"query_start_loc": [0, 0, 4]}, "request 0 of the batch has tokens 0 to 0 of 4"),
        ({"query_start_loc": [0, INT_MAX, 4]}, f"request 0 of the batch has tokens 0 to {INT_MAX} of 4"),
        ({"query_start_loc": [0, -7, 4]}, "request 0 of the batch has tokens 0 to -7 of 4"),
        (
            {"context_lens": [3, 33], "positions": [0, 1, 2, 32]},
            "a context of 33 tokens needs 3 blocks, its table has 2",
        ),
        ({"context_lens": [3, INT_MAX]}, f"position 16 where {INT_MAX - 1} would end a context of {INT_MAX}"),
        ({"context_lens": [3, -INT_MAX]}, f"1 tokens do not fit a context of -{INT_MAX}"),
        ({"context_lens": [2, 17]}, "3 tokens do not fit a context of 2"),
        ({"block_tables": [[[2, 0], [4, 8]]]}, "block 8 is outside the pool of 8"),
        ({"block_tables": [[[2, 0], [-4, 5]]]}, "block -4 is outside the pool of 8"),
        ({"block_tables": [[[2, 0], [-1, 5]]]}, "block -1 is outside the pool of 8"),
        ({"block_tables": [2, 4]}, "block_tables has 1 dimensions, expected 3"),
        ({"slot_mapping": [2, 4]}, "slot_mapping has 1 dimensions, expected 2"),
        (
            {"slot_mapping": [[32, 33, 34, 80]] * 2, "block_tables": [[[2, 0], [4, 5]]] * 2},
            "block tables for 2 groups of layers, the model has 1",
        ),
        ({"logits_indices": [2, 4]}, "logits index 4 is outside the 4 tokens"),
    ],
    ids=str,
)
def test_bad_arrays_are_refused(model: _core.Model, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        model.step(arrays(**changes), [sampler(), sampler()])
    assert "\n" not in str(error.value)
    assert [token >= 0 for token, _, _ in model.step(arrays(), [sampler(), sampler()])] == [True, True]


def test_blocks_before_a_window_may_be_gone(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny.gguf", "gemma3", layers=6, sliding_window=20)
    model = runner(tmp_path / "tiny.gguf")._model
    assert model.windows == [0, 20]

    def logits(full: list[int], windowed: list[int]) -> Any:
        """Of the tokens at positions 51 and 52: the first one sees those from 32 on, which are in block 2."""
        return model.logits(
            _core.StepArrays(
                np.array([1, 2], np.int32),
                np.array([51, 52], np.int32),
                np.array([[51, 52], [115, 116]], np.int32),
                np.array([0, 2], np.int32),
                np.array([53], np.int32),
                np.array([[full], [windowed]], np.int32),
                np.array([0, 1], np.int32),
            )
        )

    expected = logits([0, 1, 2, 3], [4, 5, 6, 7])
    np.testing.assert_array_equal(logits([0, 1, 2, 3], [-1, -1, 6, 7]), expected)
    for full, windowed, block in (
        ([-1, 1, 2, 3], [4, 5, 6, 7], -1),
        ([0, 1, 2, 3], [-1, -1, -1, 7], -1),
        ([0, 1, 2, 3], [-2, -1, 6, 7], -2),
        ([0, 1, 2, 3], [8, -1, 6, 7], 8),
    ):
        with pytest.raises(ValueError, match=f"block {block} is outside the pool of 8"):
            logits(full, windowed)


@pytest.mark.parametrize(
    ("readers", "message"),
    [
        ([sampler()], "1 readers for 2 rows of logits"),
        ([sampler(), None], "row 1 has no sampler"),
        (
            [sampler(), sampler(VOCAB + 1)],
            f"a sampler for {VOCAB + 1} tokens does not fit the vocabulary of {VOCAB}",
        ),
        ([sampler(), (VOCAB, 0)], f"token id {VOCAB} with 0 alternatives is outside the vocabulary"),
        ([(-1, 0), sampler()], "token id -1 with 0 alternatives"),
        ([(1, -1), sampler()], "token id 1 with -1 alternatives"),
    ],
    ids=str,
)
def test_readers_that_do_not_fit_are_refused(model: _core.Model, readers: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.step(arrays(), readers)


@pytest.mark.parametrize(("begin", "end", "hidden_size"), [(0, 5, 64), (-1, 2, 64), (2, 2, 64), (0, 3, 63)])
def test_poolers_that_do_not_fit_are_refused(
    model: _core.Model, begin: int, end: int, hidden_size: int
) -> None:
    with pytest.raises(ValueError, match=f"a pooler does not fit tokens {begin} to {end} of 4"):
        model.step(arrays(logits_indices=[]), [], [(_core.Pooler(1, hidden_size, 3), begin, end)])
    with pytest.raises(ValueError, match="a pooler does not fit"):
        model.step(arrays(logits_indices=[]), [], [(None, 0, 3)])  # type: ignore[list-item]


def test_a_second_thread_is_refused_and_not_kept_waiting(model: _core.Model) -> None:
    """The two meet sooner or later; neither hangs, and the one that is refused says why."""
    errors: list[str] = []
    deadline = time.monotonic() + 60

    def work() -> None:
        while not errors and time.monotonic() < deadline:
            try:
                model.logits(arrays())
            except RuntimeError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(errors) == {"the model is in use by another thread"}
    assert model.logits(arrays()).shape == (2, VOCAB)


def test_a_sampler_takes_exactly_its_vocabulary() -> None:
    for size in (0, VOCAB - 1, VOCAB + 1):
        with pytest.raises(ValueError, match=f"{size} logits for a vocabulary of {VOCAB}"):
            sampler().sample(np.zeros(size, np.float32))


@pytest.mark.parametrize("token_id", [-1, 3, INT_MAX])
def test_an_embedding_has_rows_for_its_ids_only(token_id: int) -> None:
    weight = np.zeros((3, 32), np.float32).tobytes()
    with pytest.raises(ValueError, match=f"id {token_id} is outside the 3 rows"):
        ops.embedding(_core.CpuBackend(1), 0, 3, 32, weight, np.array([0, token_id]))
