"""Every command and every line of Python in README, docs and examples is run, page by page, as a reader would.

Each page has a folder of its own, with links to the checkout's and a tiny `model.gguf`. A server that a page starts
answers until the page ends, on a port of its own in place of 8000.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from doc_blocks import LANGUAGES, Block, blocks_of, indented_blocks
from server_client import TEMPLATE
from tiny_gguf import write_tiny_model

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SECONDS = 600  # a block; they take a few, where the machine is not busy

pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="docs and examples are not beside the tests")

PAGES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *EXAMPLES.glob("*.md")])
}
BLOCKS = [block for page, text in PAGES.items() for block in blocks_of(page, text)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


class Reader:
    """Someone who follows a page: a folder, an environment and the servers that run."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.ports = {port: free_port() for port in (8000, 8001)}
        self.servers: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "model.gguf").symlink_to(model)
        for name in ("docs", "examples", "scripts", "tests"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "bin").mkdir()
        for name, arguments in {"python": "", "rvllm": "-m rvllm"}.items():
            command = folder / "bin" / name
            command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
            command.chmod(0o755)
        (folder / ".curlrc").write_text("silent\nshow-error\nfail-with-body\n")
        self.env = os.environ | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "CURL_HOME": str(folder),
            "OPENAI_BASE_URL": f"http://127.0.0.1:{self.ports[8000]}/v1",
            "OPENAI_API_KEY": "-",
        }

    def run(self, blocks: list[Block]) -> None:
        """A block of commands, or all Python of a page as one program."""
        code = "".join(
            block.padded[0 if i == 0 else blocks[i - 1].padded.count("\n") :]
            for i, block in enumerate(blocks)
        )
        for documented, port in self.ports.items():
            code = re.sub(rf"(?<=:){documented}\b|(?<=--port ){documented}\b", str(port), code)
        if blocks[0].language == "python":
            script = self.folder / (blocks[0].page.replace("/", "_") + ".py")
            script.write_text(code, "utf-8")
            self._run([sys.executable, str(script)])
            return
        done = 0
        for match in re.finditer(r"^rvllm serve\b(?!.*--help)(?:.*\\\n)*.*\n", code, re.M):
            self._bash(code, done, match.start())
            self._serve(match[0])
            done = match.end()
        self._bash(code, done, len(code))

    def close(self) -> None:
        for server in self.servers.values():
            server.send_signal(signal.SIGTERM)
        for server in self.servers.values():
            assert server.wait(SECONDS) == 0, "a server did not end as it should"

    def _bash(self, code: str, start: int, end: int) -> None:
        """Runs code[start:end]; bash counts lines from the beginning of the page."""
        if code[start:end].strip():
            self._run(["bash", "-euo", "pipefail", "-c", "\n" * code.count("\n", 0, start) + code[start:end]])

    def _run(self, command: list[str]) -> None:
        with (self.folder / "output.txt").open("w+b") as output:
            status = subprocess.run(
                command,
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
            ).returncode
            output.seek(0)
            assert status == 0, f"exit status {status}\n{output.read().decode(errors='replace')[-4000:]}"

    def _serve(self, command: str) -> None:
        """Starts a server in place of one on the same port, and waits until it answers."""
        found = re.search(r"--port (\d+)", command)
        port = found[1] if found else str(self.ports[8000])
        if not found:
            command = command.replace("rvllm serve", f"rvllm serve --port {port}", 1)
        if port in self.servers:
            self.servers[port].send_signal(signal.SIGTERM)
            assert self.servers.pop(port).wait(SECONDS) == 0
        log = self.folder / f"server-{port}.txt"
        with log.open("wb") as output:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {command.strip()}"],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.servers[port] = server
        end = time.monotonic() + SECONDS
        while not is_healthy(port):
            assert server.poll() is None and time.monotonic() < end, f"{command}{log.read_text()[-4000:]}"
            time.sleep(0.1)


def is_healthy(port: str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages call model.gguf: fast, since its answers do not matter."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_tiny_model(path, quant="Q8_0", context_length=16384, metadata={"tokenizer.chat_template": TEMPLATE})
    return path


@pytest.fixture(scope="module")
def reader_of(
    tmp_path_factory: pytest.TempPathFactory, model: Path, smollm2_path: Path
) -> Iterator[Callable[[str], Reader]]:
    """The reader of a page; those of other pages have left, and their servers have ended."""
    readers: dict[str, Reader] = {}

    def find(page: str) -> Reader:
        if page not in readers:
            close()
            readers[page] = Reader(tmp_path_factory.mktemp(Path(page).stem), model)
        return readers[page]

    def close() -> None:
        while readers:
            readers.popitem()[1].close()

    yield find
    close()


def cases() -> Iterator[object]:
    """The blocks of each page in their order, and after them its Python."""
    for page in PAGES:
        of_page = [block for block in BLOCKS if block.page == page]
        python = [block for block in of_page if block.is_run and block.language == "python"]
        for block in of_page:
            if block not in python and block.language in ("sh", "python", "json"):
                yield pytest.param([block], id=f"{page}:{block.line}")
        if python:
            yield pytest.param(python, id=f"{page}: Python")


@pytest.mark.parametrize("blocks", list(cases()))
def test_the_docs_do_what_they_say(reader_of: Callable[[str], Reader], blocks: list[Block]) -> None:
    block = blocks[0]
    if block.not_run is not None:
        pytest.skip(f"{block.page}:{block.line} is not run: {block.not_run}")
    reader = reader_of(block.page)
    if block.file is not None:
        (reader.folder / block.file).write_text(block.code, "utf-8")
    elif block.is_run:
        reader.run(blocks)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_tells_its_language(page: str) -> None:
    assert not indented_blocks(PAGES[page])
    assert {block.language for block in BLOCKS if block.page == page} <= LANGUAGES


def test_every_example_is_run_and_described() -> None:
    page = "examples/README.md"
    run = "".join(block.code for block in BLOCKS if block.page == page and block.is_run)
    for path in EXAMPLES.glob("*.py"):
        assert f"python examples/{path.name}" in run, path
        assert f"[{path.name}]({path.name})" in PAGES[page], path
