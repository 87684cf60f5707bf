"""Route /profiles/{file}: a profile of steps that the scheduler has written, with the requests that went
through the processes meanwhile. It serves the files with a profile's name in the launch's directory for
profiles, and no others.

The scheduler's events are megabytes, which are copied from the file in pieces and never decoded.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from carousel.server.admin.control import client_of
from carousel.server.server_state import ServerState
from carousel.server.tracing.profile_tracks import events_of_requests
from runtime.base.errors import RequestError

PIECE_BYTES = 1 << 17
MAX_HEAD_BYTES = 4096
"""Maximum size of what stands in a file before its events."""
_NAME = re.compile(r"profile-[0-9]{8}-[0-9]{6}-[0-9]{1,9}\.json")
_EVENTS = b'"traceEvents":['


class Window(msgspec.Struct):
    """Time of a profile, in microseconds of CLOCK_MONOTONIC."""

    begun_us: float
    ended_us: float


class _Head(msgspec.Struct):
    otherData: Window  # noqa: N815  (Chrome's name)


class OpenProfile(NamedTuple):
    """File of a profile that is over, open where its events begin."""

    file: BinaryIO
    window: Window
    head: bytes
    """All that stands before the events."""


async def profile(request: Request) -> Response:
    """Answer with a Chrome trace for Perfetto. Raises RequestError (404) if there is no such file."""
    server: ServerState = request.app.state.server
    name = request.path_params["file"]
    found = None
    if _NAME.fullmatch(name):
        found = await asyncio.to_thread(open_profile, server.profile_dir / name)
    if found is None:
        raise RequestError(
            "there is no such profile, or it is not over", code="profile_not_found", status=404
        )
    try:
        # One at a time: the timelines of many requests are many objects.
        async with server.profile_turn:
            timelines = await server.statistics(
                lambda _, timeout: client_of(request).timelines(timeout=timeout), None
            )
            spans = server.http_spans.read() if server.http_spans else {}
            window = msgspec.structs.asdict(found.window)
            own = await asyncio.to_thread(
                lambda: msgspec.json.encode(events_of_requests(window, timelines, spans))
            )
    except BaseException:
        found.file.close()
        raise
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
    return StreamingResponse(answer_pieces(found, own), media_type="application/json", headers=headers)


def open_profile(path: Path) -> OpenProfile | None:
    """Open a profile; returns None if it is gone or still being written."""
    try:
        file = path.open("rb")
    except OSError:
        return None
    head, mark, _ = file.read(MAX_HEAD_BYTES).partition(_EVENTS)
    try:
        window = msgspec.json.decode(head.rstrip(b",") + b"}", type=_Head).otherData
        file.seek(-2, 2)
        if not mark or file.read() != b"]}":
            raise ValueError
    except (OSError, ValueError):  # msgspec's are ValueErrors
        file.close()
        return None
    file.seek(len(head) + len(mark))
    return OpenProfile(file, window, head + mark)


async def answer_pieces(found: OpenProfile, own: bytes) -> AsyncIterator[bytes]:
    """Yield the trace: `own`, a list of events in JSON, is put before those of the file. No list is empty:
    both begin with the names of processes.
    """
    with found.file as file:
        yield found.head
        for begin in range(1, len(own) - 1, PIECE_BYTES):
            yield own[begin : min(begin + PIECE_BYTES, len(own) - 1)]
        yield b","
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece
