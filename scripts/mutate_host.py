"""Ways to break a line of Objective-C++ host code, for mutate_kernels.py: each function gives the broken lines.

What of them does not compile does not count, so they need not know the language well.
"""

from __future__ import annotations

import re
from itertools import pairwise

NAMED = r"MTL(?:ResourceStorageModeShared|GPUFamilyApple7|DataTypeBool|CommandBufferStatusError)|MPSDataTypeFloat\d\d"
OPENS, CLOSES = "([{", ")]}"


def mutate_call(line: str) -> list[str]:
    """A statement that is one call, or a pool, left out."""
    calls = re.finditer(
        r"(\[[^;{}]*\]|(?!fail|throw|return)[\w.:>-]+\([^;{}]*\)|const AutoreleasePool \w+);", line
    )
    return [
        line[: m.start()] + ";" + line[m.end() :]
        for m in calls
        if re.search(r"(^|[{);])\s*$", line[: m.start()])
    ]


def mutate_retain(line: str) -> list[str]:
    """A reference that is not taken, or one too many."""
    kept = [line[: m.start()] + line[m.end() :] for m in re.finditer(r"::retained(?=\(\[)", line)]
    made = re.finditer(r"(?<=[>\w]\()\[[^;]*(?:\bnew[A-Z]|alloc\])[^;]*\](?=\);|\)\.)", line)
    return kept + [f"{line[: m.start()]}[{m[0]} retain]{line[m.end() :]}" for m in made]


def arguments(line: str, start: int) -> list[tuple[int, int]]:
    """Where on the line the arguments behind the bracket at `start` begin and end."""
    found, begin, depth = [], start + 1, 0
    for i in range(start + 1, len(line)):
        if depth == 0 and line[i] in "," + CLOSES:
            found.append((begin, i))
            begin = i + 1
            if line[i] != ",":
                break
        depth += (line[i] in OPENS) - (line[i] in CLOSES)
    return found


def mutate_argument(line: str) -> list[str]:
    """Two neighbouring arguments of a call, or elements of a list, that change places."""
    mutants = []
    for start in (i for i, c in enumerate(line) if c in "({"):
        places = arguments(line, start)
        for (a, b), (c, d) in pairwise(places):
            first, second = line[a:b].strip(), line[c:d].strip()
            if first and second and first != second and not re.search(r"\bconst\b|^int|\"", first + second):
                gap = line[a : len(line[:b]) - len(line[a:b].lstrip())]
                mutants.append(f"{line[:a]}{gap}{second}, {first}{line[d:]}")
    return mutants


def mutate_number(line: str) -> list[str]:
    """A whole number that is one larger, or a name of the API that means another."""
    code = re.sub(r'"[^"]*"', lambda m: "_" * len(m[0]), line)
    found = [
        line[: m.start()] + str(int(m[0]) + 1) + line[m.end() :]
        for m in re.finditer(r"(?<![\w.])\d+(?![\w.])", code)
    ]
    named = re.finditer(rf"\b({NAMED})\b", line)
    return found + [f"{line[: m.start()]}decltype({m[0]})({m[0]} ^ 1){line[m.end() :]}" for m in named]


def mutate_flag(line: str) -> list[str]:
    """YES for NO, true for false, and a condition for its opposite."""
    opposite = {"YES": "NO", "NO": "YES", "true": "false", "false": "true"}
    flags = [
        line[: m.start()] + opposite[m[0]] + line[m.end() :]
        for m in re.finditer(r"\b(YES|NO|true|false)\b", line)
    ]
    for m in re.finditer(r"\bif \((?!const)", line):
        places = arguments(line.replace(",", " "), m.end() - 1)
        if places:
            begin, end = places[0]
            flags.append(f"{line[:begin]}!({line[begin:end]}){line[end:]}")
    return flags


HOST_KINDS = {
    "call": mutate_call,
    "retain": mutate_retain,
    "argument": mutate_argument,
    "number": mutate_number,
    "flag": mutate_flag,
}
