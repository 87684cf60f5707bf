"""PrefixCache: interface between the KV cache manager and a cache of prefixes. It handles token ids and page
numbers only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from runtime.wire.format import IntArray
from scheduler_proc.cache.ledger import Ledger
from scheduler_proc.cache.pages.retained_pages import RetainedPages

CacheNode: TypeAlias = Any
"""Place in the cache. Opaque to callers except for its `uid`, an int that is never used twice. The holder of
a lock on it may use every page on the path from the root to it.
"""


class Match(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A cached prefix. Valid until the cache changes, unless `node` is locked."""

    node: CacheNode
    pages: IntArray
    """Page numbers of the prefix, in the order of its tokens; all of them full."""


class Insertion(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Result of offering pages to the cache."""

    node: CacheNode
    found: IntArray
    """Pages with the same content that were in the cache already. Use them instead of the first `len(found)`
    offered pages, which stay the caller's.
    """
    num_owned: int
    """Number of offered pages that the cache now holds, including those found."""


class NodeColumns(NamedTuple):
    """Properties of cache nodes for monitoring, one list per property."""

    uid: list[int]
    parent: list[int]
    """Uids of their parents."""
    num_pages: list[int]
    lock: list[int]
    """Number of leases on each node and what is below it."""
    age: list[int]
    """Lookups and insertions since it was last used."""
    num_hits: list[int]
    """Number of requests' stays in a row that reused the node, not counting the one that computed it."""
    retention: list[int]
    """Retention priority of the node, 0 to 100."""
    tenant: list[bytes]
    """Tenant part of the node's namespace, as the ledger has it."""


NO_NODES = NodeColumns([], [], [], [], [], [], [], [])


class PrefixCache(Protocol):
    """Remembers which page holds the KV of which prefix, separately for each namespace. It owns the pages
    that it was given until it evicts them. Each node has the `account` of its tenant in the ledger.
    """

    shares: bool
    """True if a match can ever be found. If False, no request needs to wait for a page that another row
    computes.
    """
    version: int
    """Number that changes whenever the result of a match could have changed."""
    num_evictable: int
    """Number of pages that `evict` could give back now."""
    ledger: Ledger
    """Account of each tenant's pages; it has no entries where nothing is ever kept."""

    @property
    def num_pages(self) -> int:
        """Return the number of pages that the cache owns. Walks the cache."""

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes that hold pages."""

    def largest_nodes(self, num_nodes: int) -> NodeColumns:
        """Return the num_nodes nodes with the most pages, the largest first. The cost does not grow with the
        cache.
        """

    def match(self, tokens: bytes, num_tokens: int, namespace: bytes) -> Match:
        """Return the longest cached prefix of the first num_tokens packed ids, in full pages. Marks it as
        used. Lock its node to keep it.
        """

    def match_len(self, tokens: bytes, num_tokens: int, namespace: bytes) -> int:
        """Return the number of tokens that `match` would find. Changes nothing."""

    def match_path(self, tokens: bytes, num_tokens: int, namespace: bytes) -> tuple[int, ...]:
        """Return the uids of the nodes whose pages `match` would use, from the root down. Changes nothing."""

    def insert(self, node: CacheNode, tokens: bytes, pages: IntArray, priority: int = 0) -> Insertion:
        """Offer full pages that continue `node`, which the caller has locked. The lock moves to the node that
        is returned. priority: that of the request that computed the pages.
        """

    def note_hit(self, node: CacheNode, priority: int) -> None:
        """Count that a request of this priority started with the prefix that ends at `node`."""

    def retain(self, node: CacheNode, first: int, num_pages: int, spans: Sequence[RetainedPages]) -> None:
        """Keep the pages first .. num_pages - 1 on the path to `node` as firmly as the spans say; pages in no
        span stay as they are. `node` is locked and ends at num_pages; a cache node begins at `first`.
        """

    def lock(self, node: CacheNode) -> None:
        """Keep everything from the root to `node` from being evicted. Locks are counted: each needs one
        `unlock`.
        """

    def unlock(self, node: CacheNode) -> None:
        """Undo one `lock`."""

    def num_pages_held(self, nodes: Sequence[CacheNode]) -> list[int]:
        """Return, for each of these locked nodes, the number of pages on the path to it that are not on the
        path to an earlier one of them.
        """

    def evict(self, num_pages: int, upto: int = 0, lease: CacheNode = None) -> IntArray:
        """Take num_pages unlocked pages out of the cache and return them; all there are if that is fewer.

        With several tenants, tenants above their share lose pages first, and if that suffices up to `upto`
        pages are taken. Of one tenant's pages those with the lowest retention go first, then the eviction
        policy decides. With only one tenant no run of pages is cut to give more than num_pages. lease: node
        of the row that needs the pages, or None.
        """

    def owned_pages(self) -> Iterator[IntArray]:
        """Yield the pages that the cache owns, in runs; for checks."""

    def check(self) -> None:
        """Assert that the counters agree with the content."""
