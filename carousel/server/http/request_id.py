"""RequestIdMiddleware: gives every request an id, the sender's or a new one, which every answer carries.

Answers also carry other headers that were set while the request was read. What its body holds is released
when it ends.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carousel.server.http.errors import error_response, is_anthropic
from carousel.server.request.held_body import release_body
from carousel.server.tracing.sampling import traceparent_of
from runtime.base.console import log_context
from runtime.base.errors import InvalidRequest
from runtime.base.random_ids import random_id
from runtime.wire.format import MAX_LABEL_CHARS

HEADER = b"x-request-id"
ANTHROPIC_HEADER = b"request-id"
"""Name of the same header in Anthropic's API."""


class RequestIdMiddleware:
    """Sets `request.state.request_id`, and refuses a header that cannot be an id. Further headers of the
    answer are in `request.state.answer_headers`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == HEADER]
        if given and not _is_id(given):
            error = InvalidRequest(
                f"X-Request-Id must be one header of 1 to {MAX_LABEL_CHARS} printable ASCII characters "
                "without spaces",
                param="X-Request-Id",
            )
            await error_response(error, scope)(scope, receive, send)
            return
        request_id = given[0] if given else random_id().encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        log_context.set(_for_log(request_id.decode(), scope["headers"]))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                further = scope["state"].get("answer_headers", ())
                if is_anthropic(scope["path"]):
                    further = [*further, (ANTHROPIC_HEADER, request_id)]
                message = {**message, "headers": [*message["headers"], (HEADER, request_id), *further]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            release_body(scope["state"])


def _for_log(request_id: str, headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the fields for log lines that are written while the request is answered."""
    traceparent = traceparent_of(headers)
    return {"request_id": request_id} | ({} if traceparent is None else {"trace_id": traceparent[3:35]})


def _is_id(values: list[bytes]) -> bool:
    value = values[0]
    return len(values) == 1 and 0 < len(value) <= MAX_LABEL_CHARS and all(32 < byte < 127 for byte in value)
