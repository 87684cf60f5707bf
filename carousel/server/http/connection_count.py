"""ConnectionCount: counts the connections of an HTTP process, and limits them in all and by address.

Pipeline: requests of one connection that wait behind another one, counted with those of all connections.
"""

from __future__ import annotations

import resource
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

RESERVED_DESCRIPTORS = 256
"""Number of file descriptors that are reserved for other things than connections."""
Waiting = tuple[RequestResponseCycle, Any]
"""A request and the application that will answer it."""
FIELD_BYTES = 120
"""Bytes that a header takes in memory beside its name and value."""


class PipelinedCount:
    """Number of the requests that wait on all connections, and bytes that their heads and bodies take."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_bytes = 0


class Pipeline(deque[Waiting]):
    """Queue of one connection, the latest request first, as uvicorn fills and empties it."""

    __slots__ = ("_total",)

    def __init__(self, total: PipelinedCount) -> None:
        super().__init__()
        self._total = total

    def appendleft(self, waiting: Waiting) -> None:
        super().appendleft(waiting)
        self._total.num_requests += 1
        self._total.num_bytes += _num_bytes(waiting)

    def note_body(self, num_bytes: int) -> None:
        """Count bytes that have been added to the body of the latest request."""
        self._total.num_bytes += num_bytes

    def pop(self) -> Waiting:  # type: ignore[override]
        waiting = super().pop()
        self._total.num_requests -= 1
        self._total.num_bytes -= _num_bytes(waiting)
        return waiting

    def clear(self) -> None:
        while self:
            self.pop()


def _num_bytes(waiting: Waiting) -> int:
    cycle, _ = waiting
    scope = cycle.scope
    head = sum(FIELD_BYTES + len(name) + len(value) for name, value in scope["headers"])
    return head + len(scope["raw_path"]) + len(scope["query_string"]) + len(cycle.body)


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
        self.pipelined = PipelinedCount()

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
