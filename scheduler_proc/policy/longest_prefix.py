"""LongestPrefix: within a priority, serves the request with the longest cached prefix first, before that
prefix is evicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_proc.policy.base import RequestView
from scheduler_proc.policy.by_prefix import PrefixPolicy


class LongestPrefix(PrefixPolicy):
    """Orders by cached prefix length. It remembers the lengths of the requests that it last looked at until
    the cache changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cache_version = -1
        self._cached_len: dict[int, int] = {}

    def sorted_positions(self, requests: Sequence[RequestView], cache_version: int) -> list[int]:
        if cache_version != self._cache_version:
            self._cache_version = cache_version
            self._cached_len.clear()
        known, self._cached_len = self._cached_len, {}
        ranks = []
        for position, view in enumerate(requests):
            cached_len = known.get(view.seq)
            if cached_len is None:
                cached_len = view.cached_len()
            self._cached_len[view.seq] = cached_len
            ranks.append((-view.priority, -cached_len, position))
        ranks.sort()
        return [position for _, _, position in ranks]
