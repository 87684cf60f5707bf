"""PrefixPolicy: what the policies have in common that look into the prefix cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from scheduler_proc.policy.base import RequestView, WaitingView

MAX_SORTED = 128
"""Requests behind these wait until they are among the first, first come, first
served (SGLang gives up at the same length: matching costs time).
"""


class PrefixPolicy(ABC):
    """Orders the first of those that wait, anew only when the queue or the cache has changed."""

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
        """Their positions, in the order in which they should be considered."""
