"""Grammars compiled for a model's vocabulary, and where an answer stands in one (llguidance does the parsing)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rvllm.free_text import FreeText, overrun_words
from rvllm.grammar_source import (
    MAX_LEXER_STATES,
    STACK_BYTES,
    GrammarTrial,
    TooSlowError,
    compile_source,
    one_line,
    source,
)
from rvllm.structured_output import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from rvllm.tokenizer import Tokenizer

# How an error begins that the grammar is to blame for.
TOO_COMPLEX = "structured output: too complex to go on: "

_CACHE_SIZE = 16  # compiled grammars that are kept
_NUM_THREADS = 2  # that compute masks
_TRIAL_SECONDS = (0.3, 5.0)  # of processor time: at once, then behind all that need more than the first
_STATES_PER_BYTE = 4  # of an answer, that a renewed table has room for
_MAX_RENEWED_STATES = 1_000_000
_MIN_TOKENS = 16  # that a new table of states must last
_MAX_RENEWED_CHARACTERS = 2**16  # of a grammar that is compiled again for a new table, while a step waits
_REPLAYED_TOKENS = 256  # at a time: other threads wait meanwhile


class Grammar:
    """A compiled grammar. Thread-safe.

    All its matchers share one table of lexer states, which every text that they meet makes larger.
    """

    def __init__(self, compile_matcher: Callable[[int], LLMatcher], is_large: bool = False) -> None:
        """compile_matcher: of so many states at most. is_large: it takes too long for a step to wait for it.

        Raises what compile_matcher raises.
        """
        self.is_large = is_large
        self._compile = compile_matcher
        self._matcher = compile_matcher(MAX_LEXER_STATES)
        self._lock = threading.Lock()  # a matcher is for one thread at a time
        self.is_full = False

    def new_matcher(self) -> LLMatcher:
        """For an answer that has not begun."""
        with self._lock:
            return self._matcher.deep_copy()

    def renewed_matcher(self, num_bytes: int) -> LLMatcher:
        """One with a table of its own, for an answer of num_bytes so far that has found its table full."""
        self.is_full = True
        return self._compile(min(MAX_LEXER_STATES + _STATES_PER_BYTE * num_bytes, _MAX_RENEWED_STATES))


class _Executors:
    """Threads for each lane of compilations, and for masks, so that no mask waits for a slow compilation."""

    def __init__(self) -> None:
        self.compiling = [_make_executor(f"rvllm-compile-{i}", 1) for i in range(len(_TRIAL_SECONDS))]
        self.masks = _make_executor("rvllm-grammar", _NUM_THREADS)


@dataclass
class _Compilation:
    """num_users: those that wait for the grammar, or are about to begin an answer in it."""

    future: Future[Grammar] = field(default_factory=Future)
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
        self._executors: _Executors | None = None
        self._trials: list[GrammarTrial] = []
        self._compilations: OrderedDict[StructuredOutput, _Compilation] = OrderedDict()
        self._making_tokenizer = threading.Lock()
        self._ll_tokenizer: LLTokenizer | None = None
        self._overrun_words = lru_cache(_CACHE_SIZE)(partial(overrun_words, tokenizer))

    def isolate(self) -> None:
        """From now on grammars are on trial first, in a process of their own: a hostile one delays few others."""
        self._trials = [GrammarTrial(seconds) for seconds in _TRIAL_SECONDS]

    def close(self) -> None:
        """Ends the processes."""
        for trial in self._trials:
            trial.close()

    def compile(self, output: StructuredOutput) -> GrammarState:
        """The state of an answer that has not begun. Raises ValueError naming what is wrong in the grammar."""
        with self.compiling(output) as future:
            return GrammarState(
                future.result(), self._tokenizer, self._pools().masks, self._free_text(output)
            )

    def _free_text(self, output: StructuredOutput) -> FreeText | None:
        if not output.after_texts:
            return None
        overruns = [self._overrun_words(text) for text in output.after_texts]
        return FreeText(output, sorted(self._tokenizer.eog_token_ids), overruns)

    @contextmanager
    def compiling(self, output: StructuredOutput) -> Iterator[Future[Grammar]]:
        """The compilation of a grammar, which all that need the same share. Within the block, compile() finds it.

        What nobody waits for any more is not begun.
        """
        key = output.constraint
        executors = self._pools()
        with self._lock:
            compilation = self._compilations.get(key)
            if compilation is None or compilation.is_full:
                compilation = self._compilations[key] = _Compilation()
                executors.compiling[0].submit(self._compile, key, compilation)
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
            return output.constraint in self._compilations

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

    def _compile(self, output: StructuredOutput, compilation: _Compilation, lane: int = 0) -> None:
        """On the lane's thread. What needs more time than this lane gives goes on behind all others that did."""
        future = compilation.future
        if lane == 0 and not future.set_running_or_notify_cancel():
            return
        if lane > 0 and self._is_abandoned(output, compilation):
            future.set_exception(ValueError("nobody waits for the grammar any more"))
            return
        try:
            text = self._trials[lane].source(output) if self._trials else source(output)
            is_large = _num_characters(output) > _MAX_RENEWED_CHARACTERS
            grammar = Grammar(partial(self._matcher, output.kind, text), is_large)
        except BaseException as error:
            if isinstance(error, TooSlowError) and lane + 1 < len(self._trials):
                self._pools().compiling[lane + 1].submit(self._compile, output, compilation, lane + 1)
            else:
                future.set_exception(error)
        else:
            future.set_result(grammar)

    def _is_abandoned(self, output: StructuredOutput, compilation: _Compilation) -> bool:
        """Whether nobody waits for it; then it is forgotten."""
        with self._lock:
            if compilation.num_users == 0 and self._compilations.get(output) is compilation:
                del self._compilations[output]
            return compilation.num_users == 0

    def _pools(self) -> _Executors:
        with self._lock:
            if self._executors is None:
                self._executors = _Executors()
            return self._executors

    def _matcher(self, kind: str, text: str, max_lexer_states: int) -> LLMatcher:
        with self._making_tokenizer:
            if self._ll_tokenizer is None:
                if not self._tokenizer.eog_token_ids:
                    raise ValueError(f"{kind}: the model has no end-of-generation token")
                self._ll_tokenizer = _make_tokenizer(self._tokenizer)
        return compile_source(self._ll_tokenizer, kind, text, max_lexer_states)


class GrammarState:
    """Where one answer stands in its grammar.

    Each token is sampled among allowed() and then told to advance(). prepare() begins to compute the next allowed()
    on another thread, so that it costs no time of the engine's; the calls themselves come from one thread at a time.
    """

    def __init__(
        self,
        grammar: Grammar,
        tokenizer: Tokenizer,
        executor: ThreadPoolExecutor,
        free_text: FreeText | None = None,
    ) -> None:
        """free_text: where the constraint does not begin at once."""
        self._grammar = grammar
        self._matcher = grammar.new_matcher()
        self._token_ids: list[int] = []  # that the matcher has taken
        self._num_tokens_at_renewal: int | None = None
        self._tokenizer = tokenizer
        self._executor = executor
        self._free_text = free_text  # None: the constraint has begun
        self._words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
        self._future: Future[None] | None = None
        self.error: str | None = None

    def copy(self) -> GrammarState:
        """A state of its own, for another choice of the same prompt, before the answer begins."""
        return GrammarState(self._grammar, self._tokenizer, self._executor, copy(self._free_text))

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
                self.error = f"structured output: {type(error).__name__}: {one_line(str(error))}"
                self._words.fill(0)
        return self._words

    def advance(self, token_id: int) -> None:
        """Takes the token that was sampled."""
        self._future = None
        if self._free_text is not None:
            if self._free_text.push(self._tokenizer.token_bytes(token_id, special=True)):
                self._free_text = None
        elif self.error is None:
            self._token_ids.append(token_id)
            if not self._matcher.consume_token(token_id):
                self._executor.submit(self._recover).result()  # where stacks are large

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete, and nothing can follow."""
        return self._free_text is None and self.error is None and self._matcher.is_stopped()

    def _compute(self) -> None:
        if self._free_text is not None:
            self._free_text.fill(self._words)
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
        self.error = TOO_COMPLEX + one_line(message)
        is_in_vain = (
            self._num_tokens_at_renewal is not None and count < self._num_tokens_at_renewal + _MIN_TOKENS
        )
        if "too many states" not in message or is_in_vain or self._grammar.is_large:
            return
        num_bytes = sum(len(self._tokenizer.token_bytes(token_id)) for token_id in self._token_ids)
        self._matcher, self._num_tokens_at_renewal = self._grammar.renewed_matcher(num_bytes), count
        for start in range(0, count + 1, _REPLAYED_TOKENS):
            self._matcher.consume_tokens(self._token_ids[start : start + _REPLAYED_TOKENS])
            self._fill_words()  # which gives the lexer its fuel for the next tokens
        if self._matcher.is_error():
            self.error = TOO_COMPLEX + one_line(self._matcher.get_error())
        else:
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


def _make_executor(name: str, num_threads: int) -> ThreadPoolExecutor:
    executor = ThreadPoolExecutor(num_threads, name)
    all_started = threading.Barrier(num_threads)
    usual = threading.stack_size(STACK_BYTES)  # of threads that start now
    try:
        for future in [executor.submit(all_started.wait) for _ in range(num_threads)]:
            future.result()
    finally:
        threading.stack_size(usual)
    return executor


def _make_tokenizer(tokenizer: Tokenizer) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(_Vocabulary(tokenizer), eos_token=sorted(tokenizer.eog_token_ids))  # type: ignore[arg-type]


def _num_characters(output: StructuredOutput) -> int:
    return len(str(output.json_schema or output.regex or output.grammar or "")) + sum(
        map(len, output.choice or ())
    )
