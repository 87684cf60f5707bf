"""Measurements of a GPU, in stages: each writes a JSON file, and a complete one is not written again.

python -m benchmarks.gpu.stages --out DIR                   every stage
python -m benchmarks.gpu.stages --out DIR kernels           one
python -m benchmarks.gpu.stages --out DIR decode --model qwen3-0.6b
python -m benchmarks.gpu.stages --out DIR --device cpu --tiny      the stages' logic, by Triton's interpreter

device       what it is; the rates of a copy and of a matrix product, which the others are compared with
kernels      attention of decodes, over keys and values in float8 too, and of a prompt; draws; linear layers
attention    attention of prompts by each library that is installed: time, and difference from ours
launch_cost  host time of one launch of each kernel
graph_gap    from one node of a graph to the next
block_copy   a step's copy of its integers to the device
nccl         a group of one rank: made, and its all_reduce recorded
tiles        the same with other launch parameters, the best first
decode       a decode step at several batch sizes: floor, step, gap; with overlap, graphs, or none; a trace
serve        the whole runtime over HTTP, with overlap and without
baseline     the transformers library's continuous batching of a small load; how much faster we serve that

A file is written anew with each result. A measurement that fails is an "error" in its place, and the rest
goes on. All stages before `serve` need torch, triton, numpy and msgspec and nothing else.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu.bench import TINY, Bench, Sizes
from benchmarks.gpu.kernels.decode_steps import DecodeSteps, floor_bytes, load_shape
from benchmarks.gpu.kernels.kernel_rates import DRAWS, LOGITS, Setting, decode_rate, draw_rate, extend_rate
from benchmarks.gpu.kernels.linear_rates import linear_rate, product_rates
from benchmarks.gpu.kernels.tile_sweep import Sweep
from benchmarks.gpu.library_batching import baseline, baseline_process
from benchmarks.gpu.load import Load
from benchmarks.gpu.micro_stages import (
    attention_stage,
    block_copy_stage,
    graph_gap_stage,
    launch_cost_stage,
    nccl_stage,
)
from benchmarks.gpu.results import Results, is_complete
from benchmarks.gpu.shapes import SHAPES, linear_shapes
from model_worker.device import make_device
from model_worker.device.cuda import has_fp8
from model_worker.models.transformer import CausalLM

logger = logging.getLogger("gpu")

MODELS = ("qwen3-0.6b", "llama-3.1-8b")
TORCH_ATTENTION = "torch_native"
"""Our backend that attends by torch's operations, as the library does if it has nothing else."""


@torch.inference_mode()
def device_stage(bench: Bench, results: Results) -> None:
    device = bench.device.torch_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    results.put(name=name, torch=torch.__version__, triton=triton.__version__)
    results.put(copy_bytes_per_s=bench.copy_rate())
    results.put(matrix_operations_per_s=bench.matrix_rate())


@torch.inference_mode()
def kernels_stage(bench: Bench, results: Results) -> None:
    sizes = bench.sizes
    copied, matrix = bench.copy_rate(), bench.matrix_rate()
    results.put(copy_bytes_per_s=copied, matrix_operations_per_s=matrix)

    def decode(shape: tuple[int, int], page_size: int, setting: Setting) -> dict[str, Any]:
        rate = decode_rate(*shape, page_size, setting)
        return {**rate, "of_copy_rate": rate["bytes_per_s"] / copied}

    def prompt() -> dict[str, Any]:
        rate = extend_rate(sizes.prompt, 16, bench.setting)
        return {**rate, "of_matrix_rate": rate["operations_per_s"] / matrix}

    for shape, page_size in product(sizes.decodes, (1, 16)):
        what = {"batch": shape[0], "context": shape[1], "page_size": page_size}
        results.add("decode", partial(decode, shape, page_size, bench.setting), **what)
    for shape in sizes.decodes if has_fp8() else ():
        what = {"batch": shape[0], "context": shape[1], "page_size": 16}
        narrow = replace(bench.setting, narrow_kv=True)
        results.add("decode_float8", partial(decode, shape, 16, narrow), **what)
    results.measure("prompt", prompt)
    for batch, kind, logits in product(sizes.draws, DRAWS, LOGITS):
        draw = partial(draw_rate, batch, kind, logits, sizes.vocab_size, bench.device, sizes.repeats)
        results.add("draw", draw, batch=batch, draw=kind, logits=logits)
    for model in sizes.products:
        for layer_name, linear in linear_shapes(model).items():
            rates = product_rates(sizes.product_rows, linear, bench.setting, copied)
            results.add_each("linear", rates, model=model, layer=layer_name, shape=linear)
    if bench.device.name == "cuda" and has_fp8():
        for linear, rows in product(sizes.linears, sizes.linear_rows):
            layer = partial(linear_rate, rows, linear, bench.setting)
            results.add("linear_float8", layer, rows=rows, shape=linear)


@torch.inference_mode()
def tiles_stage(bench: Bench, results: Results) -> None:
    sizes = bench.sizes
    sweep = Sweep(bench.setting, sizes.sweep_candidates)
    for (new, cached), page_size in product(sizes.sweep_chunks, (16,)):
        tried = partial(sweep.extend, new, cached, page_size)
        results.add("extend", tried, new=new, cached=cached, page_size=page_size)
    for (batch, context), page_size in product(sizes.sweep_decodes, (16, 1)):
        tried = partial(sweep.decode, batch, context, page_size)
        results.add("decode", tried, batch=batch, context=context, page_size=page_size)


@torch.inference_mode()
def decode_stage(bench: Bench, results: Results, name: str) -> None:
    copied, sizes = bench.copy_rate(), bench.sizes
    results.put(model=name, context=sizes.context, copy_bytes_per_s=copied)
    model = load_shape(name, bench.device, bench.dtype)
    for graphs, batch in product(sizes.graphs, sizes.batches):
        floor_ms = 1e3 * floor_bytes(model, batch, sizes.context, bench.dtype) / copied
        steps = _decode_steps(bench, model, batch, floor_ms, graphs=graphs)
        results.add_each("ms", steps, batch=batch, graphs=graphs, floor=floor_ms)
    if True in sizes.graphs:
        path = bench.out / f"decode-{name}-{sizes.traced}.trace.json.gz"
        results.measure("trace", partial(_trace, bench, model, path))


def _decode_steps(
    bench: Bench, model: CausalLM, batch: int, floor_ms: float, *, graphs: bool
) -> Iterator[dict[str, Any]]:
    """Yield times of a step, with overlap and without."""
    steps = _steps_of(bench, model, batch, graphs=graphs)
    for overlap in (True, False):
        ms = steps.measure(bench.sizes.num_steps, overlap=overlap)
        yield {"overlap": overlap, **ms, "of_floor": ms["step"] / floor_ms}


def _trace(bench: Bench, model: CausalLM, path: Path) -> dict[str, Any]:
    _steps_of(bench, model, bench.sizes.traced, graphs=True).trace(path, 3)
    return {"batch": bench.sizes.traced, "file": path.name}


def _steps_of(bench: Bench, model: CausalLM, batch: int, *, graphs: bool) -> DecodeSteps:
    sizes = bench.sizes
    return DecodeSteps(
        model,
        bench.device,
        bench.dtype,
        batch,
        sizes.context,
        graphs=graphs,
        backlog_bytes=sizes.copy_bytes,
    )


def serve_stage(bench: Bench, results: Results, name: str) -> None:
    from benchmarks.gpu.serving import ATTENTION, serve

    device, load = bench.device.name, bench.sizes.load
    results.put(model=name, load=asdict(load))
    for overlap in bench.sizes.overlaps:
        run = partial(serve, name, load, device, bench.dtype, overlap=overlap, attention=ATTENTION[device])
        results.add("runs", run, overlap=overlap)


def baseline_stage(bench: Bench, results: Results, name: str) -> None:
    """Measure the library's batching. A ratio is only claimed where both use torch's attention; the others
    say what they compare.
    """
    from benchmarks.gpu.serving import ATTENTION, serve

    device, load = bench.device, bench.sizes.baseline_load
    results.put(model=name, load=asdict(load))
    if device.name == "cuda":
        results.measure("library", partial(baseline_process, name, load, device.name, bench.dtype))
    else:
        results.measure("library", partial(baseline, name, load, device.torch_device, bench.dtype))
    for attention in dict.fromkeys((ATTENTION[device.name], TORCH_ATTENTION)):
        run = _served(bench, name, load, attention) or partial(
            serve, name, load, device.name, bench.dtype, overlap=True, attention=attention
        )
        results.add("ours", run, attention=attention)
    library, ours = results.values["library"], results.values["ours"]
    if "error" not in library:
        results.put(ratios=ratios(library, [run for run in ours if "error" not in run]))


def _served(bench: Bench, name: str, load: Load, attention: str) -> Callable[[], dict[str, Any]] | None:
    """Return a function for the fastest run of the stage `serve`, if that used this very load; else None."""
    path = bench.out / f"serve-{name}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    runs = [run for run in found.get("runs", ()) if run.get("attention") == attention and "error" not in run]
    if not runs or found["load"] != asdict(load):
        return None
    best: dict[str, Any] = max(runs, key=lambda run: run["output_tokens_per_s"])
    return lambda: best


def ratios(library: dict[str, Any], ours: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ratio of each of our runs to the library's, with the attention of both."""
    return [
        {
            "ours": run["attention"],
            "library": library["attention"],
            "equal_attention": run["attention"] == TORCH_ATTENTION and "sdpa" in library["attention"],
            "ratio": run["output_tokens_per_s"] / library["output_tokens_per_s"],
        }
        for run in ours
    ]


STAGES = {
    "device": device_stage,
    "kernels": kernels_stage,
    "attention": attention_stage,
    "launch_cost": launch_cost_stage,
    "graph_gap": graph_gap_stage,
    "block_copy": block_copy_stage,
    "nccl": nccl_stage,
    "tiles": tiles_stage,
}
MODEL_STAGES = {"decode": decode_stage, "serve": serve_stage, "baseline": baseline_stage}
"""Stages run in this order, each for all models. One may read the files of those before it."""


def stages(bench: Bench) -> dict[str, Callable[[Results], None]]:
    """Return the stages by file name."""
    table: dict[str, Callable[[Results], None]]
    table = {name: partial(run, bench) for name, run in STAGES.items()}
    for (stage, run), model in product(MODEL_STAGES.items(), bench.models):
        table[f"{stage}-{model}"] = partial(run, bench, name=model)
    return table


def run_stage(name: str, run: Callable[[Results], None], bench: Bench) -> bool:
    """Run a stage and write its file. Returns True if nothing in it failed."""
    bench.release()  # a stage may need all memory, also in another process
    began = time.monotonic()
    results = Results(bench.out / f"{name}.json", bench.release)
    try:
        run(results)
    except Exception as error:  # the other stages are run all the same
        results.end(error)
    else:
        results.end()
    logger.info("%s: %.0f s, %d errors", name, time.monotonic() - began, results.num_errors)
    return results.num_errors == 0


def main(argv: list[str] | None = None) -> int:
    """Run the stages. Returns 1 if something could not be measured; the files say what."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = [*STAGES, *MODEL_STAGES]
    parser.add_argument("stage", nargs="*", help=", ".join(names) + "; default: all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--model", action="append", choices=sorted(SHAPES), help="default: " + ", ".join(MODELS)
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--graphs-only", action="store_true", help="of `decode`: no step without graphs")
    parser.add_argument("--overlap-only", action="store_true", help="of `serve`: not without overlap")
    parser.add_argument("--again", action="store_true", help="also what has a complete file already")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.stage) - set(names):
        parser.error(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments.out.mkdir(parents=True, exist_ok=True)
    sizes = TINY if arguments.tiny else Sizes()
    if arguments.graphs_only:
        sizes = replace(sizes, graphs=(True,))
    if arguments.overlap_only:
        sizes = replace(sizes, overlaps=(True,))
    bench = Bench(
        device=make_device(arguments.device, threaded=False),
        dtype=torch.float32 if arguments.tiny else torch.bfloat16,
        sizes=sizes,
        models=tuple(arguments.model or (["tiny"] if arguments.tiny else MODELS)),
        out=arguments.out,
    )
    is_whole = True
    for name, run in stages(bench).items():
        if arguments.stage and name.partition("-")[0] not in arguments.stage:
            continue
        if is_complete(bench.out / f"{name}.json") and not arguments.again:
            logger.info("%s: is there already", name)
            continue
        is_whole &= run_stage(name, run, bench)
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
