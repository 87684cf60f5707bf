"""WritePace: spreads large writes over time, those of all streams of a server together.

Events of /generate repeat all that came before, so that a stream of n tokens would write n times the half of
its answer. A stream that has to wait here gets fewer events with more tokens in each.
"""

from __future__ import annotations

import asyncio

BYTES_PER_S = 64 << 20
"""Pace of all large writes: 6 % of a core, at about 1 ms of work for a MiB
(docs/measurements/request_cost.md).
"""


class WritePace:
    """The pace of one event loop. Of one tenant's writes who comes first goes first; tenants go side by side,
    each at an equal part of the pace.
    """

    def __init__(self, bytes_per_s: float = BYTES_PER_S) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s: dict[str, float] = {}
        """Time at which what a tenant has written is paid for, by the clock of the event loop."""

    async def spend(self, tenant: str, num_bytes: int) -> None:
        """Wait for as long as the bytes that have been written take at this pace, after those of others of
        the tenant.
        """
        now_s = asyncio.get_running_loop().time()
        self._free_s = {each: free_s for each, free_s in self._free_s.items() if free_s > now_s}
        began_s = self._free_s.setdefault(tenant, now_s)
        free_s = self._free_s[tenant] = began_s + num_bytes * len(self._free_s) / self._bytes_per_s
        await asyncio.sleep(free_s - now_s)
