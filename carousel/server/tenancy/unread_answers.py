"""UnreadAnswers: limits the bytes of answers that an HTTP process holds for callers who do not read them."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

POOL_BYTES = 32 << 20
GRACE_S = 5.0
"""Seconds that a caller has to begin to read. Its connection is not closed before."""
SHORT_GRACE_S = 1.0
"""The same while more than twice the limit is unread."""
LEAST_RATE = 256 << 10
"""Bytes a second. A connection that is read this fast is not closed."""
CHECK_S = 1.0
"""Seconds between two looks at the connections while more than the limit is unread."""
CLOSED_AT_ONCE = 64
"""Maximum number of connections that are closed in one turn of the event loop."""

logger = logging.getLogger(__name__)


class _Unread(ABC):
    """Part of an answer that its caller has not read; base class."""

    tenant: str
    num_left = 0
    """Number of bytes, when it was last looked at."""

    @abstractmethod
    def look(self) -> None:
        """Count the bytes again."""

    @abstractmethod
    def waited_s(self, now_s: float) -> float:
        """Return for how long it has been waited for the caller."""

    @abstractmethod
    def rate(self, now_s: float) -> float:
        """Return the bytes that were read in a second of this time."""

    @abstractmethod
    def close(self) -> None:
        """Drop the connection."""


class _Written(_Unread):
    """Bytes that are written on a connection whose caller does not keep up."""

    def __init__(self, transport: asyncio.Transport, tenant: str, now_s: float) -> None:
        self.tenant = tenant
        self._transport = transport
        self._began_s = now_s
        self.look()
        self._num_bytes = self.num_left

    def look(self) -> None:
        self.num_left = self._transport.get_write_buffer_size()

    def waited_s(self, now_s: float) -> float:
        return now_s - self._began_s

    def rate(self, now_s: float) -> float:
        return (self._num_bytes - self.num_left) / max(self.waited_s(now_s), 1e-3)

    def close(self) -> None:
        self._transport.abort()


class KeptAnswer(_Unread):
    """Answer that is spelled as it is read, and kept in a compact form until then. It counts while a piece of
    it waits for the caller.
    """

    def __init__(
        self, unread: UnreadAnswers, tenant: str, num_bytes: Callable[[], int], close: Callable[[], None]
    ) -> None:
        """`num_bytes` returns the bytes of the compact form."""
        self.tenant = tenant
        self._unread = unread
        self._count = num_bytes
        self._close = close
        self._num_written = 0
        """Bytes written since the waiting time was last counted from zero."""
        self._waited_s = 0.0
        """Seconds of waits that have ended."""
        self._since_s = 0.0

    def note(self, num_bytes: int) -> None:
        """Count bytes that were written."""
        self._num_written += num_bytes

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Count the answer while the block waits until a piece of it can be written."""
        if self._waited_s >= GRACE_S:  # what it read long ago does not count
            self._waited_s, self._num_written = 0.0, 0
        self._since_s = _now_s()
        self.look()
        self._unread.add(self, self)
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

    def close(self) -> None:
        self._close()


class UnreadAnswers:
    """Answers that are not read, in one event loop.

    While they are more than the limit, the tenant with the most loses the connection that reads most slowly,
    unless it is new or not slow.
    """

    def __init__(self, size: int = POOL_BYTES) -> None:
        self._size = size
        self._readers: dict[object, _Unread] = {}
        self._num_bytes = 0
        """Number of unread bytes, or more: a reader counts for what it had when it was last looked at."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def pause(self, transport: asyncio.Transport, tenant: str) -> None:
        """Count a connection on which more was written than its caller reads."""
        self.add(transport, _Written(transport, tenant, _now_s()))

    def resume(self, transport: asyncio.Transport) -> None:
        """Forget a connection: its caller has caught up or left."""
        self.remove(transport)

    def kept(self, tenant: str, num_bytes: Callable[[], int], close: Callable[[], None]) -> KeptAnswer:
        """Return an answer of a tenant. `num_bytes` returns the bytes of its compact form, and `close` drops
        its connection.
        """
        return KeptAnswer(self, tenant, num_bytes, close)

    def add(self, key: object, reader: _Unread) -> None:
        """Count what a caller has not read, by the key of its connection or answer."""
        self.remove(key)
        self._readers[key] = reader
        self._num_bytes += reader.num_left
        if self._num_bytes > self._size and self._timer is None:
            self._look()

    def remove(self, key: object) -> None:
        """Forget what was counted by a key."""
        reader = self._readers.pop(key, None)
        if reader is not None:
            self._num_bytes -= reader.num_left

    def _look(self) -> None:
        """Look at what has been read, and close connections if too much has not."""
        self._timer = None
        sums: dict[str, int] = {}
        for reader in self._readers.values():
            reader.look()
            sums[reader.tenant] = sums.get(reader.tenant, 0) + reader.num_left
        self._num_bytes = sum(sums.values())
        num_closed = self._close_slow(sums, 2 * self._size, min(SHORT_GRACE_S, GRACE_S), CLOSED_AT_ONCE)
        num_closed += self._close_slow(sums, self._size, GRACE_S, CLOSED_AT_ONCE - num_closed)
        if num_closed:
            logger.warning("closed %d connections that did not read: others need the memory", num_closed)
        if self._num_bytes > self._size:
            delay_s = 0.0 if num_closed == CLOSED_AT_ONCE else CHECK_S
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
            reader = self._readers.pop(slow[tenant].pop())
            sums[tenant] -= reader.num_left
            self._num_bytes -= reader.num_left
            reader.close()
            num_closed += 1
        return num_closed

    def _slow_by_tenant(self, grace_s: float) -> dict[str, list[object]]:
        """Return the keys of what may be closed, by tenant. The slowest is the last one."""
        now_s = _now_s()
        rated: dict[str, list[tuple[float, object]]] = {}
        for key, reader in self._readers.items():
            if reader.waited_s(now_s) >= grace_s and (rate := reader.rate(now_s)) < LEAST_RATE:
                rated.setdefault(reader.tenant, []).append((rate, key))
        slow: dict[str, list[object]] = {}
        for tenant, pairs in rated.items():
            pairs.sort(key=lambda pair: pair[0])
            slow[tenant] = [key for _, key in reversed(pairs)]
        return slow


def _now_s() -> float:
    return asyncio.get_running_loop().time()
