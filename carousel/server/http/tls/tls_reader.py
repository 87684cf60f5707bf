"""TlsReader: reads the TCP connection below one TLS connection. Handshakes, and what is decrypted, take turns
with those of all other connections.

The event loop's TLS would make all handshakes whose messages have come in one turn, and decrypt up to 256 KiB
of each connection, which may be thousands of records of a byte each.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Any, cast

from carousel.server.http.connection_count import ConnectionCount
from carousel.server.http.connection_turns import ConnectionTurns
from carousel.server.http.paced_reader import CROWDED_READ_BYTES, PacedReader, has_left
from carousel.server.http.tls.handshake_turns import HandshakeTurns

RECORD_READ_BYTES = 17 << 10
"""Maximum number of bytes that are read at a time: one record of the largest size, or 700 of a byte each,
which take 1 ms.
"""
HANDSHAKE_TIMEOUT_S = 10.0
"""Longest time for a client's TLS handshake, the same as for the head of a request."""
CLOSE_TIMEOUT_S = 5.0
"""Longest time in which a client has to answer the end of a TLS connection."""


class TlsReader(asyncio.BufferedProtocol):
    """Protocol of one TCP connection, in front of the event loop's TLS."""

    def __init__(
        self,
        reader: PacedReader,
        context: ssl.SSLContext,
        count: ConnectionCount,
        handshakes: HandshakeTurns,
        turns: ConnectionTurns,
        buffer: memoryview,
    ) -> None:
        """`reader` is the protocol above TLS. `count`, `handshakes`, `turns` and `buffer` are shared by all
        connections of this process. `count` counts this one during its handshake.
        """
        self._reader = reader
        self._context = context
        self._count = count
        self._handshakes = handshakes
        self._turns = turns
        self._buffer = buffer[:RECORD_READ_BYTES]
        self._hello_buffer = buffer[:CROWDED_READ_BYTES]
        self._address = ""
        self._tls: asyncio.BufferedProtocol | None = None
        """Protocol of the event loop's TLS."""
        self._held = b""
        """Received bytes that wait for a turn."""
        self._waits = False
        self._is_secure = False
        """True after the handshake."""
        self._is_counted = False
        self._handshake: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        self._is_counted = True
        self._count.add(self._address)
        if has_left(transport):
            transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._handshake = loop.create_task(self._shake_hands(loop))
        loop.call_soon(self._go_between)  # right behind the first step of the task

    async def _shake_hands(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._transport.is_closing():
            return
        try:
            secure = await loop.start_tls(
                self._transport,
                self._reader,
                self._context,
                server_side=True,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=CLOSE_TIMEOUT_S,
            )
        except OSError:  # among them all errors of TLS, which has closed the connection
            return
        self._is_secure = True
        self._stop_counting()
        if secure is not None and not secure.is_closing():
            self._reader.connection_made(secure)

    def _go_between(self) -> None:
        """Take the place of the event loop's TLS, before it has read anything."""
        if not self._transport.is_closing():
            self._tls = cast(asyncio.BufferedProtocol, self._transport.get_protocol())
            self._transport.set_protocol(self)
            if self._held:
                self._wait()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer if self._is_secure else self._hello_buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = self._buffer[:nbytes]
        if self._is_secure and not self._held and self._turns.has_room():
            self._decrypt(data)
            return
        self._held += data
        self._transport.pause_reading()
        if self._tls is not None:
            self._wait()

    def _wait(self) -> None:
        if self._waits:
            return
        self._waits = True
        if self._is_secure:
            self._turns.wait(self._go_on)
        else:
            self._handshakes.wait(self._address, self._go_on)

    def _go_on(self) -> None:
        self._waits = False
        if self._transport.is_closing():
            return
        if not self._is_secure and has_left(self._transport):
            self._transport.abort()
            return
        data, self._held = self._held, b""
        self._transport.resume_reading()  # unless TLS stops it again
        if self._is_secure:
            self._decrypt(data)
        else:
            self._pass_on(data)

    def _decrypt(self, data: bytes | memoryview) -> None:
        began_s, spent = time.thread_time(), self._turns.spent
        self._pass_on(data)
        # What the connection did with its data has been counted.
        cost = int(1e6 * (time.thread_time() - began_s)) - (self._turns.spent - spent)
        self._turns.spend(max(1, cost))

    def _pass_on(self, data: bytes | memoryview) -> None:
        assert self._tls is not None
        cast(Any, self._tls.get_buffer(len(data)))[: len(data)] = data
        self._tls.buffer_updated(len(data))

    def eof_received(self) -> bool | None:
        return None if self._tls is None else self._tls.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_counting()
        self._held = b""
        if self._tls is not None:
            self._tls.connection_lost(exc)
            self._tls = None

    def _stop_counting(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._count.remove(self._address)

    def pause_writing(self) -> None:
        if self._tls is not None:
            self._tls.pause_writing()

    def resume_writing(self) -> None:
        if self._tls is not None:
            self._tls.resume_writing()
