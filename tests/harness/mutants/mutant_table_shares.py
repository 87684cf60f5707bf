"""Planted mistakes in the division of the cache among tenants: see tests.harness.mutants.mutant_table."""

from __future__ import annotations

from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.cache.ledger import Ledger
from scheduler_proc.cache.radix.fair_eviction import FairEviction
from scheduler_proc.cache.radix.radix_cache import RadixCache
from scheduler_proc.cache.share_guard import ShareGuard
from scheduler_proc.capacity.max_utilization import MaxUtilization
from scheduler_proc.capacity.no_evict import GuaranteedNoEvict
from tests.harness.mutants.mutant_table import Mutant

SHARED = {
    "num_tenants": 3,
    "cache": "radix",
    "policy": "fcfs",
    "request_scheduler": "",
    "capacity": "max_utilization",
    "page_size": 4,
    "num_pages": 40,
    "max_rows": 8,
    "max_len": 88,
    "max_output": 60,
    "expiring": 0.0,
}
NO_EVICT = SHARED | {"capacity": "guaranteed_no_evict"}
LARGE = SHARED | {"page_size": 1, "num_pages": 260}

SHARES_MUTANTS = [
    Mutant("nobody is ever over its share", Ledger, "place", "num_over > 0", "False", 0, changes=SHARED),
    Mutant(
        "whoever is over gives what is its share as well",
        FairEviction,
        "num_in_turn",
        "return min(giver.num_over, ",
        "return max(giver.num_evictable, ",
        0,
        changes=SHARED,
    ),
    Mutant(
        "more taken than is needed from within shares",
        FairEviction,
        "evict",
        "missing -= upto - num_pages",
        "pass",
        0,
        changes=LARGE,
    ),
    Mutant(
        "private pages do not count",
        ShareGuard,
        "count_rows",
        "private.tolist()",
        "[0] * len(accounts)",
        0,
        changes=SHARED,
    ),
    Mutant(
        "private pages counted once",
        KVCacheManager,
        "try_reserve_next",
        "self.guard.is_counted = False",
        "pass",
        1,
        changes=SHARED,
    ),
    Mutant(
        "pages given back still count",
        KVCacheManager,
        "release",
        "self.guard.is_counted = False",
        "pass",
        34,
        changes=SHARED,
    ),
    Mutant(
        "published pages count twice",
        KVCacheManager,
        "publish",
        "self.guard.is_counted = False",
        "pass",
        1,
        changes=SHARED,
    ),
    Mutant(
        "the pages of a newcomer do not count",
        KVCacheManager,
        "seat",
        "self.guard.note_seated(prefix.node, num_taken)",
        "pass",
        0,
        changes=SHARED,
    ),
    Mutant(
        "what is wanted does not count yet",
        ShareGuard,
        "evict_for",
        "node.account, num_wanted",
        "node.account, 0",
        0,
        changes=SHARED,
    ),
    Mutant(
        "a change in use is not noted",
        RadixCache,
        "lock",
        "self.ledger.note(account)",
        "pass",
        0,
        changes=SHARED,
    ),
    Mutant(
        "a change of what may go is not noted",
        RadixCache,
        "unlock",
        "self.ledger.note(account)",
        "pass",
        0,
        changes=SHARED,
    ),
    Mutant(
        "what was evicted is not noted",
        RadixCache,
        "_count_taken",
        "self.ledger.note(account)",
        "pass",
        0,
        changes=SHARED,
    ),
    Mutant(
        "shares of who has gone are kept for it",
        Ledger,
        "drop_root",
        "self._count_present(account, -1)",
        "pass",
        12,
        changes=SHARED,
    ),
    Mutant(
        "a flood is admitted at the cost of others",
        MaxUtilization,
        "try_promise",
        "room -= self._kv.guard.num_withheld(prefix.node, num_missing)",
        "pass",
        0,
        changes=SHARED,
    ),
    Mutant(
        "a flood is promised the shares of others",
        GuaranteedNoEvict,
        "try_promise",
        " - num_withheld",
        "",
        0,
        changes=NO_EVICT,
    ),
    Mutant(
        "a flood grows at the cost of others",
        ShareGuard,
        "may_grow",
        "<= num_left",
        ">= 0",
        0,
        changes=SHARED,
    ),
]
