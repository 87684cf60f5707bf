"""WidthGate: admission as TensorRT-LLM's executor has it.

Requests start in the order of their arrival, those of one beam width together. One of another width waits
until all before it have ended, and nothing overtakes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler_proc.core.request import Request
    from scheduler_proc.waiting.waiting_queue import WaitingQueue


class WidthGate:
    """Asked by Admission, which stops at the first request that may not start."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._width = 0
        """That of what runs, or ran last; 0 before anything has."""
        self._blocked_since: float | None = None
        self.num_changes = 0
        """How often what started had another width than what had ended before."""
        self.change_s = 0.0
        """Time that requests of another width waited in front until all before them had ended."""

    @staticmethod
    def in_order(positions: Iterable[int], waiting: WaitingQueue) -> Iterator[int]:
        """Return the positions in the order in which their requests have arrived."""
        order = [(waiting[position].seq, position) for position in positions]
        heapify(order)
        while order:
            yield heappop(order)[1]

    def may_start(self, req: Request, num_running: int) -> bool:
        """Tell whether the first one that waits has the width of what runs."""
        if not num_running or req.width == self._width:
            return True
        if self._blocked_since is None:
            self._blocked_since = self._clock()
        return False

    def note_started(self, req: Request) -> None:
        """Take note of the width that runs from now on."""
        if self._width and self._width != req.width:
            self.num_changes += 1
            if self._blocked_since is not None:
                self.change_s += self._clock() - self._blocked_since
        self._width, self._blocked_since = req.width, None

    def figures(self) -> dict[str, float]:
        return {"num_beam_width_changes": self.num_changes, "beam_width_change_s": self.change_s}
