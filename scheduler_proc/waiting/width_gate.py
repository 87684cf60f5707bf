"""WidthGate: admission in the order of arrival, by beam width, as in TensorRT-LLM's executor. Requests of one
beam width run together. A request of another width waits until all before it have ended, and no later request
overtakes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler_proc.core.request import Request
    from scheduler_proc.waiting.waiting_queue import WaitingQueue


class WidthGate:
    """Gate for beam widths. Admission stops at the first request that may not start."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._width = 0
        """Beam width of the running requests, or of the last ones; 0 before any."""
        self._blocked_since: float | None = None
        self.num_changes = 0
        """Number of times that a started request had another width than those that ended before."""
        self.change_s = 0.0
        """Seconds that requests of another width have waited at the front until all before them had ended."""

    @staticmethod
    def in_order(positions: Iterable[int], waiting: WaitingQueue) -> Iterator[int]:
        """Return the positions in the order of arrival of their requests."""
        order = [(waiting[position].seq, position) for position in positions]
        heapify(order)
        while order:
            yield heappop(order)[1]

    def may_start(self, req: Request, num_running: int) -> bool:
        """Return True if the first waiting request has the width of the running ones, or nothing runs."""
        if not num_running or req.width == self._width:
            return True
        if self._blocked_since is None:
            self._blocked_since = self._clock()
        return False

    def note_started(self, req: Request) -> None:
        """Record the width that runs from now on."""
        if self._width and self._width != req.width:
            self.num_changes += 1
            if self._blocked_since is not None:
                self.change_s += self._clock() - self._blocked_since
        self._width, self._blocked_since = req.width, None

    def figures(self) -> dict[str, float]:
        return {"num_beam_width_changes": self.num_changes, "beam_width_change_s": self.change_s}
