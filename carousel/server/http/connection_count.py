"""ConnectionCount: counts the connections of an HTTP process, and limits them in all and by address."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable

RESERVED_DESCRIPTORS = 256
"""Number of file descriptors that are reserved for other things than connections."""


class ConnectionCount:
    def __init__(
        self,
        most: int,
        most_per_address: int,
        on_taken: Callable[[], None],
        on_room: Callable[[], None],
        few: int = 1,
    ) -> None:
        """`most_per_address` 0 means no limit. When no more than `few` places are left, `on_taken` is called
        when one of them is taken, and `on_room` when one becomes free again.
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
        """Return the number of further connections that are allowed; negative if there are too many."""
        return self._most - self.total

    def add(self, address: str) -> bool:
        """Count a connection, until `remove`. Returns False if its address has too many."""
        self.total += 1
        if self.room < self._few:
            self._on_taken()
        self._num_by_address[address] += 1
        return not self._most_per_address or self._num_by_address[address] <= self._most_per_address

    def has_far_too_many(self, address: str) -> bool:
        """Return True if an address has more than twice its connections: further ones get no refusal."""
        return 0 < 2 * self._most_per_address < self._num_by_address[address]

    def remove(self, address: str) -> None:
        self._num_by_address[address] -= 1
        if not self._num_by_address[address]:
            del self._num_by_address[address]
        self.total -= 1
        if 0 < self.room <= self._few:
            self._on_room()


def openable(most: int) -> int:
    """Return how many of `most` connections this process has descriptors for, at least one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, limit - RESERVED_DESCRIPTORS))
