"""ConnectionCount: how many connections an HTTP process has, and of whom."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable

RESERVED_DESCRIPTORS = 256
"""File descriptors of the process that are kept for all that is no connection."""


class ConnectionCount:
    def __init__(
        self,
        most: int,
        most_per_address: int,
        on_taken: Callable[[], None],
        on_room: Callable[[], None],
        few: int = 1,
    ) -> None:
        """most_per_address: 0 for any number. Where no more than `few` places were left, `on_taken` is called
        when one of them is taken, `on_room` when one is free again.
        """
        self._most = most
        self._most_per_address = most_per_address
        self._on_taken = on_taken
        self._on_room = on_room
        self._few = few
        self._num_by_address: Counter[str] = Counter()
        self.total = 0

    @property
    def room(self) -> int:
        """Return how many more connections there may be; below 0 where there are more than may be."""
        return self._most - self.total

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
        if self.room < self._few:
            self._on_taken()

    def give_back(self, _: object = None) -> None:
        """Count a connection that was taken no longer."""
        self.total -= 1
        if 0 < self.room <= self._few:
            self._on_room()


def openable(most: int) -> int:
    """Return how many of `most` connections this process has descriptors for, at least one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, limit - RESERVED_DESCRIPTORS))
