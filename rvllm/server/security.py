"""Who may send what: API keys, the origin of browsers' requests, and how large a body may be."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from rvllm.server.errors import APIError, ClientGoneError

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

BODY_TIMEOUT = 10.0  # seconds without a byte of the body
OPEN_PATHS = frozenset({"/", "/health", "/metrics", "/version", "/docs", "/openapi.json", "/redoc"})


class Guard:
    """Refuses requests without a valid key (401), and those that a foreign web page sends (403).

    A page of another origin could not read the answer, but could make the machine work: browsers send such a
    request without asking first. Paths that tell nothing of models and prompts are open.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Iterable[str], origins: Sequence[str], open_paths: Iterable[str]
    ) -> None:
        self.app = app
        self._keys = [sha256(key.encode()).digest() for key in api_keys]
        self._origins = origins
        self._open_paths = OPEN_PATHS | frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            headers = Headers(scope=scope)
            error = self._check(scope["method"], scope["path"], headers)
            if error is not None:
                await error.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> APIError | None:
        origin = headers.get("origin")
        if method == "POST" and origin is not None and not self._knows(origin, headers.get("host", "")):
            return APIError(
                403, f"requests from pages of {origin[:100]!r} are not allowed (see --cors-origin)"
            )
        if self._keys and path not in self._open_paths and not self._has_key(headers):
            return APIError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return None

    def _knows(self, origin: str, host: str) -> bool:
        return "*" in self._origins or origin in self._origins or urlsplit(origin).netloc == host

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        digest = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        # Every key is compared, each in constant time: how long it takes tells nothing.
        return sum(hmac.compare_digest(digest, known) for known in self._keys) > 0


async def read_body(request: Request) -> bytes:
    """The body of a request. Raises APIError: 413 when it is too large, 408 when it stops coming."""
    limit: int = request.app.state.config.max_body_size
    too_large = APIError(
        413, f"the body is larger than {limit} bytes (see --max-body-size)", code="body_too_large"
    )
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        try:
            message = await asyncio.wait_for(request.receive(), BODY_TIMEOUT)
        except asyncio.TimeoutError:
            raise APIError(
                408,
                f"no byte of the body came for {BODY_TIMEOUT:g} seconds",
                headers={"Connection": "close"},
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limit:
            raise too_large
        more = message.get("more_body", False)
    return b"".join(chunks)
