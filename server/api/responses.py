"""POST /v1/responses: OpenAI's newer endpoint, without a memory: every request brings its whole conversation."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.answers import TypedAnswer, respond
from server.api.chat import make_chat_job
from server.api.errors import fields_named
from server.api.responses_input import ResponsesBody, as_chat_body
from server.api.responses_output import ResponseBuilder
from server.api.routing import add_post
from server.api.schemas import parse
from server.api.service import Service, unix_now
from server.errors import InvalidRequest

_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
}
"""Fields of the chat request -> where they came from."""


def responses_router(service: Service) -> APIRouter:
    router = APIRouter()

    async def create(request: Request, raw: bytes) -> Response:
        body = parse(ResponsesBody, raw)
        if body.max_output_tokens is not None and body.max_output_tokens < 1:
            raise InvalidRequest("max_output_tokens must be 1 or more", param="max_output_tokens")
        with fields_named(_NAMES):
            job = await make_chat_job(request, as_chat_body(body), service)
        builder = ResponseBuilder(
            body,
            model=body.model or service.model.name,
            created=unix_now(),
            tokenizer=service.tokenizer,
            defaults=service.model.defaults,
        )
        return await respond(request, TypedAnswer(service.generate(job), builder), service, stream=body.stream)

    add_post(router, "/v1/responses", create, service=service, body_type=ResponsesBody)
    return router
