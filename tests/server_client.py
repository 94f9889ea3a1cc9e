"""A server on a tiny seeded model: in this process through ASGI, or on a socket for clients that need one."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from tiny_gguf import write_tiny_model

from rvllm import LLM
from rvllm.async_engine import AsyncEngine
from rvllm.server.app import create_app
from rvllm.server.serve import HTTP_SETTINGS
from rvllm.server.served_model import ServedModel, ServerConfig
from rvllm.server.tracing import Tracing

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_llm(
    folder: Path,
    template: str = TEMPLATE,
    context_length: int = 512,
    extra: Mapping[str, object] | None = None,
    **settings: Any,
) -> LLM:
    """extra: keys of the model file."""
    path = folder / "tiny.gguf"
    metadata = {"tokenizer.chat_template": template, **(extra or {})}
    write_tiny_model(path, context_length=context_length, metadata=metadata)
    return LLM(path, **{"num_blocks": 256, "seed": 0, "num_threads": 1, **settings})


class TinyServer:
    """The application over a real engine. request() and stream() talk to it in this process."""

    def __init__(
        self,
        llm: LLM,
        max_queue: int = 256,
        timeout: float | None = None,
        tracing: Tracing | None = None,
        **config: Any,
    ) -> None:
        self.llm = llm
        self.config = ServerConfig(names=("tiny", "other"), **config)
        self.app = create_app(self.config, tracing=tracing)
        metrics = self.app.state.metrics
        self.engine = AsyncEngine(llm.engine, max_queue=max_queue, observer=metrics)
        self.engine.start()
        metrics.observe_engine(self.engine)
        self.model = ServedModel(
            names=self.config.names,
            engine=self.engine,
            tokenizer=llm.tokenizer,
            chat_template=llm.chat_template,
            max_model_len=llm.engine.max_model_len,
            max_prompt_chars=llm.engine.max_model_len * llm.tokenizer.longest_token,
            timeout=timeout,
        )
        self.app.state.model = self.model

    def close(self) -> None:
        self.engine.shutdown()

    def request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        return self.requests([(method, path, arguments)])[0]

    def requests(self, calls: list[tuple[str, str, dict[str, Any]]]) -> list[httpx.Response]:
        """All calls at a time; the answers are in their order."""

        async def run() -> list[httpx.Response]:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
                return await asyncio.gather(*(client.request(m, p, **arguments) for m, p, arguments in calls))

        return asyncio.run(run())

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.request("POST", path, json=body)

    def ok(self, path: str, **body: Any) -> Any:
        """The JSON of an answer that must be there."""
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        """The error object of a request that must be refused."""
        return error_of(self.post(path, **body), status)

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream that ends with [DONE]."""
        response = self.post(path, **body, stream=True)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        *chunks, last = data_of(response.content)
        assert last == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]

    def assert_idle(self) -> None:
        """Nothing is in flight and every block is free, within a few seconds."""
        wait_until(lambda: self.engine.num_running + self.engine.num_waiting == 0)
        stats = self.engine.stats()
        assert stats.free_blocks == stats.num_blocks

    @contextmanager
    def on_socket(self) -> Iterator[str]:
        """The URL of the server on a socket."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(64)
            server = uvicorn.Server(
                uvicorn.Config(self.app, **{**HTTP_SETTINGS, "timeout_graceful_shutdown": 2})
            )
            thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
            thread.start()
            try:
                wait_until(lambda: server.started)
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                thread.join()


def data_of(content: bytes) -> list[str]:
    """The data of server-sent events, each of which must be one line, after a line with its name perhaps."""
    text = content.decode()
    assert text.endswith("\n\n") and "\r" not in text
    lines = [event.split("\n") for event in text[:-2].split("\n\n")]
    assert all(len(event) == 1 or (len(event) == 2 and event[0].startswith("event: ")) for event in lines)
    assert all(event[-1].startswith("data: ") for event in lines)
    return [event[-1].removeprefix("data: ") for event in lines]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, (response.status_code, response.text)
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"].isprintable() and error["type"]
    return error


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
