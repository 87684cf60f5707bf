"""KeepingOutbox: an outbox that keeps messages while the other end has no room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class KeepingOutbox(Generic[T]):
    """Outbox that sends in order, never blocks, and keeps what the other end has no room for. Any thread may
    add messages; one thread at a time flushes.
    """

    __slots__ = ("_kept", "_send")

    def __init__(self, send: Callable[[T], bool]) -> None:
        """send: sends a message and returns False if there is no room, as Outbox.send does."""
        self._send = send
        self._kept: deque[T] = deque()

    def __len__(self) -> int:
        """Return the number of messages that wait for room."""
        return len(self._kept)

    def add(self, message: T) -> None:
        """Keep a message for the next flush."""
        self._kept.append(message)

    def send(self, message: T) -> None:
        """Send a message after all that wait, or keep it."""
        self._kept.append(message)
        self.flush()

    def flush(self) -> bool:
        """Send the kept messages. Returns True if all were sent; False means that there is no room, so try
        again later.
        """
        while self._kept:
            if not self._send(self._kept[0]):
                return False
            self._kept.popleft()
        return True
