"""Wire handles: the 16 bytes that name one sequence on every socket.

    client (8)  | seq (5)  | index (1) | attempt (2)        little endian

`client` is drawn at random by the server for each connection, so a handle cannot be guessed and owns itself;
`seq` counts the client's requests, `index` the sequences of one request, `attempt` how often the client has
submitted it. A handle is never reused: `seq` lasts for 34 years of a thousand requests a second, `attempt`
for 65,535 engines under one request, dead ones and those replaced by others with new weights. Two attempts
of one sequence share their first 14 bytes, the *sequence key*.
"""

from __future__ import annotations

import struct

HANDLE_BYTES = 16
CLIENT_BYTES = 8
KEY_BYTES = 14
REQUEST_BYTES = 13
NO_HANDLE = bytes(HANDLE_BYTES)
"""Handle that no sequence has, since a client id is never 0."""
MAX_INDEX = (1 << 8) - 1
MAX_ATTEMPT = (1 << 16) - 1
MAX_ABORT_HANDLES = 4096
"""Maximum number of handles that one message aborts."""

_LAYOUT = struct.Struct("<QIBBH")


def make_handle(client: int, seq: int, index: int = 0, attempt: int = 0) -> bytes:
    return _LAYOUT.pack(client, seq & 0xFFFFFFFF, seq >> 32, index, attempt)


def split_handle(handle: bytes) -> tuple[int, int, int, int]:
    """Return the parts of a handle: (client, seq, index, attempt)."""
    client, low, high, index, attempt = _LAYOUT.unpack(handle)
    return client, high << 32 | low, index, attempt


def sibling(handle: bytes, index: int) -> bytes:
    """Return the handle of another sequence of the same request and attempt."""
    client, seq, _, attempt = split_handle(handle)
    return make_handle(client, seq, index, attempt)


def next_sibling(handle: bytes, number: int) -> bytes:
    """Return the handle whose index is `number` higher; the same handle for 0."""
    client, seq, index, attempt = split_handle(handle)
    return make_handle(client, seq, index + number, attempt)


def with_attempt(handle: bytes, attempt: int) -> bytes:
    """Return the handle of another attempt of the same sequence."""
    return handle[:KEY_BYTES] + attempt.to_bytes(2, "little")


def client_of(handle: bytes) -> int:
    return int.from_bytes(handle[:CLIENT_BYTES], "little")


def index_of(handle: bytes) -> int:
    return handle[REQUEST_BYTES]


def attempt_of(handle: bytes) -> int:
    return int.from_bytes(handle[KEY_BYTES:], "little")


def sequence_key(handle: bytes) -> bytes:
    """Return the part of a handle that all attempts of one sequence share."""
    return handle[:KEY_BYTES]


def attempt_key(handle: bytes) -> bytes:
    """Return the parts of a handle that all sequences of one attempt of a request share."""
    return handle[:REQUEST_BYTES] + handle[KEY_BYTES:]


def describe(handle: bytes) -> str:
    """Return a short text for logs. The client part is a capability and is not shown."""
    _, seq, index, attempt = split_handle(handle)
    return f"#{seq}.{index}" + (f"/{attempt}" if attempt else "")
