"""The process of `rvllm serve`: loads the model beside the running server, drains on a signal."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import uvicorn

from rvllm.cli.arguments import load_chat_llm
from rvllm.cli.errors import user_errors
from rvllm.server.app import create_app, start_engine
from rvllm.server.connection import Connection
from rvllm.server.logs import configure_logging
from rvllm.server.served_model import ServedModel, ServerConfig
from rvllm.server.tracing import Tracing

logger = logging.getLogger(__name__)

HTTP_SETTINGS: dict[str, Any] = {
    "http": Connection,
    "ws": "none",
    "log_config": None,
    "access_log": False,
    "server_header": False,
    "timeout_keep_alive": 75,  # seconds an idle connection stays open, longer than clients keep theirs
    "timeout_graceful_shutdown": 5,  # seconds for slow readers to take what is left when the engine has drained
}


class Server:
    """One run of the server, from the bound socket to the exit status."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: ServerConfig,
        listener: socket.socket,
        num_replicas: int = 1,
        log_label: str = "",
    ) -> None:
        """num_replicas: servers like this one on the machine.

        Raises CommandError when the log file cannot be opened or OpenTelemetry is missing.
        """
        endpoint = args.otlp_traces_endpoint
        with user_errors():
            configure_logging(args.log_file, label=log_label)
            self._tracing = None if endpoint is None else Tracing.to_endpoint(endpoint)
        self._args = args
        self._num_replicas = num_replicas
        self._listener = listener
        self._app = create_app(config, on_startup=self._on_startup, tracing=self._tracing)
        self._uvicorn = Uvicorn(uvicorn.Config(self._app, **HTTP_SETTINGS))
        self._is_stopping = False
        self._load_error: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self) -> int:
        """Serves until a signal; raises CommandError when the model cannot be loaded."""
        announce(self._listener)
        return self.serve()

    def serve(self) -> int:
        """run() without a word of where it listens."""
        allow_many_connections()
        loader = threading.Thread(target=self._load, name="rvllm-load", daemon=True)
        loader.start()
        self._uvicorn.run([self._listener])
        if self._load_error is not None:
            raise self._load_error
        if loader.is_alive() and self._app.state.model is None:
            self._end_while_loading()
        model: ServedModel | None = self._app.state.model
        if model is not None:
            model.engine.shutdown()
        if self._tracing is not None:
            self._tracing.shutdown()
        return 0

    def _end_while_loading(self) -> NoReturn:
        """Python must not end by itself: a daemon thread that comes back from C++ then would abort the process."""
        if self._tracing is not None:
            self._tracing.shutdown()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(0)

    def _load(self) -> None:
        try:
            llm = load_chat_llm(self._args, self._args.seed, num_replicas=self._num_replicas)
            model = start_engine(self._app, llm, self._args.max_queue)
        except Exception as error:  # whatever it is, the main thread raises it
            self._load_error = error
            self._uvicorn.should_exit = True
            return
        self._on_loaded(model)

    def _on_loaded(self, model: ServedModel) -> None:
        self._app.state.model = model
        logger.info("serving %s", model.name)

    def _on_startup(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._is_stopping:
            os._exit(128 + number)  # as shells report it
        self._is_stopping = True
        task = asyncio.ensure_future(self._stop())
        self._tasks.add(task)

    async def _stop(self) -> None:
        model: ServedModel | None = self._app.state.model
        if model is not None and not model.engine.is_dead:
            logger.info(
                "draining: %d requests in flight", model.engine.num_running + model.engine.num_waiting
            )
            await model.engine.drain(self._args.drain_timeout)
        self._uvicorn.should_exit = True


def announce(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    with suppress(OSError):
        print(f"rvllm: listening at http://{host}:{port}", file=sys.stderr, flush=True)


def allow_many_connections() -> None:
    """Each takes a file descriptor; the usual limit of 1,024 is a default, not a wish."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Uvicorn(uvicorn.Server):
    """Leaves signals to us: its own handler would stop listening before the requests in flight are done."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
