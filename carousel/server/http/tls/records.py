"""Records: finds the ends of TLS records in the bytes of a connection."""

from __future__ import annotations

HEADER_BYTES = 5
"""Type, version and length of a record, which are not encrypted."""
_HANDSHAKE = 22
"""Type of records with messages of a handshake."""


class Records:
    def __init__(self) -> None:
        self._header = b""
        """Beginning of a header whose other bytes have not come."""
        self._left = 0
        """Number of bytes to come of the record whose header has been read."""
        self.num_handshake_bytes = 0
        """Number of bytes in all records of handshakes so far, with what has yet to come of the last one."""

    def measure(self, data: memoryview, most: int) -> tuple[int, int]:
        """Return the number of bytes of `data` up to the end of so many records, or all, and how many records
        these are or begin. The next call continues behind them.
        """
        at = number = 0
        while number < most and at < len(data):
            number += 1
            if not self._left:
                begun = len(self._header)
                header = self._header + data[at : at + HEADER_BYTES - begun]
                at += len(header) - begun
                if len(header) < HEADER_BYTES:
                    self._header = header
                    break
                self._header = b""
                self._left = int.from_bytes(header[-2:], "big")
                if header[0] == _HANDSHAKE:
                    self.num_handshake_bytes += self._left
            size = min(self._left, len(data) - at)
            self._left -= size
            at += size
        return at, number
