"""Errors as OpenAI's clients expect them: a status and {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
import math
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from runtime.base.errors import CarouselError, Overloaded, RequestError, RingClosed

logger = logging.getLogger(__name__)

UNAVAILABLE_RETRY_S = 1.0
TYPES = {403: "permission_error", 429: "rate_limit_error"}
"""Types of errors beside those that stand for all others of a caller, and of the server."""
ROUTING = {
    404: "there is no such path; /openapi.json lists those there are",
    405: "the path does not take this method; the Allow header names those it takes",
}
"""Words for a caller at the wrong place, by status."""


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


def as_request_error(error: Exception) -> RequestError:
    """Return what the HTTP client is told; the inside of an error that is not the client's stays in
    the log.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, RingClosed):
        return RequestError("the runtime behind this server is gone", code="runtime_closed", status=503)
    if isinstance(error, HTTPException):
        code = HTTPStatus(error.status_code).name.lower()
        return RequestError(ROUTING.get(error.status_code, error.detail), code=code, status=error.status_code)
    logger.error("a request failed", exc_info=error)
    return RequestError("the server failed on this request", status=500)


def error_body(error: RequestError) -> bytes:
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, kind, error.param, error.code)))


def error_headers(error: RequestError) -> dict[str, str]:
    """Headers of the error's answer that say how to go on after it."""
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        seconds = error.retry_after_s if isinstance(error, Overloaded) else UNAVAILABLE_RETRY_S
        headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def error_response(error: RequestError) -> Response:
    return Response(error_body(error), error.status, error_headers(error), media_type="application/json")


async def handle_error(_: Request, error: Exception) -> Response:
    """The exception handler of the application."""
    response = error_response(as_request_error(error))
    if isinstance(error, HTTPException):
        # A refused method must be answered with those that are allowed.
        response.headers.update(error.headers or {})
    return response


HANDLERS = dict.fromkeys((HTTPException, CarouselError, Exception), handle_error)
