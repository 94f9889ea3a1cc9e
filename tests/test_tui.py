"""`rvllm chat --tui`, driven by textual's pilot."""

from __future__ import annotations

import argparse
import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from echo_backend import EchoBackend

from rvllm import SamplingParams
from rvllm.cli.errors import CommandError

if not os.environ.get("CI"):
    pytest.importorskip("textual", reason="textual is not installed")

from rvllm.tui import ChatApp


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RVLLM_CACHE", str(tmp_path / "cache"))


def app_of(
    backend: EchoBackend | None = None, folder: Path | None = None, fails: bool = False
) -> tuple[Any, list[str | None]]:
    """The program, and the models it asks for."""
    opened: list[str | None] = []

    def open_backend(args: argparse.Namespace) -> EchoBackend:
        opened.append(args.model)
        if fails:
            raise CommandError("broken.gguf: no GGUF file")
        return backend or EchoBackend()

    args = argparse.Namespace(model=None if folder is None else str(folder), url=None, system=None)
    return ChatApp(args, SamplingParams(), open_backend), opened


async def until(pilot: Any, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await pilot.pause(0.01)


def state_of(app: Any) -> str:
    return str(app.screen.query_one("#state").render())


def test_tui_lists_models_and_loads_the_chosen_one(tmp_path: Path) -> None:
    folder, cache = tmp_path / "mine", tmp_path / "cache" / "models"
    for path in (
        folder / "a.gguf",
        folder / "b-00002-of-00002.gguf",
        cache / "sub" / "c.gguf",
        cache / ".fetch-1" / "d.gguf",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    app, opened = app_of(folder=folder)

    async def drive() -> None:
        async with app.run_test() as pilot:
            await until(pilot, lambda: bool(app.screen.query("#models")))
            models = app.screen.query_one("#models")
            assert [models.get_option_at_index(i).id for i in range(models.option_count)] == [
                str(folder / "a.gguf"),
                str(cache / "sub" / "c.gguf"),
                "default",
            ]
            await pilot.press("down", "enter")
            await until(pilot, lambda: bool(app.screen.query("#field")))
            assert "echo" in str(app.screen.query_one(".title").render())

    asyncio.run(drive())
    assert opened == [str(cache / "sub" / "c.gguf")]


def test_tui_chat(tmp_path: Path) -> None:
    backend = EchoBackend()
    (tmp_path / "a.gguf").touch()
    app, _ = app_of(backend, tmp_path / "a.gguf")

    async def drive() -> None:
        async with app.run_test() as pilot:
            await until(pilot, lambda: bool(app.screen.query("#field")))
            await pilot.press(*"one", "ctrl+j", *"two", "enter")
            await until(pilot, lambda: "2 tokens" in state_of(app) and "context 9 of 100" in state_of(app))
            assert backend.asked[0] == [{"role": "user", "content": "one\ntwo"}]
            assert [widget.source for widget in app.screen.query("Markdown")] == ["one two"]
            await pilot.press("ctrl+r")
            await until(pilot, lambda: len(backend.asked) == 2 and not app.screen.is_answering)
            backend.go_on.clear()
            await pilot.press(*"[b]x y", "enter")
            await until(pilot, lambda: "1 tokens" in state_of(app))
            await pilot.press("escape")
            await until(pilot, lambda: state_of(app).startswith("stopped"))
            assert app.screen._session.messages[-1]["content"] == "[b]x"
            await pilot.press(*"/undo", "enter")
            await until(pilot, lambda: len(app.screen.query(".user")) == 1)
            backend.error = "the server is gone"
            await pilot.press(*"z", "enter")
            await until(pilot, lambda: "no answer" in state_of(app))
            await pilot.press("ctrl+n")
            await until(pilot, lambda: not app.screen.query(".user"))
            await pilot.press(*"/exit", "enter")
            await until(pilot, lambda: app._exit)

    asyncio.run(drive())


def test_tui_tells_why_a_model_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").touch()
    app, opened = app_of(folder=tmp_path, fails=True)

    async def drive() -> None:
        async with app.run_test() as pilot:
            await until(pilot, lambda: bool(app.screen.query("#models")))
            await pilot.press("enter")
            await until(pilot, lambda: "no GGUF file" in str(app.screen.query_one("#picker-state").render()))
            assert not app.screen.query_one("#models").disabled

    asyncio.run(drive())
    assert opened == [str(tmp_path / "broken.gguf")]


@pytest.mark.parametrize("leave", ["ctrl+q", "/exit"])
def test_tui_can_be_left_at_any_time(tmp_path: Path, leave: str) -> None:
    backend = EchoBackend()
    (tmp_path / "a.gguf").touch()
    app, _ = app_of(backend, tmp_path / "a.gguf")

    async def drive() -> None:
        async with app.run_test() as pilot:
            await until(pilot, lambda: bool(app.screen.query("#field")))
            backend.go_on.clear()
            await pilot.press(*"x y", "enter")
            await until(pilot, lambda: "1 tokens" in state_of(app))
            await pilot.press("ctrl+q" if leave == "ctrl+q" else "escape")
            if leave == "/exit":
                await until(pilot, lambda: not app.screen.is_answering)
                await pilot.press(*"/exit", "enter")
            await until(pilot, lambda: app._exit)

    thread = threading.Thread(target=asyncio.run, args=(drive(),), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
