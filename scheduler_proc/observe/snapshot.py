"""Snapshot: what the scheduler holds at this moment: rows, who waits and why, pages, the radix tree.

Columns, so that its cost is small and bounded whatever waits or is cached: no step holds its breath for it.
Without a token, a text, a label, or a client's id, which is a capability.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from msgspec import Struct

from scheduler_proc.cache.base import NodeColumns
from scheduler_proc.cache.tenants import OWNER
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.request import Request
from scheduler_proc.features.base import combined_cost

MAX_WAITING = 128
MAX_NODES = 512
Numbers = list[int]


class RunningRows(Struct, frozen=True, gc=False):
    """Facts about sequences that hold a row, in the order of admission: a list for each fact."""

    row: Numbers
    number: Numbers
    """Number of the sequence, in the order of arrival."""
    num_prompt: Numbers
    num_cached: Numbers
    """Number of prompt tokens that were in the cache when the sequence first got a row."""
    num_given: Numbers
    """Number of tokens that the sequence came to its row with: to compute these is prefill."""
    num_computed: Numbers
    """Number of tokens whose KV is there or in flight."""
    num_tokens: Numbers
    """Number of tokens of prompt and output that have been committed."""
    num_in_flight: Numbers
    """Number of tokens that steps in flight sample."""
    max_tokens: Numbers
    """Number of tokens of prompt and output at which the sequence ends."""
    num_pages: Numbers
    num_shared_pages: Numbers
    """Number of the row's pages that the radix tree owns."""
    priority: Numbers
    num_retractions: Numbers
    age_s: list[float]
    """Seconds since the caller asked."""
    tenant: list[str]


class WaitingLine(Struct, frozen=True, gc=False):
    """Facts about the first sequences that wait, in order: a list for each fact."""

    number: Numbers
    num_tokens: Numbers
    """Number of tokens of the prompt, and of output from before the sequence lost its row."""
    priority: Numbers
    num_retractions: Numbers
    waited_s: list[float]
    """Seconds since the caller asked."""
    reason: list[str]
    """Reason why the sequence waits. paused: generation is; tenant: as many of its tenant's have rows as may;
    guide: it is compiled; adapter: it is not on the device; prefix: another row computes what it shares; row:
    none is free; room: pages, or tokens of the step, are taken.
    """
    tenant: list[str]


class PagePool(Struct, frozen=True, gc=False):
    """Numbers of pages. All are free, in the tree, or private to a row."""

    page_size: int
    num_pages: int
    num_free: int
    num_cached: int
    """Number of pages in the tree."""
    num_evictable: int
    """Number of pages in the tree that nobody uses."""
    num_evicted: int
    """Number of pages evicted since the start."""


class Tree(Struct, frozen=True, gc=False):
    """The largest nodes of the radix tree, by pages."""

    num_nodes: int
    """Number of nodes of the whole tree."""
    id: Numbers
    parent: Numbers
    """Id of each node's parent, which may be a root or too small to be among them."""
    num_tokens: Numbers
    lock: Numbers
    age: Numbers
    num_hits: Numbers
    retention: Numbers
    tenant: list[str]
    """Digest of the name of each node's tenant; empty for the owner."""


class Snapshot(Struct, frozen=True, gc=False):
    at_s: float
    """Moment of the snapshot, in seconds since 1970."""
    is_paused: bool
    num_running: int
    num_waiting: int
    num_held: int
    """Number of waiting sequences that wait behind the queue, for another one of their tenant's."""
    num_accepted: int
    num_terminated: int
    num_retracted: int
    rows: RunningRows
    waiting: WaitingLine
    pages: PagePool
    tree: Tree


class SnapshotMaker:
    def __init__(
        self, lifecycle: Lifecycle, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self._lifecycle = lifecycle
        self._kv = lifecycle.kv
        self._clock = clock
        self._wall_clock = wall_clock

    def make(self) -> Snapshot:
        lifecycle, kv, now = self._lifecycle, self._kv, self._clock()
        return Snapshot(
            self._wall_clock(),
            lifecycle.serving.is_paused,
            kv.rows.num_running,
            len(lifecycle.room),
            lifecycle.room.num_held,
            lifecycle.num_accepted,
            lifecycle.num_terminated,
            lifecycle.num_retracted,
            self._rows(now),
            self._waiting(now),
            self._pages(),
            _tree(kv.cache.largest_nodes(MAX_NODES), kv.cache.num_nodes, kv.page_size),
        )

    def _rows(self, now: float) -> RunningRows:
        kv, columns = self._kv, self._kv.rows
        rows, reqs = columns.running, columns.holders()
        return RunningRows(
            rows.tolist(),
            [req.seq for req in reqs],
            [req.num_prompt for req in reqs],
            [max(0, req.cached_tokens) for req in reqs],
            columns.num_given[rows].tolist(),
            columns.kv_len[rows].tolist(),
            columns.num_tokens[rows].tolist(),
            columns.in_flight[rows].tolist(),
            columns.max_len[rows].tolist(),
            kv.num_pages[rows].tolist(),
            kv.num_shared[rows].tolist(),
            columns.urgency[rows].tolist(),
            [req.num_retractions for req in reqs],
            [now - req.arrived_s for req in reqs],
            [req.tenant for req in reqs],
        )

    def _waiting(self, now: float) -> WaitingLine:
        reqs = list(islice(self._in_line(), MAX_WAITING))
        return WaitingLine(
            [req.seq for req in reqs],
            [req.num_tokens for req in reqs],
            [req.urgency for req in reqs],
            [req.num_retractions for req in reqs],
            [now - req.arrived_s for req in reqs],
            [self._reason(req) for req in reqs],
            [req.tenant for req in reqs],
        )

    def _in_line(self) -> Iterator[Request]:
        held: Iterable[Request] = chain.from_iterable(account.held for account in self._lifecycle.accounts)
        return chain(self._lifecycle.waiting, held)

    def _reason(self, req: Request) -> str:
        if self._lifecycle.serving.is_paused:
            return "paused"
        if req.is_held:
            return "tenant"
        for feature in req.features:
            if awaited := feature.awaited:
                return awaited
        if not self._lifecycle.slots.can_hold(combined_cost(req.features, req.contents).slots):
            return "adapter"
        if self._kv.still_awaits(req):
            return "prefix"
        return "room" if self._kv.rows.num_free else "row"

    def _pages(self) -> PagePool:
        kv = self._kv
        num_cached = sum(account.num_pages for account in kv.cache.ledger)
        return PagePool(
            kv.page_size,
            kv.pages.num_pages,
            kv.pages.num_free,
            num_cached,
            kv.cache.num_evictable,
            kv.counts.num_evicted,
        )


def _tree(nodes: NodeColumns, num_nodes: int, page_size: int) -> Tree:
    num_tokens = [num_pages * page_size for num_pages in nodes.num_pages]
    names = {tenant: "" if tenant == OWNER else tenant.hex() for tenant in set(nodes.tenant)}
    return Tree(
        num_nodes,
        nodes.uid,
        nodes.parent,
        num_tokens,
        nodes.lock,
        nodes.age,
        nodes.num_hits,
        nodes.retention,
        [names[tenant] for tenant in nodes.tenant],
    )
