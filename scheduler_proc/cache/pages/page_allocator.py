"""PageAllocator: the free stack of KV pages. Page 0 is the dummy that padded rows write to and is never
handed out. A page has one owner, but rows of a group may share it: then it is free when the last has let go.

That no page is freed twice is KVCacheManager.check's to say: it sees every owner, this sees one.
"""

from __future__ import annotations

import numpy as np

from runtime.wire.format import IntArray

NO_PAGES: IntArray = np.empty(0, np.int32)


class PageAllocator:
    """Stack of the free ones of pages 1 to num_pages, last freed first out (its KV is the most likely to be
    in a device cache).
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._stack: IntArray = np.arange(num_pages, 0, -1, dtype=np.int32)
        # Owners of each page besides one; rows of a group share pages, nobody else does.
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
        """Give these pages, each there once, one owner more: `free` is then to be called for each of them
        once more.
        """
        self.num_more_owners[pages] += 1
        self._num_shared += len(pages)

    def free(self, pages: IntArray) -> None:
        """Take one owner from each of these pages, and free those that have no other."""
        if self._num_shared:
            pages = self._let_go(pages)
        n = self.num_free + len(pages)
        assert n <= self.num_pages, "a page was freed twice"
        self._stack[self.num_free : n] = pages
        self.num_free = n

    def _let_go(self, pages: IntArray) -> IntArray:
        """Take one owner from each page, from one that stands twice two. Returns those that have none."""
        each, times = np.unique(pages, return_counts=True)
        before = self.num_more_owners[each]
        left = np.maximum(before - times, 0)
        self.num_more_owners[each] = left
        self._num_shared -= int((before - left).sum())
        has_none = times > before
        assert (times[has_none] == before[has_none] + 1).all(), "a page was freed twice"
        return each[has_none]
