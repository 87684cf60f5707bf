"""HttpSpans: the times at which the last sampled requests came and were answered, in a small file of each
HTTP process that the others of the launch can read.

Each process writes only its own file, so there are no locks. A record has a digest of the request's label
instead of the label.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from carousel.server.admin.metric_file import map_file

NUM_KEPT = 1024
"""Number of requests of one process that are kept; each prompt of a request counts."""
DIGEST_BYTES = 16
_RECORD = struct.Struct(f"@dd{DIGEST_BYTES}s")


class HttpSpan(NamedTuple):
    """Times of a request, in seconds of CLOCK_MONOTONIC."""

    received_s: float
    answered_s: float


def label_digest(label: str) -> bytes:
    return blake2b(label.encode(errors="replace"), digest_size=DIGEST_BYTES).digest()


class HttpSpans:
    def __init__(self, folder: Path, index: int = 0) -> None:
        """`folder` is the same for all HTTP processes of a launch, and `index` is this one's number. Raises
        OSError.
        """
        self._folder = folder
        self._map = map_file(folder / f"http_spans{index}", NUM_KEPT * _RECORD.size)
        self._next = 0

    def note(self, labels: Iterable[str], received_s: float, answered_s: float) -> None:
        """Record that a request with a prompt for each of these labels was answered."""
        span = HttpSpan(received_s, answered_s)
        for label in labels:
            _RECORD.pack_into(self._map, self._next * _RECORD.size, *span, label_digest(label))
            self._next = (self._next + 1) % NUM_KEPT

    def read(self) -> dict[bytes, list[HttpSpan]]:
        """Return the spans of all processes of the launch, by the digests of their labels."""
        spans: dict[bytes, list[HttpSpan]] = {}
        for path in self._folder.glob("http_spans*"):
            data = path.read_bytes()
            whole = len(data) - len(data) % _RECORD.size
            for received_s, answered_s, digest in _RECORD.iter_unpack(data[:whole]):
                if received_s:
                    spans.setdefault(digest, []).append(HttpSpan(received_s, answered_s))
        return spans
