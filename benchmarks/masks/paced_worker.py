"""launch.py with a worker whose steps take longer by PACE_S seconds, in which it sleeps, so that they take
the time of a large model and no core: `python -m benchmarks.masks.paced_worker ARGUMENT ...`.
"""

from __future__ import annotations

import sys
import time

from model_worker import main as worker
from model_worker.runner.model_runner import ModelRunner
from model_worker.runner.step_output import ForwardOutput, StepOutput
from runtime.launcher import main as launcher
from runtime.launcher.hosts import local
from runtime.ring.process import ProcessContext, run_process
from runtime.wire.plan import BatchPlan

PACE_S = 0.03
MODULE = "benchmarks.masks.paced_worker"


def main(context: ProcessContext) -> None:
    forward = ModelRunner.forward

    def paced(runner: ModelRunner, plan: BatchPlan) -> ForwardOutput | StepOutput:
        time.sleep(PACE_S)
        return forward(runner, plan)

    ModelRunner.forward = paced  # type: ignore[assignment, method-assign]
    worker.main(context)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("-"):
        local.MODULES["worker"] = MODULE
        sys.exit(launcher.main(sys.argv[1:]))
    run_process("worker", main)
