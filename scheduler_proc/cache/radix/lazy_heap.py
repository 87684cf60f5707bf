"""LazyHeap: priority queue whose items change their keys. An outdated entry stays in the heap until it
reaches the top, or until there are so many that rebuilding the heap is cheaper.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

MAX_STALE = 64
"""Number of outdated entries, beyond half the number of valid ones, at which the heap is rebuilt."""

Key = TypeVar("Key", bound=tuple[float, ...])
Item = TypeVar("Item", bound=Hashable)


class LazyHeap(Generic[Key, Item]):
    """Priority queue that holds each item at most once, the lowest key first; among equal keys the item that
    was put in first.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Item]] = []
        self._entries: dict[Item, tuple[Key, int, Item]] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._entries

    def key_of(self, item: Item) -> Key:
        return self._entries[item][0]

    def push(self, item: Item, key: Key) -> None:
        """Put an item in, or change its key."""
        self._num_pushed = number = self._num_pushed + 1
        entry = self._entries[item] = (key, number, item)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > len(self._entries) * 3 // 2 + MAX_STALE:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def put(self, item: Item, key: Key | None) -> None:
        """Put an item in, change its key, leave it as it is, or take it out (key None)."""
        entry = self._entries.get(item)
        if key is None:
            if entry is not None:
                del self._entries[item]
        elif entry is None or entry[0] != key:
            self.push(item, key)

    def discard(self, item: Item) -> None:
        self._entries.pop(item, None)

    def first(self) -> Item | None:
        """Return the item with the lowest key, and leave it in the queue."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            if entries.get(entry[2]) is entry:
                return entry[2]
            heapq.heappop(heap)
        return None

    def first_key(self) -> Key | None:
        return None if self.first() is None else self._heap[0][0]

    def pop(self) -> Item | None:
        """Take out and return the item with the lowest key."""
        item = self.first()
        if item is not None:
            self.drop_first()
        return item

    def drop_first(self) -> None:
        """Take out the item that `first` has just returned."""
        del self._entries[heapq.heappop(self._heap)[2]]
