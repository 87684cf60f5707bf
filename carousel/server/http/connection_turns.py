"""ConnectionTurns: limits the work of a process's connections in one turn of the event loop: accepting,
reading, parsing, beginning requests. EndTurns limits the connections whose ends are handled in one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

ACCEPTED_IN_TURN = 4
"""Connections that are accepted in one turn of the event loop. The loop accepts one connection from each of
its listening sockets in a turn. With a single socket, a connection behind 150 others waited for as many
turns, each with a read of all connections. Each further socket costs a connection that comes alone 5 us, for
an accept in vain.
"""
MAX_WAITING_REQUESTS = 1024
"""Number of waiting requests from which on they are begun while connections are accepted, too. Clients that
leave at once could otherwise have any number of requests come before those of who stays.
"""
TURN_COST = 1000
"""Maximum work of a turn, in microseconds, roughly (2026-11). A new token of a stream waits for a few turns.
"""
HEAD_COST = 30
"""Cost of a head: the scope and other objects of a request."""
REQUEST_COST = 150
"""Cost of beginning a request: a task that passes through the middleware."""
BYTES_PER_COST = 2048
ESCAPES_PER_COST = 5
"""Characters of a path that are written as `%61`, and decoded in 0.2 us each."""
ENDS_IN_TURN = 64
"""Ends that are handled in a turn, of 10 to 20 us each. With 8,192 connections the last one keeps its file
descriptor for 128 turns.
"""


class ConnectionTurns:
    """Turns of one event loop. There are four lines, which take turns: probes, other requests, data of new
    connections, which have had no request yet, and data of others. Requests are begun, and data is parsed, in
    the order of the line.

    Requests cost the most. While as many connections are accepted as a turn can have, one request is begun in
    a turn, so that who waits to be accepted does not wait for all requests before, too. Beyond
    MAX_WAITING_REQUESTS they are begun as always.
    """

    def __init__(self) -> None:
        self._line: deque[Callable[[], None]] = deque()
        """Connections with data to be parsed."""
        self._new: deque[Callable[[], None]] = deque()
        """Those of them that have had no request yet."""
        self._probes: deque[Callable[[], None]] = deque()
        self._requests: deque[Callable[[], None]] = deque()
        """Other requests that are to be begun."""
        self._spent = 0
        """Cost of the work done in this turn."""
        self._num_accepted = 0
        """Number of connections accepted in this turn."""
        self._is_crowded = False
        """True if the last turn accepted as many connections as one can, and not too many requests wait."""
        self._is_due = False
        """True if the next turn is scheduled."""

    def has_room(self) -> bool:
        """Return True if a connection may do one more thing in this turn, whatever it costs."""
        return not (self._line or self._new) and self._spent < TURN_COST

    def spend(self, cost: int) -> None:
        """Count work of a connection; `cost` is at least 1."""
        self._spent += cost
        self._make_due()

    def note_accepted(self) -> None:
        """Count a connection that was accepted."""
        self._num_accepted += 1
        self._make_due()

    def wait(self, go_on: Callable[[], None], *, is_new: bool = False) -> None:
        """Call `go_on` in a later turn, after all earlier callers. It may do one thing regardless of
        `has_room`, and waits again for the next. New connections wait for each other alone: most probes come
        on one.
        """
        (self._new if is_new else self._line).append(go_on)
        self._make_due()

    def begin(self, request: Callable[[], None], *, is_probe: bool) -> None:
        """Begin a request now, or in a later turn. Probes wait for earlier probes alone."""
        line = self._probes if is_probe else self._requests
        if self.has_room() and not line and (is_probe or not self._is_crowded):
            request()
        else:
            line.append(request)
            self._make_due()

    def _make_due(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._is_due = False
        self._spent = 0
        num_requests = len(self._requests)
        self._is_crowded = self._num_accepted >= ACCEPTED_IN_TURN and num_requests < MAX_WAITING_REQUESTS
        self._num_accepted = 0
        # None of those who wait again in this turn goes on in it.
        left = [
            (self._probes, len(self._probes)),
            (self._new, len(self._new)),
            (self._line, len(self._line)),
            (self._requests, min(1, num_requests) if self._is_crowded else num_requests),
        ]
        try:
            self._go_on(left)
        finally:
            if self._line or self._new or self._probes or self._requests or self._is_crowded:
                self._make_due()

    def _go_on(self, left: list[tuple[deque[Callable[[], None]], int]]) -> None:
        """Call the first of each line in rotation, at most `count` of a line, until the cost of a turn is
        spent.
        """
        for at in range(max(count for _, count in left)):
            for line, count in left:
                if at < count:
                    if self._spent >= TURN_COST:
                        return
                    line.popleft()()


class EndTurns:
    """Turns of one event loop. Ends are handled in the order in which they come.

    The loop tells of all connections that have ended since its last turn at once. For 4,000 of them the work
    took 40 to 95 ms of CPU in one turn (2026-11), while all other callers waited.
    """

    def __init__(self) -> None:
        self._line: deque[Callable[[], None]] = deque()
        self._is_due = False
        """True if the next turn is scheduled."""

    def wait(self, end: Callable[[], None]) -> None:
        """Call `end` in a later turn, after all earlier callers."""
        self._line.append(end)
        self._make_due()

    def _make_due(self) -> None:
        if self._line and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._is_due = False
        try:
            for _ in range(min(ENDS_IN_TURN, len(self._line))):
                self._line.popleft()()
        finally:
            self._make_due()
