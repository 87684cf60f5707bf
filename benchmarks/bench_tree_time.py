"""Share of a run's time that the prefix cache takes, with the demo model, scheduler, worker, and requests
that share prefixes.

    python -m benchmarks.bench_tree_time [--groups 8] [--prompts 16]

Every call of the cache is timed from outside, so the share includes the cost of timing. The worker computes
on a thread of its own; time is wall time of the whole run.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

from runtime.settings.config import DEMO_MODEL
from runtime.wire.sampling_params import SamplingParams
from tests.harness.ring.serving_ring import Ring, Setting

NUM_SYSTEM, NUM_QUESTION, NUM_OUTPUT = 256, 32, 32


class TimedCache:
    """Passes every call on to a PrefixCache, and adds up their times."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.ns = self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._cache, name)
        return self._timed(value) if callable(value) else value

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter_ns()
            result = call(*args)
            self.ns += time.perf_counter_ns() - start
            self.num_calls += 1
            return result

        return timed


def generated_shared_prefix(num_groups: int, num_prompts: int) -> list[list[int]]:
    rng = random.Random(0)

    def draw(length: int) -> list[int]:
        return [rng.randrange(10, 1000) for _ in range(length)]

    prompts = []
    for _ in range(num_groups):
        system_prompt = draw(NUM_SYSTEM)
        prompts += [system_prompt + draw(NUM_QUESTION) for _ in range(num_prompts)]
    rng.shuffle(prompts)
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=16)
    args = parser.parse_args()
    ring = Ring(DEMO_MODEL, Setting())
    timed = TimedCache(ring.scheduler.kv.cache)
    ring.scheduler.kv.cache = timed
    prompts = generated_shared_prefix(args.groups, args.prompts)
    sampling = [SamplingParams(max_tokens=NUM_OUTPUT, seed=0, ignore_eos=True)] * len(prompts)
    start = time.perf_counter_ns()
    ring.generate(prompts, sampling, solo=False)
    wall = time.perf_counter_ns() - start
    counts = ring.scheduler.kv.counts
    ring.close()
    print(
        f"{len(prompts)} requests in {wall / 1e9:.2f} s, hit rate {counts.hit_rate:.3f}; {timed.num_calls} "
        f"calls of the cache took {timed.ns / 1e6:.2f} ms, {100 * timed.ns / wall:.3f} % of the time"
    )


if __name__ == "__main__":
    main()
