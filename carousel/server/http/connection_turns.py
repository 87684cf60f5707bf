"""ConnectionTurns: how much the connections of a process do in one turn of the event loop: read, parse, begin
requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

TURN_COST = 1000
"""Most that is done in a turn, in microseconds, roughly (2026-11). What a step brings a stream waits for a
few turns.
"""
HEAD_COST = 30
"""Cost of a head: a scope and what else a request needs."""
REQUEST_COST = 150
"""Cost of beginning a request: a task, which goes through all that stands before an endpoint."""
BYTES_PER_COST = 2048


class ConnectionTurns:
    """The turns of one event loop. Who comes first goes first."""

    def __init__(self) -> None:
        self._line: deque[Callable[[], None]] = deque()
        self._spent = 0
        """Cost of what has been done in this turn."""

    def has_room(self) -> bool:
        """Return True if a connection may do something in this turn, whatever that costs."""
        return not self._line and self._spent < TURN_COST

    def spend(self, cost: int) -> None:
        """Count what a connection has done. cost: at least 1."""
        if not self._spent:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._spent += cost

    def wait(self, go_on: Callable[[], None]) -> None:
        """Have `go_on` called in a later turn, after all that came before. It may do one thing whatever
        `has_room` says, and waits again for the next one.
        """
        self._line.append(go_on)

    def _begin_turn(self) -> None:
        self._spent = 0
        try:
            for _ in range(len(self._line)):
                if self._spent >= TURN_COST:
                    break
                self._line.popleft()()
        finally:
            # Who spends makes the next turn come. Those who wait have one also if nobody has spent anything.
            if self._line and not self._spent:
                asyncio.get_running_loop().call_soon(self._begin_turn)
