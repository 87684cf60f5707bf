"""TlsReader: reads the TCP connection below one TLS connection. Handshakes, and what is decrypted, take turns
with those of all other connections.

The event loop's TLS would make all handshakes whose messages have come in one turn, and decrypt up to 256 KiB
of each connection, which may be thousands of records of a byte each.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import Any, cast

from carousel.server.http.connection_count import ConnectionCount
from carousel.server.http.connection_turns import BYTES_PER_COST, ConnectionTurns
from carousel.server.http.paced_reader import CROWDED_READ_BYTES, PacedReader, has_left
from carousel.server.http.tls.handshake_turns import HandshakeTurns
from carousel.server.http.tls.records import Records

MAX_RECORDS = 8
"""Maximum number of records that are passed on in one piece. Sixteen connections that send nothing but new
keys take 3 ms for a round.
"""
RECORD_COST = 20
"""Cost of a record that tells of new keys, the most that one can (19 us, 2026-11). Only TLS can tell which
these are.
"""
MAX_HELLO_BYTES = 8 << 10
"""Maximum number of bytes of a client's messages in a handshake. Most clients send less than 2 KiB. OpenSSL
3.0 takes 1 ms for 8 KiB of groups and keys that it has no use for, and 65 for 64 KiB, in one piece (2026-11).
"""
HANDSHAKE_TIMEOUT_S = 10.0
"""Longest time for a client's TLS handshake, the same as for the head of a request."""
CLOSE_TIMEOUT_S = 5.0
"""Longest time in which a client has to answer the end of a TLS connection."""

logger = logging.getLogger(__name__)


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
        """`reader` is the protocol above TLS. `count`, `handshakes`, `turns` and `buffer`, of READ_BYTES,
        are shared by all connections of this process. `count` counts this one during its handshake. No data
        stays in `buffer` after a read.
        """
        self._reader: PacedReader | None = reader
        self._context = context
        self._count = count
        self._handshakes = handshakes
        self._turns = turns
        self._buffer = buffer
        self._crowded_buffer = buffer[:CROWDED_READ_BYTES]
        self._address = ""
        self._tls: asyncio.BufferedProtocol | None = None
        """Protocol of the event loop's TLS."""
        self._held = b""
        """Received bytes that wait for a turn."""
        self._waits = False
        self._records = Records()
        self._is_paused = False
        """True while the connection above wants no data."""
        self._is_secure = False
        """True after the handshake."""
        self._is_counted = False
        self._handshake: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._turns.note_accepted()
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        self._is_counted = True
        self._count.add(self._address)
        # The refusal of one too many is sent after its handshake, for which an address may let many wait.
        if self._count.has_far_too_many(self._address) or has_left(transport):
            transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._handshake = loop.create_task(self._shake_hands(loop))
        loop.call_soon(self._go_between)  # right behind the first step of the task

    async def _shake_hands(self, loop: asyncio.AbstractEventLoop) -> None:
        reader = self._reader
        if reader is None or self._transport.is_closing():
            return
        try:
            secure = await loop.start_tls(
                self._transport,
                reader,
                self._context,
                server_side=True,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=CLOSE_TIMEOUT_S,
            )
        except OSError as error:  # among them all errors of TLS, which has closed the connection
            error.__traceback__ = None  # whose frames refer to the error: a cycle for the collector
            return
        self._is_secure = True
        self._stop_counting()
        if secure is not None and not secure.is_closing():
            reader.below = self
            reader.connection_made(secure)

    def _go_between(self) -> None:
        """Take the place of the event loop's TLS, before it has read anything."""
        if not self._transport.is_closing():
            self._tls = cast(asyncio.BufferedProtocol, self._transport.get_protocol())
            self._transport.set_protocol(self)
            if self._held:
                self._wait()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer if self._is_secure and self._turns.has_room() else self._crowded_buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = self._buffer[:nbytes]
        if self._is_secure and not self._held and self._turns.has_room():
            self._take(data)
        else:
            self._hold(self._held + data)

    def pause_reading(self) -> None:
        """Pass on nothing more, because the connection above wants no data. What TLS had would be decrypted
        at once when it wants some again.
        """
        self._is_paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        if self._held:
            self._wait()
        else:
            self._transport.resume_reading()

    def _hold(self, data: bytes) -> None:
        self._held = data
        self._transport.pause_reading()
        if self._tls is not None:
            self._wait()

    def _wait(self) -> None:
        if self._waits:
            return
        self._waits = True
        if self._is_secure:
            self._turns.wait(self._go_on, is_new=self._reader is not None and self._reader.is_new)
        else:
            self._handshakes.wait(self._address, self._go_on)

    def _go_on(self) -> None:
        self._waits = False
        if self._is_paused or self._transport.is_closing():
            return
        if not self._is_secure and has_left(self._transport):
            self._transport.abort()
            return
        data, self._held = self._held, b""
        self._take(memoryview(data))
        if not (self._held or self._is_paused):
            self._transport.resume_reading()

    def _take(self, data: memoryview) -> None:
        """Pass on some records, and more while this turn of the loop has room. The rest waits for another
        turn.
        """
        at = self._pass_on(data)
        while at < len(data) and not self._transport.is_closing():
            if self._is_paused or not (self._is_secure and self._turns.has_room()):
                self._hold(bytes(data[at:]))
                return
            at += self._pass_on(data[at:])

    def _pass_on(self, data: memoryview) -> int:
        """Pass on no more than MAX_RECORDS, and return their size."""
        assert self._tls is not None
        size, num_records = self._records.measure(data, MAX_RECORDS)
        if not self._is_secure and self._records.num_handshake_bytes > MAX_HELLO_BYTES:
            logger.warning("a client is refused whose TLS handshake is above %d KiB", MAX_HELLO_BYTES >> 10)
            self._transport.abort()
            return size
        cast(Any, self._tls.get_buffer(size))[:size] = data[:size]
        self._tls.buffer_updated(size)
        if self._is_secure:
            self._turns.spend(num_records * RECORD_COST + size // BYTES_PER_COST)
        return size

    def eof_received(self) -> bool | None:
        return None if self._tls is None else self._tls.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_counting()
        self._held = b""
        self._reader = None
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
