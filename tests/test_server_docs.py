"""docs/server.md knows every flag, route and field; tests/test_docs.py runs its commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_client import TinyServer, make_llm

from rvllm.cli import make_parser
from rvllm.server.app import BODIES

DOCS = Path(__file__).parents[1] / "docs" / "server.md"

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the docs are not beside the tests")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    server = TinyServer(make_llm(tmp_path_factory.mktemp("model")))
    yield server
    server.close()


def test_every_flag_route_and_field_is_there(server: TinyServer) -> None:
    text = DOCS.read_text()
    parser = next(
        choices["serve"] for action in make_parser()._actions if isinstance(choices := action.choices, dict)
    )
    engine = {"--tokenizer", "--device", "--dtype", "--isa", "--block-size", "--no-prefix-caching", "--help"}
    flags = {action.option_strings[-1] for action in parser._actions if action.option_strings}
    aliases = {
        "--ctx-size": "--max-model-len",
        "--parallel": "--max-num-seqs",
        "--batch-size": "--max-num-batched-tokens",
    }
    for flag in flags - engine - {"--threads"}:
        assert f"`{aliases.get(flag, flag)}" in text, flag
    for path in server.app.openapi()["paths"]:
        assert path in text, path
    for body in BODIES:
        for field in body.model_fields:
            assert re.search(rf"`[^`]*\b{field}\b[^`]*`", text), (body.__name__, field)
