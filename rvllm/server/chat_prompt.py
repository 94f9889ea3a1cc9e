"""From the messages and tools of a request to token ids, by the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict

from rvllm.reasoning_formats import find_reasoning
from rvllm.server.errors import bad_request, from_value_error, unsupported
from rvllm.server.messages import Message, template_messages
from rvllm.server.schemas import APIRequest, Items, one_of
from rvllm.server.served_model import ServedModel

_RESERVED = frozenset(  # what the calls on the way to the template have arguments of their own for
    {
        "self",
        "model",
        "tokenizer",
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
    }
)


class FunctionTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: str


class NamedTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    one_of("'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"),
]


class ChatPrompt(APIRequest):
    """The fields that the prompt is made of."""

    messages: Items[Message] | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Items[dict[str, Any]] | None = None
    reasoning_effort: str | None = None

    def encode(self, model: ServedModel) -> list[int]:
        """Token ids. Templates may loop for long: to be called on a thread. Raises APIError."""
        continues = bool(self.continue_final_message)
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
        if self.documents is not None:
            kwargs["documents"] = self.documents
        if self.tools and self.tool_choice != "none":
            kwargs["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        kwargs["add_generation_prompt"] = not continues if self.add_generation_prompt is None else (
            self.add_generation_prompt
        )  # fmt: skip
        for name in _RESERVED & (self.chat_template_kwargs or {}).keys():
            raise bad_request(f"chat_template_kwargs must not hold {name!r}", "chat_template_kwargs")
        return encode_chat(model, self.messages or [], continue_final_message=continues, **kwargs)


def encode_chat(model: ServedModel, messages: Sequence[Message], **arguments: Any) -> list[int]:
    """arguments: of ChatTemplate.encode_chat(). Raises APIError."""
    template = model.chat_template
    plain = template_messages(messages)
    if template is None:
        raise bad_request(
            "the model has no chat template: use /v1/completions, or start with --chat-template"
        )
    effort = arguments.get("reasoning_effort")
    if effort == "none" and "enable_thinking" in template.source:
        arguments.setdefault("enable_thinking", False)
    elif effort == "none" and find_reasoning(template.source) is None:
        pass  # it does not think
    elif effort is not None and "reasoning_effort" not in template.source:
        raise unsupported("reasoning_effort", "the model's chat template has no such setting")
    model.check_size(_num_characters([plain, arguments]), "messages")
    if arguments.get("documents") and "documents" not in template.source:
        raise unsupported("documents", "the model's chat template has no place for them")
    try:
        return template.encode_chat(model.tokenizer, plain, **arguments)
    except ValueError as error:
        problem = from_value_error(error)
        if problem.param == "chat":  # the template refuses them
            problem.param = "messages"
        raise problem from None


def _num_characters(value: Any) -> int:
    """Of all texts within."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_characters, value.values()))
    return sum(map(_num_characters, value)) if isinstance(value, list) else 0
