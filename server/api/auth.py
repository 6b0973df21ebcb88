"""API keys, as pure ASGI: every path needs one but the probes, however the path is spelled."""

import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.errors import error_response
from server.errors import Unauthorized
from server.metrics.prometheus import Metrics

PROBES = frozenset({"/livez", "/readyz", "/health"})


class ApiKeyGuard:
    """keys: empty switches the guard off. open_paths: exact paths that need no key."""

    def __init__(self, app: ASGIApp, *, keys: Iterable[str], open_paths: frozenset[str], metrics: Metrics) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = open_paths
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] in ("http", "websocket") and scope["path"] not in self._open_paths
        if not self._keys or not guarded:
            await self._app(scope, receive, send)
            return
        number = self._number_of(_offered_key(scope))
        if number is not None:
            scope.setdefault("state", {})["client"] = f"key {number}"
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        self._metrics.reject("unauthorized")
        error = Unauthorized("A valid API key is needed: send it as 'Authorization: Bearer KEY'")
        await error_response(error)(scope, receive, send)

    def _number_of(self, offered: bytes | None) -> int | None:
        """Which key it is; None for none of them."""
        found = None
        for number, key in enumerate(self._keys):  # all of them: the time must not tell which one came close
            if hmac.compare_digest(key, offered or b""):
                found = number
        return found if offered is not None else None


def _offered_key(scope: Scope) -> bytes | None:
    """From `Authorization: Bearer KEY`, or Anthropic's `x-api-key: KEY`. A repeated header is no key."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    authorization = [value for name, value in headers if name == b"authorization"]
    if authorization:
        scheme, _, key = authorization[0].partition(b" ")
        return key.strip() if len(authorization) == 1 and scheme.lower() == b"bearer" else None
    api_key = [value for name, value in headers if name == b"x-api-key"]
    return api_key[0] if len(api_key) == 1 else None
