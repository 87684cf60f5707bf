"""KVCacheManager: the only code that moves pages between the free list, the prefix cache and rows.

Every page is in exactly one of the three. A row's table starts with the pages that the cache owns (its lease
ends exactly there) and goes on with pages private to it:

    table[row]   | shared: num_shared | private: num_shared .. num_pages |
    kv_len       |--------- written by launched plans -------|

The device has a copy of the table that only plans change. Knows nothing of messages, budgets or the step
loop.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from runtime.wire import TOKEN_BYTES, IntArray
from scheduler_proc.cache.base import NO_PAGES, CacheNode, PrefixCache
from scheduler_proc.cache.page_allocator import PageAllocator
from scheduler_proc.request import Request
from scheduler_proc.rows import RowArray, Rows

CLEAN = np.iinfo(np.int32).max

EVICTION_SHARE = 128
"""When pages are short, this part of the pool is evicted at a time: it halves what eviction costs a step that
admits 26 prompts of 1,024 tokens (104 to 48 us), and the cache is smaller by half of it on average.
"""

PageKey: TypeAlias = tuple[int, bytes]
"""A page that may come to be cached: the node it continues, and its tokens."""


class Prefix(NamedTuple):
    """What is cached of one request's tokens. Valid until the cache changes, unless `node` is locked."""

    node: CacheNode
    pages: IntArray
    num_pages: int
    num_left: int
    """Tokens of the request that are left to compute; at least one."""
    next_page: PageKey | None
    """The first full page that is not cached; None when there is none, or when nothing is ever shared."""


class TableWrites(NamedTuple):
    """Packed int32: [num_spans, 3] (row, start, n), and the pages of all spans in order."""

    spans: bytes
    pages: bytes


class KVCacheManager:
    """Pages 1 to num_pages of page_size tokens each, shared by the rows and the cache."""

    def __init__(self, num_pages: int, page_size: int, rows: Rows, cache: PrefixCache) -> None:
        self.page_size = page_size
        self.rows = rows
        self.cache = cache
        self.pages = PageAllocator(num_pages)
        self._eviction_bite = num_pages // EVICTION_SHARE
        max_pages_a_row = -(-rows.tokens.shape[1] // page_size)
        self.table: IntArray = np.zeros((rows.max_rows, max_pages_a_row), np.int32)
        self.num_pages: IntArray = np.zeros(rows.max_rows, np.int32)
        # How many of them, from the first on, the cache owns.
        self.num_shared: IntArray = np.zeros(rows.max_rows, np.int32)
        # First entry that the device was not told of.
        self._dirty_from: IntArray = np.full(rows.max_rows, CLEAN, np.int32)
        self._copies: list[tuple[int, int, int]] = []  # row, source page, target page
        self._computing: set[PageKey] = set()  # next pages of running rows

    @property
    def num_available(self) -> int:
        """Pages that a reservation could get now."""
        return self.pages.num_free + self.cache.num_evictable

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    # -- more room for a row --------------------------------------------------------------------------------

    def try_reserve_next(self, rows: RowArray) -> bool:
        """Room for one more token in each of the rows, evicting if need be. All or nothing."""
        have = self.num_pages[rows]
        full = self.rows.kv_len[rows] >= have * self.page_size
        if not full.all():
            rows = rows[full]
            have = have[full]
        if not len(rows):
            return True
        pages = self._try_take_pages(len(rows))
        if pages is None:
            return False
        self.table[rows, have] = pages
        self.num_pages[rows] = have + 1
        self._dirty_from[rows] = np.minimum(self._dirty_from[rows], have)
        return True

    def try_reserve(self, req: Request, upto: int) -> bool:
        """Room for the first `upto` tokens of req, which holds a row; evicts if need be. All or nothing."""
        missing = self.num_pages_for(upto) - self.num_pages.item(req.row)
        if missing <= 0:
            return True
        pages = self._try_take_pages(missing)
        if pages is None:
            return False
        self._extend(req.row, pages)
        return True

    def _try_take_pages(self, n: int) -> IntArray | None:
        shortfall = n - self.pages.num_free
        if shortfall > 0:
            if shortfall > self.cache.num_evictable:
                return None
            self.pages.free(self.cache.evict(max(shortfall, self._eviction_bite)))
        return self.pages.try_alloc(n)

    def _extend(self, row: int, pages: IntArray) -> None:
        at = self.num_pages.item(row)
        self.table[row, at : at + len(pages)] = pages
        self.num_pages[row] = at + len(pages)
        self._changed(row, at)

    def _changed(self, row: int, at: int) -> None:
        if at < self._dirty_from.item(row):
            self._dirty_from[row] = at

    # -- admission ------------------------------------------------------------------------------------------

    def match(self, req: Request) -> Prefix:
        """What is cached of a waiting request, but for the positions that it must compute. Lock its node, or
        forget it.
        """
        num_tokens, page_size = req.num_tokens, self.page_size
        upto = num_tokens - 1 if num_tokens <= req.wanted_from else req.wanted_from
        node, pages = self.cache.match(req.parked, upto, req.namespace)
        num_pages = len(pages)
        start = num_pages * page_size
        next_page: PageKey | None = None
        if num_tokens >= start + page_size and self.cache.shares:
            next_page = (node.uid, req.parked[start * TOKEN_BYTES : (start + page_size) * TOKEN_BYTES])
        return Prefix(node, pages, num_pages, num_tokens - start, next_page)

    def match_len(self, req: Request) -> int:
        """Tokens that `match` would find; changes nothing."""
        return self.cache.match_len(req.parked, min(req.num_tokens - 1, req.wanted_from), req.namespace)

    def match_path(self, req: Request) -> tuple[int, ...]:
        """The uids of the nodes on which `match` would find them; changes nothing."""
        return self.cache.match_path(req.parked, min(req.num_tokens - 1, req.wanted_from), req.namespace)

    def still_awaits(self, req: Request) -> bool:
        """Whether the page that req waits for is still being computed. False also when it waits for none."""
        return req.awaits is not None and req.awaits in self._computing

    def must_await(self, req: Request, prefix: Prefix) -> bool:
        """Whether a running row is about to compute the first page that req misses; then req is better off
        waiting, unless it must compute that page itself.

        A row says so from its admission until the page is published or the row is given up, so nobody waits
        for longer than that.
        """
        if prefix.next_page not in self._computing:
            return False
        if (prefix.num_pages + 1) * self.page_size > req.wanted_from:
            return False
        req.awaits = prefix.next_page
        return True

    def seat(self, req: Request, prefix: Prefix, num_new: int) -> int:
        """Give req a free row that starts with its cached prefix and has room for num_new more tokens.

        The lock on prefix.node becomes req's lease. The caller has made sure that there is room. Returns: the
        number of pages it took.
        """
        num_shared = prefix.num_pages
        start = num_shared * self.page_size
        num_taken = -(-(start + num_new) // self.page_size) - num_shared
        pages = self._try_take_pages(num_taken)
        assert pages is not None
        if num_shared:
            pages = np.concatenate([prefix.pages, pages])
        self.rows.acquire(req, start)
        self._start_stay(req, prefix.node, num_shared, pages)
        if prefix.next_page is not None:
            self._announce(req, prefix.next_page)
        if req.cached_tokens < 0:
            req.cached_tokens = min(start, req.num_prompt)
        return num_taken

    def _start_stay(self, req: Request, lease: CacheNode, num_shared: int, pages: IntArray) -> None:
        row, num_pages = req.row, len(pages)
        req.lease = lease
        self.num_shared[row] = num_shared
        self.table[row, :num_pages] = pages
        self.num_pages[row] = num_pages
        self._dirty_from[row] = 0

    def _announce(self, req: Request, page: PageKey) -> None:
        """Let others wait for the page that req is about to compute, if nobody else computes it."""
        if page not in self._computing:
            self._computing.add(page)
            req.computes = page

    def _withdraw(self, req: Request, page: PageKey) -> None:
        """The page that req announced is there, or will not come."""
        self._computing.discard(page)
        req.computes = None

    # -- sharing --------------------------------------------------------------------------------------------

    def publish_prefill(self, req: Request) -> None:
        """Publish what launched plans compute of the tokens that req came with. Call it when its plan is
        launched.

        Readers are safe: their plans come later on the same stream.
        """
        self.publish(req)
        if req.computes is not None:
            self._withdraw(req, req.computes)
            start = self.num_shared.item(req.row) * self.page_size
            end = start + self.page_size
            if end <= req.num_given:
                self._announce(req, (req.lease.uid, self.rows.tokens[req.row, start:end].tobytes()))

    def publish(self, req: Request) -> None:
        """Put the full pages of what req computed into the cache; share those that others put there first.

        Only tokens that the host knows and whose KV launched plans write. Changes: the row points at the
        cache's pages, its duplicates are free, its lease moves down. One step, because any part of it alone
        would lose pages or leave the row reading freed ones.
        """
        row, size, lease, rows = req.row, self.page_size, req.lease, self.rows
        first = self.num_shared.item(row)
        upto = min(rows.kv_len.item(row), rows.num_tokens.item(row)) // size
        if upto <= first:
            return
        tokens = rows.tokens[row, first * size : upto * size].tobytes()
        done = self.cache.insert(lease, tokens, self.table[row, first:upto])
        if len(done.found):
            self._repoint(row, first, done.found)
        self.num_shared[row] = first + done.num_owned
        self.cache.move_lock(lease, done.node)
        req.lease = done.node

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
        self._changed(row, at)

    # -- the end of a stay ----------------------------------------------------------------------------------

    def release(self, req: Request) -> None:
        """Take back row and pages. What the cache can use of them it keeps."""
        self.publish(req)
        if req.computes is not None:
            self._withdraw(req, req.computes)
        row = req.row
        self.pages.free(self.table[row, self.num_shared.item(row) : self.num_pages.item(row)])
        self.num_pages[row] = 0
        self._dirty_from[row] = CLEAN
        if self._copies:
            self._copies = [copy for copy in self._copies if copy[0] != row]
        self.cache.unlock(req.lease)
        req.lease = None
        self.rows.release(req)

    def try_fork(self, source: Request, child: Request) -> bool:
        """Give a waiting child a row that continues source: full pages shared, the page in progress copied on
        the device.

        Nothing of source may be in flight. Returns: False when no row or page is left; then nothing has
        changed.
        """
        assert not source.num_in_flight
        self.publish(source)
        num_full, tail = divmod(source.kv_len, self.page_size)
        if not self.rows.num_free or self.num_shared.item(source.row) != num_full:
            return False
        copy = self._try_take_pages(1) if tail else NO_PAGES
        if copy is None:
            return False
        self.cache.lock(source.lease)
        self.rows.acquire(child, source.kv_len)
        pages = np.concatenate([self.table[source.row, :num_full], copy])
        self._start_stay(child, source.lease, num_full, pages)
        if tail:
            self._copies.append((child.row, self.table.item(source.row, num_full), copy.item(0)))
        return True

    def flush(self) -> int:
        """Forget every cached prefix that no row uses. Returns the number of pages freed."""
        pages = self.cache.evict(self.cache.num_evictable)
        self.pages.free(pages)
        return len(pages)

    # -- what the device must be told, once per plan --------------------------------------------------------

    def take_page_copies(self) -> tuple[tuple[int, int], ...]:
        """(source, target) pages to copy before the tables change, to be done in this order."""
        copies = tuple((source, target) for _, source, target in self._copies)
        self._copies.clear()
        return copies

    def take_table_writes(self) -> TableWrites:
        """Every changed row from its first changed entry on.

        They are read from the table now: however often an entry changed since the last plan, the device sees
        it written once, and what an earlier tenant left unsaid is never said.
        """
        rows = np.flatnonzero(self._dirty_from < self.num_pages)
        if not len(rows):
            return TableWrites(b"", b"")
        spans = np.empty((len(rows), 3), np.int32)
        starts = self._dirty_from[rows]
        lens = self.num_pages[rows] - starts
        self._dirty_from[rows] = CLEAN
        one = lens == 1  # nearly all: decodes that crossed into a new page
        num_ones = np.count_nonzero(one)
        if num_ones < len(rows):
            order = np.argsort(~one, kind="stable")
            rows = rows[order]
            starts = starts[order]
            lens = lens[order]
        spans[:, 0] = rows
        spans[:, 1] = starts
        spans[:, 2] = lens
        pages = [self.table[rows[:num_ones], starts[:num_ones]]]
        pages += [self.table[row, start : start + n] for row, start, n in spans[num_ones:].tolist()]
        return TableWrites(spans.tobytes(), np.concatenate(pages).tobytes())

    # -- checks ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that every page is free, in the cache, or
        private to one row, and that leases end where they should.
        """
        self.cache.check()
        running = self.rows.running_requests()
        private = [self.table[row, self.num_shared[row] : self.num_pages[row]] for row in self.rows.running]
        every = np.concatenate([*private, *self.cache.owned_pages(), self.pages.free_pages])
        assert len(every) == self.pages.num_pages, f"{self.pages.num_pages - len(every)} pages lost"
        assert len(np.unique(every)) == len(every), "a page has two owners"
        assert not self.num_pages[self.rows.tenancy == 0].any(), "a free row holds pages"
        assert self._computing == {req.computes for req in running if req.computes is not None}
        if not running:
            assert self.cache.num_evictable == self.cache.num_pages, "a lease was lost"
