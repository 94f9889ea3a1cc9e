"""Chats over HTTP with the templates of model families, with broken and hostile ones, and with none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_templates import FAMILIES, TOOL, WRITTEN_CALLS, template_of
from server_client import TinyServer, make_llm

from rvllm.chat_template import ChatTemplate

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    server = TinyServer(make_llm(tmp_path_factory.mktemp("model"), context_length=4096))
    yield server
    server.close()


def use(server: TinyServer, template: ChatTemplate | None) -> None:
    server.model = server.app.state.model = replace(server.model, chat_template=template)


@pytest.mark.parametrize(
    "name",
    [
        "qwen2.5",
        "qwen3-coder",
        "command-r7b",
        "granite3.3",
        "phi4-mini",
        "mistral-nemo",
        "llama3.1",
        "gemma2",
    ],
)
def test_calls_come_as_such(server: TinyServer, name: str) -> None:
    use(server, template_of(name))
    call = WRITTEN_CALLS[FAMILIES[name].tool_format]
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "How is it?"}],
        "tools": [TOOL],
        "structured_outputs": {"choice": [call]},  # so that the model must write it
        "max_tokens": 600,
    }
    whole = server.ok(PATH, **body)["choices"][0]
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", None)
    chunks = server.events(PATH, **body)
    streamed = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
    for (found,) in (whole["message"]["tool_calls"], streamed):
        assert found["function"]["name"] == "get_weather"
        assert json.loads(found["function"]["arguments"]) == {"city": "Zürich"}


HOSTILE = [
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch PWNED') }}",
    "{{ messages.append(1) }}",
    "{{ messages | attr('__class__') }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{% for i in range(10**9) %}{% endfor %}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates_do_no_harm(
    server: TinyServer, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    use(server, ChatTemplate(source + "{{ messages[0].content }}"))
    response = server.post(PATH, messages=HI, max_tokens=1)
    assert response.status_code in (200, 400), response.text
    assert not any(word in response.text for word in ("subprocess", "<class", "Traceback"))
    assert list(tmp_path.iterdir()) == []
    server.ok("/v1/completions", prompt="hi", max_tokens=1)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "the model has no chat template: use /v1/completions, or start with --chat-template"),
        ("{% if %}", "chat template, line 1: Expected an expression, got 'end of statement block'"),
        ("{{ foo.bar.baz }}", "chat template: 'foo' is undefined"),
        ("{{ raise_exception('No.') }}", "chat template: No."),
    ],
)
def test_a_model_without_a_usable_template_still_completes(
    server: TinyServer, source: str | None, message: str
) -> None:
    use(server, None if source is None else ChatTemplate(source))
    for more in ({}, {"stream": True}, {"tools": [TOOL]}):
        error = server.refused(PATH, messages=HI, **more)
        assert error["message"] == message and error["param"] == (None if source is None else "messages")
    server.ok("/v1/completions", prompt="hi", max_tokens=1)


def test_a_long_template_is_no_trouble(server: TinyServer) -> None:
    use(server, ChatTemplate("{#" + "x" * 10**6 + "#}{{ messages[0].content }}"))
    assert server.ok(PATH, messages=HI, max_tokens=1)["usage"]["prompt_tokens"] == 2
