"""PageCounts: how many pages were allocated, reused, missed and evicted since the start, like TensorRT-LLM's
KvCacheStats.

It counts stays in a row, not requests: a request that is retracted and returns counts again, and finds most
of its pages.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PageCounts:
    """Totals of pages since the start, kept by KVCacheManager alone."""

    num_new: int = 0
    """Pages taken from the free list for rows (allocNewBlocks)."""
    num_reused: int = 0
    """Pages found in the cache when a request got its row (reusedBlocks)."""
    num_missed: int = 0
    """Pages of a request's given tokens that were not found in the cache, the last partly filled one included
    (missedBlocks).
    """
    num_evicted: int = 0
    """Pages evicted because free pages were short."""
    num_flushed: int = 0
    """Pages removed by flush_cache."""

    @property
    def hit_rate(self) -> float:
        """Return reused pages as a share of all pages that requests needed at their start (cacheHitRate)."""
        num_asked = self.num_reused + self.num_missed
        return self.num_reused / num_asked if num_asked else 0.0
