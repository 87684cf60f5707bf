"""PrefixPolicy: base class of the policies that look into the prefix cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from scheduler_proc.policy.base import RequestView, WaitingView

MAX_SORTED = 128
"""Number of requests that are sorted. The others wait first come, first served until they are among these.
SGLang has the same limit, because matching costs time.
"""


class PrefixPolicy(ABC):
    """Orders the first waiting requests. The order is computed again only when the queue or the cache has
    changed.
    """

    def __init__(self) -> None:
        self._versions = (-1, -1)
        self._order: list[int] = []

    def order(self, waiting: WaitingView) -> Sequence[int]:
        versions = (waiting.version, waiting.cache_version)
        if versions != self._versions:
            self._order = self.sorted_positions(waiting[:MAX_SORTED], waiting.cache_version)
            self._versions = versions
        return self._order

    @abstractmethod
    def sorted_positions(self, requests: Sequence[RequestView], cache_version: int) -> list[int]:
        """Return positions in `requests`, in the order in which they should be considered."""
