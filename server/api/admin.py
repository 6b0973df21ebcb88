"""Models, probes, version, metrics, and a look inside."""

import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from server.api.errors import json_response
from server.api.service import Service
from server.errors import ModelNotFound
from server.metrics.prometheus import CONTENT_TYPE


def admin_router(service: Service, *, version: str) -> APIRouter:
    router = APIRouter()

    def add(path: str, name: str, endpoint: Any, *, method: str = "GET") -> None:
        router.add_api_route(path, endpoint, methods=[method], name=name, response_model=None)

    async def livez() -> Response:
        """The process answers: that is all a liveness probe may ask."""
        return json_response({"status": "alive"})

    async def readyz() -> Response:
        return json_response(*_readiness(service))

    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(service, name) for name in service.model.names]})

    async def model(model_id: str) -> Response:
        if model_id not in service.model.names:
            raise ModelNotFound(f"The model {model_id[:200]!r} does not exist", param="model")
        return json_response(_model(service, model_id))

    async def show_version() -> Response:
        return json_response({"version": version})

    async def metrics() -> Response:
        return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def pages() -> Response:
        return json_response((await service.client.inspect()).get("pages"))

    async def requests() -> Response:
        return json_response((await service.client.inspect()).get("requests"))

    async def reset_prefix_cache() -> Response:
        await service.client.reset_prefix_cache()
        return json_response({"status": "reset"})

    add("/livez", "livez", livez)
    add("/readyz", "readyz", readyz)
    add("/health", "health", readyz)
    add("/v1/models", "list_models", models)
    add("/v1/models/{model_id:path}", "show_model", model)
    add("/version", "version", show_version)
    add("/metrics", "metrics", metrics)
    add("/debug/pages", "debug_pages", pages)
    add("/debug/requests", "debug_requests", requests)
    add("/debug/reset_prefix_cache", "reset_prefix_cache", reset_prefix_cache, method="POST")
    return router


def _readiness(service: Service) -> tuple[dict[str, Any], int, dict[str, str]]:
    """200 only where a request would be served now. Says how far a start has come."""
    state = service.client.state
    is_ready = state.phase == "ready"
    step_age = None if state.last_step_time is None else round(time.monotonic() - state.last_step_time, 3)
    body = {
        "status": "ready" if is_ready else "not ready",
        "phase": state.phase,
        "progress": 1.0 if is_ready else (0.0 if state.loading is None else state.loading.fraction),
        "detail": None if is_ready or state.loading is None else state.loading.phase,
        "step_age_s": step_age,
        "num_restarts": state.num_restarts,
        "model": service.model.name,
    }
    return body, 200 if is_ready else 503, {} if is_ready else {"Retry-After": "2"}


def _model(service: Service, name: str) -> dict[str, Any]:
    ready = service.client.state.ready
    return {
        "id": name,
        "object": "model",
        "created": service.model.created,
        "owned_by": "pageturner",
        "root": service.model.name,
        "parent": None,
        "max_model_len": None if ready is None else ready.max_model_len,
    }
