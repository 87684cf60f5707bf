"""Time of a decode step by a spec and by the transformers library's modules, with the same weights, in turns.

    python -m benchmarks.bench_transformers_backend [--threads 1] [--batches 1,8,32] [--context 256]

For the demo model, and one with the shape of a 0.5B model and dummy weights. Prints milliseconds of the
process's CPU time, median and least; with one thread that is the time of a step on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.bench_cpu_step import QWEN, WiredWorker
from benchmarks.decode_rows import filled_pool
from model_worker.device import make_device
from model_worker.runner.build_runner import build_runner
from model_worker.runner.model_runner import ModelRunner
from model_worker.served_model import load_served_model
from runtime.checkpoint.model_config import ModelImpl
from runtime.settings.config import DEMO_MODEL, RuntimeConfig

IMPLEMENTATIONS: tuple[ModelImpl, ...] = ("native", "transformers")


def make_runner(model: str, model_impl: ModelImpl, max_rows: int, max_len: int) -> ModelRunner:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN))
        is_demo = model == "demo"
        config = RuntimeConfig(
            model=str(DEMO_MODEL) if is_demo else folder,
            dtype="bfloat16",
            device="cpu",
            context_length=max_len,
            model_impl=model_impl,
            load_format="auto" if is_demo else "dummy",
        )
        device = make_device("cpu", threaded=False)
        served = load_served_model(config, device, lambda loaded, total: None)
    pool = filled_pool(served.model.kv_layout, max_rows, max_len, torch.bfloat16, "cpu")
    return build_runner(
        served.model,
        pool,
        served.ops,
        device,
        max_rows=max_rows,
        max_len=max_len,
        vocab_size=served.config.vocab_size,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=256, help="a multiple of 16")
    parser.add_argument("--steps", type=int, default=40, help="of each implementation, for each case")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for model in ("demo", "0.5B"):
        workers = {
            name: WiredWorker(make_runner(model, name, max(options.batches), options.context))
            for name in IMPLEMENTATIONS
        }
        for batch in options.batches:
            times: dict[str, list[float]] = {name: [] for name in workers}
            steps = {name: worker.prepare(batch, options.context) for name, worker in workers.items()}
            for _ in range(options.steps):
                for name, step in steps.items():
                    begin = time.process_time()
                    step()
                    times[name].append((time.process_time() - begin) * 1e3)
            native, library = (statistics.median(times[name]) for name in IMPLEMENTATIONS)
            least = min(times["transformers"]) / min(times["native"])
            print(
                f"{model:>5} batch {batch:>3}: native {native:8.2f} ms  transformers {library:8.2f} ms"
                f"  {library / native:.2f}x (of the least {least:.2f}x)",
                flush=True,
            )


if __name__ == "__main__":
    main()
