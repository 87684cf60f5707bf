"""Tombstones: aborts that arrived before the sequences that they abort."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.ring.tenants import OWNER

TOMBSTONE_S = 30.0
"""Seconds for which the abort of an unknown sequence is remembered; longer than a request may wait to be
tokenized.
"""
MAX_TOMBSTONES = 65536


@dataclass(slots=True)
class Tombstones:
    """Handles that were aborted before they arrived, with the tenant that aborted each. Bounded in time and
    number; the oldest are dropped first.
    """

    clock: Callable[[], float]
    max_handles: int = MAX_TOMBSTONES
    # A plain dict would walk over all its deleted entries to find the oldest.
    _expires_at: OrderedDict[tuple[bytes, str], float] = field(default_factory=OrderedDict)

    def add(self, handle: bytes, tenant: str = OWNER) -> None:
        now = self.clock()
        while self._expires_at:
            oldest = next(iter(self._expires_at))
            if self._expires_at[oldest] > now and len(self._expires_at) < self.max_handles:
                break
            self._expires_at.popitem(last=False)
        self._expires_at.setdefault((handle, tenant), now + TOMBSTONE_S)

    def try_take(self, handle: bytes, tenant: str = OWNER) -> bool:
        """Return True if this tenant or the owner has aborted the handle before it arrived."""
        if not self._expires_at:
            return False
        expires_at = [self._expires_at.pop((handle, who), 0.0) for who in {tenant, OWNER}]
        return max(expires_at) > self.clock()

    def __len__(self) -> int:
        return len(self._expires_at)
