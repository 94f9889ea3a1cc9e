"""A small server with OpenAI's streaming completions, whose answers are known, in a thread of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer(ThreadingHTTPServer):
    """bodies: of all requests so far. Requests fail as `failures` says, by their number from 0 on.

    A failure is a status, "cut" (the connection ends in mid-stream), "error" (an event with an error), "silent" (no
    answer until the server stops), "html" (a page with status 200), "aborted" (a finish_reason that is no good end).
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.failures: dict[int, object] = {}
        self.max_active = 0
        self.active = 0
        self.lock = threading.Lock()
        self.stopping = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(200, json.dumps({"data": [{"id": "fake"}, {"id": "other"}]}))
        else:
            self._send(404, "no such page")

    def do_POST(self) -> None:
        server = self.server
        body: dict[str, Any] = {}
        with suppress(ValueError):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            number = len(server.bodies)
            server.bodies.append(body)
            server.headers.append({name.lower(): value for name, value in self.headers.items()})
            server.paths.append(self.path)
            server.active += 1
            server.max_active = max(server.max_active, server.active)
        try:
            self._answer(body, server.failures.get(number))
        finally:
            with server.lock:
                server.active -= 1

    def _answer(self, body: dict[str, Any], failure: object) -> None:
        if isinstance(failure, int):
            self._send(failure, json.dumps({"error": {"message": f"no luck\nwith {failure}", "type": "x"}}))
        elif failure == "html":
            self._send(200, "<html>")
        elif failure == "silent":
            self.server.stopping.wait()
            self.close_connection = True
        else:
            self._stream(body, failure)

    def _send(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: dict[str, Any], failure: object) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        is_chat = "messages" in body
        prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
        if is_chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for i in range(body["max_tokens"]):
            text = f"{i},"
            self._event(
                {
                    "choices": [
                        {"index": 0, "delta": {"content": text}} if is_chat else {"index": 0, "text": text}
                    ]
                }
            )
            if failure == "cut":
                self.close_connection = True
                return
            if failure == "error":
                self._event({"error": {"message": "the engine is gone"}})
                return self._chunk(b"")
        reason = "abort" if failure == "aborted" else "length"
        end = {"delta": {}} if is_chat else {"text": ""}
        self._event({"choices": [{"index": 0, **end, "finish_reason": reason}]})
        if body.get("stream_options", {}).get("include_usage"):
            usage = {
                "prompt_tokens": len(prompt.split()),
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": 1},
            }
            self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict[str, Any]) -> None:
        data = f"data: {json.dumps(event)}\r\n\r\n".encode()
        # An event may come in pieces, and several at once: both halves reach the client as they please.
        self._chunk(data[:9])
        self._chunk(data[9:])

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.stopping.set()
        server.shutdown()
        thread.join()
        server.server_close()
