"""A small HTTP client for load: one request a connection, server-sent events handed over as they come in.

Parsing is httptools', which costs a few microseconds an event: a client that shares its machine with the server it
measures must not take the processor from it.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from rvllm.version import __version__

OnEvent = Callable[[bytes], None]

_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


def bearer(api_key: str) -> str:
    """The value of an Authorization header. Raises ValueError for a key that no header can hold."""
    if not api_key.isprintable():
        raise ValueError("the API key must be one line of printable characters")
    return "Bearer " + api_key.encode().decode("latin-1")  # in which headers are written: this is UTF-8


def event_data(line: bytes) -> bytes | None:
    """The data that a line of a stream of events holds; None for one that holds none."""
    return line[5:].strip() if line.startswith(b"data:") else None


@dataclass
class Response:
    """status: 0 until it is known. headers: by lower-case name. body: empty for a stream of events."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Endpoint:
    """A server's address, such as http://127.0.0.1:8000 or https://host/prefix. Raises ValueError for any other."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{base_url!r} is no address such as http://127.0.0.1:8000")
        self.base_url = base_url.rstrip("/")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        self._headers = {
            "Host": parts.netloc.rpartition("@")[2],
            "User-Agent": f"rvllm/{__version__}",
            "Connection": "close",
            **(headers or {}),
        }
        for name, value in self._headers.items():
            if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
                raise ValueError(f"header {name!r} has characters that no header may have")

    async def request(
        self, method: str, path: str, body: bytes | None = None, on_event: OnEvent | None = None
    ) -> Response:
        """The whole response. on_event gets the data of each server-sent event; cancelling closes the connection.

        Raises OSError (no connection, or a connection that broke) and ValueError (a response that is not HTTP).
        """
        head = [f"{method} {self._path}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in self._headers.items())]
        if body is not None:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        data = "\r\n".join([*head, "", ""]).encode("latin-1") + (body or b"")
        loop = asyncio.get_running_loop()
        transport, exchange = await loop.create_connection(
            lambda: _Exchange(data, on_event, loop.create_future()), self.host, self.port, ssl=self._ssl
        )
        try:
            return await exchange.done
        finally:
            transport.abort()


class _Exchange(asyncio.Protocol):
    """One request and its response, as callbacks of the event loop and of the parser."""

    def __init__(self, data: bytes, on_event: OnEvent | None, done: asyncio.Future[Response]) -> None:
        self.done = done
        self._data = data
        self._on_event = on_event
        self._response = Response()
        self._is_stream = False
        self._rest = b""
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._data)

    def data_received(self, data: bytes) -> None:
        if self.done.done():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error.__context__ or ValueError(f"the response is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        # Without a length, the end of the connection is the end of the body; a chunked one has an end of its own.
        headers = self._response.headers
        if (
            exc is None
            and self._response.status
            and not {"content-length", "transfer-encoding"} & set(headers)
        ):
            self.on_message_complete()
        self._fail(exc or ConnectionError("the connection was closed before the response ended"))

    def _fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # whoever was cancelled while connecting does not ask

    def on_header(self, name: bytes, value: bytes) -> None:
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._response.status = self._parser.get_status_code()
        content_type = self._response.headers.get("content-type", "")
        self._is_stream = self._on_event is not None and content_type.startswith("text/event-stream")

    def on_body(self, data: bytes) -> None:
        if not self._is_stream or self._on_event is None:
            self._response.body += data
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if (event := event_data(line)) is not None:
                self._on_event(event)

    def on_message_complete(self) -> None:
        if not self.done.done():
            self.done.set_result(self._response)
