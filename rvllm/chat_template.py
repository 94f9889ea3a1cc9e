"""ChatTemplate: the messages of a chat as one prompt, by the Jinja template that comes with a model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from rvllm.chat_messages import ChatTemplateError, Message, adapt, fold_system, with_texts
from rvllm.tokenizer import Tokenizer
from rvllm.tool_formats import find_format
from rvllm.tool_prompt import TOOLS_IN_MESSAGE, put_tools, tell_tools, write_calls

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["ChatTemplate", "ChatTemplateError", "Message"]

log = logging.getLogger(__name__)

TEMPLATE_KEY = "tokenizer.chat_template"
TOOLS_TEMPLATE_KEY = TEMPLATE_KEY + ".tool_use"
PRIVATE_USE = range(0xF0000, 0xFFFFE)  # code points that no text is expected to hold
MAX_DEPTH = 100  # levels of lists and dicts in messages and tools

# Asked at every turn of a template's loops: whether to give up, because nobody waits for the prompt any more.
is_abandoned: ContextVar[Callable[[], bool]] = ContextVar("is_abandoned", default=lambda: False)


class ChatTemplate:
    """A template is compiled when first used, so a broken one spoils only chats.

    It runs in a sandbox and cannot change the messages. It sees messages, add_generation_prompt, bos_token,
    eos_token, tools and documents (None unless given) and every other keyword of render().
    for_tools: the template of chats with tools, where the model has one of its own for them.
    """

    def __init__(
        self, source: str, bos_token: str = "", eos_token: str = "", for_tools: ChatTemplate | None = None
    ) -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.for_tools: ChatTemplate = for_tools or self
        self._template: Template | None = None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], tokenizer: Tokenizer) -> ChatTemplate | None:
        """The model's own template; None, with a warning if there is something unusable, when it has none."""
        source, for_tools = (_read_source(metadata, key) for key in (TEMPLATE_KEY, TOOLS_TEMPLATE_KEY))
        if source is None:
            return None
        special = None if for_tools is None else cls.from_source(for_tools, tokenizer)
        return cls.from_source(source, tokenizer, special)

    @classmethod
    def from_source(
        cls, source: str, tokenizer: Tokenizer, for_tools: ChatTemplate | None = None
    ) -> ChatTemplate:
        """A template with the tokenizer's BOS and EOS."""
        special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        bos, eos = ("" if id is None else tokenizer.token_text(id) for id in special)
        return cls(source, bos, eos, for_tools)

    def compile(self) -> Template:
        """Raises ChatTemplateError with the line at fault."""
        if self._template is None:
            from jinja2 import TemplateSyntaxError

            from rvllm.jinja_environment import environment

            try:
                self._template = environment().from_string(self.source)
            except TemplateSyntaxError as error:
                raise ChatTemplateError(f"chat template, line {error.lineno}: {_one_line(error)}") from None
            except Exception as error:
                raise ChatTemplateError(f"chat template: {_one_line(error)}") from None
        return self._template

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt as text.

        add_generation_prompt: end with the header of the assistant's turn.
        continue_final_message: end with the content of the last message, its turn left open.
        Raises ChatTemplateError.
        """
        template = self.compile()
        messages = [adapt(self.source, message) for message in with_texts(self.source, messages)]
        end = ""
        if continue_final_message:
            if add_generation_prompt:
                raise ChatTemplateError("add_generation_prompt and continue_final_message exclude each other")
            (end,) = _unused_characters([self.source, *_strings([messages, kwargs])], 1)
            messages = _mark_end(messages, end)
        variables: dict[str, Any] = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        variables |= {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "tools": None,
            "documents": None,
        }
        variables |= kwargs
        from rvllm.jinja_environment import Budget, budget

        token = budget.set(Budget(is_abandoned.get()))
        try:
            text = template.render(variables)
        except Exception as error:  # templates fail in every way that Python does
            raise ChatTemplateError(f"chat template: {_one_line(error)}") from None
        finally:
            budget.reset(token)
        if end:
            if end not in text:
                raise ChatTemplateError("chat template: leaves out the final message, nothing to continue")
            text = text[: text.rindex(end)]
        return text

    @cached_property
    def takes_system(self) -> bool:
        """Whether a system message reaches the model: some templates refuse it, or leave it out."""
        (probe,) = _unused_characters([self.source], 1)
        messages = [{"role": "system", "content": probe}, {"role": "user", "content": "x"}]
        token = is_abandoned.set(lambda: False)  # whoever asks first, the answer is for all
        try:
            return probe in self.render(messages)
        except ChatTemplateError:
            return False
        finally:
            is_abandoned.reset(token)

    def encode_chat(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """The prompt as token ids, with one BOS if the model wants one.

        Control tokens come from the template alone: written in a message (or tool, or any other argument) they
        are plain text. A template that knows no tools is told of them in the system message; one that would leave
        calls out has them in the contents, and one that would leave the system message out has it in the user's.
        Raises ChatTemplateError.
        """
        if not all(isinstance(message, Mapping) for message in messages):
            raise ChatTemplateError("messages: must be objects with a role and a content")
        if kwargs.get("tools") and self.for_tools is not self:
            return self.for_tools.encode_chat(
                tokenizer, messages, add_generation_prompt, continue_final_message, **kwargs
            )
        messages = with_texts(self.source, messages)
        has_calls = any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
        if (kwargs.get("tools") or has_calls) and "tools" not in self.source:
            messages = tell_tools(messages, kwargs.pop("tools", None) or ())
            has_calls = False
        elif kwargs.get("tools") and TOOLS_IN_MESSAGE.search(self.source):
            messages = put_tools(messages, kwargs.pop("tools"))
        if messages and messages[0].get("role") == "system" and not self.takes_system:
            messages = fold_system(messages)
        # What begins a control token in an argument is disguised by a private-use character while the template
        # runs: it can be trimmed, cut and joined like any other, but makes no token.
        arguments = list(_strings([messages, kwargs]))
        leads = [c for c in set().union(*arguments) if tokenizer.control_starts(c)]
        disguise = dict(zip(leads, _unused_characters([self.source, *arguments], len(leads)), strict=True))
        symbols = {ord(c): disguised for c, disguised in disguise.items() if not c.isalnum()}

        def disguise_tokens(text: str) -> str:
            characters = list(text)
            for at in tokenizer.control_starts(text.rstrip()):
                characters[at] = disguise[characters[at]]
            return "".join(characters)

        def disguise_all(text: str) -> str:
            return text.translate(symbols)

        def render(change: Callable[[str], str]) -> str:
            changed = _map_strings(messages, change)
            if has_calls and "tool_calls" not in self.source:
                changed = write_calls(changed, find_format(self.source))
            arguments = _map_strings(kwargs, change)
            return self.render(changed, add_generation_prompt, continue_final_message, **arguments)

        def control_ids(text: str) -> list[str | int]:
            return [piece for piece in tokenizer.split_control(text) if isinstance(piece, int)]

        text = render(disguise_tokens)
        if symbols:
            # A template that cuts and joins contents could still make a token of two harmless halves.
            safe = render(disguise_all)
            if control_ids(text) != control_ids(safe):
                text = safe
        reveal = {ord(disguised): c for c, disguised in disguise.items()}
        if text.translate(reveal) == text:
            ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        else:
            ids = []
            for piece in tokenizer.split_control(text):
                if isinstance(piece, int):
                    ids.append(piece)
                else:
                    ids += tokenizer.encode(piece.translate(reveal), add_special_tokens=False)
        bos = tokenizer.bos_token_id
        if tokenizer.add_bos_token and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids


def _read_source(metadata: Mapping[str, object], key: str) -> str | None:
    source = metadata.get(key)
    if source is None or (isinstance(source, str) and source.strip()):
        return source
    log.warning("%s: %s, ignored", key, "empty" if isinstance(source, str) else "not a string")
    return None


def _strings(value: Any, depth: int = 0) -> Iterator[str]:
    """Every string within lists and dicts, keys included."""
    if depth > MAX_DEPTH:
        raise ChatTemplateError(f"messages: nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key, depth + 1)
            yield from _strings(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item, depth + 1)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of lists and dicts with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value


def _unused_characters(texts: Iterable[str], count: int) -> list[str]:
    """Private-use characters that occur in none of the texts."""
    used = set().union(*texts)
    unused = list(islice((chr(code) for code in PRIVATE_USE if chr(code) not in used), count))
    if len(unused) < count:
        raise ChatTemplateError(
            f"messages: use nearly all {len(PRIVATE_USE)} private-use characters from U+{PRIVATE_USE.start:X}, "
            f"of which {count} must be left"
        )
    return unused


def _mark_end(messages: Sequence[Message], end: str) -> list[Message]:
    """The messages with a mark behind the last one's content, or behind its last part when it has several."""
    if not messages:
        raise ChatTemplateError("continue_final_message: there is no message")
    content = messages[-1].get("content")
    if isinstance(content, str):
        marked: Any = content + end
    elif isinstance(content, list) and content and isinstance(content[-1], dict) and "text" in content[-1]:
        marked = [*content[:-1], {**content[-1], "text": content[-1]["text"] + end}]
    else:
        raise ChatTemplateError("continue_final_message: the last message has no text to go on from")
    return [*messages[:-1], {**messages[-1], "content": marked}]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
