"""WaitingQueue: requests that may get the next rows, always in order: by urgency, then retracted and
resubmitted ones first, then sort key, then arrival. Starving requests come first, by how long they have
waited.

The order is kept as requests come and go, so that no step sorts.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from operator import attrgetter
from typing import TypeAlias

from scheduler_proc.core.request import STARVED, Request
from scheduler_proc.waiting.sorted_requests import Place, SortedRequests

SortKey: TypeAlias = Callable[[Request], float]

BEHIND_STARVED: Place = (1 - STARVED, False, 0, 0)


in_turn: SortKey = attrgetter("start_tag")
"""Sort key for policies without one: tenants in turns, the requests of one in the order of arrival."""


class WaitingQueue(SortedRequests[Request]):
    """Requests that schedule policies order and to which admission gives rows."""

    def __init__(self, sort_key: SortKey = in_turn) -> None:
        super().__init__()
        self._sort_key = sort_key

    @property
    def num_starved(self) -> int:
        """Number of starving requests, which are at the front and which no policy orders."""
        if not self._places or self._places[0][0] != -STARVED:
            return 0
        return bisect.bisect(self._places, BEHIND_STARVED)

    def give_place(self, req: Request) -> None:
        """Compute the place of a request that has arrived, was retracted, or starves."""
        if req.is_starved:
            req.place = (-STARVED, False, req.waits_from_s, req.seq)
        else:
            is_new = not req.num_retractions and not req.goes_first
            req.place = (-req.priority, is_new, self._sort_key(req), req.seq)

    def add(self, req: Request) -> None:
        """Compute a request's place and insert it there."""
        self.give_place(req)
        self.put(req)

    def take_at(self, positions: list[int]) -> list[Request]:
        """Remove the requests at these positions and return them in this order."""
        num_taken = len(positions)
        if positions == list(range(num_taken)):  # nearly always
            taken = self.requests[:num_taken]
            self._remove_slice(0, num_taken)
            return taken
        taken = [self.requests[position] for position in positions]
        for position in sorted(positions, reverse=True):
            self._remove_slice(position, position + 1)
        return taken
