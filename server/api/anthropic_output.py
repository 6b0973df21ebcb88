"""Pieces -> an Anthropic message: blocks of content, and the events by which a client watches them grow."""

import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

from server.api.answers import Event
from server.api.errors import as_serving_error
from server.errors import ClientFault, EngineFault
from server.frontend.generation import Usage
from server.frontend.output import Piece
from server.protocol import FinishReason

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}


def anthropic_error(error: ClientFault | EngineFault) -> dict[str, Any]:
    """Anthropic's body, with the fields of OpenAI's in it: clients of both read it."""
    kind = _ERROR_TYPES.get(error.status, "api_error")
    shown = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    return {"type": "error", "error": shown}


class MessageBuilder:
    """One message. Written by: itself, through begin() and push().

    Blocks follow one another: the newest is open until another begins or the answer ends.
    """

    def __init__(self, *, model: str, hides_thinking: bool = False) -> None:
        """hides_thinking: its blocks are there, and empty."""
        self._hides_thinking = hides_thinking
        self._open: dict[str, Any] | None = None
        self._arguments = ""
        self.answer: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": None,
        }

    def begin(self, usage: Usage) -> Iterator[Event]:
        message = {**self.answer, "content": [], "usage": {**_usage(usage), "output_tokens": 0}}
        yield {"type": "message_start", "message": message}

    def push(self, piece: Piece, usage: Usage) -> Iterator[Event]:
        if piece.reasoning:
            yield from self._begin_block({"type": "thinking", "thinking": "", "signature": ""})
            if not self._hides_thinking:
                yield self._grow("thinking", {"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.text:
            yield from self._begin_block({"type": "text", "text": ""})
            yield self._grow("text", {"type": "text_delta", "text": piece.text})
        for call in piece.tool_calls or ():
            if call.name is not None:
                yield from self._end_block()
                yield from self._begin_block({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            if call.arguments:
                self._arguments += call.arguments
                delta = {"type": "input_json_delta", "partial_json": call.arguments}
                yield {"type": "content_block_delta", "index": self._index(), "delta": delta}
        if piece.finish_reason is not None:
            yield from self._end_block()
            yield from self._end(piece, piece.finish_reason, usage)

    def fail(self, error: Exception) -> Iterator[Event]:
        yield anthropic_error(as_serving_error(error))

    def _begin_block(self, block: dict[str, Any]) -> Iterator[Event]:
        if self._open is not None and self._open["type"] == block["type"]:
            return
        yield from self._end_block()
        self._open = block
        self.answer["content"].append(block)
        yield {"type": "content_block_start", "index": self._index(), "content_block": dict(block)}

    def _grow(self, field: str, delta: dict[str, Any]) -> Event:
        assert self._open is not None
        self._open[field] += delta[field]
        return {"type": "content_block_delta", "index": self._index(), "delta": delta}

    def _end_block(self) -> Iterator[Event]:
        if self._open is None:
            return
        if self._open["type"] == "tool_use":
            self._open["input"] = _as_object(self._arguments)
            self._arguments = ""
        self._open = None
        yield {"type": "content_block_stop", "index": self._index()}

    def _end(self, piece: Piece, reason: FinishReason, usage: Usage) -> Iterator[Event]:
        stopped = isinstance(piece.stop_reason, str)
        self.answer["stop_reason"] = "stop_sequence" if stopped else _STOP_REASONS[reason]
        self.answer["stop_sequence"] = piece.stop_reason if stopped else None
        self.answer["usage"] = _usage(usage)
        delta = {"stop_reason": self.answer["stop_reason"], "stop_sequence": self.answer["stop_sequence"]}
        yield {"type": "message_delta", "delta": delta, "usage": self.answer["usage"]}
        yield {"type": "message_stop"}

    def _index(self) -> int:
        return len(self.answer["content"]) - 1


def _as_object(arguments: str) -> dict[str, Any]:
    """What was cut off by max_tokens is no JSON; the block then shows what there was."""
    try:
        parsed = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"_incomplete": arguments}


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts cached tokens apart from the other input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
