"""The /commands of a chat, the same in the terminal and in the full-screen program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rvllm.chat_session import SETTINGS, ChatDelta, ChatError, ChatSession


@dataclass
class Reply:
    """What a command leads to. answer: of the model's. restarts: the turns have changed. ends: the chat is over."""

    lines: list[str] = field(default_factory=list)
    answer: Iterator[ChatDelta] | None = None
    restarts: bool = False
    ends: bool = False


Command = Callable[[ChatSession, str], Reply]


def run_command(session: ChatSession, line: str) -> Reply:
    """Runs a line that begins with a slash. Raises ChatError."""
    name, _, argument = line[1:].partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise ChatError(f"/{name}: no such command, see /help")
    usage, _, run = command
    argument = argument.strip()
    if argument and not usage:
        raise ChatError(f"/{name} takes nothing behind it, got {argument!r}")
    if not argument and usage and not usage.startswith("["):
        raise ChatError(f"usage: /{name} {usage}")
    return run(session, argument)


def _help(session: ChatSession, argument: str) -> Reply:
    names = {f"/{name} {usage}".rstrip(): text for name, (usage, text, _) in COMMANDS.items()}
    width = max(map(len, names))
    lines = [f"{name:{width}}  {text}" for name, text in names.items()]
    return Reply(
        [*lines, 'Begin a message with // for a slash, and put one of several lines between """ and """.']
    )


def _clear(session: ChatSession, argument: str) -> Reply:
    session.clear()
    return Reply(["a new conversation"], restarts=True)


def _system(session: ChatSession, argument: str) -> Reply:
    if argument:
        session.system = None if argument == "none" else argument
    return Reply([f"system: {session.system}" if session.system is not None else "no system message"])


def _regenerate(session: ChatSession, argument: str) -> Reply:
    if not session.messages:
        raise ChatError("there is no question yet")
    return Reply(answer=session.regenerate())


def _undo(session: ChatSession, argument: str) -> Reply:
    return Reply([f"taken back: {_short(session.undo())}"], restarts=True)


def _save(session: ChatSession, argument: str) -> Reply:
    session.save(argument)
    return Reply([f"saved {len(session.messages)} messages to {argument}"])


def _load(session: ChatSession, argument: str) -> Reply:
    session.load(argument)
    return Reply([f"loaded {len(session.messages)} messages from {argument}"], restarts=True)


def _set(session: ChatSession, argument: str) -> Reply:
    before = session.params
    try:
        for assignment in argument.split():
            session.set(assignment)
    except ChatError:
        session.params = before
        raise
    return Reply([f"{name}={getattr(session.params, name)}" for name in SETTINGS])


def _stats(session: ChatSession, argument: str) -> Reply:
    stats = session.stats
    if stats is None:
        return Reply(["no answer yet"])
    context = stats.num_prompt_tokens + stats.num_tokens
    limit = session.backend.max_model_len
    return Reply(
        [
            f"prompt: {stats.num_prompt_tokens} tokens, {stats.num_cached_tokens} of them from the prefix cache",
            f"first token: after {stats.first_token_seconds:.2f} s",
            f"answer: {stats.num_tokens} tokens, {stats.tokens_per_second:.1f} tok/s",
            f"context: {context} tokens" + (f" of {limit}" if limit else ""),
        ]
    )


def _exit(session: ChatSession, argument: str) -> Reply:
    return Reply(ends=True)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."


# name: (what follows it, in brackets if it may be left out; what it does; the function)
COMMANDS: dict[str, tuple[str, str, Command]] = {
    "help": ("", "list the commands", _help),
    "clear": ("", "begin a new conversation", _clear),
    "system": ("[TEXT]", "show or set the system message; none removes it", _system),
    "regenerate": ("", "answer the last question again", _regenerate),
    "undo": ("", "take back the last question and its answer", _undo),
    "save": ("FILE", "write the conversation as JSON", _save),
    "load": ("FILE", "go on from a saved conversation", _load),
    "set": ("[NAME=VALUE ...]", "show or set sampling, as in temperature=0.5 seed=none", _set),
    "stats": ("", "figures of the last answer", _stats),
    "exit": ("", "end the chat, as does Ctrl-D", _exit),
}
