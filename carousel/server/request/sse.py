"""EventWriter: the body of a text/event-stream response in ASGI. It does not know what events contain."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Send

from carousel.server.http.errors import error_body
from runtime.base.errors import RequestError

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
# Placeholder for the text of an event's template. No other part of a template can contain it.
TEXT_MARK = uuid.uuid4().hex

_encode = msgspec.json.Encoder().encode


def sse_event(body: msgspec.Struct, name: bytes = b"") -> bytes:
    """Return an event; `name` is its type, which OpenAI's events do not have."""
    head = b"event: %b\n" % name if name else b""
    return b"%bdata: %b\n\n" % (head, _encode(body))


class DoneEvents:
    """Ends of streams in the form of OpenAI's completions."""

    done = DONE

    def failure_events(self, error: RequestError) -> bytes:
        return b"data: %b\n\n" % error_body(error)


class TextEvent:
    """Events that differ in one text only: the JSON around it is encoded once for a whole stream."""

    __slots__ = ("_head", "_tail")

    def __init__(self, template: msgspec.Struct, name: bytes = b"") -> None:
        """`template` has TEXT_MARK in the place of the text, and `name` is the type of the events."""
        self._head, mark, self._tail = sse_event(template, name).partition(_encode(TEXT_MARK))
        assert mark, "the template has no place for the text"

    def with_text(self, text: str) -> bytes:
        return self._head + _encode(text) + self._tail


class EventWriter:
    def __init__(self, send: Send, send_body: Send, write_chunk: Callable[[bytes], bool]) -> None:
        """`send` sends the head, and `send_body` everything after it. `write_chunk` does the same as
        `send_body` for a part that is not the last, but writes at once or, returning False, not at all.
        """
        self.has_begun = False
        """True if the status 200 was sent: later failures can only be reported as events."""
        self._send_head = send
        self._send_body = send_body
        self._write_chunk = write_chunk

    def try_write(self, events: bytes) -> bool:
        """Send whole events without waiting. Returns False if nothing was sent; then `write` has to be
        awaited.
        """
        return self.has_begun and self._write_chunk(events)

    async def write(self, events: bytes) -> None:
        """Send whole events, and before the first of them the head of the response. Waits while the client
        does not read.
        """
        await self._write({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes = b"") -> None:
        """Send the last events together with the end of the response."""
        await self._write({"type": "http.response.body", "body": events, "more_body": False})

    async def _write(self, message: dict[str, Any]) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send_head({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await self._send_body(message)
