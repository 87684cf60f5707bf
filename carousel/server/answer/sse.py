"""AnswerWriter: the body of a response in ASGI that is written in pieces, most often a text/event-stream. It
does not know what they contain.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.types import Send

from carousel.server.http.errors import error_body
from carousel.server.http.piece_writer import PieceWriter
from carousel.server.tenancy.entrance import Entrance
from carousel.server.tenancy.unread_answers import KeptAnswer
from runtime.base.errors import RequestError

LARGE_WRITE_BYTES = 64 << 10
UNTURNED_BYTES = 16 << 10
"""Bytes of an answer that are spelled, in small parts, before other tasks of the event loop run."""
UNTURNED_PIECES = 4
"""Number of parts that are spelled before that, if they are short: a few milliseconds' work. Of many logprobs
that are unpacked, few bytes may be shown.
"""
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
JSON_HEADERS = [(b"content-type", b"application/json")]
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
"""Line that readers of events pass over."""
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

    @property
    def keeps_open(self) -> bytes:
        return COMMENT

    @property
    def is_parsed(self) -> bool:
        return False

    @property
    def num_kept_bytes(self) -> int:
        return 0

    @property
    def write_cost(self) -> int:
        return 1

    def failure_events(self, error: RequestError) -> Iterable[bytes]:
        return (b"data: %b\n\n" % error_body(error),)


class TextEvent:
    """Events that differ in one text only: the JSON around it is encoded once for a whole stream."""

    __slots__ = ("_head", "_tail")

    def __init__(self, template: msgspec.Struct, name: bytes = b"") -> None:
        """`template` has TEXT_MARK in the place of the text, and `name` is the type of the events."""
        self._head, mark, self._tail = sse_event(template, name).partition(_encode(TEXT_MARK))
        assert mark, "the template has no place for the text"

    def with_text(self, text: str) -> bytes:
        return self._head + _encode(text) + self._tail


class AnswerWriter:
    """Writer of the body of one answer. Its callers' pace is that of the answer."""

    def __init__(
        self,
        send: Send,
        state: Mapping[str, Any],
        kept: KeptAnswer,
        entrance: Entrance,
        headers: Sequence[tuple[bytes, bytes]],
    ) -> None:
        """`send` sends the head. `state` is that of the request's scope, whose `send_body` sends everything
        after it; `write_chunk` does the same for a part that is not the last, but writes at once or,
        returning False, not at all; `can_write` tells whether `send` would not wait; `transport` is that of
        the connection. `kept` counts the answer while its caller does not read, and `entrance` gives its
        pieces their turns.
        """
        self.has_begun = False
        """True if the status 200 was sent: later failures can only be reported as events."""
        self._send_head = send
        self._send_body: Send = state["send_body"]
        self._write_chunk: Callable[[bytes], bool] = state["write_chunk"]
        self._can_write: Callable[[], bool] = state["can_write"]
        self._transport: PieceWriter = state["transport"]
        self._kept = kept
        self._entrance = entrance
        self._headers = headers

    @property
    def num_written(self) -> int:
        """Return a number that grows with each write while the client reads."""
        return self._kept.num_written

    def try_write(self, data: bytes) -> bool:
        """Send a part of the answer without waiting. Returns False if nothing was sent; then `write` has to
        be awaited.
        """
        if not (self.has_begun and self._write_chunk(data)):
            return False
        self._kept.note(len(data))
        return True

    async def write(self, data: bytes) -> None:
        """Send a part of the answer, and before the first one the head of the response. Waits while the
        client does not read.
        """
        if self.try_write(data):
            return
        message = {"type": "http.response.body", "body": data, "more_body": True}
        if self._can_write():
            await self._send(message)
        else:
            with self._kept.waits():
                await self._send(message)
        self._kept.note(len(data))

    def write_now(self, data: bytes) -> None:
        """Send a part of the answer, and before the first one the head, without waiting. Nothing is sent if
        the client does not read, and only the head if it takes no more. No other call may be waiting.
        """
        if not self._can_write():
            return
        sending = self._send_what_fits(data)
        try:
            sending.send(None)
        except StopIteration:
            return
        sending.close()
        raise RuntimeError("a connection that takes output made its writer wait")

    async def _send_what_fits(self, data: bytes) -> None:
        if not self.has_begun:
            await self._begin()
        if self._can_write():
            await self._send_body({"type": "http.response.body", "body": data, "more_body": True})
            self._kept.note(len(data))

    async def write_pieces(self, first: bytes, pieces: Iterable[bytes]) -> bytes:
        """Send an answer as its caller reads it, while other tasks of the event loop run between its pieces.
        Returns the last ones, which are not sent: all of most answers.
        """
        data, num_unturned, num_pieces = bytearray(first), len(first), 0
        for piece in pieces:
            data += piece
            num_unturned += len(piece)
            num_pieces += 1
            if len(data) >= LARGE_WRITE_BYTES:
                large, data, piece = bytes(data), bytearray(), b""  # one copy is kept while it waits
                await self.write(large)
                del large
            if num_unturned >= UNTURNED_BYTES or num_pieces >= UNTURNED_PIECES:
                num_unturned = num_pieces = 0
                await self._entrance.take_turn(self._kept.tenant)
        return bytes(data)

    async def end(self, data: bytes = b"") -> None:
        """Send the last part together with the end of the response."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def _send(self, message: dict[str, Any]) -> None:
        if self.has_begun:
            await self._send_body(message)
            return
        self._transport.cork()  # the head goes with the first part
        try:
            await self._begin()
            await self._send_body(message)
        finally:
            self._transport.uncork()

    async def _begin(self) -> None:
        self.has_begun = True
        await self._send_head({"type": "http.response.start", "status": 200, "headers": self._headers})
