"""WaitingQueue: the requests that may get the next rows, always in the order (urgency, retracted and made
again first, sort key, arrival). Those that starve are the first, by how long they have waited.

Kept in order as requests come and go, so that nothing sorts it in a step.
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
"""Key of policies that have none: tenants in turns, the requests of one in the order of arrival."""


class WaitingQueue(SortedRequests[Request]):
    """Requests that schedule policies order and admission gives rows to."""

    def __init__(self, sort_key: SortKey = in_turn) -> None:
        super().__init__()
        self._sort_key = sort_key

    @property
    def num_starved(self) -> int:
        """Number of the first requests that have waited for so long that no policy has a say."""
        if not self._places or self._places[0][0] != -STARVED:
            return 0
        return bisect.bisect(self._places, BEHIND_STARVED)

    def give_place(self, req: Request) -> None:
        """Decide where a request stands that has come, was retracted, or starves."""
        if req.is_starved:
            req.place = (-STARVED, False, req.waits_from_s, req.seq)
        else:
            is_new = not req.num_retractions and not req.is_again
            req.place = (-req.priority, is_new, self._sort_key(req), req.seq)

    def add(self, req: Request) -> None:
        """Give it a place and put it there."""
        self.give_place(req)
        self.put(req)

    def take_at(self, positions: list[int]) -> list[Request]:
        """Remove those at these positions. Returns them in this order."""
        num_taken = len(positions)
        if positions == list(range(num_taken)):  # nearly always
            taken = self._requests[:num_taken]
            self._remove_slice(0, num_taken)
            return taken
        taken = [self._requests[position] for position in positions]
        for position in sorted(positions, reverse=True):
            self._remove_slice(position, position + 1)
        return taken
