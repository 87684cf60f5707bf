"""What a full radix tree costs a step: 40,000 leaves, and in every step 26 requests end and 26 others come.

    python -m benchmarks.bench_eviction [--leaves 40000] [--steps 2000]

The pool is full from the first step on, so every page of a newcomer is evicted first, as many at a time as
the KV cache manager does. CPU time of this thread. `tree` is everything the prefix cache does in a step: look
up, lease, insert, let go, evict.
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
"""Of the newcomers, so many ask again for what is cached."""


class Bench:
    def __init__(self, policy: str, num_leaves: int) -> None:
        self.rng = random.Random(0)
        self.cache = RadixCache(PAGE_SIZE, make_eviction_policy(policy))
        self.leases: list[CacheNode] = []
        self.free: list[int] = []
        self.num_prompts = 0
        self.prompts: list[bytes] = []
        self.evict_us = 0.0
        self.num_pages = num_leaves * LEAF_PAGES + NUM_STEMS * STEM_PAGES
        self.free = list(range(self.num_pages))
        for _ in range(num_leaves):
            self.come(self.new_prompt())
            if len(self.leases) > BUSY_ROWS:
                self.cache.unlock(self.leases.pop(0))

    def new_prompt(self) -> bytes:
        self.num_prompts += 1
        stem = np.full(STEM_PAGES * PAGE_SIZE, self.num_prompts % NUM_STEMS, np.int32)
        own = np.full(LEAF_PAGES * PAGE_SIZE, 1000 + self.num_prompts, np.int32)
        prompt = pack_ids(np.concatenate([stem, own]))
        self.prompts.append(prompt)
        return prompt

    def come(self, prompt: bytes) -> None:
        cache = self.cache
        match = cache.match(prompt, len(prompt) // 4, b"")
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
            done = cache.insert(node, prompt[num_found * PAGE_SIZE * 4 :], pages)
            cache.move_lock(node, done.node)
            node = done.node
        self.leases.append(node)

    def step(self) -> tuple[float, float]:
        """Microseconds: of the tree, and of its evictions alone."""
        prompts = [
            self.rng.choice(self.prompts[-30_000:]) if self.rng.random() < HIT_SHARE else self.new_prompt()
            for _ in range(NEWCOMERS)
        ]
        self.evict_us = 0.0
        started = time.thread_time()
        for lease in self.leases[:NEWCOMERS]:
            self.cache.unlock(lease)
        del self.leases[:NEWCOMERS]
        for prompt in prompts:
            self.come(prompt)
        return (time.thread_time() - started) * 1e6, self.evict_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=40_000)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    for policy in EVICTION_POLICIES:
        bench = Bench(policy, args.leaves)
        num_before = sum(not node.children for node in bench.cache.nodes())
        tree, evict = np.array([bench.step() for _ in range(args.steps)]).T
        p50, p99 = np.percentile(evict, (50, 99))
        print(
            f"{policy:8s} {num_before} leaves: tree p50 {np.percentile(tree, 50):5.0f} us a step; "
            f"eviction p50 {p50:5.0f}, p99 {p99:5.0f}, most {evict.max():6.0f} us",
            flush=True,
        )
        bench.cache.check()


if __name__ == "__main__":
    main()
