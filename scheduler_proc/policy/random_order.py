"""Random order within a priority; for comparisons, and for tests of what must not depend on order."""

from __future__ import annotations

import random

from scheduler_proc.policy.base import KeyedPolicy, RequestView


class RandomOrder(KeyedPolicy):
    """A place in the queue is drawn when a request comes."""

    def __init__(self) -> None:
        self._random = random.Random()

    def key(self, request: RequestView) -> int:
        return self._random.getrandbits(32)
