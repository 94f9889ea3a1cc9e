"""Show what a model file holds, what its chats look like, what memory it needs, and what would run it here."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rvllm.cli.arguments import model_name
from rvllm.cli.errors import one_line, user_errors
from rvllm.cli.printer import use_utf8

if TYPE_CHECKING:
    from rvllm.gguf_file import GGUFFile

HELP = "show what a model file holds and needs, and what its chats look like"

KV_ELEMENT_SIZE = 2  # bytes of each number in the KV cache
MAX_ITEMS = 4  # shown of an array
MAX_CHARACTERS = 80  # shown of a string

SAMPLE_CHAT = (
    {"role": "system", "content": "You are a guide."},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hello. Where to?"},
    {"role": "user", "content": "How is the weather in Paris?"},
)
SAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_argument",
        nargs="?",
        metavar="MODEL",
        help="a GGUF file, or what `rvllm pull` takes (default: the default model)",
    )
    parser.add_argument("-m", "--model", help="the same as MODEL")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    model = model_name(args)
    with user_errors():
        from rvllm.gguf_file import GGUFFile
        from rvllm.models import resolve_model

        with GGUFFile(resolve_model(model)) as gguf:
            facts = {
                "file": str(gguf.path),
                "gguf_version": gguf.version,
                "metadata": {key: _shorten(value) for key, value in gguf.metadata.items()},
                "tensors": _tensors_by_type(gguf),
                "chat_template": _chat_template(gguf),
                "memory": _memory(gguf),
                "machine": _machine(),
            }
    use_utf8()
    print(json.dumps(facts, ensure_ascii=False, indent=2) if args.json else _text(facts))
    return 0


def _shorten(value: Any) -> Any:
    """A metadata value that fits on a line and into JSON."""
    import numpy as np

    if isinstance(value, str):
        return (
            value
            if len(value) <= MAX_CHARACTERS
            else f"{value[:MAX_CHARACTERS]}... ({len(value)} characters)"
        )
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has neither infinity nor NaN
    if isinstance(value, (list, np.ndarray)):
        items = [_shorten(item) for item in np.asarray(value[:MAX_ITEMS], dtype=object).tolist()]
        return items if len(value) <= MAX_ITEMS else [*items, f"... ({len(value)} in all)"]
    return value


def _tensors_by_type(gguf: GGUFFile) -> dict[str, dict[str, int]]:
    """Number and bytes of the tensors of each type, the largest share first."""
    types: dict[str, dict[str, int]] = {}
    for tensor in gguf.tensors.values():
        share = types.setdefault(tensor.type.name, {"tensors": 0, "bytes": 0})
        share["tensors"] += 1
        share["bytes"] += tensor.data.nbytes
    return dict(sorted(types.items(), key=lambda item: -item[1]["bytes"]))


def _chat_template(gguf: GGUFFile) -> dict[str, Any] | None:
    """What was found in the template, and the sample chat as the model sees it; the reason where it cannot be had.

    None where the file has no template.
    """
    from rvllm.chat_template import ChatTemplate
    from rvllm.reasoning_formats import find_reasoning
    from rvllm.tokenizer import Tokenizer
    from rvllm.tool_formats import find_format

    try:
        tokenizer = Tokenizer.from_gguf(gguf.metadata)
        template = ChatTemplate.from_gguf(gguf.metadata, tokenizer)
        if template is None:
            return None
        template.compile()
        ids = template.encode_chat(tokenizer, SAMPLE_CHAT)
        ids_with_tools = template.encode_chat(tokenizer, SAMPLE_CHAT, tools=[SAMPLE_TOOL])
    except ValueError as error:
        return {"error": one_line(error)}
    reasoning = find_reasoning(template.source)
    for_tools = template.for_tools.source
    return {
        "tool_format": find_format(for_tools).name,
        "knows_tools": "tools" in for_tools,
        "reasoning_format": None if reasoning is None else reasoning.name,
        "takes_system": template.takes_system,
        "sample": tokenizer.decode(ids, skip_special_tokens=False),
        "sample_with_tools": tokenizer.decode(ids_with_tools, skip_special_tokens=False),
    }


def _memory(gguf: GGUFFile) -> dict[str, Any]:
    """Bytes of weights and KV cache; the reason instead, where rvllm cannot run the model."""
    from rvllm import _core
    from rvllm.config import ModelConfig

    weights = {"weights": sum(tensor.data.nbytes for tensor in gguf.tensors.values())}
    try:
        config = ModelConfig.from_gguf(gguf)
    except ValueError as error:
        return {**weights, "error": one_line(error)}
    for tensor in gguf.tensors.values():
        if not _core.supports_type(tensor.type_id):
            return {**weights, "error": f"{tensor.name}: type {tensor.type.name} is not supported"}
    kv_per_token = 2 * KV_ELEMENT_SIZE * config.num_kv_heads * config.head_dim  # of one layer
    kept = [min(window or config.context_length, config.context_length) for _, window in config.layers]
    return {
        **weights,
        "kv_cache_per_token": kv_per_token * config.num_layers,
        "kv_cache_per_context": kv_per_token * sum(kept),
        "context_length": config.context_length,
    }


def _machine() -> dict[str, Any]:
    from rvllm import _core
    from rvllm.system import available_cpus, available_memory

    return {
        "isa": _core.detect_isa(),
        "available_isas": list(_core.available_isas()),
        "threads": available_cpus(),
        "free_memory": available_memory(),
    }


def _text(facts: Mapping[str, Any]) -> str:
    memory, machine = facts["memory"], facts["machine"]
    needs = {"weights": mib(memory["weights"])}
    if "error" in memory:
        needs["cannot run"] = memory["error"]
    else:
        needs["KV cache"] = f"{memory['kv_cache_per_token']} bytes a token"
        needs["full context"] = f"{mib(memory['kv_cache_per_context'])} for {memory['context_length']} tokens"
    return "\n".join(
        (
            *section("File", {"path": facts["file"], "GGUF version": facts["gguf_version"]}),
            *section("Metadata", facts["metadata"]),
            *section(
                "Tensors",
                {k: f"{v['tensors']} tensors, {mib(v['bytes'])}" for k, v in facts["tensors"].items()},
            ),
            *_chat_section(facts["chat_template"]),
            *section("Memory", needs),
            *section(
                "Machine",
                {
                    "ISA": f"{machine['isa']} (of {', '.join(machine['available_isas'])})",
                    "threads": machine["threads"],
                    "free memory": mib(machine["free_memory"]),
                },
            ),
        )
    )


def _chat_section(chat: Mapping[str, Any] | None) -> Iterator[str]:
    from rvllm.gguf_file import printable

    if chat is None or "error" in chat:
        yield from section(
            "Chat template", {"source": "none"} if chat is None else {"cannot be used": chat["error"]}
        )
        return
    told = "" if chat["knows_tools"] else "; the template knows no tools, so the system message tells of them"
    yield from section(
        "Chat template",
        {
            "tool calls": f"in the form {chat['tool_format']}{told}",
            "thoughts": "none"
            if chat["reasoning_format"] is None
            else f"in the form {chat['reasoning_format']}",
            "system message": "as such" if chat["takes_system"] else "within the first message of the user",
        },
    )
    for title, sample in (("a chat", chat["sample"]), ("a chat with a tool", chat["sample_with_tools"])):
        yield f"  {title}"
        yield from (f"  | {printable(line)}" for line in sample.split("\n"))


def section(title: str, entries: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a title and what is below it; other things than strings are shown as JSON."""
    from rvllm.gguf_file import printable

    yield title
    width = max(map(len, entries), default=0)
    for name, value in entries.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield f"  {printable(name):{width}}  {printable(text)}"


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
