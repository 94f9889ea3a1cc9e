"""`rvllm chat`: the session, both backends, and the terminal, as a pipe and as a pty."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from echo_backend import EchoBackend
from page_server import FakeServer, fake_server
from server_client import TinyServer, make_llm, wait_until
from tiny_gguf import write_tiny_model

from rvllm import LLM, SamplingParams
from rvllm.chat_backends import LocalChat, ServerChat
from rvllm.chat_commands import run_command
from rvllm.chat_session import ChatDelta, ChatError, ChatSession
from rvllm.chat_template import ChatTemplate
from rvllm.cli import main

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m rvllm` in the checkout would find the sources there; the history of lines goes to the folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RVLLM_API_KEY", raising=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path, metadata={"tokenizer.chat_template": TEMPLATE}, context_length=100_000)
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, num_blocks=64, max_model_len=512)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


def text_of(answer: Iterator[ChatDelta]) -> str:
    return "".join(delta.text for delta in answer)


# The session


def test_turns_undo_regenerate_clear() -> None:
    backend = EchoBackend()
    session = ChatSession(backend, SamplingParams(), system="be brief")
    assert text_of(session.ask("one two")) == "one two"
    assert text_of(session.ask("three")) == "three"
    assert [m["role"] for m in backend.asked[1]] == ["system", "user", "assistant", "user"]
    assert text_of(session.regenerate()) == "three"
    assert backend.asked[2] == backend.asked[1]
    assert (session.undo(), len(session.messages)) == ("three", 2)
    session.clear()
    text_of(session.ask("four"))
    assert backend.asked[3] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "four"},
    ]
    assert session.stats is not None and session.stats.num_tokens == 1


def test_stopped_answers_are_kept_and_empty_ones_taken_back() -> None:
    backend = EchoBackend()
    session = ChatSession(backend, SamplingParams())
    answer = session.ask("one two three")
    while next(answer).text != "one":
        pass
    answer.close()  # type: ignore[attr-defined]
    assert [m["content"] for m in session.messages] == ["one two three", "one"]
    answer = session.ask("four")
    next(answer)
    answer.close()  # type: ignore[attr-defined]
    assert [m["content"] for m in session.messages] == ["one two three", "one"]
    backend.error = "no"
    for ask in (lambda: session.ask("five"), session.regenerate):
        with pytest.raises(ChatError):
            text_of(ask())
        assert [m["content"] for m in session.messages] == ["one two three", "one"]


def test_thoughts_of_a_local_model_are_told_apart(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = list(LocalChat(llm, "tiny").stream([{"role": "user", "content": "hi"}], GREEDY))
    for source in (TEMPLATE + "<think>", "<think></think>" + TEMPLATE):
        monkeypatch.setattr(llm, "chat_template", ChatTemplate(source))
        deltas = list(LocalChat(llm, "tiny").stream([{"role": "user", "content": "hi"}], GREEDY))
        text, thoughts = ("".join(getattr(d, name) for d in deltas) for name in ("text", "reasoning"))
        assert (text == "") == source.endswith("<think>") and bool(text) != bool(thoughts)
        assert (
            deltas[-1].num_tokens == plain[-1].num_tokens
            and deltas[-1].finish_reason == plain[-1].finish_reason
        )


def test_local_answers_are_those_of_llm_chat(llm: LLM) -> None:
    session = ChatSession(LocalChat(llm, "tiny"), GREEDY, system="sys")
    messages = [{"role": "system", "content": "sys"}]
    for question in ("hi", "and then", "more"):
        messages.append({"role": "user", "content": question})
        expected = llm.chat(messages, GREEDY)[0].outputs[0].text
        assert text_of(session.ask(question)) == expected
        messages.append({"role": "assistant", "content": expected})
    assert session.stats is not None and session.stats.num_cached_tokens >= 16


def test_full_context_leaves_out_the_oldest_turns(llm: LLM) -> None:
    notes: list[str] = []
    session = ChatSession(LocalChat(llm, "tiny"), GREEDY, notify=notes.append)
    for letter in "abcd":
        text_of(session.ask(letter * 200))
    assert notes == ["the context is full: the oldest turn of the conversation left out"] * 2
    assert [m["content"][0] for m in session.messages[::2]] == ["c", "d"]
    with pytest.raises(ChatError, match=r"\d+ tokens, too many for a context of 512"):
        text_of(session.ask("x" * 600))
    assert [m["content"][0] for m in session.messages[::2]] == ["c", "d"]
    assert not llm.engine.has_unfinished


def test_closing_an_answer_frees_its_blocks(llm: LLM) -> None:
    session = ChatSession(LocalChat(llm, "tiny"), SamplingParams(temperature=0, max_tokens=300))
    free = llm.engine.stats.free_blocks
    answer = session.ask("hello")
    next(answer)
    assert llm.engine.stats.free_blocks < free
    answer.close()  # type: ignore[attr-defined]
    assert llm.engine.stats.free_blocks == free


def test_settings() -> None:
    session = ChatSession(EchoBackend(), SamplingParams())
    run_command(session, "/set temperature=0.5 top_k=7 max_tokens=none stop=\\n\\n")
    params = session.params
    assert (params.temperature, params.top_k, params.max_tokens, params.stop) == (0.5, 7, None, "\n\n")
    for line, word in {
        "/set temperature=-1": "temperature",
        "/set top_k=1 top_p=2": "top_p",
        "/set bogus=1": "bogus",
        "/set temperature": "NAME=VALUE",
        "/set seed=1.5": "seed: .*1.5",
        "/set temperature=x": "temperature: .*'x'",
    }.items():
        with pytest.raises(ChatError, match=word):
            run_command(session, line)
        assert session.params == params


def test_save_and_load(tmp_path: Path) -> None:
    session = ChatSession(EchoBackend(), SamplingParams(), system="sys")
    text_of(session.ask("häh"))
    run_command(session, f"/save {tmp_path / 'a b.json'}")
    other = ChatSession(EchoBackend(), SamplingParams())
    run_command(other, f"/load {tmp_path / 'a b.json'}")
    assert (other.system, other.messages) == (session.system, session.messages)
    contents = {
        "none.json": None,
        "text.json": "hi",
        "list.json": "[]",
        "content.json": '{"messages": [{"role": "user", "content": 1}]}',
        "order.json": '{"messages": [{"role": "user", "content": "a"}]}',
    }
    for name, text in contents.items():
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(ChatError, match=name):
            run_command(other, f"/load {tmp_path / name}")
    assert other.messages == session.messages


# A server


def test_server_answers(server: FakeServer) -> None:
    params = SamplingParams(temperature=0.5, top_k=3, seed=4, max_tokens=9)
    session = ChatSession(ServerChat(f"{server.url}v1/"), params)
    assert (session.backend.name, session.backend.max_model_len) == ("tiny-model", 8192)
    assert text_of(session.ask("one two")) == "You said: one two"
    assert session.stats is not None
    assert (session.stats.num_prompt_tokens, session.stats.num_tokens) == (20, 4)
    text_of(session.ask("three"))
    body = server.requests[1]
    assert [message["content"] for message in body["messages"]] == ["one two", "You said: one two", "three"]
    names = ("temperature", "top_k", "seed", "max_tokens", "top_p", "model")
    assert [body.get(name) for name in names] == [0.5, 3, 4, 9, None, "tiny-model"]


def test_server_failures(server: FakeServer) -> None:
    session = ChatSession(ServerChat(server.url), GREEDY)
    text_of(session.ask("one"))
    error = {"message": "too\nlong", "code": "context_length_exceeded"}
    server.failures.append((400, {}, error))
    assert text_of(session.ask("two")) == "You said: two"
    assert server.requests[2]["messages"] == [{"role": "user", "content": "two"}]
    failures: list[tuple[int, dict[str, str], dict[str, Any], str]] = [
        (400, {}, error, "too long"),
        (429, {"Retry-After": "7"}, {"message": "full"}, "429: full; try again in 7 s"),
        (500, {}, {}, "500: Internal Server Error"),
    ]
    session.clear()
    for status, headers, body, text in failures:
        server.failures.append((status, headers, body))
        with pytest.raises(ChatError, match=text):
            text_of(session.ask("three"))
    server.breaks = True
    with pytest.raises(ChatError, match="broke off"):
        text_of(session.ask("a long story"))
    assert session.messages[-1] == {"role": "assistant", "content": "You said:"}
    server.die()
    with pytest.raises(ChatError, match="refused"):
        text_of(session.ask("three"))


def test_server_hang_up(server: FakeServer) -> None:
    server.go_on.clear()
    answer = ChatSession(ServerChat(server.url), GREEDY).ask("a long story")
    while next(answer).text != " said:":
        pass
    answer.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 30
    while not server.hang_ups:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_interrupt_ends_the_wait_for_a_server(server: FakeServer) -> None:
    server.silent = True
    session = ChatSession(ServerChat(server.url), GREEDY)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            text_of(session.ask("hi"))
        except ChatError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: bool(server.requests))
    session.backend.interrupt()
    thread.join(30)
    assert len(errors) == 1 and session.messages == []


def test_the_real_server_answers_as_the_model_here(tmp_path: Path) -> None:
    llm = make_llm(tmp_path)
    expected, got = [], []
    here = ChatSession(LocalChat(llm, "tiny"), GREEDY, system="sys")
    for question in ("one", "two"):
        expected.append(text_of(here.ask(question)))
    served = TinyServer(llm, api_keys=("sĕcret",))
    try:
        with served.on_socket() as url:
            with pytest.raises(ChatError, match=r"401: .*--api-key"):
                ServerChat(url)
            with pytest.raises(ChatError, match="only: tiny, other"):
                ServerChat(url, "big", "sĕcret")
            there = ChatSession(ServerChat(url, "other", "sĕcret"), GREEDY, system="sys")
            for question in ("one", "two"):
                got.append(text_of(there.ask(question)))
            assert there.stats is not None and there.stats.num_prompt_tokens > 0
            there.params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
            answer = there.ask("three")
            while not next(answer).text:
                pass
            answer.close()  # type: ignore[attr-defined]
            served.assert_idle()
            text_of(there.ask("x" * 440))
            assert len(there.messages) < 8 and there.messages[-2]["content"] == "x" * 440
    finally:
        served.close()
    assert got == expected


# As a pipe


class Run:
    def __init__(self, capsys: pytest.CaptureFixture[str], *argv: str) -> None:
        capsys.readouterr()
        self.status = main(["chat", *argv])
        self.out, self.err = capsys.readouterr()


@pytest.fixture
def chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> Callable[..., Run]:
    def run(stdin: bytes, *argv: str) -> Run:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return Run(capsys, "-m", str(model), "-c", "512", "--num-blocks", "64", *argv)

    return run


def test_pipe(chat: Callable[..., Run], llm: LLM) -> None:
    run = chat(b"hi\n\nzwei\\\nZeilen\n", "-n", "8", "--temp", "0")
    first = llm.chat([{"role": "user", "content": "hi"}], GREEDY)[0].outputs[0].text
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "zwei\nZeilen"},
    ]
    second = llm.chat(messages, GREEDY)[0].outputs[0].text
    assert (run.status, run.err, run.out) == (0, "", f"{first}\n{second}\n")


def test_pipe_commands(chat: Callable[..., Run], tmp_path: Path) -> None:
    stdin = '/set temperature=0 max_tokens=4\n"""a\nb"""\n//x\n/stats\n/save chat.json\n/exit\nnever\n'
    run = chat(stdin.encode(), "--system", "sys", "--ignore-eos")
    assert run.status == 0
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [m["content"] for m in messages if m["role"] != "assistant"] == ["sys", "a\nb", "/x"]
    assert "answer: 4 tokens" in run.err and "temperature=0.0" in run.err
    assert run.out == "".join(f"{m['content']}\n" for m in messages if m["role"] == "assistant")


def test_pipe_with_mistakes_goes_on(chat: Callable[..., Run]) -> None:
    run = chat(b"/nope\n/undo\n/load\n/stats x\n" + b"x" * 600 + b"\nhi\n", "-n", "4")
    assert run.status == 2
    errors = run.err.splitlines()
    assert len(errors) == 5 and all(line.startswith("rvllm: error: ") for line in errors)
    assert run.out != ""


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--url", "ftp://x"], ["'ftp://x'", "http://localhost:8000"]),
        *[
            (["--url", url], [repr(url), "is no URL such as http://localhost:8000"])
            for url in (
                "http://[::1",
                "http://x:99999",
                "http://x:0",
                "x:a",
                "http://a..b",
                "http://x/\u00e9",
            )
        ],
        *[(["--url", "http://x", "--api-key", key], ["API key", "one line"]) for key in ("a\nb", "\u200b")],
        (["--url", "http://localhost:1", "-t", "2"], ["--threads", "--url"]),
        (["--url", "http://localhost:1"], ["http://localhost:1", "refused"]),
        (["--api-key", "x"], ["--api-key", "--url"]),
        (["--tui"], ["terminal"]),
        (["-m", "/nowhere.gguf"], ["/nowhere.gguf"]),
        (["--temperature", "-1"], ["temperature"]),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]) -> None:
    run = Run(capsys, *argv)
    assert (run.status, run.out, run.err.count("\n")) == (2, "", 1)
    for word in words:
        assert word in run.err


def test_input_that_is_not_utf8(chat: Callable[..., Run]) -> None:
    run = chat(b"hi \xff\n")
    assert run.status == 2 and "UTF-8" in run.err and run.err.count("\n") == 1


def test_model_without_a_template(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "base.gguf")
    run = Run(capsys, "-m", str(tmp_path / "base.gguf"), "--num-blocks", "8")
    assert (run.status, run.out, run.err.count("\n")) == (2, "", 1)
    assert "chat template" in run.err


def test_tui_without_textual(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rvllm.tui", raising=False)
    monkeypatch.setitem(sys.modules, "textual", None)
    run = Run(capsys, "--tui")
    assert (run.status, run.err) == (2, "rvllm: error: --tui needs textual: pip install 'rvllm[tui]'\n")


# In a terminal


class Terminal:
    """The command in a pty."""

    def __init__(self, *argv: str) -> None:
        self.fd, child = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rvllm", "chat", *argv],
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb", "NO_COLOR": "1"},
            # A shell starts what it runs in the background with SIGINT ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        os.close(child)
        self.text = ""

    def send(self, text: str) -> None:
        os.write(self.fd, text.encode(errors="surrogateescape"))

    def interrupt(self, at_prompt: bool = False) -> None:
        self.process.send_signal(signal.SIGINT)
        if at_prompt:
            self.send("\n")  # Python looks at signals late if one comes just before it waits for a key

    def expect(self, text: str, seconds: float = 60) -> str:
        """What comes up to text, and text."""
        deadline = time.monotonic() + seconds
        while text not in self.text:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            data = b""
            if ready:
                try:
                    data = os.read(self.fd, 65536)
                except OSError:  # the other side is closed
                    data = b""
            if not data:
                raise AssertionError(f"{text!r} is not in {self.text!r}")
            self.text += data.decode(errors="replace")
        found, _, self.text = self.text.partition(text)
        return found + text

    def wait(self) -> int:
        return self.process.wait(60)


@pytest.fixture
def terminal(model: Path) -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def start(*argv: str) -> Terminal:
        started.append(Terminal("-m", str(model), "--num-blocks", "6300", *argv))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        os.close(each.fd)


def test_ctrl_c_stops_the_answer_and_then_the_chat(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    chat = terminal("--ignore-eos", "-n", "99000")
    chat.expect("> ")
    chat.send("hello\n")
    chat.expect("hello")
    while len(chat.text) < 20:
        chat.text += os.read(chat.fd, 1000).decode(errors="replace")
    chat.interrupt()
    chat.expect("stopped; Ctrl-C again or Ctrl-D ends the chat")
    chat.expect("> ")
    chat.send("/save x.json\n")
    chat.expect("saved 2 messages")
    chat.expect("> ")
    chat.interrupt(at_prompt=True)
    chat.expect("stopped; Ctrl-C again")
    chat.expect("> ")
    chat.interrupt(at_prompt=True)
    assert chat.wait() == 130
    question, answer = json.loads((tmp_path / "x.json").read_text())["messages"]
    assert question["content"] == "hello" and len(answer["content"]) > 10


def test_ctrl_d_ends_the_chat_and_lines_are_remembered(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    chat = terminal("-n", "4")
    chat.expect("> ")
    chat.send("/system \udcff\n")
    chat.expect("rvllm: error: standard input: byte 0xff is not UTF-8\r\n> ")
    chat.send("/system one\\\n")
    chat.send("two\n")
    chat.expect("system: one")
    chat.expect("> ")
    chat.send("\x04")
    assert chat.wait() == 0
    history = tmp_path / "cache" / "chat_history"
    assert "/system one\\" in history.read_text(errors="replace")
    assert history.stat().st_mode & 0o077 == 0
