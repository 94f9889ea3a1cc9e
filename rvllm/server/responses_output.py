"""The output of /v1/responses: items, and the events by which a stream builds them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rvllm.request import CompletionOutput
from rvllm.server.chat_output import ChatOutput
from rvllm.server.errors import APIError
from rvllm.server.generation import Generation, new_id
from rvllm.server.logprobs import chat_logprobs
from rvllm.server.streaming import event

Event = dict[str, Any]


@dataclass
class _Piece:
    """A call, or text of a kind of item with the logprobs of its tokens."""

    kind: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    call: dict[str, Any] = field(default_factory=dict)


class ResponseOutput:
    """Builds the output items from deltas; fields: of the response that do not depend on the output."""

    def __init__(
        self, generation: Generation, chat_output: ChatOutput, fields: dict[str, Any], num_top: int
    ) -> None:
        self.generation = generation
        self.items: list[dict[str, Any]] = []
        self._fields = fields
        self._num_top = num_top
        self._chat_output = chat_output
        self._num_events = 0
        self._pending: list[dict[str, Any]] = []  # logprobs of tokens whose text is to come

    def whole(self) -> dict[str, Any]:
        completion = self.generation.results[0].outputs[0]
        for _ in self._add(completion):
            pass
        return self._response(completion.finish_reason)

    async def events(self) -> AsyncGenerator[bytes, None]:
        reason = None
        yield self._event({"type": "response.created", "response": self._response(None)})
        yield self._event({"type": "response.in_progress", "response": self._response(None)})
        try:
            async for _, output in self.generation:
                for completion in output.outputs:
                    reason = completion.finish_reason
                    for new in self._add(completion):
                        yield self._event(new)
            response = self._response(reason)
        except APIError as error:
            response = {**self._response(None), "status": "failed"}
            response["error"] = {"code": "server_error", "message": error.message}
        yield self._event({"type": f"response.{response['status']}", "response": response})

    def _event(self, fields: Event) -> bytes:
        numbered = {**fields, "sequence_number": self._num_events}
        self._num_events += 1
        return event(numbered, fields["type"])

    def _response(self, finish_reason: str | None) -> dict[str, Any]:
        """The response object; finish_reason None: it is still in progress."""
        usage = self.generation.usage() if finish_reason is not None else None
        status = (
            "in_progress"
            if finish_reason is None
            else "completed"
            if finish_reason == "stop"
            else "incomplete"
        )
        response = {**self._fields, "status": status, "output": self.items, "usage": None}
        if status == "incomplete":
            reason = "max_output_tokens" if finish_reason == "length" else finish_reason
            response["incomplete_details"] = {"reason": reason}
        if usage is not None:
            response["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._chat_output.num_reasoning_tokens},
                "total_tokens": usage["total_tokens"],
            }
        return response

    def _add(self, completion: CompletionOutput) -> Iterator[Event]:
        """Adds what is new; yields the events that say so."""
        for piece in self._pieces(completion):
            if piece.kind == "call":
                yield from self._call_delta(piece.call)
            else:
                yield from self._text_delta(piece.kind, "".join(piece.texts), piece.logprobs)
        if completion.is_finished:
            if not self.items:
                yield from self._open(_new_item("message"))
            if self._pending and self._is_open("message"):
                yield from self._text_delta("message", "", self._pending)
            yield from self._close("completed" if completion.finish_reason == "stop" else "incomplete")

    def _pieces(self, completion: CompletionOutput) -> list[_Piece]:
        """What is new, found token by token: the same, however many come at a time."""
        pieces: list[_Piece] = []
        logprobs, start = self._logprobs(completion), 0
        for i, length in enumerate(completion.text_lengths):
            self._pending += logprobs[i : i + 1]
            self._sort(self._chat_output.push(completion.text[start : start + length], 1), pieces)
            start += length
        self._sort(self._chat_output.push(completion.text[start:]), pieces)
        if completion.is_finished:
            self._sort(self._chat_output.finish(), pieces)
        return pieces

    def _sort(self, deltas: Sequence[dict[str, Any]], pieces: list[_Piece]) -> None:
        """Adds deltas; texts of one kind that follow each other become one piece."""
        for delta in deltas:
            logprobs, self._pending = self._pending, []
            if "tool_calls" in delta:
                pieces += [_Piece("call", call=call) for call in delta["tool_calls"]]
                continue
            kind = "reasoning" if "reasoning_content" in delta else "message"
            if not pieces or pieces[-1].kind != kind:
                pieces.append(_Piece(kind))
            pieces[-1].texts.append(delta["reasoning_content" if kind == "reasoning" else "content"])
            pieces[-1].logprobs += logprobs

    def _logprobs(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        if completion.logprobs is None:
            return []
        tokenizer = self.generation.model.tokenizer
        return chat_logprobs(tokenizer, completion.token_ids, completion.logprobs, self._num_top)

    def _text_delta(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if not self._is_open(kind):
            yield from self._close()
            yield from self._open(_new_item(kind))
        part = self.items[-1]["content"][0]
        part["text"] += text
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        fields: Event = {"type": f"response.{name}.delta", **self._place(), "content_index": 0, "delta": text}
        if kind == "message":
            part["logprobs"] += logprobs
            fields["logprobs"] = logprobs
        yield fields

    def _call_delta(self, call: dict[str, Any]) -> Iterator[Event]:
        function = call.get("function", {})
        if function.get("name"):
            yield from self._close()
            item = _new_item("function_call")
            yield from self._open(
                {**item, "call_id": call.get("id") or new_id("call_"), "name": function["name"]}
            )
        arguments = function.get("arguments") or ""
        if arguments:
            self.items[-1]["arguments"] += arguments
            yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": arguments}

    def _is_open(self, kind: str) -> bool:
        return (
            bool(self.items) and self.items[-1]["type"] == kind and self.items[-1]["status"] == "in_progress"
        )

    def _place(self) -> Event:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _open(self, item: dict[str, Any]) -> Iterator[Event]:
        content = item.pop("content", None)
        self.items.append(item)
        added = {**item, "content": []} if content is not None else item
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": added}
        if content is not None:
            item["content"] = content
            yield {
                "type": "response.content_part.added",
                **self._place(),
                "content_index": 0,
                "part": dict(content[0]),
            }

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """Ends the last item, if it is open."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return
        item = self.items[-1]
        item["status"] = status
        place = self._place()
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **place, **done}
        else:
            part = item["content"][0]
            name = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            done = {"text": part["text"]} | ({"logprobs": part["logprobs"]} if "logprobs" in part else {})
            yield {"type": f"response.{name}.done", **place, "content_index": 0, **done}
            yield {"type": "response.content_part.done", **place, "content_index": 0, "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}


def _new_item(kind: str) -> dict[str, Any]:
    if kind == "message":
        content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"id": new_id("msg_"), "type": kind, "role": "assistant", "content": [content]}
    elif kind == "reasoning":
        item = {
            "id": new_id("rs_"),
            "type": kind,
            "summary": [],
            "content": [{"type": "reasoning_text", "text": ""}],
        }
    else:
        item = {"id": new_id("fc_"), "type": kind, "arguments": ""}
    return {**item, "status": "in_progress"}
