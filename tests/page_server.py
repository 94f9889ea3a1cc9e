"""A stand-in for `rvllm serve`: the real page, and answers that are written down."""

from __future__ import annotations

import json
import mimetypes
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import rvllm.server

PAGE = Path(rvllm.server.__file__).parent / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

HOSTILE = """<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>

[run](javascript:window.hacked=3) [data](data:text/html,<script>window.hacked=4</script>)
[ok](https://example.com/?q="><svg/onload=window.hacked=5>) ![image](https://example.com/x.png)

```"><img src=x onerror=window.hacked=6>
</code></pre><script>window.hacked=7</script>
```

| <b onclick=window.hacked=8>cell</b> |
|---|
| `<i>code</i>` |"""

MARKDOWN = """# Title

Some **bold**, *slanted* and `code`; a [link](https://example.com/a).

1. one
2. two
   - inner

```python
print("<hi>")
```

| a | b |
|---|--:|
| 1 | 2 |"""

# The contrast of every text on every ground, by the names of their colours.
CONTRASTS = """() => {
  const probe = document.body.appendChild(document.createElement("i"));
  const channels = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(Number);
  };
  const luminance = (name) => channels(name).map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const found = {};
  for (const ground of ["ground", "side", "raised", "sunken", "hover"])
    for (const text of ["text", "muted", "accent", "warn", "bad"]) {
      const [low, high] = [luminance(ground), luminance(text)].sort((a, b) => a - b);
      found[`${text} on ${ground}`] = (high + 0.05) / (low + 0.05);
    }
  for (const [text, ground] of [["on-accent", "accent"], ["text", "bubble"], ["bad", "bad-ground"]]) {
    const [low, high] = [luminance(ground), luminance(text)].sort((a, b) => a - b);
    found[`${text} on ${ground}`] = (high + 0.05) / (low + 0.05);
  }
  probe.remove();
  return found;
}"""


class FakeServer(ThreadingHTTPServer):
    """answers: the text for each last user message; others are echoed. failures: (status, headers, error) to give,
    one for each request to come. go_on: answers stop after two words until it is set; breaks: they end there;
    silent: not even a status comes, until the server is closed."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.answers: dict[str, str] = {}
        self.failures: list[tuple[int, dict[str, str], dict[str, Any]]] = []
        self.health: dict[str, Any] = {"status": "ok", "running": 3, "waiting": 1, "kv_cache_usage": 0.42}
        self.api_key: str | None = None
        self.go_on = threading.Event()
        self.go_on.set()
        self.breaks = False
        self.silent = False
        self.delay = 0.0
        self.finish_reason = "stop"
        self.reasoning, self.reasoning_name = "", "reasoning_content"
        self.hang_ups = 0
        self.connections: list[socket.socket] = []
        self.decode_tokens = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def die(self) -> None:
        self.shutdown()
        self.server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # browsers hang up


class Handler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            status = 200 if self.server.health["status"] == "ok" else 503
            self.reply(status, {"decode_tokens": self.server.decode_tokens, **self.server.health})
        elif self.path == "/v1/models":
            if self.is_allowed():
                self.reply(200, {"data": [{"id": "tiny-model", "max_model_len": 8192}]})
        else:
            self.send_file(PAGE / (self.path[1:] or "index.html"))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.is_allowed():
            return
        self.server.requests.append(body)
        if self.server.failures:
            status, headers, error = self.server.failures.pop(0)
            self.reply(status, {"error": error}, headers)
            return
        if self.server.silent:
            self.rfile.read(1)
            return
        try:
            self.stream(body)
        except (BrokenPipeError, ConnectionResetError):
            self.server.hang_ups += 1
            self.close_connection = True

    def stream(self, body: dict[str, Any]) -> None:
        question = body["messages"][-1]["content"]
        words = self.server.answers.get(question, f"You said: {question}").split(" ")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.event({"delta": {"role": "assistant", "content": ""}}, 0)
        if self.server.reasoning:
            self.event({"delta": {self.server.reasoning_name: self.server.reasoning}}, 0)
        for i, word in enumerate(words):
            if i == 2:
                while not self.server.go_on.wait(0.02):
                    self.wfile.write(b": waiting\n\n")  # fails once the browser has gone
                if self.server.breaks:
                    return
            self.event({"delta": {"content": word if i == 0 else f" {word}"}}, i + 1)
            self.server.decode_tokens += 1
            time.sleep(self.server.delay)
        self.event({"delta": {}, "finish_reason": self.server.finish_reason}, len(words))
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, choice: dict[str, Any], tokens: int) -> None:
        usage = {"prompt_tokens": 20, "completion_tokens": tokens, "total_tokens": 20 + tokens}
        data = json.dumps({"choices": [{"index": 0, **choice}], "usage": usage})
        self.wfile.write(f"data: {data}\n\n".encode())

    def is_allowed(self) -> bool:
        key = self.server.api_key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self.reply(401, {"error": {"message": "a valid API key is needed", "code": "invalid_api_key"}})
        return False

    def reply(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_file(self, path: Path) -> None:
        if not path.is_file():
            self.reply(404, {})
            return
        data = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Content-Type", mimetypes.guess_type(path.name)[0] or "text/plain")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.go_on.set()
        server.die()
