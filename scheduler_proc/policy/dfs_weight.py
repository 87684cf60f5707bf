"""DfsWeight: depth-first order through the prefix cache within a priority, starting with the branch that most
waiting requests share. Requests with a common prefix then run one after the other, while it is cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from scheduler_proc.policy.base import RequestView
from scheduler_proc.policy.by_prefix import PrefixPolicy

END = ((1, 0),)
"""Sort key of the end of a path. It sorts behind every branch, so requests further down come first."""


class DfsWeight(PrefixPolicy):
    """Orders by branches of the cache. The weight of a branch is the number of requests that wait
    below it.
    """

    def sorted_positions(self, requests: Sequence[RequestView], cache_version: int) -> list[int]:
        paths = [view.cached_path() for view in requests]
        weights = Counter(node for path in paths for node in path)
        ranks = [
            (-view.priority, tuple((-weights[node], node) for node in path) + END, position)
            for position, (view, path) in enumerate(zip(requests, paths, strict=True))
        ]
        ranks.sort()
        return [position for _, _, position in ranks]
