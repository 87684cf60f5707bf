"""Time of a decode step on the CPU, C++ kernels against torch operations, turn by turn in one run.

    python -m benchmarks.bench_cpu_step [--models demo,llama-60m,qwen-0.5b] [--batches 1,8,32]
                                        [--contexts 256,1024] [--backends cpu_native,torch_native]

A backend may be followed by what the weights of linear layers are made: cpu_native+int8.

A step is what a worker does from the bytes of a plan to those of its result: tables, forward, greedy
sampling. Every row stands at the same length, on scattered pages of random keys and values. Milliseconds, the
median and the least of the steps that fit into --seconds; and of the C++ kernels' steps the CPU time that the
thread spent outside them, which is Python and torch. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.decode_rows import PAGE_SIZE, decode_plan, filled_pool, opening_plan, pages_for
from model_worker.attention.cpu_native import CpuNativeAttention
from model_worker.device import make_device
from model_worker.kernels.native.library import NativeKernels
from model_worker.loading.loader import load_model
from model_worker.ops.selection import make_ops
from model_worker.quant.selection import select_quant_method
from model_worker.runner.build_runner import build_runner
from model_worker.runner.model_runner import ModelRunner
from model_worker.worker import ModelWorker
from runtime.checkpoint.model_config import ModelConfig
from runtime.settings.config import DEMO_MODEL
from runtime.wire.messages import UNIONS
from runtime.wire.plan import BatchPlan
from runtime.wire.transport import MessageCodec

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
        self._watched: list[NativeKernels] = []

    def watch(self, kernels: NativeKernels) -> None:
        """Count the kernels' calls from now on, each once. Call it before a model takes the kernels."""
        if kernels in self._watched:
            return
        self._watched.append(kernels)
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
    if backend_name == "cpu_native":
        CLOCK.watch(CpuNativeAttention(dtype=dtype).kernels)
    ops = make_ops(backend_name, device="cpu", dtype=dtype, head_dim=config.head_dim)
    weights.bind(ops)
    pool = filled_pool(weights.kv_layout, max_rows, max_len, dtype, "cpu")
    runner = build_runner(
        weights,
        pool,
        ops,
        make_device("cpu", threaded=False),
        max_rows=max_rows,
        max_len=pages_for(max_len) * PAGE_SIZE,
        vocab_size=config.vocab_size,
    )
    runner.warm_up()
    return runner


class WiredWorker:
    """A worker with the interface of its process: plans come in and results go out as bytes of messages."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._worker = ModelWorker(runner, make_device("cpu", threaded=False))
        self._plans = MessageCodec(UNIONS["rank_in"], epoch=1)
        self._results = MessageCodec(UNIONS["step_results"], epoch=1)

    def prepare(self, batch: int, context: int, **sampling: Any) -> Callable[[], object]:
        """Open the rows, and return a decode step of them."""
        self._worker.launch(opening_plan(batch, context, self._runner.kv_pool.num_pages, **sampling)).result()
        return self.step_of(decode_plan(batch, context))

    def step_of(self, plan: BatchPlan) -> Callable[[], object]:
        """Return a step for a plan that may be run any number of times."""
        frame = self._plans.encode(plan)

        def step() -> object:
            result = self._worker.launch(self._plans.decode(frame)).result()
            return self._results.encode(result)

        return step


class Times(NamedTuple):
    ms: list[float]
    outside_us: list[float]
    """CPU time of the thread outside the C++ kernels."""


def measure(steps: dict[str, Callable[[], object]], seconds: float) -> dict[str, Times]:
    """Return times of each step, measured in turns, so that a disturbance affects all of them."""
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
    workers = {
        name: WiredWorker(make_runner(model, name, dtype, max(options.batches), max(options.contexts)))
        for name in options.backends
    }
    results: dict[str, Any] = {}
    for batch in options.batches:
        for context in options.contexts:
            steps = {name: worker.prepare(batch, context) for name, worker in workers.items()}
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
    parser.add_argument("--contexts", type=numbers, default=[256, 1024])
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {model: bench_model(model, options) for model in options.models}
    print(json.dumps({"threads": options.threads, "dtype": options.dtype, "page_size": PAGE_SIZE, **results}))


if __name__ == "__main__":
    main()
