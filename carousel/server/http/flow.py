"""Flow of one connection: when it is read, and how output is written without passing through
the middleware.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Flow(FlowControl):
    """Flow control that reads only while uvicorn, the protocol and the pace of large bodies all allow it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_paused = False
        self._is_held = False
        self._is_resting = False

    @property
    def is_held(self) -> bool:
        """True while the protocol wants no more data."""
        return self._is_held

    @is_held.setter
    def is_held(self, is_held: bool) -> None:
        self._is_held = is_held
        self._change()

    @property
    def is_resting(self) -> bool:
        """True while the next piece of a large body has to wait for other work."""
        return self._is_resting

    @is_resting.setter
    def is_resting(self, is_resting: bool) -> None:
        self._is_resting = is_resting
        self._change()

    def pause_reading(self) -> None:
        self._is_paused = True
        self._change()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._change()

    def _change(self) -> None:
        if self._is_paused or self._is_held or self._is_resting:
            super().pause_reading()
        else:
            super().resume_reading()


def with_short_cuts(app: Any, cycle: RequestResponseCycle) -> Any:
    """Return the application with shortcuts past the middleware in the scope's state: `send_body`, the
    innermost `send`; `write_chunk`, which does not wait; `can_write`; `has_left`; `watch`; `has_whole_body`;
    and the connection's `transport`.
    """

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        if scope["http_version"] == "1.0":
            send = _without_chunks(cycle, send)
        state["send_body"] = send
        state["write_chunk"] = partial(write_chunk, cycle)
        state["can_write"] = partial(can_write, cycle)
        state["has_left"] = partial(has_left, cycle)
        state["watch"] = partial(watch, cycle)
        state["has_whole_body"] = partial(has_whole_body, cycle)
        state["transport"] = cycle.transport
        try:
            await app(scope, receive, send)
        finally:
            # They refer to the request, which refers to its scope: a cycle for the collector.
            state.clear()

    return run


def _without_chunks(cycle: RequestResponseCycle, send: Send) -> Send:
    """Return `send` for a client that knows no chunks: the end of the connection is that of an answer whose
    length is not known before. Uvicorn would send it chunks.
    """

    has_length = True

    async def send_plain(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plain


def write_chunk(cycle: RequestResponseCycle, chunk: bytes) -> bool:
    """Write a chunk of a response whose head was sent; the bytes are those of `send`. Returns False if
    nothing was written, because the client does not read, has gone, or gets no chunks. `send` handles these
    cases.
    """
    assert chunk, "an empty chunk ends the response"
    if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
    return True


def can_write(cycle: RequestResponseCycle) -> bool:
    """Return True if `send` would not wait."""
    return not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)


def note_departure(cycle: RequestResponseCycle) -> None:
    """Note that nobody waits for the answer any more, and tell whoever makes it."""
    cycle.disconnected = True
    cycle.message_event.set()
    on_departure = cycle.scope["state"].pop("on_departure", None)
    if on_departure is not None:
        asyncio.get_running_loop().call_soon(on_departure)


def watch(cycle: RequestResponseCycle, on_departure: Callable[[], None] | None) -> None:
    """Call `on_departure` in a turn of the event loop if the client leaves before it has the answer; None:
    call nothing any more.
    """
    cycle.scope["state"]["on_departure"] = on_departure
    if on_departure is not None:
        # Uvicorn pauses behind a large body until the application asks for more. The end is not read then.
        cycle.flow.resume_reading()


def has_begun(cycle: RequestResponseCycle) -> bool:
    """Return True while the application handles the request."""
    return "transport" in cycle.scope["state"]


def has_whole_body(cycle: RequestResponseCycle) -> bool:
    """Return True if all of the request's body has arrived, so that nobody waits for it."""
    return not cycle.more_body


def has_left(cycle: RequestResponseCycle) -> bool:
    """Return True if the client has closed the connection, as far as the event loop knows."""
    return cycle.disconnected
