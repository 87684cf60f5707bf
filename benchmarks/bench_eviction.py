"""Cost of a full radix tree for a step: 40,000 leaves, and in every step 26 requests end and 26 others come.

    python -m benchmarks.bench_eviction [--leaves 40000] [--steps 2000]

The pool is full from the first step on, so every page of a newcomer is evicted first, as many at a time as
the KV cache manager does. CPU time of this thread. `tree` is everything the prefix cache does in a step: look
up, lease, insert, let go, evict; with several tenants also counting whose the rows are. Each policy has one
tenant; then come the leaves of several, in turns, or all but one leaf each of the first.
"""

from __future__ import annotations

import argparse
import random
import time

import numpy as np

from runtime.wire.format import pack_ids
from scheduler_proc.cache.base import CacheNode
from scheduler_proc.cache.radix.eviction import EVICTION_POLICIES, eviction_bite, make_eviction_policy
from scheduler_proc.cache.radix.radix_cache import RadixCache

PAGE_SIZE = 16
NUM_STEMS = 64
STEM_PAGES = 8
LEAF_PAGES = 4
NEWCOMERS = 26
BUSY_ROWS = 256
HIT_SHARE = 0.5
"""Share of the newcomers that repeat a cached prompt."""
MANY_TENANTS = 1000


class Bench:
    def __init__(self, policy: str, num_leaves: int, num_tenants: int = 1, floods: bool = False) -> None:
        """floods: True if nearly all new prompts belong to the first tenant, once each tenant has one."""
        self.rng = random.Random(0)
        self.cache = RadixCache(PAGE_SIZE, time.monotonic, make_eviction_policy(policy))
        self.num_tenants = num_tenants
        self.floods = floods
        self.leases: list[CacheNode] = []
        self.free: list[int] = []
        self.num_prompts = 0
        self.prompts: list[tuple[bytes, bytes]] = []
        self.evict_us = 0.0
        self.num_pages = num_leaves * LEAF_PAGES + max(NUM_STEMS, num_tenants) * STEM_PAGES
        self.cache.ledger.pool_pages = self.num_pages
        self.free = list(range(self.num_pages))
        for _ in range(num_leaves):
            self.come(*self.new_prompt())
            if len(self.leases) > BUSY_ROWS:
                self.cache.unlock(self.leases.pop(0))

    def new_prompt(self) -> tuple[bytes, bytes]:
        """Return a new prompt and its namespace."""
        self.num_prompts += 1
        number = self.num_prompts
        namespace = b""
        if self.num_tenants > 1:
            is_flood = self.floods and number > self.num_tenants
            namespace = (1 if is_flood else 1 + number % self.num_tenants).to_bytes(8, "big")
        stem_id = number % NUM_STEMS if self.num_tenants <= NUM_STEMS else 0
        stem = np.full(STEM_PAGES * PAGE_SIZE, stem_id, np.int32)
        own = np.full(LEAF_PAGES * PAGE_SIZE, 1000 + number, np.int32)
        prompt = pack_ids(np.concatenate([stem, own])), namespace
        self.prompts.append(prompt)
        return prompt

    def come(self, prompt: bytes, namespace: bytes) -> None:
        cache = self.cache
        match = cache.match(prompt, len(prompt) // 4, namespace)
        cache.lock(match.node)
        num_found = len(match.pages)
        if num_found:
            cache.note_hit(match.node, 0)
        num_missing = STEM_PAGES + LEAF_PAGES - num_found
        node = match.node
        if num_missing:
            if num_missing > len(self.free):
                started = time.thread_time()
                bite = max(num_missing - len(self.free), eviction_bite(self.num_pages))
                self.free += cache.evict(bite).tolist()
                self.evict_us += (time.thread_time() - started) * 1e6
            pages = np.array([self.free.pop() for _ in range(num_missing)], np.int32)
            node = cache.insert(node, prompt[num_found * PAGE_SIZE * 4 :], pages).node
        self.leases.append(node)

    def step(self) -> tuple[float, float]:
        """Return microseconds of the tree, and of its evictions alone, for one step."""
        prompts = [
            self.rng.choice(self.prompts[-30_000:]) if self.rng.random() < HIT_SHARE else self.new_prompt()
            for _ in range(NEWCOMERS)
        ]
        self.evict_us = 0.0
        started = time.thread_time()
        for lease in self.leases[:NEWCOMERS]:
            self.cache.unlock(lease)
        del self.leases[:NEWCOMERS]
        if self.num_tenants > 1:  # as ShareGuard does
            accounts = [lease.account for lease in self.leases]
            self.cache.ledger.set_rows(accounts, [1] * len(accounts))
        for prompt, namespace in prompts:
            self.come(prompt, namespace)
        return (time.thread_time() - started) * 1e6, self.evict_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=40_000)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    cases = [(policy, 1, False) for policy in EVICTION_POLICIES]
    cases += [("lru", num, floods) for num in (2, MANY_TENANTS) for floods in (False, True)]
    for policy, num_tenants, floods in cases:
        bench = Bench(policy, args.leaves, num_tenants, floods)
        num_before = sum(not node.children for node in bench.cache.nodes())
        tree, evict = np.array([bench.step() for _ in range(args.steps)]).T
        p50, p99 = np.percentile(evict, (50, 99))
        print(
            f"{policy:8s} {num_tenants:5d} tenants{', flood' if floods else ''}, {num_before} leaves: "
            f"tree p50 {np.percentile(tree, 50):5.0f} us a step; "
            f"eviction p50 {p50:5.0f}, p99 {p99:5.0f}, most {evict.max():6.0f} us",
            flush=True,
        )
        bench.cache.check()


if __name__ == "__main__":
    main()
