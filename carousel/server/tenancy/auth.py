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
                error = Unauthorized("a valid API key is required: Authorization: Bearer KEY")
                await error_response(error)(scope, receive, send)
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
    """Return the key of a request; empty, which is never valid, if there is none or several."""
    given: list[bytes] = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1:
        return b""
    scheme, _, key = given[0].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
