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

LeafAge: TypeAlias = tuple[float, float]
"""Sort key of a leaf among those of several tenants, to whom the retention of one of them means nothing: its
rank, the time of its last use.
"""

_uids = itertools.count(1)


class Node:
    """A run of pages without a fork inside. A root has an empty run."""

    __slots__ = (
        "account", "children", "created", "duration_s", "last_used", "lock", "namespace", "num_hits", "pages",
        "parent", "place", "request_priority", "retention", "tokens", "uid",
    )  # fmt: skip
    namespace: bytes
    """Namespace, set on roots only."""
    place: int
    """Index of the node in NodeSizes; roots have none."""

    def __init__(
        self, parent: Node | None, tokens: bytes, pages: IntArray, now: int, account: CacheAccount
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.account = account
        """Account of the node's tenant; NOBODYS for a root that is not in the tree."""
        self.children: dict[bytes, Node] = {}
        self.lock = 0
        """Number of leases in the subtree."""
        self.uid = next(_uids)
        self.created = now
        """Time at which its pages came into the tree, on the tree's own clock, which counts lookups and
        insertions.
        """
        self.last_used = now
        self.num_hits = 0
        """Number of requests' stays that reused it, not counting the one that computed it."""
        self.request_priority = 0
        """Highest scheduling priority of the requests that used it."""
        self.retention = DEFAULT_PRIORITY
        """Retention priority, 0 to 100, from the last request that set one for these tokens."""
        self.duration_s = 0.0
        """Seconds for which `retention` holds after the last use; 0.0: without limit."""

    def take_history_of(self, other: Node) -> None:
        """Copy the statistics of `other`, of which this node is a part."""
        self.created = other.created
        self.last_used = other.last_used
        self.num_hits = other.num_hits
        self.request_priority = other.request_priority
        self.retention = other.retention
        self.duration_s = other.duration_s


class CacheAccount:
    """Page counts of one tenant. Only RadixCache and Ledger write it."""

    __slots__ = (
        "entitled", "is_idle", "is_noted", "leaves", "left_s", "num_locked", "num_pages", "num_private",
        "num_protected", "num_roots", "num_rows", "num_used_roots", "tenant",
    )  # fmt: skip

    def __init__(self, tenant: bytes) -> None:
        self.tenant = tenant
        self.leaves: LazyHeap[LeafKey, Node] = LazyHeap()
        """Evictable leaves of the tenant, in the order of eviction."""
        self.num_pages = 0
        """Number of the tenant's pages in the tree, used or not."""
        self.num_locked = 0
        """Number of its pages in the tree that are in use."""
        self.num_private = 0
        """Number of pages in its rows outside the tree, as last counted."""
        self.num_rows = 0
        """Number of its rows, counted together with the private pages."""
        self.num_roots = 0
        """Number of its namespaces in the tree. An account without any is dropped."""
        self.num_used_roots = 0
        """Number of its namespaces that have a lease."""
        self.left_s = 0.0
        """Time at which the last lease was given back."""
        self.is_idle = False
        """True if the tenant has been absent so long that it is entitled to nothing."""
        self.entitled = 0
        """Number of pages that the tenant is entitled to, from the ledger's last division."""
        self.num_protected = 0
        """Number of its evictable pages within its entitlement."""
        self.is_noted = True
        """True if the ledger will examine the account again."""

    @property
    def first_age(self) -> LeafAge | None:
        """Age of the leaf that the tenant gives first; None if it has none to give."""
        key = self.leaves.first_key()
        return None if key is None else key[1:]

    @property
    def num_evictable(self) -> int:
        """Number of the tenant's pages that no request uses."""
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
        """Return True if the tenant has several rows and would exceed its entitlement with num_new more
        pages. It must then take none of them from within the entitlements of others.
        """
        return self.num_rows > 1 and self.num_over + num_new > 0


NOBODYS = CacheAccount(b"")
"""Placeholder for an account that does not exist yet. Nothing is ever counted in it."""


def make_root(namespace: bytes) -> Node:
    """Make a node without pages and parent, for a namespace that is not in the tree."""
    root = Node(None, b"", NO_PAGES, 0, NOBODYS)
    root.namespace = namespace
    return root
