"""ApiKeyMiddleware: with a key set, everything but the probes asks for it; /metrics unless it is open."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from api_server.errors import error_response
from runtime.errors import Unauthorized

OPEN_PATHS = frozenset({"/live", "/ready", "/health"})


class ApiKeyMiddleware:
    def __init__(self, app: ASGIApp, api_key: str, *, metrics_open: bool) -> None:
        self._app = app
        self._open_paths = OPEN_PATHS | {"/metrics"} if metrics_open else OPEN_PATHS
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and scope["path"] not in self._open_paths
            and not self._is_authorized(scope)
        ):
            error = Unauthorized("a valid API key is required: Authorization: Bearer KEY")
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_authorized(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        # The time this takes must not tell how much of a guess was right.
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
