"""POST /v1/responses: OpenAI's newer endpoint, without a memory: every request brings its whole conversation."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.chat import make_chat_job
from server.api.errors import json_response
from server.api.responses_input import ResponsesBody, as_chat_body
from server.api.responses_output import ResponseBuilder
from server.api.routing import add_post
from server.api.schemas import parse
from server.api.service import Service, unix_now
from server.api.sse import typed_frame
from server.api.transport import EventStream, until_disconnect
from server.errors import InvalidRequest
from server.frontend.generation import Generation


def responses_router(service: Service) -> APIRouter:
    router = APIRouter()

    async def create(request: Request, raw: bytes) -> Response:
        body = parse(ResponsesBody, raw)
        if body.max_output_tokens is not None and body.max_output_tokens < 1:
            raise InvalidRequest("max_output_tokens must be 1 or more", param="max_output_tokens")
        job = await make_chat_job(request, as_chat_body(body), service)
        builder = ResponseBuilder(
            body, model=body.model or service.model.name, created=unix_now(), tokenizer=service.tokenizer
        )
        generation = service.generate(job)
        if body.stream:

            def error_frame(error: Exception) -> bytes:
                return b"".join(map(typed_frame, builder.fail(error)))

            return EventStream(_frames(generation, builder), error_frame=error_frame, closing=b"")
        return json_response(await until_disconnect(request.receive, _whole(generation, builder)))

    add_post(router, "/v1/responses", create, service=service, body_type=ResponsesBody)
    return router


async def _whole(generation: Generation, builder: ResponseBuilder) -> dict[str, Any]:
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            for _ in builder.push(piece, generation.usage):
                pass
    return builder.response


async def _frames(generation: Generation, builder: ResponseBuilder) -> AsyncGenerator[bytes, None]:
    begun = False
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            frames = [] if begun else [typed_frame(event) for event in builder.begin()]
            begun = True
            frames += [typed_frame(event) for event in builder.push(piece, generation.usage)]
            if frames:
                yield b"".join(frames)
