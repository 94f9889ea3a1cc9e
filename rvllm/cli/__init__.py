"""The `rvllm` command. One module a command; what is slow to import is imported when a command runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rvllm.cli import bench, generate, info, pull
from rvllm.cli.errors import CommandError
from rvllm.version import __version__

COMMANDS = {"bench": bench, "generate": generate, "info": info, "pull": pull}

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # as shells report a process ended by SIGINT
EXIT_PIPE_CLOSED = 141  # and by SIGPIPE


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see {self.prog} --help)")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rvllm", description="Run GGUF language models, many requests at once.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"rvllm {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status. Errors of the user's are one line on standard error."""
    try:
        args = make_parser().parse_args(argv)
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except CommandError as error:
        print(f"rvllm: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone. The interpreter must not fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
