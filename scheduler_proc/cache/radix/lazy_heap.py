"""LazyHeap: a priority queue of nodes whose keys change. An entry that is no longer true stays in the heap
until it comes up, or until there are so many that throwing them all out is cheaper.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

from scheduler_proc.cache.radix_node import Node

MAX_STALE = 256
"""Untrue entries beyond half of the true ones at which all are thrown out."""

Key = TypeVar("Key", bound=tuple[float, ...])


class LazyHeap(Generic[Key]):
    """Every node at most once, the lowest key first; among equals the one that was put in first."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Node]] = []
        self._entries: dict[Node, tuple[Key, int, Node]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, node: Node) -> bool:
        return node in self._entries

    def key_of(self, node: Node) -> Key:
        return self._entries[node][0]

    def push(self, node: Node, key: Key) -> None:
        """Put it in, or move it to another key."""
        entry = self._entries[node] = (key, next(self._numbers), node)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > len(self._entries) * 3 // 2 + MAX_STALE:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        self._entries.pop(node, None)

    def first(self) -> Node | None:
        """The one with the lowest key, left where it is."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            if entries.get(entry[2]) is entry:
                return entry[2]
            heapq.heappop(heap)
        return None

    def pop(self) -> Node | None:
        """The one with the lowest key, taken out."""
        node = self.first()
        if node is not None:
            heapq.heappop(self._heap)
            del self._entries[node]
        return node
