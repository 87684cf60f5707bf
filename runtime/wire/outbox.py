"""KeepingOutbox: a way out of a process that keeps what the other end has no room for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class KeepingOutbox(Generic[T]):
    """Outbox that sends in order, never blocks, and keeps what there is no room for. Any thread may add; one
    of them flushes.
    """

    __slots__ = ("_kept", "_send")

    def __init__(self, send: Callable[[T], bool]) -> None:
        """Keep what `send` refuses: it returns whether there was room, as Outbox.send does."""
        self._send = send
        self._kept: deque[T] = deque()

    def __len__(self) -> int:
        """How much waits for room."""
        return len(self._kept)

    def add(self, message: T) -> None:
        """Keep a message for the next flush."""
        self._kept.append(message)

    def send(self, message: T) -> None:
        """Send a message behind all that waits, or keep it."""
        self._kept.append(message)
        self.flush()

    def flush(self) -> bool:
        """Send what is kept. Return whether all of it is sent; if not, there is no room: try again later."""
        while self._kept:
            if not self._send(self._kept[0]):
                return False
            self._kept.popleft()
        return True
