"""Cost of LoRA adapters on a CPU: a decode step and a chunk of a prompt, with and without them, in turns.

    python -m benchmarks.cpu.bench_lora [--model qwen-0.5b] [--dtype bfloat16] [--batch 8] [--chunk 2048]
                                    [--rank 16] [--rounds 9] [--only decode]
    python -m benchmarks.cpu.bench_lora --served --rounds 3 [--load-rank 91]

    off       a model that takes no adapters
    unused    one that does, and every row is the base model's
    one       every row has one adapter, of all linear layers
    each      every row has an adapter of its own

With --load-rank also decode steps of rows of the base model while an adapter of that rank, of float32 in its
file, is read and packed again and again: the median and the 99th percentile of their times, in turns with
steps beside which nothing is loaded.

With --served only this: a launch with the model's shape and dummy weights; milliseconds between two tokens of
four streams of the base model over HTTP, alone and while an adapter of that rank is loaded and unloaded over
HTTP, in turns. For rank 91 of qwen-0.5b the file has 200 MB.

Milliseconds, the median of the rounds, and how many times as long as `off` each takes: of the time on the
clock, and of the CPU time of all threads, which other programs on the machine disturb less. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from benchmarks.bench_cpu_step import QWEN, SHAPES, WiredWorker
from benchmarks.cpu.guided import gaps_alone, gaps_of_streams, made_model
from benchmarks.decode_rows import PAGE_SIZE, filled_pool, pages_for
from benchmarks.server import launched
from model_worker.adapters.slots import AdapterSlots
from model_worker.device import make_device
from model_worker.kernels.linear import LoraPart
from model_worker.loading.loader import load_model
from model_worker.ops.adapters import RowAdapters
from model_worker.ops.selection import make_ops
from model_worker.runner.build_runner import build_runner
from runtime.checkpoint.model_config import ModelConfig
from runtime.wire.format import pack_ids
from runtime.wire.plan import NO_ADAPTER, AdapterLoaded, AdapterRef, BatchPlan, LoadAdapter

CONTEXT = 256
VOCAB_OF_LAUNCH = 32768
LOADS_OF_ROUND = 3


class BenchedModel:
    """Model with random weights, and random adapters for as many rows as a batch has, or none."""

    def __init__(self, options: argparse.Namespace, *, takes_adapters: bool) -> None:
        dtype: torch.dtype = getattr(torch, options.dtype)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[options.model]))
            config = ModelConfig.from_path(Path(folder))
            ops = make_ops("cpu_native", device="cpu", dtype=dtype, head_dim=config.head_dim)
            self._rows: RowAdapters | None = None
            if takes_adapters:
                self._rows = ops.row_adapters(options.batch, options.batch)
            max_rank = max(options.rank, options.load_rank)
            adapters = None if self._rows is None else (self._rows, max_rank)
            model = load_model(Path(folder), config, dtype, "cpu", "dummy", ops=ops, adapters=adapters)
        if takes_adapters:
            for slot in range(options.batch):
                for layer in model.adapted_layers().values():
                    assert layer.adapters is not None
                    layer.adapters.install(slot, layer.adapters.pack(slot, _parts(layer, options.rank)))
        max_len = max(CONTEXT, options.chunk)
        runner = build_runner(
            model,
            filled_pool(model.kv_layout, options.batch, max_len, dtype, "cpu"),
            ops,
            make_device("cpu", threaded=False),
            max_rows=options.batch,
            max_len=pages_for(max_len) * PAGE_SIZE,
            vocab_size=config.vocab_size,
            row_adapters=self._rows,
        )
        runner.warm_up()
        worker = WiredWorker(runner)
        self.slots = (
            AdapterSlots(model, make_device("cpu", threaded=False), max_rank=512) if takes_adapters else None
        )
        self.decode = worker.prepare(options.batch, CONTEXT)
        self.chunk = worker.step_of(_chunk(options.chunk))

    def assign(self, slots: list[int]) -> None:
        """Set the adapter slots of rows 0, 1, ..."""
        assert self._rows is not None
        for row, slot in enumerate(slots):
            self._rows.set_row(row, slot)


def _parts(layer: Any, rank: int) -> list[LoraPart]:
    """Return an adapter's random parts for a layer: one for each module that it packs."""
    widths = [cut.room for cut in layer.weight.parts.values()] or [layer.outer_weight(1).shape[0]]
    parts, column = [], 0
    for width in widths:
        a = torch.randn(rank, layer.weight.cuts[1].room, dtype=layer.weight.dtype)
        parts.append(LoraPart(column, a, 0.01 * torch.randn(width, rank, dtype=a.dtype), 0.1))
        column += width
    return parts


def save_adapter(path: Path, shape: dict[str, Any], rank: int) -> None:
    """Write an adapter of random numbers for all linear layers of a shape."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    head = hidden // shape["num_attention_heads"]
    keys = head * shape["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, (outputs, inputs) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}.lora_"
            tensors[f"{prefix}A.weight"] = torch.randn(rank, inputs)
            tensors[f"{prefix}B.weight"] = 0.01 * torch.randn(outputs, rank)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (path / "adapter_config.json").write_text(json.dumps(config))


def measure_beside_loads(model: BenchedModel, path: Path, num_steps: int) -> dict[str, dict[str, float]]:
    """Return times of steps, in turns of ten without and ten with a load beside them."""
    assert model.slots is not None
    ref = AdapterRef("loaded", 1, "", str(path))
    times: dict[str, list[float]] = {"alone": [], "loading": []}
    loads: list[float] = []
    while len(times["loading"]) < num_steps:
        for _ in range(10):
            times["alone"].append(_timed(model.decode))
        model.slots.load(LoadAdapter(0, ref))
        while not (answers := model.slots.answers()):
            times["loading"].append(_timed(model.decode))
        assert isinstance(answers[0], AdapterLoaded), answers
        loads.append(answers[0].load_s)
        model.slots.drop(0)
    return {name: _percentiles(each) for name, each in times.items()} | {
        "load": {"s": round(statistics.median(loads), 2), "times": len(loads)}
    }


def measure_served_beside_loads(rank: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return times between two tokens of streams, in turns alone and beside three loads."""
    gaps: dict[str, list[float]] = {"alone": [], "loading": []}
    with made_model(VOCAB_OF_LAUNCH) as folder:
        (folder / "adapters" / "large").mkdir(parents=True)
        save_adapter(folder / "adapters" / "large", QWEN, rank)
        options = ("--model", str(folder), "--load-format", "dummy", "--dtype", "bfloat16")
        lora = ("--allow-lora-updates", "--lora-dir", str(folder / "adapters"), "--enable-lora")
        with launched(*options, *lora, "--max-lora-rank", str(rank), "--max-loras", "2") as server:
            for _ in range(rounds):
                gaps["alone"] += gaps_alone(server.url)
                gaps["loading"] += _gaps_beside_loads(server.url)
            info = httpx.get(f"{server.url}/server_info").json()
    assert info["num_adapter_loads"] == LOADS_OF_ROUND * rounds, "not all loads were made"
    load_s = info["adapter_load_s"] / info["num_adapter_loads"]
    return {name: _percentiles(each) | {"gaps": len(each)} for name, each in gaps.items()} | {
        "load": {"s": round(load_s, 2), "times": info["num_adapter_loads"]}
    }


def _gaps_beside_loads(url: str) -> list[float]:
    loads = threading.Thread(target=_load_and_unload, args=(url,))
    loads.start()
    gaps = asyncio.run(gaps_of_streams(url, lambda: not loads.is_alive()))
    loads.join()
    return gaps


def _load_and_unload(url: str) -> None:
    for _ in range(LOADS_OF_ROUND):
        for path, body in (("load", {"lora_path": "large"}), ("unload", {})):
            body = {"lora_name": "large", **body}
            answer = httpx.post(f"{url}/v1/{path}_lora_adapter", json=body, timeout=300)
            assert answer.is_success, answer.text


def _timed(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return (time.perf_counter() - began) * 1e3


def _percentiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {"p50": round(statistics.median(ordered), 2), "p99": round(ordered[int(0.99 * len(ordered))], 2)}


def _chunk(num_tokens: int) -> BatchPlan:
    """Return a plan for a prompt in row 0, over pages of all rows."""
    num_pages = pages_for(num_tokens)
    return BatchPlan(
        step=1,
        setups=(),
        page_copies=(),
        table_spans=pack_ids([0, 0, num_pages]),
        table_pages=pack_ids(range(1, num_pages + 1)),
        num_decodes=0,
        rows=pack_ids([0]),
        starts=pack_ids([0]),
        input_ids=pack_ids([7] * num_tokens),
        lens=pack_ids([num_tokens]),
        samples=pack_ids([1]),
        drafts=pack_ids([0]),
    )


def measure(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Return times of each case, measured in turns."""
    clock: dict[str, list[float]] = {name: [] for name in cases}
    cpu: dict[str, list[float]] = {name: [] for name in cases}
    for step in cases.values():
        step()
    for _ in range(rounds):
        for name, step in cases.items():
            began, used = time.perf_counter(), time.process_time()
            step()
            clock[name].append((time.perf_counter() - began) * 1e3)
            cpu[name].append((time.process_time() - used) * 1e3)
    off_clock, off_cpu = statistics.median(clock["off"]), statistics.median(cpu["off"])
    return {
        name: {
            "ms": round(statistics.median(clock[name]), 2),
            "least_ms": round(min(clock[name]), 2),
            "times": round(statistics.median(clock[name]) / off_clock, 3),
            "times_least": round(min(clock[name]) / min(clock["off"]), 3),
            "times_cpu": round(statistics.median(cpu[name]) / off_cpu, 3),
        }
        for name in cases
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="qwen-0.5b")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--load-rank", type=int, default=0)
    parser.add_argument("--only", choices=["decode", "chunk"], help="kind of step; default: both")
    parser.add_argument("--steps", type=int, default=4, help="decode steps of a round")
    parser.add_argument("--served", action="store_true", help="a launch beside loads, and nothing else")
    options = parser.parse_args()
    if options.served:
        print(json.dumps(measure_served_beside_loads(options.load_rank or 91, options.rounds)))
        return
    without, with_adapters = (BenchedModel(options, takes_adapters=takes) for takes in (False, True))
    slots = {
        "unused": [NO_ADAPTER] * options.batch,
        "one": [0] * options.batch,
        "each": list(range(options.batch)),
    }

    def case(name: str, kind: str) -> Callable[[], object]:
        def step() -> None:
            if name != "off":
                with_adapters.assign(slots[name])
            run = getattr(without if name == "off" else with_adapters, kind)
            for _ in range(options.steps if kind == "decode" else 1):
                run()

        return step

    results: dict[str, Any] = {}
    for kind, names in (("decode", ("off", *slots)), ("chunk", ("off", "unused", "one"))):
        if options.only not in (None, kind):
            continue
        results[kind] = measure({name: case(name, kind) for name in names}, options.rounds)
        for name, figures in results[kind].items():
            print(f"{kind:>7} {name:>7}: {figures}", flush=True)
    if options.load_rank:
        with tempfile.TemporaryDirectory() as folder:
            save_adapter(Path(folder), SHAPES[options.model], options.load_rank)
            with_adapters.assign(slots["unused"])
            results["loads"] = measure_beside_loads(with_adapters, Path(folder), 200)
            print(f"  loads: {results['loads']}", flush=True)
    print(json.dumps(vars(options) | {"threads": torch.get_num_threads(), "results": results}))


if __name__ == "__main__":
    main()
