"""First messages of TLS 1.3 clients as long as one may be, with what takes a server longest to read: for each
key that it has no use for, OpenSSL looks through all groups that the client names.
"""

from __future__ import annotations

import os

RECORD_BYTES = 16 << 10
MAX_EXTENSION_BYTES = 65_000
X25519, NO_GROUP, OTHER_GROUP = b"\x00\x1d", b"\x6a\x6a", b"\x1a\x1a"
SUPPORTED_GROUPS, SIGNATURES, SUPPORTED_VERSIONS, KEY_SHARE = 10, 13, 43, 51


def wide_hello(num_bytes: int = MAX_EXTENSION_BYTES) -> bytes:
    """Return the records of a message with so many bytes of groups and keys, which a server answers."""
    share_bytes = len(NO_GROUP) + 3
    num_groups, num_shares = num_bytes // 2 // len(NO_GROUP), num_bytes // 2 // share_bytes
    groups = OTHER_GROUP * (num_groups - 2) + X25519 + NO_GROUP
    shares = (NO_GROUP + _counted(b"k", 2)) * (num_shares - 8) + X25519 + _counted(os.urandom(32), 2)
    extensions = (
        _extension(SUPPORTED_GROUPS, _counted(groups, 2))
        + _extension(SIGNATURES, _counted(b"\x04\x03\x08\x04", 2))
        + _extension(SUPPORTED_VERSIONS, _counted(b"\x03\x04", 1))
        + _extension(KEY_SHARE, _counted(shares, 2))
    )
    body = b"\x03\x03" + os.urandom(32) + _counted(b"", 1) + _counted(b"\x13\x01\x13\x02", 2)
    body += _counted(b"\0", 1) + _counted(extensions, 2)
    message = b"\1" + _counted(body, 3)
    pieces = (message[at : at + RECORD_BYTES] for at in range(0, len(message), RECORD_BYTES))
    return b"".join(b"\x16\x03\x01" + _counted(piece, 2) for piece in pieces)


def _counted(data: bytes, num_digits: int) -> bytes:
    return len(data).to_bytes(num_digits, "big") + data


def _extension(kind: int, data: bytes) -> bytes:
    return kind.to_bytes(2, "big") + _counted(data, 2)
