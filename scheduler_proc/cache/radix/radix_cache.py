"""RadixCache: prefix tree over token ids, one page number per full page. Knows no request, no row, no tensor.

    root(namespace) ── node: a run of tokens (packed bytes) and the page of each page_size of them ── children

Runs are bytes, so that comparing a run is one memcmp and a page of it is a dictionary key. The lock of a node
counts the leases in its subtree. Unlocked nodes may be evicted, from the leaves up: those with the lowest
retention first, then in the order of the eviction policy. With several tenants, tenants above their share
lose pages first. A root lives as long as it is leased or has children.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from runtime.wire.format import TOKEN_BYTES, IntArray
from runtime.wire.retention import DEFAULT_PRIORITY
from scheduler_proc.cache.base import Insertion, Match, NodeColumns
from scheduler_proc.cache.ledger import IDLE_S, Ledger
from scheduler_proc.cache.pages.page_allocator import NO_PAGES
from scheduler_proc.cache.pages.retained_pages import RetainedPages
from scheduler_proc.cache.radix.eviction import LRU, EvictionPolicy
from scheduler_proc.cache.radix.fair_eviction import FairEviction
from scheduler_proc.cache.radix.lazy_heap import LazyHeap
from scheduler_proc.cache.radix.node_sizes import NodeSizes
from scheduler_proc.cache.radix.radix_checks import check_accounts, check_lines
from scheduler_proc.cache.radix.radix_node import NOBODYS, CacheAccount, Node, make_root


class RadixCache:
    """PrefixCache that keeps prefixes in a radix tree."""

    shares = True

    def __init__(
        self,
        page_size: int,
        clock: Callable[[], float],
        eviction: EvictionPolicy | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        """clock: seconds, for retention and for tenants that were absent for longer than idle_s. eviction:
        default LRU.
        """
        self.page_size = page_size
        self._eviction = eviction or LRU()
        self._seconds = clock
        self.version = 0
        self.num_evictable = 0
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        self._sizes = NodeSizes()
        self._clock = 0
        # Nodes whose retention expires, by the time.
        self._expiring: LazyHeap[tuple[float], Node] = LazyHeap()
        self.ledger = Ledger(clock, idle_s)
        self._fair = FairEviction(self.ledger, self._take)

    # -- lookup ---------------------------------------------------------------------------------------------

    def match(self, tokens: bytes, num_tokens: int, namespace: bytes) -> Match:
        root = self._roots.get(namespace)
        if root is None:
            root = make_root(namespace)  # it becomes the namespace's root with its first lock
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
        """Follow the tokens down from `node` by whole pages, up to `end`. Splits a run where they diverge."""
        page, pos = self._page_bytes, 0
        runs: list[IntArray] = []
        clock = self._clock = self._clock + 1
        while pos + page <= end and (child := node.children.get(tokens[pos : pos + page])) is not None:
            if not tokens.startswith(child.tokens, pos, end):
                child = self._split(child, self._num_equal_pages(child.tokens, tokens[pos:end]))
            child.last_used = clock
            runs.append(child.pages)
            pos += len(child.tokens)
            node = child
        if not runs:
            return node, NO_PAGES
        if node in node.account.leaves:
            self._queue(node)
            self.ledger.note(node.account)
        return node, runs[0] if len(runs) == 1 else np.concatenate(runs)

    def _num_equal_pages(self, a: bytes, b: bytes) -> int:
        n = min(len(a), len(b)) // TOKEN_BYTES
        differs = np.frombuffer(a, np.int32, n) != np.frombuffer(b, np.int32, n)
        first = int(differs.argmax())
        return (first if differs[first] else n) // self.page_size

    def _split(self, node: Node, num_pages: int) -> Node:
        """Split node after num_pages; returns the new upper half.

        before   parent ── node [0 .. n)
        after    parent ── top [0 .. k) ── node [k .. n)       leases on node keep their depth
        """
        cut = num_pages * self._page_bytes
        parent = node.parent
        assert parent is not None
        top = Node(parent, node.tokens[:cut], node.pages[:num_pages].copy(), self._clock, node.account)
        top.take_history_of(node)
        top.lock = node.lock
        if node in self._expiring:
            self._expiring.push(top, self._expiring.key_of(node))
        parent.children[node.tokens[: self._page_bytes]] = top
        node.parent = top
        node.tokens = node.tokens[cut:]
        node.pages = node.pages[num_pages:].copy()
        top.children[node.tokens[: self._page_bytes]] = node
        self._sizes.add(top)
        self._sizes.note_size(node)
        return top

    # -- growth ---------------------------------------------------------------------------------------------

    def insert(self, node: Node, tokens: bytes, pages: IntArray, priority: int = 0) -> Insertion:
        found, num_found, num_pages = NO_PAGES, 0, len(pages)
        if node.children:
            above = node
            node, found = self._walk(node, tokens, len(tokens))
            if node is not above:
                num_found = len(found)
                self._note_hit(node, above, priority)
                self.lock(node, above)
        num_new = num_pages - num_found
        if num_new:
            run = tokens[num_found * self._page_bytes :]
            self._clock += 1
            account = node.account
            own = pages[num_found:] if num_found else pages
            leaf = Node(node, run, own.copy(), self._clock, account)
            leaf.request_priority = priority
            leaf.lock = 1
            node.children[run[: self._page_bytes]] = leaf
            self._sizes.add(leaf)
            node = leaf
            account.num_pages += num_new
            account.num_locked += num_new
            if not account.is_noted:
                self.ledger.note(account)
            self.version += 1
        return Insertion(node, found, num_pages)

    # -- statistics for eviction ----------------------------------------------------------------------------

    def note_hit(self, node: Node, priority: int) -> None:
        self._note_hit(node, None, priority)

    def _note_hit(self, node: Node, end: Node | None, priority: int) -> None:
        """Record a hit of `node` and its ancestors, up to but not including `end`."""
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

    def lock(self, node: Node, above: Node | None = None) -> None:
        # above: an ancestor of `node` whose lock becomes this one.
        account = node.account
        num_locked = 0
        at: Node | None = node
        while at is not above:
            assert at is not None, "a lock can only move down"
            num_leases, parent = at.lock, at.parent
            if not num_leases:
                num_locked += len(at.pages)
                account.leaves.discard(at)
                if at.duration_s:
                    self._expiring.discard(at)
                if parent is None:
                    self._open(at)
            at.lock = num_leases + 1
            at = parent
        if num_locked:
            self.num_evictable -= num_locked
            account.num_locked += num_locked
            if not account.is_noted:
                self.ledger.note(account)

    def _open(self, root: Node) -> None:
        """Record that a root without leases gets its first one."""
        if root.account is NOBODYS:
            assert root.namespace not in self._roots
            self._roots[root.namespace] = root
            root.account = self.ledger.add_root(root.namespace)
        self.ledger.note_used(root.account)

    def unlock(self, node: Node) -> None:
        account = node.account
        num_unlocked = 0
        at: Node | None = node
        while at is not None:
            num_leases, parent = at.lock - 1, at.parent
            assert num_leases >= 0, "a lease was given back twice"
            at.lock = num_leases
            if not num_leases:
                num_unlocked += len(at.pages)
                if at.duration_s:
                    self._expiring.push(at, (self._seconds() + at.duration_s,))
                if parent is None:
                    self.ledger.note_unused(account)
                if not at.children:
                    if parent is None:
                        self._nothing_needs(at)
                    else:
                        self._queue(at)
            at = parent
        if num_unlocked:
            self.num_evictable += num_unlocked
            account.num_locked -= num_unlocked
            if not account.is_noted:
                self.ledger.note(account)

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
        """Make an unlocked leaf evictable, or drop an unlocked root without children."""
        if node.lock or node.children:
            return
        if node.parent is not None:
            self._queue(node)
        elif self._roots.pop(node.namespace, None) is not None:
            self.ledger.drop_root(node.account)
            node.account = NOBODYS

    def _queue(self, leaf: Node) -> None:
        leaf.account.leaves.push(leaf, (leaf.retention, self._eviction.rank(leaf), leaf.last_used))

    # -- shrinking ------------------------------------------------------------------------------------------

    def evict(self, num_pages: int, upto: int = 0, lease: Node | None = None) -> IntArray:
        if self._expiring:
            self._expire()
        upto = min(max(num_pages, upto), self.num_evictable)
        if self.ledger.has_several and num_pages < self.num_evictable:
            runs = self._fair.evict(num_pages, upto, None if lease is None else lease.account)
        else:
            runs = self._evict_in_order(num_pages, upto)
        if not runs:
            return NO_PAGES
        self.version += 1
        return runs[0] if len(runs) == 1 else np.concatenate(runs)

    def _evict_in_order(self, num_pages: int, upto: int) -> list[IntArray]:
        """Evict up to `upto` pages without regard to shares, of one tenant only, or everything of all of
        them. No leaf is cut for pages beyond num_pages.
        """
        runs: list[IntArray] = []
        num_optional = upto - num_pages
        for account in list(self.ledger):
            missing, leaves = upto, account.leaves
            while missing > 0 and (leaf := leaves.first()) is not None:
                if missing <= num_optional and len(leaf.pages) > missing:
                    break
                leaves.drop_first()
                runs.append(self._take_from(leaf, missing))
                missing -= len(runs[-1])
            self._count_taken(account, upto - missing)
            upto = missing
        return runs

    def _take(self, account: CacheAccount, num_pages: int) -> IntArray:
        """Take up to num_pages from the first leaf in the account's eviction order. There must be one."""
        leaf = account.leaves.pop()
        assert leaf is not None
        taken = self._take_from(leaf, num_pages)
        self._count_taken(account, len(taken))
        return taken

    def _count_taken(self, account: CacheAccount, num_pages: int) -> None:
        self.num_evictable -= num_pages
        account.num_pages -= num_pages
        self.ledger.note(account)

    def _take_from(self, leaf: Node, num_pages: int) -> IntArray:
        """Take up to num_pages from the end of an unlocked leaf, and drop the leaf if no page is left."""
        keep = len(leaf.pages) - num_pages
        if keep > 0:
            taken = leaf.pages[keep:]
            leaf.pages = leaf.pages[:keep].copy()
            leaf.tokens = leaf.tokens[: keep * self._page_bytes]
            self._sizes.note_size(leaf)
            self._nothing_needs(leaf)
            return taken
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.tokens[: self._page_bytes]]
        self._sizes.discard(leaf)
        if leaf.duration_s:
            self._expiring.discard(leaf)
        if not parent.lock:
            self._nothing_needs(parent)
        return leaf.pages

    def _expire(self) -> None:
        """Reset the retention of pages that were not used for as long as they were to be retained."""
        now = self._seconds()
        while (node := self._expiring.first()) is not None and self._expiring.key_of(node)[0] <= now:
            self._expiring.discard(node)
            node.retention = DEFAULT_PRIORITY
            node.duration_s = 0.0
            if node in node.account.leaves:
                self._queue(node)
                self.ledger.note(node.account)

    # -- checks ---------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        return sum(len(node.pages) for node in self.nodes())

    @property
    def num_nodes(self) -> int:
        return len(self._sizes)

    def largest_nodes(self, num_nodes: int) -> NodeColumns:
        nodes, now = self._sizes.largest(num_nodes), self._clock
        return NodeColumns(
            [node.uid for node in nodes],
            [node.parent.uid for node in nodes if node.parent is not None],  # only roots have none
            [len(node.pages) for node in nodes],
            [node.lock for node in nodes],
            [now - node.last_used for node in nodes],
            [node.num_hits for node in nodes],
            [node.retention for node in nodes],
            [node.account.tenant for node in nodes],
        )

    @property
    def num_namespaces(self) -> int:
        return len(self._roots)

    def nodes(self) -> Iterator[Node]:
        """Yield every node that holds pages, in no particular order."""
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
        assert all(root.lock or root.children for root in self._roots.values()), "an empty namespace was kept"
        for node in nodes:
            assert node.parent is not None
            assert node.parent.children[node.tokens[: self._page_bytes]] is node
            assert node.lock >= sum(child.lock for child in node.children.values())
        self._sizes.check(nodes)
        check_lines(nodes, self.ledger, self._expiring)
        check_accounts(nodes, self._roots.values(), self.ledger)
