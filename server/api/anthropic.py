"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients send them."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.anthropic_input import CountTokensBody, MessagesBody, as_chat_body
from server.api.anthropic_output import MessageBuilder, anthropic_error
from server.api.chat import make_chat_job
from server.api.chat_prompt import read_chat_prompt
from server.api.errors import as_serving_error, json_response
from server.api.routing import add_post
from server.api.schemas import parse
from server.api.service import Service
from server.api.sse import typed_frame
from server.api.tools import read_tools
from server.api.transport import EventStream, until_disconnect
from server.frontend.generation import Generation

PATH = "/v1/messages"


def anthropic_router(service: Service) -> APIRouter:
    router = APIRouter()

    async def create(request: Request, raw: bytes) -> Response:
        body = parse(MessagesBody, raw)
        generation = service.generate(await make_chat_job(request, as_chat_body(body), service))
        builder = MessageBuilder(model=body.model or service.model.name)
        if body.stream:
            return EventStream(_frames(generation, builder), error_frame=_error_frame, closing=b"")
        return json_response(await until_disconnect(request.receive, _whole(generation, builder)))

    async def count_tokens(_request: Request, raw: bytes) -> Response:
        body = as_chat_body(parse(CountTokensBody, raw))
        service.check_model(body.model)
        return json_response(
            {
                "input_tokens": len(
                    (
                        await read_chat_prompt(
                            body, service, tools=read_tools(body.tools, body.tool_choice, None).tools
                        )
                    ).token_ids
                )
            }
        )

    add_post(router, PATH, create, service=service, body_type=MessagesBody)
    add_post(router, f"{PATH}/count_tokens", count_tokens, service=service, body_type=CountTokensBody)
    return router


async def _whole(generation: Generation, builder: MessageBuilder) -> dict[str, Any]:
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            for _ in builder.push(piece, generation.usage):
                pass
    return builder.message


async def _frames(generation: Generation, builder: MessageBuilder) -> AsyncGenerator[bytes, None]:
    begun = False
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            events = [] if begun else list(builder.begin(generation.usage))
            begun = True
            events += builder.push(piece, generation.usage)
            if events:
                yield b"".join(map(typed_frame, events))


def _error_frame(error: Exception) -> bytes:
    return typed_frame(anthropic_error(as_serving_error(error)))
