"""`rvllm info`: what a file holds and needs, and what its chats look like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_run import Run
from tiny_gguf import write_tiny_model

from rvllm import LLM

TEMPLATES = Path(__file__).parent / "data" / "chat_templates"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path, metadata={"tokenizer.chat_template": TEMPLATE})
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, num_blocks=64)


def test_info(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    run = Run(capsys, "info", str(model))
    assert (run.status, run.err) == (0, "")
    for text in (
        str(model),
        "general.architecture",
        "llama",
        "F32",
        "weights",
        "a token",
        "scalar",
        "260 in all",
    ):
        assert text in run.out
    assert max(map(len, run.out.splitlines())) < 200


def test_info_json(capsys: pytest.CaptureFixture[str], model: Path, llm: LLM) -> None:
    facts = json.loads(Run(capsys, "info", "--json", str(model)).out)
    assert facts["metadata"]["general.architecture"] == "llama"
    assert facts["metadata"]["tokenizer.ggml.tokens"][-1] == "... (260 in all)"
    weights = sum(share["bytes"] for share in facts["tensors"].values())
    assert facts["memory"]["weights"] == weights
    runner = llm.engine.runner
    assert facts["memory"]["kv_cache_per_token"] * runner.block_size == runner.kv_bytes_per_block  # type: ignore[attr-defined]
    assert facts["memory"]["kv_cache_per_context"] == 512 * facts["memory"]["kv_cache_per_token"]
    assert facts["machine"]["isa"] in facts["machine"]["available_isas"]


def test_the_model_may_be_an_option(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    expected = json.loads(Run(capsys, "info", str(model), "--json").out)["file"]
    assert json.loads(Run(capsys, "info", "-m", str(model), "--json").out)["file"] == expected
    Run(capsys, "info", str(model), "-m", str(model)).assert_refused("MODEL and --model")


def test_info_counts_what_windows_keep(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny.gguf", "gemma3", layers=7, sliding_window=24)
    memory = json.loads(Run(capsys, "info", "--json", str(tmp_path / "tiny.gguf")).out)["memory"]
    assert memory["kv_cache_per_context"] == memory["kv_cache_per_token"] // 7 * (512 + 6 * 24)


def write_chat_model(path: Path, template: str) -> Path:
    write_tiny_model(path, metadata={"tokenizer.chat_template": template})
    return path


def test_info_shows_a_chat(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_chat_model(tmp_path / "chat.gguf", (TEMPLATES / "qwen3.jinja").read_text("utf-8"))
    chat = json.loads(Run(capsys, "info", "--json", str(path)).out)["chat_template"]
    assert (chat["tool_format"], chat["reasoning_format"]) == ("hermes", "think")
    assert chat["knows_tools"] and chat["takes_system"]
    expected = "<|im_start|>system\nYou are a guide.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n"
    assert chat["sample"].startswith(expected) and chat["sample"].endswith("<|im_start|>assistant\n")
    assert "get_weather" in chat["sample_with_tools"] and "get_weather" not in chat["sample"]
    out = Run(capsys, "info", str(path)).out
    for line in (
        "in the form hermes",
        "in the form think",
        "  | You are a guide.<|im_end|>",
        "  a chat with a tool",
    ):
        assert f"{line}\n" in out

    path = write_chat_model(tmp_path / "old.gguf", (TEMPLATES / "gemma2.jinja").read_text("utf-8"))
    out = Run(capsys, "info", str(path)).out
    assert "the template knows no tools" in out and "within the first message of the user" in out
    assert "  | You are a guide." in out


def test_info_on_a_broken_template_or_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = Run(capsys, "info", str(write_chat_model(tmp_path / "broken.gguf", "{% if %}\x1b")))
    assert run.status == 0 and "cannot be used  chat template, line 1: Expected an expression" in run.out
    assert "Memory\n" in run.out and "\x1b" not in run.out
    write_tiny_model(tmp_path / "none.gguf")
    assert json.loads(Run(capsys, "info", "--json", str(tmp_path / "none.gguf")).out)["chat_template"] is None
    assert "Chat template\n  source  none\n" in Run(capsys, "info", str(tmp_path / "none.gguf")).out


def test_info_on_a_model_that_cannot_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    write_tiny_model(path, metadata={"general.architecture": "nope", "general.name": "two\nlines \x1b[31m"})
    run = Run(capsys, "info", str(path))
    assert run.status == 0
    assert "cannot run" in run.out and "'nope'" in run.out
    assert "\x1b" not in run.out and r"two\nlines \x1b[31m" in run.out
