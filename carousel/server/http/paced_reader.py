"""PacedReader: reads one connection into a buffer that all share, and reads little while there is much other
work.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial

from carousel.server.http.connection_turns import ConnectionTurns, EndTurns
from carousel.server.http.piece_writer import PieceWriter
from carousel.server.http.protocol import HttpProtocol
from carousel.server.http.tls.tls_writer import Below, TlsWriter

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
        self,
        make_protocol: Callable[[], HttpProtocol],
        turns: ConnectionTurns,
        ends: EndTurns,
        buffer: memoryview,
    ) -> None:
        """`turns`, `ends` and `buffer`, of READ_BYTES, are shared by all connections. No data stays in
        `buffer` after a read.
        """
        self._make_protocol = make_protocol
        self._turns = turns
        self._ends = ends
        self._buffer = buffer
        self._crowded_buffer = buffer[:CROWDED_READ_BYTES]
        self._protocol: HttpProtocol | None = None
        self._writer: PieceWriter | None = None
        self.below: Below | None = None
        """Reader of the connection below TLS, if it has TLS."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.below is None:
            self._turns.note_accepted()
        if has_left(transport):  # before the connection was accepted
            transport.abort()
            return
        self._transport = transport
        self._protocol = self._make_protocol()
        pause, resume = self._protocol.pause_writing, self._protocol.resume_writing
        if self.below is None:
            self._writer = PieceWriter(transport, pause, resume)
        else:
            self._writer = TlsWriter(transport, self.below, pause, resume)
        self._protocol.connection_made(self._writer)

    @property
    def is_new(self) -> bool:
        """Return True until the head of a first request has been read."""
        return self._protocol is not None and self._protocol.is_new

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer if self._turns.has_room() else self._crowded_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._protocol is not None:
            self._protocol.data_received(self._buffer[:nbytes])

    def eof_received(self) -> bool:
        if self._protocol is None or self._writer is None:
            return False
        self._protocol.eof_received()
        keeps_open = self._writer.eof_received()
        if not keeps_open and self.below is None:  # a TLS connection ends whatever is returned here
            self._ends.wait(self._transport.close)
            return True
        return keeps_open

    def connection_lost(self, exc: Exception | None) -> None:
        if self._protocol is None:  # the client had left before
            self.below = None
            return
        self._protocol.eof_received()  # the handler of a request is told at once
        self._ends.wait(partial(self._lose, exc))

    def _lose(self, exc: Exception | None) -> None:
        assert self._protocol is not None
        assert self._writer is not None
        self._protocol.connection_lost(exc)
        self._writer.connection_lost()
        # The event loop's TLS, which they refer to, keeps this object's methods: a cycle for the collector.
        self._protocol = self._writer = self.below = None
        del self._transport

    def pause_writing(self) -> None:
        if self._writer is not None:
            self._writer.pause_writing()

    def resume_writing(self) -> None:
        if self._writer is not None:
            self._writer.resume_writing()


def has_left(transport: asyncio.BaseTransport) -> bool:
    """Return True if the client has closed the connection. Nothing is done for it, since others wait."""
    state = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state in (TCP_CLOSE, TCP_CLOSE_WAIT)
