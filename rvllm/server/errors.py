"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}, whatever went wrong."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from rvllm.gguf_file import printable

CLIENT_CLOSED_REQUEST = 499  # nginx's number: nobody is left to read the answer
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_MESSAGES = {404: "there is no such route", 405: "this route does not take that method"}


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetails


class APIError(Exception):
    """Answers the request with `status` and an error object. param: the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = printable(message)  # it may quote what the client has sent
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, dict(self.headers or {}))

    def renamed(self, names: Mapping[str, str]) -> APIError:
        """The same for a client who calls the field at fault otherwise. names: of fields, to what the client sent."""
        name = self.param or ""
        own = names.get(name)
        if own is None:
            return self
        message = own + self.message[len(name) :] if self.message.startswith(name) else self.message
        return APIError(self.status, message, own, self.code, self.headers)


class ClientGoneError(Exception):
    """The client has hung up while its request ran."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    return APIError(400, message, param, code)


def unsupported(param: str, why: str = "") -> APIError:
    """For a known field that is not offered: nothing is ignored in silence."""
    return APIError(
        400, f"{param} is not supported{f': {why}' if why else ''}", param, "unsupported_parameter"
    )


def from_value_error(error: ValueError) -> APIError:
    """A 400 for what the engine refuses; its messages begin with the name of the field."""
    message = " ".join(str(error).split())
    field = re.match(r"(?:the |a )?([a-z][a-z_]*(?:\.\w+)*)", message)
    code = "context_length_exceeded" if "max_model_len" in message else None
    return APIError(400, message, field[1] if field else None, code)


def from_validation_error(error: ValidationError, body: Any) -> APIError:
    """A 400 that names the field by its path in the body, as in messages.0.content."""
    problem = error.errors(include_url=False)[0]
    if problem["type"] == "json_invalid":
        return APIError(400, f"the body is no valid JSON: {problem['msg'].removeprefix('Invalid JSON: ')}")
    param = ".".join(_path(problem["loc"], body, is_missing=problem["type"] == "missing")) or None
    if problem["type"] == "missing":
        return APIError(400, f"{param} is missing", param, "missing_required_parameter")
    message = problem["msg"][:1].lower() + problem["msg"][1:]
    if problem["type"] == "model_type":  # names the class unless the input is JSON
        message = "input should be an object"
    return APIError(400, f"{param or 'the body'}: {message}, got {_short(problem['input'])}", param)


def _path(loc: Sequence[int | str], body: Any, is_missing: bool) -> list[str]:
    """Those parts of an error's location that lead through the body; the others name pydantic's types."""
    path: list[str] = []
    for part in loc:
        is_step = part in body if isinstance(body, dict) else isinstance(body, list) and isinstance(part, int)
        if is_step:
            body = body[part]
        if is_step or (is_missing and part == loc[-1]):
            path.append(str(part))
    return path


def _short(value: Any) -> str:
    text = reprlib.repr(value)
    return text.encode("utf-8", "backslashreplace").decode()


def _other_path(request: Request) -> str:
    """For a client whose base URL lacks /v1, or has it where it adds one itself: the route that it means."""
    path = request.url.path
    shorter = [path.removeprefix("/v1")] if path.startswith("/v1/") else []
    for other in (f"/v1{path}", *shorter):
        scope = {**request.scope, "path": other}
        if other != "/" and any(route.matches(scope)[0] is Match.FULL for route in request.app.routes):
            return f"; did you mean {other}?"
    return ""


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(APIError)
    async def api_error(request: Request, error: APIError) -> Response:
        return error.renamed(getattr(request.state, "names", {})).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = _MESSAGES.get(error.status_code, str(error.detail))
        code = "not_found" if error.status_code == 404 else None
        if code is not None:
            message += _other_path(request)
        return APIError(
            error.status_code,
            f"{request.method} {request.url.path}: {message}",
            code=code,
            headers=error.headers,
        ).response()

    @app.exception_handler(ClientGoneError)
    async def client_gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
