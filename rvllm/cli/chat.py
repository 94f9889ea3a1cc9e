"""Talk to a model in the terminal.

A line is a message; Ctrl-C stops the answer, a second one or Ctrl-D ends the chat, /help lists the commands.
Standard input may be a pipe: then each line of it is a message, and standard output holds the answers alone.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePath
from typing import TYPE_CHECKING

from rvllm.cli.arguments import add_engine_arguments, add_sampling_arguments, load_llm, sampling_params
from rvllm.cli.errors import CommandError
from rvllm.cli.printer import use_utf8

if TYPE_CHECKING:
    from rvllm.chat_session import ChatBackend, ChatDelta, ChatSession
    from rvllm.sampling_params import SamplingParams

HELP = "talk to a model in the terminal"

HISTORY_LENGTH = 1000  # lines
QUOTES = '"""'
# What a model writes must not drive the terminal.
CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


# fmt: off
def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("chat").add_argument
    add("--system", metavar="TEXT", help="the system message")
    add("--url", metavar="URL", help="talk to a server instead, such as http://localhost:8000")
    add("--api-key", metavar="KEY", help="with --url: the server's key (default: $RVLLM_API_KEY)")
    add("--tui", action="store_true", help="full screen, with a list of models to choose from (needs rvllm[tui])")
    add = add_sampling_arguments(parser).add_argument
    add("--ignore-eos", action="store_true", help="do not end where the model would")
    add_engine_arguments(parser)
    parser.set_defaults(max_tokens=1024, temperature=0.7, top_p=0.95)
# fmt: on


def run(args: argparse.Namespace) -> int:
    from rvllm.chat_session import ChatError, ChatSession

    params = sampling_params(args, ignore_eos=args.ignore_eos)
    _check_url(args)
    try:
        if args.tui:
            return _run_tui(args, params)
        session = ChatSession(open_backend(args), params, args.system, _note)
    except ChatError as error:
        raise CommandError(str(error)) from None
    use_utf8()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8")
    return Terminal(session).run()


def open_backend(args: argparse.Namespace) -> ChatBackend:
    """What the arguments ask for. Raises CommandError, ChatError."""
    from rvllm.chat_backends import LocalChat, ServerChat
    from rvllm.models import DEFAULT_MODEL

    if args.url is not None:
        return ServerChat(args.url, args.model, args.api_key or os.environ.get("RVLLM_API_KEY"))
    return LocalChat(load_llm(args), PurePath(args.model or DEFAULT_MODEL).name.removesuffix(".gguf"))


def _run_tui(args: argparse.Namespace, params: SamplingParams) -> int:
    try:
        from rvllm.tui import ChatApp
    except ImportError:
        raise CommandError("--tui needs textual: pip install 'rvllm[tui]'") from None
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CommandError("--tui needs a terminal")
    ChatApp(args, params, open_backend).run()
    return 0


def _check_url(args: argparse.Namespace) -> None:
    """Raises CommandError for options that would change nothing."""
    if args.url is None:
        if args.api_key is not None:
            raise CommandError("--api-key needs --url")
        return
    parser = argparse.ArgumentParser(add_help=False)
    add_engine_arguments(parser)
    for name, value in vars(parser.parse_args([])).items():
        if name != "model" and getattr(args, name) != value:
            raise CommandError(
                f"--{name.replace('_', '-')} is the server's to set: it does not go with --url"
            )


def _note(line: str) -> None:
    print(f"rvllm: {line}", file=sys.stderr)


class Terminal:
    """Reads messages and commands, prints answers."""

    def __init__(self, session: ChatSession) -> None:
        self._session = session
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._colored = self._interactive and not os.environ.get("NO_COLOR")
        self._failed = False

    def run(self) -> int:
        """Until the input or the user ends it; returns the exit status: 2 if a line of a pipe was refused."""
        if not self._interactive:
            for message in _messages(self._read_line):
                if not self._handle(message):
                    break
            return 2 if self._failed else 0
        with _history():
            self._dim(f"{self._session.backend.name}: /help lists the commands, Ctrl-D ends the chat")
            return self._run_interactive()

    def _run_interactive(self) -> int:
        interrupted = False
        while True:
            try:
                message = next(_messages(self._read_line), None)
                if message is None:
                    print()
                    return 0
                interrupted = False
                if not self._handle(message):
                    return 0
            except KeyboardInterrupt:
                print()
                if interrupted:
                    return 130
                interrupted = True
                self._dim("stopped; Ctrl-C again or Ctrl-D ends the chat")

    def _read_line(self, continued: bool) -> str | None:
        """The next line, None at the end."""
        while self._interactive:
            text = "… " if continued else "> "
            try:
                # The marks tell readline what takes no room.
                return input(f"\001\033[1;36m\002{text}\001\033[0m\002" if self._colored else text)
            except EOFError:
                return None
            except UnicodeDecodeError as error:
                print(f"rvllm: error: {_bad_byte(error)}", file=sys.stderr)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise CommandError(_bad_byte(error)) from None
        return line.removesuffix("\n") if line else None

    def _handle(self, message: str) -> bool:
        """Runs a command or asks the model; False ends the chat."""
        from rvllm.chat_commands import run_command
        from rvllm.chat_session import ChatError

        try:
            if message.startswith("/") and not message.startswith("//"):
                reply = run_command(self._session, message)
                for line in reply.lines:
                    self._dim(line)
                if reply.answer is not None:
                    self._print(reply.answer)
                return not reply.ends
            self._print(self._session.ask(message.removeprefix("/") if message.startswith("//") else message))
        except ChatError as error:
            self._failed = True
            print(f"rvllm: error: {error}", file=sys.stderr)
        return True

    def _print(self, answer: Iterator[ChatDelta]) -> None:
        thinking = False
        try:
            for delta in answer:
                if delta.reasoning and self._interactive:
                    thinking = True
                    self._write(delta.reasoning, dim=True)
                if delta.text:
                    if thinking:
                        self._write("\n\n")
                        thinking = False
                    self._write(delta.text)
        finally:
            answer.close()  # type: ignore[attr-defined]
        self._write("\n")
        if self._session.finish_reason == "length" and self._interactive:
            self._dim("the answer ended at the limit: see /set max_tokens, /clear")

    def _write(self, text: str, dim: bool = False) -> None:
        if self._interactive:
            text = text.translate(CONTROL)
        print(f"\033[2m{text}\033[0m" if dim and self._colored else text, end="", flush=True)

    def _dim(self, line: str) -> None:
        """A line of the program's own: of a pipe's output it is no part."""
        if self._interactive:
            line = line.translate(CONTROL)
            print(f"\033[2m{line}\033[0m" if self._colored else line)
        else:
            print(line, file=sys.stderr)


def _bad_byte(error: UnicodeDecodeError) -> str:
    return f"standard input: byte {error.object[error.start]:#04x} is not UTF-8"


def _messages(read_line: Callable[[bool], str | None]) -> Iterator[str]:
    """Messages of one line, of several that end with a backslash, or between lines of three quotes."""
    while (line := read_line(False)) is not None:
        quoted = line.lstrip().startswith(QUOTES)
        end = QUOTES if quoted else ""
        line = line.lstrip().removeprefix(QUOTES) if quoted else line
        lines = []
        while not line.rstrip().endswith(end) if quoted else line.endswith("\\"):
            lines.append(line if quoted else line[:-1])
            following = read_line(True)
            if following is None:
                break
            line = following
        else:
            lines.append(line.rstrip().removesuffix(end))
        message = "\n".join(lines).strip()
        if message:
            yield message


@contextmanager
def _history() -> Iterator[None]:
    """Keeps the lines that were typed from one chat to the next, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    from rvllm.models import models_dir

    path = models_dir().parent / "chat_history"
    readline.set_history_length(HISTORY_LENGTH)
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
