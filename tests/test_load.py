"""rvllm bench serve: what is sent, what is counted, what is refused. How fast anything is is not tested."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from fake_openai_server import FakeServer, fake_server

from rvllm.cli import main
from rvllm.http_client import Endpoint, bearer
from rvllm.load import (
    LoadOptions,
    RequestResult,
    arrival_times,
    drive,
    first_model,
    peak_concurrency,
    send,
    summarize,
)
from rvllm.load_prompts import WORDS, LoadRequest, RandomPrompts, read_prompts
from rvllm.tokenizer import Tokenizer

REQUEST = LoadRequest("one two three", 4)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


def send_one(server: FakeServer, **options: Any) -> RequestResult:
    return asyncio.run(send(Endpoint(server.url), LoadOptions(model="m", **options), REQUEST))


# One request


def test_stream_is_read_as_it_was_sent(server: FakeServer) -> None:
    result = send_one(server)
    assert (result.error, result.text, result.finish_reason) == (None, "0,1,2,3,", "length")
    assert (result.prompt_tokens, result.output_tokens, result.cached_tokens) == (3, 4, 1)
    assert len(result.piece_times) == 4
    times = [result.start, *result.piece_times, result.end]
    assert times == sorted(times)
    assert server.bodies == [
        {"model": "m", "prompt": "one two three", "max_tokens": 4, "temperature": 0.0, "stream": True,
         "stream_options": {"include_usage": True}}
    ]  # fmt: skip


def test_chat_counts_no_role_as_a_token(server: FakeServer) -> None:
    result = send_one(server, backend="openai-chat")
    assert (result.error, result.text, len(result.piece_times)) == (None, "0,1,2,3,", 4)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "one two three"}]
    assert server.paths == ["/v1/chat/completions"]


def test_fields_are_added_and_dropped(server: FakeServer) -> None:
    result = send_one(
        server, ignore_eos=True, temperature=0.5, extra_body={"stream_options": None, "top_k": 3}
    )
    body = server.bodies[0]
    assert (body["ignore_eos"], body["temperature"], body["top_k"]) == (True, 0.5, 3)
    assert "stream_options" not in body
    # A server that does not count leaves the pieces to count.
    assert (result.error, result.output_tokens, result.prompt_tokens) == (None, 4, 0)


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        (429, "429", "no luck with 429"),
        (500, "500", "no luck with 500"),
        ("cut", "connection", "before the response ended"),
        ("error", "in stream", "the engine is gone"),
        ("html", "finish_reason None", "did not end as it should"),
        ("aborted", "finish_reason abort", "did not end as it should"),
    ],
)
def test_failures_are_told_apart(server: FakeServer, failure: object, error: str, message: str) -> None:
    server.failures[0] = failure
    result = send_one(server)
    assert result.error == error and message in result.message


def test_request_that_gets_no_answer_times_out(server: FakeServer) -> None:
    server.failures[0] = "silent"
    assert send_one(server, timeout=0.05).error == "timeout"


def test_nobody_listens() -> None:
    with fake_server() as server:
        pass
    assert send_one(server).error == "connection"


async def answer_raw(answer: bytes) -> RequestResult:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        return await send(Endpoint(f"http://127.0.0.1:{port}"), LoadOptions(), REQUEST)


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"SSH-2.0\r\n\r\n", "bad response"),
        (STREAM + b"data: {\n\n", "bad response"),
        (STREAM + b"data: []\n\n", "bad response"),
        (b"", "connection"),
        # Without a length, the end of the connection ends the answer.
        (STREAM + b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\n', None),
        (STREAM + b": ping\n\ndata:\n", "bad response"),
    ],
)
def test_answers_that_are_odd(answer: bytes, error: str | None) -> None:
    assert asyncio.run(answer_raw(answer)).error == error


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_count_by_either_name(name: str) -> None:
    answer = b'data: {"choices": [{"delta": {"%b": "hm"}}]}\n\n' % name.encode()
    end = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
    result = asyncio.run(answer_raw(STREAM + answer + end))
    assert (result.error, result.text, len(result.piece_times)) == (None, "hm", 1)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x/?a=1", ""])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="is no address such as"):
        Endpoint(url)


@pytest.mark.parametrize(
    ("name", "value"), [("X", "a\r\nY: b"), ("X", "\x7f"), ("X", "\u20ac"), ("X: a\r\nY", "b"), ("X Y", "b")]
)
def test_headers_cannot_smuggle_lines(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"header {name!r}".replace("\\", ".")):
        Endpoint("http://x", {name: value})


def test_a_key_is_sent_in_utf8(server: FakeServer) -> None:
    endpoint = Endpoint(server.url, {"Authorization": bearer("schl\u00fcssel \U0001f511")})
    asyncio.run(send(endpoint, LoadOptions(model="m"), REQUEST))
    (headers,) = server.headers
    assert headers["authorization"].encode("latin-1").decode() == "Bearer schl\u00fcssel \U0001f511"


def test_first_model(server: FakeServer) -> None:
    assert asyncio.run(first_model(Endpoint(server.url))) == "fake"
    with pytest.raises(ValueError, match="status 404"):
        asyncio.run(first_model(Endpoint(f"{server.url}/prefix")))


# Many requests


def test_concurrency_is_kept(server: FakeServer) -> None:
    requests = [REQUEST] * 20
    options = LoadOptions(max_concurrency=3)
    results = asyncio.run(drive(Endpoint(server.url), options, requests, [0.0] * 20))
    assert server.max_active <= 3 and peak_concurrency(results) <= 3
    assert len(server.bodies) == len(results) == 20


def test_requests_leave_in_time(server: FakeServer) -> None:
    arrivals = [0.0, 0.05, 0.2]
    results = asyncio.run(drive(Endpoint(server.url), LoadOptions(), [REQUEST] * 3, arrivals))
    assert all(r.start - results[0].start >= t - 0.01 for r, t in zip(results, arrivals, strict=True))


def test_arrivals_are_a_poisson_process() -> None:
    def intervals(burstiness: float) -> Any:
        options = LoadOptions(request_rate=4.0, burstiness=burstiness)
        return np.diff(arrival_times(20_000, options, np.random.default_rng(1)))

    # The standard deviation of exponential intervals is their mean; of gamma intervals, mean / sqrt(shape).
    assert intervals(1.0).mean() == pytest.approx(0.25, rel=0.03)
    assert intervals(1.0).std() == pytest.approx(0.25, rel=0.03)
    assert intervals(4.0).std() == pytest.approx(0.125, rel=0.03)
    assert arrival_times(3, LoadOptions(), np.random.default_rng(1)) == [0.0, 0.0, 0.0]
    assert arrival_times(3, LoadOptions(request_rate=1.0), np.random.default_rng(1))[0] == 0.0


def test_figures() -> None:
    results = [
        RequestResult(10.0, 11.0, [10.25, 10.5, 11.0], prompt_tokens=7, output_tokens=3, cached_tokens=4),
        RequestResult(10.5, 14.0, [12.5], prompt_tokens=5, output_tokens=1),
        RequestResult(11.0, 11.5, error="429", message="full"),
        RequestResult(11.0, 11.5, error="429", message="still full"),
    ]
    s = summarize(results)
    assert (s["completed"], s["failed"], s["errors"]) == (2, 2, {"429": 2})
    assert s["error_messages"] == {"429": "full"}
    assert (s["duration"], s["max_concurrent_requests"]) == (4.0, 3)
    assert (s["total_input_tokens"], s["total_output_tokens"], s["cached_input_tokens"]) == (12, 4, 4)
    assert (s["request_throughput"], s["output_throughput"], s["total_token_throughput"]) == (0.5, 1.0, 4.0)
    assert (s["mean_ttft_ms"], s["p50_ttft_ms"], s["max_ttft_ms"]) == (1125.0, 1125.0, 2000.0)
    assert (s["mean_itl_ms"], s["max_itl_ms"]) == (375.0, 500.0)
    assert s["mean_tpot_ms"] == 375.0 and s["mean_e2el_ms"] == 2250.0
    assert s["p99_ttft_ms"] == pytest.approx(250 + 0.99 * 1750)


def test_nothing_measured_is_no_number() -> None:
    s = summarize([RequestResult(1.0, 2.0, error="500")])
    assert (s["completed"], s["output_throughput"], s["mean_ttft_ms"], s["p99_itl_ms"]) == (
        0,
        0.0,
        None,
        None,
    )
    json.dumps(s, allow_nan=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "x"}, "backend must be one of openai, openai-chat"),
        ({"request_rate": -1.0}, "request_rate must be positive, got -1.0"),
        ({"timeout": float("nan")}, "timeout must be positive, got nan"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoadOptions(**options)


# Prompts


def test_random_prompts() -> None:
    prompts = RandomPrompts(100, 50, range_ratio=0.5, prefix_len=20, num_prefixes=2)
    requests = prompts.sample(200, np.random.default_rng(3))
    assert requests == prompts.sample(200, np.random.default_rng(3))
    assert requests != prompts.sample(200, np.random.default_rng(4))
    words = [request.prompt.split() for request in requests]
    assert all(w[:20] == words[i % 2][:20] for i, w in enumerate(words)) and words[0][:20] != words[1][:20]
    lengths = [len(w) - 20 for w in words]
    assert 50 <= min(lengths) < 60 and 140 < max(lengths) <= 150
    assert {
        len(w) for w in (r.prompt.split() for r in RandomPrompts(7, 5).sample(9, np.random.default_rng()))
    } == {7}
    assert all(25 <= request.output_len <= 75 for request in requests)


def test_a_word_is_a_token(smollm2_path: Path) -> None:
    from rvllm.gguf_file import GGUFFile

    with GGUFFile(smollm2_path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    assert len(tokenizer.encode(" ".join(WORDS))) == len(WORDS) == len(set(WORDS))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_len": 0}, "input_len must be at least 1, got 0"),
        ({"prefix_len": -1}, "prefix_len must be at least 0, got -1"),
        ({"range_ratio": 1.0}, "range_ratio must be at least 0 and less than 1, got 1.0"),
    ],
)
def test_lengths_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RandomPrompts(**{"input_len": 1, "output_len": 1, **values})


def test_prompt_files(tmp_path: Path) -> None:
    def read(name: str, text: str, *args: Any) -> list[tuple[str, int]]:
        path = tmp_path / name
        path.write_text(text)
        return [(r.prompt, r.output_len) for r in read_prompts(path, *args).requests]

    assert read("a.txt", "one\n\ntwo\n") == [("one", 128), ("two", 128)]
    assert read("a.jsonl", '{"prompt": "x", "output_tokens": 3}\n\n{"prompt": "y"}') == [("x", 3), ("y", 128)]
    assert read("a.jsonl", '{"prompt": "x", "output_tokens": 3}', None, 9) == [("x", 9)]
    talk = [{"conversations": [{"value": "hi"}, {"value": "a" * 40}, {"value": "x"}]}, {"conversations": []}]
    assert read("a.json", json.dumps(talk)) == [("hi", 10)]
    assert read("odd.name", json.dumps(talk), "sharegpt") == [("hi", 10)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "\n", "no prompts in it"),
        ("a.jsonl", '{"prompt": "x"}\n{', "line 2 is not JSON"),
        ("a.jsonl", "[]", "line 1 is not a JSON object"),
        ("a.jsonl", '{"prompt": 3}', "line 1: it has no text under 'prompt'"),
        (
            "a.jsonl",
            '{"prompt": "x", "output_tokens": 0}',
            "line 1: output_tokens must be an integer from 1 on",
        ),
        ("a.json", "{}", "no list of conversations"),
        ("a.json", '[{"conversations": [{"value": 1}]}]', "entry 1: it has no 'conversations'"),
        ("a.json", "[" * 100_000, "it is not JSON"),
    ],
)
def test_bad_prompt_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name)


def test_prompts_of_a_file_come_again_only_after_all(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join("abcde"))
    prompts = [r.prompt for r in read_prompts(tmp_path / "a.txt").sample(12, np.random.default_rng(0))]
    assert sorted(prompts[:5]) == sorted(prompts[5:10]) == list("abcde") and len(prompts) == 12


# The command

Bench: TypeAlias = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(*argv: str) -> tuple[int, str, str]:
        status = main(["bench", "serve", *argv])
        return status, *capsys.readouterr()

    return run


LOAD = ("--num-prompts", "6", "--input-len", "5", "--output-len", "3", "--ignore-eos")


def test_report(bench: Bench, server: FakeServer) -> None:
    server.failures[3] = 429
    status, out, err = bench("--base-url", server.url, *LOAD, "--api-key", "k", "--header", "X-A=b=c")
    assert (status, err) == (0, "")
    lines = {line.split(":")[0]: line.split(":")[-1].split() for line in out.splitlines() if ":" in line}
    assert lines["Successful requests"] == ["5"] and lines["Failed requests"] == ["1"]
    assert "  1 with 429: no luck with 429\n" in out
    assert lines["Total input tokens"] == ["25"] and lines["Total generated tokens"] == ["15"]
    for metric in ("TTFT", "TPOT", "ITL", "E2EL"):
        for statistic in ("Mean", "Median", "P95", "P99"):
            assert float(lines[f"{statistic} {metric} (ms)"][0]) >= 0
    assert len(server.bodies) == 7  # the first is the warm-up
    assert {body["model"] for body in server.bodies} == {"fake"}
    assert {(h["authorization"], h["x-a"]) for h in server.headers} == {("Bearer k", "b=c")}


@pytest.mark.parametrize("key", ["a\nb", "a\rb", "a\0", "\udcff"])
def test_a_key_that_no_header_can_hold_is_named(bench: Bench, server: FakeServer, key: str) -> None:
    status, out, err = bench("--base-url", server.url, *LOAD, "--api-key", key)
    assert (status, out) == (2, "") and not server.bodies
    assert err == "rvllm: error: the API key must be one line of printable characters\n"


def test_json(bench: Bench, server: FakeServer) -> None:
    status, out, _ = bench(
        "--base-url", f"{server.url}/v1/", *LOAD, "--json", "--model", "mine", "--request-rate", "500"
    )
    summary = json.loads(out)
    assert (status, summary["completed"], summary["errors"], summary["total_output_tokens"]) == (0, 6, {}, 18)
    assert {body["model"] for body in server.bodies} == {"mine"}


def test_compare_sends_the_same_in_turns(bench: Bench, server: FakeServer) -> None:
    with fake_server() as other:
        status, out, _ = bench(
            "--base-url", server.url, "--compare", other.url, *LOAD, "--rounds", "2", "--num-warmups", "0"
        )
        assert status == 0

        def prompts(s: FakeServer) -> list[set[str]]:
            return [{body["prompt"] for body in s.bodies[i : i + 6]} for i in (0, 6)]

        assert prompts(server) == prompts(other)
        assert not prompts(server)[0] & prompts(server)[1]
        assert f"| median of 2 rounds | {server.url} | {other.url} |" in out
        assert "| Output tok/s | " in out
        status, out, _ = bench(
            "--base-url", server.url, "--compare", other.url, *LOAD, "--rounds", "1", "--json"
        )
        servers = json.loads(out)
        assert [(s["base_url"], len(s["rounds"])) for s in servers] == [(server.url, 1), (other.url, 1)]


def test_plot(bench: Bench, server: FakeServer, tmp_path: Path) -> None:
    status, _, _ = bench("--base-url", server.url, *LOAD, "--plot", str(tmp_path / "a.png"))
    assert status == 0 and (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("rvllm.cli.plot.find_spec", lambda name: None)
    assert bench("--plot", "a.png")[:2] == (2, "")


def test_nothing_succeeds(bench: Bench, server: FakeServer) -> None:
    server.failures.update(dict.fromkeys(range(10), 503))
    status, out, _ = bench("--base-url", server.url, *LOAD, "--num-warmups", "0")
    assert status == 1 and "6 with 503" in out and "Mean TTFT (ms):                          -\n" in out
    status, out, err = bench("--base-url", server.url, *LOAD)
    assert (status, out) == (2, "") and err == f"rvllm: error: {server.url}: 503: no luck with 503\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--base-url", "nonsense"), "'nonsense' is no address"),
        (("--base-url", "http://127.0.0.1:9"), "http://127.0.0.1:9: "),
        (("--request-rate", "0"), "'0' is no number greater than 0"),
        (("--max-concurrency", "0"), "'0' is no integer from 1 on"),
        (("--random-range-ratio", "2"), "range_ratio must be at least 0 and less than 1"),
        (("--extra-body", "[]"), "'[]' is no JSON object"),
        (("--header", "x"), "'x' is no NAME=VALUE"),
        (("--dataset-name", "sharegpt"), "--dataset-name sharegpt needs --dataset-path"),
        (("--dataset-path", "/nowhere/a.txt"), "/nowhere/a.txt: No such file"),
        (("--dataset-path", "a", "--dataset-name", "random"), "random prompts come from no file"),
    ],
)
def test_refusals(bench: Bench, argv: tuple[str, ...], message: str) -> None:
    status, out, err = bench(*argv)
    assert (status, out) == (2, "") and err.startswith("rvllm: error: ") and err.count("\n") == 1
    assert message in err


def test_bench_alone_is_another_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--trace-file", "/nowhere"]) == 2
    assert "/nowhere" in capsys.readouterr().err
    assert main(["bench", "--num-prompts", "3"]) == 2
