"""POST /v1/chat/completions, and the job behind every endpoint that talks in messages."""

import dataclasses

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.answers import respond
from server.api.chat_output import ChatAnswer
from server.api.chat_prompt import read_chat_prompt
from server.api.routing import add_post
from server.api.schemas import ChatBody, parse
from server.api.service import Service
from server.api.structured import checked_grammar
from server.api.tools import plan_reading, read_tools
from server.errors import InvalidRequest, UnsupportedFeature
from server.frontend.generation import Job


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()

    async def create(request: Request, raw: bytes) -> Response:
        body = parse(ChatBody, raw)
        job = await make_chat_job(request, body, service)
        return await respond(request, ChatAnswer(body, job, service), service, stream=body.stream)

    add_post(router, "/v1/chat/completions", create, service=service, body_type=ChatBody)
    return router


async def make_chat_job(request: Request, body: ChatBody, service: Service) -> Job:
    """Raises before anything is generated, for whatever is wrong with the request."""
    service.check_model(body.model)
    service.ready()
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is not None and max_tokens < 1:
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise InvalidRequest(f"{name} must be 1 or more, not {max_tokens}", param=name)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs = true", param="top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= service.limits.max_logprobs:
        raise InvalidRequest(f"top_logprobs must be between 0 and {service.limits.max_logprobs}", param="top_logprobs")
    tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    grammar = await checked_grammar(body.response_format, body.structured_outputs, service.grammars)
    if grammar is not None and tools.tools:
        raise UnsupportedFeature("a response format and tools exclude each other", param="response_format")
    may_think = grammar is None and not tools.must_call
    prompt = await read_chat_prompt(body, service, tools=tools.tools, may_think=may_think)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    reading = await plan_reading(tools, body, prompt, grammar, service)
    options = body.sampling_options(max_tokens=max_tokens, logprobs=logprobs, grammar=reading.grammar)
    job = service.make_job(request, body, [prompt], options, id_prefix="chatcmpl-")
    return dataclasses.replace(
        job,
        make_parser=reading.make_parser,
        skip_special_tokens=job.skip_special_tokens and not reading.keeps_control_tokens,
    )
