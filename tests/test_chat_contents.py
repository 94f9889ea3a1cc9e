"""Contents in parts, or without any, in chats whose tools or system message the template does not know."""

from __future__ import annotations

from typing import Any

import pytest
from vocabularies import bpe_metadata

from rvllm.chat_template import ChatTemplate, ChatTemplateError
from rvllm.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_gguf(bpe_metadata())
PARTS_OF_TEXT = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
TAGGED = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TEXT_OR_PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)


def chat_text(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    template = ChatTemplate(source)
    ids = template.encode_chat(TOKENIZER, messages, add_generation_prompt=False, **options)
    return TOKENIZER.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("source", [TAGGED, TEXT_OR_PARTS])
@pytest.mark.parametrize("knows_calls", [False, True])
def test_parts_of_content_with_tools(source: str, knows_calls: bool) -> None:
    if knows_calls:
        source = "{% if tools %}{% endif %}" + source  # which leaves calls to be written into the content
    call = {"function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "assistant", "content": PARTS_OF_TEXT, "tool_calls": [call]},
        {"role": "tool", "content": PARTS_OF_TEXT},
    ]
    if not knows_calls:
        messages.append({"role": "tool", "content": None})
    text = chat_text(source, messages)
    assert text.startswith("[assistant]a\nb") and '"name": "f"' in text
    if not knows_calls:
        result = "[user]<tool_response>\na\nb\n</tool_response>[user]<tool_response>\n\n</tool_response>"
        assert text.endswith(result)


@pytest.mark.parametrize("source", [TAGGED, TEXT_OR_PARTS])
@pytest.mark.parametrize(
    ("system", "text"),
    [({"content": PARTS_OF_TEXT}, "a\nb\n\n# Tools"), ({"content": None}, "# Tools"), ({}, "# Tools")],
)
def test_tools_are_told_behind_any_system_message(source: str, system: dict[str, Any], text: str) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat_text(
        source, [{"role": "system", **system}, {"role": "user", "content": "x"}], tools=tools
    ).startswith(f"[system]{text}")


@pytest.mark.parametrize(
    ("system", "content", "text"),
    [
        (PARTS_OF_TEXT, "x", "a\nb\n\nx"),
        (PARTS_OF_TEXT, PARTS_OF_TEXT, "a\nb\n\na\nb"),
        (None, PARTS_OF_TEXT, "a\nb"),
        ("a", None, "a"),
    ],
)
def test_folded_system_messages(system: Any, content: Any, text: str) -> None:
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
    assert chat_text(no_system + TAGGED, messages) == f"[user]{text}"
    assert chat_text(no_system + TEXT_OR_PARTS, messages).replace("\n", "") == f"[user]{text}".replace(
        "\n", ""
    )


def test_parts_that_are_no_text_are_named() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "tool", "content": [{"type": "image_url"}]}]
    with pytest.raises(ChatTemplateError, match=r"messages\.1\.content\.0: parts of type 'image_url'"):
        chat_text(TAGGED, messages)
