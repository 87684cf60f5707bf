"""Random operations that compare the radix tree with a page-by-page model of it
(tests.harness.simulation.radix_pages).

    python -m tests.harness.simulation.radix_model --ops 1000000 [--seed 0]
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np

from runtime.wire.format import pack_ids
from scheduler_proc.cache.pages.retained_pages import NO_END, RetainedPages
from scheduler_proc.cache.radix.eviction import EVICTION_POLICIES, make_eviction_policy
from scheduler_proc.cache.radix.radix_cache import RadixCache
from scheduler_proc.cache.radix.radix_node import Node
from scheduler_proc.cache.tenants import OWNER, tenant_of
from tests.harness.simulation.radix_pages import NUM_PAGES, Model

OF_ONE = (b"", OWNER + b"other")
OF_SEVERAL = (*OF_ONE, b"tenant-A", b"tenant-B", b"tenant-Bother")


@dataclass(slots=True)
class Lease:
    """One stay: what a request would hold."""

    namespace: bytes
    tokens: list[int]
    node: Node
    num_pages: int
    priority: int
    spans: list[RetainedPages]
    num_private: int
    """Pages of its row beside the tree's."""


class Comparison:
    """Random stays in a small pool; both sides are asked the same and must answer the same."""

    def __init__(self, seed: int, policy: str) -> None:
        self.rng = random.Random(seed)
        self.page_size = self.rng.choice([1, 2, 4])
        self.retains = self.rng.random() < 0.6
        self.now = 100.0
        self.namespaces = self.rng.choice([OF_ONE, OF_SEVERAL, OF_SEVERAL])
        idle_s = self.rng.choice([0.2, 600.0, 600.0])
        self.cache = RadixCache(self.page_size, lambda: self.now, make_eviction_policy(policy), idle_s)
        self.cache.ledger.pool_pages = NUM_PAGES
        self.model = Model(self.page_size, policy, idle_s)
        self.leases: list[Lease] = []
        self.free = list(range(1, NUM_PAGES + 1))

    def run(self, num_ops: int) -> None:
        for number in range(num_ops):
            self.now += self.rng.choice([0.0, 0.0, 0.1])
            draw = self.rng.random()
            if draw < 0.15:
                self.look()
            elif draw < 0.17:
                self.share()
            elif draw < 0.22 and self.leases:
                self.ask(self.rng.choice(self.leases))
            elif draw < 0.5 and len(self.leases) < 6:
                self.begin()
            elif draw < 0.7 and self.leases:
                self.grow(self.rng.choice(self.leases))
            elif draw < 0.9 and self.leases:
                self.end(self.leases.pop(self.rng.randrange(len(self.leases))))
            else:
                self.evict(self.rng.choice([1, 1, 3, 8, 20, 100]), self.rng.choice([0, 5, 12]))
            assert self.cache.num_evictable == self.model.num_evictable
            if number % 16 == 0:
                self.cache.check()

    def draw_tokens(self) -> list[int]:
        """Draw a sequence of two tokens, so that many begin the same and part anywhere."""
        pages = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 9))]
        return [token for token in pages for _ in range(self.page_size)]

    def look(self) -> None:
        tokens, namespace = self.draw_tokens(), self.rng.choice(self.namespaces)
        found = self.cache.match(pack_ids(tokens), len(tokens), namespace).pages.tolist()
        assert found == self.model.match(namespace, tokens)

    def begin(self) -> None:
        tokens, namespace = self.draw_tokens(), self.rng.choice(self.namespaces)
        match = self.cache.match(pack_ids(tokens), len(tokens), namespace)
        assert match.pages.tolist() == self.model.match(namespace, tokens)
        num_found = len(match.pages)
        num_private = self.rng.choice([0, 0, 1, 9])
        lease = Lease(
            namespace,
            tokens,
            match.node,
            num_found,
            self.rng.randrange(-2, 3),
            self.draw_spans(),
            num_private,
        )
        self.model.begin(namespace)
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
        keys = self.model.path(lease.namespace, tokens)
        self.model.lock(keys[first:], 1, self.now)
        lease.node, lease.num_pages = done.node, upto
        self.cache.retain(done.node, first, upto, lease.spans)
        self.model.retain(keys, lease.spans, first)

    def share(self) -> None:
        tenant = tenant_of(self.rng.choice(self.namespaces))
        share = self.rng.choice([None, 0.0, 0.125, 0.5, 1.0])
        self.cache.ledger.shares.set(tenant, share)
        self.model.shares.set(tenant, share)

    def ask(self, lease: Lease) -> None:
        """Return how many pages are withheld from another row of this tenant."""
        self.count_rows()
        self.cache.ledger.settle()
        account = lease.node.account
        tenant = account.tenant
        for num_new in (0, 1, 7):
            assert account.is_beyond_with(num_new) == self.model.is_beyond_with(tenant, num_new, self.now)
        assert self.cache.ledger.num_withheld(account) == self.model.withheld(tenant, self.now)

    def count_rows(self) -> None:
        accounts = [lease.node.account for lease in self.leases]
        self.cache.ledger.set_rows(accounts, [lease.num_private for lease in self.leases])
        self.model.private = Counter()
        for lease in self.leases:
            self.model.private[tenant_of(lease.namespace)] += lease.num_private

    def end(self, lease: Lease) -> None:
        self.cache.unlock(lease.node)
        self.model.end(lease.namespace, self.now)
        keys = self.model.path(lease.namespace, lease.tokens)[: lease.num_pages]
        self.model.lock(keys, -1, self.now)

    def evict(self, num_pages: int, upto: int) -> None:
        self.count_rows()
        node, taker = None, None
        if self.leases and self.rng.random() < 0.5:  # for one of them
            lease, num_wanted = self.rng.choice(self.leases), self.rng.randrange(12)
            self.cache.ledger.add_private(lease.node.account, num_wanted)
            node, taker = lease.node, tenant_of(lease.namespace)
            self.model.private[taker] += num_wanted
        has_several, num_evictable = self.cache.ledger.has_several, self.model.num_evictable
        taken = self.cache.evict(num_pages, upto, node).tolist()
        if not has_several:  # no run is cut for more than is needed
            assert min(num_pages, num_evictable) <= len(taken) <= max(num_pages, upto)
            upto = max(num_pages, len(taken))
        assert set(taken) == self.model.evict(num_pages, upto, taker, self.now), "another page was to go"
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
