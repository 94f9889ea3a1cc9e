"""Hooks of mkdocs: pages that are written elsewhere in the repository, and the reference of the command line.

README.md, CONTRIBUTING.md, CHANGELOG.md and examples/README.md are pages of the site as they are. The reference is made
from the parsers that `rvllm` itself uses, so it cannot tell of an option that does not exist.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "examples.md": "examples/README.md",
}


def on_files(files: Files, config: Any) -> Files:
    for name, source in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    name = page.file.src_uri
    if name in PAGES:
        names = {source: target for target, source in PAGES.items()}
        markdown = re.sub(r"\]\((?:\.\./)?docs/", "](", markdown)
        markdown = re.sub(r"\]\(([\w./]+)\)", lambda match: f"]({names.get(match[1], match[1])})", markdown)
    if name == "examples.md":
        sources = sorted((ROOT / "examples").glob("*.py"))
        markdown = re.sub(r"\[(\w+)\.py\]\(\1\.py\)", r"[\1.py](#\1py)", markdown)
        markdown += "".join(f"\n## {path.name}\n\n```python\n{path.read_text()}```\n" for path in sources)
    if name == "cli.md":
        markdown = markdown.replace("<!-- commands -->", "\n".join(commands()))
    return markdown


def commands() -> Iterator[str]:
    """A section for each command, with a table for each group of its options."""
    from rvllm.cli import COMMANDS, make_parser

    parsers = next(
        choices for action in make_parser()._actions if isinstance(choices := action.choices, dict)
    )
    for name in COMMANDS:
        parser = parsers[name]
        yield f"## rvllm {name}\n"
        yield f"{literals(parser.description or '')}\n"
        for group in parser._action_groups:
            rows = [row(action, parser) for action in group._group_actions if action.dest != "help"]
            if rows:
                title = group.title if group.title != "options" or len(parser._action_groups) > 3 else ""
                yield f"\n{(title or 'options').capitalize()}:\n\n| | |\n|---|---|"
                yield from rows
        yield ""


def row(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    value = "" if action.nargs == 0 else metavar(action)
    names = [f"`{option}{' ' + value if value and i == len(action.option_strings) - 1 else ''}`"
             for i, option in enumerate(action.option_strings)]  # fmt: skip
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    return f"| {', '.join(names) or f'`{value}`'} | {literals(text)} |".replace("\n", " ")


def metavar(action: argparse.Action) -> str:
    if action.choices is not None and action.metavar is None:
        return " \\| ".join(map(str, action.choices))
    name = action.metavar if action.metavar is not None else action.dest.upper()
    return f"{name} ..." if action.nargs in ("+", "*") else str(name)


def literals(text: str) -> str:
    """Text of a terminal as Markdown: options and what is braced are code, and nothing becomes a mark of its own."""
    parts = re.split(r"(`[^`]*`)", text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"(?<![\w-])--?[a-z][\w-]*|\{[^}]*\}", lambda match: f"`{match[0]}`", parts[i])
        parts[i] = re.sub(r"([<*|_])(?![^`]*`(?:[^`]*`[^`]*`)*[^`]*$)", r"\\\1", parts[i])
    return "".join(parts)
