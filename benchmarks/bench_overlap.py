"""Idle share of a device that waits for the host: a stream whose steps take 3 ms, at 256 decoding rows.

    python -m benchmarks.bench_overlap [--steps 300]

The worker is a thread that sleeps; it is idle from the end of one step to the start of the next. At depth 1
the host commits a step and plans the next one meanwhile; at depth 2 the next plan is already there. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench_step import TOKEN, Bench, Case
from runtime.wire.format import unpack_ids
from runtime.wire.plan import BatchPlan, SampleMasks, StepResult

NUM_ROWS = 256
STEP_S = 0.003
WARMUP_STEPS = 10
BAR = 0.03


class SleepingHandle:
    frames = ()

    def __init__(self) -> None:
        self._result: StepResult | None = None
        self._finished = threading.Event()

    def finish(self, result: StepResult) -> None:
        self._result = result
        self._finished.set()

    def result(self) -> StepResult:
        self._finished.wait()
        assert self._result is not None
        return self._result

    def done(self) -> bool:
        return self._finished.is_set()


class SleepingExecutor:
    """Runs each step for STEP_S on a thread, and adds up its idle time."""

    feeds_back = True

    def __init__(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self.busy_s = 0.0
        self.idle_s = 0.0
        self._ended_at = 0.0
        self._tokens = np.full(NUM_ROWS, TOKEN, np.int32)
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    def launch(self, plan: BatchPlan) -> SleepingHandle:
        handle = SleepingHandle()
        self._queue.put(lambda: self._compute(plan, handle))
        return handle

    def sample(self, handle: object, masks: SampleMasks) -> None:
        raise AssertionError("no row has a mask")

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def reset(self) -> None:
        self.busy_s = 0.0
        self.idle_s = 0.0

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _compute(self, plan: BatchPlan, handle: SleepingHandle) -> None:
        started = time.perf_counter()
        self.idle_s += started - self._ended_at if self._ended_at else 0.0
        time.sleep(STEP_S)
        samples = unpack_ids(plan.samples)
        tokens = self._tokens[: plan.num_decodes + int(samples.sum())]
        result = StepResult(plan.step, tokens.tobytes(), samples.tobytes())
        self._ended_at = time.perf_counter()
        self.busy_s += self._ended_at - started
        handle.finish(result)


def idle_share(max_in_flight: int, num_steps: int) -> float:
    executor = SleepingExecutor(max_in_flight)
    bench = Bench(Case(NUM_ROWS, 16, churn=False, num_output=num_steps + 2 * WARMUP_STEPS), executor)
    bench.step(bench.first_frames())
    for _ in range(WARMUP_STEPS):
        bench.step([])
    executor.reset()
    for _ in range(num_steps):
        bench.step([])
    share = executor.idle_s / (executor.idle_s + executor.busy_s)
    executor.close()
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    gc.disable()
    shares = {depth: idle_share(depth, args.steps) for depth in (1, 2)}
    print(f"{NUM_ROWS} rows, {STEP_S * 1e3:g} ms a step")
    for depth, share in shares.items():
        print(
            f"depth {depth}: the stream is idle {share:6.1%} of the time"
            + (f" (bar {BAR:.0%})" * (depth == 2))
        )
    print(json.dumps({"idle_share": {f"depth_{depth}": round(share, 4) for depth, share in shares.items()}}))


if __name__ == "__main__":
    main()
