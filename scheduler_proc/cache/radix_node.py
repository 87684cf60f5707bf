"""Node: a run of pages in the radix tree, and what eviction goes by."""

from __future__ import annotations

import itertools

from runtime.wire.format import IntArray
from runtime.wire.retention import DEFAULT_PRIORITY

_uids = itertools.count(1)


class Node:
    """A run of pages with no fork inside; a root has an empty run."""

    __slots__ = (
        "children", "created", "duration_s", "last_used", "lock", "namespace", "num_hits", "pages", "parent",
        "request_priority", "retention", "tokens", "uid",
    )  # fmt: skip

    def __init__(
        self, parent: Node | None, tokens: bytes, pages: IntArray, now: int, namespace: bytes
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.namespace = namespace
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
        """As the last request that said something about its tokens wants it; 0 to 100."""
        self.duration_s = 0.0
        """How long `retention` holds after the last use; 0.0: for ever."""

    def take_history_of(self, other: Node) -> None:
        """What is known of `other` holds for this part of it too."""
        self.created = other.created
        self.last_used = other.last_used
        self.num_hits = other.num_hits
        self.request_priority = other.request_priority
        self.retention = other.retention
        self.duration_s = other.duration_s
