"""POST /tokenize and /detokenize for a text or for chat messages, and GET /tokenizer_info: as vLLM has them."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.chat_prompt import read_chat_prompt
from server.api.errors import json_response
from server.api.routing import add_post
from server.api.schemas import DetokenizeBody, TokenizeBody, parse
from server.api.service import Service
from server.api.tools import read_tools
from server.errors import InvalidRequest
from server.frontend.params import check_token_ids


def tokenize_router(service: Service) -> APIRouter:
    router = APIRouter()

    async def tokenize(_request: Request, raw: bytes) -> Response:
        body = parse(TokenizeBody, raw)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        service.check_model(body.model)
        if body.prompt is None:
            tools = read_tools(body.tools, None, None).tools
            token_ids = (await read_chat_prompt(body.as_chat(), service, tools=tools)).token_ids
        else:
            token_ids = await service.encode(
                body.prompt, add_special_tokens=body.add_special_tokens is not False, param="prompt"
            )
        ready = service.client.state.ready
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": None if ready is None else ready.max_model_len,
            "tokens": token_ids,
            "token_strs": [service.tokenizer.token_text(t) for t in token_ids] if body.return_token_strs else None,
        }
        return json_response(answer)

    async def detokenize(_request: Request, raw: bytes) -> Response:
        body = parse(DetokenizeBody, raw)
        service.check_model(body.model)
        check_token_ids(body.tokens, service.tokenizer.vocab_size, param="tokens")
        return json_response({"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    async def info() -> Response:
        """Evaluation tools that find this need no copy of the tokenizer."""
        template = service.chat_template
        names = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token")) | service.tokenizer.special_tokens
        return json_response(
            {
                **names,
                "chat_template": None if template is None else template.source,
                "vocab_size": service.tokenizer.vocab_size,
            }
        )

    router.add_api_route("/tokenizer_info", info, methods=["GET"], name="tokenizer_info", response_model=None)
    add_post(router, "/tokenize", tokenize, service=service, body_type=TokenizeBody)
    add_post(router, "/detokenize", detokenize, service=service, body_type=DetokenizeBody)
    return router
