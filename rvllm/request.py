"""Request, the unit the scheduler works on, and the outputs a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from rvllm.block_manager import BlockTables, Prefix
from rvllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rvllm._core import Pooler
    from rvllm.grammar import GrammarState


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class SampledToken(NamedTuple):
    """What the runner returns for a request that samples.

    logprobs: token id -> (natural logprob, rank from 1) for the sampled token and the asked-for best ones;
    None when the request asked for none. error: why there is no token for this request; token_id is then -1, as it is
    beside the embedding of a request that samples nothing.
    """

    token_id: int
    logprobs: dict[int, tuple[float, int]] | None = None
    error: str | None = None
    embedding: list[float] | None = None


class Request:
    """One generation, one choice of one prompt, or an embedding. Hashed by identity.

    token_ids: prompt + output, one list that grows. K/V of token_ids[:num_computed_tokens] is stored in the
    blocks of block_tables, one table a group of layers; preemption sets num_computed_tokens back to 0 and drops them.
    max_num_tokens: prompt + output length at which the request ends with "length".
    grammar: where the answer stands in its structured output; it takes each token once, when that is sampled.
    priority: the lowest is served first; of equals, the one that was added first (key). prefix: what is known of
    token_ids in the prefix cache. sampler, pooler: native state; a request has one of them.
    prompt_logprobs: grows with the prompt, if asked for: an entry for each token, None for the first.
    error: what has gone wrong with them. start_time: time.monotonic() when it began to run, None before.
    """

    __slots__ = (
        "arrival_step",
        "block_tables",
        "error",
        "finish_reason",
        "grammar",
        "index",
        "key",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "params",
        "pooler",
        "prefix",
        "priority",
        "prompt_logprobs",
        "request_id",
        "sampler",
        "start_time",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        max_num_tokens: int,
        arrival_step: int = 0,
        index: int = 0,
        sampler: object = None,
        priority: float = 0.0,
        pooler: Pooler | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.index = index
        self.arrival_step = arrival_step
        self.priority = priority
        self.key = (priority, 0)
        self.prefix = Prefix()
        self.max_num_tokens = max_num_tokens
        self.sampler = sampler
        self.pooler = pooler
        self.prompt_logprobs: list[dict[int, tuple[float, int]] | None] | None = None
        if params.prompt_logprobs is not None and index == 0:  # the other choices have the same prompt
            self.prompt_logprobs = [None]
        self.error: str | None = None
        self.grammar = grammar
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.start_time: float | None = None
        self.block_tables: BlockTables = []
        self.status = RequestStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, index={self.index}, {self.status.name}, "
            f"prompt={self.num_prompt_tokens}, output={self.num_output_tokens}, "
            f"computed={self.num_computed_tokens})"
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether K/V suffices: not where something is wanted of the hidden states of the prompt."""
        is_scored = self.prompt_logprobs is None or len(self.prompt_logprobs) == self.num_prompt_tokens
        return self.params.cache_prompt and is_scored and self.pooler is None

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED


@dataclass(frozen=True, slots=True)
class Logprob:
    """logprob: natural logarithm of the model's own distribution. rank: 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One choice. token_ids and logprobs have one entry a token, also for the token that ended the text.

    finish_reason: "stop", "length", "abort", "timeout", "error", or None while it runs. stop_reason: the stop
    string or the entry of stop_token_ids that ended it; None for a token of the model's own that ends
    generation. error: what went wrong, where finish_reason is "error". embedding: of length 1, hidden_size numbers,
    where that is what was asked for. text_lengths: characters of text that became certain with each token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    embedding: list[float] | None = None
    text_lengths: list[int] = field(default_factory=list, repr=False)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def add(self, new: CompletionOutput) -> None:
        """Appends what is new of the same choice."""
        self.text += new.text
        self.token_ids += new.token_ids
        self.text_lengths += new.text_lengths
        if new.logprobs is not None and new.cumulative_logprob is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += new.logprobs
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + new.cumulative_logprob
        self.finish_reason = new.finish_reason
        self.stop_reason = new.stop_reason
        self.error = new.error
        self.embedding = new.embedding


@dataclass(slots=True)
class RequestOutput:
    """What a request has produced: everything (LLM.generate), or what is new (LLMEngine.step, LLM.stream).

    prompt: None where the prompt was given as token ids.
    num_cached_tokens: prompt tokens whose K/V came from the prefix cache.
    prompt_logprobs: with the first output of a request that asked for them: an entry for each token of the prompt,
    None for the first.
    finished: no choice of this request will produce more.
    start_time: time.monotonic() when the first choice began to run; until then the request had waited.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    start_time: float | None = None

    def add(self, new: RequestOutput) -> None:
        """Appends what is new of the same request. Takes over what it has no choice of that index for."""
        mine = {completion.index: completion for completion in self.outputs}
        for completion in new.outputs:
            if completion.index in mine:
                mine[completion.index].add(completion)
            else:
                self.outputs.append(completion)
        self.num_cached_tokens = new.num_cached_tokens
        self.prompt_logprobs = self.prompt_logprobs or new.prompt_logprobs
        self.start_time = new.start_time
        self.finished = new.finished
