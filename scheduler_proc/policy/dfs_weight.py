"""Depth first through the prefix cache, the branch that most of the waiting requests share first, within a
priority: those that share a prefix run one after the other, while it is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from scheduler_proc.policy.base import RequestView
from scheduler_proc.policy.by_prefix import PrefixPolicy

END = ((1, 0),)
"""Behind every branch: who goes further down comes first."""


class DfsWeight(PrefixPolicy):
    """A branch weighs as much as requests wait below it."""

    def sorted_positions(self, requests: Sequence[RequestView], cache_version: int) -> list[int]:
        paths = [view.cached_path() for view in requests]
        weights = Counter(node for path in paths for node in path)
        ranks = [
            (-view.priority, tuple((-weights[node], node) for node in path) + END, position)
            for position, (view, path) in enumerate(zip(requests, paths, strict=True))
        ]
        ranks.sort()
        return [position for _, _, position in ranks]
