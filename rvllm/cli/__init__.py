"""The `rvllm` command. One module a command; what is slow to import is imported when a command runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rvllm.cli import (
    batch,
    bench,
    bench_serve,
    chat,
    doctor,
    generate,
    info,
    perplexity,
    pull,
    ray_batch,
    ray_serve,
    serve,
)
from rvllm.cli.errors import EXIT_FAILURE, CommandError, one_line
from rvllm.cli.parser import CommandParser, Parser
from rvllm.version import __version__

COMMANDS = {
    "batch": batch,
    "bench": bench,
    "bench serve": bench_serve,
    "chat": chat,
    "doctor": doctor,
    "generate": generate,
    "info": info,
    "perplexity": perplexity,
    "pull": pull,
    "ray batch": ray_batch,
    "ray serve": ray_serve,
    "serve": serve,
}

EXIT_INTERRUPTED = 130  # as shells report a process ended by SIGINT
EXIT_PIPE_CLOSED = 141  # and by SIGPIPE


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="rvllm", description="Run GGUF language models, many requests at once.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"rvllm {__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND", parser_class=CommandParser
    )
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
    for name in {name.partition(" ")[0] for name in COMMANDS} - COMMANDS.keys():
        _add_group(commands, name)
    return parser


def _add_group(commands: argparse._SubParsersAction[CommandParser], first: str) -> None:
    """A word that is no command by itself: it only tells which there are."""
    group = commands.add_parser(first, allow_abbrev=False)
    seconds = group.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        if name.startswith(f"{first} "):
            seconds.add_parser(name.partition(" ")[2], help=module.HELP)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status. Errors of the user's are one line on standard error."""
    try:
        if sys.stdout is None:
            raise CommandError("standard output is closed")
        if sys.stdin is None:
            sys.stdin = open(os.devnull)  # noqa: SIM115 (open as long as the process)
        args = make_parser().parse_args(_join_prompts(sys.argv[1:] if argv is None else argv))
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except CommandError as error:
        print(f"rvllm: error: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone. The interpreter must not fail again when it flushes at exit.
        _drop_output()
        return EXIT_PIPE_CLOSED
    except OSError as error:
        _drop_output()
        print(f"rvllm: error: cannot write the output: {one_line(error)}", file=sys.stderr)
        return EXIT_FAILURE


def _drop_output() -> None:
    """What is left in the buffer of standard output has nowhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _join_prompts(argv: Sequence[str]) -> list[str]:
    """Ties a prompt to its option: argparse would take one such as "-hello" for an option itself.

    A command of two words becomes one word for argparse.
    """
    joined: list[str] = []
    if " ".join(argv[:2]) in COMMANDS:
        argv = [" ".join(argv[:2]), *argv[2:]]
    words = iter(argv)
    for word in words:
        text = next(words, None) if word in ("-p", "--prompt") else None
        joined.append(word if text is None else f"--prompt={text}")
    return joined
