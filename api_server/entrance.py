"""Entrance: lets requests that have been read go on, a few in each turn of the event loop.

What a request needs, from its JSON to the message that is sent, takes its time in one piece. A thousand that
come together would have the loop to themselves for a second, in which nobody's tokens go out, no probe is
answered, and nobody is seen to leave.
"""

from __future__ import annotations

import asyncio
from collections import deque

TURN_BYTES = 256 << 10
"""Of bodies in a turn, and one body of any size: a few milliseconds' work, 15 for the largest (2026-11)."""
LEAST_BYTES = 32 << 10
"""As many as a small body counts for: the work for a request that does not grow with it."""


class Entrance:
    """Of one event loop. Who comes first goes first."""

    def __init__(self) -> None:
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._spent = 0
        """Bytes that were let in in this turn."""

    async def enter(self, num_bytes: int) -> None:
        """Wait until a body of so many bytes may go on: not at all where there is no crowd."""
        cost = max(num_bytes, LEAST_BYTES)
        if not self._line and self._has_room(cost):
            self._let_in(cost)
            return
        place = asyncio.get_running_loop().create_future()
        self._line.append((cost, place))
        await place

    def _has_room(self, cost: int) -> bool:
        return not self._spent or self._spent + cost <= TURN_BYTES

    def _let_in(self, cost: int) -> None:
        if not self._spent:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._spent += cost

    def _begin_turn(self) -> None:
        self._spent = 0
        while self._line and self._has_room(self._line[0][0]):
            cost, place = self._line.popleft()
            if not place.done():  # a task that was cancelled has left the line
                place.set_result(None)
                self._let_in(cost)
