"""The full-screen chat: a list of models to choose from, then the conversation. Needs textual."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from rich.markup import escape
from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, Markdown, OptionList, Static, TextArea
from textual.widgets.option_list import Option
from textual.worker import Worker, get_current_worker

from rvllm.chat_commands import run_command
from rvllm.chat_session import ChatBackend, ChatDelta, ChatError, ChatSession
from rvllm.cli.errors import CommandError
from rvllm.gguf_file import SPLIT_NAME
from rvllm.models import DEFAULT_MODEL, models_dir
from rvllm.sampling_params import SamplingParams

REFRESH_SECONDS = 0.1  # between two looks of a growing answer
OpenBackend = Callable[[argparse.Namespace], ChatBackend]


def find_models(folders: Iterable[Path]) -> list[Path]:
    """GGUF files in folders and below, each once; of a split model the first part."""
    found: dict[Path, None] = {}
    for folder in folders:
        for root, names, files in os.walk(folder):
            names[:] = sorted(name for name in names if not name.startswith("."))
            for name in sorted(files):
                split = SPLIT_NAME.fullmatch(name)
                if name.endswith(".gguf") and (split is None or int(split["number"]) == 1):
                    found[(Path(root) / name).absolute()] = None
    return list(found)


class ModelPicker(Screen[None]):
    """Lists models; the app loads the one that is chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back"),
        Binding("ctrl+q", "app.quit", "Quit", priority=True),
    ]

    def __init__(self, folders: list[Path]) -> None:
        super().__init__()
        self._folders = folders

    def compose(self) -> ComposeResult:
        yield Static("rvllm  [dim]choose a model[/dim]", classes="title")
        yield OptionList(id="models")
        yield Static(id="picker-state")
        yield Footer()

    def on_mount(self) -> None:
        paths = find_models(self._folders)
        options = [
            Option(
                f"{escape(path.stem)}  [dim]{size_text(path)}  {escape(str(path.parent))}[/dim]", str(path)
            )
            for path in paths
        ]
        if not any(path.stem == DEFAULT_MODEL for path in paths):
            options.append(
                Option(f"{DEFAULT_MODEL}  [dim]the default model, fetched when chosen[/dim]", "default")
            )
        models = self.query_one(OptionList)
        models.add_options(options)
        models.highlighted = 0
        models.focus()

    def show(self, text: str, is_error: bool = False) -> None:
        state = self.query_one("#picker-state", Static)
        state.update(escape(text))
        state.set_class(is_error, "error")
        self.query_one(OptionList).disabled = not is_error and bool(text)

    def action_back(self) -> None:
        if len(self.app.screen_stack) > 2:
            self.app.pop_screen()


def size_text(path: Path) -> str:
    try:
        return f"{path.stat().st_size / 2**20:.0f} MiB"
    except OSError:
        return ""


class MessageField(TextArea):
    """Enter sends, Shift+Enter or Ctrl+J breaks the line."""

    class Submitted(Message):
        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.prevent_default()
            event.stop()
            self.post_message(self.Submitted(self.text.strip()))
        elif event.key in ("shift+enter", "ctrl+j"):
            event.prevent_default()
            event.stop()
            self.insert("\n")
        else:
            await super()._on_key(event)


class ChatScreen(Screen[None]):
    """One conversation."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop"),
        Binding("ctrl+n", "command('/clear')", "New", priority=True),
        Binding("ctrl+r", "command('/regenerate')", "Again", priority=True),
        Binding("ctrl+o", "app.choose", "Models", priority=True),
        Binding("ctrl+q", "app.quit", "Quit", priority=True),
    ]

    def __init__(self, session: ChatSession) -> None:
        super().__init__()
        self._session = session
        session.notify = lambda line: self.app.call_from_thread(self.notify, line)
        self._answering: Worker[None] | None = None

    def compose(self) -> ComposeResult:
        yield Static(f"rvllm  [dim]{escape(self._session.backend.name)}[/dim]", classes="title")
        yield VerticalScroll(id="turns", can_focus=True)
        yield Static(id="state")
        field = MessageField(id="field", placeholder="Write a message, or /help")
        field.show_line_numbers = False
        yield field
        yield Footer()

    def on_mount(self) -> None:
        self._show_state("Enter sends, Shift+Enter breaks the line")
        self.query_one(MessageField).focus()

    @property
    def is_answering(self) -> bool:
        return self._answering is not None and self._answering.is_running

    def on_message_field_submitted(self, event: MessageField.Submitted) -> None:
        if not event.text:
            return
        if self.is_answering:
            self.notify("The answer is still coming: Esc stops it")
            return
        self.query_one(MessageField).clear()
        if event.text.startswith("/") and not event.text.startswith("//"):
            self.action_command(event.text)
        else:
            text = event.text.removeprefix("/") if event.text.startswith("//") else event.text
            self._add(Static(escape(text), classes="user"))
            self._start(self._session.ask(text))

    def action_command(self, line: str) -> None:
        if self.is_answering:
            self.notify("The answer is still coming: Esc stops it")
            return
        try:
            reply = run_command(self._session, line)
        except ChatError as error:
            self.notify(str(error), severity="error")
            return
        if reply.ends:
            self.app.exit()
        if reply.restarts:
            self._show_turns()
        if reply.answer is not None:
            self._show_turns(self._session.messages[:-1])
            self._start(reply.answer)
        elif reply.lines:
            self._add(Static(escape("\n".join(reply.lines)), classes="note"))

    def action_stop(self) -> None:
        if self._answering is not None and self._answering.is_running:
            self._answering.cancel()
            self._session.backend.interrupt()

    def on_unmount(self) -> None:
        self.action_stop()

    def _show_turns(self, messages: list[dict[str, str]] | None = None) -> None:
        turns = self.query_one("#turns")
        turns.remove_children()
        for message in self._session.messages if messages is None else messages:
            if message["role"] == "user":
                self._add(Static(escape(message["content"]), classes="user"))
            else:
                self._add(Markdown(message["content"], classes="model", open_links=False))

    def _add(self, widget: Static | Markdown) -> None:
        turns = self.query_one("#turns", VerticalScroll)
        turns.mount(widget)
        turns.anchor()

    def _show_state(self, text: str) -> None:
        self.query_one("#state", Static).update(escape(text))

    def _start(self, answer: Iterator[ChatDelta]) -> None:
        widget = Markdown("", classes="model", open_links=False)
        self._add(widget)
        self._show_state("reading the messages…")
        self._answering = self._answer(answer, widget)

    @work(thread=True, exclusive=True, exit_on_error=False)
    def _answer(self, answer: Iterator[ChatDelta], widget: Markdown) -> None:
        """In a thread of its own: the engine's steps and the server's silences must not stop the screen."""
        worker = get_current_worker()
        show = self.app.call_from_thread
        text, shown_at = "", 0.0
        problem = ""
        try:
            for delta in answer:
                if worker.is_cancelled:
                    break
                text += delta.text
                if delta.text and time.perf_counter() - shown_at > REFRESH_SECONDS:
                    shown_at = time.perf_counter()
                    show(widget.update, text)
                    show(self._show_state, f"{delta.num_tokens} tokens")
        except ChatError as error:
            problem = "" if worker.is_cancelled else str(error)
        finally:
            answer.close()  # type: ignore[attr-defined]
        show(widget.update, text)
        show(self._finish, problem, worker.is_cancelled)

    def _finish(self, problem: str, stopped: bool) -> None:
        stats = self._session.stats
        if problem:
            self.notify(problem, severity="error", timeout=10)
            self._show_state("no answer: see /undo, /clear, /regenerate")
            self._show_turns()
        elif stats is not None:
            length = self._session.backend.max_model_len
            used = f"{stats.num_prompt_tokens + stats.num_tokens}" + (f" of {length}" if length else "")
            self._show_state(
                f"{'stopped · ' if stopped else ''}{stats.num_tokens} tokens · {stats.tokens_per_second:.1f} tok/s · "
                f"{stats.first_token_seconds:.2f} s to first token · context {used}"
            )


class ChatApp(App[None]):
    """args: of `rvllm chat`. open_backend loads what args.model names, in a thread; raises ChatError, CommandError."""

    TITLE = "rvllm"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    .title { dock: top; height: 1; padding: 0 2; background: $panel; text-style: bold; }
    #models { margin: 1 2 0 2; height: 1fr; }
    #picker-state { margin: 1 2; color: $text-muted; }
    #picker-state.error { color: $text-error; }
    #turns { padding: 1 0 1 2; }
    .user { margin: 1 2 1 8; padding: 1 2; background: $boost; width: 1fr; }
    .model { margin: 0 2 0 0; padding: 0; background: transparent; }
    .note { margin: 1 0; color: $text-muted; }
    #state { margin: 0 2; height: 1; color: $text-muted; }
    #field { height: auto; min-height: 3; max-height: 10; margin: 0 1; }
    """

    def __init__(self, args: argparse.Namespace, params: SamplingParams, open_backend: OpenBackend) -> None:
        super().__init__()
        self._args = args
        self._open_backend = open_backend
        self._params = params
        folder = args.model if args.model is not None and os.path.isdir(args.model) else None
        self._folders = [*([Path(folder)] if folder else []), models_dir()]
        self._chooses = args.url is None and (args.model is None or folder is not None)

    def on_mount(self) -> None:
        picker = ModelPicker(self._folders)
        self.push_screen(picker)
        if not self._chooses:
            self._load(picker, self._args.model)

    def action_choose(self) -> None:
        if isinstance(self.screen, ChatScreen) and (self.screen.is_answering or self._args.url is not None):
            return
        self.push_screen(ModelPicker(self._folders))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        if isinstance(self.screen, ModelPicker):
            self._load(self.screen, event.option.id)

    @work(thread=True, exclusive=True, exit_on_error=False)
    def _load(self, picker: ModelPicker, model: str | None) -> None:
        self.call_from_thread(picker.show, f"opening {self._args.url or model}…")
        args = argparse.Namespace(**{**vars(self._args), "model": model})
        try:
            backend = self._open_backend(args)
        except (ChatError, CommandError) as error:
            self.call_from_thread(picker.show, str(error), True)
            return
        session = ChatSession(backend, self._params, self._args.system)
        self.call_from_thread(self._open_chat, session)

    def _open_chat(self, session: ChatSession) -> None:
        while len(self.screen_stack) > 1:
            self.pop_screen()
        self.push_screen(ChatScreen(session))
