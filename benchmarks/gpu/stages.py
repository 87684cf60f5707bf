"""What is to be known of a GPU, in stages: each writes a JSON file, and one that is there is not run again.

python -m benchmarks.gpu.stages --out DIR                   every stage
python -m benchmarks.gpu.stages --out DIR kernels           one
python -m benchmarks.gpu.stages --out DIR decode --model qwen3-0.6b
python -m benchmarks.gpu.stages --out DIR --device cpu --tiny      the stages' logic, by Triton's interpreter

device    what it is; the rates of a copy and of a matrix product, which the others are compared with
kernels   attention of decodes, over keys and values in float8 too, and of a prompt; draws; layers in float8
tiles     the same with other launch parameters, the best first
decode    a decode step at several batch sizes: floor, step, gap; with and without overlap and graphs; a trace
serve     the whole runtime over HTTP, with overlap and without
baseline  the transformers library's continuous batching of the same requests; how much faster `serve` was
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu.decode_steps import DecodeSteps, floor_bytes, load_shape
from benchmarks.gpu.kernel_rates import (
    DRAWS,
    LLAMA_8B,
    LOGITS,
    HeadShape,
    Setting,
    decode_rate,
    draw_rate,
    extend_rate,
)
from benchmarks.gpu.linear_rates import LLAMA_8B as LINEARS
from benchmarks.gpu.linear_rates import linear_rate
from benchmarks.gpu.serving import Load, baseline, serve
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.tile_sweep import Sweep
from benchmarks.gpu.timing import copy_rate, matrix_rate
from model_worker.device import Device, make_device
from model_worker.device.cuda import has_fp8

logger = logging.getLogger("gpu")

MODELS = ("qwen3-0.6b", "llama-3.1-8b")


LOAD = Load(num_requests=256, input_len=512, output_len=256)


@dataclass(frozen=True)
class Sizes:
    """How much of everything: for a GPU, or so little that an interpreter gets through it."""

    copy_bytes: int = 1 << 30
    matrix: int = 8192
    repeats: int = 50
    decodes: tuple[tuple[int, int], ...] = ((1, 4096), (8, 4096), (64, 1024), (64, 4096), (256, 1024))
    prompt: int = 8192
    draws: tuple[int, ...] = (1, 64, 256)
    vocab_size: int = 151_936
    heads: HeadShape = LLAMA_8B
    linears: tuple[tuple[int, int], ...] = LINEARS
    linear_rows: tuple[int, ...] = (1, 8, 64, 256, 2048)
    sweep_decodes: tuple[tuple[int, int], ...] = tuple(product((1, 8, 64), (1024, 4096)))
    sweep_chunks: tuple[tuple[int, int], ...] = ((8192, 0), (2048, 6144))  # new tokens, cached ones
    sweep_candidates: int = 20  # at most
    batches: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 1024
    num_steps: int = 100
    load: Load = LOAD
    overlaps: tuple[bool, ...] = (True, False)  # of `serve`


TINY = Sizes(
    copy_bytes=1 << 16,
    matrix=32,
    repeats=1,
    decodes=((1, 20),),
    prompt=20,
    draws=(2,),
    vocab_size=300,
    heads=HeadShape(4, 2, 16),
    linears=((32, 80),),
    linear_rows=(2, 17),
    sweep_decodes=((1, 20),),
    sweep_chunks=((9, 11),),
    sweep_candidates=3,
    batches=(1, 3),
    context=20,
    num_steps=3,
    load=Load(3, 20, 6),
    overlaps=(False,),
)


@dataclass(frozen=True)
class Bench:
    device: Device
    dtype: torch.dtype
    sizes: Sizes
    models: tuple[str, ...]
    out: Path

    @property
    def setting(self) -> Setting:
        return Setting(self.device, self.dtype, self.sizes.repeats, self.sizes.heads)

    def release(self) -> None:
        """Give back the device memory that nothing holds any more."""
        gc.collect()  # a runner's tables and recordings know each other
        self.device.free_bytes()  # empties the allocator's cache

    def copy_rate(self) -> float:
        return copy_rate(self.device.torch_device, self.sizes.copy_bytes, self.sizes.repeats)


@torch.inference_mode()
def device_stage(bench: Bench) -> dict[str, Any]:
    device, sizes = bench.device.torch_device, bench.sizes
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "name": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_bytes_per_s": bench.copy_rate(),
        "matrix_operations_per_s": matrix_rate(device, sizes.matrix, bench.dtype, sizes.repeats),
    }


@torch.inference_mode()
def kernels_stage(bench: Bench) -> dict[str, Any]:
    device, sizes = bench.device.torch_device, bench.sizes
    copied, matrix = bench.copy_rate(), matrix_rate(device, sizes.matrix, bench.dtype, sizes.repeats)

    def decodes(setting: Setting, page_sizes: tuple[int, ...]) -> list[dict[str, Any]]:
        shapes = product(sizes.decodes, page_sizes)
        rates = [decode_rate(*shape, page_size, setting) for shape, page_size in shapes]
        return [{**rate, "of_copy_rate": rate["bytes_per_s"] / copied} for rate in rates]

    prompt = extend_rate(sizes.prompt, 16, bench.setting)
    prompt["of_matrix_rate"] = prompt["operations_per_s"] / matrix
    draws = [
        draw_rate(batch, kind, logits, sizes.vocab_size, bench.device, sizes.repeats)
        for batch, kind, logits in product(sizes.draws, DRAWS, LOGITS)
    ]
    return {
        "copy_bytes_per_s": copied,
        "matrix_operations_per_s": matrix,
        "decode": decodes(bench.setting, (1, 16)),
        "decode_float8": decodes(replace(bench.setting, narrow_kv=True), (16,)) if has_fp8() else [],
        "prompt": prompt,
        "draw": draws,
        "linear_float8": [
            linear_rate(rows, shape, bench.setting)
            for shape, rows in product(sizes.linears, sizes.linear_rows)
            if bench.device.name == "cuda" and has_fp8()
        ],
    }


@torch.inference_mode()
def tiles_stage(bench: Bench) -> dict[str, Any]:
    sizes = bench.sizes
    sweep = Sweep(bench.setting, sizes.sweep_candidates)
    decodes = [(*shape, page_size) for shape in sizes.sweep_decodes for page_size in (1, 16)]
    return {
        "decode": [sweep.decode(batch, context, page_size) for batch, context, page_size in decodes],
        "extend": [sweep.extend(num_new, num_cached, 16) for num_new, num_cached in sizes.sweep_chunks],
    }


@torch.inference_mode()
def decode_stage(bench: Bench, name: str) -> dict[str, Any]:
    copied, sizes = bench.copy_rate(), bench.sizes
    results = []
    model = load_shape(name, bench.device, bench.dtype)
    for batch in sizes.batches:
        floor_ms = 1e3 * floor_bytes(model, batch, sizes.context, bench.dtype) / copied
        for graphs in (True, False):
            steps = DecodeSteps(model, bench.device, bench.dtype, batch, sizes.context, graphs=graphs)
            for overlap in (True, False):
                ms = steps.measure(sizes.num_steps, overlap=overlap)
                result = {"batch": batch, "graphs": graphs, "overlap": overlap, "floor": floor_ms, **ms}
                results.append({**result, "of_floor": ms["step"] / floor_ms})
                logger.info("%s %s", name, results[-1])
            if graphs:
                steps.trace(bench.out / f"decode-{name}-{batch}.trace.json", 3)
            del steps
            bench.release()
    return {"model": name, "context": sizes.context, "copy_bytes_per_s": copied, "ms": results}


def serve_stage(bench: Bench, name: str) -> dict[str, Any]:
    device, sizes = bench.device, bench.sizes
    return {
        "model": name,
        "load": asdict(sizes.load),
        "runs": [
            serve(name, sizes.load, device.name, bench.dtype, overlap=overlap) for overlap in sizes.overlaps
        ],
    }


def baseline_stage(bench: Bench, name: str) -> dict[str, Any]:
    result = baseline(name, bench.sizes.load, bench.device.torch_device, bench.dtype)
    served = bench.out / f"serve-{name}.json"
    if served.exists():
        best = max(run["output_tokens_per_s"] for run in json.loads(served.read_text())["runs"])
        result["served_over_baseline"] = best / result["output_tokens_per_s"]
    return {"model": name, "load": asdict(bench.sizes.load), **result}


MODEL_STAGES = {"decode": decode_stage, "serve": serve_stage, "baseline": baseline_stage}
"""In this order: each may look at the files of those before it."""


def stages(bench: Bench) -> dict[str, Callable[[], dict[str, Any]]]:
    """By the name of the file."""
    table: dict[str, Callable[[], dict[str, Any]]] = {
        "device": lambda: device_stage(bench),
        "kernels": lambda: kernels_stage(bench),
        "tiles": lambda: tiles_stage(bench),
    }
    for name in bench.models:
        for stage, run in MODEL_STAGES.items():
            table[f"{stage}-{name}"] = partial(run, bench, name)
    return table


def main(argv: list[str] | None = None) -> int:
    """0, when all stages that were asked for have a file; what a stage raises ends the run, not its files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "stage", nargs="*", help="device, kernels, tiles, decode, serve, baseline; default: all"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--model", action="append", choices=sorted(SHAPES), help="default: " + ", ".join(MODELS)
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--again", action="store_true", help="also what has a file already")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        device=make_device(arguments.device, threaded=False),
        dtype=torch.float32 if arguments.tiny else torch.bfloat16,
        sizes=TINY if arguments.tiny else Sizes(),
        models=tuple(arguments.model or (["tiny"] if arguments.tiny else MODELS)),
        out=arguments.out,
    )
    for name, run in stages(bench).items():
        path = bench.out / f"{name}.json"
        if arguments.stage and name.partition("-")[0] not in arguments.stage:
            continue
        if path.exists() and not arguments.again:
            logger.info("%s: is there already", path)
            continue
        began = time.monotonic()
        bench.release()  # a stage may need all of it, in another process too
        result = run()
        path.write_text(json.dumps({**result, "seconds": time.monotonic() - began}, indent=1))
        logger.info("%s: %.0f s", path, time.monotonic() - began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
