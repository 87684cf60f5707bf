"""Which of the cached runs that nobody uses goes first. One class a policy; RadixCache asks for the rank of a
leaf whenever it becomes evictable.

A request's retention goes before all of them: what is retained at a lower priority goes first, whatever its
rank.
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
"""Part of the pool that is evicted at a time when pages are short: it halves what eviction costs a step that
admits 26 prompts of 1,024 tokens (104 to 48 us), and the cache is smaller by half of it on average.
"""
MAX_EVICTION_BITE = 128
"""Most pages evicted at a time. EVICTION_SHARE of a large pool is hundreds of leaves, for all of which one
step paid: 2.4 ms with 40,000 leaves (benchmarks.bench_eviction, 2 cores, EPYC, 2026-11).
"""


def eviction_bite(num_pages: int) -> int:
    """Pages to evict at a time from a pool of num_pages."""
    return min(num_pages // EVICTION_SHARE, MAX_EVICTION_BITE)


class CachedRun(Protocol):
    """Facts that a policy may know of a run of pages. Times are those of the tree's own clock: larger is
    later.
    """

    @property
    def created(self) -> int:
        """Time at which its pages came into the cache."""

    @property
    def last_used(self) -> int:
        """Time at which it was last found, or written."""

    @property
    def num_hits(self) -> int:
        """Number of requests that used it, not counting the one that computed it."""

    @property
    def request_priority(self) -> int:
        """Highest scheduling priority of the requests that used it."""


class EvictionPolicy(Protocol):
    def rank(self, run: CachedRun) -> float:
        """Return the rank of a run: the lowest goes first; among equals the least recently used."""


class LRU:
    """Eviction of the run that was used least recently."""

    def rank(self, run: CachedRun) -> float:
        return 0


class MRU:
    """Eviction of the run that was used most recently: what is read in turns, and is larger than the cache,
    then keeps hitting.
    """

    def rank(self, run: CachedRun) -> float:
        return -run.last_used


class LFU:
    """Eviction of the run that the fewest requests used again."""

    def rank(self, run: CachedRun) -> float:
        return run.num_hits


class FIFO:
    """Eviction of the oldest run, used or not."""

    def rank(self, run: CachedRun) -> float:
        return run.created


class FILO:
    """Eviction of the newest run, used or not."""

    def rank(self, run: CachedRun) -> float:
        return -run.created


class PriorityEviction:
    """Eviction of the run that only requests of low scheduling priority used."""

    def rank(self, run: CachedRun) -> float:
        return run.request_priority


class SLRU:
    """Eviction by segmented LRU: what was never hit goes before what was, so a scan does not push out what is
    shared.
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
    """A CachedRun that cannot be changed, for policies of the user's own."""

    created: int
    last_used: int
    num_hits: int
    request_priority: int


class OwnPolicy:
    """Eviction policy of the user's own; what it cannot rank goes first, the least recently used of it before
    the rest.
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
    """Make an eviction policy by its name, or the user's own as package.module:Class. `construct`: as Port's.
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
