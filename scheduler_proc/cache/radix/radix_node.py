"""Node: a run of pages in the radix tree with its eviction data. CacheAccount: the pages of one tenant."""

from __future__ import annotations

import itertools
from typing import TypeAlias

from runtime.wire.format import IntArray
from runtime.wire.retention import DEFAULT_PRIORITY
from scheduler_proc.cache.pages.page_allocator import NO_PAGES
from scheduler_proc.cache.radix.lazy_heap import LazyHeap

LeafKey: TypeAlias = tuple[float, float, float]
"""Sort key of a leaf in the eviction order: its retention, its rank by the policy, the time of its last use.
"""

_uids = itertools.count(1)


class Node:
    """A run of pages with no fork inside; a root has an empty run."""

    __slots__ = (
        "account", "children", "created", "duration_s", "last_used", "lock", "namespace", "num_hits", "pages",
        "parent", "place", "request_priority", "retention", "tokens", "uid",
    )  # fmt: skip
    namespace: bytes
    """Namespace of a root; no other node has one."""
    place: int
    """Index of the node in NodeSizes; a root has none."""

    def __init__(
        self, parent: Node | None, tokens: bytes, pages: IntArray, now: int, account: CacheAccount
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.account = account
        """Its tenant's. NOBODYS: of a root that is not in the tree."""
        self.children: dict[bytes, Node] = {}
        self.lock = 0
        """Leases in the subtree."""
        self.uid = next(_uids)
        self.created = now
        """When its pages came into the tree, on the tree's own clock, which counts lookups and insertions."""
        self.last_used = now
        self.num_hits = 0
        """Stays that used it, besides the one that computed it."""
        self.request_priority = 0
        """The highest of the requests that used it."""
        self.retention = DEFAULT_PRIORITY
        """Wish of the last request that said something about its tokens; 0 to 100."""
        self.duration_s = 0.0
        """How long `retention` holds after the last use; 0.0: for ever."""

    def take_history_of(self, other: Node) -> None:
        """Copy what is known of `other`, of which this node is a part."""
        self.created = other.created
        self.last_used = other.last_used
        self.num_hits = other.num_hits
        self.request_priority = other.request_priority
        self.retention = other.retention
        self.duration_s = other.duration_s


class CacheAccount:
    """Counts of what one tenant has. Written by RadixCache and Ledger alone."""

    __slots__ = (
        "entitled", "is_idle", "is_noted", "leaves", "left_s", "num_locked", "num_pages", "num_private",
        "num_protected", "num_roots", "num_rows", "num_used_roots", "tenant",
    )  # fmt: skip

    def __init__(self, tenant: bytes) -> None:
        self.tenant = tenant
        self.leaves: LazyHeap[LeafKey, Node] = LazyHeap()
        """Leaves that may be evicted, in line."""
        self.num_pages = 0
        """In the tree, in use or not."""
        self.num_locked = 0
        """Pages of the tree that are in use."""
        self.num_private = 0
        """Beside the tree's, in its rows, as last counted."""
        self.num_rows = 0
        """Rows, as last counted with the private pages."""
        self.num_roots = 0
        """Namespaces. Without one there is no account."""
        self.num_used_roots = 0
        """Namespaces in which anybody has a lease."""
        self.left_s = 0.0
        """When the last lease was given back."""
        self.is_idle = False
        """It has been away for so long that it is entitled to nothing."""
        self.entitled = 0
        """Pages, as the ledger last divided them."""
        self.num_protected = 0
        """Evictable pages that are within what it is entitled to."""
        self.is_noted = True
        """The ledger knows that it has to look at it again."""

    @property
    def num_evictable(self) -> int:
        """Number of the tenant's pages that nobody uses."""
        return self.num_pages - self.num_locked

    @property
    def num_held(self) -> int:
        """Number of pages that count against what the tenant is entitled to."""
        return self.num_pages + self.num_private

    @property
    def num_over(self) -> int:
        """Number of pages beyond what the tenant is entitled to; negative below it."""
        return self.num_pages + self.num_private - self.entitled

    def is_beyond_with(self, num_new: int) -> bool:
        """Tell whether it has several rows and, with so many new pages, more than it is entitled to: it takes
        none of these from what others are entitled to.
        """
        return self.num_rows > 1 and self.num_over + num_new > 0


NOBODYS = CacheAccount(b"")
"""Account that stands in where there is none yet. Nothing is ever counted in it."""


def make_root(namespace: bytes) -> Node:
    """Return a node without pages and parent, for a namespace that is not in the tree."""
    root = Node(None, b"", NO_PAGES, 0, NOBODYS)
    root.namespace = namespace
    return root
