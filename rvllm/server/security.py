"""Who may send what: API keys, the origin of browsers' requests, and how large a body may be."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from rvllm.server.errors import APIError, ClientGoneError

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_TIMEOUT = 10.0  # seconds without a byte of the body
DISCARD_TIMEOUT = 5.0  # seconds for the rest of a body that is not wanted
MIN_BODY_RATE = 1000.0  # bytes a second that must come on the whole, from then on
DOCS_FILES = "/docs-files"  # what /docs and /redoc need, so that they work with no internet
OPEN_PATHS = frozenset({"/", "/health", "/metrics", "/version", "/docs", "/openapi.json", "/redoc"})


class Guard:
    """Refuses requests without a valid key (401), and those that a foreign web page sends (403).

    A page of another origin could not read the answer, but could make the machine work: browsers send such a
    request without asking first. Nor does a page reach a server without keys under a name of its own that it has
    made resolve to this machine (DNS rebinding). Paths that tell nothing of models and prompts are open.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Iterable[str], origins: Sequence[str], open_paths: Iterable[str]
    ) -> None:
        self.app = app
        self._keys = [sha256(key.strip().encode("utf-8", "surrogateescape")).digest() for key in api_keys]
        self._origins = origins
        self._hosts = {_host_name(urlsplit(origin).netloc) for origin in origins}
        self._open_paths = OPEN_PATHS | frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            headers = Headers(scope=scope)
            error = self._check(scope, headers)
            if error is not None:
                await error.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> APIError | None:
        path, origin, host = scope["path"], headers.get("origin"), headers.get("host", "")
        if scope["method"] == "POST" and origin is not None and not self._knows(origin, host):
            return APIError(
                403, f"requests from pages of {origin[:100]!r} are not allowed (see --cors-origin)"
            )
        if not self._keys and (origin is not None or _is_loopback(scope)) and not self._is_ours(host):
            return APIError(403, f"the server does not answer to the name {host[:100]!r} (see --cors-origin)")
        is_open = path in self._open_paths or path.startswith(DOCS_FILES + "/")
        if self._keys and not is_open and not self._has_key(headers):
            return APIError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return None

    def _knows(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        try:
            return urlsplit(origin).netloc == host
        except ValueError:  # half an IPv6 address
            return False

    def _is_ours(self, host: str) -> bool:
        """Whether no stranger can have made a Host header's name resolve to this machine."""
        name = _host_name(host)
        is_local = "." not in name or name.endswith((".localhost", ".local", ".internal"))
        return is_local or _is_address(name) or name in self._hosts or "*" in self._origins

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        # Headers are read as Latin-1, in which some clients write them; others write UTF-8.
        sent = [sha256(key.strip(" \t").encode(encoding)).digest() for encoding in ("latin-1", "utf-8")]
        # Every key is compared, each in constant time: how long it takes tells nothing.
        return sum(hmac.compare_digest(known, digest) for known in self._keys for digest in sent) > 0


def _host_name(host: str) -> str:
    """A Host header without its port."""
    name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(scope: Scope) -> bool:
    address = (scope.get("server") or ("",))[0]
    return _is_address(address) and ip_address(address).is_loopback


class AfterBody:
    """Holds an error back until the whole request has come, or for DISCARD_TIMEOUT: what is left of it is discarded.

    Most clients read no answer before they have sent all; closing the connection then would lose it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        if not {"content-length", "transfer-encoding"} & set(headers) or "expect" in headers:
            await self.app(scope, receive, send)
            return
        has_more = True

        async def receive_part() -> Message:
            nonlocal has_more
            message = await receive()
            has_more = message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def discard() -> None:
            while has_more:
                await receive_part()

        async def send_after_body(message: Message) -> None:
            status = message.get("status", 0)  # of the start of an answer; 408: for want of the rest
            if status >= 400 and status != 408:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(discard(), DISCARD_TIMEOUT)
            await send(message)

        await self.app(scope, receive_part, send_after_body)


async def read_body(request: Request) -> bytes:
    """The body of a request. Raises APIError: 408 when it stops coming, 413 when it is too large, 415 if compressed."""
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() not in ("", "identity"):
        raise APIError(
            415,
            f"Content-Encoding {coding[:50]!r} is not supported: send the body as it is",
            code="unsupported_content_encoding",
            headers={"Accept-Encoding": "identity"},
        )
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
    start = time.monotonic()
    while more:
        left = start + BODY_TIMEOUT + size / MIN_BODY_RATE - time.monotonic()
        try:
            message = await asyncio.wait_for(request.receive(), min(left, BODY_TIMEOUT))
        except asyncio.TimeoutError:
            raise APIError(
                408,
                f"the body comes too slowly, or no longer: {size} bytes in {time.monotonic() - start:.1f} seconds",
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
