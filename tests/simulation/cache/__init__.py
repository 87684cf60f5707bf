"""Eviction and shares of the cache, in a scheduler that runs. The tree by itself: tests/unit/cache."""
