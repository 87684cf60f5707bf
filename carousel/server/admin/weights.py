"""Routes about the weights that are served: /update_weights_from_disk and /weight_version as in SGLang. The
first is off without --weights-dir.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from carousel.server.admin.callers import check_is_from_here
from carousel.server.admin.control import client_of
from carousel.server.request.body import read_body
from carousel.server.server_state import ServerState
from runtime.base.errors import Forbidden, InvalidRequest, RequestError
from runtime.wire.format import MAX_LABEL_CHARS
from runtime.wire.plan import MAX_WEIGHTS_PATH_CHARS, NO_UPDATES


class UpdateWeightsBody(Struct, forbid_unknown_fields=True, kw_only=True):
    model_path: Annotated[str, Meta(min_length=1, max_length=MAX_WEIGHTS_PATH_CHARS)]
    """Directory of a checkpoint below --weights-dir, relative to it or absolute."""
    weight_version: Annotated[str, Meta(max_length=MAX_LABEL_CHARS)] | None = None
    """Name of the weights in answers; default: the name of the directory."""
    abort_all_requests: bool | None = None
    """End all live requests; default: they continue with the new weights."""
    flush_cache: bool | None = None
    """Only true: no cached prefix is kept."""


class UpdateWeightsAnswer(Struct):
    success: bool
    message: str
    model_path: str
    weight_version: str
    seconds: float
    """Time from the request until the new weights serve."""


class WeightVersion(Struct):
    weight_version: str


async def update_weights(request: Request) -> Response:
    """Replace the model's weights by those of a checkpoint. When the answer comes they serve."""
    body = await read_body(request, UpdateWeightsBody)
    server: ServerState = request.app.state.server
    if not server.config.weights_dir:
        raise Forbidden(NO_UPDATES)
    check_is_from_here(request, "weights are replaced")
    if body.flush_cache is False:
        raise InvalidRequest(
            "flush_cache: what the old weights have cached is not valid for new ones; leave it out",
            param="flush_cache",
        )
    server.check_serving()
    try:
        done: dict[str, Any] = await client_of(request).update_weights(
            body.model_path,
            weight_version=body.weight_version or "",
            abort_all_requests=bool(body.abort_all_requests),
            timeout=server.config.start_timeout,
        )
    except TimeoutError:
        raise RequestError(
            "the weights were not loaded in time; GET /weight_version shows which ones are served",
            code="timeout",
            status=503,
        ) from None
    return _json(UpdateWeightsAnswer(success=True, message=f"{done['weight_version']} is served", **done))


async def weight_version(request: Request) -> Response:
    server: ServerState = request.app.state.server
    return _json(WeightVersion((await server.served_config()).weight_version))


def _json(body: Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
