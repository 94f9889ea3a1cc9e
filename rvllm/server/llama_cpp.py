"""POST /completion: llama.cpp's own API, with its field names and defaults."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from rvllm.request import CompletionOutput, RequestOutput
from rvllm.sampling_params import SamplingParams
from rvllm.server.constraints import structured_output
from rvllm.server.errors import APIError, bad_request
from rvllm.server.generation import Generation, new_id, work
from rvllm.server.logprobs import chat_logprobs
from rvllm.server.schemas import MAX_LOGPROBS, Items, SamplingFields, body_schema, json_body, one_of
from rvllm.server.served_model import ServedModel, get_model
from rvllm.server.streaming import EventStream, event, while_connected

router = APIRouter()

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
BANNED = -100.0  # what a logit_bias of false means
STOP_TYPES = {"length": "limit", "timeout": "limit", "abort": "none"}

Mixed = Items[str | int]
LlamaPrompt = Annotated[
    str | Mixed | Items[str | Mixed],
    one_of("a string, a list of token ids and strings, or a list of such prompts"),
]
Bias = float | Literal[False]
LogitBias = Annotated[
    dict[str, Bias] | Items[Items[int | str | Bias]] | None,
    one_of("an object, or a list of pairs such as [15043, 1.0] or ['word', false]"),
]


class LlamaCompletionRequest(SamplingFields):
    UNSUPPORTED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **SamplingFields.UNSUPPORTED,
        "grammar_lazy": (False,),
        "image_data": ([],),
        "n_indent": (0,),
        "prompt_logprobs": (),
        "response_format": (),
        "stream_options": (),
        "post_sampling_probs": (False,),
        "return_progress": (False,),
        "sse_ping_interval": (),
    }
    NAMES: ClassVar[Mapping[str, str]] = {
        **SamplingFields.NAMES,
        "n": "n_cmpl",
        "logprobs": "n_probs",
    }
    # Each only matters with another field, which is refused.
    NO_EFFECT: ClassVar[frozenset[str]] = SamplingFields.NO_EFFECT | {
        "dry_allowed_length",
        "dry_base",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "dynatemp_exponent",
        "mirostat_eta",
        "mirostat_tau",
        "n_keep",
        "xtc_threshold",
    }

    prompt: LlamaPrompt
    logit_bias: LogitBias = None  # type: ignore[assignment]
    max_tokens: int | None = None
    n_probs: int | None = None
    n_cmpl: int | None = None
    return_tokens: bool | None = None
    t_max_predict_ms: Annotated[int, Field(le=2**63 - 1)] | None = None
    response_fields: Items[str] | None = None
    timings_per_token: bool | None = None

    def to_sampling_params(self, model: ServedModel) -> SamplingParams:
        if self.n_probs is not None and not 0 <= self.n_probs <= MAX_LOGPROBS:
            raise bad_request(f"n_probs must be in [0, {MAX_LOGPROBS}], got {self.n_probs}", "n_probs")
        defaults = {name: value for name, value in DEFAULTS.items() if getattr(self, name) is None}
        return self.sampling_params(
            max_tokens=self.token_limit(None, {"max_tokens": self.max_tokens}),
            logprobs=self.n_probs or None,
            n=self.n_cmpl if self.n_cmpl is not None else self.n,
            logit_bias=self._logit_bias(model),
            structured_output=structured_output(self),
            **defaults,
        )

    def _logit_bias(self, model: ServedModel) -> dict[int, float] | None:
        given: Any = self.logit_bias or ()
        if len(given) > model.tokenizer.vocab_size:
            raise bad_request(
                f"logit_bias has {len(given)} entries, more than the vocabulary of {model.tokenizer.vocab_size}",
                "logit_bias",
            )
        biases: dict[int, float] = {}
        for pair in given.items() if isinstance(given, Mapping) else given:
            if len(pair) != 2 or isinstance(pair[0], float) or isinstance(pair[1], str):
                raise bad_request(
                    f"logit_bias: {pair!r:.100} is no pair of a token and a number", "logit_bias"
                )
            key, bias = pair
            if isinstance(key, str):
                model.check_length(key, "logit_bias")
            is_id = isinstance(key, int) or re.fullmatch(r"-?[0-9]{1,20}", key)
            for token_id in [int(key)] if is_id else model.tokenizer.encode(key, add_special_tokens=False):
                biases[token_id] = BANNED if bias is False else bias
        return biases or None

    def prompts(self, model: ServedModel) -> list[str | list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt or any(isinstance(part, int) for part in prompt):
            return [_join(prompt, model)]
        return [part if isinstance(part, str) else _join(part, model) for part in prompt]


def _join(parts: Any, model: ServedModel) -> list[int]:
    """Ids of a prompt that mixes ids and texts; only the first text can begin with BOS."""
    model.check_length("".join(part for part in parts if isinstance(part, str)))
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        else:
            ids += model.tokenizer.encode(part, add_special_tokens=not ids, parse_special=True)
    return ids


def _chosen(answer: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The parts at paths such as generation_settings/n_predict, as far as they are there."""
    chosen = {}
    for path in paths:
        *groups, name = path.split("/")
        part: Any = answer
        for group in groups:
            part = part.get(group) if isinstance(part, dict) else None
        if isinstance(part, dict) and name in part:
            chosen[path] = part[name]
    return chosen


@router.post("/completion", openapi_extra=body_schema(LlamaCompletionRequest))
async def create_llama_completion(
    request: Request,
    body: Annotated[LlamaCompletionRequest, Depends(json_body(LlamaCompletionRequest))],
    model: Annotated[ServedModel, Depends(get_model)],
) -> Response:
    """Goes on from a prompt; several prompts, or n_cmpl, give a list."""
    model.check_name(body.model)
    limit = body.t_max_predict_ms or 0
    predict_seconds = limit / 1e3 if limit > 0 else None  # llama.cpp's "no limit"

    def encode() -> tuple[SamplingParams, list[str | list[int]]]:
        return body.to_sampling_params(model), body.prompts(model)

    # Texts among ids and biases take a while to encode, which others must not wait for.
    params, prompts = await work(request, model, encode)
    generation = Generation.of_prompts(
        request,
        model,
        new_id("cmpl-"),
        prompts,
        params,
        priority=body.priority,
        predict_seconds=predict_seconds,
    )
    answer = LlamaAnswer(body, generation, params)
    if body.stream:
        await while_connected(request, generation.start())
        return EventStream(answer.events(), generation.close)
    results = await while_connected(request, generation.finish())
    finals = [
        answer.final(i, output, completion)
        for i, output in enumerate(results)
        for completion in output.outputs
    ]
    return JSONResponse(finals if len(finals) > 1 else finals[0])


class LlamaAnswer:
    def __init__(self, body: LlamaCompletionRequest, generation: Generation, params: SamplingParams) -> None:
        self.body = body
        self.generation = generation
        self._params = params

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            async for i, output in self.generation:
                for completion in output.outputs:
                    if completion.token_ids or completion.text:
                        yield event(self._part(i, output, completion))
                    if completion.is_finished:
                        rest = replace(completion, text="", token_ids=[], logprobs=None)
                        yield event(self.final(i, output, rest))
        except APIError as error:
            yield event(error.body)

    def _part(self, i: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        whole = self.generation.results[i].outputs[completion.index]
        part = {
            "index": i * self.generation.n + completion.index,
            "content": completion.text,
            "tokens": completion.token_ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": len(whole.token_ids),
            "tokens_evaluated": len(output.prompt_token_ids),
            **self._probabilities(completion),
        }
        if self.body.timings_per_token:
            part["timings"] = self.generation.timings(i)
        return part

    def final(self, i: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """The last object of a choice; its content is what completion holds: all of it, or in a stream nothing."""
        whole = self.generation.results[i].outputs[completion.index]
        reason, stop = completion.finish_reason, completion.stop_reason
        final = {
            "index": i * self.generation.n + completion.index,
            "content": completion.text,
            "tokens": completion.token_ids if self.body.return_tokens else [],
            "id_slot": -1,
            "stop": True,
            "model": self.generation.model.name,
            "tokens_predicted": len(whole.token_ids),
            "tokens_evaluated": len(output.prompt_token_ids),
            "generation_settings": self._settings(),
            "prompt": self._prompt(output),
            "has_new_line": "\n" in whole.text,
            "stop_type": STOP_TYPES.get(reason or "", "word" if stop is not None else "eos"),
            "stopping_word": stop if isinstance(stop, str) else "",
            "tokens_cached": output.num_cached_tokens,
            "truncated": False,
            "timings": self.generation.timings(i),
            **self._probabilities(completion),
        }
        return _chosen(final, self.body.response_fields) if self.body.response_fields else final

    def _prompt(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self.generation.model.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _probabilities(self, completion: CompletionOutput) -> dict[str, Any]:
        if completion.logprobs is None:
            return {}
        tokenizer = self.generation.model.tokenizer
        num_top = self.body.n_probs or 0
        entries = chat_logprobs(tokenizer, completion.token_ids, completion.logprobs, num_top, with_ids=True)
        return {"completion_probabilities": entries}

    def _settings(self) -> dict[str, Any]:
        params = self._params
        return {
            "n_predict": -1 if params.max_tokens is None else params.max_tokens,
            "seed": params.seed,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "ignore_eos": params.ignore_eos,
            "n_probs": self.body.n_probs or 0,
            "stop": list(params.stop_strings),
            "stream": bool(self.body.stream),
        }
