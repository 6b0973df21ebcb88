"""Pieces -> a chat completion, whole or as chunks. Both are made of the same pieces, so they can't differ."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from server.api.logprobs import chat_logprobs, prompt_logprobs_object
from server.api.schemas import ChatBody
from server.api.service import Service, unix_now, usage_object
from server.api.sse import DONE, ChunkEncoder, error_frame
from server.frontend.generation import Job
from server.frontend.output import Piece
from server.frontend.tools.deltas import ToolCallDelta


@dataclass(slots=True)
class _Choice:
    """What an answer that is not streamed has of one choice so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add_call(self, delta: ToolCallDelta) -> None:
        if delta.name is not None:
            call = {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
            self.tool_calls.append(call)
        self.tool_calls[-1]["function"]["arguments"] += delta.arguments

    def message(self) -> dict[str, Any]:
        text = "".join(self.text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self.tool_calls and not text else text,
            "refusal": None,
        }
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


class ChatAnswer:
    """One request's answer. Written by: itself."""

    closing = DONE

    def __init__(self, body: ChatBody, job: Job, service: Service) -> None:
        self._body = body
        self._job = job
        self._tokenizer = service.tokenizer
        self._generation = service.generate(job)
        self._created = unix_now()
        self._model = service.model.name if body.model is None else body.model
        self._echo = _last_words(body) if body.echo else ""

    async def whole(self) -> dict[str, Any]:
        choices = [_Choice([self._echo]) for _ in range(self._job.n)]
        prompt_logprobs: list[dict[str, Any] | None] | None = None
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                choice = choices[piece.index]
                choice.text.append(piece.text)
                if piece.reasoning:
                    choice.reasoning.append(piece.reasoning)
                for call in piece.tool_calls or ():
                    choice.add_call(call)
                choice.token_ids += piece.token_ids
                if piece.logprobs is not None:
                    choice.logprobs += chat_logprobs(piece.logprobs, self._tokenizer)
                if piece.prompt_logprobs is not None:
                    prompt_logprobs = prompt_logprobs_object(piece.prompt_logprobs, self._tokenizer)
                if piece.finish_reason is not None:
                    choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
        answer = {
            **self._head("chat.completion"),
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": self._usage(),
            "prompt_logprobs": prompt_logprobs,
        }
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._job.prompts[0].token_ids
        return answer

    def error_frame(self, error: Exception) -> bytes:
        return error_frame(error)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        body = self._body
        encoder = ChunkEncoder(
            self._head("chat.completion.chunk"), text_path=("delta", "content"), with_usage=body.include_usage
        )
        plain = not (
            body.continuous_usage or body.return_token_ids or body.logprobs or self._job.make_parser is not None
        )
        begun = False
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                if not begun:
                    begun = True
                    yield self._opening(encoder, piece)
                if not plain:
                    for chunk in self._chunks(piece):
                        yield encoder.choice(chunk, usage=self._continuous_usage())
                elif piece.text:
                    yield encoder.text(piece.index, piece.text)
                if piece.finish_reason is not None:
                    finish = _chunk(piece.index, {}, finish_reason=piece.finish_reason)
                    finish["stop_reason"] = piece.stop_reason
                    yield encoder.choice(finish, usage=self._continuous_usage())
        if body.include_usage:
            yield encoder.usage(self._usage())

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._job.request_id, "object": kind, "created": self._created, "model": self._model}

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "index": index,
            "message": choice.message(),
            "logprobs": {"content": choice.logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.return_token_ids:
            answer["token_ids"] = choice.token_ids
        return answer

    def _opening(self, encoder: ChunkEncoder, piece: Piece) -> bytes:
        """The role, once a choice; what is known of the prompt goes with the first."""
        fields: dict[str, Any] = {}
        if piece.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs_object(piece.prompt_logprobs, self._tokenizer)
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = self._job.prompts[0].token_ids
        frames = []
        for index in range(self._job.n):
            choice = _chunk(index, {"role": "assistant", "content": ""})
            frames.append(encoder.choice(choice, usage=self._continuous_usage(), **(fields if index == 0 else {})))
            if self._echo:
                frames.append(encoder.text(index, self._echo))
        return b"".join(frames)

    def _chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """One chunk for each kind of thing that the piece adds. Token ids and log-probabilities go with the first."""
        deltas: list[dict[str, Any]] = []
        if piece.reasoning:
            deltas.append({"reasoning_content": piece.reasoning})
        if piece.text:
            deltas.append({"content": piece.text})
        deltas += [{"tool_calls": [_call_delta(call)]} for call in piece.tool_calls or ()]
        about_tokens = (self._body.return_token_ids and piece.token_ids) or piece.logprobs
        if not deltas and (about_tokens or (self._body.continuous_usage and piece.token_ids)):
            deltas.append({"content": ""})
        chunks = [_chunk(piece.index, delta) for delta in deltas]
        if chunks and piece.logprobs:
            chunks[0]["logprobs"] = {"content": chat_logprobs(piece.logprobs, self._tokenizer), "refusal": None}
        if chunks and self._body.return_token_ids:
            chunks[0]["token_ids"] = piece.token_ids
        return chunks

    def _continuous_usage(self) -> dict[str, Any] | None:
        return self._usage() if self._body.continuous_usage else None

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        shown = usage_object(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        return {**shown, "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens}}


def _last_words(body: ChatBody) -> str:
    """What the assistant had said already, where the answer goes on from there."""
    last = body.messages[-1]
    content = last.get("content") if last["role"] == "assistant" else None
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""


def _chunk(index: int, delta: dict[str, Any], *, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
