"""Routes with which operators ask and control the runtime: /metrics, /stats and its subpaths, /snapshot,
/timelines, /server_info, /flush_cache, /pause_generation, /continue_generation, /start_profile,
/stop_profile.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from carousel.client.async_ import AsyncClient
from carousel.server.admin.control_types import EmptyBody, PauseBody, ProfileBody
from carousel.server.request.body import read_optional_body
from carousel.server.server_state import ServerState
from carousel.server.tenancy.auth import tenant_of
from runtime.base.errors import InvalidRequest, RequestError
from runtime.ring.process import FIRST_EPOCH
from runtime.settings.config import RuntimeConfig
from runtime.wire.status_page import ProcessStatus

MAX_DIGITS = 9
SECRETS = frozenset({"api_key"})


async def metrics(request: Request) -> Response:
    """Answer with metrics in Prometheus' text format. Callers who come while an answer is made share it. 503
    if the runtime does not answer.
    """
    server: ServerState = request.app.state.server
    return Response(await server.metric_texts.read(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def stats(request: Request) -> Response:
    """Answer with the status page. It is in memory, so this works in any state of the processes."""
    server: ServerState = request.app.state.server
    load = server.status.read("scheduler")
    return _json(
        {
            "processes": {name: _process(status) for name, status in server.processes().items()},
            "num_running": load.num_running,
            "num_waiting": load.num_waiting,
            "queued_prompt_tokens": load.queued_prompt_tokens,
            "num_pages": load.num_pages,
            "num_available_pages": load.num_free_pages,
            "tokens_per_s": load.tokens_per_s,
            "is_profiling": load.is_profiling,
        }
    )


async def iteration_stats(request: Request) -> Response:
    """Answer with the statistics of the iterations that the scheduler keeps; with ?after=N those after number
    N.
    """
    server: ServerState = request.app.state.server
    return _json(await server.statistics(client_of(request).iteration_stats, _after(request)))


async def request_stats(request: Request) -> Response:
    """Answer as `iteration_stats`, for the requests that lived in each iteration."""
    server: ServerState = request.app.state.server
    return _json(await server.statistics(client_of(request).request_stats, _after(request)))


def _after(request: Request) -> int:
    """Return the number of the query ?after=N. Raises InvalidRequest."""
    text = request.query_params.get("after", "0")
    if not (text.isascii() and text.isdecimal() and len(text) < MAX_DIGITS):
        raise InvalidRequest(f"after: the number of an iteration, got {text[:32]!r}", param="after")
    return int(text)


async def snapshot(request: Request) -> Response:
    """Answer with what the scheduler holds, at most a quarter of a second old: all callers share
    one answer.
    """
    server: ServerState = request.app.state.server
    return Response(await server.snapshots.read(), media_type="application/json")


async def timeline(request: Request) -> Response:
    """Answer with the time stamps of the ended, sampled sequences of a request, by its X-Request-Id. Raises
    RequestError (404) if there are none.
    """
    server: ServerState = request.app.state.server
    found = await server.statistics(client_of(request).timeline, request.path_params["request_id"])
    if not found:
        raise RequestError(
            "no sampled request with this id has ended lately", code="timeline_not_found", status=404
        )
    return _json(found)


async def server_info(request: Request) -> Response:
    """Answer with the scheduler's information about itself, and the launch's settings without secrets."""
    server: ServerState = request.app.state.server
    info = await server.ask(client_of(request).server_info)
    return _json({**info, "settings": _shown_settings(await server.served_config())})


async def flush_cache(request: Request) -> Response:
    """Free all cached prefixes that no running request uses."""
    server: ServerState = request.app.state.server
    return _json(await server.ask(client_of(request).flush_cache))


async def pause_generation(request: Request) -> Response:
    """Stop launching steps; new requests wait."""
    server: ServerState = request.app.state.server
    body = await read_optional_body(request, PauseBody)
    return _json(await server.ask(client_of(request).pause_generation, body.mode or "in_place"))


async def continue_generation(request: Request) -> Response:
    server: ServerState = request.app.state.server
    await read_optional_body(request, EmptyBody)
    return _json(await server.ask(client_of(request).continue_generation))


async def start_profile(request: Request) -> Response:
    """Start a profile. The launch decides where the file goes (`--profile-dir`), never a request."""
    server: ServerState = request.app.state.server
    body = await read_optional_body(request, ProfileBody)
    return _json(await server.ask(client_of(request).start_profile, body.num_steps))


async def stop_profile(request: Request) -> Response:
    server: ServerState = request.app.state.server
    await read_optional_body(request, EmptyBody)
    return _json(await server.ask(client_of(request).stop_profile))


def client_of(request: Request) -> AsyncClient:
    """Return the runtime's client for the caller's tenant. Only admins may call the runtime with it."""
    server: ServerState = request.app.state.server
    return server.client.of_tenant(tenant_of(request.scope).name)


def _process(status: ProcessStatus) -> dict[str, Any]:
    if status.state == "absent":
        return {"state": status.state}
    return {
        "state": status.state,
        "pid": status.pid,
        "heartbeat_age_s": round(status.age_s(), 3),
        "epoch": status.epoch,
        "restarts": max(0, status.epoch - FIRST_EPOCH),
        "num_running": status.num_running,
        "num_sent": status.num_sent,
        "num_received": status.num_received,
        "num_launched": status.num_launched,
        "num_finished": status.num_finished,
    }


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _shown_settings(config: RuntimeConfig) -> dict[str, Any]:
    """Return the settings without keys. Only the host of a collector's URL remains: name, password, path and
    query may all be credentials.
    """
    settings = msgspec.structs.asdict(config)
    if endpoint := config.otlp_traces_endpoint:
        url = urlsplit(endpoint)
        settings["otlp_traces_endpoint"] = f"{url.scheme}://{url.netloc.rpartition('@')[2]}"
    return {name: settings[name] for name in settings if name not in SECRETS}
