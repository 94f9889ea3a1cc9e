"""POST /tokenize and /detokenize, with the fields of both vLLM and llama.cpp, and vLLM's GET /tokenizer_info."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Request, Response
from pydantic_core import to_json

from rvllm.server.chat_prompt import ChatPrompt
from rvllm.server.errors import bad_request
from rvllm.server.generation import work
from rvllm.server.schemas import APIRequest, Items, body_schema, json_body
from rvllm.server.served_model import ServedModel, get_model
from rvllm.server.streaming import json_response

router = APIRouter()


class TokenizeRequest(ChatPrompt):
    """One of prompt (vLLM: with BOS unless told otherwise), content (llama.cpp: without) and messages."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[object, ...]]] = {"chat_template": ()}

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(APIRequest):
    model: str | None = None
    tokens: Items[int]


@router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
async def tokenize(
    request: Request,
    body: Annotated[TokenizeRequest, Depends(json_body(TokenizeRequest))],
    model: Annotated[ServedModel, Depends(get_model)],
) -> Response:
    """Token ids of a text or of a conversation."""
    model.check_name(body.model)
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise bad_request(f"one of prompt, content and messages is needed, got {len(given)}", "prompt")
    encode = _chat_ids if given == ["messages"] else _text_ids

    def answer() -> bytes:
        return to_json(_answer(body, model, encode(body, model)))

    return json_response(await work(request, model, answer))


def _answer(body: TokenizeRequest, model: ServedModel, ids: list[int]) -> dict[str, Any]:
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": model.max_model_len}
    if not (body.with_pieces or body.return_token_strs):
        return answer
    if body.with_pieces:
        answer["tokens"] = [{"id": token_id, "piece": _piece(model, token_id)} for token_id in ids]
    if body.return_token_strs:
        answer["token_strs"] = [model.tokenizer.token_text(token_id) for token_id in ids]
    return answer


def _piece(model: ServedModel, token_id: int) -> str | list[int]:
    """As llama.cpp has it: the bytes of a token that is no whole characters."""
    piece = model.tokenizer.token_bytes(token_id, special=True)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _chat_ids(body: TokenizeRequest, model: ServedModel) -> list[int]:
    for name in ("add_special_tokens", "add_special", "parse_special"):
        if getattr(body, name) is not None:
            raise bad_request(
                f"{name} does not go with messages: control tokens come from the template", name
            )
    return body.encode(model)


def _text_ids(body: TokenizeRequest, model: ServedModel) -> list[int]:
    text = body.prompt if body.prompt is not None else body.content or ""
    flags = [flag for flag in (body.add_special_tokens, body.add_special) if flag is not None]
    add_special = flags[0] if flags else body.prompt is not None
    return model.tokenizer.encode(text, add_special, body.parse_special is not False)


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
async def detokenize(
    request: Request,
    body: Annotated[DetokenizeRequest, Depends(json_body(DetokenizeRequest))],
    model: Annotated[ServedModel, Depends(get_model)],
) -> Response:
    """The text of token ids, control tokens by name."""
    model.check_name(body.model)
    size = model.tokenizer.vocab_size

    def answer() -> bytes:
        for i, token_id in enumerate(body.tokens):
            if not 0 <= token_id < size:
                message = f"tokens.{i}: {token_id!r:.30} is no token id in [0, {size - 1}]"
                raise bad_request(message, f"tokens.{i}")
        text = model.tokenizer.decode(body.tokens, False)
        return to_json({"prompt": text, "content": text})

    return json_response(await work(request, model, answer))


@router.get("/tokenizer_info")
async def tokenizer_info(model: Annotated[ServedModel, Depends(get_model)]) -> dict[str, Any]:
    """Special tokens and chat template: what lm-eval needs for tokenizer_backend=remote."""
    tokenizer = model.tokenizer

    def text(token_id: int | None) -> str | None:
        return None if token_id is None else tokenizer.token_text(token_id)

    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "bos_token": text(tokenizer.bos_token_id),
        "eos_token": text(tokenizer.eos_token_id),
        "chat_template": None if model.chat_template is None else model.chat_template.source,
    }
