"""The chat templates of model families, what they are found to be, and chats to render with them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vocabularies import bpe_metadata

from rvllm.chat_template import ChatTemplate
from rvllm.tokenizer import Tokenizer
from rvllm.vocabulary import TokenType

FOLDER = Path(__file__).parent / "data" / "chat_templates"


class Family(NamedTuple):
    """What a template is found to be. refuses: kinds of chats that it raises an error for, with Hugging Face too."""

    tool_format: str = "hermes"
    reasoning: str | None = None
    refuses: tuple[str, ...] = ()


ALTERNATE = ("tools",)  # it knows no role but user and assistant, perhaps system, and these in turn
FAMILIES = {
    "command-r7b": Family("cohere", "cohere"),
    "deepseek-r1-distill-llama": Family("deepseek", "think"),
    "deepseek-r1-distill-qwen": Family("deepseek", "think"),
    "exaone3.5": Family(),
    "falcon3": Family(),
    "gemma": Family(refuses=("system", *ALTERNATE)),
    "gemma2": Family(refuses=("system", *ALTERNATE)),
    "gemma3": Family(refuses=ALTERNATE),
    "glm4.6": Family("glm", "think"),
    "gpt-oss": Family("harmony", "harmony"),
    "granite3.0": Family("granite"),
    "granite3.3": Family("granite", "granite"),
    "granite4.0": Family(),
    "internlm2": Family(),
    "llama2": Family(refuses=ALTERNATE),
    "llama3": Family(),
    "llama3.1": Family("llama3"),
    "llama3.2": Family("llama3"),
    "minimax-m2": Family("minimax", "think"),
    "ministral3-reasoning": Family("mistral", "mistral"),
    "mistral-nemo": Family("mistral"),
    "mistral-small3.2": Family("mistral"),
    "mistral-v1": Family(refuses=ALTERNATE),
    "mistral-v3": Family("mistral"),
    "mistral-v7": Family(refuses=ALTERNATE),
    "olmo2": Family(),
    "phi3": Family(),
    "phi3.5": Family(),
    "phi4": Family(),
    "phi4-mini": Family("phi4"),
    "qwen2.5": Family(),
    "qwen3": Family(reasoning="think"),
    "qwen3-coder": Family("qwen3_coder"),
    "seed-oss": Family("seed_oss", "seed"),
    "smollm2": Family(),
    "smollm3": Family(reasoning="think"),
    "stablelm-zephyr": Family(),
    "starcoder2-instruct": Family(refuses=("system",)),
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where"}},
    "required": ["city"],
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMA},
}
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich"}},
}
USER = {"role": "user", "content": "How is it?"}
CALL_TURN = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": '{"degrees": 7}'}
CHATS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [USER]},
    "turns": {
        "messages": [USER, {"role": "assistant", "content": " Fine. "}, {"role": "user", "content": "And now?\n"}]
    },
    "system": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    "reasoning": {
        "messages": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFine."}, USER],
        "enable_thinking": True,
    },
    "no thinking": {"messages": [USER], "enable_thinking": False},
    "only told of tools": {"messages": [USER], "tools": [TOOL]},
    "tools": {"messages": [USER, CALL_TURN, RESULT], "tools": [TOOL]},
}  # fmt: skip
BOS, EOS = "<s>", "</s>"


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate((FOLDER / f"{name}.jinja").read_text("utf-8"), BOS, EOS)


CONTROL_TEXT = re.compile(
    r"<[|\uff5c][\w\u2581]+[|\uff5c]>|\[/?[A-Z_]+\]|</?(?:start|end)_of_turn>|<</?SYS>>|\[\|\w+\|\]"
    r"|</?seed:\w+>|\[gMASK\]|<sop>|\]~!b\[|\]~b\]|\[e~\["
)


@cache
def tokenizer_of(name: str) -> Tokenizer:
    """A byte-level tokenizer with the control tokens that the template speaks of."""
    texts = dict.fromkeys([BOS, EOS, *CONTROL_TEXT.findall(template_of(name).source)])
    metadata = bpe_metadata()
    tokens: Any = metadata["tokenizer.ggml.tokens"]
    new = [text for text in texts if text not in tokens]
    metadata["tokenizer.ggml.token_type"] = [
        *metadata["tokenizer.ggml.token_type"],
        *[TokenType.CONTROL] * len(new),
    ]  # type: ignore[misc]
    tokens += new
    return Tokenizer.from_gguf(metadata)


# What the models write

SPLIT = "<\uff5ctool\u2581sep\uff5c>"
CALLS_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>"
CALLS_END = "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>"
ARGUMENTS = '{"city": "Zürich"}'
OBJECT = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
# A call as models that were taught a form write it.
WRITTEN_CALLS = {
    "hermes": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "llama3": OBJECT.replace("arguments", "parameters"),
    "mistral": f"[TOOL_CALLS][{OBJECT}]",
    "granite": f"<|tool_call|>[{OBJECT}]",
    "phi4": f"<|tool_call|>[{OBJECT}]<|/tool_call|>",
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n</function>\n"
    "</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Zürich</parameter>\n</function>\n"
    "</seed:tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="get_weather"><parameter name="city">Zürich</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n</tool_call>",
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
    f"{ARGUMENTS}}}\n]<|END_ACTION|>",
    "deepseek": f"{CALLS_BEGIN}function{SPLIT}get_weather\n```json\n{ARGUMENTS}\n```{CALLS_END}",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    + ARGUMENTS,
}
# Thoughts and an answer, from behind the generation prompt of the chat "one turn" on.
WRITTEN_THOUGHTS = {
    None: "Fine.",
    "think": "<think>\nhm\n</think>\n\nFine.",
    "granite": "<think>hm</think>\n<response>Fine.</response>",
    "mistral": "[THINK]hm[/THINK]Fine.",
    "seed": "<seed:think>hm</seed:think>Fine.",
    "cohere": "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Fine.<|END_RESPONSE|>",
    "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Fine.",
}
