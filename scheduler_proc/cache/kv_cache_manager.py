"""KVCacheManager: moves pages between the free list, the prefix cache and rows. Only forks of a beam search
(`group_pages`) do so, too.

Every page is in exactly one of the three. A row's table starts with the pages that the cache owns (its lease
ends exactly there) and goes on with pages private to it:

    table[row]   | shared: num_shared | private: num_shared .. num_pages |
    kv_len       |--------- written by launched plans -------|

Where every layer has a window, a row gives back what no later token sees, all shared pages at once and then
private ones. From then on it shares nothing:

    table[row]   | given back: num_gone | private: num_gone .. num_pages |

The device has a copy of the table that only plans change. Knows nothing of messages, budgets or the step
loop.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from runtime.wire.format import TOKEN_BYTES, IntArray
from scheduler_proc.cache.attention_window import AttentionWindow
from scheduler_proc.cache.base import CacheNode, PrefixCache
from scheduler_proc.cache.pages.page_allocator import PageAllocator
from scheduler_proc.cache.pages.page_counts import PageCounts
from scheduler_proc.cache.pages.page_tables import PageTables
from scheduler_proc.cache.radix.eviction import eviction_bite
from scheduler_proc.cache.share_guard import ShareGuard
from scheduler_proc.core.request import Request
from scheduler_proc.core.row_columns import RowArray, all_of
from scheduler_proc.core.rows import Rows

PageKey: TypeAlias = tuple[int, bytes]
"""Identity of a page that may become cached: the node that it continues, and its tokens."""


class Prefix(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Cached beginning of one request's tokens. Valid until the cache changes, unless `node` is locked."""

    node: CacheNode
    pages: IntArray
    num_pages: int
    num_left: int
    """Tokens of the request that are left to compute; at least one."""
    next_page: PageKey | None
    """The first full page that is not cached; None if there is none, or if nothing is ever shared."""


class KVCacheManager:
    """Pages 1 to num_pages of page_size tokens each, shared by the rows and the cache."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        rows: Rows,
        cache: PrefixCache,
        attention_window: int = 0,
    ) -> None:
        """attention_window: largest number of tokens that any layer sees; 0: some layer sees all."""
        self.page_size = page_size
        self.rows = rows
        self.cache = cache
        self.pages = PageAllocator(num_pages)
        self.counts = PageCounts()
        self._eviction_bite = eviction_bite(num_pages)
        max_pages_a_row = -(-rows.tokens.shape[1] // page_size)
        self.tables = tables = PageTables(rows.max_rows, max_pages_a_row)
        self.guard = ShareGuard(rows, tables, cache, self.pages, page_size)
        self.table, self.num_pages, self.num_pages_of = tables.pages, tables.num_pages, tables.num_pages_of
        self.num_shared, self.num_shared_of = tables.num_shared, tables.num_shared_of
        self.num_gone, self.num_gone_of = tables.num_gone, tables.num_gone_of
        self.window = AttentionWindow(attention_window, page_size) if attention_window else None
        self._computing: set[PageKey] = set()  # next pages of running rows

    @property
    def num_available(self) -> int:
        """Number of pages that a reservation could get now."""
        return self.pages.num_free + self.cache.num_evictable

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def num_held(self, rows: RowArray) -> IntArray:
        """Return the number of pages [n] that each of the rows holds, shared ones included."""
        return self.num_pages[rows] if self.window is None else self.num_pages[rows] - self.num_gone[rows]

    def most_pages(self, rows: RowArray, num_tokens: IntArray) -> IntArray:
        """Return the most pages [n] that each of the rows holds from now until it has num_tokens
        [n] tokens.
        """
        pages = -(-num_tokens // self.page_size)
        if self.window is None:
            return pages
        gone, window = self.num_gone[rows], self.window.num_pages
        first = self.window.most_pages(self.rows.num_given[rows], num_tokens)
        return np.where(gone > 0, np.minimum(pages - gone, window), first)

    def most_pages_of(self, num_given: int, num_tokens: int) -> int:
        """Return the most pages that a request holds until it has num_tokens, if it gets its row with
        num_given tokens.
        """
        if self.window is None:
            return -(-num_tokens // self.page_size)
        return int(self.window.most_pages(num_given, num_tokens))

    # -- pages of a running row -----------------------------------------------------------------------------

    def give_back_unseen(self, rows: RowArray) -> None:
        """Give back pages that neither the next token of these rows nor a later one sees. The rows must be
        `ready`: otherwise guesses may be in flight, whose rejection moves the next token back.

        This is safe because the device runs plans in order: earlier plans read the pages before a new owner
        writes.
        """
        if self.window is None:
            return
        kv_len, gone, shared = self.rows.kv_len[rows], self.num_gone[rows], self.num_shared[rows]
        unseen = self.window.num_unseen(kv_len)
        due = (unseen > gone) & (unseen >= shared) & (kv_len >= self.rows.num_given[rows])
        if not due.any():
            return
        self.guard.is_counted = False
        by_one = due & (unseen == gone + 1) & (shared == 0)  # nearly all
        if by_one.any():
            self.pages.free(self.table[rows[by_one], gone[by_one]])
            self.num_gone[rows[by_one]] += 1
        for i in np.flatnonzero(due & ~by_one).tolist():
            self._give_back(rows.item(i), unseen.item(i))

    def _give_back(self, row: int, upto: int) -> None:
        """Give back the first `upto` pages of a row: shared pages stay with the cache, private ones become
        free.
        """
        num_shared = self.num_shared_of[row]
        if num_shared:
            req = self.rows.holder[row]
            assert req is not None
            root = self.cache.match(b"", 0, req.namespace).node
            self.cache.lock(root)
            self.cache.unlock(req.lease)
            req.lease = root
            self.num_shared_of[row] = 0
        self.pages.free(self.table[row, num_shared or self.num_gone_of[row] : upto])
        self.num_gone_of[row] = upto

    def give_back_rejected(self, rows: RowArray) -> None:
        """Give back the pages behind each row's newest token, which hold rejected guesses only."""
        num_needed = -(-self.rows.num_tokens[rows] // self.page_size)
        has_more = self.num_pages[rows] > num_needed
        for row, num in zip(rows[has_more].tolist(), num_needed[has_more].tolist(), strict=True):
            self.guard.is_counted = False
            self.pages.free(self.tables.cut(row, num))

    def try_reserve_next(self, rows: RowArray, upto: IntArray | None = None) -> bool:
        """Reserve pages for one more token in each of the rows, or for the first `upto` [n] tokens of each,
        evicting if necessary. All or nothing.
        """
        if upto is not None:
            return self._try_reserve_upto(rows, upto)
        have = self.num_pages[rows]
        full = self.rows.kv_len[rows] >= have * self.page_size
        if not all_of(full):
            rows = rows[full]
            have = have[full]
        if not len(rows):
            return True
        pages = self._try_take_pages(len(rows))
        if pages is None:
            return False
        self.guard.is_counted = False
        self.tables.append_one(rows, have, pages)
        return True

    def _try_reserve_upto(self, rows: RowArray, upto: IntArray) -> bool:
        missing = -(-upto // self.page_size) - self.num_pages[rows]
        short = missing > 0
        if not short.any():
            return True
        rows, missing = rows[short], missing[short]
        pages = self._try_take_pages(int(missing.sum()))
        if pages is None:
            return False
        self.guard.is_counted = False
        while len(rows):
            now, pages = pages[: len(rows)], pages[len(rows) :]
            self.tables.append_one(rows, self.num_pages[rows], now)
            missing = missing - 1
            rows, missing = rows[missing > 0], missing[missing > 0]
        return True

    def try_reserve(self, req: Request, upto: int) -> bool:
        """Reserve pages for the first `upto` tokens of req, which holds a row, evicting if necessary. All or
        nothing.
        """
        missing = self.num_pages_for(upto) - self.num_pages_of[req.row]
        if missing <= 0:
            return True
        pages = self._try_take_pages(missing, req.lease)
        if pages is None:
            return False
        self.guard.is_counted = False
        self.tables.extend(req.row, pages)
        return True

    def _try_take_pages(self, n: int, lease: CacheNode = None) -> IntArray | None:
        """Take n free pages, evicting if necessary; None if there are not enough. lease: cache node of the
        row that needs them; None: they are for several rows.
        """
        shortfall = n - self.pages.num_free
        if shortfall > 0:
            if shortfall > self.cache.num_evictable:
                return None
            if self.cache.ledger.has_several:
                evicted = self.guard.evict_for(lease, n, shortfall, self._eviction_bite)
            else:
                evicted = self.cache.evict(shortfall, self._eviction_bite)
            self.counts.num_evicted += len(evicted)
            self.pages.free(evicted)
        self.counts.num_new += n
        return self.pages.try_alloc(n)

    # -- admission ------------------------------------------------------------------------------------------

    def match(self, req: Request) -> Prefix:
        """Return the cached prefix of a waiting request, without positions that it must compute itself. The
        caller must lock the prefix's node or drop the result.
        """
        num_tokens, page_size = len(req.parked) // TOKEN_BYTES, self.page_size
        upto = num_tokens - 1 if num_tokens <= req.wanted_from else req.wanted_from
        found = self.cache.match(req.parked, upto, req.namespace)
        node, pages, num_pages = found.node, found.pages, len(found.pages)
        start = num_pages * page_size
        next_page: PageKey | None = None
        if num_tokens >= start + page_size and self.cache.shares:
            next_page = (node.uid, req.parked[start * TOKEN_BYTES : (start + page_size) * TOKEN_BYTES])
        return Prefix(node, pages, num_pages, num_tokens - start, next_page)

    def match_len(self, req: Request) -> int:
        """Return the number of tokens that `match` would find; changes nothing."""
        return self.cache.match_len(req.parked, min(req.num_tokens - 1, req.wanted_from), req.namespace)

    def match_path(self, req: Request) -> tuple[int, ...]:
        """Return the uids of the nodes on which `match` would find them; changes nothing."""
        return self.cache.match_path(req.parked, min(req.num_tokens - 1, req.wanted_from), req.namespace)

    def still_awaits(self, req: Request) -> bool:
        """Return True while the page that req waits for is still being computed. False if it waits
        for none.
        """
        return req.awaits is not None and req.awaits in self._computing

    def must_await(self, req: Request, prefix: Prefix) -> bool:
        """Return True if req should wait because a running row is about to compute the first page that it
        misses. False if req must compute that page itself.

        A row announces its page from its admission until the page is published or the row is given up, so
        nobody waits longer than that.
        """
        if prefix.next_page not in self._computing:
            return False
        if (prefix.num_pages + 1) * self.page_size > req.wanted_from:
            return False
        req.awaits = prefix.next_page
        return True

    def seat(self, req: Request, prefix: Prefix, num_new: int) -> int:
        """Give req a free row that starts with its cached prefix and has room for num_new more tokens.
        Returns the number of pages taken.

        The lock on prefix.node becomes req's lease. The caller has made sure that there is room.
        """
        num_shared = prefix.num_pages
        start = num_shared * self.page_size
        num_taken = -(-(start + num_new) // self.page_size) - num_shared
        pages = self._try_take_pages(num_taken, prefix.node)
        assert pages is not None
        if num_shared:
            pages = np.concatenate([prefix.pages, pages])
        self.counts.num_reused += num_shared
        self.counts.num_missed += -(-(start + prefix.num_left) // self.page_size) - num_shared
        if num_shared:
            self.cache.note_hit(prefix.node, req.priority)
            if req.retained:
                self.cache.retain(prefix.node, 0, num_shared, req.retained)
        self.rows.acquire(req, start)
        req.lease = prefix.node
        self.tables.start(req.row, num_shared, pages)
        if self.guard.is_counted:
            self.guard.note_seated(prefix.node, num_taken)
        if prefix.next_page is not None:
            self._announce(req, prefix.next_page)
        if req.cached_tokens < 0:
            req.cached_tokens = min(start, req.num_prompt)
        return num_taken

    def _announce(self, req: Request, page: PageKey) -> None:
        """Announce that req computes this page, so that others can wait for it, unless another row computes
        it already.
        """
        if page not in self._computing:
            self._computing.add(page)
            req.computes = page

    def _withdraw(self, req: Request, page: PageKey) -> None:
        """Withdraw the announcement of a page: it is there now, or will not come."""
        self._computing.discard(page)
        req.computes = None

    # -- sharing --------------------------------------------------------------------------------------------

    def publish_prefill(self, req: Request) -> None:
        """Publish the full pages of req's given tokens that launched plans compute. Call it when its plan is
        launched.

        Readers are safe, because their plans come later on the same stream.
        """
        self.publish(req)
        if req.computes is not None:
            self._withdraw(req, req.computes)
            start = self.num_shared_of[req.row] * self.page_size
            end = start + self.page_size
            if end <= req.num_given:
                self._announce(req, (req.lease.uid, self.rows.packed(req.row, start, end).tobytes()))

    def publish(self, req: Request) -> None:
        """Put the full pages that req has computed into the cache. Pages with the same content that other
        requests put there first are shared instead.

        It publishes only tokens that the host knows and whose KV is written by launched plans. Changes: the
        row points at the cache's pages, its duplicates are free, and its lease moves down. This is one
        method, because any part of it alone would lose pages or leave the row reading freed ones.
        """
        row, size, lease, rows = req.row, self.page_size, req.lease, self.rows
        if self.num_gone_of[row]:
            return  # without their beginning, these pages are the KV of no prefix
        first = self.num_shared_of[row]
        upto = min(rows.kv_len_of[row], rows.num_tokens_of[row])
        if req.group is not None:  # its output is a hypothesis, which may never be returned
            upto = min(upto, rows.num_given_of[row])
        upto //= size
        if upto <= first:
            return
        self.guard.is_counted = False
        tokens = rows.packed(row, first * size, upto * size).tobytes()
        done = self.cache.insert(lease, tokens, self.table[row, first:upto], req.priority)
        if len(done.found):
            self._repoint(row, first, done.found)
        self.num_shared_of[row] = first + done.num_owned
        req.lease = done.node
        if req.retained:
            self.cache.retain(done.node, first, first + done.num_owned, req.retained)

    def _repoint(self, row: int, at: int, pages: IntArray) -> None:
        """Point the row at pages that hold the same KV as its own; its own are free at once.

        plan n      row reads its duplicates   (launched before this call)
        this call   entry marked changed, duplicates freed
        plan n+1    first its table writes: the row now reads `pages`
                    then the forward: a new owner may write into the former duplicates
        NOTE: safe because entry and allocation are taken for the same plan at the earliest, and the device
        runs plans in order, tables first. Without the mark the row would go on reading pages of a stranger
        (test_mutants).
        """
        mine = self.table[row, at : at + len(pages)]
        self.pages.free(mine)
        mine[:] = pages
        self.tables.changed(row, at)

    # -- release --------------------------------------------------------------------------------------------

    def release(self, req: Request) -> None:
        """Release the row and pages of a request. The cache keeps the pages that it can use."""
        row = req.row
        if self.rows.kv_len_of[row] // self.page_size > self.num_shared_of[row]:
            self.publish(req)
        if req.computes is not None:
            self._withdraw(req, req.computes)
        self.guard.is_counted = False
        self.pages.free(self.tables.end(row))
        self.cache.unlock(req.lease)
        req.lease = None
        self.rows.release(req)

    def flush(self) -> int:
        """Forget every cached prefix that no row uses. Returns the number of pages freed."""
        pages = self.cache.evict(self.cache.num_evictable)
        self.counts.num_flushed += len(pages)
        self.pages.free(pages)
        return len(pages)

    # -- checks ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that every page is free, in the cache, or
        private to one row, and that leases end where they should.
        """
        self.cache.check()
        running = self.rows.holders()
        private = [self.tables.private(row) for row in self.rows.running.tolist()]
        assert not np.count_nonzero(self.num_gone * self.num_shared), "shares without its head"
        every = np.concatenate([*private, *self.cache.owned_pages(), self.pages.free_pages])
        num_owners = np.bincount(every, minlength=self.pages.num_pages + 1)[1:]
        assert np.count_nonzero(num_owners) == self.pages.num_pages, "a page is lost"
        num_more = self.pages.num_more_owners[1:]
        assert (num_owners == 1 + num_more).all(), "a page has two owners"
        assert not (self.num_pages + self.num_gone)[self.rows.stay == 0].any(), "a free row holds pages"
        assert self._computing == {req.computes for req in running if req.computes is not None}
        if not running:
            assert self.cache.num_evictable == self.cache.num_pages, "a lease was lost"
