"""PacedLine: wakes waiters of an event loop, a few in each turn, so that many at once do not block
the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque


class PacedLine:
    """Queue of one event loop's waiters. They are woken in the order of arrival; with several lanes, one of
    each lane in turn.
    """

    def __init__(self, turn_budget: int) -> None:
        """turn_budget: the most that the waiters woken in one turn of the loop may cost together, in any
        unit.
        """
        self._turn_budget = turn_budget
        self._lanes: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}
        """Waiters by lane. The first lane is the next one to be served."""
        self._spent = 0
        """Part of the budget that was spent in this turn."""

    @property
    def is_empty(self) -> bool:
        """True if no waiter has to wait for a later turn."""
        return not self._lanes

    def wake(self, waiter: asyncio.Future[None], cost: int = 1, lane: str = "") -> None:
        """Give a waiter its result, now or in a later turn after those that came before it in its lane. cost:
        at least 1, in the budget's unit. A waiter that costs more than the budget has a turn of its own. A
        waiter whose task was cancelled meanwhile costs nothing, and its lane no turn.
        """
        if not self._lanes and self._has_room(cost):
            self._wake_now(waiter, cost)
        else:
            self._lanes.setdefault(lane, deque()).append((waiter, cost))

    def try_pass(self, cost: int) -> bool:
        """Count work that goes on at once, without a waiter. Returns False if it has to wait for its turn."""
        if self._lanes or not self._has_room(cost):
            return False
        self._spend(cost)
        return True

    def _has_room(self, cost: int) -> bool:
        return not self._spent or self._spent + cost <= self._turn_budget

    def _wake_now(self, waiter: asyncio.Future[None], cost: int) -> None:
        if not waiter.done():
            self._spend(cost)
            waiter.set_result(None)

    def _spend(self, cost: int) -> None:
        if not self._spent:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._spent += cost

    def _begin_turn(self) -> None:
        self._spent = 0
        while self._lanes:
            lane, line = next(iter(self._lanes.items()))
            waiter, cost = line[0]
            has_left = waiter.done()
            if not (has_left or self._has_room(cost)):
                break
            line.popleft()
            if not line:
                del self._lanes[lane]
            elif not has_left:  # else it is still the lane's turn
                self._lanes[lane] = self._lanes.pop(lane)
            self._wake_now(waiter, cost)
