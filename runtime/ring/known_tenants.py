"""KnownTenants: a process's copy of the tenants' table, which checks the file once a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from runtime.ring.tenants import OWNER, Tenant, Tenants, TenantsFile

CHECK_S = 1.0


class KnownTenants:
    def __init__(self, path: Path) -> None:
        """Read the table at `path`. Raises OSError, msgspec.MsgspecError."""
        self._file = TenantsFile(path)
        self._take(self._file.read_if_changed() or Tenants())
        self._next_check_at = 0.0
        self.on_change: Callable[[], object] = lambda: None
        """Called when the launcher has written a new table."""

    def named(self, name: str) -> Tenant:
        """Return the tenant of this name, as Tenants.named."""
        return self._tenants.named(name)

    def _take(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self.has_names = any(tenant.name != OWNER for tenant in tenants.tenants)
        """True if the table has any tenant besides the owner."""

    def refresh(self, now: float) -> None:
        """Load the table if it was written again (TenantsFile.read_new). Call it in every turn. now: seconds
        of a monotonic clock.
        """
        if now < self._next_check_at:
            return
        self._next_check_at = now + CHECK_S
        tenants = self._file.read_new()
        if tenants is not None:
            self._take(tenants)
            self.on_change()
