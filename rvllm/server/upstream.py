"""HTTP to a server on a Unix socket: one request a connection, whose end tells the server that nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import httptools

Headers = Sequence[tuple[bytes, bytes]]

_READ_BYTES = 2**16


class UnreachableError(Exception):
    """No connection: the server has not seen the request."""


class BrokenOffError(Exception):
    """The connection ended before the answer did."""


class Answer:
    """A response whose head has come. headers: names in lower case, without those of the connection."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._is_complete = False

    def header(self, name: bytes) -> bytes:
        return next((value for known, value in self.headers if known == name), b"")

    async def read_head(self) -> None:
        while not self.status:
            await self._read()

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes, no faster than it is taken. Raises BrokenOffError."""
        while True:
            if self._parts:
                data = b"".join(self._parts)
                self._parts.clear()
                yield data
            elif self._is_complete:
                return
            else:
                await self._read()

    async def body(self) -> bytes:
        return b"".join([part async for part in self.parts()])

    async def _read(self) -> None:
        try:
            data = await self._reader.read(_READ_BYTES)
            self._parser.feed_data(data)
        except (OSError, httptools.HttpParserError) as error:
            raise BrokenOffError from error
        if not data and not self._is_complete:
            raise BrokenOffError

    # Of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name not in (b"connection", b"date", b"transfer-encoding"):
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self._is_complete = True


@asynccontextmanager
async def ask(
    path: str, method: str, target: bytes, headers: Headers = (), body: bytes = b""
) -> AsyncGenerator[Answer, None]:
    """path: of the socket. Leaving closes the connection. Raises UnreachableError and BrokenOffError."""
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=_READ_BYTES)
    except OSError as error:
        raise UnreachableError from error
    try:
        lines = [
            b"%b %b HTTP/1.1" % (method.encode(), target),
            *(b"%b: %b" % header for header in headers),
            b"connection: close",
            *([b"content-length: %d" % len(body)] if body or method == "POST" else []),
        ]
        writer.write(b"\r\n".join([*lines, b"", body]))
        answer = Answer(reader)
        await answer.read_head()
        yield answer
    finally:
        writer.transport.abort()
