"""What every POST endpoint does first: the arrival time, the body within its limit."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.schemas import Body
from server.api.service import Service
from server.api.transport import read_body

Handler = Callable[[Request, bytes], Awaitable[Response]]
SCHEMA_REF = "#/components/schemas/{model}"


def add_post(router: APIRouter, path: str, handler: Handler, *, service: Service, body_type: type[Body]) -> None:
    """handler: (request, body as bytes) -> answer. The body's type only documents it: the handler parses."""

    async def endpoint(request: Request) -> Response:
        request.state.arrival_time = time.monotonic()
        return await handler(request, await read_body(request, service.limits.max_body_bytes))

    router.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        name=path.strip("/").replace("/", "_"),
        response_model=None,
        openapi_extra=_described(body_type),
    )


def _described(body_type: type[Body]) -> dict[str, Any]:
    schema = {"$ref": SCHEMA_REF.format(model=body_type.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
