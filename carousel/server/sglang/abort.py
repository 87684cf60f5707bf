"""Route /abort_request: SGLang's way to end requests early by their names. Their callers get the output so
far.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from carousel.server.request.body import read_body
from carousel.server.running import AbortOrder
from carousel.server.server_state import ServerState
from carousel.server.sglang.generate_types import RequestLabel
from carousel.server.tenancy.auth import tenant_of
from runtime.base.errors import InvalidRequest


class AbortBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    rid: RequestLabel | None = None
    """`rid` of a request to /generate, or its X-Request-Id."""
    abort_all: bool | None = None
    """True for all requests of the caller's key; of an admin's key, all requests."""


class AbortAnswer(msgspec.Struct):
    """Empty answer: a request that is not there has ended, as was asked for."""


async def abort_request(request: Request) -> Response:
    server: ServerState = request.app.state.server
    body = await read_body(request, AbortBody)
    if (body.rid is None) == (not body.abort_all):
        raise InvalidRequest("rid or abort_all: true is needed, one of the two", param="rid")
    tenant = tenant_of(request.scope)
    is_for_all = body.rid is None and tenant.may("admin")
    order = AbortOrder(None if is_for_all else tenant.name, body.rid or "")
    server.running.abort(order)
    if server.siblings is not None:
        await server.siblings.tell(order)
    return Response(msgspec.json.encode(AbortAnswer()), media_type="application/json")
