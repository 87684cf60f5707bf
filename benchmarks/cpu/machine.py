"""Rates at which this machine reads and computes: the two figures that shares of the floor are taken from.

The most of several sizes and shapes, with all threads of torch: a sum over memory of about the model's size,
and matrix products in bf16 and in float32, which is the faster one without AVX512-BF16. Run:
python -m benchmarks.cpu.machine [--megabytes 56] [--cpu-isa avx2]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from runtime.base.cpu_isa import choose_cpu_isa, usable_isas

SHAPES = ((2048, 1408, 512), (1024, 4864, 896), (2048, 2048, 2048))  # rows, outputs, depth
DTYPES = (torch.bfloat16, torch.float32)


def least_s(function: Callable[[], object], seconds: float = 2.0) -> float:
    """Return the least time of as many calls as fit."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - began)
    return best


def memory_gb_per_s(megabytes: int) -> float:
    memory = torch.ones(megabytes * 10**6 // 4)
    return memory.nbytes / least_s(memory.sum) / 1e9


def gflop_per_s(rows: int, outputs: int, depth: int, dtype: torch.dtype) -> float:
    x = torch.randn(rows, depth).to(dtype)
    weight = torch.randn(outputs, depth).to(dtype)
    return 2e-9 * rows * outputs * depth / least_s(lambda: torch.nn.functional.linear(x, weight))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=56, help="that a decode step reads")
    parser.add_argument(
        "--cpu-isa", choices=("auto", *usable_isas()), default="auto", help="that torch may use and no more"
    )
    args = parser.parse_args()
    choose_cpu_isa(args.cpu_isa)
    with torch.inference_mode():
        read = memory_gb_per_s(args.megabytes)
        computed = max(gflop_per_s(*shape, dtype) for shape in SHAPES for dtype in DTYPES)
    print(f"--memory-gb-per-s {read:.1f} --gflop-per-s {computed:.0f}")


if __name__ == "__main__":
    main()
