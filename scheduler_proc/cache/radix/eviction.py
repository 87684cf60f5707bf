"""Eviction policies: which unused cached run is evicted first. Each policy is one class; RadixCache asks it
for the rank of a leaf whenever that becomes evictable.

Retention comes before every policy: pages with a lower retention priority go first, whatever their rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from runtime.base.errors import ConfigError
from runtime.base.registry import resolve

logger = logging.getLogger(__name__)

EVICTION_SHARE = 128
"""Fraction 1/EVICTION_SHARE of the pool that is evicted at a time when pages are short. It halves the cost of
eviction in a step that admits 26 prompts of 1,024 tokens (104 to 48 us). On average the cache is smaller by
half of that fraction.
"""
MAX_EVICTION_BITE = 128
"""Maximum number of pages evicted at a time. 1/EVICTION_SHARE of a large pool is hundreds of leaves, for
which one step paid 2.4 ms with 40,000 leaves (benchmarks.bench_eviction, 2 cores, EPYC, 2026-11).
"""


def eviction_bite(num_pages: int) -> int:
    """Return the number of pages to evict at a time from a pool of num_pages."""
    return min(num_pages // EVICTION_SHARE, MAX_EVICTION_BITE)


class CachedRun(Protocol):
    """Properties of a run of pages that a policy may use. Times are those of the tree's own clock: larger is
    later.
    """

    @property
    def created(self) -> int:
        """Time at which its pages entered the cache."""

    @property
    def last_used(self) -> int:
        """Time at which it was last found or written."""

    @property
    def num_hits(self) -> int:
        """Number of requests that used it, not counting the one that computed it."""

    @property
    def request_priority(self) -> int:
        """Highest scheduling priority of the requests that used it."""


class EvictionPolicy(Protocol):
    def rank(self, run: CachedRun) -> float:
        """Return the rank of a run. The lowest rank is evicted first; among equals the least
        recently used.
        """


class LRU:
    """Evicts the least recently used run."""

    def rank(self, run: CachedRun) -> float:
        return 0


class MRU:
    """Evicts the most recently used run. A working set that is read in turns and is larger than the cache
    then still gets hits.
    """

    def rank(self, run: CachedRun) -> float:
        return -run.last_used


class LFU:
    """Evicts the run that the fewest requests reused."""

    def rank(self, run: CachedRun) -> float:
        return run.num_hits


class FIFO:
    """Evicts the oldest run, used or not."""

    def rank(self, run: CachedRun) -> float:
        return run.created


class FILO:
    """Evicts the newest run, used or not."""

    def rank(self, run: CachedRun) -> float:
        return -run.created


class PriorityEviction:
    """Evicts the run that only requests of the lowest scheduling priority used."""

    def rank(self, run: CachedRun) -> float:
        return run.request_priority


class SLRU:
    """Segmented LRU: runs that were never hit go before runs that were, so a scan does not evict shared
    prefixes.
    """

    def rank(self, run: CachedRun) -> float:
        return min(run.num_hits, 1)


EVICTION_POLICIES = {
    name: f"{__name__}:{policy.__name__}"
    for name, policy in {
        "lru": LRU, "lfu": LFU, "fifo": FIFO, "filo": FILO, "mru": MRU,
        "priority": PriorityEviction, "slru": SLRU,
    }.items()
}  # fmt: skip


class Run(NamedTuple):
    """Immutable CachedRun, given to policies of the user's own."""

    created: int
    last_used: int
    num_hits: int
    request_priority: int


class OwnPolicy:
    """Wrapper around an eviction policy of the user's own. Runs that it cannot rank go first, the least
    recently used of them before the others.
    """

    def __init__(self, own: EvictionPolicy) -> None:
        self._own = own
        self._has_failed = False

    def rank(self, run: CachedRun) -> float:
        try:
            return self.checked_rank(Run(run.created, run.last_used, run.num_hits, run.request_priority))
        except Exception:
            if not self._has_failed:
                logger.exception("eviction policy failed; what it cannot rank goes first (said once)")
            self._has_failed = True
            return -math.inf

    def checked_rank(self, run: Run) -> float:
        """Return the policy's rank of a run. Raises whatever the policy does; ValueError when its answer is
        not a number.
        """
        rank = self._own.rank(run)
        if not isinstance(rank, int | float) or math.isnan(rank):
            raise ValueError(f"rank must be a number, got {rank!r}")
        return rank


def make_eviction_policy(name: str, construct: Callable[[Any], Any] = lambda cls: cls()) -> EvictionPolicy:
    """Make an eviction policy by its name, or the user's own as package.module:Class. construct: as in Port.
    Raises ConfigError.
    """
    cls = resolve("radix eviction policy", name, EVICTION_POLICIES)
    if not callable(cls):
        raise ConfigError(f"radix_eviction_policy: {name} is no class with a method rank (docs/kv_cache.md)")
    policy: EvictionPolicy = construct(cls)
    if ":" not in name:
        return policy
    own = OwnPolicy(policy)
    try:
        own.checked_rank(Run(1, 1, 0, 0))
    except Exception as error:
        raise ConfigError(f"radix_eviction_policy: {name} cannot rank a cached run: {error}") from error
    return own
