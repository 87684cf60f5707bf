"""PieceWriter: a transport that lets go of an answer as its caller reads it.

The event loop's keeps all of what was written at once until its last byte has been sent, however little is
left of it, and tells of what is left. So an answer is given to it in pieces, and the rest is kept here and
counted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

PIECE_BYTES = 32 << 10
"""Maximum number of bytes that the event loop's transport is given at a time, and then keeps."""
TURN_BYTES = 1 << 20
"""Maximum number of bytes of one connection that are passed on in a turn of the event loop."""


class PieceWriter(asyncio.Transport):
    """Transport of one connection, in front of the event loop's."""

    __slots__ = (
        "_is_closing",
        "_is_corked",
        "_is_full",
        "_is_paused",
        "_next",
        "_num_below",
        "_num_waiting",
        "_on_pause",
        "_on_resume",
        "_transport",
        "_waiting",
    )
    piece_bytes = PIECE_BYTES
    limit_below = 0
    """Number of bytes that the event loop's transport holds before it pauses."""

    def __init__(
        self, transport: asyncio.Transport, pause: Callable[[], None], resume: Callable[[], None]
    ) -> None:
        """`pause` and `resume` are called when the caller reads less than is written, and when all that
        waited here has been passed on.
        """
        super().__init__()
        transport.set_write_buffer_limits(high=self.limit_below, low=0)
        self._transport = transport
        self._on_pause, self._on_resume = pause, resume
        self._waiting: deque[bytes] | None = None
        """Pieces that have not been passed on."""
        self._num_waiting = 0
        """Number of bytes of them."""
        self._num_below = 0
        """Number of bytes of the last piece that was passed on."""
        self._is_full = False
        """True while the event loop's transport takes no more."""
        self._is_paused = False
        """True between the calls of `pause` and `resume`."""
        self._is_corked = False
        """True between the calls of `cork` and `uncork`."""
        self._is_closing = False
        self._next: asyncio.Handle | None = None
        """Next turn in which pieces are passed on, or in which it is looked whether all has been read."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_closing:
            self._transport.resume_reading()

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that are kept for the caller, roughly."""
        return self._num_waiting + (self._num_kept_below() if self._is_full else 0)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_closing():
            return
        if not (self._num_waiting or self._is_full or self._is_corked) and len(data) <= self.piece_bytes:
            self._num_below = len(data)
            self._transport.write(data)
        elif data:
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.extend(_cut(data, self.piece_bytes))
            self._num_waiting += len(data)
            if not (self._is_full or self._next or self._is_corked):
                self._pass_on()

    def cork(self) -> None:
        """Keep what is written from now until `uncork`, so that small parts are sent as one. The kernel takes
        10 to 15 us for each, and the caller is woken for each.
        """
        self._is_corked = True

    def uncork(self) -> None:
        """Pass on what was written since `cork`."""
        self._is_corked = False
        if self._waiting and not (self._is_full or self._next):
            if self._num_waiting <= self.piece_bytes:
                self._waiting = deque((b"".join(self._waiting),))
            self._pass_on()

    def close(self) -> None:
        """Close the connection once its caller has read what was written, however long that takes."""
        if self.is_closing():
            return
        self.pause_reading()
        self._is_closing = True
        if not (self._num_waiting or self._is_full):
            self._close_below()

    def abort(self) -> None:
        self.forget()
        self._transport.abort()

    def forget(self) -> None:
        """Drop the waiting pieces, because the connection has ended."""
        self._is_closing = True
        self._waiting = None
        self._num_waiting = 0
        if self._next is not None:
            self._next.cancel()
            self._next = None

    # Callbacks of the event loop's transport

    def eof_received(self) -> bool:
        """Close the connection once what was written has been passed on, because its caller sends nothing
        more. Returns True if something waits; otherwise the event loop closes it.
        """
        self._is_closing = True
        return self._num_waiting > 0

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
        """Write the waiting pieces to the transport, up to TURN_BYTES in a turn."""
        self._next = None
        num_passed = 0
        while self._waiting and not self._is_full:
            if num_passed >= TURN_BYTES:
                self._next = asyncio.get_running_loop().call_soon(self._pass_on)
                self._pause()
                return
            piece = self._waiting.popleft()
            self._num_below = len(piece)
            self._num_waiting -= len(piece)
            num_passed += len(piece)
            self._transport.write(piece)
        if self._is_full or self._transport.is_closing():
            return
        self._waiting = None
        if self._is_closing:
            self._close_below()
        elif self._is_paused:
            self._is_paused = False
            self._on_resume()

    def _num_kept_below(self) -> int:
        """Return the number of bytes that the event loop's transport keeps while it takes no more."""
        return self._num_below

    def _close_below(self) -> None:
        self._transport.close()


def _cut(data: bytes | bytearray | memoryview, size: int) -> Iterator[bytes]:
    """Yield copies of pieces, because a view keeps all that it is a view of."""
    if isinstance(data, bytes) and len(data) <= size:
        yield data
        return
    view = memoryview(data)
    for start in range(0, len(data), size):
        yield bytes(view[start : start + size])


def _ignore() -> None:
    pass
