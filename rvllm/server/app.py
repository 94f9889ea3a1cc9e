"""The FastAPI application: routes, and what lies around all of them.

A request passes RequestLog (its id), AfterBody, Guard (its key and origin), the route's json_body (its fields),
Generation (its tokens from the engine), and comes back as JSON or as an EventStream.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi_offline import FastAPIOffline
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware

from rvllm.async_engine import AsyncEngine
from rvllm.server import chat, completions, embeddings, llama_cpp, models, responses, tokenize
from rvllm.server.errors import ErrorBody, add_error_handlers
from rvllm.server.logs import RequestLog
from rvllm.server.metrics import Metrics
from rvllm.server.page import add_page
from rvllm.server.security import DOCS_FILES, AfterBody, Guard
from rvllm.server.served_model import ServedModel, ServerConfig
from rvllm.server.tracing import Tracing
from rvllm.version import __version__

if TYPE_CHECKING:
    from rvllm.llm import LLM

ROUTES = (completions, chat, responses, embeddings, tokenize, llama_cpp, models)
BODIES = (
    completions.CompletionRequest,
    chat.ChatCompletionRequest,
    responses.ResponsesRequest,
    embeddings.EmbeddingRequest,
    tokenize.TokenizeRequest,
    tokenize.DetokenizeRequest,
    llama_cpp.LlamaCompletionRequest,
)

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": description, "model": ErrorBody}
    for status, description in (
        (400, "The request is at fault; param names the field."),
        (401, "A key is needed (--api-key)."),
        (403, "A page of another origin has sent it."),
        (404, "There is no such model or route."),
        (408, "The body did not come, or no token came in time."),
        (413, "The body is too large."),
        (415, "The body is compressed."),
        (429, "The queue is full; Retry-After says when to come back."),
        (500, "The engine has failed."),
        (503, "The model is being loaded, or the server shuts down."),
    )
}


def create_app(
    config: ServerConfig,
    model: ServedModel | None = None,
    on_startup: Callable[[], None] | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """model: may come later, as app.state.model; until then the API answers 503."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        if on_startup is not None:
            on_startup()
        yield

    app = FastAPIOffline(title="rvllm", version=__version__, lifespan=lifespan, static_url=DOCS_FILES)
    app.state.config = config
    app.state.model = model
    app.state.metrics = Metrics(config.names[0])
    for module in ROUTES:
        app.include_router(module.router, responses=ERRORS)
    add_error_handlers(app)
    add_middleware(app, config, add_page(app), tracing)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def start_engine(app: FastAPI, llm: LLM, max_queue: int) -> ServedModel:
    """The model that the application can be given, over an engine that runs. Raises ValueError for max_queue < 0."""
    metrics: Metrics = app.state.metrics
    engine = AsyncEngine(llm.engine, max_queue=max_queue, observer=metrics)
    engine.start()
    metrics.observe_engine(engine)
    return ServedModel.of(llm, engine, app.state.config)


def add_middleware(
    app: FastAPI, config: ServerConfig, open_paths: Iterable[str], tracing: Tracing | None = None
) -> None:
    """What lies around all routes of an application that clients reach. open_paths: need no key."""
    app.add_middleware(Guard, api_keys=config.api_keys, origins=config.cors_origins, open_paths=open_paths)
    app.add_middleware(AfterBody)
    app.add_middleware(RequestLog, log_prompts=config.log_requests, tracing=tracing)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,  # Chrome asks so that a public page may reach this machine
            expose_headers=["X-Request-Id", "Retry-After"],
        )


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description, with the bodies that the routes read for themselves."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, definitions = models_json_schema(
            [(body, "validation") for body in BODIES], ref_template="#/components/schemas/{model}"
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions.get("$defs", {}))
        app.openapi_schema = schema
    return app.openapi_schema
