"""The scripts that load a server, for seconds instead of minutes, on `rvllm serve` with a tiny model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import check_exact_http
import compare_llama_server
import load_clients
import load_test
import pytest
from compare_llama_server import Workload
from fake_openai_server import FakeServer, fake_server
from server_process import ServerProcess, run_server, rvllm_command
from tiny_gguf import write_tiny_model

from rvllm.cli import main
from rvllm.http_client import Endpoint

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
CONTEXT = 2048


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    write_tiny_model(
        folder / "tiny.gguf", context_length=CONTEXT, metadata={"tokenizer.chat_template": TEMPLATE}
    )
    arguments = f"-m {folder}/tiny.gguf --num-blocks 1024 --max-num-seqs 8 --max-queue 16".split()
    with pytest.MonkeyPatch.context() as patch:
        # In the checkout, `python -m rvllm` would find the sources, which are not compiled.
        patch.chdir(folder)
        with run_server(rvllm_command(arguments), str(folder / "log")) as process:
            yield process
    log = (folder / "log").read_text()
    assert "Traceback" not in log, log


def test_server_stays_alive_under_every_client(server: ServerProcess) -> None:
    options = "--clients 40 --minutes 0.04 --ramp 0.5 --pause 0.02 --max-prompt 40 --linger 0.5"
    args = load_test.make_parser().parse_args([*options.split(), "--context", str(CONTEXT)])
    report = asyncio.run(load_test.load(args, server))
    # Memory still warms up in so short a time.
    assert [failure for failure in report["failures"] if not failure.startswith("memory grew")] == []
    assert sum(report["outcomes"].values()) >= 40 and report["most_running"] > 1


def test_answers_are_the_same_in_company(server: ServerProcess) -> None:
    differences = asyncio.run(check_exact_http.check(Endpoint(server.url), [3, 15], 1, 8, []))
    assert differences == []


def test_bench_serve_on_our_server(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    argv = f"--base-url {server.url} --num-prompts 8 --input-len 9 --random-prefix-len 9 --output-len 6 --ignore-eos"
    for backend in ("openai", "openai-chat"):
        assert main(["bench", "serve", *argv.split(), "--backend", backend, "--json"]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert (summary["completed"], summary["errors"], summary["total_output_tokens"]) == (8, {}, 48)


def test_comparison_measures_both(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(6, 3, 20, 10, 4, long_prompt_len=200, num_running=2)
    log: list[str] = []

    @contextmanager
    def run(command: list[str], keep_log: str | None = None) -> Iterator[ServerProcess]:
        log.append(" ".join(command))
        yield server

    monkeypatch.setattr(compare_llama_server, "run_server", run)
    settings = compare_llama_server.peer_settings(8192, workload)
    assert len(settings) == 4
    chosen = compare_llama_server.choose_peer(["peer"], settings[:2], workload)
    assert chosen in settings[:2] and log == [f"peer {' '.join(setting)}" for setting in settings[:2]]
    report = compare_llama_server.compare(["ours"], ["peer"], workload, 2, (None, None))
    assert log[2:] == ["ours", "peer"]
    for rows in report["results"].values():
        assert len(rows) == 2
        for row in rows:
            assert row.keys() == compare_llama_server.FIGURES.keys()
            # Between pieces there is no time when all tokens came in one.
            assert all(value > 0 for key, value in row.items() if "itl" not in key)
    assert 0 <= report["other_load"] <= 1


def test_table_has_medians_and_the_rounds_ratios() -> None:
    rows = {
        "rvllm": [{"output_throughput": value} for value in (400.0, 300.0, 500.0)],
        "llama-server": [{"output_throughput": value} for value in (100.0, 100.0, 100.0)],
    }
    line = "| output tok/s | 400 (300..500) | 100 (100..100) | 4.00 (3.00..5.00) |"
    assert compare_llama_server.table(rows).splitlines()[2:] == [line]


def test_dashboard_shows_what_the_server_exports(server: ServerProcess) -> None:
    response = asyncio.run(Endpoint(server.url).request("GET", "/metrics"))
    exported = set(re.findall(r"^(rvllm:\w+)", response.body.decode(), re.MULTILINE))
    text = (Path(__file__).resolve().parent.parent / "docs" / "grafana" / "rvllm.json").read_text()
    panels = json.loads(text)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 10
    shown = set(re.findall(r"rvllm:\w+", text))
    assert shown <= exported
    for name in ("num_requests_running", "kv_cache_usage_perc", "time_to_first_token_seconds_bucket"):
        assert f"rvllm:{name}" in shown
    for panel in panels:
        assert panel["targets"] and all("rvllm:" in target["expr"] for target in panel["targets"])


# What the scripts must find


class Faulty:
    """Clients on a fake server that fails in one way."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.client = load_clients.Client(
            Endpoint(server.url), load_clients.random.Random(0), load_clients.Limits(patience=0.2)
        )

    def act(self, name: str, failure: object) -> str:
        self.server.failures = dict.fromkeys(range(100), failure)
        action = getattr(self.client, name)
        with pytest.raises(load_clients.ServerFaultError) as caught:
            asyncio.run(action())
        return str(caught.value)


@pytest.fixture
def faulty() -> Iterator[Faulty]:
    with fake_server() as server:
        yield Faulty(server)


def test_clients_notice_faults(faulty: Faulty) -> None:
    assert faulty.act("stream", 500).startswith("status 500")
    assert faulty.act("stream", "error").startswith("the stream ended without [DONE]")
    assert faulty.act("stream", "aborted").startswith("finish reasons are ['abort']")
    assert faulty.act("whole", 429) == "a 429 without Retry-After"
    assert faulty.act("malformed", "html").startswith("status 200 for a body that is none")
    assert faulty.act("too_long", 422).startswith("status 422")


def test_clients_do_not_wait_for_ever(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty.server.failures = dict.fromkeys(range(100), "silent")
    monkeypatch.setattr(faulty.client.rng, "choices", lambda names, weights: ["whole"])
    monkeypatch.setattr(faulty.client, "fields", lambda **more: {"prompt": "x", **more})
    with pytest.raises(load_clients.ServerFaultError, match=r"whole: no end within 0.2 s"):
        asyncio.run(faulty.client.act())


def test_other_answer_of_a_seed_is_a_fault(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter("ab")

    async def post(fields: dict[str, Any]) -> Any:
        return None

    monkeypatch.setattr(faulty.client.rng, "randrange", lambda n: 3)
    monkeypatch.setattr(faulty.client, "_check_whole", lambda response, fields: next(texts))
    monkeypatch.setattr(faulty.client, "post", lambda fields: asyncio.sleep(0, "a response"))
    assert asyncio.run(faulty.client.seeded()) == "200"
    with pytest.raises(load_clients.ServerFaultError, match="seed 3 answered 'b', before 'a'"):
        asyncio.run(faulty.client.seeded())


def test_difference_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter("aaaaab")

    async def send(endpoint: object, path: str, fields: object) -> str:
        return next(answers)

    monkeypatch.setattr(check_exact_http, "send", send)
    differences = asyncio.run(check_exact_http.check(Endpoint("http://x"), [0], 5, 8, ["greedy"]))
    assert differences == ["round 5, among 0: greedy is b, alone a"]


def test_memory_growth_is_of_the_last_third() -> None:
    monitor = load_test.Monitor(Endpoint("http://x"), load_test.psutil.Process())
    monitor.rss = [(0.0, 10), (1.0, 50), (4.0, 60), (5.0, 61), (8.0, 65), (9.0, 64)]
    assert monitor.growth() == 4


def test_server_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no server from"), run_server(["false"]):
        pass
