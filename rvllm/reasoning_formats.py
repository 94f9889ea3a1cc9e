"""ReasoningFormat: how families of models write down what they think; one row for each form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rvllm.harmony import HarmonyParser
from rvllm.reasoning_parser import ReasoningParser

if TYPE_CHECKING:
    from rvllm.tokenizer import Tokenizer

TAIL = 64  # tokens at the end of a prompt in which its model may have been told to think


@dataclass(frozen=True)
class ReasoningFormat:
    """Thoughts between two marks, before the answer.

    signs: a chat template that holds one of them is of such a model. answer: marks around the answer, None for none.
    other_ends: other texts that the end may be.
    """

    name: str
    start: str
    end: str
    signs: tuple[str, ...]
    answer: tuple[str, str] | None = None
    other_ends: tuple[str, ...] = ()

    def is_thinking(self, prompt: str, continues: bool = False) -> bool:
        """Whether a prompt leaves the model within its thoughts. continues: it ends with a part of the turn."""
        if continues:
            return prompt.rfind(self.start) > max(map(prompt.rfind, self.ends))
        return prompt.rstrip().endswith(self.start)  # anywhere else it may be a user's text

    def is_thinking_after(
        self, prompt_token_ids: Sequence[int], tokenizer: Tokenizer, continues: bool = False
    ) -> bool:
        """As is_thinking(), of a prompt's token ids."""
        tail = tokenizer.decode(prompt_token_ids[-TAIL:], skip_special_tokens=False)
        return self.is_thinking(tail, continues)

    @property
    def ends(self) -> tuple[str, ...]:
        return self.end, *self.other_ends

    @property
    def marks(self) -> tuple[str, ...]:
        return self.start, self.end, *(self.answer or ())

    def parser(self, is_thinking: bool) -> ReasoningParser | HarmonyParser:
        """What splits an answer to such a prompt."""
        if self is HARMONY:
            return HarmonyParser(is_thinking)
        return ReasoningParser(self.start, self.end, self.answer, is_thinking)


# Here each message of a turn names its channel: the thoughts last from the turn's beginning to the channel "final".
# With a format for its answer in mind, gpt-oss writes that into the header, with a blank before it or without.
HARMONY = ReasoningFormat(
    "harmony",
    "<|start|>assistant",
    "<|channel|>final<|message|>",
    signs=("<|channel|>",),
    other_ends=tuple(f"<|channel|>final{gap}<|constrain|>json<|message|>" for gap in (" ", "")),
)
# The first row that a template has a sign of is its model's.
FORMATS = (
    HARMONY,
    ReasoningFormat(
        "granite", "<think>", "</think>", ("<response></response>",), ("<response>", "</response>")
    ),
    ReasoningFormat("think", "<think>", "</think>", ("<think>", "</think>")),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>", ("<seed:think>", "</seed:think>")),
    ReasoningFormat(
        "cohere",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ReasoningFormat("thought", "<thought>", "</thought>", ("<thought>", "</thought>")),
)


def find_reasoning(template: str) -> ReasoningFormat | None:
    """The form that a chat template's text tells of; None for a model that does not think."""
    return next((row for row in FORMATS if any(sign in template for sign in row.signs)), None)
