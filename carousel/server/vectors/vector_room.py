"""VectorRoom: bounds the vectors that an HTTP process keeps for requests that wait for more of them.

A request for two thousand texts is answered when the last vector has come. How many bytes those before it
take, only the model decides: 64 MiB with 8,192 numbers each, for each such request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from carousel.server.tenancy.shares import Shares

ROOM_BYTES = 32 << 20
FIRST_VECTOR_BYTES = 32 << 10
"""Bytes that a vector is taken for before the first one has come."""


class VectorRoom:
    """Room of one event loop, which tenants share. A text is sent once there is room for its vector. The
    oldest request of each tenant needs none: it always comes to its end, and gives back what it has.
    """

    def __init__(self, is_divided: Callable[[], bool], size: int = ROOM_BYTES) -> None:
        """`is_divided` returns True if there are several tenants."""
        self._shares = Shares(size, is_divided)
        self._requests: dict[str, dict[HeldVectors, None]] = {}
        """Requests of each tenant, the oldest first."""
        self._waiting: dict[HeldVectors, asyncio.Future[None]] = {}
        """Requests that wait for room for a vector, in the order in which they began to."""
        self.vector_bytes = FIRST_VECTOR_BYTES
        """Number of bytes of one vector."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the vectors that have been asked for and whose requests have not ended."""
        return self._shares.total

    @contextmanager
    def held(self, tenant: str) -> Iterator[HeldVectors]:
        """Hold the vectors of one request of a tenant while the block runs."""
        held = HeldVectors(self, tenant)
        own = self._requests.setdefault(tenant, {})
        own[held] = None
        try:
            yield held
        finally:
            del own[held]
            if not own:
                del self._requests[tenant]
            self._shares.give_back(tenant, held.num_bytes)
            self._pass_on()

    async def take(self, held: HeldVectors) -> None:
        """Wait until there is room for one more vector of a request, for which nobody else waits."""
        if held not in self._waiting and self._may_take(held):
            self._add(held)
            return
        place = self._waiting[held] = asyncio.get_running_loop().create_future()
        try:
            await place
        finally:
            self._waiting.pop(held, None)

    def _may_take(self, held: HeldVectors) -> bool:
        if held is next(iter(self._requests[held.tenant])):
            return True
        size = self.vector_bytes
        return self._shares.has_room(size) and self._shares.may_have(held.tenant, size)

    def _add(self, held: HeldVectors) -> None:
        held.num_bytes += self.vector_bytes
        self._shares.take(held.tenant, self.vector_bytes)

    def _pass_on(self) -> None:
        """Wake the waiting requests for whose next vector there is room now."""
        for held, place in list(self._waiting.items()):
            if not place.done() and self._may_take(held):
                self._add(held)
                place.set_result(None)


class HeldVectors:
    """Vectors of one request."""

    def __init__(self, room: VectorRoom, tenant: str) -> None:
        self._room = room
        self.tenant = tenant
        self.num_bytes = 0
        """Number of bytes that it has room for."""
        self._turn = asyncio.Lock()

    async def take(self) -> None:
        """Wait until there is room for one more vector. Those who wait go on in their order."""
        async with self._turn:
            await self._room.take(self)

    def note(self, vector_bytes: int) -> None:
        """Record how many bytes a vector has, from now on for all requests."""
        self._room.vector_bytes = max(1, vector_bytes)
