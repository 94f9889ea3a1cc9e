"""Metadata of vocabularies trained on tests/data/tokenizer_texts.json, whose ids llama.cpp has given as well.

They were trained on whole texts, without cutting these into words: so pieces reach over every border that a
pre-tokenizer may draw, and one drawn elsewhere gives other ids.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from vocabularies import CONTROL, USER_DEFINED

from rvllm.bpe_tokenizer import BYTE_CHARACTERS
from rvllm.vocabulary import TokenType

DATA = Path(__file__).parent / "data"
TEXTS: list[str] = json.loads((DATA / "tokenizer_texts.json").read_text("utf-8"))
WORDS = ("camelCase", "SCREAMING", "\u0120kebab", "Hello", "\u0120world", "123")  # that no merge makes


def merges() -> list[tuple[str, str]]:
    """Of byte-level BPE. The file names pieces by id: the bytes, then what the merges made, each once."""
    pieces = list(BYTE_CHARACTERS)
    known = set(pieces)
    pairs = []
    for line in (DATA / "bpe_merges.txt").read_text("ascii").splitlines():
        left, right = (pieces[int(id)] for id in line.split())
        pairs.append((left, right))
        if left + right not in known:
            known.add(left + right)
            pieces.append(left + right)
    return pairs


def trained_bpe_metadata(pre: str | None, **keys: object) -> dict[str, object]:
    """Ids: the bytes, the merged pieces, WORDS, CONTROL, USER_DEFINED."""
    pairs = merges()
    normal = list(dict.fromkeys([*BYTE_CHARACTERS, *(left + right for left, right in pairs), *WORDS]))
    tokens = [*normal, *CONTROL, *USER_DEFINED]
    types = [TokenType.NORMAL] * len(normal) + [TokenType.CONTROL] * len(CONTROL)
    types += [TokenType.USER_DEFINED] * len(USER_DEFINED)
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs],
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def trained_spm_metadata(byte_tokens: bool = True, **keys: object) -> dict[str, object]:
    """<unk>, <s>, </s>, CONTROL, USER_DEFINED, perhaps the byte tokens, then pieces that score by their rank."""
    rows = [("<unk>", TokenType.UNKNOWN)]
    rows += [(text, TokenType.CONTROL) for text in ("<s>", "</s>", *CONTROL)]
    rows += [(text, TokenType.USER_DEFINED) for text in USER_DEFINED]
    if byte_tokens:
        rows += [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
    first = len(rows)
    pieces: list[str] = json.loads((DATA / "spm_pieces.json").read_text("utf-8"))
    rows += [(piece, TokenType.NORMAL) for piece in pieces]
    if not byte_tokens:
        characters = sorted({c for text in TEXTS for c in text.replace(" ", "\u2581")} - set(pieces))
        rows += [(c, TokenType.NORMAL) for c in characters]
    scores = [0.0] * first + [-float(rank) for rank in range(len(rows) - first)]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [row[0] for row in rows],
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array([row[1] for row in rows], np.int32),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return metadata | {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def control_metadata(tokens: list[str]) -> dict[str, object]:
    """A vocabulary of the bytes and these control tokens."""
    types = [TokenType.NORMAL] * 256 + [TokenType.CONTROL] * len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*BYTE_CHARACTERS, *tokens],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }


# Variants of the SentencePiece vocabulary: keys of the file, and whether special tokens are parsed.
SPM_VARIANTS: dict[str, tuple[dict[str, object], bool]] = {
    "plain": ({}, False),
    "parse special": ({}, True),
    "no space prefix": ({"add_space_prefix": False}, False),
    "no space prefix, parse special": ({"add_space_prefix": False}, True),
    "no BOS, EOS": ({"add_bos_token": False, "add_eos_token": True}, False),
    "remove extra whitespaces": ({"remove_extra_whitespaces": True}, False),
    "no byte tokens": ({"byte_tokens": False}, False),
    "Phi-3": ({"general.architecture": "phi3", "general.name": "Phi-3"}, True),
}
EOG_CANDIDATES = [
    *("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>"),
    *("<|call|>", "<end_of_turn>", "<eos>", "</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>"),
    *("<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|fim_pad|>", "<|repo_name|>"),
    *("<|file_sep|>", "<|flush|>", "<|calls|>", "[e~[", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>"),
    *("<fim-repo>", "<REPO>", "<reponame>", "<|fim_prefix|>", "<|start|>", "<|channel|>", "<s>", "<bos>"),
    *("[|endofturn|]", "<|END_OF_TURN_TOKEN|>", "<|tool_call|>", "<unused0>", "<|eot|>", "<|reserved_0|>"),
    "<|return|> <|call|> <|end|>",  # of one vocabulary
    "<|flush|> <|calls|> <|end|>",
]  # fmt: skip
