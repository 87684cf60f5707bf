"""Route /profiles/{file}: a profile of steps that the scheduler has written, with the requests that went
through the processes meanwhile. It serves the files with a profile's name in the launch's directory for
profiles, and no others.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from carousel.server.admin.control import client_of
from carousel.server.server_state import ServerState
from carousel.server.tracing.profile_tracks import with_requests
from runtime.base.errors import RequestError

_NAME = re.compile(r"profile-[0-9]{8}-[0-9]{6}-[0-9]{1,9}\.json")


async def profile(request: Request) -> Response:
    """Answer with a Chrome trace for Perfetto. Raises RequestError (404) if there is no such file."""
    server: ServerState = request.app.state.server
    name = request.path_params["file"]
    file = server.profile_dir / name if _NAME.fullmatch(name) else None
    trace = None if file is None else await asyncio.to_thread(_read, file)
    if trace is None:
        raise RequestError(
            "there is no such profile, or it is not over", code="profile_not_found", status=404
        )
    timelines = await server.statistics(
        lambda _, timeout: client_of(request).timelines(timeout=timeout), None
    )
    spans = server.http_spans.read() if server.http_spans else {}
    body = await asyncio.to_thread(lambda: msgspec.json.encode(with_requests(trace, timelines, spans)))
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
    return Response(body, media_type="application/json", headers=headers)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        trace: dict[str, Any] = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError):  # gone, or still being written
        return None
    return trace if "otherData" in trace else None
