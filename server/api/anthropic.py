"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients send them."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.answers import TypedAnswer, respond
from server.api.anthropic_input import CountTokensBody, MessagesBody, as_chat_body, thinking_of
from server.api.anthropic_output import MessageBuilder
from server.api.chat import make_chat_job
from server.api.chat_prompt import chat_template_of, read_chat_prompt
from server.api.errors import fields_named, json_response
from server.api.routing import add_post
from server.api.schemas import ChatBody, parse
from server.api.service import Service
from server.api.tools import read_tools
from server.errors import UnsupportedFeature

PATH = "/v1/messages"
_NAMES = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
}
"""Fields of the chat request -> where they came from."""


def anthropic_router(service: Service) -> APIRouter:
    router = APIRouter()

    async def create(request: Request, raw: bytes) -> Response:
        body = parse(MessagesBody, raw)
        with fields_named(_NAMES):
            job = await make_chat_job(request, _as_chat_body(body, service), service)
        hides_thinking = (body.thinking or {}).get("display") == "omitted"
        builder = MessageBuilder(model=body.model or service.model.name, hides_thinking=hides_thinking)
        return await respond(request, TypedAnswer(service.generate(job), builder), service, stream=body.stream)

    async def count_tokens(_request: Request, raw: bytes) -> Response:
        parsed = parse(CountTokensBody, raw)
        with fields_named(_NAMES):
            body = _as_chat_body(parsed, service)
            service.check_model(body.model)
            tools = read_tools(body.tools, body.tool_choice, None).tools
            prompt = await read_chat_prompt(body, service, tools=tools, may_think=body.response_format is None)
        return json_response({"input_tokens": len(prompt.token_ids)})

    add_post(router, PATH, create, service=service, body_type=MessagesBody)
    add_post(router, f"{PATH}/count_tokens", count_tokens, service=service, body_type=CountTokensBody)
    return router


def _as_chat_body(body: CountTokensBody, service: Service) -> ChatBody:
    """Raises InvalidRequest, also for thinking that the model can't do."""
    chat = as_chat_body(body)
    if thinking_of(body) != "enabled":
        return chat
    source = chat_template_of(chat, service).source
    if "enable_thinking" in source and chat.reasoning_effort is None:
        return chat.model_copy(update={"reasoning_effort": "medium"})
    if not any(word in source for word in ("<think>", "enable_thinking", "reasoning_effort")):
        raise UnsupportedFeature("thinking is not supported by this model; leave it out", param="thinking")
    return chat
