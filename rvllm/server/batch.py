"""A batch of requests answered by the server's own routes, within this process and many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json, to_json

from rvllm.engine_errors import EngineDeadError
from rvllm.server.batch_file import BatchRequest, output_entry

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import Message

    from rvllm.server.served_model import ServedModel

_TRIES = 2  # of a request whose step has failed, perhaps by the fault of another


class BatchRunner:
    """Answers requests with the application, whose model is loaded.

    seed: makes that of each request that has none, from its custom_id, so that it does not matter when it runs.
    on_answer: is called with each answer, a line of the output.
    """

    def __init__(self, app: FastAPI, seed: int | None, on_answer: Callable[[dict[str, Any]], None]) -> None:
        self._app = app
        self._seed = seed
        self._on_answer = on_answer
        self._is_over = False

    async def run(self, requests: Iterator[BatchRequest]) -> None:
        """Answers each request; those in flight are dropped when the task is cancelled.

        A request whose steps fail gets no answer, so that the next run tries it again.
        Raises EngineDeadError, and what `requests` and on_answer raise.
        """
        model: ServedModel = self._app.state.model
        # Twice as many as run, so that the next prompts are encoded when there is room for them.
        workers = [
            asyncio.ensure_future(self._work(requests))
            for _ in range(2 * model.engine.engine.scheduler.max_num_seqs)
        ]
        try:
            # Not gather(), which waits for all that it cancels: before Python 3.12, asyncio.wait_for() in a request may
            # swallow a cancellation, and its worker would go on to the end.
            done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            for worker in done:
                worker.result()
        finally:
            self._is_over = True
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, requests: Iterator[BatchRequest]) -> None:
        model: ServedModel = self._app.state.model
        for request in requests:
            for _ in range(_TRIES):
                response = await self._ask(request)
                if model.engine.is_dead:
                    raise EngineDeadError(f"the engine has failed: {model.engine.error}")
                if not _is_failed_step(response):
                    self._on_answer(output_entry(request.custom_id, response))
                    break
            if self._is_over:
                break

    async def _ask(self, request: BatchRequest) -> dict[str, Any]:
        body = request.body
        if self._seed is not None and request.url != "/v1/embeddings" and body.get("seed") is None:
            body = {**body, "seed": derive_seed(self._seed, request.custom_id)}
        return await call(self._app, request.method, request.url, to_json(body, inf_nan_mode="constants"))


def _is_failed_step(response: dict[str, Any]) -> bool:
    return response["status_code"] == 500 and bool(response["body"]["error"]["code"] == "engine_dead")


def derive_seed(seed: int, custom_id: str) -> int:
    """31 bits."""
    return int.from_bytes(sha256(f"{seed}:{custom_id}".encode()).digest()[:4], "big") >> 1


async def call(app: FastAPI, method: str, path: str, body: bytes) -> dict[str, Any]:
    """An HTTP request without the network, by ASGI: {"status_code", "request_id", "body"} of a JSON answer."""
    received: list[Message] = [{"type": "http.request", "body": body}]
    status, request_id = 0, ""
    content = bytearray()

    async def receive() -> Message:
        if not received:
            await asyncio.Event().wait()  # this client does not hang up
        return received.pop()

    async def send(message: Message) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            request_id = dict(message["headers"])[b"x-request-id"].decode()
        else:
            content.extend(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    return {"status_code": status, "request_id": request_id, "body": from_json(bytes(content))}
