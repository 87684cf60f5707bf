"""A page-by-page model of the radix tree, and random operations that compare the two.

    python -m tests.harness.simulation.radix_model --ops 1000000 [--seed 0]

The model knows no runs and no heap: every page is an entry of a dictionary, keyed by namespace and all tokens
up to its end, and what is evicted next is the minimum over all that may be.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from runtime.wire.format import pack_ids
from runtime.wire.retention import DEFAULT_PRIORITY
from scheduler_proc.cache.pages.retained_pages import NO_END, RetainedPages
from scheduler_proc.cache.radix.eviction import EVICTION_POLICIES, make_eviction_policy
from scheduler_proc.cache.radix.radix_cache import RadixCache
from scheduler_proc.cache.radix_node import Node

PathKey: TypeAlias = tuple[bytes, tuple[int, ...]]


@dataclass(slots=True)
class Page:
    number: int
    created: int
    last_used: int
    request_priority: int
    num_hits: int = 0
    locks: int = 0
    retention: int = DEFAULT_PRIORITY
    duration_s: float = 0.0
    expires_at: float = 0.0


RANKS: dict[str, Callable[[Page], int]] = {
    "lru": lambda page: 0,
    "mru": lambda page: -page.last_used,
    "lfu": lambda page: page.num_hits,
    "fifo": lambda page: page.created,
    "filo": lambda page: -page.created,
    "priority": lambda page: page.request_priority,
    "slru": lambda page: 1 if page.num_hits else 0,
}


class Model:
    def __init__(self, page_size: int, policy: str) -> None:
        self.page_size = page_size
        self.rank = RANKS[policy]
        self.pages: dict[PathKey, Page] = {}
        self.clock = 0

    def path(self, namespace: bytes, tokens: list[int]) -> list[PathKey]:
        size = self.page_size
        return [(namespace, tuple(tokens[: end * size])) for end in range(1, len(tokens) // size + 1)]

    def match(self, namespace: bytes, tokens: list[int]) -> list[int]:
        self.clock += 1
        found = []
        for key in self.path(namespace, tokens):
            if key not in self.pages:
                break
            self.pages[key].last_used = self.clock
            found.append(self.pages[key].number)
        return found

    def insert(
        self, namespace: bytes, tokens: list[int], first: int, numbers: list[int], priority: int
    ) -> list[int]:
        """Pages of what follows the first pages of tokens. Returns the numbers that were there already."""
        self.clock += 1
        found = []
        for key, number in zip(self.path(namespace, tokens)[first:], numbers, strict=True):
            page = self.pages.get(key)
            if page is None:
                self.pages[key] = Page(number, self.clock, self.clock, priority)
            else:
                page.last_used = self.clock
                page.num_hits += 1
                page.request_priority = max(page.request_priority, priority)
                found.append(page.number)
        return found

    def lock(self, keys: list[PathKey], by: int, now: float) -> None:
        for key in keys:
            page = self.pages[key]
            page.locks += by
            if not page.locks and page.duration_s:
                page.expires_at = now + page.duration_s

    def retain(self, keys: list[PathKey], spans: list[RetainedPages], first: int) -> None:
        for number, key in enumerate(keys):
            for span in spans:
                if number >= first and span.start <= number < span.end:
                    self.pages[key].retention = span.priority
                    self.pages[key].duration_s = span.duration_s

    @property
    def num_evictable(self) -> int:
        return sum(not page.locks for page in self.pages.values())

    def evict(self, num_pages: int, now: float) -> set[int]:
        for page in self.pages.values():
            if not page.locks and page.duration_s and page.expires_at <= now:
                page.retention, page.duration_s = DEFAULT_PRIORITY, 0.0
        taken = set()
        for _ in range(min(num_pages, self.num_evictable)):
            inner = {(space, path[: -self.page_size]) for space, path in self.pages}
            leaves = [key for key, page in self.pages.items() if not page.locks and key not in inner]
            victim = min(leaves, key=self._place)
            taken.add(self.pages.pop(victim).number)
        return taken

    def _place(self, key: PathKey) -> tuple[int, int, int]:
        page = self.pages[key]
        return page.retention, self.rank(page), page.last_used


@dataclass(slots=True)
class Lease:
    """One stay: what a request would hold."""

    namespace: bytes
    tokens: list[int]
    node: Node
    num_pages: int
    priority: int
    spans: list[RetainedPages]


class Comparison:
    """Random stays in a small pool; both sides are asked the same and must answer the same."""

    def __init__(self, seed: int, policy: str) -> None:
        self.rng = random.Random(seed)
        self.page_size = self.rng.choice([1, 2, 4])
        self.retains = self.rng.random() < 0.6
        self.now = 100.0
        self.cache = RadixCache(self.page_size, make_eviction_policy(policy), lambda: self.now)
        self.model = Model(self.page_size, policy)
        self.leases: list[Lease] = []
        self.free = list(range(1, 61))

    def run(self, num_ops: int) -> None:
        for number in range(num_ops):
            self.now += self.rng.choice([0.0, 0.0, 0.1])
            draw = self.rng.random()
            if draw < 0.15:
                self.look()
            elif draw < 0.5 and len(self.leases) < 4:
                self.begin()
            elif draw < 0.7 and self.leases:
                self.grow(self.rng.choice(self.leases))
            elif draw < 0.9 and self.leases:
                self.end(self.leases.pop(self.rng.randrange(len(self.leases))))
            else:
                self.evict(self.rng.choice([1, 1, 3, 8, 100]))
            assert self.cache.num_evictable == self.model.num_evictable
            if number % 16 == 0:
                self.cache.check()

    def draw_tokens(self) -> list[int]:
        """Of two tokens, so that many begin the same and part anywhere."""
        pages = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 9))]
        return [token for token in pages for _ in range(self.page_size)]

    def look(self) -> None:
        tokens, namespace = self.draw_tokens(), self.rng.choice([b"", b"other"])
        found = self.cache.match(pack_ids(tokens), len(tokens), namespace).pages.tolist()
        assert found == self.model.match(namespace, tokens)

    def begin(self) -> None:
        tokens, namespace = self.draw_tokens(), self.rng.choice([b"", b"other"])
        match = self.cache.match(pack_ids(tokens), len(tokens), namespace)
        assert match.pages.tolist() == self.model.match(namespace, tokens)
        num_found = len(match.pages)
        lease = Lease(namespace, tokens, match.node, num_found, self.rng.randrange(-2, 3), self.draw_spans())
        keys = self.model.path(namespace, tokens)[:num_found]
        self.cache.lock(match.node)
        self.model.lock(keys, 1, self.now)
        if num_found:
            self.cache.note_hit(match.node, lease.priority)
            for key in keys:
                page = self.model.pages[key]
                page.num_hits += 1
                page.request_priority = max(page.request_priority, lease.priority)
            self.cache.retain(match.node, 0, num_found, lease.spans)
            self.model.retain(keys, lease.spans, 0)
        self.leases.append(lease)

    def draw_spans(self) -> list[RetainedPages]:
        if not self.retains or self.rng.random() < 0.4:
            return []
        edges = sorted(self.rng.sample(range(9), 3))
        return [
            RetainedPages(start, end, self.rng.choice([0, 35, 60]), self.rng.choice([0.0, 0.3, 1.0]))
            for start, end in ((edges[0], edges[1]), (edges[2], NO_END))
        ]

    def grow(self, lease: Lease) -> None:
        """Some pages of its own that follow."""
        num_new = min(self.rng.randrange(1, 4), len(lease.tokens) // self.page_size - lease.num_pages)
        if num_new <= 0 or num_new > len(self.free):
            return
        numbers = [self.free.pop() for _ in range(num_new)]
        first, upto = lease.num_pages, lease.num_pages + num_new
        run = lease.tokens[first * self.page_size : upto * self.page_size]
        done = self.cache.insert(lease.node, pack_ids(run), np.array(numbers, np.int32), lease.priority)
        tokens = lease.tokens[: upto * self.page_size]
        found = self.model.insert(lease.namespace, tokens, first, numbers, lease.priority)
        assert done.found.tolist() == found
        self.free += numbers[: len(found)]
        self.cache.move_lock(lease.node, done.node)
        keys = self.model.path(lease.namespace, tokens)
        self.model.lock(keys[first:], 1, self.now)
        lease.node, lease.num_pages = done.node, upto
        self.cache.retain(done.node, first, upto, lease.spans)
        self.model.retain(keys, lease.spans, first)

    def end(self, lease: Lease) -> None:
        self.cache.unlock(lease.node)
        keys = self.model.path(lease.namespace, lease.tokens)[: lease.num_pages]
        self.model.lock(keys, -1, self.now)

    def evict(self, num_pages: int) -> None:
        taken = self.cache.evict(num_pages).tolist()
        assert set(taken) == self.model.evict(num_pages, self.now), "another page was to go"
        self.free += taken


def compare(seed: int, num_ops: int) -> None:
    """The policies take turns with the seeds."""
    policy = list(EVICTION_POLICIES)[seed % len(EVICTION_POLICIES)]
    try:
        Comparison(seed, policy).run(num_ops)
    except BaseException as error:
        error.add_note(f"seed {seed}, {policy}")
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for seed in range(args.seed, args.seed + args.ops // 1000):
        compare(seed, 1000)
    print(f"{args.ops} operations agreed")


if __name__ == "__main__":
    main()
