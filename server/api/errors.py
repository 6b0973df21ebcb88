"""Exceptions -> the error body. Every answer that is not 2xx has one."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from server.errors import BodyTooLarge, ClientFault, EngineFault, ModelNotFound, Overloaded, ServingError, Unauthorized

JSON_MEDIA_TYPE = "application/json"


class ClientGone(Exception):
    """The client hung up: nobody is left to answer."""


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """In errors from here, fields of a chat request have the names that the client's own API gives them.

    names: chat's name -> the client's; where one is the beginning of another, the longer one comes first.
    """
    try:
        yield
    except ClientFault as error:
        for ours, theirs in names.items():
            if error.param is not None and re.match(rf"{re.escape(ours)}(?![\w])", error.param):
                error.param = theirs + error.param.removeprefix(ours)
                if error.message.startswith(ours):
                    error.message = theirs + error.message.removeprefix(ours)
                break
        raise


def error_object(error: ClientFault | EngineFault) -> dict[str, Any]:
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.code}


def as_serving_error(error: Exception) -> ClientFault | EngineFault:
    """What the client may know of it: our own errors in full, of others only that the fault is the server's."""
    if isinstance(error, ClientFault | EngineFault):
        return error
    return InternalError("the server failed on this request; its log says why")


class InternalError(EngineFault):
    """A bug of ours."""

    status = 500
    code = "internal_error"


def json_response(payload: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(payload), status, headers, JSON_MEDIA_TYPE)


def error_response(error: ClientFault | EngineFault, body: dict[str, Any] | None = None) -> Response:
    """body: where another than OpenAI's is wanted."""
    headers: dict[str, str] = {}
    if isinstance(error, EngineFault) and error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    elif error.status in (429, 503):
        headers["Retry-After"] = "1"
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return json_response({"error": error_object(error)} if body is None else body, error.status, headers)


async def on_http_exception(_request: Request, error: Exception) -> Response:
    """Starlette's own: unknown paths, wrong methods."""
    assert isinstance(error, HTTPException)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    body = {"message": str(error.detail), "type": kind, "param": None, "code": code}
    headers = dict(error.headers or {})
    return json_response({"error": body}, error.status_code, headers)


def reject_reason(error: ServingError) -> str:
    """The label of requests_rejected."""
    if isinstance(error, Unauthorized):
        return "unauthorized"
    if isinstance(error, ModelNotFound):
        return "not_found"
    if isinstance(error, BodyTooLarge):
        return "too_large"
    if isinstance(error, Overloaded):
        return "queue_full"
    return "not_ready" if isinstance(error, EngineFault) else "invalid"
