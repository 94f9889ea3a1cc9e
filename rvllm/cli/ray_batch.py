"""Answer a file of requests in OpenAI's batch format, as `rvllm batch` does, on all nodes of a Ray cluster.

It goes on where it was after whatever has stopped it. Needs rvllm[ray].
"""

from __future__ import annotations

import argparse

from rvllm.cli import batch
from rvllm.cli.errors import CommandError
from rvllm.cli.ray_serve import add_cluster_arguments, need_ray

HELP = "answer a file of requests on a Ray cluster, resumable"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    batch.add_arguments(parser)
    add = add_cluster_arguments(parser)
    add(
        "--workers", type=int, metavar="N", help="most engines (default: as many as the cluster has room for)"
    )


def run(args: argparse.Namespace) -> int:
    need_ray()
    from rvllm.ray.batch import answer

    if args.workers is not None and args.workers < 1:
        raise CommandError(f"--workers must be at least 1, not {args.workers}")
    return batch.run_with(answer, args)
