"""FairEviction: order of eviction among tenants.

    1  tenants above their share, down to it: the one most above, relative to its size, a few pages at a time
    2  if that was not enough: the tenant that needs the pages, if these take it above its share
    3  all tenants

At each turn the pages of tenants that are not present compete with those of the giving tenant: of the leaves
that each gives first, the oldest goes. What a tenant retains comes last among its own pages only. While only
one tenant is present, it shares with nobody: step 1 is skipped, and it and the absent tenants give all pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TypeAlias

from runtime.wire.format import IntArray
from scheduler_proc.cache.ledger import Ledger
from scheduler_proc.cache.radix.radix_node import CacheAccount

PAGES_IN_A_ROW = 8
"""Number of pages that the tenant most above its share gives before the next one is determined. Without it a
thousand tenants with equally many pages would give one page each, and cutting up runs would cost more than
the pages are worth.
"""

Take: TypeAlias = Callable[[CacheAccount, int], IntArray]
"""Function that takes up to n pages, at least one, from the first leaf of an account that has one."""


class FairEviction:
    """Eviction from a tree with several tenants. Entitlements are those at the start of an eviction."""

    def __init__(self, ledger: Ledger, take: Take) -> None:
        self._ledger = ledger
        self._take = take

    def evict(self, num_pages: int, upto: int, taker: CacheAccount | None) -> list[IntArray]:
        """Return num_pages evicted pages in runs, and up to `upto` as long as no tenant falls below its
        share; fewer if there are no more. taker: account of the tenant that needs the pages; None: several.
        """
        ledger = self._ledger
        ledger.settle()
        last_giver, missing = ledger.alone, upto
        runs: list[IntArray] = []
        if last_giver is None:
            if taker is not None and taker.num_over > 0:
                last_giver = taker
            while missing > 0 and (giver := ledger.take_most_over()) is not None:
                num_in_turn = self.num_in_turn(giver, ledger.most_over())
                missing -= self._give(giver, num_in_turn, missing, runs)
                self._place(giver)
            missing -= upto - num_pages
        if missing > 0 and last_giver is not None:
            missing -= self._give(last_giver, last_giver.num_evictable, missing, runs)
            while missing > 0 and (idle := ledger.first_idle()) is not None:
                missing -= self._give_leaf(idle, missing, runs)
                self._place(idle)
        if missing > 0:
            self._give_together(missing, runs)
        return runs

    def _give(self, giver: CacheAccount, num_own: int, missing: int, runs: list[IntArray]) -> int:
        """Evict up to num_own pages of the giver, together with pages of absent tenants that are older.
        Returns the number of all pages evicted.
        """
        num_left, left = num_own, missing
        while num_left > 0 and left > 0 and (age := giver.first_age) is not None:
            idle = self._ledger.first_idle()
            idle_age = None if idle is None else idle.first_age
            if idle is not None and idle_age is not None and idle_age < age:
                left -= self._give_leaf(idle, left, runs)
                self._place(idle)
            else:
                num_given = self._give_leaf(giver, min(num_left, left), runs)
                num_left -= num_given
                left -= num_given
        return missing - left

    def num_in_turn(self, giver: CacheAccount, next_one: CacheAccount | None) -> int:
        """Return how many pages the tenant most above its share gives before the next one's turn: until that
        one is as much above its own, but at least PAGES_IN_A_ROW.
        """
        if next_one is None:
            return giver.num_over
        lead = 0
        if next_one.entitled:
            lead = giver.num_held - next_one.num_held * giver.entitled // next_one.entitled
        return min(giver.num_over, max(PAGES_IN_A_ROW, lead))

    def _give_leaf(self, giver: CacheAccount, num_pages: int, runs: list[IntArray]) -> int:
        runs.append(self._take(giver, num_pages))
        return len(runs[-1])

    def _place(self, giver: CacheAccount) -> None:
        if giver.num_roots:
            self._ledger.place(giver)

    def _give_together(self, missing: int, runs: list[IntArray]) -> None:
        line = [
            (age, number, account)
            for number, account in enumerate(self._ledger)
            if (age := account.first_age) is not None
        ]
        heapq.heapify(line)
        while missing > 0 and line:
            _, number, giver = line[0]
            missing -= self._give_leaf(giver, missing, runs)
            age = giver.first_age
            if age is None:
                heapq.heappop(line)
            else:
                heapq.heapreplace(line, (age, number, giver))
