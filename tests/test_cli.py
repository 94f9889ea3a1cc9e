"""The command line: output that pipes, one line for each of the user's mistakes, exit statuses."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from cli_run import Run
from tiny_gguf import write_tiny_model

from rvllm import LLM, SamplingParams, __version__
from rvllm.cli import main
from rvllm.cli.arguments import size
from rvllm.model_runner import ModelRunner
from rvllm.request import Request, SampledToken

pytestmark = pytest.mark.usefixtures("elsewhere")

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path, metadata={"tokenizer.chat_template": TEMPLATE})
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, num_blocks=64)


def text_of(llm: LLM, prompt: str, **params: object) -> str:
    """What the command is to print: greedy by default."""
    settings = {"temperature": 0, "max_tokens": 8, **params}
    return llm.generate(prompt, SamplingParams(**settings))[0].outputs[0].text  # type: ignore[arg-type]


Generate: TypeAlias = Callable[..., Run]


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str], model: Path) -> Generate:
    return lambda *argv: Run(capsys, "generate", "-m", str(model), "-n", "8", "--num-blocks", "64", *argv)


# Output


def test_completions_alone_in_the_order_of_the_prompts(generate: Generate, llm: LLM) -> None:
    run = generate("-p", "one", "-p", "two", "--arrival-step", "5", "0")
    assert (run.status, run.err) == (0, "")
    assert run.out == f"{text_of(llm, 'one')}\n{text_of(llm, 'two')}\n"


@pytest.mark.parametrize("steps", [["0"], ["3"], ["4", "0", "2"]])
def test_stream_prints_the_same(generate: Generate, llm: LLM, steps: list[str]) -> None:
    prompts = ["one", "two", "three"]
    run = generate("--stream", *(word for p in prompts for word in ("-p", p)), "--arrival-step", *steps)
    assert run.out == "".join(f"{text_of(llm, prompt)}\n" for prompt in prompts)


def test_json_lines(generate: Generate, llm: LLM) -> None:
    run = generate("--json", "-p", "häh", "-p", "two", "--logprobs", "2", "--stop", "zzzz")
    lines = [json.loads(line) for line in run.out.splitlines()]
    assert [line["prompt"] for line in lines] == ["häh", "two"]
    assert lines[0]["prompt_token_ids"] == list("häh".encode())
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
    for line, output in zip(lines, llm.generate(["häh", "two"], params), strict=True):
        completion = output.outputs[0]
        assert (line["text"], line["token_ids"]) == (completion.text, completion.token_ids)
        assert (line["finish_reason"], line["stop_reason"]) == (
            completion.finish_reason,
            completion.stop_reason,
        )
        assert completion.logprobs is not None
        assert line["logprobs"] == [
            {
                str(i): {"logprob": e.logprob, "rank": e.rank, "decoded_token": e.decoded_token}
                for i, e in entry.items()
            }
            for entry in completion.logprobs
        ]
    assert "logprobs" not in json.loads(generate("--json", "-p", "two").out)


def test_debug_reports_on_standard_error(generate: Generate) -> None:
    run = generate("--debug", "--ignore-eos", "-p", "x" * 20, "-p", "x" * 20)
    assert run.status == 0
    lines = dict(line.split(": ", 1) for line in run.err.splitlines())
    assert lines["prompts"] == "2 run, 0 refused"
    assert lines["prefix cache"] == "16 of 40 prompt tokens found, 40.0 %"
    assert lines["blocks"].startswith("3 allocated")
    assert (lines["preemptions"], lines["steps"]) == ("0", "8")
    assert lines["prefill"].startswith("24 tokens, ") and lines["decode"].startswith("14 tokens, ")


# Prompts


def test_files_and_standard_input(
    generate: Generate, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a b").write_bytes(b"\xef\xbb\xbffrom a file\r\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("from über\n\n".encode())))
    run = generate("--json", "-f", str(tmp_path / "a b"), "-p", "text", "-p", "-")
    prompts = [json.loads(line)["prompt"] for line in run.out.splitlines()]
    assert prompts == ["from a file", "text", "from über\n"]


def test_bad_prompts_are_named_and_the_others_run(generate: Generate, llm: LLM) -> None:
    argv = ["-p", "one", "-p", "", "-p", "x" * 600, "-p", "two"]
    run = generate(*argv)
    assert run.status == 2
    assert run.out == f"{text_of(llm, 'one')}\n{text_of(llm, 'two')}\n"
    errors = run.err.splitlines()
    assert len(errors) == 2
    assert errors[0].startswith("rvllm: error: prompt 2: the prompt is empty")
    assert errors[1].startswith("rvllm: error: prompt 3: ") and "600 tokens" in errors[1]
    run = generate("--json", *argv)
    lines = [json.loads(line) for line in run.out.splitlines()]
    assert run.status == 2
    assert ["error" in line for line in lines] == [False, True, True, False]
    assert lines[1] == {"prompt": "", "error": "the prompt is empty: it has no tokens"}
    assert generate("--stream", *argv).out == f"{text_of(llm, 'one')}\n{text_of(llm, 'two')}\n"


def test_request_larger_than_the_pool_is_refused_and_others_run(generate: Generate, llm: LLM) -> None:
    run = generate("-p", "x" * 200, "-p", "one", "--num-blocks", "4")
    assert (run.status, run.out) == (2, f"{text_of(llm, 'one')}\n")
    assert "prompt 1: " in run.err and "13 KV-cache blocks, 4 are available" in run.err


def test_step_that_fails_is_one_line(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(runner: ModelRunner, scheduled: object) -> None:
        raise RuntimeError("the device is\ngone")

    monkeypatch.setattr(ModelRunner, "run", fail)
    run = generate("-p", "a", "-p", "b")
    assert (run.status, run.out, run.err) == (1, "", "rvllm: error: the device is gone\n")


def test_answer_that_fails_is_reported(generate: Generate, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    run_step = ModelRunner.run

    def spoil(runner: ModelRunner, scheduled: list[tuple[Request, int]]) -> list[SampledToken]:
        tokens = run_step(runner, scheduled)
        sampling = [r for r, count in scheduled if r.num_computed_tokens + count == r.num_tokens]
        return [
            SampledToken(-1, error="no finite logits") if request.request_id == "0" else token
            for request, token in zip(sampling, tokens, strict=True)
        ]

    monkeypatch.setattr(ModelRunner, "run", spoil)
    run = generate("-p", "a", "-p", "b", "--json")
    assert (run.status, run.err) == (1, "rvllm: error: prompt 1: no finite logits\n")
    bad, good = map(json.loads, run.out.splitlines())
    assert (bad["finish_reason"], bad["error"]) == ("error", "no finite logits")
    assert good["text"] == text_of(llm, "b") and "error" not in good


def test_chat(generate: Generate, llm: LLM) -> None:
    run = generate("--json", "--chat", "--system", "be brief", "-p", "hi")
    line = json.loads(run.out)
    assert line["prompt"] == "hi"
    assert bytes(line["prompt_token_ids"]).decode() == "<system>be brief\n<user>hi\n"


def test_chat_without_a_template(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "base.gguf")
    Run(capsys, "generate", "-m", str(tmp_path / "base.gguf"), "--chat", "-p", "hi").assert_refused(
        "chat template"
    )


# Options


@pytest.mark.parametrize(
    ("argv", "params"),
    [
        (["--temp", "0.7", "-s", "5"], {"temperature": 0.7, "seed": 5}),
        (
            ["--temperature", "1", "--seed", "5", "--top-p", "0.5"],
            {"temperature": 1, "seed": 5, "top_p": 0.5},
        ),
        (["--temp", "2", "-s", "1", "--top-k", "3"], {"temperature": 2, "seed": 1, "top_k": 3}),
        (["--temp", "2", "-s", "1", "--min-p", "0.2"], {"temperature": 2, "seed": 1, "min_p": 0.2}),
        (["--repeat-penalty", "1.5"], {"repetition_penalty": 1.5}),
        (["--repetition-penalty", "1.5"], {"repetition_penalty": 1.5}),
        (["--presence-penalty", "1.5"], {"presence_penalty": 1.5}),
        (["--frequency-penalty", "1.5"], {"frequency_penalty": 1.5}),
        (["--ignore-eos", "--n-predict", "40"], {"ignore_eos": True, "max_tokens": 40}),
        (["--max-tokens", "3"], {"max_tokens": 3}),
    ],
)
def test_sampling_options(generate: Generate, llm: LLM, argv: list[str], params: dict[str, object]) -> None:
    assert generate("-p", "some words", *argv).out == text_of(llm, "some words", **params) + "\n"


def test_stop_option(generate: Generate, llm: LLM) -> None:
    whole = text_of(llm, "some words", max_tokens=30, ignore_eos=True)
    stops = [whole[6:8], whole[9:11]]
    expected = text_of(llm, "some words", max_tokens=30, ignore_eos=True, stop=stops)
    assert len(expected) < len(whole)
    run = generate("-p", "some words", "-n", "30", "--ignore-eos", "--stop", stops[1], "--stop", stops[0])
    assert run.out == expected + "\n"


def test_engine_options(generate: Generate, llm: LLM) -> None:
    expected = text_of(llm, "some words") + "\n"
    for argv in (
        ["--isa", "scalar"],
        ["-t", "1"],
        ["--block-size", "4", "--num-blocks", "32"],
        ["-c", "64"],
        ["-c", "0"],
        ["--ctx-size", "64", "-np", "2", "-b", "3"],
        ["--max-num-seqs", "2", "--max-num-batched-tokens", "3", "--no-prefix-caching"],
        ["--kv-cache-memory", "1M"],
        ["--device", "cpu"],
    ):
        run = generate("-p", "some words", *argv)
        assert (run.status, run.out) == (0, expected), argv


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-n", "-2"], ["max_tokens", "-2"]),
        (["-n", "x"], ["-n", "'x'"]),
        (["--temperature", "-1"], ["temperature"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--top-p", "1.5"], ["top_p", "1.5"]),
        (["--stop", ""], ["stop"]),
        (["--bogus"], ["--bogus"]),
        (["--max-tok", "3"], ["--max-tok"]),
        (["--json", "--stream"], ["--stream", "--json"]),
        (["--system", "x"], ["--system", "--chat"]),
        (["--arrival-step", "1", "2"], ["2 numbers for 1 prompts"]),
        (["--kv-cache-memory", "lots"], ["'lots'", "512M"]),
        (["--kv-cache-memory", "10", "--num-blocks", "0"], ["num_blocks", "0"]),
        (["--block-size", "0"], ["block_size", "0"]),
        (["-c", "100000"], ["max_model_len", "100000", "512"]),
        (["-t", "0"], ["num_threads", "0"]),
        (["--device", "gpu"], ["gpu"]),
        (["--isa", "mmx"], ["mmx"]),
        (["--tokenizer", "/nowhere/tokenizer.json"], ["/nowhere/tokenizer.json"]),
        (["-f", "/nowhere/prompt.txt"], ["/nowhere/prompt.txt", "No such file"]),
        (["-f", "/"], ["/: "]),
        (["-m", "/nowhere/model.gguf"], ["/nowhere/model.gguf"]),
        (["-p", "-", "-f", "-"], ["standard input", "once"]),
    ],
)
def test_mistakes(generate: Generate, argv: list[str], words: list[str]) -> None:
    generate("-p", "hi", *argv).assert_refused(*words)


def test_warning_has_the_form_of_an_error(model: Path) -> None:
    argv = command("generate", "-m", str(model), "--num-blocks", "8", "-t", "1000", "-n", "1", "-p", "hi")
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("rvllm: warning: num_threads 1000 ") and done.stderr.count("\n") == 1


def test_negative_arrival_step_is_the_prompts_error(generate: Generate) -> None:
    run = generate("-p", "hi", "--arrival-step", "-1")
    assert run.status == 2 and "arrival_step" in run.err


def test_damaged_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    cut, binary = tmp_path / "cut.gguf", tmp_path / "prompt"
    cut.write_bytes(model.read_bytes()[:20_000])
    binary.write_bytes(b"ab\xff")
    Run(capsys, "generate", "-m", str(cut), "-p", "hi").assert_refused(str(cut))
    Run(capsys, "info", str(cut)).assert_refused(str(cut))
    Run(capsys, "generate", "-m", str(model), "-f", str(binary)).assert_refused(
        str(binary), "byte 2", "UTF-8"
    )


def test_no_prompt_no_command_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    Run(capsys, "generate").assert_refused("no prompt")
    Run(capsys).assert_refused("COMMAND")
    Run(capsys, "frobnicate").assert_refused("frobnicate")
    Run(capsys, "pull", "frobnicate").assert_refused("frobnicate")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000", 1000),
        ("512M", 2**29),
        ("2G", 2**31),
        ("1.5k", 1536),
        ("2GiB", 2**31),
        ("2gb", 2**31),
        ("1T", 2**40),
    ],
)
def test_size(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "M", "-1", "1X", "1 2", "0x10", "nan"])
def test_bad_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        size(text)


# As a process


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "rvllm", *argv]


def test_version_and_help() -> None:
    done = subprocess.run(command("--version"), capture_output=True, text=True, check=True)
    assert done.stdout == f"rvllm {__version__}\n"
    for argv in (["--help"], ["generate", "--help"], ["info", "--help"], ["pull", "--help"]):
        assert (
            "usage: rvllm"
            in subprocess.run(command(*argv), capture_output=True, text=True, check=True).stdout
        )


def test_a_word_that_several_commands_begin_with_has_help_and_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["ray", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0 and {line.split()[0] for line in lines if line.startswith("    ")} >= {
        "batch",
        "serve",
    }
    for argv in (["ray"], ["ray", "nope"]):
        run = Run(capsys, *argv)
        assert run.status == 2 and run.err.endswith("(see rvllm ray --help)\n")


def test_help_imports_nothing_slow() -> None:
    code = "import sys, rvllm.cli; print(*sorted(sys.modules))"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"numpy", "rich", "jinja2", "tokenizers", "huggingface_hub", "rvllm._core", "psutil"} & set(
        modules
    )


def test_generate_imports_neither_rich_nor_jinja(model: Path) -> None:
    code = (
        "import sys\nfrom rvllm.cli import main\n"
        f"main(['generate', '-m', {str(model)!r}, '-n', '1', '-p', 'a', '--num-blocks', '8'])\n"
        "print(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"rich", "jinja2", "huggingface_hub"} & set(done.stdout.split())


def much_output(model: Path) -> list[str]:
    """A command that writes more than a pipe holds, so that it cannot end before its reader acts."""
    prompts = [word for i in range(500) for word in ("-p", f"prompt {i}")]
    return command(
        "generate", "-m", str(model), "--stream", "--ignore-eos", "-n", "400", "-np", "1", *prompts
    )


def test_closed_pipe_is_quiet(model: Path) -> None:
    argv = much_output(model)
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141


def test_interrupt_is_quiet(model: Path) -> None:
    argv = much_output(model)
    process = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell starts what it runs in the background with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    assert process.stderr.read() == b""
    assert process.wait(60) == 130


def test_bytes_that_are_no_text(model: Path) -> None:
    argv = command("generate", "-m", str(model), "--json", "-n", "1", "-p")
    done = subprocess.run([os.fsencode(word) for word in argv] + [b"a\xff"], capture_output=True)
    assert done.returncode == 2
    assert json.loads(done.stdout)["prompt"] == "a\udcff"
    assert done.stderr.startswith(b"rvllm: error: prompt 1: ") and done.stderr.count(b"\n") == 1


def test_locale_does_not_matter(model: Path) -> None:
    argv = command("generate", "-m", str(model), "--json", "-n", "30", "--ignore-eos", "-p", "häh")
    outputs = [
        subprocess.run(argv, capture_output=True, check=True, env={**os.environ, "LC_ALL": locale}).stdout
        for locale in ("C", "C.UTF-8")
    ]
    assert outputs[0] == outputs[1]
    assert json.loads(outputs[0])["prompt"] == "häh"


@pytest.mark.parametrize("prompt", ["-hello", "---", "-n"])
def test_prompt_may_begin_with_a_dash(
    model: Path, llm: LLM, capsys: pytest.CaptureFixture[str], prompt: str
) -> None:
    run = Run(capsys, "generate", "-m", str(model), "-n", "8", "-p", prompt)
    assert (run.status, run.out) == (0, text_of(llm, prompt) + "\n")


def test_options_that_change_nothing_are_named(
    model: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    Run(
        capsys,
        "generate",
        "-m",
        str(model),
        "-n",
        "1",
        "-p",
        "a",
        "--top-k",
        "5",
        "--seed",
        "3",
        "--logprobs",
        "1",
    )
    assert [record.message for record in caplog.records] == [
        "--top-k changes nothing at temperature 0",
        "--seed changes nothing at temperature 0",
        "--logprobs is only printed with --json",
    ]


def test_full_disk_is_one_line(model: Path) -> None:
    with open("/dev/full", "wb") as full:
        argv = command("generate", "-m", str(model), "-n", "1", "-p", "a")
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "rvllm: error: cannot write the output: No space left on device\n"
