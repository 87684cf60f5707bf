"""Deadlines: when live sequences must have ended, in order of time. Knows no clock and ends nothing."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from runtime.wire.handle import sequence_key
from scheduler_proc.core.request import Request

SLACK = 64
"""Entries of ended sequences that are kept, besides as many as live, before they are cleared out."""


class Deadlines:
    """`live`: who lives, by sequence key. The entry of a sequence that has ended or was replaced is dropped
    when its time comes, or when there are too many such: nobody tells of the end, which is nearly always
    earlier.
    """

    def __init__(self, live: Mapping[bytes, Request]) -> None:
        self._live = live
        # By handle, so that what has ended is not kept in memory.
        self._heap: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        """Entries, those of ended sequences included."""
        return len(self._heap)

    def add(self, req: Request) -> None:
        """req lives and has a deadline."""
        heapq.heappush(self._heap, (req.deadline_s, req.handle))
        if len(self._heap) > 2 * len(self._live) + SLACK:
            self._heap = [entry for entry in self._heap if self._find(entry[1]) is not None]
            heapq.heapify(self._heap)

    def take_passed(self, now_s: float) -> list[Request]:
        """Who lives at its deadline or after it, earliest first; they are forgotten here."""
        passed: list[Request] = []
        while self._heap and self._heap[0][0] <= now_s:
            req = self._find(heapq.heappop(self._heap)[1])
            if req is not None:
                passed.append(req)
        return passed

    def _find(self, handle: bytes) -> Request | None:
        req = self._live.get(sequence_key(handle))
        return req if req is not None and req.handle == handle else None
