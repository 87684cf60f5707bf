"""Host time of applying a plan in the worker: decode the message, write the tables, lay out the ForwardBatch.

    python -m benchmarks.bench_worker_plan

steady  256 rows decode, every token comes from the FutureMap, each sixteenth row gets a page
churn   the same, and 26 rows are replaced by newcomers that compute 8 tokens each
The model and the sampler cost nothing here. The last line is JSON: microseconds by case.
"""

from __future__ import annotations

import argparse
import json
import time

import msgspec
import numpy as np
import torch

from model_worker.attention.forward_batch import ForwardBatch
from model_worker.device import make_device
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.ops.torch_ops import TorchOps
from model_worker.runner.build_runner import build_runner
from model_worker.runner.model_runner import ModelRunner
from runtime.wire.format import pack_ids
from runtime.wire.plan import BatchPlan, RowSetup
from runtime.wire.sampling_params import SamplingParams

VOCAB = 32_000
MAX_LEN = 8192
NEWCOMERS = 26
NEW_TOKENS = 8


class NoModel:
    def __call__(self, batch: ForwardBatch, kv_pool: object, backend: object) -> torch.Tensor:
        raise AssertionError("only the application of plans is measured")

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("only the application of plans is measured")


def make_runner(num_rows: int, page_size: int) -> ModelRunner:
    device = make_device("cpu", threaded=False)
    num_pages = num_rows * (MAX_LEN // page_size)
    # One small head, so that a pool with a real number of pages fits. A plan does not touch its memory.
    pool = MHATokenToKVPool(num_pages, page_size, 1, 1, 2, torch.bfloat16, device.torch_device)
    return build_runner(
        NoModel(), pool, TorchOps(), device, max_rows=num_rows, max_len=MAX_LEN, vocab_size=VOCAB
    )


def steady_plan(step: int, num_rows: int, page_size: int) -> BatchPlan:
    """Return a decode of all rows. Their lengths differ, so that a sixteenth of them begins a page in every
    step.
    """
    starts = 1000 + np.arange(num_rows) + step
    turning = np.flatnonzero(starts % page_size == 0)
    spans = np.stack([turning, starts[turning] // page_size, np.ones_like(turning)], axis=1)
    return BatchPlan(
        step=step,
        setups=(),
        page_copies=(),
        table_spans=pack_ids(spans),
        table_pages=pack_ids(turning * (MAX_LEN // page_size) + 1),
        num_decodes=num_rows,
        rows=pack_ids(np.arange(num_rows)),
        starts=pack_ids(starts),
        input_ids=pack_ids(np.full(num_rows, -1)),
    )


def churn_plan(step: int, num_rows: int, page_size: int) -> BatchPlan:
    steady = steady_plan(step, num_rows - NEWCOMERS, page_size)
    rows = np.arange(num_rows - NEWCOMERS, num_rows)
    pages = -(-NEW_TOKENS // page_size)
    spans = np.stack([rows, np.zeros_like(rows), np.full_like(rows, pages)], axis=1)
    new_ids = np.arange(NEWCOMERS * NEW_TOKENS)
    return msgspec.structs.replace(
        steady,
        setups=tuple(RowSetup.of(int(row), NEW_TOKENS, SamplingParams(seed=int(row))) for row in rows),
        table_spans=steady.table_spans + pack_ids(spans),
        table_pages=steady.table_pages + pack_ids(np.arange(NEWCOMERS * pages)),
        rows=steady.rows + pack_ids(rows),
        starts=steady.starts + pack_ids([0] * NEWCOMERS),
        input_ids=steady.input_ids + pack_ids(new_ids),
        lens=pack_ids([NEW_TOKENS] * NEWCOMERS),
        samples=pack_ids([1] * NEWCOMERS),
        drafts=pack_ids([0] * NEWCOMERS),
    )


def measure(runner: ModelRunner, frames: list[bytes], repeats: int) -> dict[str, float]:
    decode = msgspec.msgpack.Decoder(BatchPlan).decode
    times = []
    for i in range(repeats):
        begin = time.perf_counter()
        runner.apply(decode(frames[i % len(frames)]))
        times.append((time.perf_counter() - begin) * 1e6)
    p50, p99 = np.percentile(times[repeats // 10 :], [50, 99])
    return {"p50_us": round(float(p50), 1), "p99_us": round(float(p99), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    encode = msgspec.msgpack.Encoder().encode
    results = {}
    for page_size in (1, 16):
        runner = make_runner(options.rows, page_size)
        for case, make_plan in (("steady", steady_plan), ("churn", churn_plan)):
            frames = [encode(make_plan(step, options.rows, page_size)) for step in range(64)]
            results[f"{case}_page_{page_size}"] = measure(runner, frames, options.repeats)
            print(f"{case:>6} page size {page_size:>2}: {results[f'{case}_page_{page_size}']}")
    print(json.dumps({"rows": options.rows, **results}))


if __name__ == "__main__":
    main()
