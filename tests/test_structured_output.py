"""Structured output: what it refuses, which tokens it allows, and that answers keep to it, alone or in company."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grammars import allowed_ids, compiler, matches, tokenizer, walk
from tiny_gguf import EOS_TOKEN_ID, write_tiny_model

from rvllm import LLM, SamplingParams, StructuredOutput, _core
from rvllm.gguf_file import GGUFFile
from rvllm.grammar import TOO_COMPLEX, GrammarCompiler, GrammarState
from rvllm.reasoning_formats import find_reasoning
from rvllm.server.chat_output import ChatOutput, TurnFormat
from rvllm.tokenizer import Tokenizer


def obj(properties: dict[str, Any], **others: Any) -> dict[str, Any]:
    required = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    } | others


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = obj({"a": schema})
    return schema


# --- What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of .*; given: none"),
        ({"regex": "a", "choice": ["b"]}, "given: regex and choice"),
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": "[1]"}, "json_schema must be a JSON object"),
        ({"json_schema": False}, "false allows nothing"),
        ({"json_schema": {"const": {1, 2}}}, "json_schema is no JSON"),
        ({"json_schema": {"const": float("nan")}}, "json_schema is no JSON"),
        ({"json_schema": {"const": "\ud800"}}, "lone surrogate U\\+D800"),
        ({"json_schema": nested(1000)}, "nested more than 120 levels deep"),
        ({"json_schema": '{"a":' * 100_000}, "nested more than 120 levels deep"),
        ({"json_schema": {"enum": ["x" * 2**20]}}, "at most 1048576 are allowed"),
        ({"json_object": "yes"}, "json_object must be True or False"),
        ({"regex": ""}, "regex must be a text that is not empty"),
        ({"regex": "a" * 100_000}, "regex has 100000 characters, at most 65536"),
        ({"regex": 3}, "regex must be a text"),
        ({"grammar": "\n" * 3000}, "3001 lines, at most 2000"),
        ({"choice": []}, "choice must be a list of texts"),
        ({"choice": "ab"}, "choice must be a list of texts"),
        ({"choice": ["a", ""]}, "choice must hold texts that are not empty"),
        ({"choice": ["a"] * 20_000}, "choice has 20000 entries"),
        ({"json_object": True, "after": ""}, "after must be a text"),
        ({"json_object": True, "after": ["a", 1]}, "after must be a text"),
    ],
)
def test_nonsense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutput(**arguments)


def references(count: int, **schema: Any) -> dict[str, Any]:
    """A chain of definitions that a recursive compiler follows to its end."""
    definitions = {f"d{i}": obj({"a": {"$ref": f"#/$defs/d{i + 1}"}}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"json_schema": {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}}},
         "json_schema: no text can match"),
        ({"json_schema": {"$ref": "#/$defs/x"}}, "json_schema: .*/\\$defs/x"),
        ({"json_schema": {"$ref": "http://localhost/x"}}, "json_schema: "),
        ({"json_schema": {"type": "integer", "minimum": 10**400}}, "^json_schema: number out of range"),
        ({"json_schema": {"type": "zork"}}, "json_schema: Invalid type: zork"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: \\["uniqueItems"\\]'),
        ({"json_schema": obj({"a": {"type": "string", "pattern": "("}})}, "json_schema: regex parse error"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 1}}, "json_schema: Unsatisfiable schema"),
        ({"regex": "("}, "regex: .*unclosed group"),
        ({"regex": "(?=a)b"}, "regex: .*look-around"),
        ({"regex": r"[^\s\S]"}, "regex: no text can match"),
        ({"regex": "(" * 10_000 + ")" * 10_000}, "regex: "),
        ({"grammar": "start: foo"}, 'grammar: .*unknown name: "foo"'),
        ({"grammar": "start: " + "(" * 20_000}, "grammar: .*too deeply nested"),
        ({"grammar": "nonsense"}, "grammar: "),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        compiler().compile(StructuredOutput(**arguments))
    assert len(str(error.value)) < 350 and "\n" not in str(error.value)


def test_chains_of_references() -> None:
    assert matches(StructuredOutput(json_schema=references(3)), '{"a": {"a": {"a": 1}}}')
    compiler().compile(StructuredOutput(json_schema=references(900)))  # within the compiler's stack
    with pytest.raises(ValueError, match=r"20001 different \$refs in 5 levels"):
        StructuredOutput(json_schema=references(20_000))


# --- What is allowed

DOUBLING = "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60: "a"'
T = {"$defs": {"T": obj({"c": {"$ref": "#/$defs/C"}}), "C": {"enum": ["Alice", "Biff"]}}}
SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "minItems": 3, "maxItems": 3, "items": {"$ref": "#/$defs/T"}, **T},
     r'\[({"c":"(Alice|Biff)"},?){3}\]'),
    (obj({"v": {"type": "integer"}, "kids": {"type": "array", "maxItems": 2, "items": {"$ref": "#"}}}),
     r'{"v":-?\d+,"kids":\[.*\]}'),
    (obj({"a": {"anyOf": [{"enum": ["x"]}, {"type": "null"}]}, "b": {"$ref": "#/properties/a/anyOf/0"}}),
     r'{"a":("x"|null),"b":"x"}'),
    (obj({"a": {"$ref": "#/definitions/x"}}, definitions={"x": {"enum": [1, 2]}}), r'{"a":[12]}'),
    (obj({"a": {"type": "string", "pattern": r"^\S{1,5}$"}}), r'{"a":"\S{1,9}"}'),
    ({"enum": [f"value {i}" for i in range(5000)]}, r'"value\d+"'),
    ({"anyOf": [obj({f"k{i}": {"type": "boolean"}}) for i in range(200)]}, r'{"k\d+":(true|false)}'),
    (obj({f"p{i}": {"type": "null"} for i in range(40)}), r'{("p\d+":null,?){40}}'),
    ({"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(30)}, "additionalProperties": False},
     r'{("p\d+":null,?){0,30}}'),
    (nested(50), r'({"a":){50}-?\d+}{50}'),
    ({"type": "array", "items": {"const": 0}, "minItems": 10, "maxItems": 1000}, r"\[(0,?){10,1000}\]"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "pattern"), SCHEMAS)
def test_schemas(schema: dict[str, Any], pattern: str) -> None:
    output = StructuredOutput(json_schema=schema)
    texts = [text for seed in range(10) if (text := walk(compiler().compile(output), seed))]
    assert texts
    for text in texts:
        value = json.loads(text)
        compact = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        assert re.fullmatch(pattern, compact.replace(" ", "")), compact
        assert max(map(len, re.findall(r"\s+", re.sub(r'"[^"]*"', '""', text))), default=0) <= 16


@pytest.mark.parametrize(
    "output",
    [
        StructuredOutput(json_schema=obj({"a": {"type": "string", "minLength": 100_000}})),
        StructuredOutput(json_schema=obj({"a": {"type": "string", "maxLength": 5000}})),
        StructuredOutput(json_schema=obj({"a": {"type": "string", "pattern": r"(x+x+)+y.{500}z"}})),
        StructuredOutput(json_schema={"$ref": "#/$defs/A", "$defs": {"A": obj({"k": {"$ref": "#/$defs/A"}})}}),
        StructuredOutput(regex=r"((a{1,1000}){1,1000}){1,1000}b"),
        StructuredOutput(regex="(.*a.{30})+"),
        StructuredOutput(grammar="start: s\ns: s s | /[a-z]/"),
        StructuredOutput(grammar=DOUBLING),
    ],
    ids=lambda output: str(output)[17:80],
)  # fmt: skip
def test_hostile_ones_end_or_fail(output: StructuredOutput) -> None:
    state = compiler().compile(output)
    walk(state, seed=0, max_tokens=300)
    if state.error is not None:
        assert state.error.startswith("structured output: ") and "\n" not in state.error
        assert allowed_ids(state) == [] and not state.is_finished


def test_other_kinds() -> None:
    choice = StructuredOutput(choice=["yes", "yes, sir", 'é"\\\n😀'])
    assert all(matches(choice, text) for text in ("yes", "yes, sir", 'é"\\\n😀'))
    assert not matches(choice, "yes, ")
    regex = StructuredOutput(regex=r"\d{3}-/\w+")
    assert matches(regex, "123-/a_Z")
    assert not matches(regex, "٣٣٣-/a")
    assert matches(StructuredOutput(json_object=True), '{"any": [1, "thing"]}')
    assert not matches(StructuredOutput(json_object=True), "[1]")
    assert matches(StructuredOutput(json_schema=True), "[1]")
    lark = StructuredOutput(grammar='start: "(" start ")" | "x"')
    assert matches(lark, "((x))")
    assert not matches(lark, "((x)")


def test_an_answer_ends_where_nothing_can_follow() -> None:
    state = compiler().compile(StructuredOutput(regex="ab?c*"))
    state.advance(ord("a"))
    assert not state.is_finished
    assert allowed_ids(state) == [ord("b"), ord("c"), *sorted(tokenizer().eog_token_ids)]
    state.advance(EOS_TOKEN_ID)
    assert state.is_finished
    state = compiler().compile(StructuredOutput(regex="ab?"))
    state.advance(ord("a"))
    state.advance(ord("b"))
    assert state.is_finished


def test_copies_go_their_own_ways() -> None:
    first = compiler().compile(StructuredOutput(choice=["ab", "cd"]))
    second, third = first.copy(), first.copy()
    first.advance(ord("a"))
    second.advance(ord("c"))
    assert [allowed_ids(state) for state in (first, second, third)] == [
        [ord("b")],
        [ord("d")],
        [ord("a"), ord("c")],
    ]


def test_after_a_mark() -> None:
    output = StructuredOutput(choice=["yes"], after="</think>")
    assert not tokenizer().eog_token_ids & set(allowed_ids(compiler().compile(output)))
    assert matches(output, "hm <think></think>yes")
    assert not matches(output, "yes")
    assert not matches(output, "</think>no")
    several = StructuredOutput(choice=["yes"], after=["</think>", "<answer as=json>"])
    assert matches(several, "hm <think></think>yes") and matches(several, "<answer as=json>yes")
    assert not matches(several, "<answer>yes") and not matches(several, "<answer as=json>no")


def test_the_answer_of_gpt_oss_begins_behind_any_header_of_its_channel() -> None:
    turn = TurnFormat(find_reasoning("<|channel|>"), is_thinking=True)
    output = StructuredOutput(json_schema=obj({"a": {"type": "integer"}}), after=turn.after)
    thoughts = "<|channel|>analysis<|message|>{hm}<|end|><|start|>assistant"
    for header in ("final", "final <|constrain|>json", "final<|constrain|>json"):
        begun = f"{thoughts}<|channel|>{header}<|message|>"
        assert matches(output, begun + '{"a": 1}') and not matches(output, begun + "1")
        chat = ChatOutput(turn)
        deltas = chat.push(begun + '{"a": 1}') + chat.finish()
        assert "".join(delta.get("content", "") for delta in deltas) == '{"a": 1}'
    assert not matches(output, thoughts + '<|channel|>commentary<|message|>{"a": 1}')


@pytest.mark.parametrize("name", ["smollm2_path", "gemma3_path"])
def test_real_vocabularies(name: str, request: pytest.FixtureRequest) -> None:
    model = Tokenizer.from_gguf(GGUFFile(request.getfixturevalue(name)).metadata)
    text = '{"a": 12, "b": ["é x", "😀"]}'
    state = GrammarCompiler(model).compile(
        StructuredOutput(json_schema=obj({"a": {"type": "integer"}, "b": {"type": "array"}}))
    )
    for token_id in model.encode(text, add_special_tokens=False):
        assert token_id in allowed_ids(state), model.token_bytes(token_id)
        assert not any(model.is_special(i) for i in allowed_ids(state)[:100])
        state.advance(token_id)
    assert state.is_finished


def test_compiling_from_many_threads() -> None:
    fresh, failures = GrammarCompiler(tokenizer()), []

    def compile_and_walk(seed: int) -> None:
        state = fresh.compile(StructuredOutput(regex=f"[a-c]{{{1 + seed % 3}}}"))
        text = walk(state, seed)
        if text is None or len(text) != 1 + seed % 3:
            failures.append(text)

    threads = [threading.Thread(target=compile_and_walk, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# --- The sampler


def test_the_sampler_draws_allowed_tokens_only() -> None:
    logits = np.linspace(5, -5, 100).astype(np.float32)
    words = np.zeros(3, np.int32)  # tokens from 96 on have no bit
    words[2] = np.uint32(1 << 31 | 1 << 3).astype(np.int32)
    expected = {2 * 32 + 3, 2 * 32 + 31}
    sampler = _core.Sampler(vocab_size=100, temperature=2.0, seed=1, num_logprobs=1)
    free = _core.Sampler(vocab_size=100, temperature=2.0, seed=1, num_logprobs=100)
    logprobs = {token_id: entry for token_id, *entry in free.sample(logits)[1]}
    drawn = set()
    for _ in range(100):
        sampler.set_allowed(words)
        token_id, entries = sampler.sample(logits)
        drawn.add(token_id)
        # Log-probabilities stay the model's own.
        assert entries[0] == (token_id, *logprobs[token_id]) and entries[1] == (0, *logprobs[0])
    assert drawn == expected
    assert sampler.sample(logits)[0] not in expected  # holds for one token
    for settings in ({"top_k": 5}, {"top_p": 0.1}, {"min_p": 0.5}, {"temperature": 0.0}):
        sampler = _core.Sampler(vocab_size=100, logit_bias=[(0, 100.0)], **settings)
        sampler.set_allowed(words)
        assert sampler.sample(logits)[0] in expected
    sampler.set_allowed(np.zeros(4, np.int32))
    with pytest.raises(RuntimeError, match="no token is left"):
        sampler.sample(logits)


# --- Whole answers

KINDS = [
    StructuredOutput(json_schema=obj({"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 8}})),
    StructuredOutput(regex="[a-f]{3,9}(, [a-f]{3,9})*"),
    StructuredOutput(choice=["the first", "the second", "none"]),
    StructuredOutput(grammar='root ::= "(" root ")" | [a-c]+'),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_model(path, quant="Q8_0")
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, seed=1)


def params(i: int, **others: Any) -> SamplingParams:
    output = None if i % 5 == 4 else KINDS[i % 5]
    return SamplingParams(temperature=1.0, seed=i, max_tokens=60, structured_output=output, **others)


PROMPTS = [[(7 * i + j) % 256 for j in range(1 + 5 * i % 40)] for i in range(40)]
Answer = tuple[list[int], str | None]


def answers(llm: LLM, prompts: list[list[int]], all_params: list[SamplingParams]) -> list[list[Answer]]:
    outputs = llm.generate(prompts, all_params, use_tqdm=False)
    return [[(choice.token_ids, choice.finish_reason) for choice in output.outputs] for output in outputs]


def test_alone_in_company_and_preempted(model: Path, llm: LLM) -> None:
    all_params = [params(i) for i in range(len(PROMPTS))]
    alone = [answers(llm, [prompt], [p])[0] for prompt, p in zip(PROMPTS, all_params, strict=True)]
    assert answers(llm, PROMPTS, all_params) == alone
    small = LLM(model, num_blocks=9, max_num_batched_tokens=32)
    assert answers(small, PROMPTS, all_params) == alone
    assert small.engine.stats.preemptions > 0
    assert {answer[0][1] for answer in alone} == {"stop", "length"}
    for i, [(ids, reason)] in enumerate(alone):
        if reason == "stop" and i % 5 < 4:
            assert matches(KINDS[i % 5], llm.tokenizer.decode(ids))


def test_each_choice_has_a_state_of_its_own(llm: LLM) -> None:
    [together] = answers(llm, [PROMPTS[3]], [params(1, n=4)])
    assert len({tuple(ids) for ids, _ in together}) > 1
    assert all(reason == "length" or matches(KINDS[1], llm.tokenizer.decode(ids)) for ids, reason in together)


def test_where_answers_end(llm: LLM) -> None:
    def run(output: StructuredOutput, **others: Any) -> tuple[str, str | None]:
        settings = {"temperature": 1.0, "seed": 3, "max_tokens": 8, **others}
        [result] = llm.generate(
            [[1, 2]], SamplingParams(structured_output=output, **settings), use_tqdm=False
        )
        return result.outputs[0].text, result.outputs[0].finish_reason

    abc = StructuredOutput(regex="abc")
    assert run(abc) == ("abc", "stop")
    assert run(abc, max_tokens=3) == ("abc", "stop")
    assert run(abc, max_tokens=2) == ("ab", "length")
    assert run(abc, min_tokens=8) == ("abc", "stop")
    assert run(abc, ignore_eos=True) == ("abc", "stop")
    assert run(abc, stop="b") == ("a", "stop")
    assert run(abc, logit_bias={ord("a"): -100, ord("x"): 100}) == ("abc", "stop")
    assert run(abc, repetition_penalty=2.0, presence_penalty=2.0) == ("abc", "stop")
    assert run(abc, temperature=0, logprobs=2) == ("abc", "stop")
    text, reason = run(StructuredOutput(regex="abc", after="</think>"), max_tokens=20)
    assert reason == "length" and len(text) <= 20


def test_bad_ones_are_refused_before_anything_runs(llm: LLM) -> None:
    bad = SamplingParams(structured_output=StructuredOutput(regex="("))
    with pytest.raises(ValueError, match=r"prompt 1: regex: .*unclosed group"):
        llm.generate([[1], [2]], [SamplingParams(), bad], use_tqdm=False)
    assert not llm.engine.has_unfinished
    with pytest.raises(ValueError, match="structured_output must be a StructuredOutput, got 'x'"):
        SamplingParams(structured_output="x")  # type: ignore[arg-type]


def test_a_grammar_that_grows_too_complex_ends_its_request_alone(llm: LLM) -> None:
    bad = SamplingParams(structured_output=StructuredOutput(grammar=DOUBLING), max_tokens=300)
    both = llm.generate([[1], PROMPTS[1]], [bad, params(1)], use_tqdm=False)
    assert both[0].outputs[0].finish_reason == "error"
    assert (both[0].outputs[0].error or "").startswith("structured output: ")
    assert both[1].outputs[0].token_ids == answers(llm, [PROMPTS[1]], [params(1)])[0][0][0]


def test_masks_are_computed_beside_the_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread computes none itself, and each is asked for before the forward pass begins."""
    threads: set[str] = set()
    compute = GrammarState._compute

    def watch(state: GrammarState) -> None:
        threads.add(threading.current_thread().name)
        compute(state)

    monkeypatch.setattr(GrammarState, "_compute", watch)
    llm.generate([[1]], params(2), use_tqdm=False)
    assert threads and all(name.startswith("rvllm-grammar") for name in threads)


# --- How complex a grammar may become


def test_large_schemas_are_within_the_limit() -> None:
    kinds: list[tuple[dict[str, Any], Any]] = [
        ({"type": "string", "maxLength": 800}, "some words " * 70),
        ({"type": "integer", "minimum": 0, "maximum": 100_000}, 77_777),
        ({"enum": [f"value {i}" for i in range(12)]}, "value 7"),
        ({"type": "string", "format": "date-time"}, "2024-05-06T10:11:12Z"),
        ({"type": "array", "items": {"type": "number"}, "maxItems": 9}, [1.5, -3e5]),
    ]
    names = [f"property_{i}" for i in range(40)]
    schema = obj({name: kinds[i % 5][0] for i, name in enumerate(names)})
    answer = {name: kinds[i % 5][1] for i, name in enumerate(names)}
    assert matches(StructuredOutput(json_schema=schema), json.dumps(answer))
    schema = obj({"text": {"type": "string", "maxLength": 4000}})
    assert matches(StructuredOutput(json_schema=schema), json.dumps({"text": "hello world " * 165}))


LONG = StructuredOutput(json_schema=obj({"text": {"type": "string", "maxLength": 20_000}}))


def advance(state: GrammarState, text: str) -> str | None:
    """Lets the answer go on with text; the error, if it has to end."""
    for byte in text.encode():
        if byte not in allowed_ids(state):
            return state.error or f"{chr(byte)!r} is not allowed"
        state.advance(byte)
    return state.error


def test_long_texts_renew_the_table_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rvllm.grammar.MAX_LEXER_STATES", 3000)
    fresh = GrammarCompiler(tokenizer())
    early = fresh.compile(LONG)
    for _ in range(2):  # the second answer finds the table as the first has left it
        state = fresh.compile(LONG)
        assert (
            advance(state, json.dumps({"text": "h\u00e9llo w\u00f6rld \\ " * 100}, ensure_ascii=False))
            is None
        )
        assert state.is_finished
    assert advance(early, '{"text": "' + "x" * 2000) is None
    assert allowed_ids(early) == allowed_ids_after(fresh, '{"text": "' + "x" * 2000)


def test_an_answer_may_be_longer_than_its_first_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the text so far, read again, fills a table of that size by itself."""
    monkeypatch.setattr("rvllm.grammar.MAX_LEXER_STATES", 3000)
    state = GrammarCompiler(tokenizer()).compile(LONG)
    assert advance(state, json.dumps({"text": "some words " * 800})) is None
    assert state.is_finished


def allowed_ids_after(fresh: GrammarCompiler, text: str) -> list[int]:
    state = fresh.compile(LONG)
    assert advance(state, text) is None
    return allowed_ids(state)


def test_an_answer_that_needs_too_many_states_at_once_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rvllm.grammar.MAX_LEXER_STATES", 300)
    monkeypatch.setattr("rvllm.grammar._MAX_RENEWED_STATES", 300)
    fresh = GrammarCompiler(tokenizer())
    letters = "".join(np.random.default_rng(1).choice(list("ab"), 2000))
    error = advance(fresh.compile(StructuredOutput(regex="(a|b)*a(a|b){24}c")), letters)
    assert error is not None and error.startswith(TOO_COMPLEX) and "too many states: 300" in error
    assert advance(fresh.compile(StructuredOutput(regex="[ab]*c")), "abc") is None


def test_many_choices_are_one_lexeme() -> None:
    choices = tuple(f"choice number {i}" for i in range(10_000))
    assert matches(StructuredOutput(choice=choices), "choice number 9876")


def test_a_text_of_too_many_readings_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rvllm.grammar_source._MAX_STEP_ITEMS", 200)
    fresh = GrammarCompiler(tokenizer())
    error = advance(fresh.compile(StructuredOutput(grammar="start: s\ns: s s | /[a-z]/")), "a" * 300)
    assert error is not None and error.startswith(TOO_COMPLEX) and "Too many items" in error
