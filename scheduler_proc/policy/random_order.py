"""RandomOrder: random order within a priority, for comparisons, and for tests of what must not depend on
order.
"""

from __future__ import annotations

from scheduler_proc.policy.base import KeyedPolicy, RequestView
from scheduler_proc.port import Rng


class RandomOrder(KeyedPolicy):
    """Draws a random place in the queue when a request arrives."""

    def __init__(self, rng: Rng) -> None:
        self._random = rng

    def key(self, request: RequestView) -> int:
        return self._random.getrandbits(32)
