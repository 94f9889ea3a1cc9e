"""The parser of a command: refuses what argparse would take apart, and tells what other engines' options are here."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from rvllm.cli.errors import CommandError, is_file

_ALWAYS = "it is always on: leave it out"
_NOT_NEEDED = "it is not needed: leave it out"
_GPU = "use --device cuda or --device metal"
_KV_CACHE = "use --kv-cache-dtype"

# Options of llama.cpp and vLLM, and what does the same here.
HINTS = {
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers"), _GPU),
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), "use -m hf:user/repo/file.gguf"),
    **dict.fromkeys(("-ctk", "-ctv", "--cache-type-k", "--cache-type-v"), _KV_CACHE),
    **dict.fromkeys(("-fa", "--flash-attn", "-cb", "--cont-batching"), _ALWAYS),
    **dict.fromkeys(("--enable-prefix-caching", "--enable-chunked-prefill"), _ALWAYS),
    **dict.fromkeys(("-cnv", "--conversation"), "use rvllm chat"),
    **dict.fromkeys(("-sys", "--system-prompt"), "use --system"),
    **dict.fromkeys(("-md", "-ub", "-tb", "--jinja", "--trust-remote-code"), _NOT_NEEDED),
    **dict.fromkeys(("--enable-auto-tool-choice", "--tool-call-parser"), _NOT_NEEDED),
    **dict.fromkeys(("-tp", "--tensor-parallel-size"), "it is not supported"),
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see {self.prog} --help)")


class CommandParser(Parser):
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Of the words behind the command; none may be left over."""
        words = list(args or ())
        self._check_short_options(words)
        parsed, extra = super().parse_known_args(words, namespace)
        if extra:
            self.error(f"unrecognized arguments: {' '.join(extra)}{self._hint(extra)}")
        return parsed, extra

    def _check_short_options(self, words: Sequence[str]) -> None:
        """argparse would take -hf for -h -f, and -ngl for -n gl."""
        for word in words:
            if word == "--":
                return
            name = word.partition("=")[0]
            if re.fullmatch("-[a-z][a-z-]+", name) and name not in self._option_string_actions:
                hint = HINTS.get(name)
                option = self._option_string_actions.get(name[:2])
                if hint is None and option is not None and option.nargs != 0 and option.type is not int:
                    hint = f"write {word[:2]} {word[2:]}, if that is meant"
                self.error(f"{name} is not an option{f': {hint}' if hint else ''}")

    def _hint(self, extra: Sequence[str]) -> str:
        for word in extra:
            name = word.partition("=")[0]
            if name in HINTS:
                return f"; {name}: {HINTS[name]}"
            if "-m" in self._option_string_actions and not word.startswith("-") and is_file(word):
                return f"; name the model with -m: -m {word}"
        return ""
