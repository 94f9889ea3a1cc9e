"""What surrounds the APIs: keys, origins, request ids, logs, metrics, health, the page, clients that leave."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from server_client import TinyServer, error_of, make_llm, wait_until

from rvllm import LLM
from rvllm.grammar import GrammarState
from rvllm.server import security
from rvllm.server.app import create_app
from rvllm.server.logs import QuietHandler, logfmt
from rvllm.server.page import add_page
from rvllm.server.served_model import ServerConfig
from rvllm.server.tracing import Tracing

PATH = "/v1/completions"
LONG = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return make_llm(tmp_path_factory.mktemp("model"), context_length=8192, num_blocks=1100, max_num_seqs=4)


@pytest.fixture
def server(llm: LLM) -> Iterator[TinyServer]:
    with closing(TinyServer(llm)) as server:
        yield server


def make_server(llm: LLM, **settings: Any) -> closing[TinyServer]:
    return closing(TinyServer(llm, **settings))


# Keys and origins


@pytest.mark.parametrize("key", ["schl\u00fcssel", "\u00e0", "\U0001f511", "\udcff", " blank "], ids=ascii)
def test_keys_that_are_not_ascii(llm: LLM, key: str) -> None:
    sent = key.encode("utf-8", "surrogateescape")
    with make_server(llm, api_keys=(key,)) as server:
        for value, status in ((sent, 200), (sent[:-1] + b"x", 401), (b"\xc3" + sent, 401)):
            for headers in ({"Authorization": b"Bearer " + value}, {"X-Api-Key": value}):
                assert server.request("GET", "/v1/models", headers=headers).status_code == status
        if key == "schl\u00fcssel":
            latin = {"X-Api-Key": key.encode("latin-1")}
            assert server.request("GET", "/v1/models", headers=latin).status_code == 200


def test_only_a_valid_key_opens_the_apis(llm: LLM) -> None:
    with make_server(llm, api_keys=("first-key", "second-key")) as server:
        good = [
            {"Authorization": "Bearer first-key"},
            {"authorization": "bearer second-key"},
            {"X-Api-Key": "first-key"},
        ]
        keys = ("Bearer first-ke", "first-key", "Bearer \u00e9", "Basic first-key", "Bearer ")
        bad = [{}, *({"Authorization": key} for key in keys)]
        for path in ("/v1/models", "/v1/nope"):
            for headers in bad:
                encoded = {name: value.encode() for name, value in headers.items()}
                response = server.request("GET", path, headers=encoded)
                assert error_of(response, 401)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        for headers in good:
            assert server.request("GET", "/v1/models", headers=headers).status_code == 200
        for path in ("/tokenize", "/detokenize", "/completion", PATH, "/v1/embeddings", "/v1/responses"):
            error_of(server.post(path, prompt="x"), 401)
        for path in ("/health", "/metrics", "/version", "/", "/docs"):
            assert server.request("GET", path).status_code in (200, 404)


def test_pages_of_other_origins_are_refused_unless_allowed(llm: LLM) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    evil = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    with make_server(llm) as server:
        error_of(server.request("POST", PATH, json=body, headers=evil), 403)
        error_of(server.request("POST", PATH, json=body, headers={"Origin": "null"}), 403)
        response = server.request("POST", PATH, json=body, headers={"Origin": "http://tiny"})
        assert response.status_code == 200 and "access-control-allow-origin" not in response.headers
    with make_server(llm, cors_origins=("https://good.example",)) as server:
        error_of(server.request("POST", PATH, json=body, headers=evil), 403)
        response = server.request("POST", PATH, json=body, headers={"Origin": "https://good.example"})
        assert response.headers["access-control-allow-origin"] == "https://good.example"
        preflight = {"Origin": "https://good.example", "Access-Control-Request-Method": "POST"}
        assert server.request("OPTIONS", PATH, headers=preflight).status_code == 200
        private = {"Access-Control-Request-Private-Network": "true"}  # of a public page in Chrome
        response = server.request("OPTIONS", PATH, headers=preflight | private)
        assert response.headers["access-control-allow-private-network"] == "true" and response.is_success
        response = server.request(
            "OPTIONS", PATH, headers=evil | preflight | private | {"Origin": "http://x"}
        )
        assert response.status_code == 400 and "access-control-allow-origin" not in response.headers


def test_a_name_that_a_stranger_may_have_pointed_here_is_refused(llm: LLM) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    with make_server(llm) as server:
        rebound = {"Origin": "http://evil.example:8000", "Host": "evil.example:8000"}
        assert (
            "evil.example"
            in error_of(server.request("POST", PATH, json=body, headers=rebound), 403)["message"]
        )
        error_of(server.request("POST", PATH, json=body, headers={"Origin": "http://[::1"}), 403)
        for host in ("localhost:8000", "127.0.0.1:8000", "[::1]:8000", "192.0.2.7", "box", "box.local"):
            headers = {"Origin": f"http://{host}", "Host": host}
            assert server.request("POST", PATH, json=body, headers=headers).status_code == 200
        for host, status in {"evil.example": 403, "localhost": 200}.items():  # a page's GET has no Origin
            local = "http://127.0.0.1/v1/models"
            assert server.request("GET", local, headers={"Host": host}).status_code == status
            far = "http://192.0.2.7/v1/models"
            assert server.request("GET", far, headers={"Host": host}).status_code == 200
    named = {"Origin": "https://good.example", "Host": "good.example"}
    for settings in (
        {"cors_origins": ("https://good.example",)},
        {"cors_origins": ("*",)},
        {"api_keys": ("key",)},
    ):
        with make_server(llm, **settings) as server:
            headers = {**named, "Authorization": "Bearer key"}
            assert server.request("POST", PATH, json=body, headers=headers).status_code == 200


# Request ids and logs


def test_a_harmless_request_id_is_kept_and_any_other_replaced(server: TinyServer) -> None:
    ids = {"abc-1.2_3:x": True, "a" * 64: True, "a" * 65: False, "a b": False, 'x"y': False, "": False}
    for asked, is_kept in ids.items():
        got = server.request("GET", "/version", headers={"X-Request-Id": asked}).headers["x-request-id"]
        assert (got == asked) is is_kept and got


@pytest.mark.parametrize("log_requests", [False, True])
def test_prompts_are_logged_on_demand_alone(
    llm: LLM, caplog: pytest.LogCaptureFixture, log_requests: bool
) -> None:
    caplog.set_level(logging.INFO, "rvllm")
    with make_server(llm, log_requests=log_requests) as server:
        server.ok(PATH, prompt="SECRET", max_tokens=2, ignore_eos=True)
        server.ok("/v1/chat/completions", messages=[{"role": "user", "content": "SECRET"}], max_tokens=1)
        server.refused(PATH, prompt="x", stop="SECRET" * 10, temperature=-1)
    assert ("SECRET" in caplog.text) is log_requests
    line = next(record.message for record in caplog.records if "path=/v1/completions" in record.message)
    for part in (
        "request_id=",
        "method=POST",
        "status=200",
        "prompt_tokens=6",
        "completion_tokens=2",
        "finish_reason=length",
    ):
        assert part in line


def test_an_internal_error_is_an_answer_like_any_other(
    llm: LLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "rvllm")
    monkeypatch.setattr("rvllm.server.tokenize._text_ids", lambda body, model: {}["no such key"])
    with make_server(llm, cors_origins=("http://page.example",)) as server:
        headers = {"X-Request-Id": "mine", "Origin": "http://page.example"}
        response = server.request("POST", "/tokenize", json={"prompt": "x"}, headers=headers)
    assert "internal error" in error_of(response, 500)["message"]
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["access-control-allow-origin"] == "http://page.example"
    assert "request_id=mine method=POST path=/tokenize status=500" in caplog.text
    assert "no such key" in caplog.text


def test_a_log_line_stays_a_line() -> None:
    assert logfmt(a="x\ny", b=1.5, c=["p\n"], d="") == 'a="x\\ny" b=1.5 c=["p\\n"] d=""'


def test_what_cannot_be_logged_is_dropped(tmp_path: Path) -> None:
    handler = QuietHandler("/dev/full")
    handler.emit(logging.LogRecord("rvllm", logging.INFO, "", 0, "text", None, None))
    assert handler.num_dropped == 1
    handler = QuietHandler(str(tmp_path / "log"))
    handler.emit(logging.LogRecord("rvllm", logging.INFO, "", 0, "half \ud800", None, None))
    assert (tmp_path / "log").read_text() == "half \\ud800\n"


def test_a_span_for_each_request_joins_the_clients_trace(llm: LLM) -> None:
    exporter = InMemorySpanExporter()
    with make_server(llm, tracing=Tracing(SimpleSpanProcessor(exporter))) as server:
        trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        body = {"prompt": "one", "max_tokens": 2, "ignore_eos": True}
        assert server.request("POST", PATH, json=body, headers=trace).status_code == 200
        server.refused(PATH, prompt="")
        server.request("GET", "/health")
    first, second = exporter.get_finished_spans()
    assert f"{first.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert (
        first.attributes["gen_ai.usage.input_tokens"] == 3
        and first.attributes["gen_ai.usage.output_tokens"] == 2
    )
    assert (
        first.attributes["gen_ai.response.finish_reasons"] == ("length",)
        and first.end_time > first.start_time
    )
    assert second.attributes["http.response.status_code"] == 400


# Health and metrics


def test_health_while_loading_ready_draining_and_dead(llm: LLM) -> None:
    with make_server(llm) as server:
        model, server.app.state.model = server.app.state.model, None
        response = server.request("GET", "/health")
        assert (response.status_code, response.json()["status"]) == (503, "loading")
        response = server.post(PATH, prompt="x")
        assert error_of(response, 503)["code"] == "model_loading" and response.headers["retry-after"]
        server.app.state.model = model
        health = server.request("GET", "/health")
        assert health.status_code == 200
        assert {"status": "ok", "model": "tiny", "running": 0, "waiting": 0}.items() <= health.json().items()
        asyncio.run(server.engine.drain())
        assert server.request("GET", "/health").json()["status"] == "draining"
        assert error_of(server.post(PATH, prompt="x"), 503)["code"] == "shutting_down"


def test_steps_that_fail_in_a_row_are_the_engines_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_server(make_llm(tmp_path)) as server:

        def fail(scheduled: object) -> None:
            raise RuntimeError("out of order")

        monkeypatch.setattr(server.llm.engine.runner, "run", fail)
        for stream in (False, True, False):
            assert server.request("GET", "/health").status_code == 200
            error = error_of(server.post(PATH, prompt="x", stream=stream), 500)
            assert "out of order" in error["message"]
            server.assert_idle()
        error_of(server.post(PATH, prompt="x"), 500)
        health = server.request("GET", "/health")
        assert (health.status_code, health.json()["status"]) == (503, "dead")


def test_a_step_that_fails_ends_its_own_requests_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_server(llm) as server:
        runner, failed = server.llm.engine.runner, []
        run = runner.run

        def fail_once(scheduled: list[Any]) -> Any:
            if not failed:
                failed.append(len(scheduled))
                raise RuntimeError("out of order")
            return run(scheduled)

        monkeypatch.setattr(runner, "run", fail_once)
        for _ in range(3):  # with steps that succeed in between, the engine never dies
            failed.clear()
            assert "out of order" in error_of(server.post(PATH, prompt="x"), 500)["message"]
            assert server.request("GET", "/health").status_code == 200
            server.ok(PATH, prompt="x", max_tokens=2)
        failed.clear()
        calls = [("POST", PATH, {"json": {"prompt": "x", "max_tokens": 2}})] * 12
        codes = [response.status_code for response in server.requests(calls)]
        assert codes.count(500) == failed[0] and codes.count(200) == 12 - failed[0]
        server.assert_idle()


def test_a_grammar_that_fails_ends_its_own_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: GrammarState) -> None:
        raise MemoryError("no room\nfor it")

    monkeypatch.setattr(GrammarState, "_compute", fail)
    with make_server(llm) as server:
        bodies = [{"grammar": 'root ::= "a"'}, {}]
        calls = [("POST", PATH, {"json": {"prompt": "x", "max_tokens": 8, **body}}) for body in bodies]
        failed, good = server.requests(calls)
        assert "MemoryError: no room" in error_of(failed, 500)["message"]
        assert good.status_code == 200 and server.request("GET", "/health").status_code == 200
        server.assert_idle()


def metric(server: TinyServer, name: str) -> float:
    lines = server.request("GET", "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.split("{")[0] == f"rvllm:{name}")


def test_metrics_have_vllms_names(server: TinyServer) -> None:
    names = (
        "prompt_tokens_total", "generation_tokens_total", "request_success_total", "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count",
    )  # fmt: skip
    before = {name: metric(server, name) for name in names}
    server.ok(PATH, prompt="one", max_tokens=4, ignore_eos=True)
    server.assert_idle()
    assert [metric(server, name) - before[name] for name in names] == [3, 4, 1, 1, 3, 1]
    server.ok(PATH, prompt="one", max_tokens=4, ignore_eos=True, n=3)
    server.assert_idle()
    assert metric(server, names[1]) - before[names[1]] == 4 + 12
    text = server.request("GET", "/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
                 "prefix_cache_hits_total", "num_preemptions_total"):  # fmt: skip
        assert f'\nrvllm:{name}{{model_name="tiny"}} ' in text


def test_models_and_version(server: TinyServer) -> None:
    cards = server.request("GET", "/v1/models").json()
    assert cards["object"] == "list" and [card["id"] for card in cards["data"]] == ["tiny", "other"]
    assert cards["data"][0]["max_model_len"] == 8192
    assert server.request("GET", "/v1/models/other").json()["id"] == "other"
    assert error_of(server.request("GET", "/v1/models/a/b"), 404)["code"] == "model_not_found"
    assert server.request("GET", "/version").json().keys() == {"version"}


def test_head_is_get_without_a_body(server: TinyServer) -> None:
    for path in ("/health", "/v1/models"):
        response = server.request("HEAD", path)
        assert (
            response.status_code == 200
            and response.content == b""
            and int(response.headers["content-length"]) > 2
        )
    assert server.request("HEAD", PATH).status_code == 405


def test_every_body_is_described_in_the_openapi_document(server: TinyServer) -> None:
    document = server.request("GET", "/openapi.json").json()
    text = json.dumps(document)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in document["components"]["schemas"]
    body = document["paths"][PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "max_tokens" in document["components"]["schemas"][body["$ref"].split("/")[-1]]["properties"]


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_the_docs_need_no_internet_and_no_key(llm: LLM, path: str) -> None:
    with make_server(llm, api_keys=("key",)) as server:
        page = server.request("GET", path).text
        links = re.findall(r'(?:src|href)="([^"]*)"', page)
        assert len(links) >= 2 and "://" not in page
        for link in links:
            assert server.request("GET", link).status_code == 200


# The page


def test_the_page_is_served_from_a_folder_with_etags_and_a_strict_policy(tmp_path: Path) -> None:
    app = create_app(ServerConfig())
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") != "/"]
    (tmp_path / "index.html").write_text("<p>hi")
    (tmp_path / "app.js").write_text("1")
    assert add_page(app, tmp_path) == ["/app.js", "/"]

    async def get(path: str, **headers: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tiny") as client:
            return await client.get(
                path, headers={name.replace("_", "-"): value for name, value in headers.items()}
            )

    page = asyncio.run(get("/"))
    assert page.text == "<p>hi" and page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert asyncio.run(get("/", if_none_match=page.headers["etag"])).status_code == 304
    assert "javascript" in asyncio.run(get("/app.js")).headers["content-type"]
    assert add_page(app, tmp_path / "nothing") == []


# Overload, deadlines, clients that leave


def test_a_full_queue_is_a_429_that_says_when_to_come_back(llm: LLM) -> None:
    with make_server(llm, max_queue=2) as server:
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
        responses = server.requests([("POST", PATH, {"json": body})] * 12)
        codes = sorted(response.status_code for response in responses)
        assert codes == [200] * 6 + [429] * 6
        for response in responses:
            if response.status_code == 429:
                assert error_of(response, 429)["code"] == "rate_limit_exceeded"
                assert int(response.headers["retry-after"]) >= 1
        assert metric(server, "admission_rejections_total") == 6
        server.assert_idle()


def test_a_deadline_ends_the_text(llm: LLM) -> None:
    with make_server(llm, timeout=0.3) as server:
        choice = server.ok(PATH, **{**LONG, "max_tokens": 8000})["choices"][0]
        assert choice["finish_reason"] == "timeout" and choice["text"]
        server.assert_idle()
    with make_server(llm, timeout=1e-6) as server:
        assert error_of(server.post(PATH, prompt=[65] * 4000), 408)["code"] == "timeout"
        assert error_of(server.post("/v1/embeddings", input=[65] * 4000), 408)["code"] == "timeout"
        server.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_hangs_up_frees_its_blocks(server: TinyServer, stream: bool, prompts: int) -> None:
    body = json.dumps({**LONG, "max_tokens": 8000, "prompt": ["Once"] * prompts, "stream": stream}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: tiny\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with server.on_socket() as url:
        address = (httpx.URL(url).host, httpx.URL(url).port)
        for _ in range(3):
            with socket.create_connection(address) as connection:  # type: ignore[arg-type]
                connection.sendall(head + body)
                wait_until(lambda: server.engine.num_running == prompts)
        server.assert_idle()
        assert httpx.post(url + PATH, json={"prompt": "Hi", "max_tokens": 1}).status_code == 200


def test_a_reader_that_stops_reading_holds_up_nobody(server: TinyServer) -> None:
    body = json.dumps({**LONG, "max_tokens": 8000, "logprobs": 20, "stream": True}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: tiny\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with server.on_socket() as url, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((httpx.URL(url).host, httpx.URL(url).port))
        connection.sendall(head + body)
        wait_until(lambda: server.engine.num_running == 1)
        assert httpx.post(url + PATH, json={"prompt": "Hi", "max_tokens": 1}).status_code == 200
    server.assert_idle()


def test_a_body_that_stops_coming_is_a_408(server: TinyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "BODY_TIMEOUT", 0.2)
    with (
        server.on_socket() as url,
        socket.create_connection((httpx.URL(url).host, httpx.URL(url).port)) as connection,
    ):  # type: ignore[arg-type]
        connection.sendall(
            f'POST {PATH} HTTP/1.1\r\nHost: tiny\r\nContent-Length: 100\r\n\r\n{{"prom'.encode()
        )
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"error":{"message":"the body comes too slowly' in answer


def test_a_body_that_is_compressed_is_a_415(server: TinyServer) -> None:
    data = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    for coding, status in {"gzip": 415, "br, deflate": 415, "identity": 200, "": 200}.items():
        body = gzip.compress(data) if coding == "gzip" else data
        response = server.request("POST", PATH, content=body, headers={"Content-Encoding": coding})
        assert response.status_code == status
        if status == 415:
            assert f"Content-Encoding {coding!r} is not supported" in error_of(response, 415)["message"]
            assert response.headers["accept-encoding"] == "identity"


def test_many_at_a_time_and_one_after_the_other(server: TinyServer) -> None:
    prompts = [f"{i} bottles" for i in range(32)]
    body = {"max_tokens": 8, "temperature": 0.8, "seed": 3}
    together = server.requests([("POST", PATH, {"json": {**body, "prompt": p}}) for p in prompts])
    with server.on_socket() as url, httpx.Client(base_url=url) as client:
        for prompt, response in zip(prompts, together, strict=True):
            alone = client.post(PATH, json={**body, "prompt": prompt})
            assert alone.json()["choices"] == response.json()["choices"]
        for _ in range(20):  # connect and close
            socket.create_connection((httpx.URL(url).host, httpx.URL(url).port)).close()  # type: ignore[arg-type]
        assert client.get("/health").status_code == 200


def test_a_seeded_request_is_byte_identical_in_any_company(server: TinyServer) -> None:
    one: dict[str, Any] = {
        "prompt": "Name three colours:",
        "seed": 42,
        "temperature": 0.8,
        "max_tokens": 40,
        "logprobs": 3,
    }
    others: list[dict[str, Any]] = [
        {"prompt": "a", "max_tokens": 30}, {"prompt": "b", "seed": 42}, {"prompt": "c" * 300, "temperature": 0},
        {"prompt": "Name three", "seed": 1, "logit_bias": {"65": 3}}, {"prompt": ["d", "e"], "n": 2},
        {"prompt": "f", "max_tokens": 0, "frequency_penalty": 1.0}, {"prompt": "x", "temperature": -1},
    ]  # fmt: skip
    expected = server.ok(PATH, **one)["choices"]
    for number in (1, 3, 7, 15):
        company = [others[i % len(others)] for i in range(number)]
        responses = server.requests([("POST", PATH, {"json": body}) for body in (one, *company)])
        assert responses[0].json()["choices"] == expected
