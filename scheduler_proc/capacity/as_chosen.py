"""AsChosen: capacity policy that leaves the choice to a scheduler of the user's own, within the pages that
there are.
"""

from __future__ import annotations

from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.capacity.max_utilization import MaxUtilization


class AsChosen(MaxUtilization):
    """Admits every chosen request if there is room for the tokens that it has. If pages run short all the
    same, the request that started last gives way.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        super().__init__(kv, 0.0)

    def note_retraction(self) -> None:
        """Do nothing: the policy has no estimates."""
