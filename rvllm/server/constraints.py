"""What an answer must look like, from the fields of four APIs: at most one of them may say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rvllm.server.errors import bad_request, from_value_error, unsupported
from rvllm.structured_output import StructuredOutput

if TYPE_CHECKING:
    from rvllm.server.chat_output import TurnFormat
    from rvllm.server.schemas import SamplingFields

_KINDS = ("json", "json_object", "regex", "choice", "grammar")  # of structured_outputs


def structured_output(
    body: SamplingFields,
    text_format: Mapping[str, Any] | None = None,
    field: str = "response_format",
    after: Sequence[str] = (),
) -> StructuredOutput | None:
    """Of text_format (the field that OpenAI's API has), structured_outputs, grammar and json_schema.

    after: the texts behind any of which the constraint begins. Raises APIError for more than one.
    """
    wanted: dict[str, dict[str, Any]] = {}  # arguments of StructuredOutput by the path of what asks for them
    if text_format is not None:
        wanted |= _format_arguments(field, text_format)
    if body.structured_outputs is not None:
        wanted |= _structured_outputs(body.structured_outputs)
    if body.grammar:
        wanted["grammar"] = {"grammar": body.grammar}
    if body.json_schema is not None:
        wanted["json_schema"] = {"json_schema": body.json_schema}
    if len(wanted) > 1:
        raise bad_request(f"{' and '.join(wanted)} exclude each other", list(wanted)[1])
    for name, arguments in wanted.items():
        try:
            return _named(body, name, StructuredOutput(**arguments, after=after or None))
        except ValueError as error:
            (argument,) = arguments
            message = from_value_error(error).message
            message = message if message.startswith(argument) else f"{argument}: {message}"
            raise bad_request(message, argument).renamed({argument: name}) from None
    return None


def turn_constraint(
    body: SamplingFields,
    turn: TurnFormat,
    text_format: Mapping[str, Any] | None,
    field: str = "response_format",
) -> StructuredOutput | None:
    """What a turn must look like, from its tools or from the other fields. Raises APIError for both.

    A call that is forced leaves no text for text_format, which OpenAI's clients send beside it.
    """
    wanted = structured_output(body, text_format, field, turn.after)
    if turn.calls is None:
        return wanted
    if structured_output(body, text_format if turn.calls.is_optional else None, field) is not None:
        raise bad_request(
            "a tool_choice that forces a call, and tools that are strict, exclude other constraints",
            "tools" if turn.calls.is_optional else "tool_choice",
        )
    return _named(body, "tools", turn.calls)


def _named(body: SamplingFields, name: str, output: StructuredOutput) -> StructuredOutput:
    """output, whose errors to come are to name what asks for it."""
    body.names.update(dict.fromkeys((output.kind, "structured_outputs"), name))
    return output


def _format_arguments(field: str, value: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Arguments of StructuredOutput by their path in OpenAI's response_format or text.format; none for plain text."""
    kind = value.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":  # llama.cpp takes a schema here
        schema = value.get("schema")
        return {f"{field}.schema": {"json_schema": schema}} if schema else {field: {"json_object": True}}
    if kind == "json_schema":
        inner = value.get("json_schema", value)
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        where = f"{field}.json_schema.schema" if "json_schema" in value else f"{field}.schema"
        if not isinstance(schema, (Mapping, bool)):
            raise bad_request(f"{where} must be a JSON schema", where)
        return {where: {"json_schema": schema}}
    message = f"{field}.type must be 'text', 'json_object' or 'json_schema', got {str(kind)[:50]!r}"
    raise bad_request(message, f"{field}.type")


def _structured_outputs(value: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The same of vLLM's field."""
    given = {name: item for name, item in value.items() if item is not None and not _is_off(name, item)}
    for name in given:
        if name not in _KINDS:
            raise unsupported(f"structured_outputs.{name}", f"use one of {', '.join(_KINDS)}")
    if len(given) > 1:
        raise bad_request(
            f"structured_outputs: {' and '.join(given)} exclude each other", "structured_outputs"
        )
    for name, item in given.items():
        if name == "choice":
            if not isinstance(item, list):
                raise bad_request(
                    "structured_outputs.choice must be a list of strings", "structured_outputs.choice"
                )
            item = tuple(item)
        return {f"structured_outputs.{name}": {"json_schema" if name == "json" else name: item}}
    return {}


def _is_off(name: str, item: object) -> bool:
    """Of vLLM's switches; a schema of false asks for something, namely the impossible."""
    return item is False and (name == "json_object" or name not in _KINDS)
