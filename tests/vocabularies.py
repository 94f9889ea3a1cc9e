"""Metadata of small tokenizers, for tests that need no model."""

from __future__ import annotations

import numpy as np

from rvllm.bpe_tokenizer import BYTE_CHARACTERS
from rvllm.vocabulary import TokenType

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<think>", "</think>"]


def bpe_metadata(merges: tuple[str, ...] = (), /, pre: object = "gpt-2", **keys: object) -> dict[str, object]:
    """Ids 0..255 are the bytes, then come the merged pieces, CONTROL and USER_DEFINED."""
    pieces = BYTE_CHARACTERS + [merge.replace(" ", "") for merge in merges]
    tokens = [*pieces, *CONTROL, *USER_DEFINED]
    types = [TokenType.NORMAL] * len(pieces) + [TokenType.CONTROL] * len(CONTROL)
    types += [TokenType.USER_DEFINED] * len(USER_DEFINED)
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


SPM_PIECES = {
    "\u2581": -1.0,
    "a": -2.0,
    "b": -3.0,
    "c": -4.0,
    "ab": -5.0,
    "bc": -6.0,
    "\u2581a": -7.0,
    "abc": -8.0,
}


def spm_metadata(byte_tokens: bool = True, **keys: object) -> dict[str, object]:
    """<unk>, <s>, </s>, <mark> (user-defined), the 256 byte tokens, then SPM_PIECES."""
    rows = [
        ("<unk>", 0.0, TokenType.UNKNOWN),
        ("<s>", 0.0, TokenType.CONTROL),
        ("</s>", 0.0, TokenType.CONTROL),
    ]
    rows.append(("<mark>", 0.0, TokenType.USER_DEFINED))
    if byte_tokens:
        rows += [(f"<0x{byte:02X}>", 0.0, TokenType.BYTE) for byte in range(256)]
    rows += [(piece, score, TokenType.NORMAL) for piece, score in SPM_PIECES.items()]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [row[0] for row in rows],
        "tokenizer.ggml.scores": np.array([row[1] for row in rows], np.float32),
        "tokenizer.ggml.token_type": np.array([row[2] for row in rows], np.int32),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
