"""Clients that do not keep to HTTP, or leave things unfinished: each gets an answer or its end, the others theirs."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from pydantic import BaseModel, ValidationError
from server_client import TinyServer, data_of, error_of, make_llm, wait_until
from starlette.types import Message
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from rvllm.server import connection, security, streaming
from rvllm.server.app import BODIES
from rvllm.server.serve import HTTP_SETTINGS
from rvllm.server.streaming import EventStream

PATH = "/v1/completions"
GET = b"GET /version HTTP/1.1\r\nHost: tiny\r\n\r\n"
SLOW_TEMPLATE = "{% for i in range(9999) %}{% for i in range(9999) %}{% endfor %}{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    llm = make_llm(tmp_path_factory.mktemp("model"), context_length=8192, num_blocks=1100, max_num_seqs=4)
    with closing(TinyServer(llm)) as server:
        yield server


@pytest.fixture(scope="module")
def url(server: TinyServer) -> Iterator[str]:
    with server.on_socket() as url:
        yield url


def connect(url: str) -> socket.socket:
    return socket.create_connection((httpx.URL(url).host, httpx.URL(url).port), 20)  # type: ignore[arg-type]


def rest(client: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    data = b""
    try:
        while part := client.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


def talk(url: str, data: bytes) -> bytes:
    with connect(url) as client:
        client.sendall(data)
        return rest(client)


def error_in(answer: bytes, status: int) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:300]
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error["message"]


def is_well(url: str) -> None:
    assert httpx.post(url + PATH, json={"prompt": "Hi", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("part", [b"GET /ver", b"GET /version HTTP/1.1\r\nHost: ti", GET + b"GET /", b"\r\n"])
def test_a_head_that_does_not_end_is_timed_out(
    url: str, part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT", 0.2)
    with connect(url) as client:
        client.sendall(part)
        answer = rest(client)
    assert answer.count(b"HTTP/1.1 200 OK") == part.count(GET)
    assert "headers took longer than" in error_in(answer[answer.rindex(b"HTTP/1.1") :], 408)
    is_well(url)


def test_headers_that_drip_are_timed_out(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT", 0.3)
    with connect(url) as client:
        client.sendall(b"GET /version HTTP/1.1\r\n")
        with pytest.raises(OSError):
            while True:
                client.sendall(b"X-More: yes\r\n")
                time.sleep(0.02)
    is_well(url)


def test_a_connection_without_a_word_is_closed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT", 0.2)
    assert talk(url, b"") == b""


def test_a_connection_is_kept_between_requests(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT", 0.2)
    with httpx.Client(base_url=url) as client:
        for _ in range(2):
            before = client.get("/version")
            time.sleep(0.5)
        assert before.status_code == 200
        sockets = {id(connection._connection) for connection in client._transport._pool.connections}  # type: ignore[attr-defined]
        assert len(sockets) == 1


@pytest.mark.parametrize(
    "head",
    [b"GET /" + b"a" * 300_000, b"GET / HTTP/1.1\r\nX: " + b"a" * 300_000,
     b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 100_000,
     b"POST /v1/completions HTTP/1.1\r\nHost: tiny\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 300_000],
)  # fmt: skip
def test_a_head_without_bounds_is_refused(url: str, head: bytes) -> None:
    answer = talk(url, head)
    assert answer == b"" or "headers are larger" in error_in(answer, 431)
    is_well(url)


def test_a_body_that_drips_is_a_408(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "BODY_TIMEOUT", 0.3)
    with connect(url) as client:
        client.sendall(f"POST {PATH} HTTP/1.1\r\nHost: tiny\r\nContent-Length: 100000\r\n\r\n".encode())
        stopped = threading.Event()

        def drip() -> None:
            while not stopped.wait(0.02):
                try:
                    client.sendall(b" ")
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        answer = rest(client)
        stopped.set()
        thread.join()
    assert "too slowly" in error_in(answer, 408)
    is_well(url)


@pytest.mark.parametrize("path", [PATH, "/nope", "/health"])
def test_a_client_that_sends_all_before_it_reads_gets_the_error(url: str, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: tiny\r\nConnection: close\r\nContent-Length: {20 << 20}\r\n\r\n"
    answer = talk(url, head.encode() + bytes(20 << 20))
    error_in(answer, {PATH: 413, "/nope": 404, "/health": 405}[path])


def test_no_body_is_asked_for_that_is_not_wanted(url: str) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: tiny\r\nConnection: close\r\nExpect: 100-continue\r\n"
    error_in(talk(url, f"{head}Content-Length: {20 << 20}\r\n\r\n".encode()), 413)


def test_the_rest_of_a_body_that_nobody_reads_is_timed_out(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT", 0.2)
    with connect(url) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: tiny\r\nContent-Length: 100000\r\n\r\n")
        wait_until(lambda: client.recv(65536, socket.MSG_PEEK).endswith(b"}"))
        client.sendall(b" ")
        assert rest(client).count(b"HTTP/1.1") == 1


def test_a_reader_that_has_stopped_is_let_go(
    server: TinyServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "WRITE_TIMEOUT", 0.3)
    body = json.dumps({"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "logprobs": 20, "stream": True})
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((httpx.URL(url).host, httpx.URL(url).port))
        client.sendall(
            f"POST {PATH} HTTP/1.1\r\nHost: tiny\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        wait_until(lambda: server.engine.num_running == 1)
        server.assert_idle()
        assert not rest(client).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_slow_reader_is_not_let_go(server: TinyServer) -> None:
    """As the event loop and the transport would call it: what is left to write falls, and falls no more."""
    timers: list[tuple[Callable[..., None], tuple[int, ...]]] = []
    loop: Any = SimpleNamespace(call_later=lambda _, call, *arguments: timers.append((call, arguments)))
    aborted: list[bool] = []
    left = [1000]
    transport: Any = SimpleNamespace(
        get_write_buffer_size=lambda: left[0], abort=lambda: aborted.append(True)
    )
    config = uvicorn.Config(server.app, **HTTP_SETTINGS)
    config.load()
    client = connection.Connection(config, ServerState(), {}, loop)
    client.transport, client.flow = transport, FlowControl(transport)
    client.pause_writing()
    for size in (999, 400, 400):
        assert not aborted
        left[0] = size
        call, arguments = timers.pop()
        call(*arguments)
    assert aborted and not timers


def test_a_client_that_pipelines_and_hangs_up_ends_its_request(
    server: TinyServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rvllm")
    body = json.dumps({"prompt": "x", "max_tokens": 8000, "ignore_eos": True})
    head = f"POST {PATH} HTTP/1.1\r\nHost: tiny\r\nX-Request-Id: gone\r\nContent-Length: {len(body)}\r\n\r\n"
    with connect(url) as client:
        client.sendall((head + body).encode() + GET * 3)
        wait_until(lambda: server.engine.num_running == 1)
    wait_until(lambda: "request_id=gone" in caplog.text)
    assert "status=499" in caplog.text and "finish_reason=abort" in caplog.text
    server.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_an_http_10_client_gets_no_chunks(url: str, stream: bool) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 3, "ignore_eos": True, "stream": stream})
    answer = talk(
        url, f"POST {PATH} HTTP/1.0\r\nHost: tiny\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower() and (b"content-length" in head.lower()) is not stream
    if stream:
        assert data_of(content)[-1] == "[DONE]"
    else:
        assert json.loads(content)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "data",
    [b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
     b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n", b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n",
     b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"GET / HTTP/1.1\r\nHost x\r\n\r\n",
     b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
     b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
     b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
)  # fmt: skip
def test_what_is_no_http_is_a_400(url: str, data: bytes) -> None:
    answer = talk(url, data)
    assert answer == b"" or "no valid HTTP" in error_in(answer, 400)
    is_well(url)


@pytest.mark.parametrize("head", [b"/version?" + b"a" * 70_000, b"/version HTTP/1.1\r\nX: " + b"a" * 70_000])
def test_a_large_head_is_refused_though_it_comes_at_a_time(url: str, head: bytes) -> None:
    end = b" HTTP/1.1" if b"HTTP" not in head else b""
    answer = talk(url, b"GET " + head + end + b"\r\n\r\n")
    assert answer == b"" or "headers are larger than 65536 bytes" in error_in(answer, 431)
    is_well(url)


@pytest.mark.parametrize("body", [b"zz\r\n", b"f" * 17 + b"\r\n", b"1\r\n{}\r\n"])
def test_a_body_that_is_no_http_is_a_400(url: str, body: bytes) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: tiny\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    assert "no valid HTTP" in error_in(talk(url, head + body), 400)
    is_well(url)


def test_pipelined_requests_are_answered_in_order(url: str) -> None:
    last = b"GET /nope HTTP/1.1\r\nHost: tiny\r\nConnection: close\r\n\r\n"
    answer = talk(url, GET * 200 + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 200
    assert answer[answer.rindex(b"HTTP/1.1") :].startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("wish", ["websocket", "h2c"])
def test_an_upgrade_is_not_followed(url: str, wish: str) -> None:
    """Java's client and curl --http2 ask for h2c with every first request, bodies and all."""
    body = b'{"prompt": "Hi", "max_tokens": 1}'
    head = f"Host: tiny\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: {wish}\r\nHTTP2-Settings: AAMAAABk\r\n"
    post = f"POST {PATH} HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode()
    get = f"GET /version HTTP/1.1\r\n{head}\r\n".encode()
    last = f"GET /nope HTTP/1.1\r\n{head.replace('Upgrade,', 'close, Upgrade,')}\r\n".encode()
    for sent in (
        [post + body + get + post + body + last],
        [post, body, get + post[:60], post[60:], body, last],
    ):
        with connect(url) as client:
            for part in sent:
                client.sendall(part)
                time.sleep(0.02)
            answer = rest(client)
        assert [answer.count(f"HTTP/1.1 {status} ".encode()) for status in (200, 404)] == [3, 1]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_long_texts_hold_up_nobody(url: str, path: str) -> None:
    body = {"prompt": "a long text " * 50_000} if path == "/tokenize" else {"tokens": [65] * 500_000}
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(httpx.post(url + path, json=body, timeout=60)))
    count = 0
    with httpx.Client(base_url=url, timeout=60) as client:
        thread.start()
        while thread.is_alive():
            count += client.get("/health").status_code == 200
    assert answers[0].status_code == 200 and count >= 5


BAD: dict[str, Any] = {
    "list": [[{}]] * 1000,
    "numbers": [[1.5]] * 1000,
    "object": {f"k{i}": [] for i in range(1000)},
}


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_of_many_errors_the_first_is_enough(body: type[BaseModel], value: Any) -> None:
    """A body of 8 MB that is wrong throughout held the server up for as long as it took to list all that is wrong."""
    for name in body.model_fields:
        try:
            body.model_validate_json(json.dumps({name: value}))
        except ValidationError as error:
            assert error.error_count() < 20, name


def test_a_stream_that_falls_silent_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PING_SECONDS", 0.01)

    async def run() -> list[bytes]:
        sent: list[bytes] = []
        pinged = asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            for name in (b"first", b"second"):
                pinged.clear()
                await pinged.wait()
                yield streaming.event({"name": name.decode()})

        async def send(message: Message) -> None:
            sent.append(message.get("body", b""))
            if sent[-1] == b": ping\n\n":
                pinged.set()

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def close() -> None:
            sent.append(b"closed")

        await EventStream(events(), close)({"type": "http"}, receive, send)
        await asyncio.sleep(0.03)
        return sent

    sent = asyncio.run(run())
    assert [data for data in sent if data != b": ping\n\n"] == [
        b"", b'data: {"name":"first"}\n\n', b'data: {"name":"second"}\n\n', b"", b"closed",
    ]  # fmt: skip
    assert sent[1] == b": ping\n\n" and sent[-2:] == [b"", b"closed"]


# Chats


def test_a_chat_that_cannot_fit_is_refused_before_it_is_rendered(server: TinyServer) -> None:
    limit = server.model.max_prompt_chars
    message = {"role": "user", "content": "x" * (limit // 2)}
    for body in ({"messages": [message] * 3}, {"messages": [message], "documents": [{"text": "x" * limit}]}):
        error = server.refused("/v1/chat/completions", **body)
        assert error["code"] == "context_length_exceeded" and "characters" in error["message"]


def test_a_chat_template_counts_against_the_queue_and_ends_with_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rvllm.jinja_environment.MAX_STEPS", 10**12)
    llm = make_llm(tmp_path, template=SLOW_TEMPLATE, max_num_seqs=1)
    body = json.dumps(CHAT).encode()
    with closing(TinyServer(llm, max_queue=2)) as server, server.on_socket() as url:
        for path in ("/v1/chat/completions", "/tokenize"):
            head = f"POST {path} HTTP/1.1\r\nHost: tiny\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            clients = [connect(url) for _ in range(3)]
            for client in clients:
                client.sendall(head + body)
            wait_until(lambda: server.engine.num_waiting == 3)
            for busy in ("/v1/chat/completions", "/tokenize", PATH):
                arguments: dict[str, Any] = {"prompt": "x"} if busy == PATH else CHAT
                assert "in flight" in error_of(httpx.post(url + busy, json=arguments), 429)["message"]
            for client in clients:
                client.close()
            server.assert_idle()
            is_well(url)
