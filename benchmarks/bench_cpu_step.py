"""Time of a decode step on the CPU, C++ kernels against torch operations, turn by turn in one run.

    python -m benchmarks.bench_cpu_step [--models demo,llama-60m,qwen-0.5b] [--batches 1,8,32]
                                        [--contexts 256,1024] [--backends cpu_native,torch_native]

A backend may be followed by what the weights of linear layers are made: cpu_native+int8.

A step is what a worker does for a plan: tables, forward, greedy sampling. Every row stands at the same
length, on scattered pages of random keys and values. Milliseconds, the median and the least of the steps that
fit into --seconds; and of the C++ kernels' steps the CPU time that the thread spent outside them, which is
Python and torch. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from model_worker.attention.cpu_native import CpuNativeAttention
from model_worker.attention.selection import make_attention_backend
from model_worker.device import make_device
from model_worker.kernels.native.library import NativeKernels
from model_worker.kv_pool import MHATokenToKVPool
from model_worker.loader import load_model
from model_worker.model_runner import ModelRunner
from model_worker.quant.selection import select_quant_method
from runtime.config import DEMO_MODEL
from runtime.model_config import ModelConfig
from runtime.plan import BatchPlan, RowSetup
from runtime.wire import pack_ids

PAGE_SIZE = 16
BACKENDS = ("cpu_native", "torch_native")
KERNELS = (
    "attention",
    "norm",
    "activate",
    "combine",
    "take",
    "rotary",
    "linear",
    "quantize_rows",
    "int8_linear",
    "draw",
    "run_step",
)
# Shapes; the weights are random, which costs the same time.
LLAMA_60M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 8192,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# Qwen2.5-0.5B.
QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
SHAPES = {"llama-60m": LLAMA_60M, "qwen-0.5b": QWEN}


class KernelClock:
    """CPU seconds that the calling thread has spent in C++ kernels."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, kernels: NativeKernels) -> None:
        """Count the kernels' calls from now on; before a model takes them."""
        for name in KERNELS:
            if hasattr(kernels, name):
                setattr(kernels, name, self._counted(getattr(kernels, name)))

    def _counted(self, function: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(call: Any) -> None:
            began = time.thread_time()
            function(call)
            self.seconds += time.thread_time() - began

        return run


CLOCK = KernelClock()


def make_runner(model: str, backend: str, dtype: torch.dtype, max_rows: int, max_len: int) -> ModelRunner:
    backend_name, _, quantization = backend.partition("+")
    quant = select_quant_method(quantization or "auto", None, "cpu")
    if model == "demo":
        config = ModelConfig.from_path(DEMO_MODEL)
        weights = load_model(DEMO_MODEL, config, dtype, "cpu", quant=quant)
    else:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[model]))
            config = ModelConfig.from_path(Path(folder))
            weights = load_model(Path(folder), config, dtype, "cpu", "dummy", quant=quant)
    attention = make_attention_backend(backend_name, device="cpu", dtype=dtype, head_dim=config.head_dim)
    if isinstance(attention, CpuNativeAttention):
        weights.use_native(attention.kernels)
    pool = MHATokenToKVPool(
        max_rows * (max_len // PAGE_SIZE),
        PAGE_SIZE,
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        dtype,
        "cpu",
    )
    for layer in range(config.num_layers):
        for buffer in pool.layer(layer):
            buffer.normal_()
    runner = ModelRunner(
        weights,
        pool,
        attention,
        make_device("cpu", threaded=False),
        max_rows=max_rows,
        max_len=max_len,
        vocab_size=config.vocab_size,
    )
    runner.warm_up()
    return runner


def open_rows(runner: ModelRunner, batch: int, context: int) -> None:
    """Give rows 0 .. batch - 1 their pages and greedy sampling."""
    pages_per_row = context // PAGE_SIZE
    pages = np.random.default_rng(0).permutation(runner.kv_pool.num_pages)[: batch * pages_per_row] + 1
    rows = np.arange(batch)
    spans = np.stack([rows, np.zeros_like(rows), np.full_like(rows, pages_per_row)], axis=1)
    plan = decode_plan(batch, context)
    setups = tuple(RowSetup(row=row, num_prompt=context - 1, temperature=0.0) for row in range(batch))
    runner.forward(
        BatchPlan(
            step=0,
            setups=setups,
            page_copies=(),
            table_spans=pack_ids(spans),
            table_pages=pack_ids(pages),
            num_decodes=batch,
            rows=plan.rows,
            starts=plan.starts,
            input_ids=plan.input_ids,
        )
    )


def decode_plan(batch: int, context: int) -> BatchPlan:
    return BatchPlan(
        step=1,
        setups=(),
        page_copies=(),
        table_spans=b"",
        table_pages=b"",
        num_decodes=batch,
        rows=pack_ids(np.arange(batch)),
        starts=pack_ids(np.full(batch, context - 1)),
        input_ids=pack_ids(np.arange(batch) + 100),
    )


def run_step(runner: ModelRunner, plan: BatchPlan) -> None:
    runner.sample(runner.forward(plan), {})


class Times(NamedTuple):
    ms: list[float]
    outside_us: list[float]
    """CPU time of the thread, but for the C++ kernels."""


def measure(steps: dict[str, Callable[[], object]], seconds: float) -> dict[str, Times]:
    """Times of each step, taken in turns so that a noisy moment meets all of them."""
    times = {name: Times([], []) for name in steps}
    for step in steps.values():
        step()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or any(len(each.ms) < 3 for each in times.values()):
        for name, step in steps.items():
            in_kernels, cpu, began = CLOCK.seconds, time.thread_time(), time.perf_counter()
            step()
            times[name].ms.append((time.perf_counter() - began) * 1e3)
            used = time.thread_time() - cpu
            times[name].outside_us.append((used - (CLOCK.seconds - in_kernels)) * 1e6)
    return times


def bench_model(model: str, options: argparse.Namespace) -> dict[str, Any]:
    dtype: torch.dtype = getattr(torch, options.dtype)
    runners = {
        name: make_runner(model, name, dtype, max(options.batches), max(options.contexts))
        for name in options.backends
    }
    results: dict[str, Any] = {}
    for batch in options.batches:
        for context in options.contexts:
            plan = decode_plan(batch, context)
            steps: dict[str, Callable[[], object]] = {}
            for name, runner in runners.items():
                open_rows(runner, batch, context)
                steps[name] = partial(run_step, runner, plan)
            case: dict[str, Any] = {}
            line = f"{model:>10} batch {batch:>3} context {context:>5}:"
            for name, times in measure(steps, options.seconds).items():
                case[name] = [round(statistics.median(times.ms), 3), round(min(times.ms), 3)]
                line += f"  {name} {case[name][0]:9.3f} ({case[name][1]:.3f}) ms"
                if name.startswith("cpu_native"):
                    outside = [round(statistics.median(times.outside_us)), round(min(times.outside_us))]
                    case["outside_kernels_us"] = outside
                    line += f", outside kernels {outside[0]} ({outside[1]}) us of CPU"
            results[f"b{batch}_c{context}"] = case
            print(line, flush=True)
    return results


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=lambda text: text.split(","), default=["demo", "qwen-0.5b"])
    parser.add_argument("--backends", type=lambda text: text.split(","), default=list(BACKENDS))
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
    parser.add_argument("--contexts", type=numbers, default=[256, 1024], help="multiples of 16")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if any(name.startswith("cpu_native") for name in options.backends):
        CLOCK.watch(CpuNativeAttention().kernels)
    results = {model: bench_model(model, options) for model in options.models}
    print(json.dumps({"threads": options.threads, "dtype": options.dtype, "page_size": PAGE_SIZE, **results}))


if __name__ == "__main__":
    main()
