"""Measure how fast this machine reads memory and how fast it computes.

    python -m benchmarks.cpu.machine [--megabytes 128] [--cpu-isa avx2]

Both are upper bounds for kernels, and other benchmarks print their figures as shares of them:

- The read rate is that of a sum over memory which no cache holds, in pages of 2 MiB where the system gives
  them. Memory that lies half in a cache would read up to three times as fast, and never twice the same.
- The compute rate is the highest of several matrix products, in bfloat16 and in float32. Without AVX512-BF16
  float32 is the faster one.

All threads of torch work. Each figure is the best of the calls that fit into two seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from model_worker.kernels.native.huge_pages import HugePages
from runtime.base.cpu_isa import choose_cpu_isa, usable_isas

SHAPES = ((2048, 1408, 512), (1024, 4864, 896), (2048, 2048, 2048))  # rows, outputs, depth
DTYPES = (torch.bfloat16, torch.float32)
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
LEAST_BYTES = 128 * 10**6  # for machines that do not report the sizes of their caches


def beyond_caches() -> int:
    """Return a number of bytes that no cache holds until they are read again: four times the largest one."""
    kib = [int(size.read_text().strip().removesuffix("K")) for size in CACHES.glob("index*/size")]
    return max(LEAST_BYTES, 4 * 1024 * max(kib, default=0))


def memory_sum(num_bytes: int) -> Callable[[], object]:
    """Return a function that reads that many bytes of memory once, with all threads."""
    return HugePages().empty(num_bytes).view(torch.float32).fill_(1.0).sum


def least_s(function: Callable[[], object], seconds: float = 2.0) -> float:
    """Return the shortest time of one call, in seconds, of as many calls as fit into that time."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - began)
    return best


def gflop_per_s(rows: int, outputs: int, depth: int, dtype: torch.dtype) -> float:
    """Return 10^9 operations a second of torch's linear layer, [rows, depth] by [outputs, depth]."""
    x = torch.randn(rows, depth).to(dtype)
    weight = torch.randn(outputs, depth).to(dtype)
    return 2e-9 * rows * outputs * depth / least_s(lambda: torch.nn.functional.linear(x, weight))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megabytes", type=int, help="of memory that is read (default: four times the largest cache)"
    )
    parser.add_argument(
        "--cpu-isa", choices=("auto", *usable_isas()), default="auto", help="that torch may use and no more"
    )
    args = parser.parse_args()
    choose_cpu_isa(args.cpu_isa)
    num_bytes = args.megabytes * 10**6 if args.megabytes else beyond_caches()
    with torch.inference_mode():
        read = num_bytes / least_s(memory_sum(num_bytes)) / 1e9
        computed = max(gflop_per_s(*shape, dtype) for shape in SHAPES for dtype in DTYPES)
    print(f"--memory-gb-per-s {read:.1f} --gflop-per-s {computed:.0f}")


if __name__ == "__main__":
    main()
