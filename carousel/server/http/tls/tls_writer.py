"""TlsWriter: a TLS transport that says, as those of plain connections do, how much its caller has not read.

uvloop's takes an answer of any size, encrypts all of it at once and gives it to the transport below, whose
bytes it does not count. So an answer is given to it in pieces, and the rest is kept here and counted.
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

PIECE_BYTES = 64 << 10
"""Number of bytes that are encrypted at a time."""
TURN_BYTES = 1 << 20
"""Maximum number of bytes of one connection that are encrypted in a turn of the event loop: 1 to 2 ms."""
HELD_BYTES = 16 << 10
"""Number of bytes that the event loop's transport holds before it pauses. It has any only while the transport
below, with the limits of a plain connection, takes no more, and for a moment after the handshake.
"""
BYTES_BELOW = 64 << 10
"""Number of bytes that the transport below holds when it takes no more. It does not tell."""
CLOSE_CHECK_S, MAX_CLOSE_CHECK_S = 0.1, 2.0
"""Seconds between the first two looks whether a connection that is to be closed has been read, doubled with
each look, and their maximum. A look takes 2 us, and thousands of callers may read nothing.
"""


class Below(Protocol):
    """Reader of the connection below TLS."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class TlsWriter(asyncio.Transport):
    """Transport of one TLS connection, in front of the event loop's."""

    def __init__(
        self,
        transport: asyncio.Transport,
        below: Below,
        pause: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        """`below` reads for the transport. `pause` and `resume` are called when the caller reads less than
        is written, and when all that waited here has been passed on.
        """
        super().__init__()
        transport.set_write_buffer_limits(high=HELD_BYTES, low=0)
        self._transport = transport
        self._below = below
        self._on_pause, self._on_resume = pause, resume
        self._waiting: deque[bytes | memoryview] = deque()
        """Written data that has not been passed on."""
        self._num_waiting = 0
        """Number of bytes of it."""
        self._is_full = False
        """True while the event loop's transport takes no more."""
        self._is_paused = False
        """True between the calls of `pause` and `resume`."""
        self._is_closing = False
        self._check_s = CLOSE_CHECK_S
        self._next: asyncio.Handle | None = None
        """Next piece, or next look at a connection that is to be closed."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        self._transport.pause_reading()
        self._below.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_closing:
            self._transport.resume_reading()
            self._below.resume_reading()

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that were written and that the kernel does not have yet, roughly."""
        held = self._transport.get_write_buffer_size() + BYTES_BELOW if self._is_full else 0
        return held + self._num_waiting

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_closing():
            return
        if not (self._waiting or self._is_full) and len(data) <= PIECE_BYTES:
            self._transport.write(data)
        elif data:
            self._waiting.append(data if isinstance(data, bytes) else bytes(data))
            self._num_waiting += len(data)
            if not (self._is_full or self._next):
                self._pass_on()

    def close(self) -> None:
        """Close the connection once its caller has read what was written, however long that takes. Uvloop's
        TLS would drop what has not left after its time for closing.
        """
        if self.is_closing():
            return
        self.pause_reading()
        self._is_closing = True
        if not (self._waiting or self._is_full):
            self._close_if_read()

    def abort(self) -> None:
        self.forget()
        self._transport.abort()

    def forget(self) -> None:
        """Drop what waits, because the connection has ended or its caller sends nothing more."""
        self._is_closing = True
        self._waiting.clear()
        self._num_waiting = 0
        if self._next is not None:
            self._next.cancel()
            self._next = None

    # Callbacks of the event loop's transport

    def pause_writing(self) -> None:
        self._is_full = True
        self._pause()

    def resume_writing(self) -> None:
        self._is_full = False
        if self._next is None:
            self._pass_on()

    def connection_lost(self) -> None:
        self.forget()
        # They refer to the connection's protocol, which refers to this object: a cycle for the collector.
        self._on_pause = self._on_resume = _ignore

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._on_pause()

    def _pass_on(self) -> None:
        """Pass on what waits, up to the bound of a turn."""
        self._next = None
        num_passed = 0
        while self._waiting and not self._is_full:
            if num_passed >= TURN_BYTES:
                self._next = asyncio.get_running_loop().call_soon(self._pass_on)
                self._pause()
                return
            first = self._waiting.popleft()
            piece = first if len(first) <= PIECE_BYTES else memoryview(first)[:PIECE_BYTES]
            if len(piece) < len(first):
                self._waiting.appendleft(memoryview(first)[PIECE_BYTES:])
            self._num_waiting -= len(piece)
            num_passed += len(piece)
            self._transport.write(piece)
        if self._is_full or self._transport.is_closing():
            return
        if self._is_closing:
            self._close_if_read()
        elif self._is_paused:
            self._is_paused = False
            self._on_resume()

    def _close_if_read(self) -> None:
        """Close the connection if the kernel takes more, so that nothing waits in the transport below."""
        self._next = None
        if self._transport.is_closing():  # it has no socket any more
            return
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLOUT)
        if poll.poll(0):
            self._transport.close()
            self._below.resume_reading()  # to the client's own end of TLS
        else:
            self._next = asyncio.get_running_loop().call_later(self._check_s, self._close_if_read)
            self._check_s = min(2 * self._check_s, MAX_CLOSE_CHECK_S)


def _ignore() -> None:
    pass
