"""Turns: a queue in which tenants take turns, by the work that each of them asks for. Knows no message."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Queue whose next item is one of the tenant that has had the least work done, as start-time fair
    queueing has it: who comes anew begins where the others are, so nobody saves anything up, and a tenant
    with one short text waits for no more than what is in work, however much others have sent. Items of one
    tenant keep their order.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[tuple[T, int]]] = {}
        self._order: list[tuple[int, int, str]] = []
        """A heap of the tenants that have something: where each one stands, and who came first."""
        self._numbers = count()
        self._now = 0
        """Where the tenant stood whose item was taken last."""
        self._ends: dict[str, int] = {}
        """Where each tenant stands after what was taken of it."""
        self._costs: Counter[str] = Counter()
        self.total_cost = 0
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def cost_of(self, tenant: str) -> int:
        """Return the summed cost of what this tenant has waiting."""
        return self._costs[tenant]

    def num_of(self, tenant: str) -> int:
        """Return how many items this tenant has waiting."""
        return len(self._queues.get(tenant, ()))

    def items(self) -> Iterator[tuple[str, list[T]]]:
        """Return the items that each tenant has waiting, in its order."""
        for tenant, queue in list(self._queues.items()):
            yield tenant, [item for item, _ in queue]

    def push(self, tenant: str, item: T, cost: int) -> None:
        """Add an item. `cost`: its work, in units of the caller's choice, above 0."""
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
        """Take the next item. Raises IndexError when there is none."""
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
