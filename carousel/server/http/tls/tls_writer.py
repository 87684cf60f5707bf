"""TlsWriter: the PieceWriter of a TLS connection.

uvloop's transport encrypts an answer of any size at once and gives it to the transport below, whose bytes it
does not count.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Protocol

from carousel.server.http.piece_writer import PieceWriter

PIECE_BYTES = 64 << 10
"""Number of bytes that are encrypted at a time."""
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


class TlsWriter(PieceWriter):
    """Transport of one TLS connection, in front of the event loop's."""

    __slots__ = ("_below", "_check_s")
    piece_bytes, limit_below = PIECE_BYTES, HELD_BYTES

    def __init__(
        self,
        transport: asyncio.Transport,
        below: Below,
        pause: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        """`below` reads for the transport. The others are those of PieceWriter."""
        super().__init__(transport, pause, resume)
        self._below = below
        self._check_s = CLOSE_CHECK_S

    def pause_reading(self) -> None:
        super().pause_reading()
        self._below.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_closing:
            super().resume_reading()
            self._below.resume_reading()

    def eof_received(self) -> bool:
        """Drop what waits: a TLS connection ends whatever is returned here."""
        self.forget()
        return False

    def _num_kept_below(self) -> int:
        return self._transport.get_write_buffer_size() + BYTES_BELOW

    def _close_below(self) -> None:
        """Close the connection if the kernel takes more, so that nothing waits in the transport below.
        Uvloop's TLS would drop what has not left after its time for closing.
        """
        self._next = None
        if self._transport.is_closing():  # it has no socket any more
            return
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLOUT)
        if poll.poll(0):
            self._transport.close()
            self._below.resume_reading()  # to the client's own end of TLS
        else:
            self._next = asyncio.get_running_loop().call_later(self._check_s, self._close_below)
            self._check_s = min(2 * self._check_s, MAX_CLOSE_CHECK_S)
