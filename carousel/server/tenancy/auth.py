"""ApiKeyMiddleware: with keys set, everything but the probes asks for one; /metrics unless it is open."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from carousel.server.http.errors import error_response
from runtime.base.errors import Unauthorized

OPEN_PATHS = frozenset({"/live", "/ready", "/health"})
SALT_BYTES = 32


class ApiKeyMiddleware:
    """With `has_tenants`, the scope's state gets `tenant`: who holds another key has another one."""

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str], *, metrics_open: bool, has_tenants: bool
    ) -> None:
        self._app = app
        self._open_paths = OPEN_PATHS | {"/metrics"} if metrics_open else OPEN_PATHS
        self._digests = [_digest(key.encode()) for key in api_keys]
        self._has_tenants = has_tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            digest = _digest(_given_key(scope))
            # The time this takes must not tell how much of a guess was right, nor which key it is.
            if not sum(hmac.compare_digest(digest, each) for each in self._digests):
                error = Unauthorized("a valid API key is required: Authorization: Bearer KEY")
                await error_response(error)(scope, receive, send)
                return
            if self._has_tenants:
                scope.setdefault("state", {})["tenant"] = digest
        await self._app(scope, receive, send)


def salt_of_tenant(tenant: bytes, cache_salt: str) -> str:
    """Of a request with this salt: one that requests with other keys cannot have."""
    data = cache_salt.encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=SALT_BYTES, key=tenant).hexdigest()


def _given_key(scope: Scope) -> bytes:
    """Empty, which is nobody's, where there is none, or several."""
    given: list[bytes] = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1:
        return b""
    scheme, _, key = given[0].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=SALT_BYTES).digest()
