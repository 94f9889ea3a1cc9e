"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter, Depends, Request, Response
from pydantic_core import to_json

from rvllm.server.errors import APIError, bad_request, unsupported
from rvllm.server.generation import refusal
from rvllm.server.schemas import APIRequest, Prompts, body_schema, json_body, prompt_list
from rvllm.server.served_model import ServedModel, get_model
from rvllm.server.streaming import json_response, while_connected

router = APIRouter()

MAX_INPUTS = 2048  # OpenAI's


class EmbeddingRequest(APIRequest):
    UNSUPPORTED: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "add_special_tokens": (True,),
        "embed_dtype": ("float32",),
        "normalize": (True,),
        "priority": (0,),
        "truncate_prompt_tokens": (),
    }
    NO_EFFECT: ClassVar[frozenset[str]] = frozenset({"user", "request_id"})
    NAMES: ClassVar[Mapping[str, str]] = {"prompt": "input"}

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingRequest))
async def create_embeddings(
    request: Request,
    body: Annotated[EmbeddingRequest, Depends(json_body(EmbeddingRequest))],
    model: Annotated[ServedModel, Depends(get_model)],
) -> Response:
    """A vector of length 1 for each input."""
    model.check_name(body.model)
    prompts = prompt_list(body.input)
    if not 1 <= len(prompts) <= MAX_INPUTS:
        raise bad_request(f"input must hold 1 to {MAX_INPUTS} entries, got {len(prompts)}", "input")
    for prompt in prompts:
        model.check_length(prompt)
    try:
        work = asyncio.wait_for(model.engine.embed(prompts), model.timeout)
        embeddings = await while_connected(request, work)
    except asyncio.TimeoutError:
        raise APIError(
            408, "the embeddings took longer than the time limit (--timeout)", code="timeout"
        ) from None
    except (ValueError, RuntimeError) as error:
        raise refusal(request, error) from error
    if body.dimensions is not None and body.dimensions != len(embeddings[0][0]):
        raise unsupported("dimensions", f"the model's vectors have {len(embeddings[0][0])}")
    encode = _base64 if body.encoding_format == "base64" else list
    data = [
        {"object": "embedding", "index": i, "embedding": encode(vector)}
        for i, (vector, _) in enumerate(embeddings)
    ]
    num_tokens = sum(count for _, count in embeddings)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    answer = {"object": "list", "data": data, "model": model.name, "usage": usage}
    return json_response(await asyncio.to_thread(to_json, answer))  # which may be large


def _base64(vector: list[float]) -> Any:
    """Little-endian float32, as OpenAI's own client asks for."""
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
