"""WaitingQueue: the requests that hold no row, always in the order (priority, retracted first, arrival).

Kept in order as requests come and go, so that nothing sorts it in a step.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from scheduler_proc.request import Request


class WaitingQueue:
    """Requests and, beside them, their keys; equal keys cannot be, since arrival numbers differ."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._keys: list[tuple[int, bool, int]] = []

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
        key = req.queue_key
        if not self._keys or key > self._keys[-1]:  # nearly always
            self._keys.append(key)
            self._requests.append(req)
            return
        position = bisect.bisect(self._keys, key)
        self._keys.insert(position, key)
        self._requests.insert(position, req)

    def remove(self, req: Request) -> None:
        position = bisect.bisect_left(self._keys, req.queue_key)
        assert self._requests[position] is req
        del self._requests[position]
        del self._keys[position]

    def remove_at(self, positions: list[int]) -> None:
        if positions == list(range(len(positions))):
            del self._requests[: len(positions)]
            del self._keys[: len(positions)]
            return
        for position in sorted(positions, reverse=True):
            del self._requests[position]
            del self._keys[position]
