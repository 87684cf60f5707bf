"""For capacity schedulers of the user's own: the pool has the last word, and no opinion beyond that."""

from __future__ import annotations

from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.capacity.max_utilization import MaxUtilization


class AsChosen(MaxUtilization):
    """Capacity policy by which whoever was chosen fits if there is room for the tokens it has. When pages run
    short all the same, the one that started last gives way.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        super().__init__(kv, 0.0)

    def note_retraction(self) -> None:
        """Do nothing: the policy has no estimates."""
