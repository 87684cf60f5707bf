"""ParseTurns: how much HTTP the connections of a process parse in one turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

TURN_EVENTS = 4096
"""Calls of the parser in a turn, each a microsecond or two (2026-11). All that a read gives can be 40,000."""
HEAD_EVENTS = 32
"""Events that a request counts for: a scope, a task and what they need are made for it."""


class ParseTurns:
    """The turns of one event loop. Who comes first goes first."""

    def __init__(self) -> None:
        self._line: deque[Callable[[], None]] = deque()
        self._num_events = 0
        """Events parsed in this turn."""

    def has_room(self) -> bool:
        """Return True if a connection may parse in this turn: with nobody before it, at least a piece."""
        return not self._line and self._num_events < TURN_EVENTS

    def count(self, num_events: int) -> None:
        """Add what a connection has parsed, at least one event."""
        if not self._num_events:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._num_events += num_events

    def wait(self, go_on: Callable[[], None]) -> None:
        """Have `go_on` called in a later turn, after all that came before. It may parse a piece whatever
        `has_room` says, and waits again for the next one.
        """
        self._line.append(go_on)

    def _begin_turn(self) -> None:
        self._num_events = 0
        for _ in range(len(self._line)):
            if self._num_events >= TURN_EVENTS:
                break
            self._line.popleft()()
