"""The HTTP application, put together. Serves from the first second: an engine that still loads is a 503, not a wait."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from server.api.admin import admin_router
from server.api.anthropic import PATH, anthropic_router
from server.api.anthropic_input import CountTokensBody, MessagesBody
from server.api.anthropic_output import anthropic_error
from server.api.auth import PROBES, ApiKeyGuard
from server.api.chat import chat_router
from server.api.completions import completions_router
from server.api.errors import as_serving_error, error_response, on_http_exception, reject_reason
from server.api.request_log import RequestLog
from server.api.responses import responses_router
from server.api.responses_input import ResponsesBody
from server.api.routing import SCHEMA_REF
from server.api.schemas import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from server.api.service import ModelInfo, Service
from server.api.tokenize import tokenize_router
from server.config import ApiConfig
from server.errors import ClientFault, EngineFault, RequestTimeout, StepFailed
from server.frontend.client import EngineClient
from server.metrics.prometheus import Metrics
from server.tokenizer import ChatTemplate, Tokenizer
from server.version import version

_BODIES: tuple[type[Body], ...] = (
    CompletionBody,
    ChatBody,
    ResponsesBody,
    MessagesBody,
    CountTokensBody,
    TokenizeBody,
    DetokenizeBody,
)


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Request bodies are parsed by hand, so their schemas are put in by hand."""
        if self.openapi_schema is None:
            document = get_openapi(title=self.title, version=self.version, routes=self.routes)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for body in _BODIES:
                schema = body.model_json_schema(ref_template=SCHEMA_REF)
                schemas.update(schema.pop("$defs", {}))
                schemas[body.__name__] = schema
            self.openapi_schema = document
        return self.openapi_schema


def create_app(
    *,
    client: EngineClient,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    model: ModelInfo,
    config: ApiConfig,
    metrics: Metrics,
) -> FastAPI:
    """The engine need not have been started; starting and stopping it is the caller's business."""
    metrics.bind(client.state)
    service = Service(
        client=client, tokenizer=tokenizer, chat_template=chat_template, model=model, config=config, metrics=metrics
    )
    app = _App(title="pageturner", version=version(), redirect_slashes=False, docs_url=None, redoc_url=None)
    app.state.service = service
    for router in (
        responses_router(service),
        anthropic_router(service),
        completions_router(service),
        chat_router(service),
        tokenize_router(service),
        admin_router(service, version=version()),
    ):
        app.include_router(router)
    _handle_errors(app, metrics)
    open_paths = PROBES if config.metrics_need_key else PROBES | {"/metrics"}
    app.add_middleware(ApiKeyGuard, keys=config.api_keys, open_paths=open_paths, metrics=metrics)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestLog, enabled=config.log_requests)  # added last: outermost
    return app


def _handle_errors(app: FastAPI, metrics: Metrics) -> None:
    async def on_serving_error(request: Request, error: Exception) -> Response:
        shown = as_serving_error(error)
        if not isinstance(shown, StepFailed | RequestTimeout):
            metrics.reject(reject_reason(shown))
        return error_response(shown, anthropic_error(shown) if request.url.path.startswith(PATH) else None)

    app.add_exception_handler(ClientFault, on_serving_error)
    app.add_exception_handler(EngineFault, on_serving_error)
    app.add_exception_handler(HTTPException, on_http_exception)
