"""BodyPace: limits the share of the event loop's time for large bodies while other requests are served.

Connections that send bodies as fast as they are read would keep the loop busy: each turn would read from all
of them, and a new token of a stream would be sent only after three turns. So a few pieces are handled at a
time, and then none for three times as long as they took.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection
from functools import partial

from runtime.ring.tenants import OWNER

REST_RATIO = 3
"""Seconds without large bodies for each second of work for them, so they get a quarter of the time."""
MAX_PIECES = 4
"""Number of pieces that are handled together, in two turns of the loop. A piece is 64 KiB to read, or 128 KiB
to decode.
"""
LEAST_REST_S = 0.002
"""Shorter rests, for which timers are too coarse, are added to the next one."""
MAX_REST_S = 0.02
"""Longest rest: the measured work includes work for other requests, which may be more."""


class BodyPace:
    """Pace of one event loop. The pieces of one tenant keep their order, and tenants take turns. If nothing
    else is served, no piece waits.
    """

    def __init__(
        self, num_bodies: Callable[[], int], *, cpu_time: Callable[[], float] = time.thread_time
    ) -> None:
        """`num_bodies` returns the number of requests with a large body that is being read or decoded.
        `cpu_time` returns the CPU time of the loop's thread, in seconds.
        """
        self._num_bodies = num_bodies
        self._cpu_time = cpu_time
        self.requests: Collection[object] = ()
        """Requests that are being served, including those with large bodies. The server fills it."""
        self._lines: dict[str, deque[Callable[[], None]]] = {}
        """Waiting calls by tenant; the tenant whose turn it is comes first."""
        self._next: asyncio.Handle | None = None
        """Call that continues the queue, unless work is being measured."""
        self._began_s: float | None = None
        """CPU time at the start of the work that is being measured."""
        self._num_pieces = 0
        """Number of pieces since then."""
        self._free_s = 0.0
        """End of the rest, by time.monotonic()."""

    @property
    def is_alone(self) -> bool:
        """Return True if only large bodies are being served."""
        return len(self.requests) <= self._num_bodies()

    def begin(self) -> None:
        """Measure the work of the loop as work for large bodies, from now until its next turn ends."""
        if self.is_alone:
            return
        self._num_pieces += 1
        if self._began_s is None:
            self._began_s = self._cpu_time()
            loop = asyncio.get_running_loop()
            # A task takes the data that was read, in the next turn.
            loop.call_soon(loop.call_soon, self._end)

    def wait(self, go_on: Callable[[], None], tenant: str = OWNER) -> None:
        """Call `go_on` when the tenant's next piece may be handled, after the tenant's earlier ones."""
        self._lines.setdefault(tenant, deque()).append(go_on)
        if self._next is None and self._began_s is None:
            self._next = asyncio.get_running_loop().call_soon(self._go_on)

    async def take_piece(self, tenant: str = OWNER) -> None:
        """Wait until a piece may be handled, and measure the work that follows."""
        if not (self.is_alone or self._has_room()):
            place = asyncio.get_running_loop().create_future()
            self.wait(partial(_wake, place), tenant)
            await place
        self.begin()

    def _has_room(self) -> bool:
        return not self._lines and self._num_pieces < MAX_PIECES and self._rest_s() < LEAST_REST_S

    def _rest_s(self) -> float:
        return self._free_s - time.monotonic()

    def _end(self) -> None:
        assert self._began_s is not None
        spent_s = self._cpu_time() - self._began_s
        self._began_s, self._num_pieces = None, 0
        now_s = time.monotonic()
        self._free_s = min(max(self._free_s, now_s) + REST_RATIO * spent_s, now_s + MAX_REST_S)
        self._go_on()

    def _go_on(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if not self._lines or self._began_s is not None:
            return
        loop = asyncio.get_running_loop()
        rest_s = 0.0 if self.is_alone else self._rest_s()
        if rest_s >= LEAST_REST_S:
            self._next = loop.call_later(rest_s, self._go_on)
            return
        try:
            for _ in range(MAX_PIECES):
                if self._lines:
                    self._first_in_line()()
        finally:
            if self._lines:  # the callbacks may have had nothing to do, or one has failed
                self._next = loop.call_soon(self._go_on)

    def _first_in_line(self) -> Callable[[], None]:
        tenant, line = next(iter(self._lines.items()))
        del self._lines[tenant]
        first = line.popleft()
        if line:
            self._lines[tenant] = line
        return first


def _wake(place: asyncio.Future[None]) -> None:
    if not place.done():
        place.set_result(None)
