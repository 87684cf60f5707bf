"""Worth of batching types when lengths differ: static, in-flight and fused, in one run, as ratios.

    python -m benchmarks.bench_batching [--repeats 3] [--no-demo]

Heavy-tailed lengths: of 160 requests nine in ten write 4 to 24 tokens, one in ten 300; prompts have 16 to 600
tokens. All are there at the start; 16 run at a time. It runs

model  against a worker that computes nothing and whose step takes 4 ms + 0.1 ms for each of its tokens, on a
       clock of its own: the figures are exact and the same on every machine;
demo   with the demo model on this machine's CPU, the modes in turns; the median of the repeats counts.

ITL is the time between two tokens of one sequence. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from model_worker.device import make_device
from model_worker.executors.inproc import InprocExecutor
from model_worker.load_worker import load_worker
from runtime.settings.config import DEMO_MODEL, RuntimeConfig
from runtime.wire.format import pack_ids, unpack_ids
from runtime.wire.handle import HANDLE_BYTES, make_handle
from runtime.wire.messages import StreamOpen, TokenBatch, TokenizedRequest
from runtime.wire.plan import BatchPlan, SampleMasks, StepResult, WorkerReady
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.transport import MemoryChannel
from scheduler_proc.build_scheduler import build_scheduler
from scheduler_proc.core.executor import AnyExecutor
from scheduler_proc.port import Port

NUM_REQUESTS = 160
MAX_ROWS = 16
LONG_OUTPUT = 300
STEP_S = 0.004
TOKEN_S = 0.0001
TOKEN = 65
MODES = {"static": "static_batch", "inflight": "max_utilization", "inflight_fused": "max_utilization"}


class Figures(NamedTuple):
    tokens_per_s: float
    itl_p99_ms: float
    num_steps: int


class ModelledExecutor:
    """Worker that computes nothing, and whose step times are added up instead of waited for."""

    max_in_flight = 1
    feeds_back = True
    limits = WorkerReady(4096, 16, MAX_ROWS, 2048, 1024)

    def __init__(self) -> None:
        self.now = 0.0

    def launch(self, plan: BatchPlan) -> ModelledStep:
        num_samples = plan.num_decodes + int(unpack_ids(plan.samples).sum())
        self.now += STEP_S + TOKEN_S * len(unpack_ids(plan.input_ids))
        tokens = np.full(num_samples, TOKEN, np.int32).tobytes()
        return ModelledStep(StepResult(plan.step, tokens, plan.samples))

    def sample(self, handle: ModelledStep, masks: SampleMasks) -> None:
        raise AssertionError("no row has a mask")

    def close(self) -> None:
        """Do nothing: the executor holds no resources."""


class ModelledStep:
    frames = ()

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result

    def done(self) -> bool:
        return True


def requests() -> list[TokenizedRequest]:
    draw = random.Random(0)
    made = []
    for number in range(NUM_REQUESTS):
        num_prompt = draw.randint(16, 600)
        num_output = LONG_OUTPUT if number % 10 == 3 else draw.randint(4, 24)
        handle = make_handle(1, number)
        ids = pack_ids([draw.randrange(32, 1000) for _ in range(num_prompt)])
        sampling = SamplingParams(max_tokens=num_output, seed=1, temperature=0.0, ignore_eos=True)
        opened = msgspec.Raw(msgspec.msgpack.encode(StreamOpen(handle, num_prompt)))
        made.append(TokenizedRequest(handle, ids, sampling, opened))
    return made


def config(mode: str) -> RuntimeConfig:
    return RuntimeConfig(
        model=str(DEMO_MODEL),
        device="cpu",
        dtype="float32",
        context_length=2048,
        max_running_requests=MAX_ROWS,
        max_queued_requests=NUM_REQUESTS,
        max_total_tokens=65536,
        chunked_prefill_size=512,
        disable_radix_cache=True,
        batching_type=mode,  # type: ignore[arg-type]
        capacity_scheduler=MODES[mode],
        log_level="error",
    )


def measure(mode: str, executor: AnyExecutor, limits: WorkerReady, clock: Callable[[], float]) -> Figures:
    output = MemoryChannel("detokenizer_in")
    scheduler = build_scheduler(
        config(mode), frozenset(), executor, limits, Port(MemoryChannel("scheduler_in"), [output])
    )
    last: dict[bytes, float] = {}
    gaps: list[float] = []
    num_tokens = 0
    began = clock()
    inbox = requests()
    while not scheduler.is_idle or inbox:
        scheduler.step(inbox)
        inbox = []
        now = clock()
        for message in output.drain():
            if isinstance(message, TokenBatch):
                num_tokens += len(message.handles) // HANDLE_BYTES
                for at in range(0, len(message.handles), HANDLE_BYTES):
                    handle = message.handles[at : at + HANDLE_BYTES]
                    if handle in last:
                        gaps.append(now - last[handle])
                    last[handle] = now
    p99 = float(np.percentile(gaps, 99)) * 1000
    return Figures(num_tokens / (clock() - began), p99, scheduler.num_steps)


def measure_model(mode: str) -> Figures:
    executor = ModelledExecutor()
    return measure(mode, executor, executor.limits, lambda: executor.now)


def measure_demo(mode: str) -> Figures:
    worker = load_worker(config(mode), make_device("cpu", threaded=False), lambda: None)
    executor = InprocExecutor(worker, max_in_flight=1)
    try:
        return measure(mode, executor, worker.limits, time.perf_counter)
    finally:
        executor.close()


def report(name: str, figures: dict[str, Figures]) -> dict[str, float]:
    for mode, each in figures.items():
        print(
            f"{name:6s} {mode:15s} {each.tokens_per_s:9.1f} tok/s {each.itl_p99_ms:8.1f} ms ITL p99"
            f" {each.num_steps:6d} steps"
        )
    static, unfused, fused = (figures[mode] for mode in MODES)
    ratios = {
        "throughput in-flight / static": fused.tokens_per_s / static.tokens_per_s,
        "throughput fused / unfused": fused.tokens_per_s / unfused.tokens_per_s,
        "ITL p99 in-flight / static": fused.itl_p99_ms / static.itl_p99_ms,
        "ITL p99 fused / unfused": fused.itl_p99_ms / unfused.itl_p99_ms,
    }
    for what, ratio in ratios.items():
        print(f"{name:6s} {what:32s} {ratio:.2f}")
    return {what: round(ratio, 3) for what, ratio in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-demo", action="store_true")
    args = parser.parse_args()
    ratios = {"model": report("model", {mode: measure_model(mode) for mode in MODES})}
    if not args.no_demo:
        runs = [{mode: measure_demo(mode) for mode in MODES} for _ in range(args.repeats)]
        medians = {
            mode: Figures(
                statistics.median(run[mode].tokens_per_s for run in runs),
                statistics.median(run[mode].itl_p99_ms for run in runs),
                runs[0][mode].num_steps,
            )
            for mode in MODES
        }
        ratios["demo"] = report("demo", medians)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
