"""Replicas behind one port: each request's answer as of one server, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI
from serve_process import Process, events, serving
from server_client import TEMPLATE, error_of, wait_until
from tiny_gguf import write_tiny_model

from rvllm.cli import main, make_parser
from rvllm.server.replica_process import ReplicaServer
from rvllm.server.replicas import RESTART_DELAYS, ReplicaSet
from rvllm.server.router import Replica
from rvllm.server.served_model import ServerConfig
from rvllm.system import affine_cpus

pytestmark = [
    pytest.mark.skipif(affine_cpus() < 2, reason="two replicas need two processors"),
    pytest.mark.usefixtures("elsewhere", "own_logging"),
]

LONG = {"prompt": "Once", "max_tokens": 60_000, "ignore_eos": True}
PREFIX = "The same beginning of many prompts, " * 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path, context_length=65536, metadata={"tokenizer.chat_template": TEMPLATE})
    return path


class Replicas:
    """Two replicas, of two requests each."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.url = process.url
        wait_until(lambda: httpx.get(f"{self.url}/health").status_code == 200, 60)

    def health(self) -> dict[str, Any]:
        facts: dict[str, Any] = httpx.get(f"{self.url}/health").json()
        return facts

    def pids(self) -> list[int]:
        return [replica["pid"] for replica in self.health()["replicas"]]

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60)

    @contextmanager
    def stream(self, path: str = "/v1/completions", **body: Any) -> Iterator[tuple[int, Iterator[str]]]:
        """The replica that answers, and the lines of a stream that has begun."""
        before = [replica["running"] for replica in self.health()["replicas"]]
        with httpx.stream("POST", f"{self.url}{path}", json={**body, "stream": True}, timeout=60) as response:
            assert response.status_code == 200, response.read()
            lines = events(response)
            next(lines)
            after = [replica["running"] for replica in self.health()["replicas"]]
            yield next(i for i in range(2) if after[i] > before[i]), lines

    def wait_until_idle(self) -> None:
        idle = {"status": "ok", "running": 0, "waiting": 0, "kv_cache_usage": 0.0}
        wait_until(lambda: all(idle.items() <= replica.items() for replica in self.health()["replicas"]), 60)


def start(model: Path, *arguments: str, **settings: Any) -> Any:
    return serving("-m", str(model), "--replicas", "2", "--served-model-name", "tiny", *arguments, **settings)


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[Replicas]:
    with start(model, "-np", "2", "--max-queue", "0", "--api-key", "k") as process:
        yield Replicas(process)


@pytest.fixture
def replicas(shared: Replicas, monkeypatch: pytest.MonkeyPatch) -> Replicas:
    for name in ("post", "stream"):  # with the key, unless a call brings its own
        call = getattr(httpx, name)
        monkeypatch.setattr(
            httpx, name, lambda *a, call=call, **k: call(*a, **{"headers": {"x-api-key": "k"}, **k})
        )
    shared.wait_until_idle()
    return shared


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Once", "max_tokens": 9, "logprobs": 2, "temperature": 0}),
    ("/v1/completions", {"prompt": "a", "n": 2, "temperature": 1, "seed": 7, "max_tokens": 5}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": 20, "stream": True, "temperature": 0.8, "seed": 3}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hé"}], "max_tokens": 5, "seed": 1}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 5, "temperature": 0}),
    ("/completion", {"prompt": "Once", "n_predict": 5, "temperature": 0}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/tokenize", {"prompt": "one two"}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": -2}),
    ("/v1/completions", {"prompt": "Once", "model": "none"}),
    ("/nope", {}),
]


def test_answers_are_those_of_one_server(replicas: Replicas, model: Path) -> None:
    def answer(url: str, path: str, body: dict[str, Any]) -> tuple[int, str | None, str]:
        response = httpx.post(f"{url}{path}", json=body, timeout=60)
        text = re.sub(r'-?[0-9a-f]{32}|"created(_at)?":\d+|"\w+_(ms|per_second)":[\d.]+', "", response.text)
        events = re.findall(r'"text":"(.*?)"', text) if body.get("stream") else []
        # How many tokens an event has is a matter of time; what they say is not.
        return response.status_code, response.headers["content-type"], "".join(events) or text

    with serving("-m", str(model), "--served-model-name", "tiny") as one:
        url = one.wait_until_ready()
        for path, body in REQUESTS:
            expected = answer(url, path, body)
            assert [answer(replicas.url, path, body) for _ in range(2)] == [expected] * 2
        assert httpx.get(f"{url}/").content == httpx.get(f"{replicas.url}/").content


def test_a_prompt_goes_where_its_beginning_is_cached(replicas: Replicas) -> None:
    for words in ("one", "two"):  # as many beginnings as replicas
        cached = [
            replicas.post(prompt=f"{words} {PREFIX} {i}", max_tokens=1).json()["usage"][
                "prompt_tokens_details"
            ]
            for i in range(3)
        ]
        assert [facts["cached_tokens"] >= 400 for facts in cached] == [False, True, True]
    metrics = httpx.get(f"{replicas.url}/metrics").text
    hits = re.findall(r'rvllm:prefix_cache_hits_total{.*replica="(\d)"} (\S+)', metrics)
    assert [int(i) for i, _ in hits] == [0, 1] and all(float(count) > 0 for _, count in hits)
    assert metrics.count("# TYPE rvllm:prefix_cache_hits_total ") == 1
    assert 'rvllm:replica_up{replica="1"} 1.0' in metrics


def test_what_one_refuses_another_takes_until_all_are_full(replicas: Replicas) -> None:
    long = {**LONG, "prompt": "full " + PREFIX}
    with replicas.stream(**long) as (first, _), replicas.stream(**long) as (second, _):
        assert first == second  # where the beginning is cached; now it is full
        with replicas.stream(**long) as (third, _), replicas.stream(**long):
            assert third != first
            refused = replicas.post(prompt="x")
            assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
            assert int(refused.headers["retry-after"]) >= 1
    replicas.wait_until_idle()  # clients that have left hold nothing


def test_a_killed_replica_ends_its_requests_with_an_error_and_comes_back(replicas: Replicas) -> None:
    long = {**LONG, "prompt": "kill " + PREFIX}
    with ThreadPoolExecutor() as pool, replicas.stream(**long) as (victim, lines):
        pid = replicas.pids()[victim]
        with replicas.stream("/v1/responses", input="hi", ignore_eos=True) as (other, other_lines):
            assert other != victim
            waiting = pool.submit(replicas.post, **long)  # goes where the beginning is cached
            wait_until(lambda: replicas.health()["replicas"][victim]["running"] == 2)
            os.kill(pid, signal.SIGKILL)
            *_, last, done = lines
            assert json.loads(last)["error"]["code"] == "replica_died" and done == "[DONE]"
            assert f"replica {victim} has died" in json.loads(last)["error"]["message"]
            refused = waiting.result(60)
            assert error_of(refused, 503)["code"] == "replica_died" and "retry-after" in refused.headers
            next(other_lines)
            assert replicas.post(prompt="x", max_tokens=2).status_code == 200  # by the other
            wait_until(lambda: replicas.health()["replicas"][victim]["status"] == "ok", 60)
            os.kill(replicas.pids()[other], signal.SIGKILL)
            assert any('"replica_died"' in line for line in other_lines)
    wait_until(lambda: [r["status"] for r in replicas.health()["replicas"]] == ["ok", "ok"], 60)
    assert all(replica["restarts"] == 1 for replica in replicas.health()["replicas"])
    assert any("was ended by SIGKILL; restarting" in line for line in replicas.process.lines)
    assert replicas.post(prompt="x", max_tokens=2).status_code == 200


def test_keys_origins_and_sizes_are_judged_before_any_replica(replicas: Replicas) -> None:
    url = f"{replicas.url}/v1/completions"
    body = {"prompt": "x", "max_tokens": 1}
    assert error_of(httpx.post(url, json=body, headers={}), 401)["code"] == "invalid_api_key"
    stranger = {"x-api-key": "k", "origin": "http://evil.example"}
    assert error_of(httpx.post(url, json=body, headers=stranger), 403)["type"] == "permission_error"
    own = {"x-api-key": "k", "origin": replicas.url, "x-request-id": "mine"}
    assert httpx.post(url, json=body, headers=own).headers["x-request-id"] == "mine"
    assert error_of(replicas.post(prompt="x" * 2**23), 413)["code"] == "body_too_large"
    wait_until(
        lambda: any("replica=" in line and "request_id=mine" in line for line in replicas.process.lines)
    )
    assert sum("request_id=mine" in line for line in replicas.process.lines) == 1


def test_sigterm_lets_requests_finish_and_leaves_no_process(model: Path) -> None:
    with start(model, "--drain-timeout", "600") as process:
        replicas = Replicas(process)
        children = psutil.Process(process.process.pid).children(recursive=True)
        pids = replicas.pids()
        with replicas.stream(**{**LONG, "max_tokens": 6000}) as (_, lines):
            for pid in (process.process.pid, *pids):  # as a service manager sends it to all
                os.kill(pid, signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{replicas.url}/health").status_code == 503)
            assert error_of(replicas.post(prompt="x"), 503)["code"] == "shutting_down"
            *_, last, done = lines
        assert done == "[DONE]" and json.loads(last)["choices"][0]["finish_reason"] == "length"
        status, log = process.end()
        assert status == 0 and "Traceback" not in log
        assert not psutil.wait_procs(children, 20)[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_replica_outlives_its_router(model: Path, number: signal.Signals) -> None:
    with start(model) as process:
        replicas = Replicas(process)
        children = psutil.Process(process.process.pid).children(recursive=True)
        with suppress(httpx.HTTPError), replicas.stream(**LONG):
            if number == signal.SIGINT:
                # A terminal sends Ctrl-C to all: the router alone obeys, and to the second at once.
                for child in children:
                    child.send_signal(number)
                assert [replicas.post(prompt="x", max_tokens=9).status_code for _ in range(4)] == [200] * 4
                assert [replica["status"] for replica in replicas.health()["replicas"]] == ["ok", "ok"]
                for _ in range(2):
                    process.process.send_signal(number)
                    wait_until(lambda: any("replicas draining" in line for line in process.lines))
            else:
                process.process.kill()
            status, log = process.end()  # when none of them holds the log open
        assert status == (128 + number if number == signal.SIGINT else -number) and "Traceback" not in log
        assert not psutil.wait_procs(children, 20)[1]


def test_a_model_that_cannot_be_loaded_is_one_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    for name in ("bad.gguf", "missing.gguf"):
        assert main(["serve", "--port", "0", "-m", name, "--replicas", "2"]) == 2
        listening, error = capfd.readouterr().err.splitlines()
        assert listening.startswith("rvllm: listening at ")
        assert error.startswith("rvllm: error: ") and name in error


def supervise(monkeypatch: pytest.MonkeyPatch, ends: list[Any], has_started: bool) -> ReplicaSet:
    """A replica that ends in each of these ways, one after the other, and then stays. An exception: a fault of ours."""
    args = make_parser().parse_args(["serve", "--replicas", "1"])
    with socket.socket() as listener:
        replicas = ReplicaSet(args, ServerConfig(), listener)
    fleet = replicas._fleet
    fleet.has_started = has_started

    async def live(replica: Replica) -> str:
        fleet.is_draining |= not ends
        end = ends.pop(0) if ends else ""
        if isinstance(end, Exception):
            raise end
        return str(end)

    async def run() -> None:
        async with replicas._lifespan(FastAPI()):
            await asyncio.gather(*replicas._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # for what is called when they are done

    monkeypatch.setattr(replicas, "_live", live)
    asyncio.run(run())
    return replicas


def test_a_replica_that_dies_often_is_restarted_ever_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(RESTART_DELAYS) == sorted(RESTART_DELAYS) and RESTART_DELAYS[1] > 0
    monkeypatch.setattr("rvllm.server.replicas.RESTART_DELAYS", (0, 0.001, 0.002, 0.003))
    replicas = supervise(monkeypatch, list("abcd"), has_started=True)
    delays = re.findall(r"(\w); restarting it in (\S+) s", capsys.readouterr().err)
    assert delays == [("a", "0.001"), ("b", "0.002"), ("c", "0.003"), ("d", "0.003")]
    assert replicas._fleet.replicas[0].num_restarts == 4


def test_a_replica_that_dies_at_the_start_is_not_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = ["no memory", "again"]
    assert str(supervise(monkeypatch, ends, has_started=False)._error) == "no memory"
    assert ends == ["again"]


def test_a_replica_that_nobody_watches_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = supervise(monkeypatch, [RuntimeError("no watch")], has_started=True)
    assert replicas._fleet.is_draining
    assert str(replicas._error) == "a replica cannot be supervised: no watch"


def test_a_replica_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rvllm.server.replica_process.ENGINE_WATCH", 0.001)
    reports, end = multiprocessing.Pipe(duplex=False)
    args = make_parser().parse_args(["serve"])
    with socket.socket() as listener, reports, end:
        server = ReplicaServer(args, ServerConfig(), listener, 1, "", end)
        server._app.state.model = SimpleNamespace(engine=SimpleNamespace(is_dead=True, error="a step"))
        asyncio.run(asyncio.wait_for(server._end_with_engine(), 10))
        assert server._uvicorn.should_exit


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--replicas", "0"], "--replicas: '0'"), (["--replicas", "2.0"], "--replicas: '2.0'"),
     (["--replicas", "100000"], "100000 replicas"), (["--replicas", "2", "--device", "cuda"], "--device cpu")],
)  # fmt: skip
def test_bad_options_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["serve", "--port", "0", *arguments]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("rvllm: error: ") and words in error
