"""UnreadAnswers: limits the bytes of answers that an HTTP process holds for callers who do not read them."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

POOL_BYTES = 32 << 20
GRACE_S = 5.0
"""Seconds that a caller has to begin to read. Its connection is not closed before."""
SHORT_GRACE_S = 0.25
"""The same while half as much again as the limit is unread."""
SHORTEST_GRACE_S = 0.02
"""The same while twice the limit is unread. Thousands of connections that read nothing were written 50 MB in
the SHORT_GRACE_S of the first of them, and before the next look.
"""
LEAST_RATE = 256 << 10
"""Bytes a second. A connection that is read this fast is not closed."""
CHECK_S = 0.25
"""Seconds between two looks at the connections while more than the limit is unread."""
GROWTH_S = 1.0
"""The same while less is unread: more output may come for streams whose callers do not read."""
CLOSED_AT_ONCE = 64
"""Maximum number of connections that are closed in one turn of the event loop."""

logger = logging.getLogger(__name__)


class _Unread(ABC):
    """Part of an answer that its caller has not read; base class."""

    def __init__(self, transport: asyncio.Transport, tenant: str) -> None:
        self.transport = transport
        self.tenant = tenant
        self.num_left = 0
        """Number of bytes, when it was last looked at."""

    @abstractmethod
    def look(self) -> None:
        """Measure `num_left` again."""

    @abstractmethod
    def waited_s(self, now_s: float) -> float:
        """Return for how many seconds this part has waited for its caller to read."""

    @abstractmethod
    def rate(self, now_s: float) -> float:
        """Return how many bytes a second the caller has read while it waited."""


class _Written(_Unread):
    """Bytes that are written on a connection whose caller does not keep up."""

    def __init__(self, transport: asyncio.Transport, tenant: str, now_s: float) -> None:
        super().__init__(transport, tenant)
        self._began_s = now_s
        self.look()
        self._num_bytes = self.num_left

    def look(self) -> None:
        self.num_left = self.transport.get_write_buffer_size()

    def waited_s(self, now_s: float) -> float:
        return now_s - self._began_s

    def rate(self, now_s: float) -> float:
        return (self._num_bytes - self.num_left) / max(self.waited_s(now_s), 1e-3)


class KeptAnswer(_Unread):
    """Answer that is spelled as it is read, and kept in a compact form until then. It counts while a piece of
    it waits for the caller.
    """

    def __init__(
        self, unread: UnreadAnswers, transport: asyncio.Transport, tenant: str, num_bytes: Callable[[], int]
    ) -> None:
        """`num_bytes` returns the bytes of the compact form."""
        super().__init__(transport, tenant)
        self._unread = unread
        self._count = num_bytes
        self._waited_s = 0.0
        """Seconds of waits that have ended: of the last ones, if it has waited for long."""
        self._num_written = 0
        """Bytes written in that time."""
        self._since_s = 0.0

    @property
    def num_written(self) -> int:
        """Return the number of bytes written in its last waits, and since."""
        return self._num_written

    def note(self, num_bytes: int) -> None:
        """Count bytes that were written."""
        self._num_written += num_bytes

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Count the answer while the block waits until a piece of it can be written."""
        if self._waited_s >= 2 * GRACE_S:  # what it read long ago counts less and less
            self._waited_s, self._num_written = self._waited_s / 2, self._num_written // 2
        self._since_s = _now_s()
        self.look()
        self._unread.add(self)
        try:
            yield
        finally:
            self._unread.remove(self)
            self._waited_s += _now_s() - self._since_s

    def look(self) -> None:
        self.num_left = self._count()

    def waited_s(self, now_s: float) -> float:
        return self._waited_s + now_s - self._since_s

    def rate(self, now_s: float) -> float:
        is_stuck = now_s - self._since_s >= GRACE_S
        return 0.0 if is_stuck else self._num_written / max(self.waited_s(now_s), 1e-3)


class UnreadAnswers:
    """Answers that are not read, in one event loop.

    While they are more than the limit, the tenant with the most loses the connection that reads most slowly,
    unless it is new or not slow.
    """

    def __init__(self, size: int = POOL_BYTES) -> None:
        self._size = size
        self._readers: dict[asyncio.Transport, list[_Unread]] = {}
        """Unread parts by connection: bytes that are written, a kept answer, or both."""
        self._num_bytes = 0
        """Number of unread bytes, or more: a reader counts for what it had when it was last looked at."""
        self._timer: asyncio.TimerHandle | None = None
        """Next look at the connections; None while all callers read."""
        self._is_above = False
        """True if more than the limit was unread at the last look."""
        self._is_far_above = False
        """True if more than twice the limit was unread then, or has been since."""

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def pause(self, transport: asyncio.Transport, tenant: str) -> None:
        """Count a connection on which more was written than its caller reads."""
        self.resume(transport)
        self.add(_Written(transport, tenant, _now_s()))

    def resume(self, transport: asyncio.Transport) -> None:
        """Forget what was written on a connection: its caller has caught up or left."""
        for reader in self._readers.get(transport, ()):
            if isinstance(reader, _Written):
                self.remove(reader)
                return

    def kept(self, transport: asyncio.Transport, tenant: str, num_bytes: Callable[[], int]) -> KeptAnswer:
        """Return an answer of a tenant. `num_bytes` returns the bytes of its compact form."""
        return KeptAnswer(self, transport, tenant, num_bytes)

    def add(self, reader: _Unread) -> None:
        """Count a part of an answer as unread, until it is removed."""
        self._readers.setdefault(reader.transport, []).append(reader)
        self._num_bytes += reader.num_left
        if self._num_bytes > self._size and not self._is_above:
            self._look()
        elif self._num_bytes > 2 * self._size and not self._is_far_above:
            self._is_far_above = True
            self._look_after(SHORTEST_GRACE_S)
        elif self._timer is None:
            self._look_after(GROWTH_S)

    def remove(self, reader: _Unread) -> None:
        """Count a part of an answer no longer. No effect once its connection was closed here."""
        readers = self._readers.get(reader.transport, [])
        if reader in readers:
            readers.remove(reader)
            self._num_bytes -= reader.num_left
            if not readers:
                del self._readers[reader.transport]

    def _look(self) -> None:
        """Measure all unread parts again, and close the slowest connections while they are too much."""
        self._stop_timer()
        sums: dict[str, int] = {}
        for reader in chain.from_iterable(self._readers.values()):
            reader.look()
            sums[reader.tenant] = sums.get(reader.tenant, 0) + reader.num_left
        self._num_bytes = sum(sums.values())
        short_s = SHORTEST_GRACE_S if self._num_bytes > 2 * self._size else min(SHORT_GRACE_S, GRACE_S)
        num_closed = self._close_slow(sums, self._size * 3 // 2, short_s, CLOSED_AT_ONCE)
        num_closed += self._close_slow(sums, self._size, GRACE_S, CLOSED_AT_ONCE - num_closed)
        if num_closed:
            logger.warning("closed %d connections that did not read: others need the memory", num_closed)
        self._is_above = self._num_bytes > self._size
        self._is_far_above = self._num_bytes > 2 * self._size
        if num_closed == CLOSED_AT_ONCE:
            self._look_after(0.0)
        elif self._is_above:
            self._look_after(SHORTEST_GRACE_S if self._is_far_above else CHECK_S)
        elif self._readers:
            self._look_after(GROWTH_S)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_after(self, delay_s: float) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _close_slow(self, sums: dict[str, int], size: int, grace_s: float, most: int) -> int:
        """Close connections while more than `size` is unread, but no more than `most`. `sums` are the bytes
        of each tenant. Returns the number of those closed.
        """
        slow = self._slow_by_tenant(grace_s) if self._num_bytes > size else {}
        num_closed = 0
        while self._num_bytes > size and num_closed < most:
            tenant = max(sums, key=lambda each: sums[each])
            if not slow.get(tenant):
                break
            transport = slow[tenant].pop()
            readers = self._readers.pop(transport, [])
            for reader in readers:
                sums[reader.tenant] -= reader.num_left
                self._num_bytes -= reader.num_left
            if readers:
                transport.abort()
                num_closed += 1
        return num_closed

    def _slow_by_tenant(self, grace_s: float) -> dict[str, list[asyncio.Transport]]:
        """Return the connections that may be closed, by tenant. The slowest is the last one. A connection may
        be there twice.
        """
        now_s = _now_s()
        rated: dict[str, list[tuple[float, asyncio.Transport]]] = {}
        for reader in chain.from_iterable(self._readers.values()):
            if reader.waited_s(now_s) >= grace_s and (rate := reader.rate(now_s)) < LEAST_RATE:
                rated.setdefault(reader.tenant, []).append((rate, reader.transport))
        slow: dict[str, list[asyncio.Transport]] = {}
        for tenant, pairs in rated.items():
            pairs.sort(key=lambda pair: pair[0])
            slow[tenant] = [transport for _, transport in reversed(pairs)]
        return slow


def _now_s() -> float:
    return asyncio.get_running_loop().time()
