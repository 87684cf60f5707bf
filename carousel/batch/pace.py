"""Pace: limits how many requests are with the server, and pauses them, by its refusals."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

RAISE_S = 10.0
"""Seconds without a refusal after which more requests are tried."""
RAISE_SHARE = 1 / 16


class Pace:
    """Limit of the requests that are with the server at a time. If the server refuses some, the limit becomes
    the number that it has taken. A pause that it asks for holds for all lines.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        """most: the limit as long as nothing is refused."""
        self._most = most
        self._limit = most
        self._clock = clock
        self._num_asking = 0
        self._pause_until = 0.0
        self._raise_at = 0.0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        return self._limit

    async def enter(self) -> None:
        """Wait until one more request may be sent, and count it. Callers keep their order."""
        if self._waiting or self._num_asking >= self._limit:
            place = asyncio.get_running_loop().create_future()
            self._waiting.append(place)
            await place
        else:
            self._num_asking += 1
        try:
            while (left_s := self._pause_until - self._clock()) > 0:
                await asyncio.sleep(left_s)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Count a request that has ended, whatever its end."""
        self._num_asking -= 1
        if self._limit < self._most and self._clock() >= self._raise_at:
            self._limit = min(self._most, self._limit + max(1, int(self._limit * RAISE_SHARE)))
            self._raise_at = self._clock() + RAISE_S
        while self._waiting and self._num_asking < self._limit:
            place = self._waiting.popleft()
            if not place.done():  # its task was cancelled
                self._num_asking += 1
                place.set_result(None)

    def refuse(self, retry_after_s: float) -> None:
        """Note that a request that has not left yet was refused, to be tried again after so many seconds."""
        now = self._clock()
        self._pause_until = max(self._pause_until, now + retry_after_s)
        # A server that has taken none says nothing about how many it would take.
        self._limit = min(self._limit, self._num_asking - 1) or self._most
        self._raise_at = now + RAISE_S
