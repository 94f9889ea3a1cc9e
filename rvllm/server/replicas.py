"""`rvllm serve --replicas`: starts servers on shares of the processors behind one router, and restarts the dead."""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import uvicorn
from fastapi import FastAPI

from rvllm.cli.errors import CommandError, user_errors
from rvllm.models import resolve_model
from rvllm.server.logs import configure_logging
from rvllm.server.processors import format_processors, pin, processor_shares
from rvllm.server.replica_process import Report, run_replica
from rvllm.server.router import Fleet, Replica, create_router
from rvllm.server.routing import PIECE_BYTES, Lane, PrefixIndex
from rvllm.server.serve import HTTP_SETTINGS, Uvicorn, allow_many_connections, announce
from rvllm.server.served_model import ServerConfig
from rvllm.system import cpu_quota

logger = logging.getLogger(__name__)

RESTART_DELAYS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds, after so many short lives in a row
SHORT_LIFE = 60.0  # seconds
KILL_MARGIN = 10.0  # seconds beyond --drain-timeout that a replica may take to end

_TOKEN_BYTES = 4  # of text, on the average

_spawn = multiprocessing.get_context("spawn")


class ReplicaSet:
    """One run of the router and its replicas, from the bound socket to the exit status."""

    def __init__(self, args: argparse.Namespace, config: ServerConfig, listener: socket.socket) -> None:
        """Raises CommandError for what cannot be replicated."""
        if args.device != "cpu":
            raise CommandError(f"--replicas shares processors out: it needs --device cpu, not {args.device}")
        with user_errors():
            shares = processor_shares(args.replicas)
            configure_logging(args.log_file)
        self._args = args
        self._config = config
        self._listener = listener
        # For its owner alone, and so the sockets in it.
        self._folder = tempfile.TemporaryDirectory(prefix="rvllm-", ignore_cleanup_errors=True)
        self._fleet = Fleet([Replica(i, f"{self._folder.name}/{i}", share) for i, share in enumerate(shares)])
        self._processes: dict[Replica, SpawnProcess] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._error: CommandError | None = None
        app = create_router(config, self._fleet, lifespan=self._lifespan)
        self._uvicorn = Uvicorn(uvicorn.Config(app, **HTTP_SETTINGS))

    def run(self) -> int:
        """Serves until a signal; raises CommandError when the model cannot be loaded."""
        announce(self._listener)
        allow_many_connections()
        try:
            with user_errors():
                resolve_model(self._args.model)  # what is not cached is fetched once, not by each replica
            self._uvicorn.run([self._listener])
        finally:
            self._kill()
            self._folder.cleanup()
        if self._error is not None:
            raise self._error
        return 0

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncGenerator[None, None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        self._stopping = asyncio.Event()
        self._tasks = [asyncio.ensure_future(self._supervise(replica)) for replica in self._fleet.replicas]
        for task in self._tasks:
            task.add_done_callback(self._on_supervised)
        yield

    def _on_supervised(self, task: asyncio.Task[None]) -> None:
        """A replica that nobody would restart any more ends the server, rather than be missed unseen."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("a replica cannot be supervised: %s", error, exc_info=error)
        self._error = self._error or CommandError(f"a replica cannot be supervised: {error}")
        if not self._fleet.is_draining:
            self._on_signal(signal.SIGTERM)

    def _on_signal(self, number: int) -> None:
        if self._fleet.is_draining:
            self._kill()
            self._folder.cleanup()
            os._exit(128 + number)  # as shells report it
        logger.info(
            "draining: %d requests in flight", sum(r.lane.num_in_flight for r in self._fleet.replicas)
        )
        self._fleet.is_draining = True
        self._stopping.set()
        for process in self._processes.values():
            process.terminate()
        self._tasks.append(asyncio.ensure_future(self._end()))

    async def _end(self) -> None:
        """When the replicas have ended, or have had their time, lets the router end."""
        await asyncio.wait(
            self._tasks[: len(self._fleet.replicas)], timeout=self._args.drain_timeout + KILL_MARGIN
        )
        self._kill()
        self._uvicorn.should_exit = True

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    async def _supervise(self, replica: Replica) -> None:
        """One life of the replica after another, until the server stops."""
        num_short_lives = 0
        loop = asyncio.get_running_loop()
        while not self._fleet.is_draining:
            start = loop.time()
            how = await self._live(replica)
            if self._fleet.is_draining:
                return
            if not self._fleet.has_started:
                self._error = self._error or CommandError(how)
                self._fleet.is_draining = self._uvicorn.should_exit = True
                self._kill()
                return
            num_short_lives = num_short_lives + 1 if loop.time() - start < SHORT_LIFE else 0
            delay = RESTART_DELAYS[min(num_short_lives, len(RESTART_DELAYS) - 1)]
            logger.error("%s; restarting it in %g s", how, delay)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
            replica.num_restarts += 1

    async def _live(self, replica: Replica) -> str:
        """Starts the replica and waits for its end; returns how that came."""
        reports, report_end = _spawn.Pipe(duplex=False)
        with reports:
            try:
                process = self._start(replica, report_end)
            except OSError as error:
                return f"replica {replica.index} cannot be started: {error.strerror}"
            finally:
                report_end.close()
            await _readable(reports.fileno())
            report = _receive(reports)
            if report is not None and report.error is None and not self._fleet.is_draining:
                replica.lane = Lane(PrefixIndex(report.num_cache_tokens * _TOKEN_BYTES // PIECE_BYTES))
                replica.is_ready = True
                self._fleet.has_started |= all(r.is_ready for r in self._fleet.replicas)
                logger.info(
                    "replica %d (process %d, processors %s) is ready",
                    replica.index,
                    process.pid,
                    format_processors(replica.processors),
                )
            await _readable(process.sentinel)
        process.join()
        replica.is_ready, replica.pid = False, None
        if report is None:
            return f"replica {replica.index} {_describe(process.exitcode)} while it loaded the model"
        return report.error or f"replica {replica.index} {_describe(process.exitcode)}"

    def _start(self, replica: Replica, report: Connection) -> SpawnProcess:
        args = argparse.Namespace(**vars(self._args))
        args.run = None
        num_replicas = len(self._fleet.replicas)
        if args.threads is None:
            args.threads = max(1, min(len(replica.processors), int(min(cpu_quota(), 2**16) / num_replicas)))
        if args.seed is not None and 0 <= args.seed < 2**64:  # any other is an error to report
            args.seed = (args.seed + replica.index) % 2**64
        process = _spawn.Process(
            target=run_replica,
            # The router has judged keys and origins.
            args=(
                args,
                replace(self._config, api_keys=(), cors_origins=()),
                replica.index,
                num_replicas,
                replica.path,
                report,
            ),
            name=f"replica-{replica.index}",
            daemon=True,
        )
        with _inherited(replica.processors):
            process.start()
        replica.pid = process.pid
        self._processes[replica] = process
        return process


@contextmanager
def _inherited(processors: Sequence[int]) -> Iterator[None]:
    """What a process that is started within gets: its processors, and no SIGINT, which Ctrl-C sends to all."""
    resource_tracker.ensure_running()  # the first start would do it, and let SIGINT through again
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(processors)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    pin(processors)
    try:
        yield
    finally:
        pin(before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


async def _readable(file: int) -> None:
    """Returns when there is something to read, or the end."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(file, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(file)


def _receive(reports: Connection) -> Report | None:
    """None: the process has ended without a word."""
    try:
        report: Report = reports.recv()
        return report
    except (EOFError, OSError):
        return None


def _describe(status: int | None) -> str:
    if status is not None and status < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
