"""What answers a ChatSession: a model loaded in this process, or a server that speaks OpenAI's API."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from rvllm.chat_session import ChatDelta, ChatError, ChatTooLongError, Message
from rvllm.http_client import bearer, event_data
from rvllm.reasoning_formats import find_reasoning
from rvllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rvllm.harmony import HarmonyParser
    from rvllm.llm import LLM
    from rvllm.reasoning_parser import ReasoningParser
    from rvllm.request_group import RequestGroup

ROOM = 1 / 4  # of the context, at most, that an answer must find free
TIMEOUT = 600.0  # seconds without a byte from the server
SENT_ALWAYS = ("temperature", "max_tokens")


class LocalChat:
    """A model in this process. Raises ChatError if it has no chat template."""

    def __init__(self, llm: LLM, name: str) -> None:
        if llm.chat_template is None:
            raise ChatError(f"{name}: the model has no chat template: use rvllm generate, or another model")
        self.name = name
        self.max_model_len: int | None = llm.engine.max_model_len
        self._llm = llm
        self._reasoning = find_reasoning(llm.chat_template.source)
        self._num_requests = 0

    def stream(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[ChatDelta]:
        engine = self._llm.engine
        room = int(engine.max_model_len * ROOM)
        if params.max_tokens is not None:
            room = min(room, params.max_tokens)
        request_id = f"chat-{self._num_requests}"
        tokenizer, parser = self._llm.tokenizer, None
        if self._reasoning is not None and any(map(tokenizer.has_control, self._reasoning.marks)):
            params = replace(params, skip_special_tokens=False)
        try:
            ids = self._llm.encode_chat(messages)
            if len(ids) + room > engine.max_model_len:
                raise ChatTooLongError(
                    f"the messages have {len(ids)} tokens, too many for a context of "
                    f"{engine.max_model_len} and an answer"
                )
            group = engine.prepare(request_id, ids, params)
        except ValueError as error:
            raise ChatError(" ".join(str(error).split())) from None
        self._num_requests += 1
        if self._reasoning is not None:
            parser = self._reasoning.parser(self._reasoning.is_thinking_after(ids, tokenizer))
        return self._run(group, len(ids), parser)

    def interrupt(self) -> None:
        """Each step of the engine ends soon."""

    def _run(
        self, group: RequestGroup, num_prompt_tokens: int, parser: ReasoningParser | HarmonyParser | None
    ) -> Iterator[ChatDelta]:
        engine = self._llm.engine
        num_tokens = num_cached_tokens = 0
        finished = False
        try:
            engine.submit(group)
            while not finished:
                # An interrupt in the middle of a step would leave the engine between two states.
                with deferred_interrupt():
                    outputs = engine.step()
                text, finish_reason = "", None
                for output in outputs:
                    completion = output.outputs[0]
                    text += completion.text
                    num_tokens += len(completion.token_ids)
                    num_cached_tokens = output.num_cached_tokens
                    finish_reason, finished = completion.finish_reason, output.finished
                reasoning = ""
                if parser is not None:
                    reasoning, text = parser.push(text)
                    if finished:
                        rest = parser.finish()
                        reasoning, text = reasoning + rest[0], text + rest[1]
                yield ChatDelta(
                    text,
                    reasoning,
                    num_tokens,
                    num_prompt_tokens,
                    num_cached_tokens,
                    finish_reason if finished else None,
                )
        finally:
            if not finished:
                engine.abort(group.request_id)


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """SIGINT takes effect at the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if received and callable(handler):
        handler(*received[0])


class ServerChat:
    """A server at url (http://host:port, with or without /v1). model: None takes the first that it serves.

    Raises ChatError if there is none.
    """

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        parts = _split_url(url)
        self._url = url
        self._parts = parts
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            try:
                self._headers["Authorization"] = bearer(api_key)
            except ValueError as error:
                raise ChatError(str(error)) from None
        self._socket: socket.socket | None = None  # of the answer that is coming
        cards = self.models()
        card = next((card for card in cards if model in (None, card.get("id"))), None)
        if card is None:
            names = ", ".join(str(card.get("id")) for card in cards) or "none"
            raise ChatError(f"{url}: does not serve {model or 'any model'}, only: {names}")
        self.name = str(card.get("id"))
        length = card.get("max_model_len")
        self.max_model_len = length if isinstance(length, int) else None

    def models(self) -> list[Mapping[str, Any]]:
        with self._request("GET", "/models") as response, self._connection_errors():
            cards = self._json(response.read()).get("data")
            if not isinstance(cards, list) or not all(isinstance(card, dict) for card in cards):
                raise ChatError(f"{self._url}: is no server of OpenAI's API")
            return cards

    def stream(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[ChatDelta]:
        body = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_request_fields(params),
        }
        return self._read(self._request("POST", "/chat/completions", json.dumps(body).encode()))

    def interrupt(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self, response: http.client.HTTPResponse) -> Iterator[ChatDelta]:
        num_tokens, finish_reason = 0, None
        with response, self._connection_errors():
            for line in response:
                data = event_data(line)
                if not data:
                    continue
                if data == b"[DONE]":
                    return
                chunk = self._json(data)
                if "error" in chunk:
                    raise ChatError(f"{self._url}: {_message_of(chunk)}")
                usage = chunk.get("usage") or {}
                choice: dict[str, Any] = next(iter(chunk.get("choices") or []), {})
                delta = choice.get("delta") or {}
                text = delta.get("content") or ""
                reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""  # vLLM's name
                finish_reason = choice.get("finish_reason") or finish_reason
                num_tokens = usage.get("completion_tokens", num_tokens + bool(text or reasoning))
                details = usage.get("prompt_tokens_details") or {}
                yield ChatDelta(
                    text,
                    reasoning,
                    num_tokens,
                    usage.get("prompt_tokens", 0),
                    details.get("cached_tokens") or 0,
                    finish_reason,
                )
        raise ChatError(f"{self._url}: the answer broke off")

    def _json(self, data: bytes) -> dict[str, Any]:
        with suppress(ValueError):
            content = json.loads(data)
            if isinstance(content, dict):
                return content
        raise ChatError(f"{self._url}: is no server of OpenAI's API")

    def _request(self, method: str, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        """A response of status 200. Raises ChatError."""
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        with self._connection_errors():
            connection = kind(self._parts.hostname or "", self._parts.port, timeout=TIMEOUT)
            try:
                # So that closing the response closes the connection, and the server stops.
                headers = {**self._headers, "Connection": "close"}
                connection.request(method, self._path + path, body, headers)
                self._socket = connection.sock
                response = connection.getresponse()
            except BaseException:
                connection.close()
                raise
            if response.status == 200:
                return response
            with response:
                raise self._refusal(response)

    def _refusal(self, response: http.client.HTTPResponse) -> ChatError:
        content: Any = None
        with suppress(ValueError):
            content = json.loads(response.read())
        message = _message_of(content)
        error = content.get("error") if isinstance(content, dict) else None
        if isinstance(error, dict) and error.get("code") == "context_length_exceeded":
            return ChatTooLongError(message)
        retry = response.headers.get("Retry-After")
        hint = f"; try again in {retry} s" if retry else ""
        if response.status == 401:
            hint = "; give it with --api-key or $RVLLM_API_KEY"
        return ChatError(f"{self._url}: {response.status}: {message or response.reason}{hint}")

    @contextmanager
    def _connection_errors(self) -> Iterator[None]:
        try:
            yield
        except socket.gaierror as error:
            raise ChatError(f"{self._url}: no such host: {error.strerror}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ChatError(f"{self._url}: {reason or type(error).__name__}") from None


def _split_url(url: str) -> SplitResult:
    """Raises ChatError if the URL is not one that http.client can ask."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host = (parts.hostname or "").encode("idna")
        valid = parts.scheme in ("http", "https") and host and parts.port != 0 and parts.path.isascii()
    except ValueError:  # of the host's brackets or labels, or of the port
        valid = False
    if not valid:
        raise ChatError(f"{url!r} is no URL such as http://localhost:8000")
    return parts


def _request_fields(params: SamplingParams) -> dict[str, Any]:
    """What differs from OpenAI's defaults: not every server knows every field."""
    return {
        field.name: getattr(params, field.name)
        for field in fields(params)
        if field.name in SENT_ALWAYS or getattr(params, field.name) != field.default
    }


def _message_of(content: object) -> str:
    """What an error's body says, on one line."""
    error = content.get("error") if isinstance(content, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(message).split()) if message else ""
