"""The process of `rvllm serve`: how it starts, drains and ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from serve_process import events, serving
from server_client import TEMPLATE, wait_until
from tiny_gguf import write_tiny_model

from rvllm.cli import main
from rvllm.server.logs import logger as request_logger

pytestmark = pytest.mark.usefixtures("own_logging")

LONG = {"prompt": "Once", "max_tokens": 60_000, "ignore_eos": True, "stream": True}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m rvllm` in the checkout would find the sources there, which are not compiled."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path, context_length=65536, metadata={"tokenizer.chat_template": TEMPLATE})
    return path


def test_sigterm_lets_requests_finish_and_refuses_new_ones(model: Path) -> None:
    with serving("-m", str(model), "--drain-timeout", "60") as server:
        url = server.wait_until_ready()
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "max_tokens": 3000}) as response:
            lines = events(response)
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 503
            *_, last, done = lines
        assert done == "[DONE]" and json.loads(last)["choices"][0]["finish_reason"] == "length"
        status, log = server.end()
        assert status == 0 and "Traceback" not in log


def test_the_drain_ends_after_its_time_and_tells_the_clients(model: Path) -> None:
    with serving("-m", str(model), "--drain-timeout", "0.1") as server:
        url = server.wait_until_ready()
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG) as response:
            lines = events(response)
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            *_, last, done = lines
        assert done == "[DONE]" and json.loads(last)["choices"][0]["finish_reason"] == "abort"
        assert server.end()[0] == 0


def test_a_second_signal_ends_it_at_once(model: Path) -> None:
    with serving("-m", str(model)) as server:
        url = server.wait_until_ready()
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG) as response:
            lines = events(response)  # dropped, it would hang up
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
            server.process.send_signal(signal.SIGTERM)
            assert server.end(10)[0] == 128 + signal.SIGTERM


def test_keys_names_template_and_log_come_from_the_command_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    arguments = (
        "--served-model-name",
        "a",
        "b",
        "--chat-template",
        "chat.jinja",
        "--log-file",
        "log",
        "--log-requests",
    )
    environment = {"RVLLM_API_KEY": "secret"}
    with serving(str(model), *arguments, environment=environment) as server:
        url = server.wait_until_ready()
        assert httpx.get(f"{url}/v1/models").status_code == 401
        with httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}) as client:
            assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["a", "b"]
            body = {"model": "b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            answer = client.post("/v1/chat/completions", json=body).json()
            assert (answer["model"], answer["usage"]["prompt_tokens"]) == ("a", 4)
            assert (
                client.post("/v1/completions", json={"model": str(model), "prompt": "x"}).status_code == 200
            )
        server.process.send_signal(signal.SIGINT)
        status, stderr = server.end()
        assert status == 0 and stderr.count("\n") == 1
    log = (tmp_path / "log").read_text()
    assert 'prompts=["[hi]"]' in log and "secret" not in log and request_logger.name in log


CLIENT = """import sys, urllib.request
body = b'{"prompt": "Once", "max_tokens": 60000, "ignore_eos": true, "stream": %s}' % sys.argv[2].encode()
for line in urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/v1/completions", body)): pass"""


def test_clients_that_are_killed_leave_nothing(model: Path) -> None:
    with serving("-m", str(model)) as server:
        url = server.wait_until_ready()
        clients = [
            subprocess.Popen([sys.executable, "-c", CLIENT, url, stream]) for stream in ("true", "false") * 2
        ]
        wait_until(lambda: httpx.get(f"{url}/health").json()["running"] == 4, 60)
        for client in clients:
            client.kill()
            client.wait()
        idle = {"running": 0, "waiting": 0, "kv_cache_usage": 0.0}
        wait_until(lambda: idle.items() <= httpx.get(f"{url}/health").json().items())
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_a_full_disk_for_logs_is_survived(model: Path) -> None:
    with serving("-m", str(model), "--log-file", "/dev/full") as server:
        url = server.wait_until_ready()
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.end()[0] == 0


def test_a_model_that_cannot_be_loaded_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    (tmp_path / "folder").mkdir()
    for name in ("bad.gguf", "missing.gguf", "folder"):
        assert main(["serve", "--port", "0", "-m", name]) == 2
        listening, error = capsys.readouterr().err.splitlines()
        assert listening.startswith("rvllm: listening at ")
        assert error.startswith("rvllm: error: ") and name in error


LOADS_FOR_EVER = """import atexit, os, sys, threading
import rvllm.server.serve as serve
from rvllm.cli import main

def load(*_, **__):
    print("loading", file=sys.stderr, flush=True)
    threading.Event().wait()

serve.load_chat_llm = load
atexit.register(lambda: os._exit(134))  # where C++ under the thread that loads would abort
sys.exit(main(["serve", "--port", "0"]))"""


def test_a_signal_while_the_model_is_loaded_ends_it_with_0() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOADS_FOR_EVER], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        assert process.stderr.readline() == "loading\n"
        wait_until(lambda: _answers(url), 60)  # the handlers of signals are there
        process.send_signal(signal.SIGTERM)
        assert "Traceback" not in process.stderr.read()
        assert process.wait(30) == 0


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 503
    except httpx.TransportError:
        return False


def test_a_fault_of_ours_is_not_reported_as_the_users(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no user has said so")

    monkeypatch.setattr("rvllm.server.serve.start_engine", fail)
    with pytest.raises(ValueError, match="no user has said so"):
        main(["serve", "--port", "0", "-m", str(model)])


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "-m", str(model), "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert error == f"rvllm: error: cannot listen on 127.0.0.1, port {port}: Address already in use\n"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--port", "70000"], "--port"), (["--timeout", "0"], "--timeout"), (["--timeout", "nan"], "--timeout"),
     (["--max-queue", "-1"], "--max-queue"), (["--api-key", ""], "--api-key"),
     (["--max-body-size", "0"], "--max-body-size"), (["--chat-template", "nope.jinja"], "chatml"),
     (["a", "-m", "b"], "MODEL"), (["--drain-timeout", "-1"], "--drain-timeout"),
     (["--served-model-name", ""], "--served-model-name"),
     (["--log-file", "/nope/log"], "/nope/log")],
)  # fmt: skip
def test_bad_options_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], word: str
) -> None:
    assert main(["serve", "--port", "0", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("rvllm: error: ") and word in error


def test_other_commands_do_not_import_the_server() -> None:
    code = "import sys, rvllm.cli, rvllm.llm; print({'fastapi', 'uvicorn', 'pydantic'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"
