"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients send them."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.answers import TypedAnswer, respond
from server.api.anthropic_input import CountTokensBody, MessagesBody, as_chat_body
from server.api.anthropic_output import MessageBuilder
from server.api.chat import make_chat_job
from server.api.chat_prompt import read_chat_prompt
from server.api.errors import json_response
from server.api.routing import add_post
from server.api.schemas import parse
from server.api.service import Service
from server.api.tools import read_tools

PATH = "/v1/messages"


def anthropic_router(service: Service) -> APIRouter:
    router = APIRouter()

    async def create(request: Request, raw: bytes) -> Response:
        body = parse(MessagesBody, raw)
        job = await make_chat_job(request, as_chat_body(body), service)
        builder = MessageBuilder(model=body.model or service.model.name)
        return await respond(request, TypedAnswer(service.generate(job), builder), service, stream=body.stream)

    async def count_tokens(_request: Request, raw: bytes) -> Response:
        body = as_chat_body(parse(CountTokensBody, raw))
        service.check_model(body.model)
        tools = read_tools(body.tools, body.tool_choice, None).tools
        prompt = await read_chat_prompt(body, service, tools=tools)
        return json_response({"input_tokens": len(prompt.token_ids)})

    add_post(router, PATH, create, service=service, body_type=MessagesBody)
    add_post(router, f"{PATH}/count_tokens", count_tokens, service=service, body_type=CountTokensBody)
    return router
