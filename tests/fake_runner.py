"""A runner without a model: its next token is a hash of all tokens before it, read through the block table.

Any lost, doubled, misplaced or foreign token changes the hash, and most are refused on the spot.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from rvllm.block_manager import BlockTables, KVGroup
from rvllm.request import Request, SampledToken
from rvllm.sampling_params import SamplingParams


class FakeSampler:
    """Chooses by hash; like the native one it counts its own tokens, and a greedy one ignores the seed."""

    def __init__(
        self, params: SamplingParams, stop_token_ids: Iterable[int], seed: int, index: int, vocab_size: int
    ) -> None:
        self.params = params
        self.stream = (0, 0) if params.is_greedy else (seed, index)
        self.banned = frozenset(stop_token_ids)
        self.vocab_size = vocab_size
        self.num_sampled = 0

    def sample(self, token_ids: Sequence[int]) -> SampledToken:
        for attempt in range(1000):
            key = array("q", [*token_ids, self.num_sampled, attempt]).tobytes() + repr(self.stream).encode()
            digest = hashlib.blake2b(key, digest_size=8).digest()
            token_id = int.from_bytes(digest, "little") % self.vocab_size
            bias = self.params.logit_bias or {}
            token_id = next((i for i, b in bias.items() if b == 100), token_id)
            if self.num_sampled >= self.params.min_tokens or token_id not in self.banned:
                break
        self.num_sampled += 1
        if self.params.logprobs is None:
            return SampledToken(token_id)
        others = [(token_id + i) % self.vocab_size for i in range(1, self.params.logprobs + 1)]
        return SampledToken(
            token_id, {t: (-0.25 * (k + 1), k + 1) for k, t in enumerate([token_id, *others])}
        )


class FakeRunner:
    """Keeps (token, position) in every slot of a toy KV cache for each group of layers, as a real one keeps K and V."""

    def __init__(
        self, groups: int | Sequence[KVGroup] = 64, block_size: int = 4, vocab_size: int = 64
    ) -> None:
        self.kv_groups = [KVGroup(groups)] if isinstance(groups, int) else list(groups)
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.slots: list[list[tuple[int, int] | None]] = [
            [None] * (group.num_blocks * block_size) for group in self.kv_groups
        ]
        self.steps: list[list[tuple[str, int, int]]] = []  # (request_id, index, num_tokens) of each step
        self.fail_at: int | None = None

    def make_sampler(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_token_ids: Iterable[int],
        seed: int,
        index: int,
    ) -> FakeSampler:
        return FakeSampler(params, stop_token_ids, seed, index, self.vocab_size)

    def run(self, scheduled: list[tuple[Request, int]]) -> list[SampledToken]:
        self.steps.append([(request.request_id, request.index, count) for request, count in scheduled])
        written: set[tuple[int, int]] = set()
        for request, count in scheduled:
            start = request.num_computed_tokens
            assert 0 < count <= request.num_tokens - start
            for g, table in enumerate(request.block_tables):
                for position in range(start, start + count):
                    slot = self.slot(table, position)
                    assert (g, slot) not in written, f"slot {slot} written twice in a step"
                    written.add((g, slot))
                    self.slots[g][slot] = (request.token_ids[position], position)
        if self.fail_at == len(self.steps) - 1:
            raise RuntimeError("the device is gone")
        sampled = []
        for request, count in scheduled:
            start, stop = request.num_computed_tokens, request.num_computed_tokens + count
            expected = [(token, position) for position, token in enumerate(request.token_ids[:stop])]
            for (_, window), slots, table in zip(
                self.kv_groups, self.slots, request.block_tables, strict=True
            ):
                seen = range(max(0, start + 1 - window) if window else 0, stop)
                context = [slots[self.slot(table, position)] for position in seen]
                assert context == expected[seen.start :], f"{request!r} reads {context}, needs {expected}"
            if stop == request.num_tokens:
                assert isinstance(request.sampler, FakeSampler)
                sampled.append(request.sampler.sample(request.token_ids))
        return sampled

    def slot(self, table: Sequence[int], position: int) -> int:
        block = table[position // self.block_size]
        assert block >= 0, f"the block of position {position} is gone"
        return block * self.block_size + position % self.block_size

    def get_logits(
        self, token_ids: Sequence[int], start: int, block_tables: BlockTables, first: int
    ) -> np.ndarray:
        stop = start + len(token_ids)
        for (_, window), table in zip(self.kv_groups, block_tables, strict=True):
            for position in range(max(0, start + 1 - window) if window else 0, stop):
                self.slot(table, position)
        return np.zeros((stop - max(start, min(first, stop)), self.vocab_size), np.float32)


def tokens_alone(
    prompt: Sequence[int],
    num_tokens: int,
    params: SamplingParams | None = None,
    stop_token_ids: Iterable[int] = (),
    seed: int = 0,
    index: int = 0,
    vocab_size: int = 64,
) -> list[int]:
    """The tokens that a request gets when nothing else runs: the truth that every test compares with."""
    banned = frozenset(stop_token_ids)
    sampler = FakeSampler(params or SamplingParams(temperature=0), banned, seed, index, vocab_size)
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(sampler.sample(token_ids).token_id)
        if token_ids[-1] in banned:
            break
    return token_ids[len(prompt) :]
