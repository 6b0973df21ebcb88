"""POST /v1/chat/completions."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.chat_prompt import read_chat_prompt
from server.api.errors import json_response
from server.api.logprobs import chat_logprobs, prompt_logprobs_object
from server.api.routing import add_post
from server.api.schemas import ChatBody, parse
from server.api.service import Service, unix_now, usage_object
from server.api.sse import DONE, ChunkEncoder, error_frame
from server.api.structured import checked_grammar
from server.api.transport import EventStream, until_disconnect
from server.errors import InvalidRequest, UnsupportedFeature
from server.frontend.generation import Job
from server.frontend.output import Piece


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()

    async def create(request: Request, raw: bytes) -> Response:
        body = parse(ChatBody, raw)
        job = await make_chat_job(request, body, service)
        answer = ChatAnswer(body, job, service)
        if body.stream:
            return EventStream(answer.frames(), error_frame=error_frame, closing=DONE)
        return json_response(await until_disconnect(request.receive, answer.whole()))

    add_post(router, "/v1/chat/completions", create, service=service, body_type=ChatBody)
    return router


async def make_chat_job(request: Request, body: ChatBody, service: Service) -> Job:
    """Raises before anything is generated, for whatever is wrong with the request."""
    service.check_model(body.model)
    service.ready()
    _refuse_unsupported(body)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is not None and max_tokens < 1:
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise InvalidRequest(f"{name} must be 1 or more, not {max_tokens}", param=name)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs = true", param="top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= service.limits.max_logprobs:
        raise InvalidRequest(f"top_logprobs must be between 0 and {service.limits.max_logprobs}", param="top_logprobs")
    prompt = await read_chat_prompt(body, service)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    grammar = await checked_grammar(body.response_format, body.structured_outputs, service.grammars)
    options = body.sampling_options(max_tokens=max_tokens, logprobs=logprobs, grammar=grammar)
    return service.make_job(request, body, [prompt], options, id_prefix="chatcmpl-")


def _refuse_unsupported(body: ChatBody) -> None:
    """Fields of the API that nothing here honours; each has values that mean "not used"."""
    unused: dict[str, tuple[Any, ...]] = {
        "modalities": (["text"],),
        "audio": (),
        "functions": ([],),
        "function_call": ("none",),
        "prediction": (),
        "web_search_options": (),
        "verbosity": ("medium",),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
    }
    for name, harmless in unused.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise UnsupportedFeature(f"{name} is not supported here", param=name)


@dataclass(slots=True)
class _Choice:
    """What an answer that is not streamed has of one choice so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatAnswer:
    """One request's answer, whole or as a stream. Written by: itself."""

    def __init__(self, body: ChatBody, job: Job, service: Service) -> None:
        self._body = body
        self._job = job
        self._tokenizer = service.tokenizer
        self._generation = service.generate(job)
        self._id = job.request_id
        self._created = unix_now()
        self._model = service.model.name if body.model is None else body.model

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    async def whole(self) -> dict[str, Any]:
        choices = [_Choice() for _ in range(self._job.n)]
        prompt_logprobs: list[dict[str, Any] | None] | None = None
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                choice = choices[piece.index]
                choice.text.append(piece.text)
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

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": {"content": choice.logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.return_token_ids:
            answer["token_ids"] = choice.token_ids
        return answer

    async def frames(self) -> AsyncGenerator[bytes, None]:
        body = self._body
        encoder = ChunkEncoder(
            self._head("chat.completion.chunk"), text_path=("delta", "content"), with_usage=body.include_usage
        )
        plain = not body.continuous_usage and not body.return_token_ids and not body.logprobs
        begun = False
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                if not begun:
                    begun = True
                    yield self._opening(encoder, piece)
                if plain:
                    if piece.text:
                        yield encoder.text(piece.index, piece.text)
                elif piece.text or piece.token_ids or piece.logprobs:
                    yield encoder.choice(self._chunk(piece), usage=self._continuous_usage())
                if piece.finish_reason is not None:
                    yield encoder.choice(self._finish_chunk(piece), usage=self._continuous_usage())
        if body.include_usage:
            yield encoder.usage(self._usage())

    def _opening(self, encoder: ChunkEncoder, piece: Piece) -> bytes:
        """The role, once a choice; what is known of the prompt goes with the first."""
        fields: dict[str, Any] = {}
        if piece.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs_object(piece.prompt_logprobs, self._tokenizer)
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = self._job.prompts[0].token_ids
        frames = []
        for index in range(self._job.n):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            frames.append(encoder.choice(choice, usage=self._continuous_usage(), **(fields if index == 0 else {})))
        return b"".join(frames)

    def _chunk(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if piece.logprobs:
            logprobs = {"content": chat_logprobs(piece.logprobs, self._tokenizer), "refusal": None}
        chunk = {
            "index": piece.index,
            "delta": {"content": piece.text},
            "logprobs": logprobs,
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            chunk["token_ids"] = piece.token_ids
        return chunk

    def _finish_chunk(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "delta": {},
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def _continuous_usage(self) -> dict[str, Any] | None:
        return self._usage() if self._body.continuous_usage else None

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        return usage_object(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
