"""Make tests/data/llama_cpp_ids.json: what llama.cpp tokenizes the tests' texts to, with the tests' vocabularies.

Needs llama-cpp-python. With --train the vocabularies are trained anew first, by the library `tokenizers`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import tokenizers
from gguf_writer import write_gguf
from tokenizers import models, normalizers, pre_tokenizers, trainers
from trained_vocabularies import (
    DATA,
    EOG_CANDIDATES,
    SPM_VARIANTS,
    TEXTS,
    control_metadata,
    trained_bpe_metadata,
    trained_spm_metadata,
)
from vocabularies import CONTROL, USER_DEFINED

from rvllm.bpe_tokenizer import BYTE_CHARACTERS
from rvllm.pre_tokenizers import PRE_TOKENIZERS

NUM_MERGES = 1500
NUM_PIECES = 700
CORPUS = [
    text for text in TEXTS if not any(token in text for token in (*CONTROL, *USER_DEFINED, "<s>", "<0x0A>"))
]


def train_bpe() -> None:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=256 + NUM_MERGES, initial_alphabet=BYTE_CHARACTERS, show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    ids = {piece: id for id, piece in enumerate(BYTE_CHARACTERS)}
    lines = []
    for left, right in json.loads(library.to_str())["model"]["merges"]:
        lines.append(f"{ids[left]} {ids[right]}\n")
        ids.setdefault(left + right, len(ids))
    (DATA / "bpe_merges.txt").write_text("".join(lines), "ascii")


def train_spm() -> None:
    library = tokenizers.Tokenizer(models.BPE())
    library.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=NUM_PIECES, limit_alphabet=90, show_progress=False)
    library.train_from_iterator(CORPUS, trainer)
    model = json.loads(library.to_str())["model"]
    merged = dict.fromkeys(left + right for left, right in model["merges"])
    # As SentencePiece orders them: pieces of more than one character first, then the characters.
    characters = [piece for piece in model["vocab"] if len(piece) == 1]
    text = json.dumps([*merged, *characters], indent=0)
    (DATA / "spm_pieces.json").write_text(text + "\n", "ascii")


class LlamaCpp:
    """llama.cpp's vocabulary of some metadata."""

    def __init__(self, metadata: dict[str, object]) -> None:
        from llama_cpp import Llama

        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            given = {key: value for key, value in metadata.items() if value is not None}
            write_gguf(file.name, {"general.architecture": "llama", **given})
            self._model = Llama(file.name, vocab_only=True, verbose=False)

    def ids(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = self._model.tokenize(text.encode(), add_bos=True, special=parse_special)
        return ids

    def all_ids(self, parse_special: bool = False) -> list[list[int]]:
        return [self.ids(text, parse_special) for text in TEXTS]

    def eog(self, tokens: Iterable[str]) -> list[str]:
        from llama_cpp import llama_vocab_is_eog

        vocab = self._model._model.vocab
        return [token for token in tokens if llama_vocab_is_eog(vocab, self.ids(token, True)[-1])]


def bpe_ids() -> list[dict[str, str]]:
    """For each text the different answers: ids -> the names of `tokenizer.ggml.pre` that give them."""
    rows: list[dict[str, Any]] = [{} for _ in TEXTS]
    for pre in [*sorted(PRE_TOKENIZERS), "gpt-2 with special tokens"]:
        name, _, special = pre.partition(" ")
        for row, ids in zip(rows, LlamaCpp(trained_bpe_metadata(name)).all_ids(bool(special)), strict=True):
            row.setdefault(" ".join(map(str, ids)), []).append(pre)
    return [{ids: ", ".join(names) for ids, names in row.items()} for row in rows]


def spm_ids() -> dict[str, list[str]]:
    return {
        name: [" ".join(map(str, ids)) for ids in LlamaCpp(trained_spm_metadata(**keys)).all_ids(special)]
        for name, (keys, special) in SPM_VARIANTS.items()
    }


def end_tokens() -> dict[str, str]:
    """For each entry of EOG_CANDIDATES, control tokens all, those that end a generation."""
    return {
        candidates: " ".join(LlamaCpp(control_metadata(candidates.split())).eog(candidates.split()))
        for candidates in EOG_CANDIDATES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", action="store_true", help="train the vocabularies first")
    if parser.parse_args().train:
        train_bpe()
        train_spm()
    ids = {"bpe": bpe_ids(), "spm": spm_ids(), "end tokens": end_tokens()}
    (DATA / "llama_cpp_ids.json").write_text(json.dumps(ids, indent=0) + "\n", "ascii")


if __name__ == "__main__":
    main()
