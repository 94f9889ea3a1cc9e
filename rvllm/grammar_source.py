"""Structured outputs in llguidance's own form, found out on trial in a process that a hostile grammar can only harm."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rvllm.structured_output import JSON_WHITESPACE, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_LEXER_STATES = 50_000  # of 0.6 to 2 kB; a string of limited length makes 4 to 9 a character
STACK_BYTES = 64 << 20  # the compiler recurses

_MAX_STEP_ITEMS = 10_000  # of the parser, in a token: 30 ms
_TRIAL_BYTES = 1 << 30  # of address space
_TRIAL_NICENESS = 5
_MAX_MESSAGE = 300
_TOKEN_ID = re.compile(r"<\[\d+\]>")  # of the model's vocabulary, in a Lark grammar
_SOME_TOKEN = "<[256]>"  # a control token of the vocabulary of the trial


class TooSlowError(ValueError):
    """Compiling takes more than its limit of processor time."""


class GrammarTrial:
    """Compiles grammars in another process, which is ended when one takes too much time or memory.

    Whether a grammar can be compiled hardly depends on the vocabulary, so there it is the 256 bytes. The process
    begins with the first grammar (0.2 s, 50 MB) and again after one that ended it. Thread-safe: one grammar at a time.
    """

    def __init__(self, cpu_seconds: float) -> None:
        """cpu_seconds: processor time that one grammar may take."""
        self._cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def source(self, output: StructuredOutput) -> str:
        """As source(). Raises ValueError naming what is wrong in the grammar, TooSlowError if it takes too long.

        RuntimeError: the process cannot do its work, whatever the grammar.
        """
        with self._lock:
            process = self._process = self._process or _start()
            answer = self._ask(process, asdict(output.constraint))
            if answer is None:
                self._process = None
                status = _end(process)
                if status == -signal.SIGPROF:
                    raise TooSlowError(
                        f"{output.kind}: takes more than {self._cpu_seconds:g} seconds to compile"
                    )
                if status > 0:
                    raise RuntimeError(f"the process that compiles grammars has ended with status {status}")
                raise ValueError(f"{output.kind}: takes too much memory to compile")
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["source"]

    def close(self) -> None:
        """Ends the process; a grammar that is on trial is refused."""
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            if self._process is not None:
                _end(self._process)
                self._process = None

    def _ask(self, process: subprocess.Popen[bytes], fields: dict[str, Any]) -> dict[str, str] | None:
        """None if the process has ended."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([self._cpu_seconds, fields]).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            return None
        answer: dict[str, str] | None = json.loads(line) if line.endswith(b"\n") else None
        return answer


def _start() -> subprocess.Popen[bytes]:
    code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rvllm.grammar_source import serve; serve()"
    arguments = [sys.executable, "-I", "-c", code, json.dumps(sys.path)]
    return subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def _end(process: subprocess.Popen[bytes]) -> int:
    """The exit status of a process that has ended, or ends now that nothing more comes."""
    process.communicate()
    return process.returncode


def serve() -> None:
    """The process of a GrammarTrial: answers a line for each line, until there are no more."""
    import llguidance  # noqa: F401  # if it is missing, that is no fault of a grammar

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    os.nice(_TRIAL_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_TRIAL_BYTES, _TRIAL_BYTES))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_answer_all)
    thread.start()
    thread.join()


def _answer_all() -> None:
    from llguidance import LLTokenizer

    tokenizer = LLTokenizer("byte")
    for line in sys.stdin.buffer:
        cpu_seconds, fields = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # ends the process, whatever it does
        try:
            output = StructuredOutput(**fields)
            text = source(output)
            compile_source(tokenizer, output.kind, _TOKEN_ID.sub(_SOME_TOKEN, text))
            answer = {"source": text}
        except ValueError as error:
            answer = {"error": str(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def source(output: StructuredOutput) -> str:
    """The grammar in llguidance's own form. Raises ValueError."""
    from llguidance import LLMatcher, regex_to_lark

    if output.json_object or output.json_schema is not None:
        schema = '{"type": "object"}' if output.json_object else str(output.json_schema)
        try:
            return LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_pattern": JSON_WHITESPACE}
            )
        except ValueError as error:
            raise ValueError(f"{output.kind}: {one_line(str(error))}") from None
    if output.regex is not None:  # where \d is 0-9 and \w ASCII, as in a JSON schema
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(output.regex, 'dw')}/")
    if output.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in output.choice)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")  # in capitals: one lexeme
    from rvllm.gbnf import is_gbnf, to_lark

    grammar = output.grammar or ""
    return LLMatcher.grammar_from_lark(to_lark(grammar) if is_gbnf(grammar) else grammar)


def compile_source(
    tokenizer: LLTokenizer, kind: str, text: str, max_lexer_states: int = MAX_LEXER_STATES
) -> LLMatcher:
    """Compiles what source() gives for a structured output of that kind. Raises ValueError."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_lexer_states=max_lexer_states, step_max_items=_MAX_STEP_ITEMS, verbose_errors=False
    )
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds a grammar without any text, and warms up every copy's lexer
    if matcher.is_error():
        raise ValueError(f"{kind}: {one_line(matcher.get_error())}")
    return matcher


def one_line(message: str) -> str:
    """What llguidance says, without the excerpts that it adds."""
    if "NoExtensionBias" in message:
        return "no text can match"
    message = message.partition("\n<")[0].partition("\n   1 | ")[0]
    return " ".join(message.split())[:_MAX_MESSAGE]
