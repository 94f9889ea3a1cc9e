"""The text of an assistant's turn, split as it comes into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rvllm.reasoning_formats import ReasoningFormat, find_reasoning
from rvllm.sampling_params import SamplingParams
from rvllm.server.chat_prompt import ChatPrompt, NamedTool
from rvllm.server.errors import bad_request, from_value_error, unsupported
from rvllm.server.served_model import ServedModel
from rvllm.structured_output import StructuredOutput
from rvllm.tool_choice import forced_calls, tool_names
from rvllm.tool_formats import JSON, ToolFormat, find_format
from rvllm.tool_grammar import optional_calls
from rvllm.tool_parser import ToolCall, ToolCallParser

if TYPE_CHECKING:
    from rvllm.tokenizer import Tokenizer

Delta = dict[str, Any]


@dataclass(frozen=True)
class TurnFormat:
    """How the text of a turn is to be read, and what it must look like.

    reasoning: None for a model that does not think. tool_format: None without tools. tools: the JSON schemas of
    their parameters by name. calls: the constraint where a tool has to be called, or is strict.
    """

    reasoning: ReasoningFormat | None = None
    is_thinking: bool = False
    tool_format: ToolFormat | None = None
    tools: Mapping[str, Any] = field(default_factory=dict)
    parallel: bool = True
    calls: StructuredOutput | None = None

    @property
    def after(self) -> tuple[str, ...]:
        """The texts behind which a constraint begins: a model that thinks is free until it has done so."""
        return self.reasoning.ends if self.reasoning is not None and self.is_thinking else ()

    def hides_marks(self, tokenizer: Tokenizer) -> bool:
        """Whether a mark is a control token, which leaves no text unless asked to."""
        marks = [
            *(() if self.tool_format is None else self.tool_format.starts),
            *(() if self.reasoning is None else self.reasoning.marks),
        ]
        return any(map(tokenizer.has_control, marks))

    @classmethod
    def of(
        cls, model: ServedModel, prompt: ChatPrompt, prompt_token_ids: Sequence[int], parallel: bool | None
    ) -> TurnFormat:
        """Raises APIError for tools and a tool_choice that do not go together."""
        template = model.chat_template
        if template is not None and prompt.tools and prompt.tool_choice != "none":
            template = template.for_tools
        source = "" if template is None else template.source
        reasoning = find_reasoning(source)
        thinks = reasoning is not None and reasoning.is_thinking_after(
            prompt_token_ids, model.tokenizer, bool(prompt.continue_final_message)
        )
        choice = prompt.tool_choice
        if not prompt.tools:
            if choice not in (None, "none", "auto"):
                raise bad_request("tool_choice needs tools", "tool_choice")
            return cls(reasoning, thinks)
        if choice == "none":
            return cls(reasoning, thinks)
        schemas = {tool.function.name: tool.function.parameters for tool in prompt.tools}
        is_parallel = parallel is not False
        tools = [tool.model_dump(exclude_none=True) for tool in prompt.tools]
        try:
            tool_names(tools)
            if choice in (None, "auto"):
                turn = cls(reasoning, thinks, find_format(source), schemas, is_parallel)
                return replace(turn, calls=turn.optional_calls(tools, model.tokenizer))
            name = choice.function.name if isinstance(choice, NamedTool) else None
            turn = cls(reasoning, thinks, JSON, schemas, is_parallel)
            return replace(turn, calls=forced_calls(tools, name, is_parallel, turn.after))
        except ValueError as error:
            raise from_value_error(error).renamed(
                dict.fromkeys(("json_schema", "grammar"), "tools")
            ) from None

    def optional_calls(
        self, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer
    ) -> StructuredOutput | None:
        """The constraint of calls that need not come; None if no tool is strict. Raises APIError, ValueError."""
        strict = next((i for i, tool in enumerate(tools) if tool["function"].get("strict")), None)
        if strict is None or self.tool_format is None:
            return None
        if self.tool_format.free_because:
            raise unsupported(
                f"tools.{strict}.function.strict",
                f"with tool_choice 'auto': this model's calls {self.tool_format.free_because}. "
                "With tool_choice 'required', or a function by name, arguments follow the schema",
            )
        thoughts = None
        if self.reasoning is not None:
            thoughts = ("" if self.is_thinking else self.reasoning.start, self.reasoning.end)
        return optional_calls(tools, self.tool_format, tokenizer, self.parallel, thoughts)


class Turn:
    """An assistant's turn that is to be generated: make() gives its prompt, and format, which depends on that."""

    format: TurnFormat

    def __init__(
        self,
        model: ServedModel,
        prompt: ChatPrompt,
        parallel: bool | None,
        to_sampling_params: Callable[[ServedModel, TurnFormat], SamplingParams],
    ) -> None:
        self._model = model
        self._prompt = prompt
        self._parallel = parallel
        self._to_sampling_params = to_sampling_params

    def make(self) -> tuple[list[int], SamplingParams]:
        """Raises APIError."""
        token_ids = self._prompt.encode(self._model)
        self.format = TurnFormat.of(self._model, self._prompt, token_ids, self._parallel)
        return token_ids, self._to_sampling_params(self._model, self.format)


class ChatOutput:
    """One choice. push() and finish() return deltas of the API: {"content": ...} and the like."""

    def __init__(self, turn: TurnFormat) -> None:
        self._reasoning = None if turn.reasoning is None else turn.reasoning.parser(turn.is_thinking)
        self._tools = None
        if turn.tool_format is not None:
            self._tools = ToolCallParser(turn.tool_format, turn.tools, turn.parallel)
        self._num_tokens = 0
        self.num_reasoning_tokens = 0  # until content began

    def push(self, text: str, num_tokens: int = 0) -> list[Delta]:
        self._num_tokens += num_tokens
        reasoning, content = ("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._deltas(reasoning, content)

    def finish(self) -> list[Delta]:
        """The rest of a turn that ends here."""
        deltas = [] if self._reasoning is None else self._deltas(*self._reasoning.finish())
        return deltas if self._tools is None else deltas + _tool_deltas(self._tools.finish())

    @property
    def has_tool_calls(self) -> bool:
        return self._tools is not None and self._tools.num_calls > 0

    def _deltas(self, reasoning: str, content: str) -> list[Delta]:
        deltas: list[Delta] = []
        if reasoning:
            self.num_reasoning_tokens = self._num_tokens
            deltas.append({"reasoning": reasoning, "reasoning_content": reasoning})
        if not content:
            return deltas
        return deltas + (
            [{"content": content}] if self._tools is None else _tool_deltas(self._tools.push(content))
        )


def _tool_deltas(found: Sequence[str | ToolCall]) -> list[Delta]:
    deltas: list[Delta] = []
    for part in found:
        if isinstance(part, str):
            deltas.append({"content": part})
        else:
            function = {"name": part.name, "arguments": part.arguments}
            deltas.append(
                {
                    "tool_calls": [
                        {"index": part.index, "id": part.id, "type": "function", "function": function}
                    ]
                }
            )
    return deltas
