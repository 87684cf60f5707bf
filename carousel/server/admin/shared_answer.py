"""SharedAnswer: an answer of a path that is costly to make, which all callers of this process share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

SNAPSHOT_INTERVAL_S = 0.25
"""Least seconds between two snapshots of the scheduler."""


class SharedAnswer:
    """Answer that is made when it is read, and by one caller at a time. It belongs to one event loop."""

    def __init__(
        self,
        make: Callable[[], Awaitable[bytes]],
        interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make` makes the answer, at most once in `interval_s` seconds."""
        self._make = make
        self._interval_s = interval_s
        self._clock = clock
        self._answer: asyncio.Task[bytes] | None = None
        self._asked_at = 0.0

    async def read(self) -> bytes:
        """Return the answer: one that is being made, one that was begun less than `interval_s` ago, or a new
        one. Raises what `make` raises.
        """
        answer, now = self._answer, self._clock()
        if answer is None or (answer.done() and now - self._asked_at >= self._interval_s):
            self._asked_at = now
            answer = self._answer = asyncio.ensure_future(self._make())
            answer.add_done_callback(_look_at)  # every waiting caller may have left
        return await asyncio.shield(answer)


def _look_at(answer: asyncio.Future[bytes]) -> None:
    if not answer.cancelled():
        answer.exception()
