"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from rvllm.request import CompletionOutput
from rvllm.sampling_params import SamplingParams
from rvllm.server.chat_output import ChatOutput, Turn, TurnFormat
from rvllm.server.chat_prompt import ChatPrompt
from rvllm.server.constraints import turn_constraint
from rvllm.server.errors import APIError, bad_request
from rvllm.server.generation import Generation, new_id
from rvllm.server.logprobs import chat_logprobs, prompt_logprobs
from rvllm.server.messages import Message
from rvllm.server.schemas import Items, OpenAIFields, body_schema, json_body
from rvllm.server.served_model import ServedModel, get_model
from rvllm.server.streaming import DONE, EventStream, event, while_connected

router = APIRouter()


class ChatCompletionRequest(OpenAIFields, ChatPrompt):
    UNSUPPORTED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **OpenAIFields.UNSUPPORTED,
        "add_special_tokens": (False,),
        "audio": (),
        "best_of": (1,),
        "chat_template": (),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "include_reasoning": (True,),
        "modalities": (["text"],),
        "prediction": (),
        "prompt": (),
        "suffix": (),
        "thinking_token_budget": (),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
    NAMES: ClassVar[Mapping[str, str]] = {
        **OpenAIFields.NAMES,
        "prompt": "messages",
        "logprobs": "top_logprobs",
    }
    NO_EFFECT: ClassVar[frozenset[str]] = OpenAIFields.NO_EFFECT | {"store"}

    messages: Items[Message]
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def to_sampling_params(self, model: ServedModel, turn: TurnFormat) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        fields = {"max_tokens": self.max_tokens, "max_completion_tokens": self.max_completion_tokens}
        return self.sampling_params(
            max_tokens=self.token_limit(None, fields, least=1),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
            structured_output=turn_constraint(self, turn, self.response_format),
            skip_special_tokens=False if turn.hides_marks(model.tokenizer) else self.skip_special_tokens,
        )


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest))
async def create_chat_completion(
    request: Request,
    body: Annotated[ChatCompletionRequest, Depends(json_body(ChatCompletionRequest))],
    model: Annotated[ServedModel, Depends(get_model)],
) -> Response:
    """Answers a conversation."""
    model.check_name(body.model)
    body.check_stream_options()
    turn = Turn(model, body, body.parallel_tool_calls, body.to_sampling_params)
    generation = Generation.of_source(request, model, new_id("chatcmpl-"), turn.make, body.n, body.priority)
    if body.stream:
        await while_connected(request, generation.start())
        return EventStream(ChatAnswer(body, generation, turn.format).events(), generation.close)
    await while_connected(request, generation.finish())
    return JSONResponse(ChatAnswer(body, generation, turn.format).whole())


class ChatAnswer:
    """Turns the outputs of a generation into the objects of the API."""

    def __init__(self, body: ChatCompletionRequest, generation: Generation, turn: TurnFormat) -> None:
        self.body = body
        self.generation = generation
        self._outputs = [ChatOutput(turn) for _ in range(generation.n)]
        self._head: dict[str, Any] = {
            "id": generation.request_id,
            "created": int(time.time()),
            "model": generation.model.name,
        }

    def whole(self) -> dict[str, Any]:
        result = self.generation.results[0]
        answer = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._whole_choice(completion) for completion in result.outputs],
            "usage": self.generation.usage(),
        }
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
        if self.body.timings_per_token:
            answer["timings"] = self.generation.timings()
        return answer

    def _whole_choice(self, completion: CompletionOutput) -> dict[str, Any]:
        output = self._outputs[completion.index]
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        for delta in [*output.push(completion.text), *output.finish()]:
            merge_delta(message, delta)
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        return self._choice(completion, message=message)

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            for index in range(self.generation.n):
                delta = {"role": "assistant", "content": ""}
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                yield self._chunk(choice, is_first=index == 0)
            async for _, result in self.generation:
                for completion in result.outputs:
                    for chunk in self._chunks(completion):
                        yield chunk
            if self.body.include_usage:
                head = {**self._head, "object": "chat.completion.chunk"}
                yield event({**head, "choices": [], "usage": self.generation.usage()})
        except APIError as error:
            yield event(error.body)
        yield DONE

    def _chunks(self, completion: CompletionOutput) -> list[bytes]:
        """A chunk for each new delta, the finish in one of its own."""
        output = self._outputs[completion.index]
        deltas = output.push(completion.text)
        if completion.is_finished:
            deltas += output.finish()
        logprobs = self._logprobs(completion)
        if logprobs is not None and not deltas:
            deltas = [{"content": ""}]
        chunks = []
        for delta in deltas:
            choice = {"index": completion.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
            chunks.append(self._chunk(choice))
            logprobs = None
        if completion.is_finished:
            chunks.append(self._chunk({**self._choice(completion, delta={}), "logprobs": None}))
        return chunks

    def _choice(self, completion: CompletionOutput, **content: Any) -> dict[str, Any]:
        reason = completion.finish_reason
        if reason == "stop" and self._outputs[completion.index].has_tool_calls:
            reason = "tool_calls"
        return {
            "index": completion.index,
            **content,
            "logprobs": self._logprobs(completion),
            "finish_reason": reason,
            "stop_reason": completion.stop_reason,
        }

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if completion.logprobs is None:
            return None
        tokenizer, num_top = self.generation.model.tokenizer, self.body.top_logprobs or 0
        entries = chat_logprobs(tokenizer, completion.token_ids, completion.logprobs, num_top)
        return {"content": entries, "refusal": None}

    def _chunk(self, choice: dict[str, Any], is_first: bool = False) -> bytes:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if is_first and self.body.prompt_logprobs is not None:
            chunk["prompt_logprobs"] = prompt_logprobs(self.generation.results[0].prompt_logprobs)
        if self.body.include_usage:
            chunk["usage"] = self.generation.usage() if self.body.continuous_usage else None
        if self.body.timings_per_token:
            chunk["timings"] = self.generation.timings()
        return event(chunk)


def merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Adds a delta to the message it is a part of."""
    for name, value in delta.items():
        if isinstance(value, str):
            message[name] = (message.get(name) or "") + value
        else:
            calls = [{key: part for key, part in call.items() if key != "index"} for call in value]
            message[name] = message.get(name, []) + calls
