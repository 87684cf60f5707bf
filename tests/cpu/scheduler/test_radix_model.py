"""The radix tree agrees with a page-by-page model under every eviction policy and any retention, and the
comparison notices each planted mistake.
"""

from __future__ import annotations

import pytest

from scheduler_proc.cache.ledger import Ledger
from scheduler_proc.cache.radix.eviction import EVICTION_POLICIES, LFU, MRU, SLRU, PriorityEviction
from scheduler_proc.cache.radix.fair_eviction import FairEviction
from scheduler_proc.cache.radix.lazy_heap import LazyHeap
from scheduler_proc.cache.radix.radix_cache import RadixCache
from scheduler_proc.cache.radix.radix_node import Node
from scheduler_proc.cache.tenants import CacheShares
from tests.harness.mutants.mutant_table import Mutant
from tests.harness.mutants.mutants import in_force
from tests.harness.simulation.radix_model import compare

NUM_SEEDS = 4 * len(EVICTION_POLICIES)
NUM_OPS = 1000

MUTANTS = [
    Mutant(
        "a lease does not take it out of line",
        RadixCache,
        "lock",
        "account.leaves.discard(at)",
        "pass",
        0,
    ),
    Mutant("a look does not move it in line", RadixCache, "_walk", "self._queue(node)", "pass", 0),
    Mutant(
        "a split forgets what was retained",
        Node,
        "take_history_of",
        "self.retention = other.retention",
        "pass",
        4,
    ),
    Mutant(
        "a split forgets for how long",
        Node,
        "take_history_of",
        "self.duration_s = other.duration_s",
        "pass",
        0,
    ),
    Mutant("a split forgets the hits", Node, "take_history_of", "self.num_hits = other.num_hits", "pass", 8),
    Mutant(
        "a split forgets when it came", Node, "take_history_of", "self.created = other.created", "pass", 0
    ),
    Mutant("a split does not expire", RadixCache, "_split", "node in self._expiring", "False", 3),
    Mutant("hits are not counted", RadixCache, "_note_hit", "num_hits += 1", "num_hits += 0", 0),
    Mutant("duplicates lower the priority", RadixCache, "_note_hit", "priority > at", "priority < at", 5),
    Mutant("a range ends a page late", RadixCache, "retain", "cut < span.end", "cut <= span.end", 0),
    Mutant(
        "a range is not cut out of a run", RadixCache, "retain", "self._split(at, cut - start)", "pass", 0
    ),
    Mutant("retention reaches above its stay", RadixCache, "retain", "end > first", "end > 0", 47),
    Mutant("what expires does so in use", RadixCache, "lock", "self._expiring.discard(at)", "pass", 0),
    Mutant("what expires keeps its place", RadixCache, "_expire", "self._queue(node)", "pass", 0),
    Mutant("nothing expires", RadixCache, "evict", "self._expire()", "pass", 0),
    Mutant("the gone expire", RadixCache, "_take_from", "self._expiring.discard(leaf)", "pass", 0),
    Mutant("an old entry is taken for a new one", LazyHeap, "first", "is entry:", "is not None:", 0),
    Mutant("least retained last", RadixCache, "_queue", "leaf.retention,", "-leaf.retention,", 0),
    Mutant("mru is lru", MRU, "rank", "-run.last_used", "0", 4),
    Mutant("lfu goes by age", LFU, "rank", "run.num_hits", "run.created", 0),
    Mutant("slru counts", SLRU, "rank", "min(run.num_hits, 1)", "run.num_hits", 13),
    Mutant(
        "priority upside down", PriorityEviction, "rank", "run.request_priority", "-run.request_priority", 5
    ),
    Mutant("the least over gives", Ledger, "place", "(-ratio, *age)", "(ratio, *age)", 4),
    Mutant(
        "what those over retain is dearer",
        Ledger,
        "place",
        "(-ratio, *age)",
        "(-ratio, *account.leaves.first_key())",
        16,
    ),
    Mutant("who is over gives by size", Ledger, "place", "num_held / account.entitled", "num_held / 1", 14),
    Mutant(
        "what is beyond a share protected",
        Ledger,
        "place",
        "max(0, num_protected - num_over)",
        "num_protected",
        0,
    ),
    Mutant("shares beyond everything", Ledger, "_divide", "max(1.0, total)", "1.0", 0),
    Mutant("equal parts of everything", Ledger, "_divide", "max(0.0, 1.0 - total)", "1.0", 0),
    Mutant("nobody is alone", Ledger, "_divide", "len(present) == 1", "False", 0),
    Mutant("nobody is idle", Ledger, "_find_idle", "until_s <= now", "False", 0),
    Mutant("idle for ever", Ledger, "note_used", "account.is_idle = False", "pass", 0),
    Mutant("away since it came", Ledger, "note_unused", "account.left_s = self._seconds()", "pass", 0),
    Mutant("a new share is not noted", CacheShares, "set", "self.version += 1", "pass", 0),
    Mutant(
        "rows of others counted", Ledger, "set_rows", "account.num_rows = account.num_private = 0", "pass", 0
    ),
    Mutant("the idle keep theirs", FairEviction, "_give", "idle_age < age", "False", 0),
    Mutant(
        "what the idle retain is dearer",
        Ledger,
        "place",
        "idle_key = age",
        "idle_key = account.leaves.first_key()",
        8,
    ),
    Mutant(
        "a turn without end", FairEviction, "num_in_turn", "max(PAGES_IN_A_ROW, lead)", "giver.num_over", 30
    ),
    Mutant("a page a turn", FairEviction, "num_in_turn", "max(PAGES_IN_A_ROW, lead)", "max(1, lead)", 6),
    Mutant("a turn beyond the share", FairEviction, "num_in_turn", "min(giver.num_over, ", "max(0, ", 50),
    Mutant("who takes keeps its own", FairEviction, "evict", "last_giver = taker", "pass", 11),
    Mutant("more than is needed", FairEviction, "evict", "missing -= upto - num_pages", "pass", 0),
    Mutant(
        "everybody in any order", FairEviction, "_give_together", "heapq.heapify(line)", "line.reverse()", 0
    ),
]


def compare_all(first: int) -> None:
    for seed in (*range(first, 3 * NUM_SEEDS), *range(first)):
        compare(seed, NUM_OPS)


@pytest.mark.parametrize("policy", range(len(EVICTION_POLICIES)), ids=list(EVICTION_POLICIES))
def test_the_tree_is_what_a_dictionary_of_pages_says(policy: int) -> None:
    for seed in range(policy, NUM_SEEDS, len(EVICTION_POLICIES)):
        compare(seed, NUM_OPS)


@pytest.mark.full
def test_a_million_operations_agree() -> None:
    for seed in range(1000):
        compare(seed, NUM_OPS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_mistake_is_noticed(mutant: Mutant) -> None:
    with in_force(mutant), pytest.raises(AssertionError):
        compare_all(mutant.seed)
