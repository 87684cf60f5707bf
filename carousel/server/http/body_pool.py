"""BodyPool: how many bytes of large request bodies an HTTP process holds at a time."""

from __future__ import annotations

import asyncio

from runtime.base.errors import Overloaded

MAX_BODY_BYTES = 8 << 20
POOL_BYTES = 64 << 20
SMALL_BYTES = 64 << 10
"""Size up to which a body is not counted."""
WAIT_S = 10.0
"""Longest time in all that one body waits for room."""
MAX_WAITING = 128
"""Bodies that wait, each with what has been read of it: up to 320 KB."""


class BodyPool:
    """The room for large bodies in one event loop.

    A body takes its share as its bytes come, not when its length is announced: a head alone holds nothing.
    The oldest one always gets what it asks for, up to `largest`, since so much is kept from all others; so it
    comes to its end, whatever the rest waits for, and then the next is the oldest.
    """

    def __init__(self, largest: int = MAX_BODY_BYTES, size: int = POOL_BYTES) -> None:
        """largest: bytes that one body may have; at most `size`, the bytes that all may have together."""
        self._largest = largest
        self._size = size
        self.num_bytes = 0
        """Bytes that large bodies have now."""
        self._shares: dict[BodyShare, None] = {}
        """Shares of large bodies, the oldest first."""

    def share(self) -> BodyShare:
        """The share of a new body, which its owner releases."""
        return BodyShare(self)

    async def _grow(self, share: BodyShare, num_bytes: int) -> None:
        self._shares.setdefault(share)
        if self._has_room(share, num_bytes):
            self._take(share, num_bytes)
            return
        if sum(each.waiter is not None for each in self._shares) >= MAX_WAITING:
            raise _no_room()
        loop = asyncio.get_running_loop()
        share.wanted = num_bytes
        share.waiter = loop.create_future()
        began = loop.time()
        try:
            async with asyncio.timeout(WAIT_S - share.waited_s):
                await share.waiter
        except TimeoutError:
            raise _no_room() from None
        finally:
            share.waiter = None
            share.waited_s += loop.time() - began

    def _has_room(self, share: BodyShare, num_bytes: int) -> bool:
        is_oldest = share is next(iter(self._shares))
        return self.num_bytes + num_bytes <= (self._size if is_oldest else self._size - self._largest)

    def _take(self, share: BodyShare, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        share.held += num_bytes

    def _release(self, share: BodyShare) -> None:
        if share not in self._shares:
            return
        del self._shares[share]
        self.num_bytes -= share.held
        share.held = 0
        for each in self._shares:
            if each.waiter is not None and not each.waiter.done():
                if not self._has_room(each, each.wanted):
                    break
                self._take(each, each.wanted)
                each.waiter.set_result(None)


class BodyShare:
    """Bytes of the pool that one body has."""

    def __init__(self, pool: BodyPool) -> None:
        self._pool = pool
        self.held = 0
        self.wanted = 0
        """Bytes that it waits for, beyond those held."""
        self.waiter: asyncio.Future[None] | None = None
        self.waited_s = 0.0

    async def grow_to(self, num_bytes: int) -> None:
        """Wait until the body may have so many. Raises Overloaded when there is no room in time."""
        if num_bytes > max(self.held, SMALL_BYTES):
            await self._pool._grow(self, num_bytes - self.held)

    def release(self) -> None:
        """Give everything back."""
        self._pool._release(self)


def _no_room() -> Overloaded:
    return Overloaded(
        f"the large bodies that are being read take all of their {POOL_BYTES >> 20} MiB; try again later",
        code="bodies_overloaded",
        retry_after_s=WAIT_S / 2,
    )
