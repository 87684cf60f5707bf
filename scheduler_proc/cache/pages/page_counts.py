"""PageCounts: how often pages were taken, found again, computed anew and evicted, since the start.

TensorRT-LLM's KvCacheStats in our words. Counts a stay, not a request: who loses its row and comes back
counts again, and finds most of what it had.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PageCounts:
    """Totals of pages since the start, kept by KVCacheManager alone."""

    num_new: int = 0
    """Pages taken from the free list for a row (allocNewBlocks)."""
    num_reused: int = 0
    """Pages found in the cache when a row was given (reusedBlocks)."""
    num_missed: int = 0
    """Pages of the tokens that a request came to its row with, the last partly filled one included, that were
    not found (missedBlocks).
    """
    num_evicted: int = 0
    """Pages that the cache gave up because pages were short."""
    num_flushed: int = 0
    """Pages that the cache gave up because it was told to."""

    @property
    def hit_rate(self) -> float:
        """Share of the pages that requests came to their rows with that was found (cacheHitRate)."""
        num_asked = self.num_reused + self.num_missed
        return self.num_reused / num_asked if num_asked else 0.0
