"""RawTls: a TLS client that leaves it to its caller when its bytes are sent."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from functools import cache

from tests.harness.http.tls import CERTIFICATE

READ_BYTES = 1 << 16


class ClientTls(ssl.SSLObject):
    """TLS of a client, beside which a test may change the class that the server uses."""

    do_handshake = ssl.SSLObject.do_handshake
    read = ssl.SSLObject.read


class RawTls:
    def __init__(self, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> None:
        """`version` is the only one that it speaks."""
        context = ssl.create_default_context(cafile=str(CERTIFICATE))
        context.minimum_version = context.maximum_version = version
        context.sslobject_class = ClientTls
        self._received, self._sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._sent, server_hostname="localhost")
        self.is_secure = False
        """True after the handshake."""

    def flight(self, received: bytes = b"") -> bytes:
        """Return what the client sends in the handshake once it has received this."""
        self._received.write(received)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            pass
        else:
            self.is_secure = True
        return self._sent.read()

    def shake_hands(self, connection: socket.socket) -> None:
        connection.sendall(self.flight())
        while not self.is_secure:
            connection.sendall(self.flight(connection.recv(READ_BYTES)))

    def records(self, *pieces: bytes) -> bytes:
        """Return the pieces, each encrypted in a record of its own."""
        for piece in pieces:
            self._tls.write(piece)
        return self._sent.read()

    def receive(self, connection: socket.socket) -> bytes:
        """Return what comes next, at most 16 KiB of it."""
        while True:
            with suppress(ssl.SSLWantReadError):  # a record may have come with the one before
                return self._tls.read(READ_BYTES)
            self._received.write(connection.recv(READ_BYTES))


@cache
def client_hello() -> bytes:
    """Return the first message of a client, for which a server makes and signs a key."""
    return RawTls().flight()
