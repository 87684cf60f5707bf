"""ShareGuard: keeps a tenant that exceeds its share from taking other tenants' pages, and says whose rows
give way.

Eviction takes pages from tenants above their share first. That is not enough when running rows hold so much
that only pages within other tenants' shares are left to evict. So a tenant's second and further rows are
admitted, and continue, only while that takes nothing within the shares of others. A tenant's only row may
take everything, so that each request completes in the end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from runtime.wire.format import IntArray
from scheduler_proc.cache.base import CacheNode, PrefixCache
from scheduler_proc.cache.pages.page_allocator import PageAllocator
from scheduler_proc.cache.pages.page_tables import PageTables
from scheduler_proc.cache.radix.radix_node import CacheAccount
from scheduler_proc.core.request import Request
from scheduler_proc.core.row_columns import RowArray
from scheduler_proc.core.rows import Rows


class ShareGuard:
    """Guards the tenants' shares for one KVCacheManager. With one tenant nothing is withheld and no row gives
    way.
    """

    def __init__(
        self, rows: Rows, tables: PageTables, cache: PrefixCache, pages: PageAllocator, page_size: int
    ) -> None:
        self._rows = rows
        self._tables = tables
        self._cache = cache
        self._pages = pages
        self._page_size = page_size
        self._ledger = cache.ledger
        self._ledger.pool_pages = pages.num_pages
        self.shares = self._ledger.shares
        self._grouped: RowArray | None = None
        """Running rows of which _rows_of tells the accounts."""
        self._rows_of: defaultdict[CacheAccount, list[int]] = defaultdict(list)
        self.is_counted = False
        """True while the ledger knows the rows and their private pages. Code that changes these sets it to
        False.
        """

    @property
    def is_needed(self) -> bool:
        """True if there are several tenants."""
        return self._ledger.has_several

    def count_rows(self) -> None:
        """Tell the ledger which account each row belongs to, and how many pages it holds outside the tree."""
        if self.is_counted:
            return
        tables, held = self._tables, self._rows.running
        private = tables.num_pages[held] - np.maximum(tables.num_shared[held], tables.num_gone[held])
        holders = self._rows.holders()
        if len(holders) > self._rows.num_running:
            heads = {id(req): at for at, req in enumerate(holders)}
            for at, req in enumerate(holders):  # a group counts as one row, with the pages of all
                if req.head is not req:
                    private[heads[id(req.head)]] += private[at]
            own = [at for at, req in enumerate(holders) if req.head is req]
            holders, private = [holders[at] for at in own], private[own]
        self._ledger.set_rows([req.lease.account for req in holders], private.tolist())
        self.is_counted = True

    def note_seated(self, node: CacheNode, num_taken: int) -> None:
        """Count the private pages of a row that has just been seated on `node`, if the rows are counted."""
        self._ledger.add_row(node.account, num_taken)

    def evict_for(self, node: CacheNode, num_wanted: int, num_pages: int, upto: int) -> IntArray:
        """Evict as the cache does, for a row with a lease on `node` that will get num_wanted pages. These
        pages count as its tenant's already. node None: for several rows.
        """
        self.count_rows()
        if node is None:
            return self._cache.evict(num_pages, upto)
        self._ledger.add_private(node.account, num_wanted)
        evicted = self._cache.evict(num_pages, upto, node)
        self._ledger.add_private(node.account, -num_wanted)
        return evicted

    def num_withheld(self, node: CacheNode, num_missing: int) -> int:
        """Return how many of the evictable pages a waiting request with a lease on `node` may not use when it
        needs num_missing pages.
        """
        if not self._ledger.has_several or not self.is_beyond_share(node, num_missing):
            return 0
        return self._ledger.num_withheld(node.account)

    def is_beyond_share(self, node: CacheNode, num_missing: int) -> bool:
        """Return True if a waiting request with a lease on `node` takes its tenant beyond its share with
        num_missing pages, and the tenant has other rows.
        """
        if not self.is_needed:
            return False
        self._settle()
        account: CacheAccount = node.account
        return account.num_rows > 0 and account.num_over + num_missing > 0

    def is_within_share(self, account: CacheAccount, num_more: int) -> bool:
        """Return True if the pages that the tenant's requests use, and num_more, are within its share."""
        self._settle()
        return account.num_locked + account.num_private + num_more <= account.entitled

    def waits_for_its_own(self, node: CacheNode, num_more: int) -> bool:
        """Return True if a waiting request with a lease on `node` waits for rows of its own tenant: with
        num_more pages, and all that these rows may take until they end, the tenant would be beyond its share.
        """
        if not self.is_needed:
            return False
        self._settle()
        account, rows = node.account, self._rows
        if not account.num_rows:
            return False
        if not self.is_within_share(account, num_more):  # looks at no row
            return True
        held = self.rows_of(account)
        num_final = -(-rows.max_len[held] // self._page_size)
        num_more += int((num_final - self._tables.num_pages[held]).sum())
        return not self.is_within_share(account, num_more)

    def rows_of(self, account: CacheAccount) -> RowArray:
        """Return the rows that the tenant's requests hold."""
        running = self._rows.running
        if self._grouped is not running:  # another array whenever a row is acquired or released
            self._grouped, self._rows_of = running, defaultdict(list)
            for row, req in zip(running.tolist(), self._rows.holders(), strict=True):
                self._rows_of[req.lease.account].append(row)
        return np.array(self._rows_of.get(account, ()), np.intp)

    def _settle(self) -> None:
        self.count_rows()
        self._ledger.settle()

    def may_grow(self, rows: RowArray | int, upto: IntArray | int) -> bool:
        """Return True if pages for the first `upto` tokens of these running rows take nothing that is
        withheld from any of them. True also if there are not enough pages at all.
        """
        growth = np.atleast_1d(-(-upto // self._page_size) - self._tables.num_pages[rows])
        shortfall = int(np.maximum(growth, 0).sum()) - self._pages.num_free
        if shortfall <= 0 or shortfall > self._cache.num_evictable or not self.is_needed:
            return True
        self._settle()
        num_left = self._cache.num_evictable - shortfall
        num_new: Counter[CacheAccount] = Counter()
        for row, num_pages in zip(np.atleast_1d(rows).tolist(), growth.tolist(), strict=True):
            req = self._rows.holder[row]
            if num_pages > 0 and req is not None:
                num_new[req.lease.account] += num_pages
        return all(
            not account.is_beyond_with(num_pages) or self._ledger.num_withheld(account) <= num_left
            for account, num_pages in num_new.items()
        )

    def victim_candidates(
        self, candidates: Sequence[Request], req: Request, num_new: int
    ) -> Sequence[Request]:
        """Return the candidates that may have to give up a row so that req gets `num_new` pages: those of
        tenants with several rows and more than their share, if there are any, or else all.
        """
        if not self.is_needed:
            return candidates
        self._settle()
        own = req.lease.account
        over = [
            each
            for each in candidates
            if (account := each.lease.account).is_beyond_with(num_new if account is own else 0)
        ]
        return over or candidates
