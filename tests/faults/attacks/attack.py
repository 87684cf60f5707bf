"""Attack: connections that send one kind of bytes; also requests that several kinds of attackers send."""

from __future__ import annotations

import os
import re
import select
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterator

NUM_CONNECTIONS = 16
MANY_CONNECTIONS = 150
BODY_BYTES = 8 << 20
PIECE_BYTES = 256 << 10
HELD_S = 45.0
"""Longer than any connection that asks for nothing may stay open."""
IP_BIND_ADDRESS_NO_PORT = getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24)
"""Linux: the port is chosen by `connect`, which takes one again whose connection ended a second ago. With
`bind` it stays taken for a minute, so that an attack opened no more than 28,000 connections a minute.
"""
OTHER_ADDRESS = "127.0.0.2"
"""That callers do not come from."""
KEY_VARIABLE = "ATTACKERS_KEY"
KEY = os.environ.get(KEY_VARIABLE, "")
TRUST_VARIABLE = "ATTACKERS_TRUST"
TRUST = os.environ.get(TRUST_VARIABLE, "")
AUTHORIZATION = f"Authorization: Bearer {KEY}\r\n".encode() if KEY else b""
LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
JSON = b"Host: x\r\nContent-Type: application/json\r\n" + AUTHORIZATION
OPENAPI = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n" + AUTHORIZATION + b"\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n"
FULL_HEAD = b"GET /live HTTP/1.1\r\nHost: x\r\n" + b"x-field: %b\r\n" % (b"v" * 500) * 60 + b"\r\n"
MANY_FIELDS = b"GET /live HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * 63 + b"\r\n"
UPGRADE = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
STATUS = re.compile(rb"HTTP/1\.1 (\d\d\d) ")
FAILED_EVENT = b'data: {"error"'


def body_of(data: bytes, path: bytes = b"/v1/completions") -> bytes:
    """A request with this body."""
    head = b"POST %b HTTP/1.1\r\nConnection: close\r\n" % path + JSON
    return head + b"Content-Length: %d\r\n\r\n" % len(data) + data


HALF_BODY = body_of(b" " * BODY_BYTES)[:-10]


class Attack:
    """State that the connections of one attack share."""

    def __init__(self, port: int, seconds: float, most_opened: int) -> None:
        self.port = port
        self._most_opened = most_opened
        self._end_s = time.monotonic() + seconds
        self._trust = ssl.create_default_context(cafile=TRUST) if TRUST else None
        self.num_opened = self.num_bytes = 0
        self.statuses: Counter[str] = Counter()

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end_s or self.num_opened > self._most_opened

    def open(
        self, *, has_tls: bool = True, address: str = "127.0.0.1", receive_bytes: int = 0
    ) -> socket.socket:
        """Open a connection from an address, over TLS unless it is to have none of its own. `receive_bytes`:
        the kernel's buffer for what comes, 0 its own choice.
        """
        self.num_opened += 1
        connection = socket.socket()
        try:
            connection.settimeout(HELD_S)
            if receive_bytes:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            connection.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
            connection.bind((address, 0))
            connection.connect(("127.0.0.1", self.port))
        except OSError:
            connection.close()
            raise
        if self._trust is not None and has_tls:
            connection = self._trust.wrap_socket(connection, server_hostname="localhost")
        connection.setblocking(False)
        return connection

    def send(
        self, pieces: Iterator[bytes], *, reads: bool = True, stays_s: float = 0.0, has_tls: bool = True
    ) -> None:
        """Send pieces on a new connection until they or the attack end, or the server closes it. Reads what
        is answered meanwhile, and goes on reading while no `stays_s` pass without anything.
        """
        with self.open(has_tls=has_tls) as connection:
            waiting = memoryview(next(pieces, b""))
            while not self.is_over and (waiting or stays_s):
                readable, writable, _ = select.select(
                    [connection] * reads, [connection] * bool(waiting), [], stays_s or 1.0
                )
                if not (readable or writable or waiting):
                    return
                if readable and not self._read(connection):
                    return
                if writable:
                    sent = _send(connection, waiting[:PIECE_BYTES])
                    self.num_bytes += sent
                    waiting = waiting[sent:] or memoryview(next(pieces, b""))

    def _read(self, connection: socket.socket) -> bool:
        try:
            data = connection.recv(1 << 18)
            while isinstance(connection, ssl.SSLSocket) and connection.pending():
                data += connection.recv(1 << 18)
        except ssl.SSLWantReadError:  # a part of a record
            return True
        self.statuses.update(status.decode() for status in STATUS.findall(data))
        if failed := data.count(FAILED_EVENT):
            self.statuses["failed stream"] += failed
        return bool(data)


def _send(connection: socket.socket, data: memoryview) -> int:
    try:
        return connection.send(data)
    except ssl.SSLWantWriteError:
        return 0


def endless(*data: bytes) -> Iterator[bytes]:
    """The first pieces once, the last one for ever."""
    yield from data[:-1]
    while True:
        yield data[-1]
