"""Wire handles: the 16 bytes that name one sequence on every socket.

    client (8)  | seq (4)  | index (2) | attempt (2)        little endian

`client` is drawn at random by the server for each connection, so a handle cannot be guessed and owns itself;
`seq` counts the client's requests, `index` the sequences of one request, `attempt` how often the client has
submitted it. A handle is never reused. Two attempts of one sequence share their first 14 bytes, the *sequence
key*.
"""

from __future__ import annotations

import struct

HANDLE_BYTES = 16
KEY_BYTES = 14

_LAYOUT = struct.Struct("<QIHH")


def make_handle(client: int, seq: int, index: int = 0, attempt: int = 0) -> bytes:
    return _LAYOUT.pack(client, seq, index, attempt)


def split_handle(handle: bytes) -> tuple[int, int, int, int]:
    """(client, seq, index, attempt)."""
    client, seq, index, attempt = _LAYOUT.unpack(handle)
    return client, seq, index, attempt


def client_of(handle: bytes) -> int:
    return int.from_bytes(handle[:8], "little")


def attempt_of(handle: bytes) -> int:
    return int.from_bytes(handle[KEY_BYTES:], "little")


def sequence_key(handle: bytes) -> bytes:
    """What all attempts of one sequence have in common."""
    return handle[:KEY_BYTES]


def describe(handle: bytes) -> str:
    """Short text for logs; the client part is a capability and is not shown."""
    _, seq, index, attempt = _LAYOUT.unpack(handle)
    return f"#{seq}.{index}" + (f"/{attempt}" if attempt else "")
