"""POST /v1/responses: OpenAI's newer API, without a store: each request brings all it needs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from rvllm.sampling_params import SamplingParams
from rvllm.server.chat_output import ChatOutput, Turn, TurnFormat
from rvllm.server.chat_prompt import ChatPrompt
from rvllm.server.constraints import turn_constraint
from rvllm.server.errors import unsupported
from rvllm.server.generation import Generation, new_id
from rvllm.server.responses_input import chat_tool_choice, chat_tools, input_messages
from rvllm.server.responses_output import ResponseOutput
from rvllm.server.schemas import (
    Items,
    SamplingFields,
    body_schema,
    entries,
    json_body,
    one_of,
    refuse_extra,
)
from rvllm.server.served_model import ServedModel, get_model
from rvllm.server.streaming import EventStream, while_connected

router = APIRouter()

LOGPROBS = "message.output_text.logprobs"


def _text(name: str, value: Any) -> tuple[str, str]:
    if not isinstance(value, str):
        raise ValueError
    return name, value


class TextSettings(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    format: dict[str, Any] | None = None


class ReasoningSettings(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(SamplingFields):
    UNSUPPORTED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **SamplingFields.UNSUPPORTED,
        "background": (False,),
        "conversation": (),
        "max_tool_calls": (),
        "previous_response_id": (),
        "prompt": (),
        "store": (False,),
        "stream_options": ({}, {"include_obfuscation": False}),
        "truncation": ("disabled",),
        **dict.fromkeys(
            ("messages", "max_tokens", "max_completion_tokens", "logprobs", "prompt_logprobs"), ()
        ),
        **dict.fromkeys(("response_format", "timings_per_token"), ()),
    }
    NAMES: ClassVar[Mapping[str, str]] = {
        **SamplingFields.NAMES,
        **dict.fromkeys(("prompt", "messages"), "input"),
        "logprobs": "top_logprobs",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
    }
    NO_EFFECT: ClassVar[frozenset[str]] = SamplingFields.NO_EFFECT - {"metadata", "user"}

    input: Annotated[str | Items[dict[str, Any]], one_of("a string or a list of items")]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Annotated[str | dict[str, Any], one_of("a string or an object")] | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: Items[str] | None = None
    top_logprobs: int | None = None
    metadata: Annotated[dict[str, str], entries(_text, "names to texts")] | None = None
    user: str | None = None

    def chat_prompt(self) -> ChatPrompt:
        if self.reasoning is not None and self.reasoning.summary is not None:
            raise unsupported("reasoning.summary", "reasoning is given as it is")
        refuse_extra("reasoning", self.reasoning)
        refuse_extra("text", self.text, verbosity="medium")
        for i in range(len(self.tools or ())):
            for name in ("name", "parameters", "strict"):
                self.names[f"tools.{i}.function.{name}"] = f"tools.{i}.{name}"
        return ChatPrompt(
            messages=input_messages(self.instructions, self.input),
            tools=chat_tools(self.tools),
            tool_choice=chat_tool_choice(self.tool_choice),
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
        )

    def to_sampling_params(self, model: ServedModel, turn: TurnFormat) -> SamplingParams:
        if self.n not in (None, 1):
            raise unsupported("n", "a response has one output")
        for name in self.include or ():
            if name != LOGPROBS:
                raise unsupported("include", f"{name[:80]!r} cannot be had; {LOGPROBS!r} can")
        wants_logprobs = LOGPROBS in (self.include or ()) or self.top_logprobs is not None
        return self.sampling_params(
            max_tokens=self.token_limit(None, {"max_output_tokens": self.max_output_tokens}, least=1),
            logprobs=(self.top_logprobs or 0) if wants_logprobs else None,
            structured_output=turn_constraint(self, turn, self.text_format, "text.format"),
            skip_special_tokens=False if turn.hides_marks(model.tokenizer) else self.skip_special_tokens,
        )

    @property
    def text_format(self) -> dict[str, Any]:
        return {"type": "text"} if self.text is None or self.text.format is None else self.text.format


@router.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest))
async def create_response(
    request: Request,
    body: Annotated[ResponsesRequest, Depends(json_body(ResponsesRequest))],
    model: Annotated[ServedModel, Depends(get_model)],
) -> Response:
    """Answers input items with output items."""
    model.check_name(body.model)
    turn = Turn(model, body.chat_prompt(), body.parallel_tool_calls, body.to_sampling_params)
    generation = Generation.of_source(request, model, new_id("resp_"), turn.make, body.n, body.priority)

    def output() -> ResponseOutput:
        return ResponseOutput(
            generation, ChatOutput(turn.format), _fields(body, generation), body.top_logprobs or 0
        )

    if body.stream:
        await while_connected(request, generation.start())
        return EventStream(output().events(), generation.close)
    await while_connected(request, generation.finish())
    return JSONResponse(await asyncio.to_thread(output().whole))  # a long one takes a while


def _fields(body: ResponsesRequest, generation: Generation) -> dict[str, Any]:
    """The part of a response object that repeats the request."""
    reasoning = body.reasoning or ReasoningSettings()
    return {
        "id": generation.request_id,
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": generation.model.name,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": body.text_format},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
