"""/metrics, /stats, /server_info, /flush_cache: what operators ask and tell the runtime."""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from api_server.server_state import ServerState
from runtime.process import process_name
from runtime.status_page import Status

SECRETS = frozenset({"api_key"})


async def metrics(request: Request) -> Response:
    """Prometheus' text. 503 while the runtime does not answer."""
    server: ServerState = request.app.state.server
    info = await server.runtime_info()
    text = server.metrics.render(server.status.read("scheduler"), info)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def stats(request: Request) -> Response:
    """The status page: answered from memory, whatever state the processes are in."""
    server: ServerState = request.app.state.server
    load = server.status.read("scheduler")
    return _json(
        {
            "processes": {
                process_name(role, index, server.config): _process(server.status.read(role, index))
                for role, index in server.status.slots()
            },
            "num_running": load.num_running,
            "num_waiting": load.num_waiting,
            "queued_prompt_tokens": load.queued_prompt_tokens,
            "num_pages": load.num_pages,
            "num_available_pages": load.num_free_pages,
            "tokens_per_s": load.tokens_per_s,
        }
    )


async def server_info(request: Request) -> Response:
    """The scheduler's account of itself, and the settings of the launch but for its secrets."""
    server: ServerState = request.app.state.server
    info = await server.runtime_info()
    settings = msgspec.structs.asdict(server.config)
    return _json({**info, "settings": {name: settings[name] for name in settings.keys() - SECRETS}})


async def flush_cache(request: Request) -> Response:
    """Forget every cached prefix that no running request uses."""
    server: ServerState = request.app.state.server
    return _json(await server.flush_cache())


def _process(status: Status) -> dict[str, Any]:
    if status.state == "absent":
        return {"state": status.state}
    return {"state": status.state, "pid": status.pid, "heartbeat_age_s": round(status.age_s(), 3)}


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
