"""EventWriter: the body of a text/event-stream response. Knows ASGI; knows no event's content."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Send

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
# Stands for the text of a template's event; nothing that a template holds can contain it.
TEXT_MARK = uuid.uuid4().hex

_encode = msgspec.json.Encoder().encode


def sse_event(body: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % _encode(body)


class TextEvent:
    """Events that differ in one text only: what is around it is encoded once, for a whole stream."""

    __slots__ = ("_head", "_tail")

    def __init__(self, template: msgspec.Struct) -> None:
        """`template` holds TEXT_MARK where the text belongs."""
        self._head, mark, self._tail = sse_event(template).partition(_encode(TEXT_MARK))
        assert mark, "the template has no place for the text"

    def with_text(self, text: str) -> bytes:
        return self._head + _encode(text) + self._tail


class EventWriter:
    def __init__(
        self,
        send: Send,
        send_body: Send,
        write_chunk: Callable[[bytes], bool],
        abort_connection: Callable[[], None],
        *,
        slow_reader_timeout_s: float,
    ) -> None:
        """`send` is for the head, `send_body` for all that follows it; `write_chunk` is the same for what is
        not the end, but writes at once or, returning False, not at all.
        """
        self.has_begun = False
        """The status 200 is out: what fails from now on can only be told by an event."""
        self._send_head = send
        self._send_body = send_body
        self._write_chunk = write_chunk
        self._abort_connection = abort_connection
        self._timeout_s = slow_reader_timeout_s
        self._loop = asyncio.get_running_loop()
        self._write_began_s = 0.0
        """When the write began that is going on; 0 while none is."""
        self._watch: asyncio.TimerHandle | None = None

    def try_write(self, events: bytes) -> bool:
        """Send whole events without waiting, or do nothing: then `write` has to be awaited."""
        return self.has_begun and self._write_chunk(events)

    async def write(self, events: bytes) -> None:
        """Send whole events, with the first of them the head of the response.

        Waits while the client does not read. For one that reads nothing for too long the connection is
        aborted, which ends its request as every disconnect does.
        """
        await self._write({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes = b"") -> None:
        """Send the last events, and the end of the response with them."""
        await self._write({"type": "http.response.body", "body": events, "more_body": False})

    def close(self) -> None:
        """Stop watching the reader. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def _write(self, message: dict[str, Any]) -> None:
        if not self.has_begun:
            self.has_begun = True
            self._watch_reader(self._timeout_s)
            await self._send_head({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._write_began_s = self._loop.time()
        await self._send_body(message)
        self._write_began_s = 0.0

    def _watch_reader(self, delay_s: float) -> None:
        # One timer for the stream: one for each write would cost as much as the write.
        self._watch = self._loop.call_later(delay_s, self._check_reader)

    def _check_reader(self) -> None:
        waited_s = self._loop.time() - self._write_began_s if self._write_began_s else 0.0
        if waited_s >= self._timeout_s:
            self._abort_connection()
        else:
            self._watch_reader(self._timeout_s - waited_s)
