"""ConnectionCount: how many connections an HTTP process has, and of whom."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable

RESERVED_DESCRIPTORS = 256
"""File descriptors of the process that are kept for all that is no connection."""


class ConnectionCount:
    def __init__(
        self, most: int, most_per_address: int, on_full: Callable[[], None], on_room: Callable[[], None]
    ) -> None:
        """most_per_address: 0 for any number. `on_full` is called when the last place is taken, `on_room`
        when one is free again.
        """
        self._most = most
        self._most_per_address = most_per_address
        self._on_full = on_full
        self._on_room = on_room
        self._num_by_address: Counter[str] = Counter()
        self.total = 0

    def has_room(self) -> bool:
        return self.total < self._most

    def add(self, address: str) -> bool:
        """Count a connection, until `remove`. False: its address has more than it may."""
        self.take()
        self._num_by_address[address] += 1
        return not self._most_per_address or self._num_by_address[address] <= self._most_per_address

    def remove(self, address: str) -> None:
        self._num_by_address[address] -= 1
        if not self._num_by_address[address]:
            del self._num_by_address[address]
        self.give_back()

    def take(self) -> None:
        """Count a connection whose address is not known yet, until `give_back`."""
        self.total += 1
        if self.total == self._most:
            self._on_full()

    def give_back(self, _: object = None) -> None:
        """Count a connection that was taken no longer."""
        self.total -= 1
        if self.total == self._most - 1:
            self._on_room()


def openable(most: int) -> int:
    """Return how many of `most` connections this process has descriptors for, at least one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, limit - RESERVED_DESCRIPTORS))
