"""Pieces -> the items of a Response, and the events by which a client watches them grow."""

import secrets
from collections.abc import Iterator
from typing import Any

from server.api.answers import Event
from server.api.errors import as_serving_error
from server.api.logprobs import chat_logprobs
from server.api.responses_input import LOGPROBS, ResponsesBody
from server.frontend.generation import Usage
from server.frontend.output import Piece
from server.frontend.sampling_defaults import SamplingDefaults
from server.frontend.tools.deltas import ToolCallDelta
from server.protocol import FinishReason
from server.tokenizer import Tokenizer


class ResponseBuilder:
    """One Response. Written by: itself, through begin(), push(), fail(). Events not iterated over are not made.

    Items follow one another: the newest is open until another begins or the answer ends.
    """

    def __init__(
        self, body: ResponsesBody, *, model: str, created: int, tokenizer: Tokenizer, defaults: SamplingDefaults
    ) -> None:
        self._tokenizer = tokenizer
        self._want_logprobs = LOGPROBS in (body.include or ())
        self._sequence_number = 0
        self._open: dict[str, Any] | None = None
        self.answer: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": defaults.temperature if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": defaults.top_p if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def begin(self, _usage: Usage) -> Iterator[Event]:
        yield self._event("response.created", response=dict(self.answer))
        yield self._event("response.in_progress", response=dict(self.answer))

    def push(self, piece: Piece, usage: Usage) -> Iterator[Event]:
        if piece.reasoning:
            yield from self._grow_reasoning(piece.reasoning)
        if piece.text or piece.logprobs:
            yield from self._grow_message(piece)
        for call in piece.tool_calls or ():
            yield from self._grow_call(call)
        if piece.finish_reason is not None:
            yield from self._end(piece.finish_reason, usage)

    def fail(self, error: Exception) -> Iterator[Event]:
        shown = as_serving_error(error)
        self.answer["status"] = "failed"
        self.answer["error"] = {"code": shown.code or "server_error", "message": shown.message}
        yield self._event("response.failed", response=self.answer)

    def _grow_reasoning(self, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != "reasoning":
            item: dict[str, Any] = {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": ""}],
            }
            yield from self._begin_item("rs", item)
        self._open_item()["content"][0]["text"] += text
        yield self._item_event("response.reasoning_text.delta", content_index=0, delta=text)

    def _grow_message(self, piece: Piece) -> Iterator[Event]:
        if self._open is None or self._open["type"] != "message":
            yield from self._begin_item("msg", {"type": "message", "role": "assistant", "content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._item_event("response.content_part.added", content_index=0, part=dict(part))
            self._open_item()["content"].append(part)
        logprobs = chat_logprobs(piece.logprobs, self._tokenizer) if self._want_logprobs and piece.logprobs else []
        part = self._open_item()["content"][0]
        part["text"] += piece.text
        part["logprobs"] += logprobs
        yield self._item_event("response.output_text.delta", content_index=0, delta=piece.text, logprobs=logprobs)

    def _grow_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.name is not None:
            item = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
            yield from self._begin_item("fc", item)
        if call.arguments:
            self._open_item()["arguments"] += call.arguments
            yield self._item_event("response.function_call_arguments.delta", delta=call.arguments)

    def _end(self, reason: FinishReason, usage: Usage) -> Iterator[Event]:
        if self._open is None and not self.answer["output"]:
            yield from self._grow_message(Piece(0, "", []))
        whole = reason is not FinishReason.LENGTH
        yield from self._end_item("completed" if whole else "incomplete")
        self.answer["status"] = "completed" if whole else "incomplete"
        self.answer["incomplete_details"] = None if whole else {"reason": "max_output_tokens"}
        self.answer["usage"] = _usage(usage)
        yield self._event(f"response.{self.answer['status']}", response=self.answer)

    def _begin_item(self, prefix: str, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._end_item("completed")
        self._open = {"id": f"{prefix}_{secrets.token_hex(16)}", "status": "in_progress", **item}
        self.answer["output"].append(self._open)
        yield self._event("response.output_item.added", output_index=self._index(), item=_copied(self._open))

    def _end_item(self, status: str) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        item["status"] = status
        match item["type"]:
            case "message":
                part = item["content"][0]
                yield self._item_event(
                    "response.output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"]
                )
                yield self._item_event("response.content_part.done", content_index=0, part=part)
            case "reasoning":
                text = item["content"][0]["text"]
                yield self._item_event("response.reasoning_text.done", content_index=0, text=text)
            case "function_call":
                yield self._item_event(
                    "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
                )
        yield self._event("response.output_item.done", output_index=self._index(), item=item)
        self._open = None

    def _open_item(self) -> dict[str, Any]:
        assert self._open is not None
        return self._open

    def _index(self) -> int:
        return len(self.answer["output"]) - 1

    def _item_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._open_item()["id"], output_index=self._index(), **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return event


def _copied(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now: the item itself goes on growing."""
    return {key: list(value) if isinstance(value, list) else value for key, value in item.items()}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
