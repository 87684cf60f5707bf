"""Deadlines: when something is due for live sequences, in order of time. Knows no clock and ends nothing."""

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
"""Entries of ended sequences that are kept, besides as many as live, before they are cleared out."""


class Deadlines:
    """The entry of a sequence that has ended, was replaced or has another time by now is dropped when its
    time comes, or when there are too many such: nobody tells of the end, which is nearly always earlier.
    """

    def __init__(
        self,
        live: Mapping[bytes, Request],
        time_of: Callable[[Request], float] = attrgetter("deadline_s"),
    ) -> None:
        """`live`: who lives, by sequence key; `time_of`: which of a request's times this is about."""
        self._live = live
        self._time_of = time_of
        # By handle, so that what has ended is not kept in memory; of equal times, in the order of arrival.
        self._heap: list[Entry] = []

    def __len__(self) -> int:
        """Entries, those of ended sequences included."""
        return len(self._heap)

    def add(self, req: Request) -> None:
        """req lives and has such a time."""
        heapq.heappush(self._heap, (self._time_of(req), req.seq, req.handle))
        if len(self._heap) > 2 * len(self._live) + SLACK:
            self._heap = [entry for entry in self._heap if self._find(entry) is not None]
            heapq.heapify(self._heap)

    def take_passed(self, now_s: float, most: int | None = None) -> list[Request]:
        """Return who lives and has its time by now, once each, earliest first, `most` of them at most; they
        are forgotten here.
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
        """The earliest time of all; infinite where there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def clear(self) -> None:
        """Forget all of them."""
        self._heap.clear()

    def _find(self, entry: Entry) -> Request | None:
        at, _, handle = entry
        req = self._live.get(sequence_key(handle))
        return req if req is not None and req.handle == handle and self._time_of(req) == at else None
