"""Turns: a queue that serves tenants in turn, by the work that each asks for. Knows no message."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Queue that always serves the tenant for which least work was done (start-time fair queueing). A tenant
    that is new starts level with the others, so no tenant can save up turns. A tenant with one short text
    only waits for the work in progress, however much others have sent. Items of one tenant keep their order.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[tuple[T, int]]] = {}
        self._order: list[tuple[int, int, str]] = []
        """Heap of the tenants that have items, by virtual time and arrival."""
        self._numbers = count()
        self._now = 0
        """Virtual time of the tenant that was served last."""
        self._ends: dict[str, int] = {}
        """Virtual time of each tenant after its last served item."""
        self._costs: Counter[str] = Counter()
        self.total_cost = 0
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def cost_of(self, tenant: str) -> int:
        """Return the total cost of this tenant's waiting items."""
        return self._costs[tenant]

    def num_of(self, tenant: str) -> int:
        """Return the number of this tenant's waiting items."""
        return len(self._queues.get(tenant, ()))

    def items(self) -> Iterator[tuple[str, list[T]]]:
        """Yield the waiting items of each tenant, in its order."""
        for tenant, queue in list(self._queues.items()):
            yield tenant, [item for item, _ in queue]

    def push(self, tenant: str, item: T, cost: int) -> None:
        """Add an item. cost: its work in any unit, above 0."""
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = deque()
            start = max(self._now, self._ends.get(tenant, 0))
            heapq.heappush(self._order, (start, next(self._numbers), tenant))
        queue.append((item, cost))
        self._costs[tenant] += cost
        self.total_cost += cost
        self._num_items += 1

    def pop(self) -> T:
        """Remove and return the next item. Raises IndexError if there is none."""
        start, _, tenant = heapq.heappop(self._order)
        queue = self._queues[tenant]
        item, cost = queue.popleft()
        self._now = start
        self._ends[tenant] = start + cost
        if queue:
            heapq.heappush(self._order, (start + cost, next(self._numbers), tenant))
        else:
            del self._queues[tenant]
        self._costs[tenant] -= cost
        self.total_cost -= cost
        self._num_items -= 1
        return item
