"""KnownTenants: the table of tenants as a process has read it last. Looks at the file again each second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from runtime.ring.tenants import OWNER, Tenant, Tenants, TenantsFile

CHECK_S = 1.0


class KnownTenants:
    def __init__(self, path: Path) -> None:
        """Read the table at `path`. Raises OSError, msgspec.MsgspecError."""
        self._file = TenantsFile(path)
        self._tenants = self._file.read_if_changed() or Tenants()
        self._next_check_at = 0.0
        self.on_change: Callable[[], object] = lambda: None
        """Called when the launcher has written another."""

    def named(self, name: str) -> Tenant:
        """Return the tenant of this name, as Tenants.named."""
        return self._tenants.named(name)

    @property
    def has_names(self) -> bool:
        """Tell whether there is anybody but the owner in the table."""
        return any(tenant.name != OWNER for tenant in self._tenants.tenants)

    def refresh(self, now: float) -> None:
        """Take over the table if it has been written again (TenantsFile.read_new).
        To be called in every turn; `now`: seconds of a clock that does not go back.
        """
        if now < self._next_check_at:
            return
        self._next_check_at = now + CHECK_S
        tenants = self._file.read_new()
        if tenants is not None:
            self._tenants = tenants
            self.on_change()
