"""Tenants of the KV cache: whose a namespace is, and which share each is entitled to."""

from __future__ import annotations

from collections.abc import Iterator

TENANT_BYTES = 8
OWNER = bytes(TENANT_BYTES)
"""Tenant of requests whose namespace is empty."""


def tenant_of(namespace: bytes) -> bytes:
    """Return the part of a namespace that stands for its tenant. What follows it is the salt's."""
    return namespace[:TENANT_BYTES] or OWNER


class CacheShares:
    """Table of the part of the pool that each tenant is entitled to, where somebody has said so."""

    def __init__(self) -> None:
        self.version = 0
        """Changes whenever a share does."""
        self._shares: dict[bytes, float] = {}

    def set(self, tenant: bytes, share: float | None) -> None:
        """Entitle a tenant, named by its part of a namespace, to this share of the pool, from 0.0 to 1.0.
        None: an equal part of what the shares of others leave. Raises ValueError when it is no share.
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
        """Return the share that was set last for a tenant; None when nothing was."""
        return self._shares.get(tenant)

    def __iter__(self) -> Iterator[bytes]:
        """Those with a share of their own."""
        return iter(self._shares)
