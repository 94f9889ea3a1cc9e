"""The process of one replica: a server on a Unix socket, which ends when its engine or its router does."""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import shutil
import socket
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from rvllm.cli.errors import CommandError, user_errors
from rvllm.server.serve import Server
from rvllm.server.served_model import ServedModel, ServerConfig

logger = logging.getLogger(__name__)

ENGINE_WATCH = 0.5  # seconds between two looks at the engine


class Report(NamedTuple):
    """What a replica tells the router once. num_cache_tokens: of its KV cache; error: why there is none."""

    num_cache_tokens: int = 0
    error: str | None = None


def run_replica(
    args: argparse.Namespace,
    config: ServerConfig,
    index: int,
    num_replicas: int,
    path: str,
    report: Connection,
) -> None:
    """The whole life of a replica, in a process of its own. path: of its socket."""
    threading.Thread(target=_end_with_router, args=(Path(path).parent,), daemon=True).start()
    try:
        with user_errors(), socket.socket(socket.AF_UNIX) as listener:
            with suppress(FileNotFoundError):
                os.unlink(path)
            listener.bind(path)
            listener.listen(2048)
            ReplicaServer(args, config, listener, num_replicas, f"replica={index} ", report).serve()
    except CommandError as error:
        report.send(Report(error=str(error)))
        sys.exit(2)


def _end_with_router(folder: Path) -> None:
    """However the router ends, even by SIGKILL."""
    router = multiprocessing.parent_process()
    if router is not None:
        wait([router.sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


class ReplicaServer(Server):
    """A server that reports to its router instead of to the user. SIGTERM drains it, however often it comes."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: ServerConfig,
        listener: socket.socket,
        num_replicas: int,
        log_label: str,
        report: Connection,
    ) -> None:
        super().__init__(args, config, listener, num_replicas, log_label)
        self._report = report

    def _on_loaded(self, model: ServedModel) -> None:
        super()._on_loaded(model)
        stats = model.engine.stats()
        num_tokens = 0 if self._args.no_prefix_caching else stats.num_blocks * self._args.block_size
        self._report.send(Report(num_tokens))

    def _on_startup(self) -> None:
        super()._on_startup()
        self._tasks.add(asyncio.ensure_future(self._end_with_engine()))

    def _on_signal(self, number: int) -> None:
        if not self._is_stopping:
            super()._on_signal(number)

    async def _end_with_engine(self) -> None:
        while True:
            await asyncio.sleep(ENGINE_WATCH)
            model: Any = self._app.state.model
            if model is not None and model.engine.is_dead:
                logger.error("the engine has failed: %s", model.engine.error)
                self._uvicorn.should_exit = True
                return
