"""PrefixCache: the seam between the KV cache manager and
whatever remembers prefixes. Token ids and page numbers only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from runtime.wire.format import IntArray
from scheduler_proc.cache.ledger import Ledger
from scheduler_proc.cache.pages.retained_pages import RetainedPages

CacheNode: TypeAlias = Any
"""A place in the cache, opaque to everybody else but for its `uid`, an int that is
never used twice. Whoever holds a lock on it may use every page on the way to it.
"""


class Match(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A cached prefix. Valid until the cache changes, unless `node` is locked."""

    node: CacheNode
    pages: IntArray
    """Page numbers of the prefix, in the order of its tokens; all of them full."""


class Insertion(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Fate of pages that were offered to the cache."""

    node: CacheNode
    found: IntArray
    """Pages that were there already: use these instead of the
    first `len(found)` offered ones, which stay the caller's.
    """
    num_owned: int
    """Number of the offered pages that the cache now holds, found ones included."""


class NodeColumns(NamedTuple):
    """Facts about nodes of the cache, for who watches: a list for each fact."""

    uid: list[int]
    parent: list[int]
    """Uids of their parents."""
    num_pages: list[int]
    lock: list[int]
    """Number of leases on each node and what is below it."""
    age: list[int]
    """Lookups and insertions since it was last used."""
    num_hits: list[int]
    """Number of stays that used the node, besides the one that computed it."""
    retention: list[int]
    """Retention priority of the node, 0 to 100."""
    tenant: list[bytes]
    """Part of the namespace that stands for the node's tenant, as the ledger has it."""


NO_NODES = NodeColumns([], [], [], [], [], [], [], [])


class PrefixCache(Protocol):
    """Remembers which page holds the KV of which prefix, per
    namespace. Owns the pages it was given until it evicts them.
    Each of its nodes has the `account` of its tenant in the ledger.
    """

    shares: bool
    """True if a match may be found. False: nothing is ever found, so nobody need wait for what another row
    computes.
    """
    version: int
    """Number that changes whenever a match could come out differently."""
    num_evictable: int
    """Number of pages that `evict` could give back now."""
    ledger: Ledger
    """Ledger of whose the pages are; without entries where nothing is ever kept."""

    @property
    def num_pages(self) -> int:
        """Return the number of pages that the cache owns. Walks the cache."""

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes that hold pages."""

    def largest_nodes(self, num_nodes: int) -> NodeColumns:
        """Return so many nodes with the most pages, the largest first. The cost does not grow with the
        cache.
        """

    def match(self, tokens: bytes, num_tokens: int, namespace: bytes) -> Match:
        """Return the longest cached prefix of the first num_tokens packed ids, in full pages. Marks it as
        used; lock it to keep it.
        """

    def match_len(self, tokens: bytes, num_tokens: int, namespace: bytes) -> int:
        """Return the number of tokens that `match` would find. Changes nothing at all."""

    def match_path(self, tokens: bytes, num_tokens: int, namespace: bytes) -> tuple[int, ...]:
        """Return the uids of the nodes of which `match` would use pages, from the root down. Changes
        nothing.
        """

    def insert(self, node: CacheNode, tokens: bytes, pages: IntArray, priority: int = 0) -> Insertion:
        """Offer full pages that continue `node`, which is locked; next, move that lock to the new node.
        priority: of the request that computed them.
        """

    def note_hit(self, node: CacheNode, priority: int) -> None:
        """Count that a request of this priority has begun with what is cached down to `node`."""

    def retain(self, node: CacheNode, first: int, num_pages: int, spans: Sequence[RetainedPages]) -> None:
        """Keep the pages first .. num_pages - 1 on the way to `node`, which is locked and the end of them, as
        firmly as the spans say; what is in none of them stays as it is. A cache node begins at `first`.
        """

    def lock(self, node: CacheNode, above: CacheNode = None) -> None:
        """Keep everything down to node from being evicted. Counted: one `unlock` each. above: a node above it
        whose lock becomes this one.
        """

    def unlock(self, node: CacheNode) -> None:
        """Undo one `lock`."""

    def num_pages_held(self, nodes: Sequence[CacheNode]) -> list[int]:
        """Return, for each of some locked nodes, how many pages are on the way to it and on the way to none
        before it.
        """

    def evict(self, num_pages: int, upto: int = 0, lease: CacheNode = None) -> IntArray:
        """Give back num_pages unlocked pages, or all there are if that is fewer; up to `upto` in all, if with
        several tenants the rest is of those that have more than their share. Theirs go first. Of one
        tenant's what is retained least goes first, then as the eviction policy ranks it; with one alone no
        run is cut for more than num_pages. lease: the node of the row for which it is done, if it is for one.
        """

    def owned_pages(self) -> Iterator[IntArray]:
        """Return every page that the cache owns, in runs; for checks."""

    def check(self) -> None:
        """Assert that its counters agree with its content."""
