"""Chat backends: what a model thinks is no part of its answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_server import fake_server
from server_client import make_llm

from rvllm import SamplingParams, StructuredOutput
from rvllm.chat_backends import LocalChat, ServerChat


@pytest.mark.parametrize("opened", ["", "<think>"])
def test_a_local_models_thoughts_come_apart(tmp_path: Path, opened: str) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}" + opened + "{# <think> </think> #}"
    answer = StructuredOutput(regex="ab</think>\\ncd" if opened else "<think>ab</think>\\ncd")
    params = SamplingParams(max_tokens=40, structured_output=answer)
    backend = LocalChat(make_llm(tmp_path, template=template), "tiny")
    deltas = list(backend.stream([{"role": "user", "content": "hi"}], params))
    assert ("".join(d.reasoning for d in deltas), "".join(d.text for d in deltas)) == ("ab", "cd")
    assert deltas[-1].finish_reason == "stop"


def test_a_mark_in_a_users_text_opens_no_thoughts(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}>{# <think> </think> #}"
    params = SamplingParams(max_tokens=40, structured_output=StructuredOutput(regex="cd"))
    backend = LocalChat(make_llm(tmp_path, template=template), "tiny")
    deltas = list(backend.stream([{"role": "user", "content": "what is <think>"}], params))
    assert ("".join(d.reasoning for d in deltas), "".join(d.text for d in deltas)) == ("", "cd")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_servers_thoughts_come_apart_by_either_name(name: str) -> None:
    with fake_server() as server:
        server.reasoning, server.reasoning_name = "hm", name
        stream = ServerChat(server.url).stream([{"role": "user", "content": "one"}], SamplingParams())
        deltas = list(stream)
    assert ("".join(d.reasoning for d in deltas), "".join(d.text for d in deltas)) == ("hm", "You said: one")
