"""What the requests of several APIs have in common: strict fields, and how they become SamplingParams."""

from __future__ import annotations

import json
import logging
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import Request
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PrivateAttr,
    ValidationError,
    WrapValidator,
)
from pydantic_core import PydanticCustomError, from_json

from rvllm.sampling_params import SamplingParams
from rvllm.server.errors import bad_request, from_validation_error, from_value_error, unsupported
from rvllm.server.security import read_body

logger = logging.getLogger(__name__)

MAX_LOGPROBS = 20  # alternatives beside each token
MAX_UNKNOWN_FIELDS = 100  # names that are logged, each once

# What does the work of fields that are not offered.
SUCCESSORS = {
    **{f"guided_{kind}": f"use structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")},
    "chat_template": "use --chat-template of rvllm serve",
}

_unknown_fields: set[str] = set()


class APIRequest(BaseModel):
    """A JSON body. Types are exact: "0.5" is no number, true is no integer; null is the same as absent."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    # Known fields that are not offered, each with the values that ask for nothing.
    UNSUPPORTED: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    # Known fields that have no bearing on the answer.
    NO_EFFECT: ClassVar[frozenset[str]] = frozenset()
    # What this API calls fields that errors have another name for.
    NAMES: ClassVar[Mapping[str, str]] = {}

    _names: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def names(self) -> dict[str, str]:
        """NAMES as far as this request has such fields, and what is found out as it is read."""
        return self._names

    def model_post_init(self, context: Any, /) -> None:
        for name, own in self.NAMES.items():
            if getattr(self, own.partition(".")[0], None) is not None:
                self._names[name] = own

    def check_extra(self, where: str) -> None:
        """Raises APIError for a known field that is not supported; logs an unknown one, once."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in self.NO_EFFECT:
                continue
            harmless = self.UNSUPPORTED.get(name)
            if harmless is None:
                _log_unknown(where, name)
            elif not any(value == x and type(value) is type(x) for x in harmless):
                raise unsupported(name, SUCCESSORS.get(name, ""))


Model = TypeVar("Model", bound=APIRequest)


def json_body(model: type[Model]) -> Callable[[Request], Coroutine[Any, Any, Model]]:
    """A dependency that reads the body of a request as `model`, whatever its content type says.

    Raises APIError: 400 for a bad one, 408 for one that does not arrive, 413 for one that is too large.
    """

    async def parse(request: Request) -> Model:
        data = (await read_body(request)).removeprefix(BOM_UTF8)  # which some clients on Windows send
        try:
            body = model.model_validate_json(data)
        except ValidationError as error:
            raise from_validation_error(error, _untyped(data)) from None
        if b"NaN" in data or b"Infinity" in data:
            try:
                from_json(data, allow_inf_nan=False)
            except ValueError:
                raise bad_request("the body is no valid JSON: it has no NaN and no Infinity") from None
        body.check_extra(request.url.path)
        request.state.names = body.names
        return body

    return parse


def body_schema(model: type[APIRequest]) -> dict[str, Any]:
    """The part of a route's OpenAPI description that json_body() does not give by itself."""
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def one_of(expected: str) -> WrapValidator:
    """One error for a union, instead of one for each of its types."""

    def validate(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("union", "must be {expected}", {"expected": expected}) from None

    return WrapValidator(validate)


class _FirstError(FailFast):
    """For lists: a large one may hold millions of errors, of which one is told. Unions need it to be hashable."""

    __hash__ = object.__hash__


T = TypeVar("T")
Items = Annotated[list[T], _FirstError()]


def entries(convert: Callable[[str, Any], tuple[Any, Any]], expected: str) -> BeforeValidator:
    """The same for objects: the first entry that convert raises ValueError for is the error."""

    def converted(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        made = {}
        for name, item in value.items():
            try:
                key, made_item = convert(name, item)
            except ValueError:
                context = {"expected": expected, "name": repr(name[:40]), "item": f"{item!r:.40}"}
                raise PydanticCustomError(
                    "entry", "must map {expected}, not {name} to {item}", context
                ) from None
            made[key] = made_item
        return made

    return BeforeValidator(converted)


def _bias(name: str, value: Any) -> tuple[int, float]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError
    if re.fullmatch(r"-?[0-9]{1,20}", name) is None:
        raise ValueError
    return int(name), value


Biases = Annotated[dict[int, float], entries(_bias, "token ids to numbers")]
Prompts = Annotated[
    str | Items[int] | Items[str] | Items[Items[int]],
    one_of("a string, a list of strings, a list of token ids, or a list of lists of token ids"),
]
Strings = Annotated[str | Items[str], one_of("a string or a list of strings")]


def prompt_list(prompts: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """The prompts one by one, be they one or several."""
    if isinstance(prompts, str):
        return [prompts]
    if not prompts or isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)


def refuse_extra(where: str, value: BaseModel | None, **harmless: object) -> None:
    """Raises APIError naming a field of a nested object that is not offered, unless its value asks for nothing."""
    for name, extra in ((value and value.model_extra) or {}).items():
        if extra is not None and extra != harmless.get(name):
            raise unsupported(f"{where}.{name[:64]}")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(APIRequest):
    """Fields with the names, meanings and defaults of OpenAI's API and vLLM's."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "allowed_token_ids": (),
        "bad_words": ([],),
        "cache_salt": (),
        "kv_transfer_params": (),
        "length_penalty": (1.0, 1),
        "logits_processors": ([],),
        "min_keep": (0,),
        "repetition_detection": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "spaces_between_special_tokens": (True,),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
        "top_n_sigma": (-1, -1.0),
        "typical_p": (1, 1.0),
        "adaptive_target": (-1, -1.0),
        "id_slot": (-1,),
        "lora": ([],),
        "samplers": (),
        **dict.fromkeys(("dry_multiplier", "dynatemp_range", "mirostat", "xtc_probability"), (0, 0.0)),
        **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    }
    NAMES: ClassVar[Mapping[str, str]] = {"repetition_penalty": "repeat_penalty"}
    NO_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {"metadata", "prompt_cache_key", "request_id", "safety_identifier", "service_tier", "user"}
    )

    model: str | None = Field(None, description="one of GET /v1/models; absent: the one that is served")
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Strings | None = None
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = Field(None, description="llama.cpp's name of repetition_penalty")
    repeat_last_n: int | None = Field(None, description="-1: penalties look at the whole context")
    logit_bias: Biases | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    priority: int | None = None
    cache_prompt: bool | None = None
    n_predict: int | None = None
    structured_outputs: dict[str, Any] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | str | None = None

    def sampling_params(self, *, max_tokens: int | None, **others: Any) -> SamplingParams:
        """SamplingParams of the fields that were given, and of others that the API has in its own way.

        Raises APIError naming the field.
        """
        values = {name: getattr(self, name) for name in _SAMPLING_FIELDS} | others
        if self.repeat_penalty is not None:
            if self.repetition_penalty not in (None, self.repeat_penalty):
                raise bad_request(
                    "repetition_penalty and repeat_penalty are given and differ: use one of them",
                    "repeat_penalty",
                )
            values["repetition_penalty"] = self.repeat_penalty
        if values["repetition_penalty"] not in (None, 1.0) and self.repeat_last_n not in (None, -1):
            raise bad_request(
                "repeat_last_n must be -1: penalties look at the whole context", "repeat_last_n"
            )
        given = {name: value for name, value in values.items() if value is not None}
        for name in ("logprobs", "prompt_logprobs"):
            if given.get(name, 0) > MAX_LOGPROBS:
                raise bad_request(f"{name} must be at most {MAX_LOGPROBS}, got {given[name]}", name)
        try:
            return SamplingParams(max_tokens=max_tokens, **given)
        except ValueError as error:
            raise from_value_error(error) from None

    def token_limit(
        self, default: int | None, fields: Mapping[str, int | None], least: int = 0
    ) -> int | None:
        """The one limit on the answer's tokens, whatever its name; None for no limit, as -1 asks for.

        Raises APIError for two that differ, and for less than least.
        """
        given = {
            name: value
            for name, value in {**fields, "n_predict": self.n_predict}.items()
            if value is not None
        }
        if len(set(given.values())) > 1:
            raise bad_request(
                f"{' and '.join(given)} are given and differ: use one of them", next(iter(given))
            )
        name, limit = next(iter(given.items()), ("", default))
        if limit is not None and limit < least and limit != -1:
            raise bad_request(f"{name} must be at least {least}, got {limit}", name)
        return None if limit == -1 else limit


class OpenAIFields(SamplingFields):
    """What /v1/completions and /v1/chat/completions share beyond that."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **SamplingFields.UNSUPPORTED,
        "n_cmpl": (1,),
        "n_probs": (0,),
        "t_max_predict_ms": (0, -1),
    }

    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    timings_per_token: bool | None = Field(None, description="add llama.cpp's timings to the answer")

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is only allowed with stream: true", "stream_options")
        refuse_extra("stream_options", self.stream_options, include_obfuscation=False)


_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "cache_prompt",
    "skip_special_tokens",
)


def _log_unknown(where: str, name: str) -> None:
    if name in _unknown_fields or len(_unknown_fields) >= MAX_UNKNOWN_FIELDS:
        return
    _unknown_fields.add(name)
    logger.warning("%s: unknown field %s is ignored", where, json.dumps(name[:64]))


def _untyped(data: bytes) -> Any:
    try:
        return from_json(data)
    except ValueError:
        return None
