"""Serve a model by Ray Serve: the API of `rvllm serve` over engines on all nodes of a Ray cluster.

More replicas start when requests queue, and each request goes to the replica that has computed the beginning of its
prompt. SIGTERM and SIGINT let the requests in flight finish. Needs rvllm[ray].
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from rvllm.cli import serve
from rvllm.cli.errors import CommandError

HELP = "serve a model on a Ray cluster"


# fmt: off
def add_arguments(parser: argparse.ArgumentParser) -> None:
    serve.add_arguments(parser)
    add = add_cluster_arguments(parser)
    add("--min-replicas", type=int, default=1, metavar="N", help="engines when nothing is to do (default: %(default)s)")
    add("--max-replicas", type=int, metavar="N",
        help="engines under load (default: as many as the cluster has room for)")
    add("--target-ongoing-requests", type=float, metavar="X",
        help="of a replica; with more of them the next one starts (default: --max-num-seqs)")
    add("--downscale-delay", type=float, default=600.0, metavar="SECONDS",
        help="with fewer requests, time until a replica stops (default: %(default)g)")


def add_cluster_arguments(parser: argparse.ArgumentParser) -> Callable[..., Any]:
    add = parser.add_argument_group("Ray (an engine reserves --threads CPUs, on cuda also a GPU)").add_argument
    add("--address", metavar="HOST:PORT",
        help="of a Ray cluster (default: $RAY_ADDRESS, the one that runs here, or a new one)")
    add("--ray-logs", action="store_true", help="show what Ray and its workers log")
    return add
# fmt: on


def need_ray() -> None:
    """Raises CommandError."""
    if find_spec("ray") is None:
        raise CommandError("Ray is not installed: pip install 'rvllm[ray]'")


def run(args: argparse.Namespace) -> int:
    need_ray()
    from rvllm.ray.serve import run as run_on_ray

    config = serve.server_config(args)
    most = args.max_replicas if args.max_replicas is not None else max(1, args.min_replicas)
    if not 0 <= args.min_replicas <= most or most < 1:
        raise CommandError(
            f"--min-replicas must be from 0 to --max-replicas, not {args.min_replicas} of {most}"
        )
    if args.target_ongoing_requests is not None and not args.target_ongoing_requests > 0:
        raise CommandError(
            f"--target-ongoing-requests must be more than 0, not {args.target_ongoing_requests:g}"
        )
    if not args.downscale_delay >= 0:
        raise CommandError(f"--downscale-delay must be at least 0, not {args.downscale_delay:g}")
    if not 0 < args.port < 2**16:
        raise CommandError(f"--port must be between 1 and 65535, not {args.port}")
    for name in ("otlp_traces_endpoint", "log_file"):
        if getattr(args, name) is not None:
            raise CommandError(
                f"--{name.replace('_', '-')}: not with Ray, which collects the logs of its workers"
            )
    return run_on_ray(args, config)
