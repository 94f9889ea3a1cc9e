"""The server as a Ray Serve application: an ingress, which takes HTTP, before replicas with an engine each.

The replicas run the application of `rvllm serve` as it is. The ingress reads a request's body, by which the router
chooses a replica, and passes on what the replica answers.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import threading
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import suppress
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rvllm.cli.batch import load_app
from rvllm.cli.errors import CommandError
from rvllm.ray.cluster import Placement, connected, remote_arguments, root_cause
from rvllm.ray.router import Call, PrefixRouter
from rvllm.server.errors import APIError
from rvllm.server.logs import configure_logging
from rvllm.server.served_model import ServedModel, ServerConfig
from rvllm.server.streaming import event

APP = "rvllm"
_UPSCALE_SECONDS = 5.0  # that a queue must last: an engine starts in about as many
_LOOK_BACK_SECONDS = 15.0  # Ray wants more than 10
_NO_LIMIT = 1_000_000  # requests: --max-queue bounds them
_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")

Message = MutableMapping[str, Any]


class Engine:
    """A replica: one engine and the application over it."""

    def __init__(self, arguments: dict[str, Any], config: ServerConfig) -> None:
        configure_logging(None)
        self._app = load_app(argparse.Namespace(**arguments), config, arguments["seed"])
        self._model: ServedModel = self._app.state.model

    def check_health(self) -> None:
        """Raises when the engine has failed: Ray starts another replica then."""
        if self._model.engine.is_dead:
            raise RuntimeError(f"the engine has failed: {self._model.engine.error}")

    async def answer(self, call: Call) -> AsyncGenerator[Message, None]:
        """ASGI's messages of the answer. Closing the generator, or cancelling its task, hangs up."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        body: list[Message] = [{"type": "http.request", "body": call.body}]

        async def receive() -> Message:
            if not body:
                await asyncio.Event().wait()  # a hang-up comes as cancellation
            return body.pop()

        task = asyncio.ensure_future(self._app(call.scope, receive, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                yield message
        finally:
            task.cancel()

    def __del__(self) -> None:
        with suppress(AttributeError):  # the model could not be loaded
            self._model.engine.shutdown()


class Ingress:
    """What Ray's proxies send HTTP to."""

    def __init__(self, engines: DeploymentHandle, config: ServerConfig) -> None:
        self._engines = engines.answer.options(stream=True)
        self._max_body_size = config.max_body_size

    async def __call__(self, request: Request) -> Response:
        body = bytearray()
        async for data in request.stream():
            body += data
            if len(body) > self._max_body_size:  # enough for a replica to refuse it
                break
        scope = {name: request.scope[name] for name in _SCOPE}
        scope |= {"root_path": "", "client": None, "server": None}
        messages = self._engines.remote(Call(scope, bytes(body)))
        try:
            start = await anext(messages)
        except BackPressureError:
            full = "all replicas are busy and as many requests wait as --max-queue lets"
            return APIError(429, full, code="queue_full", headers={"Retry-After": "1"}).response()
        except (RayError, RayServeException):
            return _replica_died().response()
        except asyncio.CancelledError:
            messages.cancel()
            raise
        response = StreamingResponse(_rest(messages, dict(start["headers"])), start["status"])
        response.raw_headers = start["headers"]
        return response


def _replica_died() -> APIError:
    message = "the replica that had the request has died; send it again"
    return APIError(503, message, code="replica_died", headers={"Retry-After": "1"})


async def _rest(messages: Any, headers: dict[bytes, bytes]) -> AsyncGenerator[bytes, None]:
    """The body after its head."""
    try:
        async for message in messages:
            yield message.get("body", b"")
    except (RayError, RayServeException):
        if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            raise
        yield event(_replica_died().body)
    finally:
        messages.cancel()


def build(placement: Placement, config: ServerConfig) -> serve.Application:
    args = placement.args
    most = args.max_replicas or max(placement.room, args.min_replicas)
    engines = serve.deployment(
        Engine,
        ray_actor_options=placement.resources,
        autoscaling_config=AutoscalingConfig(
            min_replicas=args.min_replicas,
            max_replicas=most,
            target_ongoing_requests=args.target_ongoing_requests or args.max_num_seqs,
            upscale_delay_s=_UPSCALE_SECONDS,
            downscale_delay_s=args.downscale_delay,
            look_back_period_s=_LOOK_BACK_SECONDS,
        ),
        max_ongoing_requests=2 * args.max_num_seqs,  # the next prompts are encoded while others run
        max_queued_requests=args.max_queue,
        graceful_shutdown_timeout_s=args.drain_timeout,
        graceful_shutdown_wait_loop_s=0.2,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"slack": max(1, args.max_num_seqs // 4)}
        ),
    ).bind(remote_arguments(placement), config)
    return serve.deployment(
        Ingress,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_NO_LIMIT,
        graceful_shutdown_timeout_s=args.drain_timeout + 1,
        graceful_shutdown_wait_loop_s=0.2,
    ).bind(engines, config)


def run(args: argparse.Namespace, config: ServerConfig) -> int:
    """Serves until a signal, then lets the requests in flight finish. Raises CommandError."""
    stopped = threading.Event()
    with connected(args) as placement:
        serve.start(http_options={"host": args.host, "port": args.port})
        try:
            _deploy(placement, config)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: stopped.set())
            print(f"rvllm: listening at http://{args.host}:{args.port}", file=sys.stderr, flush=True)
            stopped.wait()
        finally:
            serve.delete(APP)
            if not serve.status().applications:
                serve.shutdown()  # what is left would keep its port
    return 0


def _deploy(placement: Placement, config: ServerConfig) -> None:
    try:
        serve.run(build(placement, config), name=APP, route_prefix="/")
    except RuntimeError as error:
        deployments = serve.status().applications[APP].deployments
        reason = RuntimeError(deployments["Engine"].message) if "Engine" in deployments else error
        raise CommandError(f"the replicas do not start: {root_cause(reason)}") from error
