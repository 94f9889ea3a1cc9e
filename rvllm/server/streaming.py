"""Answers to clients that may leave at any time: server-sent events, and waiting that a hang-up ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rvllm.server.errors import ClientGoneError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment, which clients skip
PING_SECONDS = 15.0


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One server-sent event; to_json escapes every line break."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(data) + b"\n\n"


def json_response(content: bytes) -> Response:
    return Response(content, media_type="application/json")


class EventStream(Response):
    """Sends events as they come, no faster than the client reads. close() is called at the end, however it comes.

    A stream that has nothing to say sends a ping, or proxies would take it for dead: nginx does after a minute.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._is_silent = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except ClientGoneError:
            pass
        finally:
            await self._events.aclose()
            await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pings = asyncio.ensure_future(self._ping(send))
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._is_silent = False
        finally:
            pings.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        """Looks every 15 seconds, which costs less than a timer for each event."""
        while True:
            self._is_silent = True
            await asyncio.sleep(PING_SECONDS)
            if self._is_silent:
                await send({"type": "http.response.body", "body": PING, "more_body": True})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of work, which is cancelled when the client hangs up: then raises ClientGoneError.

    The body of the request must have been read.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    return await unless_gone(request.receive, work)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
