"""QueueTimes: histogram of how long requests waited for their first row. Knows no request."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class QueueTimes:
    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        """Number of requests in each bucket: waited at most BOUNDS_S[i], and longer than the bound before.
        The last bucket is for longer waits.
        """
        self.sum_s = 0.0
        self.num_added = 0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds
        self.num_added += 1
