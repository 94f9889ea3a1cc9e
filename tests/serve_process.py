"""`rvllm serve` in a process of its own, whose log is read as it comes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from server_client import wait_until


class Process:
    """A server on a free port; its log is read as it comes."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        command = [
            sys.executable,
            "-m",
            "rvllm",
            "serve",
            "--port",
            "0",
            "--num-blocks",
            "8192",
            "-t",
            "1",
            *arguments,
        ]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    @property
    def url(self) -> str:
        wait_until(lambda: bool(self.lines) or self.process.poll() is not None, 60)
        found = re.fullmatch(r"rvllm: listening at (http://127\.0\.0\.1:\d+)\n", self.lines[0])
        assert found, self.lines
        return found[1]

    def wait_until_ready(self) -> str:
        url = self.url
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 200, 60)
        return url

    def end(self, seconds: float = 30) -> tuple[int, str]:
        """Exit status and what was logged."""
        status = self.process.wait(seconds)
        self._reader.join()
        return status, "".join(self.lines)


@contextmanager
def serving(*arguments: str, **settings: Any) -> Iterator[Process]:
    server = Process(*arguments, **settings)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def events(response: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in response.iter_lines() if line)
