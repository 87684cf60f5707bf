"""Snapshot: current state of the scheduler: rows, waiting requests with reasons, pages, the radix tree.

It is made of columns, so its cost is small and bounded however many requests wait and however much is cached;
no step is delayed. It contains no token, text or label, and no client id, because an id is a capability.
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
    """Sequences that hold a row, in the order of admission: one list for each property."""

    row: Numbers
    number: Numbers
    """Number of the sequence, in the order of arrival."""
    num_prompt: Numbers
    num_cached: Numbers
    """Number of prompt tokens found in the cache when the sequence first got a row."""
    num_given: Numbers
    """Number of tokens that the sequence had when it got its row. Computing these is prefill."""
    num_computed: Numbers
    """Number of tokens whose KV is computed or in flight."""
    num_tokens: Numbers
    """Number of committed tokens, prompt and output."""
    num_in_flight: Numbers
    """Number of tokens that steps in flight will sample."""
    max_tokens: Numbers
    """Number of tokens, prompt and output, at which the sequence ends."""
    num_pages: Numbers
    num_shared_pages: Numbers
    """Number of the row's pages that the radix tree owns."""
    priority: Numbers
    num_retractions: Numbers
    age_s: list[float]
    """Seconds since the caller asked."""
    tenant: list[str]


class WaitingLine(Struct, frozen=True, gc=False):
    """The first waiting sequences, in order: one list for each property."""

    number: Numbers
    num_tokens: Numbers
    """Number of tokens of the prompt, and of output from before a retraction."""
    priority: Numbers
    num_retractions: Numbers
    waited_s: list[float]
    """Seconds since the caller asked."""
    reason: list[str]
    """Reason why the sequence waits. paused: generation is paused; tenant: as many of its tenant's sequences
    have rows as may; guide: it is being compiled; adapter: it is not on the device; prefix: another row
    computes a page that it shares; row: none is free; room: pages, or tokens of the step, are taken.
    """
    tenant: list[str]


class PagePool(Struct, frozen=True, gc=False):
    """Numbers of pages. Each page is free, in the tree, or private to a row."""

    page_size: int
    num_pages: int
    num_free: int
    num_cached: int
    """Number of pages in the tree."""
    num_evictable: int
    """Number of pages in the tree that no row uses."""
    num_evicted: int
    """Number of pages evicted since the start."""


class Tree(Struct, frozen=True, gc=False):
    """The largest nodes of the radix tree, by pages."""

    num_nodes: int
    """Number of nodes of the whole tree."""
    id: Numbers
    parent: Numbers
    """Id of each node's parent, which may be a root or too small to be listed."""
    num_tokens: Numbers
    lock: Numbers
    age: Numbers
    num_hits: Numbers
    retention: Numbers
    tenant: list[str]
    """Digest of the name of each node's tenant; empty for the owner."""


class Snapshot(Struct, frozen=True, gc=False):
    at_s: float
    """Time of the snapshot, in seconds since 1970."""
    is_paused: bool
    num_running: int
    num_waiting: int
    num_held: int
    """Number of waiting sequences that are held back behind the queue until another one of their tenant ends.
    """
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
