"""The Ray cluster that a command runs on, and what of it an engine takes."""

from __future__ import annotations

import argparse
import copy
import logging
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from rvllm.cli.errors import CommandError, one_line, user_errors
from rvllm.models import DEFAULT_MODEL, resolve_model

# Bytes, of a cluster started here: requests and answers are small, and it spills.
OBJECT_STORE_MEMORY = 256 * 2**20


@dataclass(frozen=True)
class Placement:
    """args: those of the command, as every node understands them. resources: what Ray reserves for an engine.

    room: engines that fit into the nodes that live, if nothing else runs there.
    """

    args: argparse.Namespace
    resources: dict[str, float]
    room: int


@contextmanager
def connected(args: argparse.Namespace) -> Generator[Placement, None, None]:
    """Joins the cluster that runs here or at --address, or starts one in this machine, which ends with the command.

    Raises CommandError when there is no such cluster, no such model, or no room for one engine.
    """
    with user_errors():
        resolve_model(args.model)  # here as well: told at once, and before any node looks for it
    quiet = {"log_to_driver": args.ray_logs, "configure_logging": args.ray_logs}
    if not args.ray_logs:
        logging.disable(logging.ERROR)  # of this process, where Ray alone logs
    if args.address:
        _check_reachable(args.address)
    try:
        try:
            ray.init(args.address or "auto", **quiet)
        except ConnectionError:
            if args.address:
                raise
            ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE_MEMORY, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise CommandError(f"Ray: {one_line(error)}") from error
    try:
        yield _placement(args)
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raises CommandError at once, where Ray would try for a minute and end the process."""
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and int(port) < 2**16):
        raise CommandError(f"--address must be HOST:PORT, not {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise CommandError(f"no Ray cluster at {address}: {one_line(error)}") from None


def _placement(args: argparse.Namespace) -> Placement:
    nodes: list[dict[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes = [node for node in nodes if node.get("CPU", 0) >= 1]
    args = copy.copy(args)
    args.threads = args.threads or int(min((node["CPU"] for node in nodes), default=1))
    needed = {"CPU": float(args.threads)}
    if args.device.startswith("cuda"):
        needed["GPU"] = 1.0
    room = sum(_room(node, needed) for node in nodes)
    if room == 0:
        kinds = " and ".join(f"{count:g} {kind}" for kind, count in needed.items())
        raise CommandError(f"no node of the Ray cluster has {kinds} for an engine (--threads)")
    args.model = args.model or DEFAULT_MODEL
    for name in ("model", "tokenizer", "chat_template"):
        path = getattr(args, name)
        if path is not None and os.path.exists(path):
            setattr(args, name, os.path.abspath(path))  # workers start in another folder
    resources = {f"num_{kind.lower()}s": count for kind, count in needed.items()}
    return Placement(args, resources, room)


def _room(node: dict[str, float], needed: dict[str, float]) -> int:
    return int(min(node.get(kind, 0) // count for kind, count in needed.items()))


def root_cause(error: BaseException) -> str:
    """The one line of a traceback's text that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    known = [line for line in lines if "CommandError: " in line or "EngineDeadError: " in line]
    return (known or lines or [type(error).__name__])[-1].rpartition("Error: ")[2]


def remote_arguments(placement: Placement) -> dict[str, Any]:
    """What a worker needs of the command line: plain values, so that it does not matter where they are read."""
    return {name: value for name, value in vars(placement.args).items() if not callable(value)}
