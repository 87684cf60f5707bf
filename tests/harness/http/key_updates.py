"""KeyUpdates: a TLS 1.3 client that changes its keys again and again, which Python's has no call for. It uses
the machine's OpenSSL 3, and checks no certificate.
"""

from __future__ import annotations

import socket
from ctypes import CDLL, c_int, c_void_p
from functools import cache

UPDATE_BYTES = 27
"""Size of a record that tells of new keys."""
REQUESTED = 1
"""Kind of an update that asks the peer to change its keys, too."""


@cache
def library() -> CDLL:
    openssl = CDLL("libssl.so.3")
    for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
        getattr(openssl, name).restype = c_void_p
    pointer, number = c_void_p, c_int
    openssl.SSL_CTX_new.argtypes = openssl.SSL_new.argtypes = [pointer]
    openssl.SSL_free.argtypes = openssl.SSL_CTX_free.argtypes = [pointer]
    openssl.SSL_connect.argtypes = openssl.SSL_do_handshake.argtypes = [pointer]
    openssl.SSL_set_fd.argtypes = openssl.SSL_key_update.argtypes = [pointer, number]
    return openssl


class KeyUpdates:
    def __init__(self, connection: socket.socket) -> None:
        """`connection` blocks. The handshake is made in the context."""
        self._connection = connection

    def __enter__(self) -> KeyUpdates:
        openssl = library()
        self._context = openssl.SSL_CTX_new(openssl.TLS_client_method())
        self._tls = openssl.SSL_new(self._context)
        openssl.SSL_set_fd(self._tls, self._connection.fileno())
        _check(openssl.SSL_connect(self._tls))
        return self

    def send(self) -> int:
        """Send an update that asks for one, and return its size."""
        _check(library().SSL_key_update(self._tls, REQUESTED))
        _check(library().SSL_do_handshake(self._tls))
        return UPDATE_BYTES

    def __exit__(self, *_: object) -> None:
        library().SSL_free(self._tls)
        library().SSL_CTX_free(self._context)


def _check(result: int) -> None:
    if result != 1:
        raise ConnectionError("the server takes no more")
