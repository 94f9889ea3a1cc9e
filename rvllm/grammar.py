"""Grammars compiled for a model's vocabulary, and where an answer stands in one (llguidance does the parsing)."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rvllm.structured_output import JSON_WHITESPACE, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from rvllm.tokenizer import Tokenizer

TOO_COMPLEX = (
    "structured output: too complex to go on: "  # how an error begins that the grammar is to blame for
)

_CACHE_SIZE = 16  # compiled grammars that are kept
_NUM_THREADS = 2
_STACK_BYTES = 64 << 20  # the compiler recurses
_MAX_LEXER_STATES = 50_000  # of 0.6 to 2 kB; a string of limited length makes 4 to 9 a character
_MAX_STEP_ITEMS = 10_000  # of the parser, in a token: 30 ms
_MIN_TOKENS = 16  # that a new table of states must last
_MAX_RENEWED_CHARACTERS = 2**16  # of a grammar that is compiled again for a new table, while a step waits
_REPLAYED_TOKENS = 256  # at a time: other threads wait meanwhile
_MAX_MESSAGE = 300


class Grammar:
    """A compiled grammar. Thread-safe.

    All its matchers share one table of lexer states, which every text that they meet makes larger.
    """

    def __init__(self, compile_matcher: Callable[[], LLMatcher], is_large: bool = False) -> None:
        """is_large: compiling takes too long for a step to wait for it. Raises what compile_matcher raises."""
        self.is_large = is_large
        self._compile = compile_matcher
        self._matcher = compile_matcher()
        self._lock = threading.Lock()  # a matcher is for one thread at a time
        self.is_full = False

    def new_matcher(self) -> LLMatcher:
        """For an answer that has not begun."""
        with self._lock:
            return self._matcher.deep_copy()

    def renewed_matcher(self) -> LLMatcher:
        """One with a table of its own, for an answer that has found its table full."""
        self.is_full = True
        return self._compile()


@dataclass
class _Compilation:
    """num_users: those that wait for the grammar, or are about to begin an answer in it."""

    future: Future[Grammar]
    num_users: int = 0

    @property
    def is_full(self) -> bool:
        future = self.future
        return (
            future.done()
            and not future.cancelled()
            and future.exception() is None
            and future.result().is_full
        )


class GrammarCompiler:
    """Compiles structured outputs for one tokenizer. Thread-safe.

    The vocabulary is handed over as bytes when the first one is compiled (0.2 s for 49,152 tokens). Control tokens
    can only come where a grammar names them, and a grammar that is complete may end with any end-of-generation token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # never held for long: event loops take it
        self._executors: tuple[ThreadPoolExecutor, ThreadPoolExecutor] | None = None
        self._compilations: OrderedDict[StructuredOutput, _Compilation] = OrderedDict()
        self._making_tokenizer = threading.Lock()
        self._ll_tokenizer: LLTokenizer | None = None

    def compile(self, output: StructuredOutput) -> GrammarState:
        """The state of an answer that has not begun. Raises ValueError naming what is wrong in the grammar."""
        with self.compiling(output) as future:
            return GrammarState(future.result(), self._tokenizer, self._pools()[1], output.after)

    @contextmanager
    def compiling(self, output: StructuredOutput) -> Iterator[Future[Grammar]]:
        """The compilation of a grammar, which all that need the same share. Within the block, compile() finds it.

        What nobody waits for any more is not begun.
        """
        key = replace(output, after=None)
        compiling = self._pools()[0]
        with self._lock:
            compilation = self._compilations.get(key)
            if compilation is None or compilation.is_full:
                is_large = _num_characters(key) > _MAX_RENEWED_CHARACTERS
                future = compiling.submit(Grammar, partial(self._matcher, key), is_large)
                compilation = _Compilation(future)
                self._compilations[key] = compilation
            self._compilations.move_to_end(key)
            compilation.num_users += 1
        try:
            yield compilation.future
        finally:
            with self._lock:
                compilation.num_users -= 1
                self._forget_unused()

    @property
    def num_compiling(self) -> int:
        """Grammars that are being compiled, or wait for it."""
        with self._lock:
            return sum(not compilation.future.done() for compilation in self._compilations.values())

    def is_known(self, output: StructuredOutput) -> bool:
        """Whether a grammar has been compiled, or is about to be."""
        with self._lock:
            return replace(output, after=None) in self._compilations

    def _forget_unused(self) -> None:
        """Under the lock: drops what has not begun, what has failed, and the least recently used of too many."""
        excess = len(self._compilations) - _CACHE_SIZE
        for key, compilation in list(self._compilations.items()):
            future = compilation.future
            if compilation.num_users:
                continue
            if future.cancel() or (future.done() and (excess > 0 or future.exception() is not None)):
                del self._compilations[key]
                excess -= 1

    def _pools(self) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
        """Of compilations and of masks: two, so that no mask waits for a slow compilation."""
        with self._lock:
            if self._executors is None:
                self._executors = _make_executor("rvllm-compile"), _make_executor("rvllm-grammar")
            return self._executors

    def _matcher(self, output: StructuredOutput) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        with self._making_tokenizer:
            if self._ll_tokenizer is None:
                self._ll_tokenizer = _make_tokenizer(self._tokenizer)
        limits = LLParserLimits(
            max_lexer_states=_MAX_LEXER_STATES, step_max_items=_MAX_STEP_ITEMS, verbose_errors=False
        )
        matcher = LLMatcher(self._ll_tokenizer, _source(output), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds a grammar without any text, and warms up every copy's lexer
        if matcher.is_error():
            raise ValueError(f"{output.kind}: {_one_line(matcher.get_error())}")
        return matcher


class GrammarState:
    """Where one answer stands in its grammar.

    Each token is sampled among allowed() and then told to advance(). prepare() begins to compute the next allowed()
    on another thread, so that it costs no time of the engine's; the calls themselves come from one thread at a time.
    """

    def __init__(
        self, grammar: Grammar, tokenizer: Tokenizer, executor: ThreadPoolExecutor, after: str | None = None
    ) -> None:
        self._grammar = grammar
        self._matcher = grammar.new_matcher()
        self._token_ids: list[int] = []  # that the matcher has taken
        self._num_tokens_at_renewal: int | None = None
        self._tokenizer = tokenizer
        self._executor = executor
        self._after = b"" if after is None else after.encode()  # empty: the constraint has begun
        self._tail = b""
        self._words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
        self._future: Future[None] | None = None
        self.error: str | None = None

    def copy(self) -> GrammarState:
        """A state of its own, for another choice of the same prompt, before the answer begins."""
        other = GrammarState(self._grammar, self._tokenizer, self._executor)
        other._after = self._after
        return other

    def prepare(self) -> None:
        """Begins to compute what allowed() returns, unless that has been done."""
        if self._future is None:
            self._future = self._executor.submit(self._compute)

    def allowed(self) -> NDArray[np.int32]:
        """Words [ceil(V / 32)] whose bit i % 32 of word i // 32 says whether token i may come next.

        All bits are 0 if the grammar has become too complex to go on; `error` then says so.
        """
        self.prepare()
        if self._future is not None:
            try:
                self._future.result()
            except Exception as error:  # it must not end the other requests of the step
                self.error = f"structured output: {type(error).__name__}: {_one_line(str(error))}"
                self._words.fill(0)
        return self._words

    def advance(self, token_id: int) -> None:
        """Takes the token that was sampled."""
        self._future = None
        if self._after:
            self._tail += self._tokenizer.token_bytes(token_id, special=True)
            if self._after in self._tail:
                self._after = self._tail = b""
            else:
                self._tail = self._tail[-len(self._after) :]
        elif self.error is None:
            self._token_ids.append(token_id)
            if not self._matcher.consume_token(token_id):
                self._executor.submit(self._recover).result()  # where stacks are large

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete, and nothing can follow."""
        return not self._after and self.error is None and self._matcher.is_stopped()

    def _compute(self) -> None:
        if self._after:
            self._words.fill(-1)
            for token_id in self._tokenizer.eog_token_ids:
                self._words[token_id // 32] &= np.int32(~np.uint32(1 << token_id % 32).view(np.int32))
            return
        if self.error is None:
            self._fill_words()
            if self._matcher.is_error():
                self._recover()
        if self.error is not None:
            self._words.fill(0)

    def _fill_words(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)

    def _recover(self) -> None:
        """Goes on with a new table of states if the old one is full; else, or if that is of no use, sets error."""
        message, count = self._matcher.get_error(), len(self._token_ids)
        self.error = TOO_COMPLEX + _one_line(message)
        is_in_vain = (
            self._num_tokens_at_renewal is not None and count < self._num_tokens_at_renewal + _MIN_TOKENS
        )
        if "too many states" not in message or is_in_vain or self._grammar.is_large:
            return
        self._matcher, self._num_tokens_at_renewal = self._grammar.renewed_matcher(), count
        for start in range(0, count, _REPLAYED_TOKENS):
            self._matcher.consume_tokens(self._token_ids[start : start + _REPLAYED_TOKENS])
        self._fill_words()
        if not self._matcher.is_error():
            self.error = None


class _Vocabulary:
    """A tokenizer in the form that LLTokenizer reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eog_token_ids, default=0)
        ids = range(tokenizer.vocab_size)
        self.special_token_ids = [i for i in ids if tokenizer.is_special(i) or i in tokenizer.eog_token_ids]
        self.tokens = [tokenizer.token_bytes(i) for i in ids]
        for i in self.special_token_ids:
            self.tokens[i] = tokenizer.token_bytes(i, special=True)
        if tokenizer.add_space_prefix:
            # The blank behind a token that stands alone is no text, so that bytes would not add up.
            for i in ids:
                if tokenizer.stands_alone(i) and not tokenizer.is_special(i):
                    self.tokens[i] = b""
        self._longest_first = sorted({len(token) for token in self.tokens}, reverse=True)
        self._ids = {self.tokens[i]: i for i in reversed(ids) if not tokenizer.is_special(i)}

    def __call__(self, text: str) -> list[int]:
        """Tokens as the model would write the text: used where a grammar leaves but one way on."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        data = text.encode()
        if b"".join(self.tokens[i] for i in ids) == data:
            return ids
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(data):
            for size in self._longest_first:
                token_id = self._ids.get(data[start : start + size]) if size else None
                if token_id is not None:
                    ids.append(token_id)
                    start += len(self.tokens[token_id])
                    break
            else:
                return ids  # the vocabulary has no such byte; what is left is chosen freely
        return ids


def _make_executor(name: str) -> ThreadPoolExecutor:
    executor = ThreadPoolExecutor(_NUM_THREADS, name)
    all_started = threading.Barrier(_NUM_THREADS)
    usual = threading.stack_size(_STACK_BYTES)  # of threads that start now
    try:
        for future in [executor.submit(all_started.wait) for _ in range(_NUM_THREADS)]:
            future.result()
    finally:
        threading.stack_size(usual)
    return executor


def _make_tokenizer(tokenizer: Tokenizer) -> LLTokenizer:
    from llguidance import LLTokenizer

    if not tokenizer.eog_token_ids:
        raise ValueError("structured output: the model has no end-of-generation token")
    return LLTokenizer(_Vocabulary(tokenizer), eos_token=sorted(tokenizer.eog_token_ids))  # type: ignore[arg-type]


def _num_characters(output: StructuredOutput) -> int:
    return len(str(output.json_schema or output.regex or output.grammar or "")) + sum(
        map(len, output.choice or ())
    )


def _source(output: StructuredOutput) -> str:
    """The grammar in llguidance's own form. Raises ValueError."""
    from llguidance import LLMatcher, regex_to_lark

    if output.json_object or output.json_schema is not None:
        schema = '{"type": "object"}' if output.json_object else str(output.json_schema)
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": JSON_WHITESPACE})
    if output.regex is not None:  # where \d is 0-9 and \w ASCII, as in a JSON schema
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(output.regex, 'dw')}/")
    if output.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in output.choice)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")  # in capitals: one lexeme
    from rvllm.gbnf import is_gbnf, to_lark

    grammar = output.grammar or ""
    return LLMatcher.grammar_from_lark(to_lark(grammar) if is_gbnf(grammar) else grammar)


def _one_line(message: str) -> str:
    """What llguidance says, without the excerpts that it adds."""
    if "NoExtensionBias" in message:
        return "no text can match"
    message = message.partition("\n<")[0].partition("\n   1 | ")[0]
    return " ".join(message.split())[:_MAX_MESSAGE]
