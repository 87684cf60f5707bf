"""PageAllocator: the free stack of KV pages. Page 0 is the dummy that padded rows write to and is never
handed out.

That no page is freed twice is KVCacheManager.check's to say: it sees every owner, this sees one.
"""

from __future__ import annotations

import numpy as np

from runtime.wire.format import IntArray

NO_PAGES: IntArray = np.empty(0, np.int32)


class PageAllocator:
    """Pages 1 to num_pages, last freed first out (its KV is the most likely to be in a device cache)."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._stack: IntArray = np.arange(num_pages, 0, -1, dtype=np.int32)

    @property
    def free_pages(self) -> IntArray:
        return self._stack[: self.num_free]

    def try_alloc(self, n: int) -> IntArray | None:
        """[n] page numbers, or None (and nothing changed) when fewer are free."""
        if n > self.num_free:
            return None
        self.num_free -= n
        return self._stack[self.num_free : self.num_free + n].copy()

    def free(self, pages: IntArray) -> None:
        n = self.num_free + len(pages)
        assert n <= self.num_pages, "a page was freed twice"
        self._stack[self.num_free : n] = pages
        self.num_free = n
