"""Logs: a line for each request, in logfmt, and no prompt in it unless asked for."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import uuid
from typing import TYPE_CHECKING, Any, TextIO

from starlette.datastructures import Headers, MutableHeaders

from rvllm.server.errors import CLIENT_CLOSED_REQUEST, APIError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from rvllm.server.generation import Generation
    from rvllm.server.tracing import Tracing

logger = logging.getLogger(__name__)

_PLAIN = re.compile(r"[\w./:@+-]+", re.ASCII)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_QUIET_PATHS = frozenset({"/health", "/metrics"})  # asked every few seconds


class RequestLog:
    """Gives each request an id (the client's x-request-id, if that is harmless), and logs how it ended.

    HEAD is answered as GET without the body, an error that nothing within has answered with 500.
    """

    def __init__(self, app: ASGIApp, log_prompts: bool, tracing: Tracing | None = None) -> None:
        self.app = app
        self._log_prompts = log_prompts
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        start = time.perf_counter()
        status = 0  # of an answer that has begun
        logged = CLIENT_CLOSED_REQUEST  # until the answer is whole
        is_head = scope["method"] == "HEAD"

        async def send_with_id(message: Message) -> None:
            nonlocal status, logged
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            elif is_head:
                message = {**message, "body": b""}
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                logged = status

        try:
            inner = {**scope, "method": "GET"} if is_head else scope
            await self.app(inner, receive, send_with_id)
        except Exception:
            logger.exception("%s", logfmt(request_id=request_id, path=scope["path"]))
            if status:
                logged = 500
                raise
            response = APIError(500, "internal error: see the server's log").response()
            await response(scope, receive, send_with_id)
        finally:
            self._report(
                scope,
                {
                    "request_id": request_id,
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": logged,
                },
                time.perf_counter() - start,
            )

    def _report(self, scope: Scope, fields: dict[str, Any], seconds: float) -> None:
        generation: Generation | None = scope["state"].get("generation")
        is_quiet = scope["path"] in _QUIET_PATHS or "replica" in scope["state"]  # which has logged it
        level = logging.DEBUG if is_quiet else logging.INFO
        if not logger.isEnabledFor(level) and self._tracing is None:
            return
        fields["seconds"] = round(seconds, 4)
        if generation is not None:
            fields |= self._generation_fields(generation)
        logger.log(level, "%s", logfmt(**fields))
        if self._tracing is not None and not is_quiet:
            self._tracing.record(fields, seconds, Headers(scope=scope), generation)

    def _generation_fields(self, generation: Generation) -> dict[str, Any]:
        reasons = {c.finish_reason or "abort" for output in generation.results for c in output.outputs}
        fields: dict[str, Any] = {
            "prompt_tokens": generation.num_prompt_tokens,
            "cached_tokens": generation.num_cached_tokens,
            "completion_tokens": generation.num_generated_tokens,
            "finish_reason": ",".join(sorted(reasons)) or "abort",
        }
        if self._log_prompts:
            decode = generation.model.tokenizer.decode
            fields["prompts"] = [p if isinstance(p, str) else decode(p, False) for p in generation.prompts]
        return fields


def logfmt(**fields: Any) -> str:
    """name=value pairs; what is not plain is a JSON string, so a line stays a line."""

    def show(value: Any) -> str:
        text = str(value)
        return text if _PLAIN.fullmatch(text) else json.dumps(value if isinstance(value, list) else text)

    return " ".join(f"{name}={show(value)}" for name, value in fields.items())


class QuietHandler(logging.Handler):
    """Writes lines to standard error or a file; what cannot be written is dropped and counted, never an error.

    A full disk or a closed pipe must not stop the server.
    """

    def __init__(self, path: str | None = None) -> None:
        """Raises OSError when the file cannot be opened."""
        super().__init__()
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        self.num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
            if self._file is None:
                stream: TextIO | None = sys.stderr
                if stream is None:
                    raise OSError("standard error is closed")
                stream.write(line)
                stream.flush()
            else:
                os.write(self._file, line.encode("utf-8", "backslashreplace"))
        except (OSError, ValueError):
            self.num_dropped += 1


def configure_logging(path: str | None = None, level: int = logging.INFO, label: str = "") -> QuietHandler:
    """Sends the logs of rvllm and uvicorn to standard error, or to the end of a file; label: before each message."""
    handler = QuietHandler(path)
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03d %(levelname)s %(name)s {label}%(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("rvllm").setLevel(level)
    return handler
