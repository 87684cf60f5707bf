"""NoCache: the prefix cache that remembers nothing, for --disable-radix-cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from runtime.wire.format import IntArray
from scheduler_proc.cache.base import NO_NODES, CacheNode, Insertion, Match, NodeColumns
from scheduler_proc.cache.ledger import Ledger
from scheduler_proc.cache.pages.page_allocator import NO_PAGES
from scheduler_proc.cache.pages.retained_pages import RetainedPages
from scheduler_proc.cache.radix.radix_node import NOBODYS


class _Nowhere:
    uid = 0
    account = NOBODYS


class NoCache:
    """PrefixCache without memory: every match is empty, every offered page stays its row's."""

    shares = False
    version = 0
    num_pages = 0
    num_nodes = 0
    num_evictable = 0

    def __init__(self, page_size: int, clock: Callable[[], float]) -> None:
        self.page_size = page_size
        self._nowhere = _Nowhere()
        self.ledger = Ledger(clock)

    def largest_nodes(self, num_nodes: int) -> NodeColumns:
        return NO_NODES

    def match(self, tokens: bytes, num_tokens: int, namespace: bytes) -> Match:
        return Match(self._nowhere, NO_PAGES)

    def match_len(self, tokens: bytes, num_tokens: int, namespace: bytes) -> int:
        return 0

    def match_path(self, tokens: bytes, num_tokens: int, namespace: bytes) -> tuple[int, ...]:
        return ()

    def insert(self, node: CacheNode, tokens: bytes, pages: IntArray, priority: int = 0) -> Insertion:
        return Insertion(node, NO_PAGES, 0)

    def note_hit(self, node: CacheNode, priority: int) -> None:
        """Do nothing: no hits are counted."""

    def retain(self, node: CacheNode, first: int, num_pages: int, spans: Sequence[RetainedPages]) -> None:
        """Do nothing: no page is kept. A request with a retention is refused earlier."""

    def lock(self, node: CacheNode) -> None:
        """Do nothing: there is nothing to keep."""

    def unlock(self, node: CacheNode) -> None:
        """Do nothing: there is nothing to let go."""

    def num_pages_held(self, nodes: Sequence[CacheNode]) -> list[int]:
        return [0] * len(nodes)

    def evict(self, num_pages: int, upto: int = 0, lease: CacheNode = None) -> IntArray:
        return NO_PAGES

    def owned_pages(self) -> Iterator[IntArray]:
        return iter(())

    def check(self) -> None:
        """Do nothing: nothing can be wrong."""
