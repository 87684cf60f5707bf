"""RawWindow: limits the raw frames to each peer that the socket has not sent yet. The socket's own high-water
mark counts messages, and a message with raw frames may have megabytes.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol


class Tracker(Protocol):
    @property
    def done(self) -> bool:
        """True if the socket has sent everything that is tracked here."""


class RawWindow:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sent: dict[bytes, deque[tuple[Tracker, int]]] = {}

    def is_open(self, peer: bytes) -> bool:
        """Return True if more may be sent. A single message may always be on the way."""
        self._forget_done(peer)
        return sum(num_bytes for _, num_bytes in self._sent.get(peer, ())) < self._max_bytes

    def add(self, peer: bytes, tracker: Tracker, num_bytes: int) -> None:
        if peer not in self._sent:
            # Peers that are gone never call is_open again, so clean up here.
            for other in list(self._sent):
                self._forget_done(other)
            self._sent[peer] = deque()
        self._sent[peer].append((tracker, num_bytes))

    def _forget_done(self, peer: bytes) -> None:
        sent = self._sent.get(peer)
        while sent and sent[0][0].done:
            sent.popleft()
        if not sent:
            self._sent.pop(peer, None)
