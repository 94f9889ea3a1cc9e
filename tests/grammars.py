"""A grammar compiler on the byte-level vocabulary of the tiny models, and walks through what it compiles."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
from tiny_gguf import CONTROL_TOKEN, CONTROL_TOKENS, NORMAL_TOKEN, byte_level_tokenizer

from rvllm.grammar import GrammarCompiler, GrammarState
from rvllm.structured_output import StructuredOutput
from rvllm.tokenizer import Tokenizer


@cache
def tokenizer() -> Tokenizer:
    metadata = byte_level_tokenizer()
    del metadata["tokenizer.ggml.token_type"]
    types = [NORMAL_TOKEN] * 256 + [CONTROL_TOKEN] * len(CONTROL_TOKENS)
    return Tokenizer.from_gguf(metadata | {"tokenizer.ggml.token_type": np.array(types, np.int32)})


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer())


def allowed_ids(state: GrammarState) -> list[int]:
    bits = np.unpackbits(state.allowed().view(np.uint8), bitorder="little")
    ids: list[int] = np.flatnonzero(bits).tolist()
    return ids


def matches(output: StructuredOutput, text: str) -> bool:
    """Whether the text is an answer, as a whole."""
    state = compiler().compile(output)
    for byte in text.encode():
        if byte not in allowed_ids(state):
            return False
        state.advance(byte)
    return state.is_finished or not tokenizer().eog_token_ids.isdisjoint(allowed_ids(state))


def walk(state: GrammarState, seed: int, max_tokens: int = 2000) -> str | None:
    """A random answer; None if it has no end within max_tokens."""
    rng, data = random.Random(seed), bytearray()
    for _ in range(max_tokens):
        if state.is_finished:
            break
        if not (ids := allowed_ids(state)):
            break
        token_id = rng.choice(ids)
        state.advance(token_id)
        data += tokenizer().token_bytes(token_id)
    return data.decode() if state.is_finished else None
