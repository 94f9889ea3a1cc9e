"""The router before servers that break off, refuse or are not there: what its client gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_client import data_of, error_of

from rvllm.server.router import Fleet, Replica, create_router
from rvllm.server.served_model import ServerConfig

STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
GOOD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def refusal(status: int, seconds: int) -> bytes:
    return b"HTTP/1.1 %d No\r\nretry-after: %d\r\ncontent-length: 2\r\n\r\n%02d" % (status, seconds, seconds)


def ask(
    folder: Path, answers: Mapping[int, bytes], path: str = "/v1/completions", **request: Any
) -> tuple[httpx.Response, dict[int, bytes]]:
    """The response, and what each of two replicas was asked. answers: by those that listen, which then hang up."""
    asked: dict[int, bytes] = {}

    async def run() -> httpx.Response:
        fleet = Fleet([Replica(i, str(folder / str(i)), is_ready=True) for i in range(2)], has_started=True)
        servers = []
        for i in answers:

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, i: int = i) -> None:
                asked[i] = await reader.readuntil(b"\r\n\r\n")
                writer.write(answers[i])
                await writer.drain()
                writer.close()

            servers.append(await asyncio.start_unix_server(serve, fleet.replicas[i].path))
        transport = httpx.ASGITransport(create_router(ServerConfig(), fleet), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            response = await client.post(path, json={"prompt": "x"}, **request)
        for server in servers:
            server.close()
        assert all(r.lane.backlog == r.lane.num_in_flight == 0 for r in fleet.replicas)
        return response

    return asyncio.run(run()), asked


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/completion"])
def test_a_stream_that_breaks_off_ends_with_an_error_after_whole_events(tmp_path: Path, path: str) -> None:
    whole = b'data: {"a": 1}\n\ndata: {"b": 2}\n\n'
    response, _ = ask(tmp_path, {0: STREAM + chunk(whole[:20]) + chunk(whole[20:] + b'data: {"c')}, path)
    assert response.status_code == 200
    first, second, error, *done = data_of(response.content)
    assert (json.loads(first), json.loads(second)) == ({"a": 1}, {"b": 2})
    assert json.loads(error)["error"]["code"] == "replica_died"
    assert done == (["[DONE]"] if path == "/v1/completions" else [])


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200", GOOD[:-1], b"no HTTP\r\n\r\n"])
def test_an_answer_that_breaks_off_is_a_503_and_is_not_asked_for_again(tmp_path: Path, answer: bytes) -> None:
    response, asked = ask(tmp_path, {0: answer, 1: GOOD})
    assert error_of(response, 503)["message"].startswith("replica 0 has died")
    assert response.headers["retry-after"] == "1" and list(asked) == [0]


def test_who_does_not_listen_or_refuses_is_passed_over(tmp_path: Path) -> None:
    assert ask(tmp_path, {1: GOOD})[0].content == b"{}"
    (tmp_path / "1").unlink(missing_ok=True)  # Python 3.13 has done it
    response, asked = ask(tmp_path, {0: refusal(429, 1), 1: GOOD})
    assert response.content == b"{}" and list(asked) == [0, 1]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [((429, 9), (429, 3), (429, "3")), ((429, 3), (429, 9), (429, "3")), ((503, 1), (429, 9), (429, "9"))],
)
def test_of_refusals_the_mildest_is_passed_on(
    tmp_path: Path, first: tuple[int, int], second: tuple[int, int], expected: tuple[int, str]
) -> None:
    response, asked = ask(tmp_path, {0: refusal(*first), 1: refusal(*second)})
    assert (response.status_code, response.headers["retry-after"]) == expected and len(asked) == 2


def test_nobody_there_is_a_503(tmp_path: Path) -> None:
    assert error_of(ask(tmp_path, {})[0], 503)["code"] == "no_replica"


def test_keys_stay_with_the_router(tmp_path: Path) -> None:
    headers = {
        "authorization": "Bearer secret",
        "x-api-key": "secret",
        "origin": "http://router",
        "x-own": "1",
    }
    _, asked = ask(tmp_path, {0: GOOD}, headers=headers)
    assert b"secret" not in asked[0] and b"origin" not in asked[0] and b"x-own: 1\r\n" in asked[0]
    assert asked[0].startswith(b"POST /v1/completions HTTP/1.1\r\n") and b"host: router\r\n" in asked[0]
