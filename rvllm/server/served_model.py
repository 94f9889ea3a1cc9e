"""The one model that a server serves: loaded in the background, then asked by every route."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import Request

from rvllm.server.errors import APIError, bad_request

if TYPE_CHECKING:
    from rvllm.async_engine import AsyncEngine
    from rvllm.chat_template import ChatTemplate
    from rvllm.llm import LLM
    from rvllm.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServerConfig:
    """Settings of the HTTP side.

    names: of the model, the first is its own. aliases: names it answers to that are not listed.
    timeout: seconds a request may take, None for no limit. max_body_size: bytes.
    """

    names: Sequence[str] = ("model",)
    aliases: Sequence[str] = ()
    api_keys: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    timeout: float | None = None
    max_body_size: int = 8 * 2**20
    log_requests: bool = False


@dataclass(frozen=True)
class ServedModel:
    """max_prompt_chars: of a text whose tokens are all as long as the vocabulary's longest."""

    names: Sequence[str]
    engine: AsyncEngine
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_model_len: int
    max_prompt_chars: int
    timeout: float | None = None
    aliases: Sequence[str] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, llm: LLM, engine: AsyncEngine, config: ServerConfig) -> ServedModel:
        """engine: over that of llm."""
        max_model_len = llm.engine.max_model_len
        return cls(
            names=config.names,
            aliases=config.aliases,
            engine=engine,
            tokenizer=llm.tokenizer,
            chat_template=llm.chat_template,
            max_model_len=max_model_len,
            max_prompt_chars=max_model_len * llm.tokenizer.longest_token,
            timeout=config.timeout,
        )

    @property
    def name(self) -> str:
        return self.names[0]

    def check_name(self, name: str | None) -> None:
        """Raises APIError (404) unless the request asks for this model, or for none by name."""
        if name is not None and name not in self.names and name not in self.aliases:
            served = ", ".join(repr(known) for known in self.names)
            raise APIError(
                404, f"the model {name[:200]!r} does not exist; served: {served}", "model", "model_not_found"
            )

    def check_length(self, prompt: str | Sequence[int], field: str = "prompt") -> None:
        """Raises APIError for a text that cannot fit, without encoding it."""
        if isinstance(prompt, str):
            self.check_size(len(prompt), field)

    def check_size(self, num_characters: int, field: str = "prompt") -> None:
        """Raises APIError for more characters than any prompt has that fits."""
        if num_characters > self.max_prompt_chars:
            raise bad_request(
                f"{field}: the prompt is too long: {num_characters} characters, more than max_model_len "
                f"{self.max_model_len} tokens hold",
                field,
                "context_length_exceeded",
            )


def get_model(request: Request) -> ServedModel:
    """The model, once it has been loaded. Raises APIError (503) before."""
    model: ServedModel | None = request.app.state.model
    if model is None:
        headers = {"Retry-After": "5"}
        raise APIError(503, "the model is being loaded", code="model_loading", headers=headers)
    return model
