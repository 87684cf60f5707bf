"""PageAllocator: stack of free KV pages. Page 0 is the dummy that padded rows write to; it is never handed
out.

A page has one owner, except that rows of a group may share it; then it becomes free when its last owner frees
it. KVCacheManager.check verifies that no page is freed twice, because it sees every owner.
"""

from __future__ import annotations

import numpy as np

from runtime.wire.format import IntArray

NO_PAGES: IntArray = np.empty(0, np.int32)


class PageAllocator:
    """Stack of the free pages among pages 1 to num_pages. The page freed last is taken first, because its KV
    is most likely still in a device cache.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._stack: IntArray = np.arange(num_pages, 0, -1, dtype=np.int32)
        # Owners of each page beyond the first. Only rows of a group share pages.
        self.num_more_owners: IntArray = np.zeros(num_pages + 1, np.int32)
        self._num_shared = 0

    @property
    def free_pages(self) -> IntArray:
        return self._stack[: self.num_free]

    def try_alloc(self, n: int) -> IntArray | None:
        """Take n pages and return their numbers [n], a view that holds until pages are freed; return None,
        and change nothing, when fewer are free.
        """
        end = self.num_free
        if n > end:
            return None
        self.num_free = start = end - n
        return self._stack[start:end]

    def share(self, pages: IntArray) -> None:
        """Add one owner to each of these distinct pages: `free` must then be called once more for each."""
        self.num_more_owners[pages] += 1
        self._num_shared += len(pages)

    def free(self, pages: IntArray) -> None:
        """Remove one owner from each of these pages, and free those that have no other owner."""
        if self._num_shared:
            pages = self._let_go(pages)
        n = self.num_free + len(pages)
        assert n <= self.num_pages, "a page was freed twice"
        self._stack[self.num_free : n] = pages
        self.num_free = n

    def _let_go(self, pages: IntArray) -> IntArray:
        """Remove one owner from each page, two from a page that is listed twice. Returns the pages without
        owners.
        """
        each, times = np.unique(pages, return_counts=True)
        before = self.num_more_owners[each]
        left = np.maximum(before - times, 0)
        self.num_more_owners[each] = left
        self._num_shared -= int((before - left).sum())
        has_none = times > before
        assert (times[has_none] == before[has_none] + 1).all(), "a page was freed twice"
        return each[has_none]
