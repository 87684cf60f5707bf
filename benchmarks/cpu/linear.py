"""Measure linear layers on the CPU: microseconds, and shares of what the machine can read and compute.

    python -m benchmarks.cpu.linear [--shapes 1024x512,512x1408] [--rows 1,8,64] [--builds SRC,SRC]
                                    [--cpu-isa avx2] [--dtype int8] [--gflop-per-s 150]

A shape is outputs x inputs. A build is a folder of C++ sources, for example another checkout's whose calls
have the same fields. Without --builds it is this checkout's alone.

A case multiplies the same rows by many different weights of one shape, as many as fill --megabytes, so that
caches do not hold a weight until its next turn. They are recorded as one program, as a step of a model is, so
that no Python runs between them. With int8 weights the rows are bfloat16, and their conversion counts.

Each line tells, for one layer and each build, the microseconds (the best of all turns; with one thread CPU
time, which other work disturbs less), the rate at which weights are read, and the rate of multiplications
and additions. In brackets stands the share of the machine's read rate: benchmarks.cpu.machine's sum over as
much memory runs in turns with the layers, and the share is that of the quickest tenths of both. With
--gflop-per-s the second rate has its share, too. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.cpu.machine import beyond_caches, memory_sum
from model_worker.kernels.int8_linear import quantize_rows
from model_worker.kernels.native.build import SOURCE_DIR, build_library, trusted_cache
from model_worker.kernels.native.int8_linear import Int8Linear
from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.operators import PackedLinear, pack
from model_worker.kernels.native.program import Program
from runtime.base.cpu_isa import cpu_isa, usable_isas
from runtime.base.environment import kernel_cache_dir

LLAMA_60M = "1024x512,2816x512,512x1408,8192x512"


def one_after_another(
    kernels: NativeKernels, outputs: int, inputs: int, rows: int, dtype: torch.dtype, megabytes: float
) -> tuple[Callable[[], object], int]:
    """Return a function that multiplies the same rows by each of many weights, and the number of weights."""
    torch.manual_seed(0)
    count = max(1, round(megabytes * 1e6 / (outputs * inputs * dtype.itemsize)))
    layers: list[PackedLinear | Int8Linear] = []
    for _ in range(count):
        weight = torch.randn(outputs, inputs)
        if dtype is torch.int8:
            layers.append(Int8Linear(kernels, *quantize_rows(weight), None, torch.bfloat16))
            continue
        weight = weight.to(dtype)
        pack(kernels, weight)
        layers.append(PackedLinear(kernels, weight, None, out_dtype=dtype))
    x = torch.randn(rows, inputs).to(torch.bfloat16 if dtype is torch.int8 else dtype)

    def multiply() -> torch.Tensor:
        return [layer(x) for layer in layers][-1]

    program = Program(kernels, multiply, (layers, x), num_tokens=rows, num_outputs=0, num_seqs=0)
    return partial(program.run, num_tokens=rows, num_outputs=0, num_seqs=0), count


def timed(functions: list[Callable[[], object]], seconds: float, clock: Callable[[], float]) -> np.ndarray:
    """Call functions in turns, for `seconds` each. Return the seconds of each call, [turns, functions]."""
    for function in functions:
        function()
    turns = []
    end = time.perf_counter() + seconds * len(functions)
    while time.perf_counter() < end:
        times = [clock()]
        for function in functions:
            function()
            times.append(clock())
        turns.append(np.diff(times))
    return np.array(turns)


def main() -> None:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--builds", type=names, default=[str(SOURCE_DIR)])
    parser.add_argument("--shapes", type=names, default=names(LLAMA_60M))
    parser.add_argument("--rows", type=names, default=["1", "4", "16", "64", "512"])
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32", "int8"], default="bfloat16")
    parser.add_argument("--cpu-isa", choices=usable_isas(), default=cpu_isa())
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--megabytes",
        type=float,
        default=beyond_caches() / 1e6,
        help="of all weights of a shape (default: four times the largest cache)",
    )
    parser.add_argument("--gflop-per-s", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case and build")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype: torch.dtype = getattr(torch, options.dtype)
    with trusted_cache(kernel_cache_dir()) as cache:
        builds = [
            NativeKernels(build_library(cache, options.cpu_isa, Path(source))) for source in options.builds
        ]
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    results: dict[str, list[float]] = {}
    for shape in options.shapes:
        outputs, inputs = (int(size) for size in shape.split("x"))
        for rows in map(int, options.rows):
            cases = [
                one_after_another(kernels, outputs, inputs, rows, dtype, options.megabytes)
                for kernels in builds
            ]
            functions = [run for run, _ in cases]
            num_bytes = outputs * inputs * dtype.itemsize * cases[0][1]
            turns = timed([*functions, memory_sum(num_bytes)], options.seconds, clock)
            times = turns.min(axis=0)[:-1].tolist()
            # Not the minimum, since a virtual machine's memory is twice as fast for some moments.
            quick = np.quantile(turns, 0.1, axis=0)
            shares = (quick[-1] / quick[:-1]).tolist()
            line = f"{shape:>12} {rows:>4} rows:"
            for (_, count), total, share in zip(cases, times, shares, strict=True):
                seconds = total / count
                read = outputs * inputs * dtype.itemsize / seconds / 1e9
                computed = 2e-9 * rows * outputs * inputs / seconds
                line += f"  {seconds * 1e6:8.1f} us {read:5.1f} GB/s ({share:4.0%})"
                line += f" {computed:6.1f} GFLOP/s"
                if options.gflop_per_s:
                    line += f" ({computed / options.gflop_per_s:4.0%})"
            print(line, flush=True)
            results[f"{shape}_{rows}"] = [
                round(t / n * 1e6, 1) for t, (_, n) in zip(times, cases, strict=True)
            ]
    print(json.dumps({"isa": options.cpu_isa, "threads": options.threads, "dtype": options.dtype, **results}))


if __name__ == "__main__":
    main()
