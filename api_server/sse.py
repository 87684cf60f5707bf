"""EventWriter: the body of a text/event-stream response. Knows ASGI; knows no event's content."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Send

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventWriter:
    def __init__(
        self, send: Send, abort_connection: Callable[[], None], *, slow_reader_timeout_s: float
    ) -> None:
        self.has_begun = False
        """The status 200 is out: what fails from now on can only be told by an event."""
        self._send = send
        self._abort_connection = abort_connection
        self._slow_reader_timeout_s = slow_reader_timeout_s

    async def write(self, *events: bytes) -> None:
        """Send events, each one line of data, with the first of them the head of the response.

        Waits while the client does not read. For one that reads nothing for too long the connection is
        aborted, which ends its request as every disconnect does.
        """
        if not events:
            return
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        body = b"".join(b"data: %b\n\n" % event for event in events)
        loop = asyncio.get_running_loop()
        cut_off = loop.call_later(self._slow_reader_timeout_s, self._abort_connection)
        try:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            cut_off.cancel()

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
