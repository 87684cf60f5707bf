"""Compile what will be launched on a GPU, on all cores, so that nothing waits for the compiler later.

    python -m benchmarks.gpu.prepare                     for the GPU that is there
    python -m benchmarks.gpu.prepare --capability 9.0    for one that is not
    python -m benchmarks.gpu.prepare --variants FILE     that file's variants and no others
    python -m benchmarks.gpu.prepare --list              what would be compiled, as that file has it

The code goes to Triton's cache (TRITON_CACHE_DIR), where a launch looks for it. Compiled are the variants
that tests/gpu launched on the pretended GPU, recorded in `tests.variants` beside this file, and all that the
models of `decode` and `serve` launch until they are ready. To record the tests' anew:

    pytest tests/gpu --pretend --variants=benchmarks/gpu/tests.variants
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

# Also for the compiling processes: it is part of the cache's keys, and Triton 3.10 changes its default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch

from benchmarks.gpu.bench import Sizes
from benchmarks.gpu.kernels.attention_variants import GPUS
from benchmarks.gpu.kernels.launches import H200_MULTIPROCESSORS
from benchmarks.gpu.kernels.variants import Runner, compile_variant, decode_runner, variants_of
from benchmarks.gpu.stages import MODELS
from model_worker.kernels.triton.tiles import Gpu, gpu_of
from runtime.settings.config import RuntimeConfig
from runtime.settings.graph_sizes import graph_sizes

RECORDED = Path(__file__).with_name("tests.variants")
MAX_PROCESSES = 14
FIRST_FP8 = 89
"""Capability from which on float8 exists. Nothing launches it on an older device."""


class Target(NamedTuple):
    capability: int  # 90 is 9.0
    gpu: Gpu
    num_multiprocessors: int


class Compiled(NamedTuple):
    kernel: str
    seconds: float
    error: str | None


def target_that_is_there() -> Target:
    """Return the target for the machine's GPU. Raises RuntimeError if torch finds none."""
    major, minor = torch.cuda.get_device_capability()
    processors = torch.cuda.get_device_properties().multi_processor_count
    return Target(10 * major + minor, gpu_of(torch.device("cuda", 0)), processors)


def runners() -> Iterator[Runner]:
    """Yield the runners of the stages `serve` and `decode`."""
    sizes, dtype = Sizes(), torch.bfloat16
    load = sizes.load
    config = RuntimeConfig(model="", max_running_requests=load.num_requests)
    for name in MODELS:
        yield Runner(
            name,
            dtype,
            max_rows=load.num_requests,
            max_len=load.input_len + load.output_len,
            max_tokens=config.chunked_prefill_size,
            graph_sizes=graph_sizes(config),
        )
        for batch in sizes.batches:
            yield decode_runner(name, dtype, batch, sizes.context + 1)


def compile_for(capability: int, line: str) -> Compiled:
    variant = json.loads(line)
    began, error = time.monotonic(), None
    if capability >= FIRST_FP8 or not any("fp8" in kind for kind, *_ in variant["arguments"]):
        try:
            compile_variant(variant, capability)
        except Exception as raised:  # whatever the compiler says, the others are tried, too
            error = f"{type(raised).__name__}: {raised}"
    return Compiled(variant["kernel"], time.monotonic() - began, error)


def prepare(lines: Sequence[str] | None, target: Target, pool: ProcessPoolExecutor) -> list[Compiled]:
    """Compile these variants; None: all known ones."""
    if lines is None:
        lines = all_variants(target, pool)
    return list(pool.map(partial(compile_for, target.capability), lines))


def all_variants(target: Target, pool: ProcessPoolExecutor) -> list[str]:
    """Return every variant once, those that take longest to compile first."""
    find = partial(variants_of, gpu=target.gpu, num_multiprocessors=target.num_multiprocessors)
    found = [*pool.map(find, runners()), RECORDED.read_text().splitlines()]
    lines = dict.fromkeys(line for each in found for line in each)
    return sorted(lines, key=lambda line: '"_attend' not in line)


def processes(num: int) -> ProcessPoolExecutor:
    """Return a pool of processes, forked from one that has imported what they need and has never used
    a GPU.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.gpu.stages", "benchmarks.gpu.kernels.variants"])
    return ProcessPoolExecutor(num, mp_context=context)


def main(argv: list[str] | None = None) -> int:
    """Compile. Returns 1 if something does not compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--capability", choices=[f"{each / 10}" for each in GPUS], help="default: the GPU's")
    parser.add_argument("--variants", type=Path, metavar="FILE")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--processes", type=int, default=min(MAX_PROCESSES, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, help="a file for the result, as JSON")
    arguments = parser.parse_args(argv)
    if arguments.capability is not None:
        capability = round(10 * float(arguments.capability))
        target = Target(capability, GPUS[capability], H200_MULTIPROCESSORS)
    elif torch.cuda.is_available():
        target = target_that_is_there()
    else:
        parser.error("--capability: there is no GPU, so say for which; 9.0 is Hopper")
    lines = arguments.variants.read_text().splitlines() if arguments.variants else None
    began = time.monotonic()
    with processes(arguments.processes) as pool:
        if arguments.list:
            print("\n".join(all_variants(target, pool) if lines is None else lines))
            return 0
        done = prepare(lines, target, pool)
    seconds, failed = time.monotonic() - began, [each for each in done if each.error is not None]
    for kernel, num in Counter(each.kernel for each in done).items():
        longest = max(each.seconds for each in done if each.kernel == kernel)
        print(f"{kernel:<24}{num:>4} variants, the slowest {longest:5.1f} s")
    for each in failed:
        print(f"{each.kernel} does not compile: {each.error}")
    print(f"{len(done)} variants in {seconds:.0f} s for {target.capability / 10}; {len(failed)} failed")
    if arguments.out is not None:
        result = {
            "capability": target.capability,
            "seconds": seconds,
            "variants": [x._asdict() for x in done],
        }
        arguments.out.write_text(json.dumps(result, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
