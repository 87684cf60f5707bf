"""Time of decode attention on the CPU, builds of the kernels turn by turn in one run.

    python -m benchmarks.bench_cpu_attention [--builds SRC,SRC] [--shapes llama-60m,qwen-0.5b]
                                        [--batches 1,8,16,64] [--contexts 192,1024,4096] [--threads 2]

A build is a folder of C++ sources, such as another checkout's model_worker/kernels/native/src; without
--builds this checkout's alone. --cpu-isa: see runtime/base/cpu_isa.py. Every sequence decodes a token at
about the same length, on scattered pages. All layers of a pool are taken in turn, as in a step, so that what
one has read of a cache is not there the next time; with --hot all sequences have the same pages of the same
layer. One layer's ms, median and least; the rate at which keys and values are read; and the first build's
median over each other's. Results of all builds must have the same bits. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.decode_rows import PAGE_SIZE
from model_worker.attention.base import AttentionInputs, AttentionLayer
from model_worker.attention.cpu_native import CpuNativeAttention
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.kernels.native.build import SOURCE_DIR, build_library, trusted_cache
from model_worker.kernels.native.library import NativeKernels
from model_worker.memory.kv_pool import MHATokenToKVPool
from runtime.base.cpu_isa import cpu_isa, usable_isas
from runtime.base.environment import kernel_cache_dir


class Shape(NamedTuple):
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = {
    "llama-60m": Shape(8, 8, 4, 64),
    "qwen-0.5b": Shape(24, 14, 2, 64),
    "llama-8b": Shape(4, 32, 8, 128),  # with four of its layers
    "heads-of-256": Shape(8, 8, 2, 256),
}


class Case:
    """Attention of one step over all layers of a pool."""

    def __init__(self, shape: Shape, batch: int, context: int, page_size: int, is_hot: bool) -> None:
        torch.manual_seed(0)
        self.shape, self.batch, self.context = shape, batch, context
        # Slightly different lengths, or all splits would end together.
        lens = [max(1, context - 3 * (row % 5)) for row in range(batch)]
        per_row = -(-context // page_size)
        num_pages = per_row * (1 if is_hot else batch)
        self.pool = MHATokenToKVPool(
            num_pages, page_size, shape.num_layers, shape.num_kv_heads, shape.head_dim, torch.bfloat16, "cpu"
        )
        first = self.pool.layer(0)
        for layer in range(shape.num_layers):
            for buffer, random in zip(self.pool.layer(layer), first, strict=True):
                buffer.normal_() if layer == 0 else buffer.copy_(random)
        pages = (torch.randperm(num_pages) + 1).int().view(-1, per_row)
        tables = pages.expand(batch, -1).contiguous() if is_hot else pages
        slots = [
            int(tables[row, (n - 1) // page_size]) * page_size + (n - 1) % page_size
            for row, n in enumerate(lens)
        ]
        self.forward_batch = ForwardBatch(
            input_ids=torch.zeros(batch, dtype=torch.int64),
            positions=torch.tensor(lens) - 1,
            out_slots=torch.tensor(slots),
            query_start=list(range(batch + 1)),
            kv_lens=lens,
            rows=torch.arange(batch),
            page_table=tables,
            page_size=page_size,
            num_decodes=batch,
            output_indices=torch.zeros(0, dtype=torch.int64),
        )
        self.q = torch.randn(batch, shape.num_heads, shape.head_dim).bfloat16()
        self.k = torch.randn(batch, shape.num_kv_heads, shape.head_dim).bfloat16()
        self.v = torch.randn(batch, shape.num_kv_heads, shape.head_dim).bfloat16()
        if is_hot:  # they write the same slots
            self.k, self.v = self.k[:1].expand(batch, -1, -1), self.v[:1].expand(batch, -1, -1)
        layers = [0] * shape.num_layers if is_hot else list(range(shape.num_layers))
        scale = shape.head_dim**-0.5
        self.layers = [
            AttentionLayer(i, shape.num_heads, shape.num_kv_heads, shape.head_dim, scale, None)
            for i in layers
        ]
        self.layer_bytes = sum(lens) * shape.num_kv_heads * shape.head_dim * 4

    def run(self, attention: CpuNativeAttention) -> torch.Tensor:
        """Compute the attention of each layer. Returns that of the last one."""
        attention.prepare(self.forward_batch)
        inputs = AttentionInputs(self.q, self.k, self.v)
        for layer in self.layers:
            out = attention.forward(layer, inputs, self.forward_batch, self.pool)
        return out


def measure(case: Case, builds: dict[str, CpuNativeAttention], seconds: float) -> dict[str, list[float]]:
    """Return milliseconds of a layer by each build, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in builds}
    results = [case.run(attention) for attention in builds.values()]
    for result in results:
        assert torch.equal(result, results[0]), "the builds' results differ"
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[next(iter(times))]) < 5:
        for name, attention in builds.items():
            began = time.perf_counter()
            case.run(attention)
            times[name].append((time.perf_counter() - began) * 1e3 / case.shape.num_layers)
    return times


def main() -> None:
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--builds", type=names, default=[str(SOURCE_DIR)])
    parser.add_argument("--shapes", type=names, default=["llama-60m", "qwen-0.5b"], help=", ".join(SHAPES))
    parser.add_argument("--batches", type=numbers, default=[1, 8, 16, 64])
    parser.add_argument("--contexts", type=numbers, default=[192, 1024, 4096])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--page-size", type=int, default=PAGE_SIZE)
    parser.add_argument("--cpu-isa", choices=usable_isas(), default=cpu_isa())
    parser.add_argument("--hot", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with trusted_cache(kernel_cache_dir()) as cache:
        builds = {
            source: CpuNativeAttention(NativeKernels(build_library(cache, options.cpu_isa, Path(source))))
            for source in options.builds
        }
    results: dict[str, list[float]] = {}
    for shape in options.shapes:
        for context in options.contexts:
            for batch in options.batches:
                case = Case(SHAPES[shape], batch, context, options.page_size, options.hot)
                times = measure(case, builds, options.seconds)
                line = f"{shape:>10} batch {batch:>3} context {context:>5}:"
                medians = [statistics.median(each) for each in times.values()]
                for median, each in zip(medians, times.values(), strict=True):
                    line += (
                        f"  {median:7.4f} ({min(each):7.4f}) ms {case.layer_bytes / median / 1e6:5.1f} GB/s"
                    )
                print(line + "".join(f"  {medians[0] / other:.2f}x" for other in medians[1:]), flush=True)
                results[f"{shape}_b{batch}_c{context}"] = [round(median, 4) for median in medians]
    print(
        json.dumps(
            {"threads": options.threads, "page_size": options.page_size, "hot": options.hot, **results}
        )
    )


if __name__ == "__main__":
    main()
