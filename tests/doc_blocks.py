"""Fenced blocks of a Markdown page, and what the comment before one says of it.

<!-- not run: needs a GPU -->        why the block cannot be run by the tests
<!-- file: requests.jsonl -->        the block is this file, which what follows on the page may read
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.M | re.S)
COMMENT = re.compile(r"<!-- (not run|file): (.+) -->\s*$")
LANGUAGES = {"sh", "python", "json", "text"}


@dataclass(frozen=True)
class Block:
    """line: of the page, where the code begins. not_run: the reason, or None. file: the name it is written to."""

    page: str
    line: int
    language: str
    code: str
    not_run: str | None = None
    file: str | None = None

    @property
    def is_run(self) -> bool:
        return self.not_run is None and self.file is None and self.language in ("sh", "python")

    @property
    def padded(self) -> str:
        """The code at its place in a file of its own: errors then name the lines of the page."""
        return "\n" * (self.line - 1) + self.code


def blocks_of(page: str, text: str) -> list[Block]:
    blocks = []
    for match in FENCE.finditer(text):
        before = text[: match.start()].rstrip()
        comment = COMMENT.search(before[before.rfind("\n") + 1 :])
        marks = {comment[1]: comment[2]} if comment else {}
        line = text.count("\n", 0, match.start(3)) + 1
        code = textwrap.dedent(match[3])
        blocks.append(Block(page, line, match[2], code, marks.get("not run"), marks.get("file")))
    return blocks


def indented_blocks(text: str) -> list[int]:
    """Lines at which code begins that is marked by four blanks alone, so that its language is not told."""
    found = []
    in_list, before = False, ""
    outside = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(outside.split("\n"), 1):
        if line[:1].strip():
            in_list = re.match(r"[-*] |\d+\. |=== ", line) is not None
        elif line.startswith("    ") and not before and not in_list:
            found.append(number)
        before = line.strip()
    return found
