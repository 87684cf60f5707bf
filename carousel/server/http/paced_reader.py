"""PacedReader: reads one connection into a buffer that all share, and reads little while there is much other
work.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from carousel.server.http.connection_turns import ConnectionTurns
from carousel.server.http.protocol import HttpProtocol
from carousel.server.http.tls.tls_writer import Below, TlsWriter

UNREAD_BYTES = 4 << 10
"""Unread bytes of a connection, beyond those that the kernel holds, from which on they count and its answers
wait. Each of 8,192 connections may have so many uncounted. Who reads never has as many, so that a larger
number would make nothing faster.
"""
READ_BYTES = 64 << 10
"""Maximum number of bytes that are read at a time."""
CROWDED_READ_BYTES = 4 << 10
"""Bytes that are read if this turn has no room; they wait for another turn. Most requests are shorter."""


TCP_CLOSE, TCP_CLOSE_WAIT = 7, 8
"""States of the kernel: the client has reset the connection, or has closed it."""


class PacedReader(asyncio.BufferedProtocol):
    """Protocol that the event loop calls, in front of the parsing one.

    For any other kind of protocol, the loop would allocate the memory for reading, and read up to 256,000
    bytes, up to 32 times in a row, from each connection in each turn.
    """

    def __init__(
        self, make_protocol: Callable[[], HttpProtocol], turns: ConnectionTurns, buffer: memoryview
    ) -> None:
        """`buffer` has READ_BYTES and is the same for all connections. No data stays in it after a read."""
        self._make_protocol = make_protocol
        self._turns = turns
        self._buffer = buffer
        self._crowded_buffer = buffer[:CROWDED_READ_BYTES]
        self._protocol: HttpProtocol | None = None
        self._tls: TlsWriter | None = None
        self.below: Below | None = None
        """Reader of the connection below TLS, if it has TLS."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if has_left(transport):  # before the connection was accepted
            transport.abort()
            return
        self._protocol = self._make_protocol()
        if self.below is not None:
            transport = self._tls = TlsWriter(
                transport, self.below, self._protocol.pause_writing, self._protocol.resume_writing
            )
        else:
            transport.set_write_buffer_limits(high=UNREAD_BYTES)
        self._protocol.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer if self._turns.has_room() else self._crowded_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._protocol is not None:
            self._protocol.data_received(self._buffer[:nbytes])

    def eof_received(self) -> None:
        if self._protocol is not None:
            self._protocol.eof_received()
        if self._tls is not None:
            self._tls.forget()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._protocol is not None:
            self._protocol.connection_lost(exc)
        if self._tls is not None:
            self._tls.connection_lost()
        # The event loop's TLS, which they refer to, keeps this object's methods: a cycle for the collector.
        self._protocol = self._tls = self.below = None

    def pause_writing(self) -> None:
        if self._tls is not None:
            self._tls.pause_writing()
        elif self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._tls is not None:
            self._tls.resume_writing()
        elif self._protocol is not None:
            self._protocol.resume_writing()


def has_left(transport: asyncio.BaseTransport) -> bool:
    """Return True if the client has closed the connection. Nothing is done for it, since others wait."""
    state = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state in (TCP_CLOSE, TCP_CLOSE_WAIT)
