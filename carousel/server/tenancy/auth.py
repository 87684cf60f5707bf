"""API keys and roles: ApiKeyMiddleware identifies the caller, and `guarded` checks its role."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from carousel.server.http.errors import error_response
from carousel.server.tenancy.tenant_table import TenantTable
from runtime.base.errors import Forbidden, Unauthorized
from runtime.ring.tenants import THE_OWNER, Role, Tenant

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


class ApiKeyMiddleware:
    """Refuses requests without a valid key, and sets `tenant` in the scope's state to the key's holder."""

    def __init__(self, app: ASGIApp, *, tenants: TenantTable, open_paths: Collection[str]) -> None:
        """`open_paths` need no key."""
        self._app = app
        self._tenants = tenants
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            tenant = self._tenants.of_key(_given_key(scope))
            if tenant is None:
                error = Unauthorized(
                    "a valid API key is required: Authorization: Bearer KEY, or x-api-key: KEY"
                )
                await error_response(error, scope)(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


def guarded(role: Role, handler: Handler) -> Handler:
    """Return the handler for callers with this role; others get a 403 before their body is read."""

    async def handle(request: Request) -> Response:
        tenant: Tenant = request.state.tenant
        if not tenant.may(role):
            raise Forbidden(
                f"this path needs an API key with the role {role}; the role of this one is {tenant.role}"
            )
        return await handler(request)

    return handle


def tenant_of(scope: MutableMapping[str, Any]) -> Tenant:
    """Return the caller's tenant: the owner, if no key is required."""
    tenant: Tenant = scope["state"].get("tenant", THE_OWNER)
    return tenant


def _given_key(scope: Scope) -> bytes:
    """Return the key of a request: that of OpenAI's header, or of Anthropic's. Returns an empty key, which is
    never valid, if there is none, if a header comes twice, or if both come with different keys.
    """
    bearers: list[bytes] = []
    keys: list[bytes] = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            bearers.append(key.strip() if scheme.lower() == b"bearer" else b"")
        elif name == b"x-api-key":
            keys.append(value.strip())
    if len(bearers) > 1 or len(keys) > 1:
        return b""
    given = {*bearers, *keys}
    return given.pop() if len(given) == 1 else b""
