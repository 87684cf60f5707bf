"""Entrance: lets requests that have been read go on, a few in each turn of the event loop, and large answers,
a piece in each.

What a request needs, from its JSON to the message that is sent, takes its time in one piece. A thousand that
come together would have the loop to themselves for a second, in which nobody's tokens go out, no probe is
answered, and nobody is seen to leave. So would a piece of each of twenty large answers for a tenth of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from runtime.base.paced_line import PacedLine
from runtime.ring.tenants import OWNER

TURN_BYTES = 256 << 10
"""Bytes of bodies in a turn, and one body of any size: a few milliseconds' work. What a larger one holds is
decoded in several turns (`decode_body`).
"""
LEAST_BYTES = 32 << 10
"""Bytes that even a small body counts for: the work for a request that does not grow with it."""


LARGE_BYTES = 1 << 20
"""Bodies of more than this are decoded one after another for each tenant: decoded and sent, one takes three
times its size.
"""


class Entrance:
    """Line of one event loop. The requests of one tenant keep their order; tenants go in turns."""

    def __init__(self) -> None:
        self._line = PacedLine(TURN_BYTES)
        # Locks by tenant: held while a large body is decoded.
        self._large: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def enter(self, num_bytes: int, tenant: str = OWNER) -> None:
        """Wait until a tenant's work for so many bytes may go on: not at all where there is no crowd."""
        await self._wait(max(num_bytes, LEAST_BYTES), tenant)

    async def take_turn(self, tenant: str = OWNER) -> None:
        """Wait, in the middle of much work of a tenant's, until its next turn has come."""
        await self.enter(TURN_BYTES, tenant)

    @asynccontextmanager
    async def alone(self, num_bytes: int, tenant: str = OWNER) -> AsyncIterator[None]:
        """While the block runs, it is the tenant's only one for a large body. Small ones do not wait."""
        if num_bytes <= LARGE_BYTES:
            yield
            return
        lock = self._large.get(tenant)
        if lock is None:
            lock = self._large[tenant] = asyncio.Lock()
        async with lock:
            yield

    async def go_on(self, num_bytes: int, tenant: str = OWNER) -> None:
        """Wait until so many bytes more of a large body may be looked at: half as many in a turn."""
        await self._wait(max(2 * num_bytes, 1), tenant)

    async def _wait(self, cost: int, tenant: str) -> None:
        place = asyncio.get_running_loop().create_future()
        self._line.wake(place, cost, tenant)
        await place
