"""POST /v1/completions: OpenAI's older API, with echo and log probabilities as evaluation harnesses need them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from rvllm.detokenizer import Detokenizer
from rvllm.request import CompletionOutput, RequestOutput
from rvllm.sampling_params import SamplingParams
from rvllm.server.constraints import structured_output
from rvllm.server.errors import APIError, unsupported
from rvllm.server.generation import Generation, new_id
from rvllm.server.logprobs import CompletionLogprobs, join_logprobs, prompt_logprobs
from rvllm.server.schemas import OpenAIFields, Prompts, body_schema, json_body, prompt_list
from rvllm.server.served_model import ServedModel, get_model
from rvllm.server.streaming import DONE, EventStream, event, while_connected

router = APIRouter()

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRequest(OpenAIFields):
    UNSUPPORTED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **OpenAIFields.UNSUPPORTED,
        "add_special_tokens": (True,),
        "prompt_embeds": (),
        "suffix": ("",),
        **dict.fromkeys(("messages", "tools", "tool_choice", "chat_template_kwargs", "top_logprobs"), ()),
    }

    prompt: Prompts
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    def to_sampling_params(self) -> SamplingParams:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of", "it must be equal to n")
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        fields = {"max_tokens": self.max_tokens, "max_completion_tokens": self.max_completion_tokens}
        return self.sampling_params(
            max_tokens=self.token_limit(DEFAULT_MAX_TOKENS, fields),
            logprobs=self.logprobs,
            structured_output=structured_output(self, self.response_format),
            prompt_logprobs=max((number for number in wanted if number is not None), default=None),
        )


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
async def create_completion(
    request: Request,
    body: Annotated[CompletionRequest, Depends(json_body(CompletionRequest))],
    model: Annotated[ServedModel, Depends(get_model)],
) -> Response:
    """Goes on from prompts."""
    model.check_name(body.model)
    body.check_stream_options()
    params = body.to_sampling_params()
    prompts = prompt_list(body.prompt)
    generation = Generation.of_prompts(
        request, model, new_id("cmpl-"), prompts, params, priority=body.priority
    )
    answer = CompletionAnswer(body, generation, params.skip_special_tokens)
    if body.stream:
        await while_connected(request, generation.start())
        return EventStream(answer.events(), generation.close)
    await while_connected(request, generation.finish())
    return JSONResponse(answer.whole())


class CompletionAnswer:
    """Turns the outputs of a generation into the objects of the API."""

    def __init__(self, body: CompletionRequest, generation: Generation, skip_special_tokens: bool) -> None:
        self.body = body
        self._skip_special_tokens = skip_special_tokens
        self.generation = generation
        self._head: dict[str, Any] = {
            "id": generation.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": generation.model.name,
        }
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by index of the choice

    def whole(self) -> dict[str, Any]:
        choices = [
            self._choice(i, output, completion)
            for i, output in enumerate(self.generation.results)
            for completion in output.outputs
        ]
        answer = {**self._head, "choices": choices, "usage": self.generation.usage()}
        if self.body.timings_per_token:
            answer["timings"] = self.generation.timings()
        return answer

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            async for i, output in self.generation:
                for completion in output.outputs:
                    choice = self._choice(i, output, completion)
                    has_news = choice["text"] or choice["logprobs"] or "prompt_logprobs" in choice
                    if has_news or choice["finish_reason"] is not None:
                        yield event(self._chunk([choice]))
            if self.body.include_usage:
                yield event({**self._head, "choices": [], "usage": self.generation.usage()})
        except APIError as error:
            yield event(error.body)
        yield DONE

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        if self.body.include_usage:
            chunk["usage"] = self.generation.usage() if self.body.continuous_usage else None
        if self.body.timings_per_token:
            chunk["timings"] = self.generation.timings()
        return chunk

    def _choice(self, i: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """The choice with what is new of it: the prompt, if that is echoed, comes with its first part."""
        index = i * self.generation.n + completion.index
        text = completion.text
        logprobs = None
        is_first = index not in self._logprobs
        if is_first:
            prompt = self._prompt_text(i) if self.body.echo else ""
            text = prompt + text
            tokenizer = self.generation.model.tokenizer
            detokenizer = Detokenizer(tokenizer, self._skip_special_tokens)
            self._logprobs[index] = CompletionLogprobs(
                tokenizer, self.body.logprobs or 0, len(prompt), detokenizer
            )
            if self.body.echo and self.body.logprobs is not None:
                logprobs = self._prompt_logprobs(i)
        if completion.logprobs is not None:
            new = self._logprobs[index].add(completion.token_ids, completion.logprobs)
            logprobs = join_logprobs(logprobs, new)
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self.body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = prompt_logprobs(self.generation.results[i].prompt_logprobs)
        return choice

    def _prompt_text(self, i: int) -> str:
        result = self.generation.results[i]
        if result.prompt is not None:
            return result.prompt
        return self.generation.model.tokenizer.decode(result.prompt_token_ids, skip_special_tokens=False)

    def _prompt_logprobs(self, i: int) -> dict[str, list[Any]]:
        tokenizer, result = self.generation.model.tokenizer, self.generation.results[i]
        ids = result.prompt_token_ids
        bos = tokenizer.token_text(ids[0])
        is_added = (
            result.prompt is not None
            and ids[0] == tokenizer.bos_token_id
            and not result.prompt.startswith(bos)
        )
        offset = -len(bos) if is_added else 0  # a BOS that the tokenizer adds is no part of the text
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, continues_text=False)
        logprobs = CompletionLogprobs(tokenizer, self.body.logprobs or 0, offset, detokenizer)
        entries = logprobs.add(ids, result.prompt_logprobs or [None] * len(ids))
        entries["text_offset"] = [max(0, start) for start in entries["text_offset"]]
        return entries
