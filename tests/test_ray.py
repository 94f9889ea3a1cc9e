"""`rvllm ray serve` and `rvllm ray batch` on a cluster of two nodes: the answers of one machine, whatever dies."""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from cli_run import Run
from server_client import TEMPLATE, TinyServer, make_llm
from tiny_gguf import write_tiny_model

pytestmark = pytest.mark.usefixtures("elsewhere")
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
SECONDS = 240  # until what must happen has failed to: Ray starts many processes, on a busy machine slowly


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path, context_length=4096, metadata={"tokenizer.chat_template": TEMPLATE})
    return path


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of two nodes with a CPU each."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
        yield cluster.address
    finally:
        cluster.shutdown()


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    line = [sys.executable, "-m", "rvllm", "ray", *arguments, "-t", "1", "--num-blocks", "1024"]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def processes(title: str) -> list[psutil.Process]:
    """Those of the cluster, which are descendants of this one; the latest is the last."""
    children = psutil.Process().children(recursive=True)
    found = [child for child in children if title in " ".join(child.cmdline())]
    assert found, [child.cmdline() for child in children]
    return sorted(found, key=lambda child: child.create_time())


# Batches.


def line(i: int) -> str:
    rest = ({"temperature": 0}, {"temperature": 1, "seed": 7}, {"temperature": 1})[i % 3]
    body = {"prompt": f"{i}", "max_tokens": 150 + i % 7, "ignore_eos": True, **rest}
    return json.dumps({"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}) + "\n"


def texts(path: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in Path(path).read_text().splitlines():
        entry = json.loads(text)
        assert entry["custom_id"] not in found and entry["response"]["status_code"] == 200
        found[entry["custom_id"]] = entry["response"]["body"]["choices"][0]["text"]
    return found


@needs_ray
def test_a_batch_survives_the_death_of_its_driver_and_of_a_worker(
    address: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = 480
    Path("in.jsonl").write_text("".join(map(line, range(count))))
    output = Path("out.jsonl")
    arguments = ("batch", "in.jsonl", "out.jsonl", "-m", str(model), "--seed", "5", "--address", address)

    def answered() -> int:
        return output.read_bytes().count(b"\n") if output.exists() else 0

    with command(*arguments) as driver:
        wait_until(lambda: answered() > 0, driver)
        driver.kill()
        driver.wait()
    before = answered()
    assert 0 < before < count
    with command(*arguments) as driver:
        wait_until(lambda: answered() > before, driver)
        processes("MapWorker")[-1].kill()
        assert answered() < count
        _, log = driver.communicate(timeout=SECONDS)
        assert (driver.returncode, log.splitlines()[-1]) == (
            0,
            f"rvllm: {count} of {count} requests answered",
        )
    assert (
        Run(capsys, "batch", "in.jsonl", "here.jsonl", "-m", str(model), "--seed", "5", "-t", "1").status == 0
    )
    assert texts("out.jsonl") == texts("here.jsonl")


# The server.


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    server = TinyServer(make_llm(tmp_path_factory.mktemp("model"), context_length=4096))
    yield server
    server.close()


@pytest.fixture(scope="module")
def serving(address: str, model: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ("-m", str(model), "--port", str(port), "--min-replicas", "2", "--address", address)
    with command("serve", *arguments) as process:
        assert process.stderr is not None
        lines: list[str] = []
        while not (lines and lines[-1].startswith("rvllm: listening")):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        assert lines[-1] == f"rvllm: listening at http://127.0.0.1:{port}\n"
        yield f"http://127.0.0.1:{port}", process


@pytest.fixture
def client(serving: tuple[str, subprocess.Popen[str]]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving[0]}/v1", api_key="-", max_retries=0, timeout=SECONDS) as client:
        yield client


@needs_ray
def test_the_server_gives_the_answers_of_the_plain_one(client: openai.OpenAI, plain: TinyServer) -> None:
    for i in range(4):
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "seed": i, "temperature": i % 2}
        prompt = {"prompt": f"Once {i}", "logprobs": 1}
        got = client.completions.create(**body, **prompt).choices[0].model_dump()
        assert got == {**got, **plain.ok("/v1/completions", **body, **prompt)["choices"][0]}
        messages = {"messages": [{"role": "user", "content": f"Hi {i}"}]}
        chunks = client.chat.completions.create(**body, **messages, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert (
            text == plain.ok("/v1/chat/completions", **body, **messages)["choices"][0]["message"]["content"]
        )
    assert client.models.list().data[0].id == "tiny"
    health = httpx.get(str(client.base_url).replace("/v1/", "/health"))
    assert health.status_code == 200 and health.json()["status"] == "ok"
    with pytest.raises(openai.NotFoundError, match="the model 'gpt-9' does not exist"):
        client.completions.create(model="gpt-9", prompt="x")


@needs_ray
def test_a_prompt_goes_to_the_replica_that_has_its_beginning(client: openai.OpenAI) -> None:
    for i in range(8):  # by chance, all of them would do so once in 256 times
        start = f"{i} " + "It was a dark and stormy night. " * 12
        client.completions.create(model="tiny", prompt=start, max_tokens=1)
        usage = client.completions.create(model="tiny", prompt=start + "And", max_tokens=1).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens_details.cached_tokens or 0) > 0


@needs_ray
def test_a_replica_that_dies_is_told_of_and_replaced(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "Once", "max_tokens": 3500}
    stream = client.completions.create(**body, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    for replica in processes("ServeReplica:rvllm:Engine"):
        replica.kill()
    with pytest.raises(openai.APIError, match="the replica that had the request has died"):
        list(stream)
    assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices[0].text


@needs_ray
def test_a_signal_lets_requests_finish(
    client: openai.OpenAI, serving: tuple[str, subprocess.Popen[str]]
) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "Once", "max_tokens": 1500}
    chunks = iter(client.completions.create(**body, stream=True, extra_body={"ignore_eos": True}))
    next(chunks)
    serving[1].send_signal(signal.SIGTERM)
    *_, last = chunks
    assert last.choices[0].finish_reason == "length"
    assert serving[1].wait(SECONDS) == 0


# What is the user's to mend.


def test_without_ray_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rvllm.cli.ray_serve.find_spec", lambda name: None)
    Run(capsys, "ray", "serve").assert_refused("pip install 'rvllm[ray]'")
    Run(capsys, "ray", "batch", "in.jsonl", "out.jsonl").assert_refused("pip install 'rvllm[ray]'")


@needs_ray
def test_options_out_of_range_are_refused(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    Run(capsys, "ray", "serve", "--min-replicas", "3", "--max-replicas", "2").assert_refused(
        "--min-replicas", "3"
    )
    Run(capsys, "ray", "serve", "--port", "0").assert_refused("--port must be between 1 and 65535, not 0")
    Run(capsys, "ray", "serve", "--log-file", "x").assert_refused("--log-file: not with Ray")
    Run(capsys, "ray", "batch", "in.jsonl", "refused.jsonl", "--workers", "0").assert_refused(
        "--workers", "0"
    )
    assert not Path("refused.jsonl").exists()
    Path("in.jsonl").write_text(line(0))
    unreachable = ("ray", "batch", "in.jsonl", "refused.jsonl", "--address", "127.0.0.1:1", "-m")
    Run(capsys, *unreachable, str(model)).assert_refused("no Ray cluster at 127.0.0.1:1", "refused")
    Run(capsys, *unreachable, "missing.gguf").assert_refused("missing.gguf")
