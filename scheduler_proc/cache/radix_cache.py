"""RadixCache: prefix tree over token ids, one page number per full page. Knows no request, no row, no tensor.

    root(namespace) ── node: a run of tokens (packed bytes) and the page of each page_size of them ── children

Runs are bytes, so that comparing a run is one memcmp and a page of it is a dictionary key. Locks count the
leases in the subtree; what is unlocked may be evicted, from the leaves up, least recently used first. A root
lives as long as somebody leases it or anything is cached below it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from runtime.wire import TOKEN_BYTES, IntArray
from scheduler_proc.cache.base import NO_PAGES, Insertion, Match

_uids = itertools.count(1)


class Node:
    """A run of pages with no fork inside; a root has an empty run."""

    __slots__ = ("children", "last_used", "lock", "namespace", "pages", "parent", "queued", "tokens", "uid")

    def __init__(
        self, parent: Node | None, tokens: bytes, pages: IntArray, last_used: int, namespace: bytes
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.last_used = last_used
        self.namespace = namespace
        self.children: dict[bytes, Node] = {}
        self.lock = 0
        self.uid = next(_uids)
        self.queued = False  # has an entry in the eviction heap


class RadixCache:
    """Satisfies PrefixCache."""

    shares = True

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.version = 0
        self.num_evictable = 0
        self.num_evicted = 0
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        self._clock = 0
        # Candidates for eviction, at most one entry a node. Entries are checked when popped: a use or a lock
        # since
        # then costs nothing at the time it happens.
        self._leaves: list[tuple[int, int, Node]] = []

    # -- lookup ---------------------------------------------------------------------------------------------

    def match(self, tokens: bytes, num_tokens: int, namespace: bytes) -> Match:
        root = self._roots.get(namespace)
        if root is None:
            root = Node(None, b"", NO_PAGES, 0, namespace)  # becomes the namespace's with its first lock
        node, found = self._walk(root, tokens, num_tokens * TOKEN_BYTES)
        return Match(node, found)

    def match_len(self, tokens: bytes, num_tokens: int, namespace: bytes) -> int:
        node = self._roots.get(namespace)
        page, end, pos = self._page_bytes, num_tokens * TOKEN_BYTES, 0
        while node is not None and pos + page <= end:
            node = node.children.get(tokens[pos : pos + page])
            if node is None:
                break
            if not tokens.startswith(node.tokens, pos, end):
                pos += self._num_equal_pages(node.tokens, tokens[pos:end]) * page
                break
            pos += len(node.tokens)
        return pos // TOKEN_BYTES

    def match_path(self, tokens: bytes, num_tokens: int, namespace: bytes) -> tuple[int, ...]:
        node = self._roots.get(namespace)
        page, end, pos = self._page_bytes, num_tokens * TOKEN_BYTES, 0
        path: list[int] = []
        while node is not None and pos + page <= end:
            node = node.children.get(tokens[pos : pos + page])
            if node is not None:
                path.append(node.uid)
                if not tokens.startswith(node.tokens, pos, end):
                    break
                pos += len(node.tokens)
        return tuple(path)

    def _walk(self, node: Node, tokens: bytes, end: int) -> tuple[Node, IntArray]:
        """Follow whole pages of tokens[:end] down from node, splitting the run where they part."""
        page, pos = self._page_bytes, 0
        runs: list[IntArray] = []
        self._clock += 1
        while pos + page <= end and (child := node.children.get(tokens[pos : pos + page])) is not None:
            if not tokens.startswith(child.tokens, pos, end):
                child = self._split(child, self._num_equal_pages(child.tokens, tokens[pos:end]))
            child.last_used = self._clock
            runs.append(child.pages)
            pos += len(child.tokens)
            node = child
        if not runs:
            return node, NO_PAGES
        return node, runs[0] if len(runs) == 1 else np.concatenate(runs)

    def _num_equal_pages(self, a: bytes, b: bytes) -> int:
        n = min(len(a), len(b)) // TOKEN_BYTES
        differs = np.frombuffer(a, np.int32, n) != np.frombuffer(b, np.int32, n)
        first = int(differs.argmax())
        return (first if differs[first] else n) // self.page_size

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cut node after num_pages; returns the new upper half.

        before   parent ── node [0 .. n)
        after    parent ── top [0 .. k) ── node [k .. n)       leases on node keep their depth
        """
        cut = num_pages * self._page_bytes
        parent = node.parent
        assert parent is not None
        top = Node(parent, node.tokens[:cut], node.pages[:num_pages].copy(), node.last_used, node.namespace)
        top.lock = node.lock
        parent.children[node.tokens[: self._page_bytes]] = top
        node.parent = top
        node.tokens = node.tokens[cut:]
        node.pages = node.pages[num_pages:].copy()
        top.children[node.tokens[: self._page_bytes]] = node
        return top

    # -- growth ---------------------------------------------------------------------------------------------

    def insert(self, node: Node, tokens: bytes, pages: IntArray) -> Insertion:
        found, num_found, num_pages = NO_PAGES, 0, len(pages)
        if node.children:
            node, found = self._walk(node, tokens, len(tokens))
            num_found = len(found)
        if num_found < num_pages:
            run = tokens[num_found * self._page_bytes :]
            self._clock += 1
            leaf = Node(node, run, pages[num_found:].copy(), self._clock, node.namespace)
            node.children[run[: self._page_bytes]] = leaf
            node = leaf
            self.num_evictable += num_pages - num_found
            self.version += 1
        return Insertion(node, found, num_pages)

    # -- leases ---------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        self._lock_until(node, None)

    def move_lock(self, above: Node, below: Node) -> None:
        self._lock_until(below, above)

    def _lock_until(self, node: Node, end: Node | None) -> None:
        """Lock node and what is above it, up to but without `end`."""
        at: Node | None = node
        while at is not end:
            assert at is not None, "a lock can only move down"
            if at.lock == 0:
                self.num_evictable -= len(at.pages)
                if at.parent is None:
                    assert self._roots.setdefault(at.namespace, at) is at
            at.lock += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            assert at.lock > 0, "a lease was given back twice"
            at.lock -= 1
            if at.lock == 0:
                self.num_evictable += len(at.pages)
                self._nothing_needs(at)
            at = at.parent

    def num_pages_held(self, nodes: Sequence[Node]) -> list[int]:
        seen: set[Node] = set()
        counts: list[int] = []
        for node in nodes:
            at: Node | None = node
            num_pages = 0
            while at is not None and at not in seen:
                seen.add(at)
                num_pages += len(at.pages)
                at = at.parent
            counts.append(num_pages)
        return counts

    def _nothing_needs(self, node: Node) -> None:
        """An unlocked leaf may be evicted; an unlocked root without children is dropped."""
        if node.lock or node.children:
            return
        if node.parent is None:
            self._roots.pop(node.namespace, None)
        elif not node.queued:
            node.queued = True
            heapq.heappush(self._leaves, (node.last_used, node.uid, node))

    # -- shrinking ------------------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> IntArray:
        runs: list[IntArray] = []
        missing = num_pages
        while missing > 0 and self._leaves:
            last_used, _, leaf = heapq.heappop(self._leaves)
            leaf.queued = False
            if leaf.lock or leaf.children:
                continue  # it comes back with its last unlock or its last child
            if last_used != leaf.last_used:
                self._nothing_needs(leaf)  # used since it was queued: back in line
                continue
            runs.append(self._take_from(leaf, missing))
            missing -= len(runs[-1])
        if not runs:
            return NO_PAGES
        num_taken = num_pages - missing
        self.num_evictable -= num_taken
        self.num_evicted += num_taken
        self.version += 1
        return np.concatenate(runs)

    def _take_from(self, leaf: Node, num_pages: int) -> IntArray:
        """Up to num_pages from the end of an unlocked leaf; without pages it is no more."""
        keep = len(leaf.pages) - num_pages
        if keep > 0:
            taken = leaf.pages[keep:]
            leaf.pages = leaf.pages[:keep].copy()
            leaf.tokens = leaf.tokens[: keep * self._page_bytes]
            self._nothing_needs(leaf)
            return taken
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.tokens[: self._page_bytes]]
        if not parent.lock:
            self._nothing_needs(parent)
        return leaf.pages

    # -- checks ---------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        return sum(len(node.pages) for node in self.nodes())

    @property
    def num_namespaces(self) -> int:
        return len(self._roots)

    def nodes(self) -> Iterator[Node]:
        """Every node that holds pages, in no particular order."""
        todo = [child for root in self._roots.values() for child in root.children.values()]
        while todo:
            node = todo.pop()
            todo += node.children.values()
            yield node

    def owned_pages(self) -> Iterator[IntArray]:
        return (node.pages for node in self.nodes())

    def check(self) -> None:
        nodes = list(self.nodes())
        assert sum(len(node.pages) for node in nodes if not node.lock) == self.num_evictable
        assert all(len(node.tokens) == len(node.pages) * self._page_bytes for node in nodes)
        assert all(node.queued for node in nodes if not node.lock and not node.children), (
            "never to be evicted"
        )
        assert all(root.lock or root.children for root in self._roots.values()), "an empty namespace was kept"
        for node in nodes:
            assert node.parent is not None
            assert node.parent.children[node.tokens[: self._page_bytes]] is node
            assert node.lock >= sum(child.lock for child in node.children.values())
