"""Serve a model over HTTP: OpenAI's API, and llama.cpp's /completion.

The server listens while the model is loaded; GET /health tells when it is ready. SIGTERM and SIGINT let the
requests in flight finish, a second one ends the server at once.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING

from rvllm.cli.arguments import add_engine_arguments, model_name, size
from rvllm.cli.errors import EXIT_FAILURE, CommandError, one_line

if TYPE_CHECKING:
    from rvllm.server.served_model import ServerConfig

HELP = "serve a model over HTTP"


# fmt: off
def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    add("--port", type=int, default=8000, metavar="N", help="0 takes a free one (default: %(default)s)")
    add("--served-model-name", nargs="+", metavar="NAME", help="names of the model (default: the file's)")
    add("--chat-template", metavar="FILE",
        help="a Jinja template to use instead of the model's own, or the name of a common one, such as chatml")
    add("--max-queue", type=int, default=256, metavar="N",
        help="requests that may wait beside those that run; more are answered 429 (default: %(default)s)")
    add("--timeout", type=float, metavar="SECONDS", help="end a request after this time (default: no limit)")
    add("--drain-timeout", type=float, default=30.0, metavar="SECONDS",
        help="on SIGTERM, time for the requests in flight to finish (default: %(default)g)")
    add("-s", "--seed", type=int, metavar="N", help="of the requests that have none (default: a new one)")
    add("--replicas", type=replica_count, metavar="N",
        help="servers behind the one port, each on its share of the processors; numa: one for each NUMA node")

    add = parser.add_argument_group("security and logs").add_argument
    add("--api-key", action="append", metavar="KEY",
        help="a key that clients must send, may be repeated (default: $RVLLM_API_KEY, or none is needed)")
    add("--cors-origin", action="append", default=[], metavar="ORIGIN",
        help="a web page's origin that may use the server, or * for all; may be repeated (default: none)")
    add("--max-body-size", type=size, default=8 * 2**20, metavar="SIZE",
        help="of a request, such as 500K or 8M (default: 8M)")
    add("--log-requests", action="store_true", help="log the prompts as well")
    add("--otlp-traces-endpoint", metavar="URL",
        help="where to send OpenTelemetry spans, such as http://localhost:4318/v1/traces (needs rvllm[otel])")
    add("--log-file", metavar="FILE", help="where to log (default: standard error)")
    add_engine_arguments(parser)
# fmt: on


def run(args: argparse.Namespace) -> int:
    config = server_config(args)
    try:
        listener = _listen(args.host, args.port)
    except OSError as error:
        reason = error.strerror or one_line(error)
        print(f"rvllm: error: cannot listen on {args.host}, port {args.port}: {reason}", file=sys.stderr)
        return EXIT_FAILURE
    with listener:
        if args.replicas is not None:
            from rvllm.server.replicas import ReplicaSet

            return ReplicaSet(args, config, listener).run()
        from rvllm.server.serve import Server

        return Server(args, config, listener).run()


def replica_count(text: str) -> int | str:
    """A number of at least 1, or "numa"."""
    if text != "numa" and not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of at least 1 nor numa")
    return text if text == "numa" else int(text)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Settings of the arguments above; sets args.model. Raises CommandError for values that are out of range."""
    from rvllm.server.served_model import ServerConfig

    args.model = model_name(args)
    if args.max_queue < 0:
        raise CommandError(f"--max-queue must be at least 0, not {args.max_queue}")
    if not args.drain_timeout >= 0:
        raise CommandError(f"--drain-timeout must be at least 0, not {args.drain_timeout:g}")
    if args.timeout is not None and not 0 < args.timeout < 1e9:
        raise CommandError(f"--timeout must be more than 0, not {args.timeout:g}")
    if args.max_body_size < 1:
        raise CommandError(f"--max-body-size must be at least 1, not {args.max_body_size}")
    if "" in (args.served_model_name or ()):
        raise CommandError("--served-model-name must not be empty")
    keys = args.api_key or [key for key in [os.environ.get("RVLLM_API_KEY")] if key]
    if not all(key.strip() for key in keys):
        raise CommandError("--api-key must not be empty")
    return ServerConfig(
        names=served_names(args),
        aliases=() if args.model is None else (args.model,),
        api_keys=tuple(keys),
        cors_origins=tuple(args.cors_origin),
        timeout=args.timeout,
        max_body_size=args.max_body_size,
        log_requests=args.log_requests,
    )


def served_names(args: argparse.Namespace) -> tuple[str, ...]:
    """What requests may call the model: by default the name of its file."""
    from rvllm.models import DEFAULT_MODEL

    path = PurePath(args.model or DEFAULT_MODEL)
    return tuple(args.served_model_name or [path.stem if path.suffix == ".gguf" else path.name])


def _listen(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    if not 0 <= port < 2**16:
        raise CommandError(f"--port must be between 0 and 65535, not {port}")
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener
