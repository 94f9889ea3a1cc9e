"""What users of other engines write, and what surrounds a command: options it lacks, no limits, closed input."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_run import Run
from tiny_gguf import write_tiny_model

from rvllm import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path)
    return path


def text_of(model: Path, max_tokens: int | None, ignore_eos: bool = False) -> str:
    """The answer to "a"."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
    return LLM(model, num_blocks=64).generate("a", params)[0].outputs[0].text


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        (["-ngl", "99"], ["-ngl is not an option: use --device cuda"]),
        (["-hf", "a/b"], ["-hf is not an option: use -m hf:user/repo/file.gguf"]),
        (["-ctk", "q8_0"], ["-ctk ", "--kv-cache-dtype"]),
        (["-fa"], ["-fa ", "always on"]),
        (["-cnv"], ["-cnv ", "rvllm chat"]),
        (["-sys", "x"], ["-sys ", "--system"]),
        (["-md", "x"], ["-md ", "not needed"]),
        (["-zz=x"], ["-zz is not an option (see rvllm generate --help)"]),
        (["-pro"], ["write -p ro"]),
        (
            ["--enable-prefix-caching"],
            ["--enable-prefix-caching: it is always on", "see rvllm generate --help"],
        ),
        (["--tensor-parallel-size=2"], ["--tensor-parallel-size: it is not supported"]),
        (["stray"], ["unrecognized arguments: stray (see rvllm generate --help)"]),
        ([__file__], [f"name the model with -m: -m {__file__}"]),
    ],
)
def test_options_of_other_engines(
    capsys: pytest.CaptureFixture[str], words: list[str], hints: list[str]
) -> None:
    Run(capsys, "generate", "-p", "x", *words).assert_refused(*hints)


def test_values_may_touch_short_options(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, "generate", "-m", str(model), "--num-blocks=64", "-p", "a", "-n4", "-t1", "-s=3")
    assert run.out == text_of(model, 4) + "\n"


def test_no_limit(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("-m", str(model), "--num-blocks", "64", "-p", "a", "--ignore-eos", "-n", "-1", "-c", "0")
    assert Run(capsys, "generate", *argv).out == text_of(model, None, ignore_eos=True) + "\n"


def test_closed_standard_input_is_empty(model: Path) -> None:
    argv = [sys.executable, "-m", "rvllm", "generate", "-m", str(model), "-n", "8", "--num-blocks", "64"]
    shell = ["sh", "-c", 'exec "$@" <&-', "sh", *argv, "-p", "a", "-p", "-"]
    done = subprocess.run(shell, capture_output=True, text=True)
    assert done.stdout.startswith(text_of(model, 8) + "\n") and "Traceback" not in done.stderr


INTERRUPTED = """import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "rvllm.cli.bench":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
runpy.run_module("rvllm", run_name="__main__")"""


def test_interrupt_while_modules_are_imported_is_quiet() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        capture_output=True,
        text=True,
        # A shell starts what it runs in the background with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")  # 130 to a shell
