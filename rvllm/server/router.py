"""The server in front of replicas: passes each request on to one of them, and its answer back as it comes.

Keys, origins, body sizes and the page are judged and served here; every other answer is a replica's, byte for byte.
A request is sent again only when a replica has refused it or cannot have seen it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rvllm.server.app import add_middleware
from rvllm.server.errors import APIError, ClientGoneError, add_error_handlers
from rvllm.server.page import add_page
from rvllm.server.processors import format_processors
from rvllm.server.routing import Lane, Ticket, choose, prompt_pieces
from rvllm.server.security import read_body
from rvllm.server.served_model import ServerConfig
from rvllm.server.streaming import DONE, event, unless_gone
from rvllm.server.upstream import Answer, BrokenOffError, UnreachableError, ask
from rvllm.version import __version__

logger = logging.getLogger(__name__)

PROBE_TIMEOUT = 2.0  # seconds in which a replica tells how it is
LARGE_BODY = 2**16  # bytes
_DONE_PATHS = ("/v1/completions", "/v1/chat/completions")  # whose streams end with [DONE]
_OWN_HEADERS = frozenset(  # of the client's connection, or judged here
    b"authorization connection content-length expect keep-alive origin proxy-connection te trailer transfer-encoding "
    b"upgrade x-api-key x-request-id".split()
)


@dataclass(eq=False)
class Replica:
    """One server, as the router sees it. path: of its Unix socket."""

    index: int
    path: str
    processors: Sequence[int] = ()
    lane: Lane = field(default_factory=Lane)
    is_ready: bool = False
    pid: int | None = None
    num_restarts: int = 0

    async def get(self, target: bytes) -> bytes:
        """The body of an answer to GET. Raises UnreachableError, BrokenOffError, asyncio.TimeoutError."""

        async def fetch() -> bytes:
            async with ask(self.path, "GET", target, [(b"host", b"replica")]) as answer:
                return await answer.body()

        return await asyncio.wait_for(fetch(), PROBE_TIMEOUT)


@dataclass(eq=False)
class Fleet:
    """All replicas. has_started: each has been ready once."""

    replicas: Sequence[Replica]
    has_started: bool = False
    is_draining: bool = False

    @property
    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.is_ready]

    @property
    def status(self) -> str:
        if self.is_draining:
            return "draining"
        return "loading" if not self.has_started else "ok" if self.ready else "restarting"

    def refusal(self) -> APIError:
        """Of a request that no replica takes."""
        message, code = {
            "draining": ("the server is shutting down", "shutting_down"),
            "loading": ("the model is being loaded", "model_loading"),
        }.get(self.status, ("no replica is ready: they are being restarted", "no_replica"))
        return APIError(503, message, code=code, headers={"Retry-After": "5"})


class Router:
    """The ASGI application that passes requests on."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._fleet.is_draining:
            raise self._fleet.refusal()
        body = await read_body(Request(scope, receive))
        with suppress(ClientGoneError):
            await unless_gone(receive, self._forward(scope, body, send))

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        """Tries replicas, the best first, until one takes the request; of refusals, passes on the mildest."""
        # A large body takes up to 0.1 s, in which others' tokens must pass.
        pieces = (
            await asyncio.to_thread(prompt_pieces, body) if len(body) > LARGE_BODY else prompt_pieces(body)
        )
        left = {replica: replica.lane for replica in self._fleet.ready}
        refusals: list[tuple[Answer, bytes]] = []
        while left:
            # What brings no prompt is asked of the first: so that two answers are alike.
            replica = choose(left, pieces) if body else next(iter(left))
            del left[replica]
            with suppress(UnreachableError), replica.lane.take(pieces) as ticket:
                refusal = await self._try(replica, scope, body, ticket, send)
                if refusal is None:
                    return
                refusals.append(refusal)
        if not refusals:
            raise self._fleet.refusal()
        answer, content = min(refusals, key=lambda refusal: _retry_after(refusal[0]))
        await _send_whole(send, answer, content)

    async def _try(
        self, replica: Replica, scope: Scope, body: bytes, ticket: Ticket, send: Send
    ) -> tuple[Answer, bytes] | None:
        """Passes the request on, and its answer back; returns an answer that says: not now."""
        state = scope["state"]
        state["replica"] = replica.index
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers = [header for header in scope["headers"] if header[0] not in _OWN_HEADERS]
        headers.append((b"x-request-id", state["request_id"].encode()))
        try:
            async with ask(replica.path, scope["method"], target, headers, body) as answer:
                if answer.header(b"content-type").startswith(b"text/event-stream"):
                    await self._stream(replica, scope, answer, ticket, send)
                    return None
                content = await answer.body()
                if answer.status in (429, 503):
                    return answer, content
                await _send_whole(send, answer, content)
                return None
        except UnreachableError:
            del state["replica"]
            raise
        except BrokenOffError:
            raise self._died(replica, scope) from None

    async def _stream(
        self, replica: Replica, scope: Scope, answer: Answer, ticket: Ticket, send: Send
    ) -> None:
        """Passes whole events on; one with an error comes last when the replica dies."""
        await _start(send, answer)
        rest = b""
        try:
            async for part in answer.parts():
                ticket.on_first_token()
                rest += part
                end = rest.rfind(b"\n\n") + 2
                if end >= 2:
                    await send({"type": "http.response.body", "body": rest[:end], "more_body": True})
                    rest = rest[end:]
        except BrokenOffError:
            rest = _error_event(self._died(replica, scope), scope["path"])
        await send({"type": "http.response.body", "body": rest, "more_body": False})

    def _died(self, replica: Replica, scope: Scope) -> APIError:
        """The error of a request whose replica has ended; logged here, for nobody else can."""
        state = scope["state"]
        del state["replica"]
        if self._fleet.is_draining:
            return self._fleet.refusal()
        message = f"replica {replica.index} has died before its answer was complete: send the request again"
        logger.error("request_id=%s: %s", state["request_id"], message)
        return APIError(503, message, code="replica_died", headers={"Retry-After": "1"})


def create_router(config: ServerConfig, fleet: Fleet, **settings: Any) -> FastAPI:
    """The application that clients reach. settings: of FastAPI."""
    app = FastAPI(title="rvllm", docs_url=None, redoc_url=None, openapi_url=None, **settings)
    app.state.config = config

    @app.get("/health")
    async def health() -> Response:
        facts = await _health(config, fleet)
        return JSONResponse(facts, 200 if facts["status"] == "ok" else 503, {"Cache-Control": "no-store"})

    @app.get("/metrics")
    async def metrics() -> Response:
        ready = fleet.ready  # once: it may change while they answer
        texts = await asyncio.gather(*(_get(replica, b"/metrics") for replica in ready))
        merged = await asyncio.to_thread(_merge, fleet, dict(zip(ready, texts, strict=True)))
        return Response(merged, media_type=CONTENT_TYPE_LATEST)

    add_error_handlers(app)
    add_middleware(app, config, add_page(app))
    app.router.routes.append(Route("/{path:path}", Router(fleet)))
    return app


async def _start(send: Send, answer: Answer) -> None:
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})


async def _send_whole(send: Send, answer: Answer, content: bytes) -> None:
    await _start(send, answer)
    await send({"type": "http.response.body", "body": content, "more_body": False})


def _retry_after(answer: Answer) -> tuple[int, int]:
    seconds = answer.header(b"retry-after")
    return answer.status, int(seconds) if seconds.isdigit() else 0


def _error_event(error: APIError, path: str) -> bytes:
    if path == "/v1/responses":
        return event(
            {"type": "error", "code": error.code, "message": error.message, "param": None, **error.body},
            "error",
        )
    return event(error.body) + (DONE if path in _DONE_PATHS else b"")


async def _get(replica: Replica, target: bytes) -> bytes:
    """Empty when the replica does not answer."""
    with suppress(UnreachableError, BrokenOffError, asyncio.TimeoutError):
        return await replica.get(target)
    return b""


async def _health(config: ServerConfig, fleet: Fleet) -> dict[str, Any]:
    """As of one server: sums, and the mean of kv_cache_usage; and what each replica says."""

    async def one(replica: Replica) -> dict[str, Any]:
        facts: dict[str, Any] = {"status": "loading"}
        if replica.is_ready:
            facts = json.loads(await _get(replica, b"/health") or b'{"status": "no answer"}')
        known = {"index": replica.index, "pid": replica.pid, "restarts": replica.num_restarts}
        return {**known, "processors": format_processors(replica.processors), **facts}

    replicas = await asyncio.gather(*(one(replica) for replica in fleet.replicas))
    facts: dict[str, Any] = {"status": fleet.status, "model": config.names[0]}
    if answering := [replica for replica in replicas if "running" in replica]:
        for name in ("running", "waiting", "prefill_tokens", "decode_tokens"):
            facts[name] = sum(replica[name] for replica in answering)
        facts["kv_cache_usage"] = sum(replica["kv_cache_usage"] for replica in answering) / len(answering)
    return {**facts, "version": __version__, "replicas": replicas}


def _merge(fleet: Fleet, texts: dict[Replica, bytes]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Merged(fleet, {replica.index: text.decode() for replica, text in texts.items()}))
    return generate_latest(registry)


class _Merged(Collector):
    """The metrics of all replicas, with the label replica; and of each, whether it is there."""

    def __init__(self, fleet: Fleet, texts: dict[int, str]) -> None:
        self._fleet = fleet
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for index, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                known = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    known.add_sample(sample.name, {**sample.labels, "replica": str(index)}, sample.value)
        yield from families.values()
        up = GaugeMetricFamily("rvllm:replica_up", "1 while the replica takes requests.", labels=["replica"])
        restarts = CounterMetricFamily(
            "rvllm:replica_restarts", "Times that the replica was restarted.", labels=["replica"]
        )
        for replica in self._fleet.replicas:
            up.add_metric([str(replica.index)], float(replica.is_ready))
            restarts.add_metric([str(replica.index)], replica.num_restarts)
        yield from (up, restarts)
