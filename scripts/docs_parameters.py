"""An extension of griffe: parameters that a docstring describes as `name: meaning` become a list of the page."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Parameters(griffe.Extension):
    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        init = cls.members.get("__init__")
        names = {name for name, member in cls.members.items() if member.is_attribute or member.is_function}
        if isinstance(init, griffe.Function):
            names |= {parameter.name for parameter in init.parameters}
        itemize(cls, names)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        itemize(func, {parameter.name for parameter in func.parameters})


def itemize(documented: griffe.Object, names: set[str]) -> None:
    """Begins an item where one or several of the names stand before a colon, at the start of a sentence."""
    names.discard("self")
    if documented.docstring is None or not names:
        return
    name = rf"\b(?:{'|'.join(map(re.escape, sorted(names)))})\b(?: \([^)]*\))?"
    start = re.compile(rf"(?:^|(?<=[.;] ))({name}(?:, {name})*): ")
    paragraphs = []
    for paragraph in documented.docstring.value.split("\n\n"):
        text = " ".join(line.strip() for line in paragraph.split("\n"))
        before, *items = start.split(text)
        pieces = [before.strip()] if before.strip() else []
        listed = ""
        for described, meaning in zip(items[::2], items[1::2], strict=True):
            meaning, raises, rest = meaning.partition(" Raises ")
            listed += f"- **{described}**: {meaning.strip()}\n"
            if raises:
                pieces += [listed, f"Raises {rest}"]
                listed = ""
        paragraphs += [*pieces, listed] if listed else pieces
    documented.docstring.value = "\n\n".join(paragraphs)
