"""Cost of a snapshot for the scheduler: making it and encoding its answer, between two steps.

    python -m benchmarks.cpu.snapshot [--rows 256] [--nodes 10000] [--waiting 5000] [--repeats 200]

All rows decode, behind them requests wait, and the radix tree has leaves of 1 to 8 pages. CPU time of one
question, its answer encoded, without the sockets; median, 99th percentile, and the size of the
answer. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks.bench_step import VOCAB_SIZE, WARMUP_STEPS, Bench, Case
from runtime.wire.format import pack_ids
from runtime.wire.messages import ControlRequest
from scheduler_proc.core.output import reply_to
from scheduler_proc.observe.snapshot import SnapshotMaker

NUM_PROMPT = 256
PAGE_SIZE = 16
MAX_LEAF_PAGES = 8


def fill_tree(bench: Bench, num_nodes: int) -> None:
    """Cache prefixes that no request uses until the tree has num_nodes nodes."""
    kv, draw = bench.lifecycle.kv, np.random.default_rng(1)
    cache: Any = kv.cache
    while cache.num_nodes < num_nodes:
        num_pages = int(draw.integers(1, MAX_LEAF_PAGES + 1))
        tokens = pack_ids(draw.integers(8, VOCAB_SIZE, num_pages * PAGE_SIZE, dtype=np.int32))
        taken = kv.pages.try_alloc(num_pages)
        root = cache.match(tokens, num_pages * PAGE_SIZE, b"").node
        cache.lock(root)
        cache.unlock(cache.insert(root, tokens, taken).node)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--waiting", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    gc.disable()  # as the process does
    pool = args.nodes * MAX_LEAF_PAGES + 2 * args.rows * (NUM_PROMPT // PAGE_SIZE + 20)
    case = Case(args.rows, PAGE_SIZE, False, NUM_PROMPT, num_waiting=args.waiting, num_pages=pool)
    bench = Bench(case)
    bench.step(bench.first_frames())
    for _ in range(WARMUP_STEPS):
        bench.step([])
    fill_tree(bench, args.nodes)
    maker, seconds = SnapshotMaker(bench.lifecycle, time.monotonic, time.time), []
    question = ControlRequest(1, 0, "snapshot")
    for _ in range(args.repeats):
        started = time.thread_time()
        reply = reply_to(question, maker.make())
        seconds.append(time.thread_time() - started)
        bench.step([])
    report = {
        "rows": args.rows,
        "nodes": bench.lifecycle.kv.cache.num_nodes,
        "waiting": len(bench.lifecycle.room),
        "p50_us": round(statistics.median(seconds) * 1e6, 1),
        "p99_us": round(statistics.quantiles(seconds, n=100)[98] * 1e6, 1),
        "answer_bytes": len(reply.body),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
