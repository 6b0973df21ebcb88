"""The outermost layer: request ids, one log line a request, and an error body for what nobody caught."""

import logging
import secrets
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.auth import PROBES
from server.api.errors import ClientGone, as_serving_error, error_response
from server.metrics.logging import log_event

logger = logging.getLogger("pageturner.http")

_MAX_ID_BYTES = 128
_CLIENT_CLOSED = 499
"""nginx's number for a client that did not wait."""
_QUIET = PROBES | {"/metrics"}


class RequestLog:
    """Puts `request_id` and `log` (a dict of fields that handlers may add to) into scope["state"]."""

    def __init__(self, app: ASGIApp, *, enabled: bool) -> None:
        self._app = app
        self._enabled = enabled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        fields: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=request_id.decode(), log=fields)
        status = 0
        begin = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id)]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            status = _CLIENT_CLOSED
        except Exception as error:
            logger.exception("request failed")
            if status:
                raise
            await error_response(as_serving_error(error))(scope, receive, send_with_id)
        finally:
            self._log(scope, status or _CLIENT_CLOSED, time.monotonic() - begin, fields)

    def _log(self, scope: Scope, status: int, duration_s: float, fields: dict[str, Any]) -> None:
        if not self._enabled:
            return
        level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
        log_event(
            logger,
            "request",
            level=level,
            method=scope["method"],
            path=scope["path"][:80],
            status=status,
            duration_s=round(duration_s, 4),
            request_id=scope["state"]["request_id"],
            **fields,
        )


def _request_id(scope: Scope) -> bytes:
    """The client's X-Request-Id where it is short printable ASCII, else one of ours."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and 0 < len(value) <= _MAX_ID_BYTES and all(33 <= byte < 127 for byte in value):
            return bytes(value)
    return secrets.token_hex(12).encode()
