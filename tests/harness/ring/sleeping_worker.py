"""A model worker that sleeps: every step takes STEP_S whatever is in it, every token is the same one. So a
launch has a known capacity, and the cores are left for the load.

`python -m tests.harness.ring.sleeping_worker ARGUMENT ...` is `launch.py` with this worker in the place of
its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.launcher import main as launcher
from runtime.launcher.hosts import local
from runtime.ring.process import HEARTBEAT_S, ProcessContext, run_process
from runtime.wire.format import pack_ids, unpack_ids
from runtime.wire.plan import BatchPlan, SampleMasks, StepResult, WorkerReady
from runtime.wire.transport import Waiter

STEP_S = 0.05
TOKEN = 65
PAGE_SIZE = 16


def main(context: ProcessContext) -> None:
    serve(context, STEP_S, same_token)


def same_token(plan: BatchPlan) -> StepResult:
    num_tokens = plan.num_decodes + int(unpack_ids(plan.samples).sum())
    return StepResult(plan.step, pack_ids([TOKEN] * num_tokens), plan.samples)


def serve(context: ProcessContext, step_s: float, step: Callable[[BatchPlan], StepResult]) -> None:
    """Answer plans as a worker on one rank does, each after so many seconds, until the process is to stop."""
    config: Any = context.config
    inbox = context.inbox("rank_in", context.endpoints.rank_in(0))
    outbox = context.outbox(context.endpoints.step_results)
    rows, length = config.max_running_requests, config.context_length
    num_pages = rows * (length // PAGE_SIZE + 1)
    vocab_size = CheckpointConfig.read(Path(config.model)).vocab_size
    outbox.send(WorkerReady(num_pages, PAGE_SIZE, rows, length, vocab_size, "test"))
    context.ready(num_pages=num_pages)
    waiter = Waiter([inbox.socket])
    while not context.stop.is_set():
        context.beat()
        for message in inbox.drain(limit=1):
            if isinstance(message, SampleMasks):
                continue  # a script keeps to its guide by itself
            if not isinstance(message, BatchPlan):
                return
            time.sleep(step_s)
            outbox.send(step(message))
        waiter.wait(HEARTBEAT_S / 2)


def launch_with(module: str, main: Callable[[ProcessContext], None]) -> None:
    """Be launch.py with `module` as its worker, or that worker, as the arguments of this process say."""
    if len(sys.argv) > 1 and sys.argv[1].startswith("-"):
        local.MODULES["worker"] = module
        sys.exit(launcher.main(sys.argv[1:]))
    run_process("worker", main)


if __name__ == "__main__":
    launch_with("tests.harness.ring.sleeping_worker", main)
