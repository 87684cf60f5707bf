"""BodyPool: limits the bytes of large request bodies that an HTTP process holds at a time: of those that it
reads, and of those whose prompts it keeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from carousel.server.tenancy.shares import Shares
from runtime.base.errors import Overloaded, RateLimited

MAX_BODY_BYTES = 8 << 20
POOL_BYTES = 64 << 20
"""Bytes of all large bodies that are read."""
KEPT_BYTES = 1 << 30
"""Bytes of all large bodies whose requests are in progress: as many as their prompts take at most, which are
kept so that they can be sent again.
"""
SMALL_BYTES = 64 << 10
"""Size up to which a body does not count."""
WAIT_S = 10.0
"""Longest time in total that one body waits for room."""
MAX_WAITING = 128
"""Maximum number of waiting bodies, each with the bytes already read: up to 320 KB."""


class PoolUse(NamedTuple):
    """Use of the room in a pool, for its errors."""

    bodies: str
    """Name of the bodies that have the room."""
    end: str
    """Event after which there is room again."""
    code: str


READING = PoolUse("large bodies that are being read", "some have been read", "bodies_overloaded")
KEEPING = PoolUse("long prompts in progress", "some have been answered", "prompts_overloaded")


class BodyPool:
    """Room for the large bodies in one event loop.

    A body takes its share as its bytes arrive, not when its length is announced, so a head alone holds
    nothing.

    The oldest body always gets what it asks for, up to `largest`, because so much is reserved from all
    others. So it is completed, whatever the others wait for, and the next one becomes the oldest.

    The rest is divided among tenants: a tenant that has used up its share waits for its own bodies.
    """

    def __init__(
        self,
        is_divided: Callable[[], bool],
        *,
        largest: int = MAX_BODY_BYTES,
        size: int = POOL_BYTES,
        use: PoolUse = READING,
    ) -> None:
        """`is_divided` returns True if there are several tenants. `largest` is the limit in bytes for one
        body, and `size`, which is not less, that for all together.
        """
        self._use = use
        self._size = size
        self._bytes = Shares(size - largest, is_divided)
        self._waiting = Shares(MAX_WAITING, is_divided)
        self._shares: dict[BodyShare, None] = {}
        """Shares of large bodies, the oldest first."""

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes that large bodies hold now."""
        return self._bytes.total

    @property
    def num_bodies(self) -> int:
        """Return the number of large bodies that are being read or decoded."""
        return len(self._shares)

    def share(self, tenant: str) -> BodyShare:
        """Return the share of a new body. Its owner releases it."""
        return BodyShare(self, tenant)

    async def _grow(self, share: BodyShare, num_bytes: int) -> None:
        self._shares.setdefault(share)
        if self._has_room(share, num_bytes):
            self._take(share, num_bytes)
            return
        waiting, tenant = self._waiting, share.tenant
        has_others = self._bytes.of(tenant) > share.held
        is_own_doing = has_others and not self._bytes.may_have(tenant, num_bytes)
        if not (waiting.has_room(1) and waiting.may_have(tenant, 1)):
            raise self._refusal(is_own_doing=is_own_doing)
        loop = asyncio.get_running_loop()
        share.wanted = num_bytes
        share.waiter = loop.create_future()
        began = loop.time()
        waiting.take(tenant, 1)
        try:
            async with asyncio.timeout(WAIT_S - share.waited_s):
                await share.waiter
        except TimeoutError:
            raise self._refusal(is_own_doing=is_own_doing) from None
        finally:
            waiting.give_back(tenant, 1)
            share.waiter = None
            share.waited_s += loop.time() - began

    def _has_room(self, share: BodyShare, num_bytes: int) -> bool:
        is_oldest = share is next(iter(self._shares))
        return is_oldest or (
            self._bytes.has_room(num_bytes) and self._bytes.may_have(share.tenant, num_bytes)
        )

    def _take(self, share: BodyShare, num_bytes: int) -> None:
        self._bytes.take(share.tenant, num_bytes)
        share.held += num_bytes

    def _shrink(self, share: BodyShare, num_bytes: int) -> None:
        if share not in self._shares:
            return
        if not num_bytes:
            del self._shares[share]
        self._bytes.give_back(share.tenant, share.held - num_bytes)
        share.held = num_bytes
        if not self._waiting.total:
            return
        for each in self._shares:
            if each.waiter is None or each.waiter.done():
                continue
            if self._has_room(each, each.wanted):
                self._take(each, each.wanted)
                each.waiter.set_result(None)
            elif self._bytes.may_have(each.tenant, each.wanted):
                break  # a later body must not take the bytes that it waits for

    def _refusal(self, *, is_own_doing: bool) -> Overloaded:
        """Return the error for a body that gets no room. `is_own_doing` is True if other bodies of its tenant
        have the room.
        """
        bodies, end, code = self._use
        if is_own_doing:
            return RateLimited(
                f"the {bodies} of this API key are its share of this server; try again when {end}",
                retry_after_s=WAIT_S / 2,
            )
        return Overloaded(
            f"the {bodies} take all of their {self._size >> 20} MiB; try again later",
            code=code,
            retry_after_s=WAIT_S / 2,
        )


class BodyShare:
    """Bytes of the pool that one body has."""

    def __init__(self, pool: BodyPool, tenant: str) -> None:
        self._pool = pool
        self.tenant = tenant
        self.held = 0
        self.wanted = 0
        """Number of bytes that it waits for, beyond those held."""
        self.waiter: asyncio.Future[None] | None = None
        self.waited_s = 0.0

    async def grow_to(self, num_bytes: int) -> None:
        """Wait until the body may have so many bytes. Raises Overloaded if there is no room in time."""
        if num_bytes > max(self.held, SMALL_BYTES):
            await self._pool._grow(self, num_bytes - self.held)

    def shrink_to(self, num_bytes: int) -> None:
        """Give back all bytes above `num_bytes`."""
        self._pool._shrink(self, min(num_bytes, self.held))

    def release(self) -> None:
        """Give all bytes back."""
        self._pool._shrink(self, 0)
