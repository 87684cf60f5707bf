"""Deadlines: times at which something is due for live sequences, in order. Knows no clock and
ends nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TypeAlias

from runtime.wire.handle import sequence_key
from scheduler_proc.core.request import Request

Entry: TypeAlias = tuple[float, int, bytes]
"""Time, arrival number, handle."""

SLACK = 64
"""Number of outdated entries, in addition to as many as there are live ones, that are kept before all are
cleared out.
"""


class Deadlines:
    """Heap of due times. An entry is outdated when its sequence has ended, was replaced or has another time
    by now. Nobody reports ends, which are nearly always earlier; outdated entries are dropped when their time
    comes, or when there are too many.
    """

    def __init__(
        self,
        live: Mapping[bytes, Request],
        time_of: Callable[[Request], float] = attrgetter("deadline_s"),
    ) -> None:
        """live: live sequences by sequence key. time_of: returns the due time of a request."""
        self._live = live
        self._time_of = time_of
        # By handle, so that ended requests are not kept in memory. Equal deadlines are in the order of
        # arrival.
        self._heap: list[Entry] = []

    def __len__(self) -> int:
        """Return the number of entries, outdated ones included."""
        return len(self._heap)

    def add(self, req: Request) -> None:
        """Add a live request that has a due time."""
        heapq.heappush(self._heap, (self._time_of(req), req.seq, req.handle))
        if len(self._heap) > 2 * len(self._live) + SLACK:
            self._heap = [entry for entry in self._heap if self._find(entry) is not None]
            heapq.heapify(self._heap)

    def take_passed(self, now_s: float, most: int | None = None) -> list[Request]:
        """Return and remove the live requests whose time has come, each once, the earliest first, at most
        `most`.
        """
        passed: list[Request] = []
        last: Entry | None = None
        while self._heap and self._heap[0][0] <= now_s and len(passed) != most:
            entry = heapq.heappop(self._heap)
            req = None if entry == last else self._find(entry)
            last = entry
            if req is not None:
                passed.append(req)
        return passed

    @property
    def first(self) -> float:
        """Return the earliest due time; infinite if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def clear(self) -> None:
        """Remove all entries."""
        self._heap.clear()

    def _find(self, entry: Entry) -> Request | None:
        at, _, handle = entry
        req = self._live.get(sequence_key(handle))
        return req if req is not None and req.handle == handle and self._time_of(req) == at else None
