"""Grammars on trial: a hostile one is ended, and holds up no other."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator

import pytest
from grammars import tokenizer
from server_client import wait_until

from rvllm.grammar import GrammarCompiler
from rvllm.grammar_source import GrammarTrial, TooSlowError, source
from rvllm.structured_output import StructuredOutput

HOSTILE = [StructuredOutput(json_schema={"type": "integer", "multipleOf": 10**8 - k}) for k in (11, 3)]
BENIGN = StructuredOutput(regex="[a-z]{2,9}")


@pytest.fixture
def trial() -> Iterator[GrammarTrial]:
    trial = GrammarTrial(cpu_seconds=0.1)
    yield trial
    trial.close()


def test_it_finds_what_compiling_finds(trial: GrammarTrial) -> None:
    for output in (
        BENIGN,
        StructuredOutput(json_object=True),
        StructuredOutput(choice=['\u00e9"\\\n'], after="x"),
    ):
        assert trial.source(output) == source(output)
    for bad in (StructuredOutput(regex="("), StructuredOutput(grammar="start: foo")):
        with pytest.raises(ValueError, match=r"^(regex: .*unclosed group|grammar: .*unknown name)") as error:
            trial.source(bad)
        with pytest.raises(ValueError) as same:
            GrammarCompiler(tokenizer()).compile(bad)
        assert str(error.value) == str(same.value)


def test_it_ends_what_takes_too_long_and_goes_on(trial: GrammarTrial) -> None:
    for hostile in HOSTILE:
        with pytest.raises(TooSlowError, match=r"^json_schema: takes more than 0\.1 seconds to compile$"):
            trial.source(hostile)
        assert trial.source(BENIGN) == source(BENIGN)


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="no memory limits here")
def test_it_ends_what_takes_too_much_memory() -> None:
    trial = GrammarTrial(cpu_seconds=60)
    try:
        trial.source(BENIGN)
        assert trial._process is not None
        resource.prlimit(trial._process.pid, resource.RLIMIT_AS, (2**28, 2**30))
        with pytest.raises(ValueError, match=r"^json_schema: takes too much memory to compile$"):
            trial.source(HOSTILE[0])
        assert trial.source(BENIGN) == source(BENIGN)
    finally:
        trial.close()


def test_a_process_that_does_not_start_is_no_fault_of_the_grammar(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(RuntimeError, match=r"compiles grammars has ended with status 1$"):
            trial.source(BENIGN)
    assert trial.source(BENIGN) == source(BENIGN)


def test_hostile_grammars_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rvllm.grammar._TRIAL_SECONDS", (0.1, 1e6))  # the second: until it is closed
    compiler = GrammarCompiler(tokenizer())
    compiler.isolate()
    try:
        with compiler.compiling(HOSTILE[0]) as first, compiler.compiling(HOSTILE[1]) as second:
            state = compiler.compile(BENIGN)
            state.advance(ord("a"))
            wait_until(lambda: compiler._trials[1]._process is not None)  # the first is on trial again
            assert not first.done() and not second.done()
        compiler.close()
        with pytest.raises(ValueError, match="json_schema: "):
            first.result()
        with pytest.raises(ValueError, match="nobody waits"):
            second.result()
    finally:
        compiler.close()


def test_a_model_without_an_end_is_refused_by_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer(), "eog_token_ids", frozenset())
    with pytest.raises(ValueError, match=r"^regex: the model has no end-of-generation token$"):
        GrammarCompiler(tokenizer()).compile(BENIGN)
