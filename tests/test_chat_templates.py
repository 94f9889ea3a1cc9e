"""Chat templates by name and from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rvllm.chat_template import ChatTemplate, ChatTemplateError
from rvllm.chat_templates import NAMED, read_template

CONVERSATION = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "bye"},
]
RENDERED = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n",
    "llama2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nhi [/INST] yo </s><s>[INST] bye [/INST]",
    "mistral": "<s>[INST] S\n\nhi [/INST] yo</s>[INST] bye [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nyo<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nbye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<s><start_of_turn>user\nS\n\nhi<end_of_turn>\n<start_of_turn>model\nyo<end_of_turn>\n"
    "<start_of_turn>user\nbye<end_of_turn>\n<start_of_turn>model\n",
    "zephyr": "<|system|>\nS</s>\n<|user|>\nhi</s>\n<|assistant|>\nyo</s>\n<|user|>\nbye</s>\n<|assistant|>\n",
    "phi3": "<|system|>\nS<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\nyo<|end|>\n"
    "<|user|>\nbye<|end|>\n<|assistant|>\n",
    "vicuna": "<s>S\n\nUSER: hi\nASSISTANT: yo</s>\nUSER: bye\nASSISTANT:",
    "alpaca": "S\n\n### Instruction:\nhi\n\n### Response:\nyo</s>\n\n### Instruction:\nbye\n\n### Response:\n",
}


def render(source: str, messages: list[dict[str, Any]]) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_named_templates(name: str) -> None:
    assert render(read_template(name), CONVERSATION) == RENDERED[name]


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gemma", "gemma3"),
        ("llama2", "llama2"),
        ("llama3", "llama3"),
        ("phi3", "phi3.5"),
        ("zephyr", "stablelm-zephyr"),
    ],
)
def test_named_templates_are_the_published_ones(name: str, published: str) -> None:
    source = (Path(__file__).parent / "data" / "chat_templates" / f"{published}.jinja").read_text("utf-8")
    chat = [{**message, "content": f" {message['content']} x\n"} for message in CONVERSATION]
    for messages in (CONVERSATION, CONVERSATION[1:], CONVERSATION[1:2], chat, chat[1:]):
        assert render(read_template(name), messages) == render(source, messages)


def test_templates_from_files(tmp_path: Path) -> None:
    path = tmp_path / "x.jinja"
    path.write_text("{{ messages[0].content }}!\n", "utf-8")
    assert render(read_template(str(path)), [{"role": "user", "content": "hi"}]) == "hi!"
    with pytest.raises(ChatTemplateError, match=r"'nope' is neither a file nor one of chatml, "):
        read_template("nope")
    path.write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match="byte 0 is not UTF-8"):
        read_template(str(path))
    path.write_bytes(b" ")
    with pytest.raises(ChatTemplateError, match="is empty"):
        read_template(str(path))
    with pytest.raises(ChatTemplateError, match="directory"):
        read_template(str(tmp_path))
