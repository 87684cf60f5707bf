"""Time of a step that verifies guesses on the CPU, against one that decodes, turn by turn in one run.

    python -m benchmarks.cpu.verification [--model qwen-0.5b] [--batches 1,8] [--guesses 1,2,4,8]
                                            [--context 512] [--temperature 0]

A step is what a worker does from the bytes of a plan to those of its result; every row has as many guesses,
behind a token that only the device knows. Milliseconds, the median and the least, and their ratio to those of
the step without guesses. A row that accepts all of k guesses gains where the ratio is below k + 1. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch

from benchmarks.bench_cpu_step import SHAPES, WiredWorker, make_runner, measure
from benchmarks.decode_rows import verification_plan


def main() -> None:
    options = _parse()
    batches, guesses = ([int(n) for n in text.split(",")] for text in (options.batches, options.guesses))
    runner = make_runner(
        options.model, "cpu_native", getattr(torch, options.dtype), max(batches), options.context
    )
    worker = WiredWorker(runner)
    results: dict[str, Any] = {}
    for batch in batches:
        decode = worker.prepare(batch, options.context, temperature=options.temperature)
        steps = {"0": decode} | {
            str(k): worker.step_of(verification_plan(batch, options.context, k)) for k in guesses
        }
        case: dict[str, Any] = {}
        for name, times in measure(steps, options.seconds).items():
            median, least = statistics.median(times.ms), min(times.ms)
            case[name] = {"ms": median, "least_ms": least}
            ratio, least_ratio = median / case["0"]["ms"], least / case["0"]["least_ms"]
            print(
                f"batch {batch:>3} guesses {name:>2}: {median:8.2f} ms (least {least:.2f}), "
                f"{ratio:.2f} x (least {least_ratio:.2f} x) a decode"
            )
        results[str(batch)] = case
    print(json.dumps({"model": options.model, "context": options.context, "batches": results}))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="qwen-0.5b", choices=["demo", *SHAPES])
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--guesses", default="1,2,4,8")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each batch (default 5)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
