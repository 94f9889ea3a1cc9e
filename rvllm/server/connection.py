"""Connection: HTTP/1.1 as uvicorn speaks it, with limits on what a client may leave unfinished."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from rvllm.server.errors import APIError

HEAD_TIMEOUT = 10.0  # seconds for a request line and its headers, or for the rest of a body that nobody reads
WRITE_TIMEOUT = 300.0  # seconds in which a reader that has stopped must take something
MAX_HEAD_BYTES = 2**16
MAX_PIPELINED = 16  # requests that may wait while one is answered

_UPGRADE_TOKENS = (b"upgrade", b"http2-settings")


class _PlainCycle(RequestResponseCycle):
    """Of a client of HTTP/1.0, which knows no chunks (RFC 9112, 6.1): the end of the connection ends the body."""

    _has_length = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not self._has_length:
                self.chunked_encoding = False
        elif not self._has_length:
            # Not that of this piece: others may be sent while it waits for the reader.
            is_last = not message.get("more_body")
            self.expected_content_length = len(message.get("body", b"")) if is_last else 2**63
        await super().send(message)


class Connection(HttpToolsProtocol):
    """Ends connections whose requests do not come to their end, and answers what is no HTTP with an error object.

    How long a body that is read may take is read_body()'s to say.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running: RequestResponseCycle | None = None  # of those that are pipelined
        self._timer: asyncio.TimerHandle | None = None  # runs while no request is being answered
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_in_head = self._is_in_body = False
        self._num_pending_bytes = 0  # since the last whole head or piece of a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        super().connection_lost(exc)  # tells the last request, which may not run yet
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self._start_timer()
        self._num_pending_bytes += len(data)
        self._unset_keepalive_if_required()
        if not self._feed(data):
            self._refuse(APIError(400, "the request is no valid HTTP"))
        if self._num_pending_bytes > MAX_HEAD_BYTES:
            self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the same head comes again, without the wish
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES:  # all of which came at a time
            self._refuse(self._too_large())
            return
        self._is_in_head, self._is_in_body = False, True
        self._num_pending_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = _PlainCycle
        if not self.pipeline:
            self._running = self.cycle
        elif len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()  # uvicorn has stopped it, and a hang-up would go unseen

    def on_body(self, body: bytes) -> None:
        self._num_pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._is_in_body = False
        self._num_pending_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]  # the next
        super().on_response_complete()
        if self._is_in_head and not self.pipeline:
            self._start_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def _watch_reader(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(WRITE_TIMEOUT, self._check_reader, size)

    def _check_reader(self, size: int) -> None:
        """Lets a reader go that has taken nothing since `size` bytes were to be written."""
        if self.transport.get_write_buffer_size() < size:
            self._watch_reader()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _feed(self, data: bytes) -> bool:
        """Whether it is HTTP. Clients that would rather speak HTTP/2 (Java's, curl --http2) are answered in HTTP/1.1.

        The parser stops behind a head that asks for another protocol, and takes the body for a part of that.
        """
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    return False
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError:
                return False
            else:
                break
        return True

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode("ascii")
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [
                    token for token in value.split(b",") if token.strip().lower() not in _UPGRADE_TOKENS
                ]
                value = b",".join(tokens)
            if name not in _UPGRADE_TOKENS:
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def _too_large(self) -> APIError:
        return APIError(431, f"the headers are larger than {MAX_HEAD_BYTES} bytes")

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_TIMEOUT, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        self._refuse(APIError(408, f"the request's headers took longer than {HEAD_TIMEOUT:g} seconds"))

    def _refuse(self, error: APIError) -> None:
        """Closes the connection, with an answer where one is due: to what has begun and has had none."""
        if self.transport.is_closing():
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if self._is_in_body:
            is_due = not (is_idle or self.cycle.response_started or self.pipeline)
        else:
            is_due = is_idle and (self._is_in_head or self._num_pending_bytes > 0)
        if is_due:
            self.transport.write(_raw(error))
        self.transport.close()


def _raw(error: APIError) -> bytes:
    body = error.response().body
    head = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode("ascii") + bytes(body)
