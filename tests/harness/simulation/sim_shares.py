"""Watch of every eviction of a run: the tenant that lost pages, the one that should have, and for whom. It
counts from the tree and the rows, without the accounts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from runtime.wire.format import IntArray
from scheduler_proc.cache.base import CacheNode
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.cache.radix.radix_cache import RadixCache
from scheduler_proc.cache.radix.radix_node import Node
from scheduler_proc.cache.tenants import CacheShares, tenant_of
from scheduler_proc.core.request import Request


class Holdings:
    """Pages of each tenant, and its rows."""

    def __init__(self, kv: KVCacheManager, cache: RadixCache) -> None:
        self.held: Counter[bytes] = Counter()
        self.evictable: Counter[bytes] = Counter()
        self.rows: Counter[bytes] = Counter()
        for node in cache.nodes():
            tenant = tenant_of(root_of(node).namespace)
            self.held[tenant] += len(node.pages)
            self.evictable[tenant] += 0 if node.lock else len(node.pages)
        for req in kv.rows.running_requests():
            self.held[tenant_of(req.namespace)] += len(kv.tables.private(req.row))
            self.rows[tenant_of(req.namespace)] += 1


def root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


def entitled(num_pages: int, tenants: set[bytes], shares: CacheShares) -> dict[bytes, int]:
    """Pages that each of the tenants present is entitled to."""
    own = {tenant: Fraction(share) for tenant in tenants if (share := shares.get(tenant)) is not None}
    total = sum(own.values(), Fraction(0))
    pages = {tenant: int(share / max(Fraction(1), total) * num_pages) for tenant, share in own.items()}
    others = tenants - set(own)
    rest = int(max(Fraction(0), 1 - total) * num_pages)
    return pages | {tenant: rest // len(others) for tenant in others}


class SharesWatch:
    """Stands before `evict` of a manager's cache, and before those of the manager's methods that lead to it.

    retracts: the capacity policy takes rows back, so nobody goes on at the cost of others' shares.
    """

    def __init__(self, kv: KVCacheManager, *, retracts: bool) -> None:
        self._kv = kv
        self._retracts = retracts
        self._for: Request | None = None
        """Request for which pages are taken now; None if for several, or if nobody knows."""
        self._num_wanted = 0
        self.num_within = 0
        """Evictions that took pages within a tenant's share, for want of others."""
        self.num_over = 0
        """Evictions that took pages of tenants over theirs alone, while others had some."""
        if not isinstance(kv.cache, RadixCache):
            return
        self._cache = kv.cache
        self._evict = kv.cache.evict
        kv.cache.evict = self.evict  # type: ignore[method-assign]
        kv.seat = self._noting(kv.seat)  # type: ignore[method-assign]
        kv.try_reserve = self._noting(kv.try_reserve)  # type: ignore[method-assign]
        self._try_take_pages = kv._try_take_pages
        kv._try_take_pages = self.try_take_pages  # type: ignore[method-assign]

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The same method, which leads to evictions for its first argument."""

        def noted(req: Request, *args: Any) -> Any:
            self._for = req
            try:
                return method(req, *args)
            finally:
                self._for = None

        return noted

    def try_take_pages(self, n: int, lease: CacheNode = None) -> IntArray | None:
        self._num_wanted = n
        return self._try_take_pages(n, lease)

    def evict(self, num_pages: int, upto: int = 0, lease: CacheNode = None) -> IntArray:
        kv, cache = self._kv, self._cache
        before = self._holdings()
        tenants = {tenant_of(namespace) for namespace in cache._roots}
        due = entitled(kv.pages.num_pages, tenants, kv.guard.shares)
        taken = self._evict(num_pages, upto, lease)
        num_evictable = sum(before.evictable.values())
        assert len(taken) >= min(num_pages, num_evictable)
        if len(tenants) < 2 or num_pages >= num_evictable:
            return taken
        after = self._holdings()
        losers = {tenant for tenant in tenants if after.held[tenant] < before.held[tenant]}
        below = {tenant for tenant in losers if after.held[tenant] < due[tenant]}
        over = {tenant for tenant in tenants if after.held[tenant] > due[tenant] and after.evictable[tenant]}
        if below:
            assert not over, "a tenant lost what was its share while another had more than its own"
            assert len(taken) <= num_pages, "more than was needed, from within a tenant's share"
            self._check_taker(before, below, due)
        self.num_within += bool(below)
        self.num_over += not below and any(before.evictable[tenant] for tenant in tenants - losers)
        return taken

    def _holdings(self) -> Holdings:
        """With what is about to be taken."""
        holdings = Holdings(self._kv, self._cache)
        if self._for is not None:
            holdings.held[tenant_of(self._for.namespace)] += self._num_wanted
        return holdings

    def _check_taker(self, before: Holdings, below: set[bytes], due: dict[bytes, int]) -> None:
        """Assert that a row takes pages within the shares of others only within its own, or to run at all."""
        req = self._for
        if req is None or below == {tenant_of(req.namespace)}:
            return
        tenant, is_newcomer = tenant_of(req.namespace), req.row < 0
        if not is_newcomer and not self._retracts:
            return  # it was promised these pages when they were not there yet, or nobody's
        if before.rows[tenant] + is_newcomer > 1:
            assert before.held[tenant] <= due[tenant], "a flood takes what is within another tenant's share"
