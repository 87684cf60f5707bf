"""TimeShares: the time that each tenant has had for its masks. The one that has had the least is next."""

from __future__ import annotations

from collections.abc import Collection

CALMING = 0.8
"""Factor by which the estimate for a mask of a tenant falls at most from one turn to the next, so that a few
quick ones are no reason to make very many at once.
"""
MAX_TENANTS = 256
"""Tenants whose shares of the time are remembered."""


class TimeShares:
    """Times that tenants have had for their masks, which are shared out as by a fair queue."""

    def __init__(self, at_once_s: float) -> None:
        """at_once_s: seconds that the work of a tenant may take at once, beyond one mask."""
        self._at_once_s = at_once_s
        self._had_s: dict[str, float] = {}
        """Seconds that each tenant has had, or that had been reached when it came."""
        self._each_s: dict[str, float] = {}
        """Seconds that each tenant's last masks took on average."""
        self._reached_s = 0.0

    def next_of(self, tenants: Collection[str]) -> str:
        """Return the one of these tenants that has had the least. Who was away has saved nothing up."""
        if len(self._had_s) > MAX_TENANTS:
            self._had_s, self._each_s = {}, {}
        had = {each: max(self._had_s.get(each, 0.0), self._reached_s) for each in tenants}
        tenant = min(had, key=lambda each: had[each])
        self._reached_s = self._had_s[tenant] = had[tenant]
        return tenant

    def num_at_once(self, tenant: str) -> int:
        """Return how many of a tenant's masks are made before it may be another tenant's turn."""
        return max(1, int(self._at_once_s / max(self._each_s.get(tenant, self._at_once_s), 1e-6)))

    def spend(self, tenant: str, seconds: float, num_masks: int) -> None:
        self._had_s[tenant] = self._had_s.get(tenant, 0.0) + seconds
        self._each_s[tenant] = max(seconds / num_masks, CALMING * self._each_s.get(tenant, 0.0))
