"""RadixCache: prefix tree over token ids, one page number per full page. Knows no request, no row, no tensor.

    root(namespace) ── node: a run of tokens (packed bytes) and the page of each page_size of them ── children

Runs are bytes, so that comparing a run is one memcmp and a page of it is a dictionary key. Locks count the
leases in the subtree; what is unlocked may be evicted, from the leaves up: what is retained least first, then
as the eviction policy ranks it. A root lives as long as somebody leases it or anything is cached below it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from runtime.wire.format import TOKEN_BYTES, IntArray
from runtime.wire.retention import DEFAULT_PRIORITY
from scheduler_proc.cache.base import NO_PAGES, Insertion, Match
from scheduler_proc.cache.pages.retained_pages import RetainedPages
from scheduler_proc.cache.radix.eviction import LRU, EvictionPolicy
from scheduler_proc.cache.radix.lazy_heap import LazyHeap
from scheduler_proc.cache.radix_node import Node


class RadixCache:
    """Satisfies PrefixCache."""

    shares = True

    def __init__(
        self,
        page_size: int,
        eviction: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`eviction`: by default the least recently used goes first. `clock`: seconds, for retention."""
        self.page_size = page_size
        self._eviction = eviction or LRU()
        self._seconds = clock
        self.version = 0
        self.num_evictable = 0
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        self._clock = 0
        # What may be evicted, and what will be retained no longer, at its time.
        self._leaves: LazyHeap[tuple[float, float, float]] = LazyHeap()
        self._expiring: LazyHeap[tuple[float]] = LazyHeap()

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
        if node in self._leaves:
            self._queue(node)
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
        top = Node(parent, node.tokens[:cut], node.pages[:num_pages].copy(), self._clock, node.namespace)
        top.take_history_of(node)
        top.lock = node.lock
        if node in self._expiring:
            self._expiring.push(top, self._expiring.key_of(node))
        parent.children[node.tokens[: self._page_bytes]] = top
        node.parent = top
        node.tokens = node.tokens[cut:]
        node.pages = node.pages[num_pages:].copy()
        top.children[node.tokens[: self._page_bytes]] = node
        return top

    # -- growth ---------------------------------------------------------------------------------------------

    def insert(self, node: Node, tokens: bytes, pages: IntArray, priority: int = 0) -> Insertion:
        found, num_found, num_pages = NO_PAGES, 0, len(pages)
        if node.children:
            above = node
            node, found = self._walk(node, tokens, len(tokens))
            num_found = len(found)
            self._note_hit(node, above, priority)
        if num_found < num_pages:
            run = tokens[num_found * self._page_bytes :]
            self._clock += 1
            leaf = Node(node, run, pages[num_found:].copy(), self._clock, node.namespace)
            leaf.request_priority = priority
            node.children[run[: self._page_bytes]] = leaf
            node = leaf
            self.num_evictable += num_pages - num_found
            self.version += 1
        return Insertion(node, found, num_pages)

    # -- what eviction goes by ------------------------------------------------------------------------------

    def note_hit(self, node: Node, priority: int) -> None:
        self._note_hit(node, None, priority)

    def _note_hit(self, node: Node, end: Node | None, priority: int) -> None:
        """Of node and what is above it, up to but without `end`."""
        at: Node | None = node
        while at is not end:
            assert at is not None
            at.num_hits += 1
            if priority > at.request_priority:
                at.request_priority = priority
            at = at.parent

    def retain(self, node: Node, first: int, num_pages: int, spans: Sequence[RetainedPages]) -> None:
        at, end = node, num_pages
        while end > first and at.parent is not None:
            start = end - len(at.pages)
            cut = max((edge for span in spans for edge in span[:2] if start < edge < end), default=start)
            if cut > start:
                self._split(at, cut - start)
            for span in spans:
                if span.start <= cut < span.end:
                    at.retention = span.priority
                    at.duration_s = span.duration_s
            at, end = at.parent, cut

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
                self._leaves.discard(at)
                if at.duration_s:
                    self._expiring.discard(at)
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
                if at.duration_s:
                    self._expiring.push(at, (self._seconds() + at.duration_s,))
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
        else:
            self._queue(node)

    def _queue(self, leaf: Node) -> None:
        self._leaves.push(leaf, (leaf.retention, self._eviction.rank(leaf), leaf.last_used))

    # -- shrinking ------------------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> IntArray:
        runs: list[IntArray] = []
        missing = num_pages
        if self._expiring:
            self._expire()
        while missing > 0 and (leaf := self._leaves.pop()) is not None:
            runs.append(self._take_from(leaf, missing))
            missing -= len(runs[-1])
        if not runs:
            return NO_PAGES
        self.num_evictable -= num_pages - missing
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
        if leaf.duration_s:
            self._expiring.discard(leaf)
        if not parent.lock:
            self._nothing_needs(parent)
        return leaf.pages

    def _expire(self) -> None:
        """What nobody has used for as long as it was to be retained is like any other."""
        now = self._seconds()
        while (node := self._expiring.first()) is not None and self._expiring.key_of(node)[0] <= now:
            self._expiring.discard(node)
            node.retention = DEFAULT_PRIORITY
            node.duration_s = 0.0
            if node in self._leaves:
                self._queue(node)

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
        leaves = [node for node in nodes if not node.lock and not node.children]
        assert all(node in self._leaves for node in leaves), "never to be evicted"
        assert len(self._leaves) == len(leaves), "what is used, or gone, is up for eviction"
        for node in leaves:
            retention, _, last_used = self._leaves.key_of(node)
            assert (retention, last_used) == (node.retention, node.last_used), "its place in line is old"
        expiring = [node for node in nodes if node.duration_s and not node.lock]
        assert all(node in self._expiring for node in expiring), "retained for ever"
        assert len(self._expiring) == len(expiring), "what is used, or gone, expires"
        assert all(root.lock or root.children for root in self._roots.values()), "an empty namespace was kept"
        for node in nodes:
            assert node.parent is not None
            assert node.parent.children[node.tokens[: self._page_bytes]] is node
            assert node.lock >= sum(child.lock for child in node.children.values())
