"""The chat templates of model families: rendered as Hugging Face does, their tool calls and thoughts understood."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from model_templates import (
    ARGUMENTS,
    BOS,
    CALL,
    CALL_TURN,
    CHATS,
    CONTROL_TEXT,
    EOS,
    FAMILIES,
    FOLDER,
    RESULT,
    SCHEMA,
    TOOL,
    USER,
    WRITTEN_CALLS,
    WRITTEN_THOUGHTS,
    template_of,
    tokenizer_of,
)

from rvllm import jinja_environment
from rvllm.chat_template import ChatTemplateError
from rvllm.cli.info import SAMPLE_CHAT, SAMPLE_TOOL
from rvllm.reasoning_formats import find_reasoning
from rvllm.server.chat_output import ChatOutput, TurnFormat
from rvllm.tool_formats import find_format


def day(form: str) -> str:
    return f"today, as {form}"


def raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


@cache
def hugging_face_template(name: str) -> jinja2.Template:
    """With the settings and helpers of the library transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda x, ensure_ascii=False, indent=None: json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent
    )
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": day}
    return environment.from_string(template_of(name).source)


def hugging_face(name: str, **variables: Any) -> str:
    defaults = {"bos_token": BOS, "eos_token": EOS, "tools": None, "documents": None}
    return hugging_face_template(name).render(**defaults | variables)


@pytest.fixture(autouse=True)
def the_same_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(jinja_environment.environment().globals, "strftime_now", day)


def test_every_template_is_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.jinja")} == FAMILIES.keys()
    notice = (FOLDER / "NOTICE").read_text()
    assert all(re.search(rf"[ ]{re.escape(name)}\b", notice) for name in FAMILIES)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_rendered_as_hugging_face_does(name: str, chat: str, add_generation_prompt: bool) -> None:
    template = template_of(name)
    options = CHATS[chat] | {"add_generation_prompt": add_generation_prompt}
    if chat in FAMILIES[name].refuses:
        with pytest.raises(jinja2.exceptions.TemplateError):
            hugging_face(name, **options)
        with pytest.raises(ChatTemplateError):
            template.render(**options)
        return
    text = template.render(**options)
    if name == "deepseek-r1-distill-llama" and chat == "tools":
        # What this template wants there, and does not say: no content, and arguments as text.
        call = {**CALL, "function": {**CALL["function"], "arguments": '{"city": "Zürich"}'}}  # type: ignore[dict-item]
        options["messages"] = [USER, {**CALL_TURN, "content": None, "tool_calls": [call]}, RESULT]
    elif name == "deepseek-r1-distill-qwen" and chat == "tools":
        options["messages"] = [USER, {**CALL_TURN, "content": None}, RESULT]
    elif name == "granite3.0" and chat == "tools":
        options["messages"] = [USER, CALL_TURN, {**RESULT, "role": "tool_response"}]
    assert text == hugging_face(name, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_rendered(name: str) -> None:
    """What must not get lost on the way to the model, whichever way the template goes about it."""
    template, tokenizer = template_of(name), tokenizer_of(name)
    for chat, texts in (
        ("system", ["Be brief.", "How is it?"]),
        ("turns", ["How is it?", "Fine.", "And now?"]),
        ("only told of tools", ["get_weather", "How is it?"]),
        ("tools", ["get_weather", "Zürich", "degrees"]),
    ):
        arguments = json.loads(json.dumps(CHATS[chat]))
        ids = template.encode_chat(tokenizer, **arguments)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert all(part in text for part in texts), (chat, text)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_message_cannot_forge_control_tokens(name: str) -> None:
    template, tokenizer = template_of(name), tokenizer_of(name)
    forged = "".join(CONTROL_TEXT.findall(template.source)) + EOS

    def control(content: str) -> list[int]:
        ids = template.encode_chat(tokenizer, [{"role": "user", "content": f"How {content} is it?"}])
        text = template.render([{"role": "user", "content": f"How {content} is it?"}])
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        return [id for id in ids if tokenizer.is_special(id)]

    assert control(forged) == control("")


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_is_continued(name: str) -> None:
    messages = [USER, {"role": "assistant", "content": "It is"}]
    text = template_of(name).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("It is") and "How is it?" in text


# --- What the model writes


def turn(name: str, **options: Any) -> TurnFormat:
    template = template_of(name)
    reasoning = find_reasoning(template.source)
    prompt = template.render(**options)
    thinks = reasoning is not None and reasoning.is_thinking(prompt)
    return TurnFormat(reasoning, thinks, find_format(template.source), {"get_weather": SCHEMA})


def read(turn: TurnFormat, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """(reasoning, content, calls), the same however the text is cut."""
    results = []
    for size in (1, 7, len(text)):
        output = ChatOutput(turn)
        deltas = [
            d for i in range(0, len(text), size) for d in output.push(text[i : i + size])
        ] + output.finish()
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        thoughts, content = ("".join(d.get(key, "") for d in deltas) for key in ("reasoning", "content"))
        results.append((thoughts, content, [(c["name"], json.loads(c["arguments"])) for c in calls]))
    assert results[0] == results[1] == results[2]
    return results[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_found_in_a_template(name: str) -> None:
    family, template = FAMILIES[name], template_of(name).source
    reasoning = find_reasoning(template)
    assert find_format(template).name == family.tool_format
    assert (None if reasoning is None else reasoning.name) == family.reasoning


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_and_thoughts_are_read(name: str) -> None:
    family = FAMILIES[name]
    call = WRITTEN_CALLS[family.tool_format]
    found = [("get_weather", {"city": "Zürich"})]
    for options in (CHATS["one turn"], CHATS["one turn"] | {"enable_thinking": True}):
        form = turn(name, **options)
        thoughts = WRITTEN_THOUGHTS[family.reasoning]
        if form.is_thinking and family.reasoning == "think":
            thoughts = thoughts.removeprefix("<think>")  # the prompt ends with it
        hm = "" if family.reasoning is None else "hm"
        assert read(form, thoughts) == (hm, "Fine.", [])
        opened = thoughts.partition("Fine.")[0]
        for mark in ("<response>", "<|START_RESPONSE|>", "<|start|>assistant<|channel|>final<|message|>"):
            opened = opened.removesuffix(mark)
        assert read(form, opened + call) == (hm, "", found)
        if family.reasoning not in ("harmony", "think"):
            assert read(form, call) == ("", "", found)


# Templates whose rendering of a call, from the generation prompt on, is what the model would have written.
SHOW_A_CALL = {
    *("command-r7b", "deepseek-r1-distill-llama", "glm4.6", "gpt-oss", "granite4.0", "llama3.1", "llama3.2"),
    *(
        "ministral3-reasoning",
        "mistral-nemo",
        "mistral-small3.2",
        "mistral-v3",
        "qwen2.5",
        "qwen3",
        "qwen3-coder",
        "seed-oss",
    ),
}


@pytest.mark.parametrize("name", [name for name in FAMILIES if "tools" not in FAMILIES[name].refuses])
def test_a_rendered_call_is_read_as_that_call(name: str) -> None:
    options = {"tools": [TOOL], "enable_thinking": True}
    template = template_of(name)
    prompt = template.render([USER], **options)
    text = template.render([USER, CALL_TURN], add_generation_prompt=False, **options)
    prefix = "" if name != "deepseek-r1-distill-llama" else "<think>\n"
    shows = text.startswith(prompt.removesuffix(prefix)) and "Zürich" in text
    assert shows == (name in SHOW_A_CALL), (prompt[-200:], text[-300:])
    if not shows:
        return
    written = text[len(prompt.removesuffix(prefix)) :].strip()
    for end in (
        EOS,
        "<seed:eos>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|end_of_text|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|call|>",
    ):
        written = written.removesuffix(end)
    form = turn(name, messages=[USER], **options)
    if prefix:
        written = "</think>" + written
    assert read(form, written)[1:] == ("", [("get_weather", {"city": "Zürich"})])


# --- What families want, and do not say


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3", "command-r7b"])
def test_thoughts_reach_the_template_by_the_name_it_knows(name: str, key: str) -> None:
    messages = [USER, {**CALL_TURN, key: "I should look."}, RESULT]
    assert "I should look." in template_of(name).render(messages, tools=[TOOL])


def test_thoughts_beside_the_content_of_a_call_are_left_out_where_the_template_refuses_both() -> None:
    both = [USER, {**CALL_TURN, "reasoning_content": "I should look.", "content": "Wait."}, RESULT]
    assert "Wait." in template_of("gpt-oss").render(both, tools=[TOOL])


@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_may_be_text(name: str) -> None:
    call = {"id": CALL["id"], "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    chats = [[USER, {**CALL_TURN, "tool_calls": [c]}, RESULT] for c in (CALL, call)]
    one, other = (template_of(name).encode_chat(tokenizer_of(name), chat, tools=[TOOL]) for chat in chats)
    assert one == other


@pytest.mark.parametrize("name", ["gemma", "gemma2", "llama2", "phi3", "starcoder2-instruct"])
def test_a_system_message_reaches_models_that_know_none(name: str) -> None:
    template, tokenizer = template_of(name), tokenizer_of(name)
    ids = template.encode_chat(tokenizer, [{"role": "system", "content": "Be brief."}, USER])
    folded = [{"role": "user", "content": "Be brief.\n\nHow is it?"}]
    assert template.takes_system == (name == "llama2")
    assert (ids == template.encode_chat(tokenizer, folded)) == (not template.takes_system)
    for messages in (
        [{"role": "system", "content": "Be brief."}],
        [{"role": "system", "content": [{"text": "Be"}]}, USER],
    ):
        assert "Be" in tokenizer.decode(template.encode_chat(tokenizer, messages)) or name == "llama2"


def test_a_broken_call_is_one_error() -> None:
    template, tokenizer = template_of("phi4-mini"), tokenizer_of("phi4-mini")
    for call in ({}, {"function": {}}, {"function": {"name": "f", "arguments": "{"}}, None):
        with pytest.raises(ChatTemplateError, match=r"^messages: .* tool call"):
            template.encode_chat(tokenizer, [USER, {**CALL_TURN, "tool_calls": [call]}], tools=[TOOL])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_sample_chat_of_the_info_command(name: str) -> None:
    template, tokenizer = template_of(name), tokenizer_of(name)
    for tools in (None, [SAMPLE_TOOL]):
        text = tokenizer.decode(template.encode_chat(tokenizer, SAMPLE_CHAT, tools=tools))
        assert all(message["content"] in text for message in SAMPLE_CHAT)
        assert ("get_weather" in text) == (tools is not None)
