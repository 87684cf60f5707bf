"""UnreadAnswers: limits the bytes of answers that an HTTP process holds for callers who do not read them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from runtime.base.errors import Overloaded

POOL_BYTES = 32 << 20
GRACE_S = 5.0
"""Seconds that a caller has to begin to read. Its connection is not closed before."""
LEAST_RATE = 256 << 10
"""Bytes a second. A connection that is read this fast is not closed."""
CHECK_S = 1.0
"""Seconds between two looks at the connections while more than the limit is unread."""
CLOSED_AT_ONCE = 64
"""Maximum number of connections that are closed in one turn of the event loop."""
MAX_WAITING = 64
"""Maximum number of long answers of one tenant that wait to be formatted. A longer one takes more places."""
VALUES_OF_PLACE = 1 << 19
"""Number of values, of at most 8 bytes each until they are formatted, that take one place."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Reader:
    """Caller whose connection has more to read than the kernel and the event loop pass on by themselves."""

    tenant: str
    began_s: float
    num_bytes: int
    """Number of bytes that were unread when it began."""
    num_left: int
    """The same, when it was last looked at."""

    def rate(self, now_s: float) -> float:
        """Return the bytes read in a second."""
        return (self.num_bytes - self.num_left) / max(now_s - self.began_s, 1e-3)


@dataclass(slots=True)
class _Line:
    """Long answers of a tenant. They are formatted one at a time."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_places: int = 0
    """Number of places that its answers take, including the one that is being formatted."""


class UnreadAnswers:
    """Answers that are written but not read, in one event loop.

    While they are more than the limit, the tenant with the most loses the connection that reads most slowly,
    unless it is new or not slow. A long answer is formatted only when there is room. Until then it is kept in
    a compact form. A tenant has room while it has no more than an equal part of the limit.
    """

    def __init__(self, size: int = POOL_BYTES) -> None:
        self._size = size
        self._readers: dict[asyncio.Transport, _Reader] = {}
        self._lines: dict[str, _Line] = {}
        self._num_bytes = 0
        """Number of unread bytes, or more: a reader counts for what it had when it was last looked at."""
        self._timer: asyncio.TimerHandle | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def pause(self, transport: asyncio.Transport, tenant: str) -> None:
        """Count a connection on which more was written than its caller reads."""
        self.resume(transport)
        num_bytes = transport.get_write_buffer_size()
        self._readers[transport] = _Reader(tenant, _now_s(), num_bytes, num_bytes)
        self._num_bytes += num_bytes
        if self._num_bytes > self._size and self._timer is None:
            self._look()

    def resume(self, transport: asyncio.Transport) -> None:
        """Forget a connection: its caller has caught up or left."""
        reader = self._readers.pop(transport, None)
        if reader is not None:
            self._num_bytes -= reader.num_left
            self._wake()

    @asynccontextmanager
    async def turn(self, tenant: str, num_values: int) -> AsyncIterator[None]:
        """Wait until a long answer of the tenant, of so many values, may be formatted. Raises Overloaded if
        too many wait.
        """
        line = self._lines.setdefault(tenant, _Line())
        num_places = max(1, -(-num_values // VALUES_OF_PLACE))
        if line.num_places and line.num_places + num_places > MAX_WAITING:
            raise Overloaded(
                "many long answers wait, because earlier ones are not read; read them faster, or close them",
                code="answers_unread",
                retry_after_s=GRACE_S,
            )
        line.num_places += num_places
        try:
            async with line.turn:
                while not self._has_room(tenant):
                    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiters.append(waiter)
                    await waiter
                yield
        finally:
            line.num_places -= num_places
            if not line.num_places:
                del self._lines[tenant]

    def _has_room(self, tenant: str) -> bool:
        if self._num_bytes <= self._size:
            return True
        own = self._bytes_by_tenant().get(tenant, 0)
        return own * len({*self._lines, *(each.tenant for each in self._readers.values())}) <= self._size

    def _bytes_by_tenant(self) -> dict[str, int]:
        sums: dict[str, int] = {}
        for each in self._readers.values():
            sums[each.tenant] = sums.get(each.tenant, 0) + each.num_left
        return sums

    def _look(self) -> None:
        """Look at what has been read, and close connections if too much has not."""
        self._timer = None
        for transport, reader in self._readers.items():
            reader.num_left = transport.get_write_buffer_size()
        sums = self._bytes_by_tenant()
        self._num_bytes = sum(sums.values())
        slow = self._slow_by_tenant() if self._num_bytes > self._size else {}
        num_closed = 0
        while self._num_bytes > self._size and num_closed < CLOSED_AT_ONCE:
            tenant = max(sums, key=lambda each: sums[each])
            if not slow.get(tenant):
                break
            transport = slow[tenant].pop()
            num_left = self._readers.pop(transport).num_left
            sums[tenant] -= num_left
            self._num_bytes -= num_left
            transport.abort()
            num_closed += 1
        if num_closed:
            logger.warning("closed %d connections that did not read: others need the memory", num_closed)
        if self._num_bytes > self._size:
            delay_s = 0.0 if num_closed == CLOSED_AT_ONCE else CHECK_S
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)
        self._wake()

    def _slow_by_tenant(self) -> dict[str, list[asyncio.Transport]]:
        """Return the connections that may be closed, by tenant. The slowest is the last one."""
        now_s = _now_s()
        rated: dict[str, list[tuple[float, asyncio.Transport]]] = {}
        for transport, reader in self._readers.items():
            if now_s - reader.began_s >= GRACE_S and (rate := reader.rate(now_s)) < LEAST_RATE:
                rated.setdefault(reader.tenant, []).append((rate, transport))
        slow: dict[str, list[asyncio.Transport]] = {}
        for tenant, pairs in rated.items():
            pairs.sort(key=lambda pair: pair[0])
            slow[tenant] = [transport for _, transport in reversed(pairs)]
        return slow

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
