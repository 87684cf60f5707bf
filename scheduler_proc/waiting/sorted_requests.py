"""WaitingQueue: the requests that hold no row, always in the order (priority, retracted and made again first,
sort key, arrival).

Kept in order as requests come and go, so that nothing sorts it in a step.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import TypeAlias

from runtime.wire.handle import attempt_of
from scheduler_proc.core.request import Place, Request

SortKey: TypeAlias = Callable[[Request], float]


def no_key(req: Request) -> float:
    """In the order of arrival."""
    return 0


class WaitingQueue:
    """Requests and, beside them, their places; equal ones cannot be, since arrival numbers differ."""

    def __init__(self, sort_key: SortKey = no_key) -> None:
        self.version = 0
        """Changes whenever somebody comes or goes."""
        self._sort_key = sort_key
        self._requests: list[Request] = []
        self._places: list[Place] = []

    def __len__(self) -> int:
        return len(self._requests)

    def num_tokens(self) -> int:
        """Tokens to compute for all that wait, cached ones included. Walks the queue."""
        return sum(req.num_tokens for req in self._requests)

    def __getitem__(self, position: int) -> Request:
        return self._requests[position]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, req: Request) -> None:
        is_new = not req.num_retractions and not attempt_of(req.handle)
        place = req.place = (-req.priority, is_new, self._sort_key(req), req.seq)
        self.version += 1
        if not self._places or place > self._places[-1]:  # nearly always
            self._places.append(place)
            self._requests.append(req)
            return
        position = bisect.bisect(self._places, place)
        self._places.insert(position, place)
        self._requests.insert(position, req)

    def remove(self, req: Request) -> None:
        position = bisect.bisect_left(self._places, req.place)
        assert self._requests[position] is req
        self._remove_slice(position, position + 1)

    def remove_at(self, positions: list[int]) -> None:
        if positions == list(range(len(positions))):
            self._remove_slice(0, len(positions))
            return
        for position in sorted(positions, reverse=True):
            self._remove_slice(position, position + 1)

    def _remove_slice(self, start: int, end: int) -> None:
        self.version += 1
        del self._requests[start:end]
        del self._places[start:end]
