"""The tenants whose pages go first when several share the cache."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.wire.format import pack_ids
from scheduler_proc.cache.base import CacheNode
from scheduler_proc.cache.ledger import IDLE_S
from scheduler_proc.cache.pages.retained_pages import NO_END, RetainedPages
from scheduler_proc.cache.radix.fair_eviction import PAGES_IN_A_ROW
from scheduler_proc.cache.radix.radix_cache import RadixCache
from scheduler_proc.cache.tenants import OWNER, CacheShares, tenant_of
from tests.harness.scheduler.scheduler_parts import manager, request, seat

A, B, C = b"tenant-A", b"tenant-B", b"tenant-C"


class Cache:
    """A radix tree of pages of one token, in which tenants put prompts that nobody has put before."""

    def __init__(self, pool_pages: int) -> None:
        self.now = 100.0
        self.tree = RadixCache(1, clock=lambda: self.now)
        self.tree.ledger.pool_pages = pool_pages
        self.num_put = 0
        self.tenant_of_page: dict[int, bytes] = {}

    def put(self, tenant: bytes, *lengths: int) -> None:
        """Prompts of so many pages; nobody uses them any more."""
        for length in lengths:
            self.tree.unlock(self.put_and_use(tenant, length))

    def put_and_use(self, tenant: bytes, length: int) -> CacheNode:
        numbers = np.arange(self.num_put, self.num_put + length, dtype=np.int32)
        self.num_put += length
        self.tenant_of_page |= dict.fromkeys(numbers.tolist(), tenant)
        root = self.tree.match(b"", 0, tenant).node
        self.tree.lock(root)
        return self.tree.insert(root, pack_ids(numbers), numbers).node

    def evict(self, num_pages: int, upto: int = 0, lease: CacheNode = None) -> str:
        """The tenants that lose them, a letter for each page."""
        taken = self.tree.evict(num_pages, upto, lease).tolist()
        self.tree.check()
        return "".join(chr(self.tenant_of_page[page][-1]) for page in taken)


def test_the_first_bytes_of_a_namespace_are_its_tenants() -> None:
    assert tenant_of(b"") == OWNER == bytes(8)
    assert tenant_of(OWNER + b"salt") == OWNER
    assert tenant_of(A) == tenant_of(A + b"salt") == A != tenant_of(B + b"salt")


def test_a_share_is_a_number_from_0_to_1() -> None:
    shares = CacheShares()
    for share in (-0.1, 1.01, float("nan")):
        with pytest.raises(ValueError, match=r"share: .* from 0.0 to 1.0, or None"):
            shares.set(A, share)
    shares.set(A, 0.25)
    version = shares.version
    shares.set(A, 0.25)
    shares.set(B, None)
    assert shares.version == version, "nothing has changed"
    shares.set(A, None)
    assert shares.version > version
    assert shares.get(A) is None


def test_who_has_more_than_its_share_gives_first_however_new_its_pages_are() -> None:
    cache = Cache(20)
    cache.put(A, 3)
    cache.put(B, 9, 8)
    assert cache.evict(7) == "B" * 7
    cache.put(A, 7)
    assert cache.evict(4) == "AAAB", "within their shares the least recently used goes first"


def test_salts_of_one_tenant_are_counted_together() -> None:
    cache = Cache(12)
    cache.put(A, 3)
    cache.put(B + b"1", 3)
    cache.put(B + b"2", 3)
    cache.put(B + b"3", 3)
    assert cache.evict(3) == "111"


def test_a_tenant_alone_may_have_everything() -> None:
    cache = Cache(20)
    cache.tree.ledger.shares.set(A, 0.1)
    cache.put(A, 8)
    cache.put(A + b"salt", 8)
    assert cache.evict(1, upto=3) == "AAA"


def test_the_most_over_for_its_size_gives_until_the_next_one_is_as_much_over() -> None:
    cache = Cache(140)
    cache.tree.ledger.shares.set(A, 0.5)
    cache.put(C, 48)  # of 35
    cache.put(B, 56)  # of 35
    cache.put(A, 73)  # of 70
    assert cache.evict(8) == "B" * 8
    assert cache.evict(10) == "C" * PAGES_IN_A_ROW + "BB", "as much over as B, and older"
    assert cache.evict(11) == "B" * 8 + "CCC", "38 and 37 of 35, and 73 of 70"
    assert cache.evict(8) == "BBBCCAAA", "until each has its share"
    assert cache.evict(2) == "CC", "the least recently used"


def test_equal_shares_are_of_what_the_shares_of_those_present_leave() -> None:
    cache = Cache(100)
    cache.tree.ledger.shares.set(A, 0.5)
    cache.tree.ledger.shares.set(b"tenant-X", 0.4)  # not here
    for tenant in (A, B, C):
        cache.put(tenant, 1)
    cache.tree.ledger.settle()
    assert {account.tenant: account.entitled for account in cache.tree.ledger} == {A: 50, B: 25, C: 25}


def test_shares_that_are_more_than_everything_are_scaled_down() -> None:
    cache = Cache(100)
    cache.tree.ledger.shares.set(A, 1.0)
    cache.tree.ledger.shares.set(B, 0.6)
    for tenant in (A, B, C):
        cache.put(tenant, 1)
    cache.tree.ledger.settle()
    assert {account.tenant: account.entitled for account in cache.tree.ledger} == {A: 62, B: 37, C: 0}


def test_more_than_what_is_needed_is_taken_beyond_a_share_only() -> None:
    cache = Cache(20)
    cache.put(A, 8)
    cache.put(B, 12)
    assert cache.evict(1, upto=5) == "BB"
    assert cache.evict(1, upto=5) == "A"


@pytest.mark.parametrize("upto", [4, 5, 99])
def test_what_a_flood_leaves_to_others_does_not_go_for_a_page(upto: int) -> None:
    """Before, an eviction that may take all that is not in use took the whole prefix of a tenant."""
    cache = Cache(20)
    cache.put(A, 4)
    in_use = cache.put_and_use(B, 16)
    assert cache.evict(1, upto=upto, lease=in_use) == "A"
    cache.put(B, 1)
    assert cache.evict(2, upto=upto, lease=in_use) == "BA"


def test_pages_in_use_count_and_do_not_go() -> None:
    cache = Cache(20)
    cache.put(A, 6)
    cache.put(B, 2)
    cache.put_and_use(B, 10)
    assert cache.evict(2) == "BB"
    assert cache.evict(2) == "AA", "nothing of B is left to evict"


def test_private_pages_of_running_rows_count() -> None:
    kv = manager(num_pages=12, page_size=4)
    for number, (namespace, tokens) in enumerate(((A, [1] * 13), (B, [2] * 9))):
        req = request(kv, number, tokens, namespace=namespace)
        seat(kv, req)
        kv.release(req)
    assert kv.cache.num_pages == 3 + 2
    row = request(kv, 7, [3] * 20, namespace=B)
    seat(kv, row)
    assert kv.try_reserve(row, 36), "seven pages were free"
    assert [kv.cache.match_len(pack_ids([n] * 12), 12, of) for n, of in ((1, A), (2, B))] == [12, 0]
    kv.check()


def test_who_wants_more_than_its_share_gives_its_own_before_what_is_within_anothers() -> None:
    cache = Cache(20)
    cache.put(A, 5)
    cache.put(B, 5)
    node = cache.put_and_use(B, 4)
    cache.put_and_use(C, 6)
    cache.tree.ledger.shares.set(C, 0.0)
    ledger = cache.tree.ledger
    ledger.add_private(node.account, 4)
    assert cache.evict(4, lease=node) == "BBBB"
    ledger.add_private(node.account, -4)
    assert cache.evict(1, lease=node) == "A", "it is below its share: the least recently used goes"


def test_what_a_flood_retains_is_evicted_before_what_is_within_anothers_share() -> None:
    cache = Cache(20)
    cache.put(A, 4)
    node = cache.put_and_use(B, 16)
    cache.tree.retain(node, 0, 16, [RetainedPages(0, NO_END, 100, 0.0)])
    cache.tree.unlock(node)
    assert cache.evict(6) == "B" * 6


def test_who_has_been_away_for_long_is_entitled_to_nothing_until_it_comes_back() -> None:
    cache = Cache(20)
    cache.put(A, 6)
    cache.now += IDLE_S - 1
    cache.put(B, 6, 8)
    assert cache.evict(1) == "B"
    cache.now += 2
    assert cache.evict(8) == "AAAAAABB", "in line with the flood, and older"
    cache.put(A, 9)
    cache.put(B, 5)
    assert cache.evict(3) == "BBB", "it is back"


def test_what_a_tenant_retains_is_no_dearer_to_others_when_it_is_away() -> None:
    """It kept what it had for ever, and others that came could cache what was left of the pool."""
    cache = Cache(20)
    for tenant in (A, C):
        node = cache.put_and_use(tenant, 3)
        cache.tree.retain(node, 0, 3, [RetainedPages(0, 2, 100, 0.0)])
        cache.tree.unlock(node)
    cache.put(B, 13)
    cache.now += IDLE_S + 1
    cache.put(B, 1)
    assert cache.evict(7) == "AAACCCB"


def test_what_a_tenant_retains_beyond_its_share_is_no_dearer_to_others() -> None:
    """A tenant that is entitled to nothing gave what it retained after all others like it."""
    cache = Cache(20)
    cache.tree.ledger.shares.set(A, 1.0)
    cache.put(A, 3)
    node = cache.put_and_use(B, 3)
    cache.tree.retain(node, 0, 3, [RetainedPages(0, 3, 100, 0.0)])
    cache.tree.unlock(node)
    cache.put(C, 3)
    assert cache.evict(4) == "BBBC"


def test_everything_goes_in_any_order() -> None:
    cache = Cache(20)
    cache.put(A, 6)
    cache.put(B, 14)
    assert sorted(cache.evict(99)) == ["A"] * 6 + ["B"] * 14
    assert len(cache.tree.ledger) == 0
