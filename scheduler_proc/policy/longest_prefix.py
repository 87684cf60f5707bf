"""Longest cached prefix first, within a priority: serves what the cache still holds before it is evicted."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_proc.policy.base import WaitingView

MAX_SORTED = 128
"""Requests behind these stay first come, first served
(SGLang gives up at the same length: matching costs time).
"""


class LongestPrefix:
    """Remembers matched lengths until the cache changes."""

    def __init__(self) -> None:
        self._version = -1
        self._cached_len: dict[int, int] = {}

    def order(self, waiting: WaitingView) -> Sequence[int]:
        if waiting.cache_version != self._version:
            self._version = waiting.cache_version
            self._cached_len.clear()
        num_sorted = min(len(waiting), MAX_SORTED)
        ranks = []
        for position in range(num_sorted):
            view = waiting[position]
            cached_len = self._cached_len.get(view.seq)
            if cached_len is None:
                cached_len = self._cached_len[view.seq] = view.cached_len()
            ranks.append((-view.priority, -cached_len, position))
        ranks.sort()
        return [position for _, _, position in ranks] + list(range(num_sorted, len(waiting)))
