"""Structured output and chat templates on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_gguf import write_tiny_model

from rvllm.cli import main

SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": false}'
GRAMMAR = 'root ::= ("ja" | "nein") "."\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path)
    return path


@pytest.fixture
def run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> object:
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text(SCHEMA, "utf-8")
    Path("g.gbnf").write_text(GRAMMAR, "utf-8")

    def generate(*argv: str) -> tuple[int, str, str]:
        status = main(["generate", "-m", str(model), "--num-blocks", "64", "-p", "x", *argv])
        out, err = capsys.readouterr()
        return status, out, err

    return generate


@pytest.mark.parametrize("argv", [["-j", SCHEMA], ["--json-schema", "schema.json"], ["-jf", "schema.json"]])
def test_json_schema(run, argv: list[str]) -> None:  # type: ignore[no-untyped-def]
    status, out, _ = run(*argv)
    assert status == 0
    assert json.loads(out)["a"] in (1, 22)


@pytest.mark.parametrize(
    "argv", [["--grammar", GRAMMAR], ["--grammar", "g.gbnf"], ["--grammar-file", "g.gbnf"]]
)
def test_grammar(run, argv: list[str]) -> None:  # type: ignore[no-untyped-def]
    assert run(*argv)[1] in ("ja.\n", "nein.\n")


def test_regex(run) -> None:  # type: ignore[no-untyped-def]
    assert run("--regex", "[ab]{3}")[1].strip("ab") == "\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--regex", "("], "prompt 1: regex: "),
        (["--grammar", "root ::= x"], "prompt 1: grammar: rule 'x' is not defined"),
        (["--grammar", "root ::= x" + "*" * 3000], "prompt 1: grammar, line 1: more than 100 repetitions"),
        (["-j", "{"], "json_schema is no JSON"),
        (["-j", "nofile.json"], "--json-schema 'nofile.json' is neither JSON nor a file"),
        (["-jf", "missing.json"], "missing.json: No such file"),
        (["--chat-template", "chatml"], "--chat-template needs --chat"),
        (["--chat", "--chat-template", "nope"], "chat template 'nope' is neither a file nor one of chatml"),
    ],
)
def test_mistakes(run, argv: list[str], message: str) -> None:  # type: ignore[no-untyped-def]
    status, out, err = run(*argv)
    assert status == 2 and out.strip() == ""
    assert message in err and err.count("\n") == 1


def test_a_template_by_name(run) -> None:  # type: ignore[no-untyped-def]
    assert run("--chat", "--chat-template", "chatml", "--regex", "ok")[:2] == (0, "ok\n")
