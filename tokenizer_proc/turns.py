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
    A tenant whose turn may not come for now is held.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[tuple[T, int]]] = {}
        self._order: list[tuple[int, int, str]] = []
        """Heap of the tenants that have items and are not held, by virtual time and arrival."""
        self._held: set[str] = set()
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

    @property
    def is_ready(self) -> bool:
        """True if there is a next item: not all that wait are of held tenants."""
        return bool(self._order)

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
            if tenant not in self._held:
                self._enter(tenant)
        queue.append((item, cost))
        self._costs[tenant] += cost
        self.total_cost += cost
        self._num_items += 1

    def hold(self, tenant: str) -> None:
        """Serve this tenant no more until it is released. Its items wait, and more may be added."""
        if tenant not in self._held:
            self._held.add(tenant)
            self._order = [entry for entry in self._order if entry[2] != tenant]
            heapq.heapify(self._order)

    def release(self, tenant: str) -> None:
        """Serve a tenant again. It starts level with the others."""
        if tenant in self._held:
            self._held.remove(tenant)
            if tenant in self._queues:
                self._enter(tenant)

    def _enter(self, tenant: str) -> None:
        start = max(self._now, self._ends.get(tenant, 0))
        heapq.heappush(self._order, (start, next(self._numbers), tenant))

    def peek(self) -> T:
        """Return the next item, which stays. Raises IndexError if none is ready."""
        return self._queues[self._order[0][2]][0][0]

    def pop(self) -> T:
        """Remove and return the next item. Raises IndexError if none is ready."""
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
