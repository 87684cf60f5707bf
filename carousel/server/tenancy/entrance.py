"""Entrance: limits how many requests that have been read go on in each turn of the event loop, and how many
pieces of large answers.

The work for a request, from decoding its JSON to sending its message, is done in one go. A thousand requests
at once would occupy the loop for a second, in which no tokens are sent, no probe is answered, and no
disconnection is noticed. A piece of each of twenty large answers would do so for a tenth of a second.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from weakref import WeakValueDictionary

from runtime.base.paced_line import PacedLine
from runtime.ring.tenants import OWNER

TURN_BYTES = 256 << 10
"""Bytes of bodies in a turn, or one body of any size: a few milliseconds' work. A larger body is decoded in
several turns (`decode_body`).
"""
LEAST_BYTES = 32 << 10
"""Least number of bytes that a body counts for: the work for a request that does not grow with its size."""


LARGE_BYTES = 1 << 20
"""Bodies larger than this are decoded one after another for each tenant, because decoding and sending one
takes memory of three times its size.
"""

_AT_ONCE = nullcontext()


class Entrance:
    """Queue of one event loop. The requests of one tenant keep their order, and tenants take turns."""

    def __init__(self) -> None:
        self._line = PacedLine(TURN_BYTES)
        # Locks by tenant, each held while a large body of the tenant is decoded.
        self._large: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def enter(self, num_bytes: int, tenant: str = OWNER) -> None:
        """Wait until a tenant's work for so many bytes may go on. Without a crowd it does not wait."""
        cost = max(num_bytes, LEAST_BYTES)
        if not self._line.try_pass(cost):
            await self._wait(cost, tenant)

    async def take_turn(self, tenant: str = OWNER) -> None:
        """Wait, within a tenant's large piece of work, for its next turn."""
        await self.enter(TURN_BYTES, tenant)

    def alone(self, num_bytes: int, tenant: str = OWNER) -> AbstractAsyncContextManager[None]:
        """Return a context manager whose block is the tenant's only one for a large body while it runs. Small
        bodies do not wait.
        """
        if num_bytes <= LARGE_BYTES:
            return _AT_ONCE
        lock = self._large.get(tenant)
        if lock is None:
            lock = self._large[tenant] = asyncio.Lock()
        return lock

    async def go_on(self, num_bytes: int, tenant: str = OWNER) -> None:
        """Wait until so many further bytes of a large body may be processed: half as many in a turn."""
        await self._wait(max(2 * num_bytes, 1), tenant)

    async def _wait(self, cost: int, tenant: str) -> None:
        place = asyncio.get_running_loop().create_future()
        self._line.wake(place, cost, tenant)
        await place
