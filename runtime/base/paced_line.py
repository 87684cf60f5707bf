"""PacedLine: wakes waiters of an event loop, a few in each turn, so that a crowd does not hold it up."""

from __future__ import annotations

import asyncio
from collections import deque


class PacedLine:
    """Line of one event loop. Waiters go in the order of coming; of several lanes, one each in turn."""

    def __init__(self, turn_budget: int) -> None:
        """turn_budget: what those that are woken in one turn of the loop may cost together, in any unit."""
        self._turn_budget = turn_budget
        self._lanes: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}
        """Waiters by lane; the lane whose turn it is is the first."""
        self._spent = 0
        """Part of the budget that is spent in this turn."""

    def wake(self, waiter: asyncio.Future[None], cost: int = 1, lane: str = "") -> None:
        """Give a waiter its result: in this call, or in a later turn after all that came before it in its
        lane.

        cost: at least 1, in the budget's unit. What costs more than the budget has a turn of its own. A
        waiter that is done by then, because its task was cancelled, costs nothing.
        """
        if not self._lanes and self._has_room(cost):
            self._wake_now(waiter, cost)
        else:
            self._lanes.setdefault(lane, deque()).append((waiter, cost))

    def _has_room(self, cost: int) -> bool:
        return not self._spent or self._spent + cost <= self._turn_budget

    def _wake_now(self, waiter: asyncio.Future[None], cost: int) -> None:
        if not waiter.done():
            if not self._spent:
                waiter.get_loop().call_soon(self._begin_turn)
            self._spent += cost
            waiter.set_result(None)

    def _begin_turn(self) -> None:
        self._spent = 0
        while self._lanes:
            lane, line = next(iter(self._lanes.items()))
            if not self._has_room(line[0][1]):
                break
            del self._lanes[lane]
            waiter, cost = line.popleft()
            if line:
                self._lanes[lane] = line
            self._wake_now(waiter, cost)
