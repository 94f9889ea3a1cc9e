"""--profile and --profile-trace, for the commands that have them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rvllm.cli.errors import user_errors, writing

if TYPE_CHECKING:
    from rvllm.llm import LLM


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("profiling").add_argument
    add(
        "--profile",
        action="store_true",
        help="report on standard error where the time went: docs/profiling.md",
    )
    add("--profile-trace", type=Path, metavar="FILE", help="write a trace for chrome://tracing or Perfetto")


def wants_profile(args: argparse.Namespace) -> bool:
    """Whether to load the model with profile=True. Raises CommandError for a trace that cannot be written."""
    if args.profile_trace is not None:
        with user_errors():
            args.profile_trace.open("a").close()  # said before the work
    return args.profile or args.profile_trace is not None


def begin_profile(llm: LLM) -> None:
    """The next table counts from here on."""
    if llm.profile is not None:
        llm.profile.reset_totals()


def print_profile(args: argparse.Namespace, llm: LLM, title: str = "") -> None:
    """The table, if args ask for it."""
    if args.profile and llm.profile is not None:
        print(f"\n{title}{llm.profile.table()}", file=sys.stderr)


def write_profile_trace(args: argparse.Namespace, llm: LLM) -> None:
    """The trace, if args ask for it. Raises CommandError."""
    if args.profile_trace is not None and llm.profile is not None:
        with user_errors(), writing(args.profile_trace):
            llm.profile.write_trace(args.profile_trace)
