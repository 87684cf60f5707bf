"""WritePace: limits the rate of large writes, over all streams of a server.

Events of /generate repeat the text so far, so the stream of an answer with n tokens would write about n/2
times its size. A stream that has to wait here gets fewer events with more tokens in each.
"""

from __future__ import annotations

import asyncio

BYTES_PER_S = 64 << 20
"""Rate of all large writes: 6 % of a core, at about 1 ms of work for a MiB
(docs/measurements/request_cost.md).
"""


class WritePace:
    """Pace of one event loop. The writes of one tenant are in order. Tenants share the rate equally."""

    def __init__(self, bytes_per_s: float = BYTES_PER_S) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s: dict[str, float] = {}
        """Time until which a tenant's writes use its share, by the clock of the event loop."""

    async def spend(self, tenant: str, num_bytes: int) -> None:
        """Wait for as long as the written bytes take at this rate, after the tenant's earlier writes."""
        now_s = asyncio.get_running_loop().time()
        self._free_s = {each: free_s for each, free_s in self._free_s.items() if free_s > now_s}
        began_s = self._free_s.setdefault(tenant, now_s)
        free_s = self._free_s[tenant] = began_s + num_bytes * len(self._free_s) / self._bytes_per_s
        await asyncio.sleep(free_s - now_s)
