"""`rvllm batch`: each request of a file is answered once, also when the run is killed or the disk is full."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_run import Run
from server_client import TEMPLATE
from tiny_gguf import write_tiny_model

from rvllm.server.batch import BatchRunner
from rvllm.server.batch_file import BatchRequest

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path, context_length=4096, metadata={"tokenizer.chat_template": TEMPLATE})
    return path


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m rvllm` in the checkout would find the sources there, which are not compiled."""
    monkeypatch.chdir(tmp_path)


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    body = body or {"prompt": f"Say {custom_id}", "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: Sequence[dict[str, Any] | str]) -> Path:
    path.write_text("".join((text if isinstance(text, str) else json.dumps(text)) + "\n" for text in lines))
    return path


def entries(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    assert data.endswith(b"\n")
    return [json.loads(text) for text in data.splitlines()]


def bodies(path: Path) -> dict[str, str]:
    """The answers by custom_id, byte for byte but for ids and times."""
    found: dict[str, str] = {}
    for entry in entries(path):
        assert entry["custom_id"] not in found and entry["error"] is None
        assert entry["response"]["status_code"] == 200, entry
        body = {
            name: value for name, value in entry["response"]["body"].items() if name not in ("id", "created")
        }
        found[entry["custom_id"]] = json.dumps(body)
    return found


def arguments(model: Path, *options: str) -> list[str]:
    return ["batch", "in.jsonl", "out.jsonl", "-m", str(model), "-t", "1", "--num-blocks", "256", *options]


def test_every_route_answers_in_the_format_of_openai(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    write(
        Path("in.jsonl"),
        [
            "\ufeff" + json.dumps(line("complete")),
            line("chat", CHAT, messages=[{"role": "user", "content": "Hi"}], max_tokens=3, model="tiny"),
            "",
            line("embed", EMBEDDINGS, input=["one", "two"]),
            line("respond", RESPONSES, input="Hi", max_output_tokens=3),
        ],
    )
    run = Run(capsys, *arguments(model))
    assert (run.status, run.out) == (0, "")
    assert run.err == "rvllm: 4 of 4 requests answered\n"
    answers = {entry["custom_id"]: entry for entry in entries(Path("out.jsonl"))}
    assert answers.keys() == {"complete", "chat", "embed", "respond"}
    for entry in answers.values():
        assert list(entry) == ["id", "custom_id", "response", "error"] and entry["error"] is None
        assert entry["id"].startswith("batch_req_")
        assert list(entry["response"]) == ["status_code", "request_id", "body"]
        assert entry["response"]["status_code"] == 200 and entry["response"]["request_id"]
    objects = {name: entry["response"]["body"]["object"] for name, entry in answers.items()}
    kinds = {"complete": "text_completion", "chat": "chat.completion", "embed": "list", "respond": "response"}
    assert objects == kinds
    assert answers["chat"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert len(answers["embed"]["response"]["body"]["data"]) == 2
    assert len({entry["id"] for entry in answers.values()}) == 4

    before = Path("out.jsonl").read_bytes()
    assert Run(capsys, *arguments(Path("no such model"))).status == 0  # nothing is left to do
    assert Path("out.jsonl").read_bytes() == before


def test_bad_lines_and_refused_requests_harm_no_other(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    lines = [
        line("good"),
        '{"custom_id": "torn", ',
        line("good", prompt="another"),
        "[1]",
        {"method": "POST", "url": COMPLETIONS, "body": {}},
        {**line("get"), "method": "GET"},
        {**line("more"), "priority": 1},
        line("elsewhere", "/v1/moderations", input="x"),
        line("stream", prompt="x", stream=True),
        line("hot", prompt="x", temperature=-1),
        line("unknown", prompt="x", model="gpt-9"),
        {**line("nan"), "body": {"prompt": "x", "temperature": float("nan")}},
        line("last"),
    ]
    write(Path("in.jsonl"), lines)
    run = Run(capsys, *arguments(model))
    assert run.status == 1
    assert run.err == "rvllm: 5 of 5 requests answered; 11 lines of out.jsonl are errors\n"
    found = entries(Path("out.jsonl"))
    bad = {entry["error"]["line"]: entry for entry in found if entry["error"] is not None}
    assert all(entry["response"] is None for entry in bad.values())
    reasons = {number: (entry["custom_id"], entry["error"]["message"]) for number, entry in bad.items()}
    expected = {
        2: (None, "no valid JSON"),
        3: ("good", "custom_id 'good' is that of line 1 already"),
        4: (None, "the body: input should be an object, got"),
        5: (None, "custom_id is missing"),
        6: ("get", "method: input should be 'POST', got 'GET'"),
        7: ("more", "priority: extra inputs"),
        8: ("elsewhere", "url: input should be '/v1/chat/completions'"),
        9: ("stream", "body.stream"),
    }
    assert reasons.keys() == expected.keys()
    for number, (custom_id, message) in expected.items():
        assert reasons[number][0] == custom_id
        assert reasons[number][1].startswith(f"line {number}: {message}"), reasons[number]
    answers = {entry["custom_id"]: entry["response"] for entry in found if entry["error"] is None}
    statuses = {custom_id: response["status_code"] for custom_id, response in answers.items()}
    assert statuses == {"good": 200, "hot": 400, "unknown": 404, "nan": 400, "last": 200}
    assert answers["hot"]["body"]["error"]["param"] == "temperature"

    lines[7] = line("elsewhere")  # a line that has been mended is answered, the others are not told of again
    write(Path("in.jsonl"), lines)
    assert Run(capsys, *arguments(model)).status == 1
    new = entries(Path("out.jsonl"))[len(found) :]
    assert [(entry["custom_id"], entry["response"]["status_code"]) for entry in new] == [("elsewhere", 200)]


def test_an_internal_error_ends_its_own_request_alone(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr("rvllm.server.chat_prompt.encode_chat", fail)
    chat = line("chat", CHAT, messages=[{"role": "user", "content": "Hi"}])
    write(Path("in.jsonl"), [line("first"), chat, line("last")])
    assert Run(capsys, *arguments(model)).status == 1  # one line is an error
    statuses = {e["custom_id"]: e["response"]["status_code"] for e in entries(Path("out.jsonl"))}
    assert statuses == {"first": 200, "chat": 500, "last": 200}


def many(count: int) -> list[dict[str, Any]]:
    """Some greedy, some with seeds of their own, some with that of the run; none ends before its time."""
    rest = ({"temperature": 0}, {"temperature": 1, "seed": 7}, {"temperature": 1})
    return [
        line(f"r{i}", prompt=f"{i}", max_tokens=30 + i % 7, ignore_eos=True, **rest[i % 3])
        for i in range(count)
    ]


# A run that is killed while it writes half of its 20th line.
KILLED = """
import os, signal, sys
from rvllm.cli import main
write, calls = os.write, []
def write_and_die(file, data):
    calls.append(file)
    if len(calls) == 20:
        write(file, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return write(file, data)
from rvllm.server import batch_file
batch_file.os.write = write_and_die
main(sys.argv[1:])
"""


def test_a_killed_run_goes_on_and_gives_the_answers_of_one_go(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    write(Path("in.jsonl"), many(60))
    options = arguments(model, "-np", "3", "--seed", "5")
    output = Path("out.jsonl")
    killed = subprocess.run([sys.executable, "-c", KILLED, *options], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = output.read_bytes()
    assert before.count(b"\n") == 19 and not before.endswith(b"\n")
    resumed = Run(capsys, *options)
    assert (resumed.status, resumed.err) == (0, "rvllm: 60 of 60 requests answered\n")
    assert output.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    answers = bodies(output)

    output.unlink()
    assert Run(capsys, *options).status == 0
    assert bodies(output) == answers and answers.keys() == {f"r{i}" for i in range(60)}


def test_a_worker_that_misses_its_cancellation_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = SimpleNamespace(max_num_seqs=1)
    engine = SimpleNamespace(engine=SimpleNamespace(scheduler=scheduler), is_dead=False)
    app: Any = SimpleNamespace(state=SimpleNamespace(model=SimpleNamespace(engine=engine)))
    requests = [BatchRequest(custom_id=str(i), method="POST", url=COMPLETIONS, body={}) for i in range(1000)]
    answers: list[dict[str, Any]] = []

    async def ask(self: BatchRunner, request: BatchRequest) -> dict[str, Any]:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        return {"status_code": 200}

    async def run() -> None:
        task = asyncio.ensure_future(BatchRunner(app, None, answers.append).run(iter(requests)))
        while len(answers) < 5:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    monkeypatch.setattr(BatchRunner, "_ask", ask)
    asyncio.run(run())
    assert 5 <= len(answers) < 50


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_between_lines(
    number: signal.Signals, capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rvllm.cli.batch import Progress

    write_answer = Progress.write

    def write_and_stop(progress: Progress, entry: dict[str, Any]) -> None:
        write_answer(progress, entry)
        if progress._num_answers == 5:
            os.kill(os.getpid(), number)

    write(Path("in.jsonl"), many(120))
    options = arguments(model, "-np", "2", "--seed", "5")
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "write", write_and_stop)
        run = Run(capsys, *options)
    assert run.status == 128 + number
    count = len(entries(Path("out.jsonl")))
    assert 5 <= count < 120
    assert run.err == f"rvllm: stopped: {count} of 120 requests answered, the same command goes on\n"
    assert Run(capsys, *options).status == 0
    assert len(bodies(Path("out.jsonl"))) == 120


def test_a_full_disk_is_one_line_and_leaves_whole_lines(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    write(Path("in.jsonl"), many(12))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        run = Run(capsys, *arguments(model))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    count = len(entries(Path("out.jsonl")))
    assert run.status == 1 and 0 < count < 12
    told = f"File too large; {count} of 12 requests answered, the same command goes on"
    assert run.err == f"rvllm: error: cannot write out.jsonl: {told}\n"
    assert Run(capsys, *arguments(model)).status == 0
    assert len(bodies(Path("out.jsonl"))) == 12


def test_a_torn_line_is_cut_off_wherever_it_ends(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    from rvllm.server.batch_file import OutputFile

    write(Path("in.jsonl"), [line("first"), line("second")])
    assert Run(capsys, *arguments(model)).status == 0
    whole = Path("out.jsonl").read_bytes()
    first = whole.index(b"\n") + 1
    for end in [*range(first, first + 20), *range(first + 20, len(whole), 50), len(whole) - 1]:
        Path("cut.jsonl").write_bytes(whole[:end])
        OutputFile(Path("cut.jsonl")).close()
        assert Path("cut.jsonl").read_bytes() == whole[:first]
    output = OutputFile(Path("out.jsonl"))
    output.close()
    assert output.answered == {"first", "second"} and Path("out.jsonl").read_bytes() == whole


def test_files_that_are_no_output_are_left_alone(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    write(Path("in.jsonl"), [line("one")])
    for content in (
        "my notes",
        "my notes\n",
        '{"id":"batch_req_1","custom_id":"one"}\n',
        json.dumps(line("x")) + "\n",
    ):
        Path("out.jsonl").write_text(content)
        Run(capsys, *arguments(model)).assert_refused("out.jsonl: line 1 is no line of a batch's output")
        assert Path("out.jsonl").read_text() == content
    Run(capsys, "batch", "in.jsonl", "in.jsonl").assert_refused("INPUT and OUTPUT are the same file")
    Run(capsys, "batch", "in.jsonl", "/dev/null").assert_refused("/dev/null: must be a file")
    source, sink = os.pipe()
    os.close(sink)
    Run(capsys, "batch", f"/dev/fd/{source}", "new.jsonl").assert_refused(
        "must be a file, which is read twice"
    )
    os.close(source)
    Run(capsys, "batch", "missing.jsonl", "new.jsonl").assert_refused("missing.jsonl: No such file")
    assert not Path("new.jsonl").exists()


def test_the_output_of_another_input_or_process_is_refused(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    write(Path("in.jsonl"), [line("one")])
    assert Run(capsys, *arguments(model)).status == 0
    with open("out.jsonl", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Run(capsys, *arguments(model)).assert_refused("out.jsonl: another process writes it")
    write(Path("in.jsonl"), [line("two")])
    Run(capsys, *arguments(model)).assert_refused("answers 1 requests that in.jsonl does not have", "'one'")


def test_an_engine_that_dies_leaves_its_requests_for_the_next_run(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rvllm.model_runner import ModelRunner

    write(Path("in.jsonl"), many(8))
    steps = ModelRunner.run
    num_calls = 0

    def fail(runner: ModelRunner, scheduled: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3 or num_calls > 60:
            raise RuntimeError("it is broken")
        return steps(runner, scheduled)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "run", fail)
        run = Run(capsys, *arguments(model, "-np", "2", "--seed", "5"))
    assert run.status == 2
    *_, last = run.err.splitlines()
    assert "the engine has failed: it is broken" in last and "of 8 requests answered" in last
    assert 0 < len(bodies(Path("out.jsonl"))) < 8  # also those of the step that failed once
    assert Run(capsys, *arguments(model, "-np", "2", "--seed", "5")).status == 0
    assert len(bodies(Path("out.jsonl"))) == 8


def test_a_request_whose_steps_fail_is_left_to_the_next_run(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rvllm.model_runner import ModelRunner

    write(Path("in.jsonl"), [line("poison", prompt="!" * 99), *(line(f"r{i}") for i in range(4))])
    steps = ModelRunner.run

    def fail(runner: ModelRunner, scheduled: Any) -> Any:
        if any(request.num_prompt_tokens >= 99 for request, _ in scheduled):
            raise RuntimeError("it is broken")
        return steps(runner, scheduled)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "run", fail)
        run = Run(capsys, *arguments(model, "-np", "1"))
    assert run.status == 1
    told = "4 of 5 requests answered, the steps of the others failed; the same command goes on"
    assert run.err.endswith(f"rvllm: error: {told}\n")
    assert bodies(Path("out.jsonl")).keys() == {"r0", "r1", "r2", "r3"}
    assert Run(capsys, *arguments(model)).status == 0
    assert len(bodies(Path("out.jsonl"))) == 5


def test_the_seed_of_a_request_comes_from_the_run_and_its_custom_id(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    def texts(seed: int, output: str) -> dict[str, str]:
        options = arguments(model, "--seed", str(seed))
        options[2] = output
        assert Run(capsys, *options).status == 0
        answers = {entry["custom_id"]: entry["response"]["body"] for entry in entries(Path(output))}
        return {custom_id: body["choices"][0]["text"] for custom_id, body in answers.items()}

    body = {"prompt": "Once", "max_tokens": 20, "ignore_eos": True, "temperature": 1}
    write(Path("in.jsonl"), [line("a", **body), line("b", **body), line("own", **body, seed=3)])
    first, second = texts(1, "first.jsonl"), texts(2, "second.jsonl")
    assert len({*first.values(), *second.values()}) == 5  # all but that with a seed of its own
    assert first["own"] == second["own"]
    write(Path("in.jsonl"), [line("own", **body, seed=3), line("b", **body), line("a", **body)])
    assert texts(1, "third.jsonl") == first
