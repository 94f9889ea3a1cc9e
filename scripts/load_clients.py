"""The clients of load_test.py: good ones, impatient ones, slow ones, and those that send nonsense."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rvllm.http_client import Endpoint, Response
from rvllm.load_prompts import WORDS

PATIENCE_FOR_RETRY = 2.0  # seconds: a client that was told to come later does so, but a test has no hours

# What a request must be refused for, whatever else the server does.
BAD_BODIES: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[]",
    b'"x"',
    b"null",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"prompt": 3}',
    b'{"prompt": "x", "max_tokens": -2}',
    b'{"prompt": "x", "max_tokens": "5"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": -1}',
    b'{"prompt": "x", "top_p": 1.5}',
    b'{"prompt": "x", "n": 0}',
    b'{"prompt": "x", "logit_bias": {"abc": 1}}',
    b'{"prompt": "x", "stop": 7}',
    b'{"prompt": [999999999]}',
    b'{"prompt": [-1]}',
    b'{"prompt": []}',
    b'{"prompt": "x", "stream": "yes"}',
)


class ServerFaultError(Exception):
    """The server did what it must not do."""


@dataclass
class Limits:
    """Lengths are in words and tokens. patience, linger: seconds for one request, and that a slow client stays."""

    max_prompt: int = 400
    max_tokens: int = 64
    context: int = 8192
    patience: float = 120.0
    linger: float = 10.0


@dataclass
class Client:
    """One client with its own random numbers. answers: of the seeded requests, the same for every client."""

    endpoint: Endpoint
    rng: random.Random
    limits: Limits
    answers: dict[int, str] = field(default_factory=dict)

    async def act(self) -> tuple[str, str]:
        """One thing a client may do: its name and how it ended. Raises ServerFaultError."""
        actions: dict[str, tuple[int, Callable[[], Awaitable[str]]]] = {
            "stream": (30, self.stream),
            "whole": (15, self.whole),
            "seeded": (10, self.seeded),
            "cancel": (15, self.cancel),
            "malformed": (10, self.malformed),
            "slow reader": (8, self.read_slowly),
            "half a request": (5, self.send_half),
            "too long": (3, self.too_long),
            "killed": (1, self.killed),
        }
        weights = [weight for weight, _ in actions.values()]
        name = self.rng.choices(list(actions), weights)[0]
        try:
            outcome = await asyncio.wait_for(actions[name][1](), self.limits.patience)
        except asyncio.TimeoutError:
            raise ServerFaultError(f"{name}: no end within {self.limits.patience:g} s") from None
        except ServerFaultError as error:
            raise ServerFaultError(f"{name}: {error}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ServerFaultError(f"{name}: {type(error).__name__}: {error}") from error
        return name, outcome

    def fields(self, **more: Any) -> dict[str, Any]:
        prompt = " ".join(self.rng.choices(WORDS, k=self.rng.randint(1, self.limits.max_prompt)))
        fields = {
            "prompt": prompt,
            "max_tokens": self.rng.randint(1, self.limits.max_tokens),
            "temperature": self.rng.choice((0, 0.7, 1.3)),
            "ignore_eos": self.rng.random() < 0.5,
            **more,
        }
        for name, value in (("n", 2), ("logprobs", 2), ("stop", ["the ", "zz"]), ("frequency_penalty", 0.5)):
            if self.rng.random() < 0.1:
                fields.setdefault(name, value)
        return fields

    async def post(
        self, fields: dict[str, Any] | bytes, events: list[bytes] | None = None
    ) -> Response | None:
        """The answer, or None if the server was full and said when to come again."""
        body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        on_event = None if events is None else events.append
        response = await self.endpoint.request("POST", "/v1/completions", body, on_event)
        if response.status == 429:
            seconds = int(response.headers.get("retry-after", 0))
            if seconds < 1:
                raise ServerFaultError("a 429 without Retry-After")
            await asyncio.sleep(min(seconds, PATIENCE_FOR_RETRY))
            return None
        if response.status >= 500:
            raise ServerFaultError(f"status {response.status}: {response.body[:300]!r}")
        return response

    async def stream(self) -> str:
        fields = self.fields(stream=True)
        events: list[bytes] = []
        response = await self.post(fields, events)
        if response is None:
            return "429"
        if response.status != 200:
            raise ServerFaultError(f"status {response.status}: {response.body[:300]!r}")
        if not events or events[-1] != b"[DONE]":
            raise ServerFaultError(f"the stream ended without [DONE], with {events[-1:]!r}")
        chunks = [json.loads(event) for event in events[:-1]]
        if any("error" in chunk for chunk in chunks):
            raise ServerFaultError(f"an error in the stream: {events[-2]!r}")
        ends = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c.get("finish_reason")]
        if len(ends) != fields.get("n", 1) or not set(ends) <= {"stop", "length"}:
            raise ServerFaultError(f"finish reasons are {ends}")
        return "200"

    async def whole(self) -> str:
        fields = self.fields()
        response = await self.post(fields)
        if response is None:
            return "429"
        self._check_whole(response, fields)
        return "200"

    def _check_whole(self, response: Response, fields: dict[str, Any]) -> str:
        """The text of the first choice."""
        if response.status != 200:
            raise ServerFaultError(f"status {response.status}: {response.body[:300]!r}")
        answer = json.loads(response.body)
        count = fields.get("n", 1)
        if [c["index"] for c in answer["choices"]] != list(range(count)):
            raise ServerFaultError(f"{len(answer['choices'])} choices for n = {count}")
        if answer["usage"]["completion_tokens"] > count * fields["max_tokens"]:
            raise ServerFaultError(f"{answer['usage']} for max_tokens {fields['max_tokens']}")
        text: str = answer["choices"][0]["text"]
        return text

    async def seeded(self) -> str:
        """One of ten requests whose answer must be the same every time."""
        seed = self.rng.randrange(10)
        words = random.Random(seed).choices(WORDS, k=5 + 7 * seed)
        fields = {"prompt": " ".join(words), "max_tokens": 16, "temperature": 1.0, "seed": seed}
        response = await self.post(fields)
        if response is None:
            return "429"
        text = self._check_whole(response, fields)
        if self.answers.setdefault(seed, text) != text:
            raise ServerFaultError(f"seed {seed} answered {text!r}, before {self.answers[seed]!r}")
        return "200"

    async def cancel(self) -> str:
        """Goes away after a while, in the queue, in the prompt or in the answer."""
        fields = self.fields(stream=self.rng.random() < 0.5, max_tokens=10 * self.limits.max_tokens)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.post(fields), self.rng.expovariate(2.0))
            return "too late"
        return "gone"

    async def malformed(self) -> str:
        response = await self.post(self.rng.choice(BAD_BODIES))
        if response is None:
            return "429"
        if not 400 <= response.status < 500:
            raise ServerFaultError(f"status {response.status} for a body that is none")
        if not json.loads(response.body)["error"]["message"]:
            raise ServerFaultError("an error without a message")
        return str(response.status)

    async def too_long(self) -> str:
        response = await self.post({"prompt": [1] * (self.limits.context + 1), "max_tokens": 1})
        if response is not None and response.status != 400:
            raise ServerFaultError(f"status {response.status} for a prompt longer than the context")
        return "429" if response is None else "400"

    async def read_slowly(self) -> str:
        """Reads a few bytes at a time, from a small buffer, and tires of it."""
        reader, writer = await asyncio.open_connection(self.endpoint.host, self.endpoint.port, limit=256)
        try:
            writer.write(self._request(self.fields(stream=True)))
            with suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(
                    self._sip(reader), self.rng.uniform(0.1, 1) * self.limits.linger
                )
            return "tired"
        finally:
            writer.transport.abort()

    async def _sip(self, reader: asyncio.StreamReader) -> str:
        while await reader.read(64):
            await asyncio.sleep(0.02)
        return "read"

    async def send_half(self) -> str:
        """Goes away, or falls silent, before the request is complete."""
        _, writer = await asyncio.open_connection(self.endpoint.host, self.endpoint.port)
        try:
            request = self._request(self.fields())
            writer.write(request[: self.rng.randrange(len(request))])
            await asyncio.sleep(self.rng.choice((0.0, 0.0, self.limits.linger / 2)))
            return "gone"
        finally:
            writer.transport.abort()

    async def killed(self) -> str:
        """A process that waits for its answer and is killed."""
        source = (
            "import socket, sys\n"
            f"s = socket.create_connection(({self.endpoint.host!r}, {self.endpoint.port}))\n"
            "s.sendall(sys.stdin.buffer.read())\n"
            "while s.recv(100): pass\n"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-c", source, stdin=asyncio.subprocess.PIPE
        )
        request = self._request(self.fields(stream=True, max_tokens=10 * self.limits.max_tokens))
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(
                process.communicate(request), self.rng.uniform(0.1, 0.5) * self.limits.linger
            )
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return "killed"

    def _request(self, fields: dict[str, Any]) -> bytes:
        body = json.dumps(fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body
