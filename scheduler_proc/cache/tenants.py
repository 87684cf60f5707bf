"""Tenants of the KV cache: the tenant of a namespace, and each tenant's share."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.wire.format import TENANT_BYTES

OWNER = bytes(TENANT_BYTES)
"""Tenant of requests whose namespace is empty."""


def tenant_of(namespace: bytes) -> bytes:
    """Return the part of a namespace that identifies its tenant. The rest identifies the salt."""
    return namespace[:TENANT_BYTES] or OWNER


class CacheShares:
    """Explicit cache shares of tenants, as fractions of the pool."""

    def __init__(self) -> None:
        self.version = 0
        """Number that changes whenever a share changes."""
        self._shares: dict[bytes, float] = {}

    def set(self, tenant: bytes, share: float | None) -> None:
        """Set a tenant's share of the pool, 0.0 to 1.0. tenant: the tenant's part of a namespace. None: an
        equal part of what explicit shares leave. Raises ValueError for a share out of range.
        """
        if share is not None and not 0.0 <= share <= 1.0:
            raise ValueError(f"share: {share!r} of the KV cache; it must be from 0.0 to 1.0, or None")
        if self._shares.get(tenant) == share:
            return
        if share is None:
            del self._shares[tenant]
        else:
            self._shares[tenant] = share
        self.version += 1

    def get(self, tenant: bytes) -> float | None:
        """Return the share that was set for a tenant, or None."""
        return self._shares.get(tenant)

    def __iter__(self) -> Iterator[bytes]:
        """Yield the tenants that have a share of their own."""
        return iter(self._shares)
