"""A server in a process of its own, for the scripts that load one."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

START_SECONDS = 120
STOP_SECONDS = 30


@dataclass(frozen=True)
class ServerProcess:
    url: str
    pid: int
    command: Sequence[str]


def end_servers_on_sigterm() -> None:
    """Makes SIGTERM an exception, as SIGINT is: it then leaves run_server(), which ends its server."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def rvllm_command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "rvllm", "serve", *arguments]


@contextmanager
def run_server(command: Sequence[str], keep_log: str | None = None) -> Iterator[ServerProcess]:
    """Starts the command with `--port` and a free port, and waits until /health says 200; ends it with SIGTERM.

    keep_log: file for what it prints. Raises RuntimeError with its last lines if it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*command, "--port", str(port)]
    with open(keep_log, "wb+") if keep_log else tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            if not _wait(process, url):
                log.seek(0)
                lines = log.read().decode(errors="replace").splitlines()[-5:]
                raise RuntimeError("\n".join([f"no server from {' '.join(command)}:", *lines]))
            yield ServerProcess(url, process.pid, command)
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str) -> bool:
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
        time.sleep(0.05)
    return False
