"""TenantTable: the holders of API keys, as the launcher's file in the run directory lists them now."""

from __future__ import annotations

import asyncio
from pathlib import Path

from runtime.ring.tenants import Tenant, Tenants, TenantsFile


class TenantTable:
    """Holders of API keys. It belongs to one event loop."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the file; None: there are no keys. Raises OSError, msgspec.MsgspecError."""
        self._file = None if path is None else TenantsFile(path)
        self._take((self._file and self._file.read_if_changed()) or Tenants())

    def _take(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self.is_shared = sum(bool(each.digests) and each.may("user") for each in tenants.tenants) > 1
        """True if several tenants may generate."""

    def of_key(self, key: bytes) -> Tenant | None:
        """Return the holder of this API key; None if there is none."""
        return self._tenants.of_key(key)

    async def watch(self, interval_s: float) -> None:
        """Check for a new table again and again, if there are keys."""
        while self._file is not None:
            await asyncio.sleep(interval_s)
            await self.look()

    async def look(self) -> None:
        """Load a new table if there is one (TenantsFile.read_new). A thread waits for the disk, so that a
        disk that hangs delays no request.
        """
        if self._file is None:
            return
        tenants = await asyncio.to_thread(self._file.read_new)
        if tenants is not None:
            self._take(tenants)
