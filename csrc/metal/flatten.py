"""All kernels as one source, for a compiler at run time, which finds no headers: flatten.py > kernels.metal."""

from __future__ import annotations

import re
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent
_INCLUDE = re.compile(r'^#include "(?P<name>metal/\w+\.h)"$', re.MULTILINE)


def flatten() -> str:
    """The .metal files one after another, each header where it is first included."""
    seen: set[str] = set()

    def expand(path: Path) -> str:
        def include(match: re.Match[str]) -> str:
            if match["name"] in seen:
                return ""
            seen.add(match["name"])
            return expand(DIRECTORY.parent / match["name"])

        return _INCLUDE.sub(include, path.read_text().replace("#pragma once\n", ""))

    return "\n".join(expand(path) for path in sorted(DIRECTORY.glob("*.metal")))


if __name__ == "__main__":
    print(flatten(), end="")
