"""Ledger: counts each tenant's pages and its entitlement, which decide whose pages are evicted first.

    entitled     its own share of the pool, or an equal part of what the shares of present tenants leave
    present      has leases, or had one within the last IDLE_S seconds; others are entitled to nothing
    protected    a tenant's unused pages within its entitlement

With one tenant nothing is counted. With several, only accounts that have changed are examined again, and all
of them when the pool is divided anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from scheduler_proc.cache.radix.lazy_heap import LazyHeap
from scheduler_proc.cache.radix.radix_node import CacheAccount, LeafAge
from scheduler_proc.cache.tenants import CacheShares, tenant_of

IDLE_S = 600.0
"""Seconds after its last request for which a tenant keeps its cache share. Longer than a pause in a
conversation or between two jobs; otherwise arbitrary.
"""

COARSENESS = 16
"""With more tenants than this, the pool is divided anew only once the number of tenants without a share of
their own has changed by 1/COARSENESS. Dividing takes 2 us per tenant and could otherwise be due with each
newcomer.
"""


class Ledger:
    """Page accounts of all tenants: a CacheAccount for each that has a namespace in the tree."""

    def __init__(self, clock: Callable[[], float], idle_s: float = IDLE_S) -> None:
        self.shares = CacheShares()
        self.pool_pages = 0
        """Number of pages in the pool, to which shares refer."""
        self._seconds = clock
        self._idle_s = idle_s
        self.has_several = False
        """True if several tenants have an account. A plain attribute because every step and admission reads
        it.
        """
        self._accounts: dict[bytes, CacheAccount] = {}
        self._noted: list[CacheAccount] = []  # accounts that have changed
        self._must_divide = True  # a tenant came or went, or its share changed
        self._num_equals = 0  # present, without an own share; below: at the last division
        self._num_divided = 0
        self._equal_part = 0
        self._shares_version = 0
        self._look_at_s = math.inf  # time at which a present tenant may have been away for long enough
        self._with_rows: list[CacheAccount] = []
        self._num_protected = 0
        self.alone: CacheAccount | None = None
        """Account of the tenant that is present if exactly one is, else None. Valid once settled."""
        # Tenants above their share, the one furthest above first, among equals by the first leaf of each; and
        # absent tenants, by that leaf. In both whatever they wanted to retain.
        self._over: LazyHeap[tuple[float, float, float], CacheAccount] = LazyHeap()
        self._idle: LazyHeap[LeafAge, CacheAccount] = LazyHeap()

    def __len__(self) -> int:
        return len(self._accounts)

    def __iter__(self) -> Iterator[CacheAccount]:
        return iter(self._accounts.values())

    # -- changes of accounts --------------------------------------------------------------------------------

    def add_root(self, namespace: bytes) -> CacheAccount:
        """Return the account of the tenant of a namespace that enters the tree."""
        tenant = tenant_of(namespace)
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = CacheAccount(tenant)
            self.has_several = len(self._accounts) > 1
            self._count_present(account, 1)
            if not self._must_divide:
                self._noted.append(account)
                if len(self._noted) > 2 * len(self._accounts):  # tenants come and go meanwhile
                    self._noted = [each for each in self._noted if each.num_roots or each is account]
        account.num_roots += 1
        return account

    def drop_root(self, account: CacheAccount) -> None:
        """Record that a namespace of the account's tenant has left the tree."""
        account.num_roots -= 1
        if not account.num_roots:
            del self._accounts[account.tenant]
            self.has_several = len(self._accounts) > 1
            self._over.discard(account)
            self._idle.discard(account)
            self._num_protected -= account.num_protected
            if not account.is_idle:
                self._count_present(account, -1)

    def note(self, account: CacheAccount) -> None:
        """Mark an account as changed, so that it is examined again before the next answer."""
        if not account.is_noted:
            account.is_noted = True
            self._noted.append(account)

    def note_used(self, account: CacheAccount) -> None:
        """Record that a namespace of the account got its first lease."""
        account.num_used_roots += 1
        if account.is_idle:
            account.is_idle = False
            self._count_present(account, 1)
            self.note(account)

    def note_unused(self, account: CacheAccount) -> None:
        """Record that a namespace of the account lost its last lease."""
        account.num_used_roots -= 1
        if not account.num_used_roots:
            account.left_s = self._seconds()
            self._look_at_s = min(self._look_at_s, account.left_s + self._idle_s)

    def _count_present(self, account: CacheAccount, num_more: int) -> None:
        """Count num_more (1 or -1) present tenants: this account's tenant has come or gone."""
        if self.shares.get(account.tenant) is not None:
            self._must_divide = True
            return
        account.entitled = self._equal_part if num_more > 0 else 0
        self._num_equals += num_more
        change = abs(self._num_equals - self._num_divided)
        self._must_divide |= change > self._num_divided // COARSENESS

    def set_rows(self, accounts: Iterable[CacheAccount], counts: Iterable[int]) -> None:
        """Set the account of each row, and the number of pages that each row holds outside the tree."""
        before = {account: account.num_private for account in self._with_rows}
        for account in self._with_rows:
            account.num_rows = account.num_private = 0
        self._with_rows.clear()
        for account, num_pages in zip(accounts, counts, strict=True):
            if not account.num_rows:
                self._with_rows.append(account)
            account.num_rows += 1
            account.num_private += num_pages
        for account in self._with_rows:
            if before.pop(account, 0) != account.num_private:
                self.note(account)
        for account, num_private in before.items():
            if num_private:
                self.note(account)

    def add_row(self, account: CacheAccount, num_pages: int) -> None:
        """Count one more row of an account."""
        if not account.num_rows:
            self._with_rows.append(account)
        account.num_rows += 1
        self.add_private(account, num_pages)

    def add_private(self, account: CacheAccount, num_pages: int) -> None:
        """Count num_pages more private pages of an account's rows."""
        account.num_private += num_pages
        self.note(account)

    # -- entitlements ---------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Bring all accounts up to date. Call it before asking, and again after any change."""
        if self._look_at_s <= self._seconds():
            self._find_idle()
        if self._must_divide or self._shares_version != self.shares.version:
            self._divide()
            changed: Sequence[CacheAccount] = list(self._accounts.values())
        else:
            changed = self._noted
        for account in changed:
            if account.num_roots:
                self.place(account)
        self._noted = []

    def _find_idle(self) -> None:
        now = self._seconds()
        self._look_at_s = math.inf
        for account in self._accounts.values():
            if account.num_used_roots or account.is_idle:
                continue
            until_s = account.left_s + self._idle_s
            if until_s <= now:
                account.is_idle = True
                self._count_present(account, -1)
                account.entitled = 0
                self.note(account)
            else:
                self._look_at_s = min(self._look_at_s, until_s)

    def _divide(self) -> None:
        """Divide the pool: entitle each present tenant to its part of the pages. Shares that exceed the pool
        together are scaled down.
        """
        own_shares, equals = [], []
        present = [account for account in self._accounts.values() if not account.is_idle]
        self.alone = present[0] if len(present) == 1 else None
        for account in present:
            share = self.shares.get(account.tenant)
            if share is None:
                equals.append(account)
            else:
                own_shares.append((account, share))
        total = sum(share for _, share in own_shares)
        for account, share in own_shares:
            account.entitled = int(share / max(1.0, total) * self.pool_pages)
        self._num_equals = self._num_divided = len(equals)
        # Leaves a part for tenants that may come before the next division: shares never add up to more than
        # the pool.
        num_equals = len(equals) + len(equals) // COARSENESS
        self._equal_part = int(max(0.0, 1.0 - total) * self.pool_pages) // max(1, num_equals)
        for account in equals:
            account.entitled = self._equal_part
        self._must_divide = False
        self._shares_version = self.shares.version

    def place(self, account: CacheAccount) -> None:
        """Put an account at its place in the eviction order, and compute how many of its pages
        are protected.
        """
        account.is_noted = False
        over_key = idle_key = None
        num_protected = 0
        age = account.first_age
        if age is not None:
            if account.is_idle:
                idle_key = age
            else:
                num_protected, num_over = account.num_evictable, account.num_over
                if num_over > 0:
                    ratio = account.num_held / account.entitled if account.entitled else math.inf
                    over_key = (-ratio, *age)
                    num_protected = max(0, num_protected - num_over)
        self._over.put(account, over_key)
        self._idle.put(account, idle_key)
        self._num_protected += num_protected - account.num_protected
        account.num_protected = num_protected

    # -- answers, valid once settled ------------------------------------------------------------------------

    def take_most_over(self) -> CacheAccount | None:
        """Remove from the eviction order and return the account that exceeds its entitlement most, relative
        to its size, among those with an evictable leaf. Among equals the account whose first leaf is oldest.
        Call `place` to put it back.
        """
        return self._over.pop()

    def most_over(self) -> CacheAccount | None:
        """Return the account that `take_most_over` would take. Changes nothing."""
        return self._over.first()

    def first_idle(self) -> CacheAccount | None:
        """Return, of the accounts whose tenants are not present, the one whose first leaf is oldest."""
        return self._idle.first()

    def num_withheld(self, account: CacheAccount) -> int:
        """Return how many evictable pages are within the entitlements of other tenants."""
        return self._num_protected - account.num_protected

    def check(self, counts: Mapping[bytes, Sequence[int]]) -> None:
        """Assert that the accounts agree with the tree, and that unchanged accounts are at their places.
        counts: for each tenant the number of namespaces, of namespaces with leases, of pages, and of locked
        pages.
        """
        assert counts == {
            each.tenant: [each.num_roots, each.num_used_roots, each.num_pages, each.num_locked]
            for each in self
        }, "an account is not what the tree says"
        assert self.has_several == (len(counts) > 1)
        if self._must_divide:
            return
        for account in self:
            if account.is_noted:
                assert account in self._noted, "its change is forgotten"
                continue
            num_within = max(0, account.num_evictable - max(0, account.num_over))
            assert account.num_protected == (0 if account.is_idle else num_within)
            gives = bool(account.leaves) and account.num_over > 0 and not account.is_idle
            assert (account in self._over) == gives, "who is over is not in line"
            assert (account in self._idle) == (account.is_idle and bool(account.leaves))
        assert self._num_protected == sum(account.num_protected for account in self)
