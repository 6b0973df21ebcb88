"""POST /v1/completions: the legacy text endpoint, and the one that evaluation tools score with."""

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.answers import respond
from server.api.logprobs import join_legacy, legacy_logprobs, legacy_prompt_logprobs, prompt_logprobs_object, with_top
from server.api.prompts import read_prompts
from server.api.routing import add_post
from server.api.schemas import CompletionBody, parse
from server.api.service import Service, unix_now, usage_object
from server.api.sse import DONE, ChunkEncoder, error_frame
from server.api.structured import checked_grammar
from server.frontend.generation import Job, Prompt
from server.frontend.output import Piece

_DEFAULT_MAX_TOKENS = 16
"""As OpenAI documents it for this endpoint."""


def completions_router(service: Service) -> APIRouter:
    router = APIRouter()

    async def create(request: Request, raw: bytes) -> Response:
        body = parse(CompletionBody, raw)
        job = await _make_job(request, body, service)
        return await respond(request, _Answer(body, job, service), service, stream=body.stream)

    add_post(router, "/v1/completions", create, service=service, body_type=CompletionBody)
    return router


async def _make_job(request: Request, body: CompletionBody, service: Service) -> Job:
    service.check_model(body.model)
    service.ready()
    prompts = await read_prompts(
        body.prompt,
        service=service,
        add_special_tokens=body.add_special_tokens is not False,
        may_exceed=body.truncate_prompt_tokens is not None,
    )
    options = body.sampling_options(
        max_tokens=_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        grammar=await checked_grammar(body.response_format, body.structured_outputs, service.grammars),
    )
    if body.echo and body.logprobs is not None and (body.prompt_logprobs or 0) >= 0:
        options = dataclasses.replace(options, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    return service.make_job(request, body, prompts, options, id_prefix="cmpl-")


@dataclass(slots=True)
class _Choice:
    """What an answer that is not streamed has of one choice so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Answer:
    """One request's answer, whole or as a stream: both are made of the same pieces. Written by: itself."""

    closing = DONE

    def __init__(self, body: CompletionBody, job: Job, service: Service) -> None:
        self._body = body
        self._job = job
        self._tokenizer = service.tokenizer
        self._generation = service.generate(job)
        self._head = {
            "id": job.request_id,
            "object": "text_completion",
            "created": unix_now(),
            "model": service.model.name if body.model is None else body.model,
        }
        self._begun: set[int] = set()

    async def whole(self) -> dict[str, Any]:
        choices = [_Choice() for _ in range(self._job.num_choices)]
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                choice = choices[piece.index]
                part = self._part(piece)
                choice.text.append(part["text"])
                choice.token_ids += piece.token_ids
                choice.logprobs = join_legacy(choice.logprobs, part["logprobs"])
                choice.prompt_logprobs = part.get("prompt_logprobs", choice.prompt_logprobs)
                if piece.finish_reason is not None:
                    choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
        return {**self._head, "choices": [self._choice(i, c) for i, c in enumerate(choices)], "usage": self._usage()}

    def error_frame(self, error: Exception) -> bytes:
        return error_frame(error)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        body = self._body
        encoder = ChunkEncoder(self._head, text_path=("text",), with_usage=body.include_usage)
        plain = not body.continuous_usage and not body.return_token_ids and body.logprobs is None
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                if plain and piece.finish_reason is None and piece.index in self._begun:
                    if piece.text:
                        yield encoder.text(piece.index, piece.text)
                    continue
                part = self._part(piece)
                if not plain or part["text"] or piece.finish_reason:
                    yield encoder.choice(part, usage=self._usage() if body.continuous_usage else None)
        if body.include_usage:
            yield encoder.usage(self._usage())

    def _part(self, piece: Piece) -> dict[str, Any]:
        """A streamed choice. A choice's first one carries the echo."""
        part: dict[str, Any] = {"index": piece.index, "text": piece.text, "logprobs": None}
        first = piece.index not in self._begun
        self._begun.add(piece.index)
        prompt = self._job.prompts[piece.index // self._job.n]
        echo = self._echo(prompt) if self._body.echo else ""
        if piece.logprobs is not None:
            # One entry a completion token, as usage counts them: scoring tools drop the last ones by number.
            scored = piece.logprobs if piece.end_logprobs is None else [*piece.logprobs, piece.end_logprobs]
            part["logprobs"] = legacy_logprobs(scored, self._tokenizer, base_offset=len(echo))
        if first and echo:
            part["text"] = echo + piece.text
            if self._body.logprobs is not None and piece.prompt_logprobs is not None:
                scores = with_top(piece.prompt_logprobs, self._body.logprobs)
                echoed = legacy_prompt_logprobs(prompt.token_ids, scores, self._tokenizer)
                part["logprobs"] = join_legacy(echoed, part["logprobs"])
        part["finish_reason"] = piece.finish_reason
        if piece.finish_reason is not None:
            part["stop_reason"] = piece.stop_reason
        if self._body.return_token_ids:
            part["token_ids"] = piece.token_ids
            if first:
                part["prompt_token_ids"] = prompt.token_ids
        if piece.prompt_logprobs is not None and self._body.prompt_logprobs is not None:
            scores = with_top(piece.prompt_logprobs, self._body.prompt_logprobs)
            part["prompt_logprobs"] = prompt_logprobs_object(scores, self._tokenizer)
        return part

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        answer = {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "prompt_logprobs": choice.prompt_logprobs,
        }
        if self._body.return_token_ids:
            answer["token_ids"] = choice.token_ids
            answer["prompt_token_ids"] = self._job.prompts[index // self._job.n].token_ids
        return answer

    def _echo(self, prompt: Prompt) -> str:
        """The text as it was sent; of token ids, their own."""
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        return usage_object(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
