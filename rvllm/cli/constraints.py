"""Arguments that say what an answer must look like, with llama.cpp's names."""

from __future__ import annotations

import argparse
import json

from rvllm.cli.arguments import read_text
from rvllm.cli.errors import CommandError, is_file, user_errors
from rvllm.structured_output import StructuredOutput


# fmt: off
def add_constraint_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("structured output").add_mutually_exclusive_group().add_argument
    add("-j", "--json-schema", metavar="JSON",
        help="answer in JSON that this schema describes, such as '{\"type\": \"object\"}'; a file's name will do")
    add("-jf", "--json-schema-file", metavar="FILE", help="the same, from a file")
    add("--grammar", metavar="TEXT", help="answer by a grammar, in GBNF or Lark; a file's name will do")
    add("--grammar-file", metavar="FILE", help="the same, from a file")
    add("--regex", metavar="REGEX", help="answer what the expression matches as a whole")
# fmt: on


def structured_output(args: argparse.Namespace) -> StructuredOutput | None:
    """What args ask for. Raises CommandError."""
    json_schema, grammar = args.json_schema, args.grammar
    if args.json_schema_file is not None or (json_schema is not None and is_file(json_schema)):
        json_schema = read_text(args.json_schema_file or json_schema)
    elif json_schema is not None and not json_schema.lstrip().startswith("{"):
        _check_json(json_schema)
    if args.grammar_file is not None or (grammar is not None and is_file(grammar)):
        grammar = read_text(args.grammar_file or grammar)
    if json_schema is None and grammar is None and args.regex is None:
        return None
    with user_errors():
        return StructuredOutput(json_schema=json_schema, grammar=grammar, regex=args.regex)


def _check_json(text: str) -> None:
    """Raises CommandError."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        raise CommandError(f"--json-schema {text!r:.200} is neither JSON nor a file") from None
