"""Answer a file of requests in OpenAI's batch format, many at a time; a run that was stopped goes on where it was.

Each line of INPUT has custom_id, method (POST), url (/v1/chat/completions, /v1/completions, /v1/responses or
/v1/embeddings) and body; OUTPUT gets a line for each, as it is answered. Requests that OUTPUT answers already are not
run again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rvllm.cli.arguments import add_engine_arguments, load_chat_llm
from rvllm.cli.errors import EXIT_FAILURE, CommandError, one_line, user_errors

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rvllm.server.batch_file import InputFile, OutputFile
    from rvllm.server.served_model import ServerConfig

HELP = "answer a file of requests in OpenAI's batch format, resumable"

GO_ON = "the same command goes on"
MAX_QUEUE = 2**31  # the batch itself bounds what is in flight
PROGRESS_SECONDS = 10.0  # between lines in a log; on a terminal it is one line, which changes
TERMINAL_PROGRESS_SECONDS = 0.2


# fmt: off
def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="INPUT", help="a JSON Lines file of requests")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="the file of the answers, made or gone on with")
    add = parser.add_argument_group("batch").add_argument
    add("--served-model-name", nargs="+", metavar="NAME",
        help="what requests may call the model (default: the file's name)")
    add("--chat-template", metavar="FILE",
        help="a Jinja template to use instead of the model's own, or the name of a common one, such as chatml")
    add("-s", "--seed", type=int, metavar="N",
        help="with custom_id, makes the seed of requests that have none (default: a new one for each)")
    add_engine_arguments(parser)
# fmt: on


Answer = Callable[[argparse.Namespace, "ServerConfig", "InputFile", "OutputFile"], "int | None"]


def run(args: argparse.Namespace) -> int:
    return run_with(answer_here, args)


def run_with(answer: Answer, args: argparse.Namespace) -> int:
    """answer: answers what is left; returns the signal that ended it early. Raises EngineDeadError and ValueError."""
    from rvllm.server.batch_file import InputFile, OutputFile

    with user_errors():
        source = InputFile.read(args.input)
        if args.output.exists() and os.path.samefile(args.input, args.output):
            raise CommandError(f"{args.output}: INPUT and OUTPUT are the same file")
        output = OutputFile(args.output)
    try:
        unknown = output.answered - source.lines.keys()
        if unknown:
            raise CommandError(
                f"{args.output}: answers {len(unknown)} requests that {args.input} does not have, such as "
                f"{min(unknown)!r}: is it the output of another file?"
            )
        return _run(answer, args, source, output)
    except OSError as error:
        reason = error.strerror or one_line(error)
        _say(f"error: cannot write {args.output}: {reason}; {_count(source, output)}, {GO_ON}")
        return EXIT_FAILURE
    finally:
        output.close()


def _run(answer: Answer, args: argparse.Namespace, source: InputFile, output: OutputFile) -> int:
    """Raises OSError when the output cannot be written."""
    from rvllm.engine_errors import EngineDeadError

    stopped_by = None
    for bad in source.bad_lines:
        if bad.number not in output.refused:
            output.write(bad.entry())
    if source.lines.keys() - output.answered:
        try:
            stopped_by = answer(args, _config(args), source, output)
        except (EngineDeadError, ValueError) as error:
            raise CommandError(f"{one_line(error)}; {_count(source, output)}, {GO_ON}") from error
    output.sync()
    count = _count(source, output)
    if stopped_by is not None:
        _say(f"stopped: {count}, {GO_ON}")
        return 128 + stopped_by  # as shells report it
    if source.lines.keys() - output.answered:
        _say(f"error: {count}, the steps of the others failed; {GO_ON}")
        return EXIT_FAILURE
    failed = f"; {output.num_failed} lines of {output.path} are errors" if output.num_failed else ""
    _say(count + failed)
    return EXIT_FAILURE if output.num_failed else 0


def answer_here(
    args: argparse.Namespace, config: ServerConfig, source: InputFile, output: OutputFile
) -> int | None:
    app = load_app(args, config)
    try:
        return asyncio.run(_run_until_signal(args, app, source, output))
    finally:
        app.state.model.engine.shutdown()


def load_app(args: argparse.Namespace, config: ServerConfig, seed: int | None = None) -> FastAPI:
    """The server's application with its engine running, for callers that bound what is in flight themselves.

    seed: the engine's. Raises CommandError.
    """
    from rvllm.server.app import create_app, start_engine

    llm = load_chat_llm(args, seed)
    app = create_app(config)
    app.state.model = start_engine(app, llm, MAX_QUEUE)
    return app


def _config(args: argparse.Namespace) -> ServerConfig:
    from rvllm.cli.serve import served_names
    from rvllm.server.served_model import ServerConfig

    aliases = () if args.model is None else (args.model,)
    return ServerConfig(names=served_names(args), aliases=aliases, max_body_size=sys.maxsize)


async def _run_until_signal(
    args: argparse.Namespace, app: FastAPI, source: InputFile, output: OutputFile
) -> int | None:
    from rvllm.server.batch import BatchRunner

    progress = Progress(source, output)
    requests = source.requests(without=set(output.answered))
    task = asyncio.ensure_future(BatchRunner(app, args.seed, progress.write).run(requests))
    stopped_by: list[int] = []

    def stop(number: int) -> None:
        stopped_by.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped_by:
            raise
    finally:
        progress.end()
    return stopped_by[0] if stopped_by else None


def _count(source: InputFile, output: OutputFile) -> str:
    return f"{len(output.answered)} of {len(source.lines)} requests answered"


def _say(line: str) -> None:
    with suppress(OSError):  # whoever read standard error has gone
        print(f"rvllm: {line}", file=sys.stderr, flush=True)


class Progress:
    """Writes answers, and tells on standard error how far a batch is and how fast."""

    def __init__(self, source: InputFile, output: OutputFile) -> None:
        self._source = source
        self._output = output
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._interval = TERMINAL_PROGRESS_SECONDS if self._is_terminal else PROGRESS_SECONDS
        self._start = self._last = time.monotonic()
        self._num_answers = self._num_tokens = 0

    def write(self, entry: dict[str, Any]) -> None:
        """Raises OSError when the output cannot be written."""
        self._output.write(entry)
        self._num_answers += 1
        usage = entry["response"]["body"].get("usage") or {}
        self._num_tokens += usage.get("completion_tokens", 0)
        now = time.monotonic()
        if now - self._last >= self._interval:
            self._last = now
            self._show(now - self._start)

    def _show(self, seconds: float) -> None:
        left = len(self._source.lines) - len(self._output.answered)
        minutes, rest = divmod(round(seconds / self._num_answers * left), 60)
        line = (
            f"{_count(self._source, self._output)}, {self._num_tokens / seconds:,.0f} tok/s, "
            f"about {minutes}:{rest:02} left"
        )
        if self._is_terminal:
            with suppress(OSError):
                print(f"\r\x1b[Krvllm: {line}", end="", file=sys.stderr, flush=True)
        else:
            _say(line)

    def end(self) -> None:
        if self._is_terminal:
            with suppress(OSError):
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
