"""What this machine reads and computes: the two figures that shares of the floor are taken from.

The most of several sizes and shapes, with all threads of torch: a sum over memory of about the model's size,
and bf16 matrix products. Run: python -m benchmarks.cpu.machine [--megabytes 56]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

SHAPES = ((2048, 1408, 512), (1024, 4864, 896), (2048, 2048, 2048))  # rows, outputs, depth


def least_s(function: Callable[[], object], seconds: float = 2.0) -> float:
    """Of as many calls as fit."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - began)
    return best


def memory_gb_per_s(megabytes: int) -> float:
    memory = torch.ones(megabytes * 10**6 // 4)
    return memory.nbytes / least_s(memory.sum) / 1e9


def gflop_per_s(rows: int, outputs: int, depth: int) -> float:
    x = torch.randn(rows, depth).bfloat16()
    weight = torch.randn(outputs, depth).bfloat16()
    return 2e-9 * rows * outputs * depth / least_s(lambda: torch.nn.functional.linear(x, weight))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=56, help="that a decode step reads")
    args = parser.parse_args()
    with torch.inference_mode():
        read = memory_gb_per_s(args.megabytes)
        computed = max(gflop_per_s(*shape) for shape in SHAPES)
    print(f"--memory-gb-per-s {read:.1f} --gflop-per-s {computed:.0f}")


if __name__ == "__main__":
    main()
