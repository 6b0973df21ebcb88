"""What every POST endpoint does first: the arrival time, the body within its limit."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.errors import JSON_MEDIA_TYPE
from server.api.schemas import Body
from server.api.service import Service
from server.errors import InvalidRequest

Handler = Callable[[Request, bytes], Awaitable[Response]]
SCHEMA_REF = "#/components/schemas/{model}"


def add_post(router: APIRouter, path: str, handler: Handler, *, service: Service, body_type: type[Body]) -> None:
    """handler: (request, body as bytes) -> answer. The body's type only documents it: the handler parses."""

    async def endpoint(request: Request) -> Response:
        request.state.arrival_time = time.monotonic()
        _check_content_type(request)
        return await handler(request, await service.bodies.read(request))

    router.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        name=path.strip("/").replace("/", "_"),
        response_model=None,
        openapi_extra=_described(body_type),
    )


def _check_content_type(request: Request) -> None:
    """A web page may post text or a form to any address without being asked; JSON it may not."""
    kind = request.headers.get("content-type", JSON_MEDIA_TYPE).partition(";")[0].strip().lower()
    if kind != JSON_MEDIA_TYPE and not kind.endswith("+json"):
        raise InvalidRequest(f"The Content-Type must be {JSON_MEDIA_TYPE}, not {kind[:80]!r}")


def _described(body_type: type[Body]) -> dict[str, Any]:
    schema = {"$ref": SCHEMA_REF.format(model=body_type.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
