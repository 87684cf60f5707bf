"""InprocExecutor: the worker in the scheduler's own process, for CUDA, whose streams run beside the host.

On a CPU a threaded stream gives the same overlap, but a forward is slow beside a busy interpreter: serving on
a CPU takes the process executor, tests take this one.
"""

from __future__ import annotations

from collections.abc import Callable

from model_worker.device import make_device
from model_worker.worker import ModelWorker, WorkerStep, load_worker
from runtime.plan import BatchPlan, SampleMasks
from runtime.process import ProcessContext


class InprocExecutor:
    feeds_back = True

    def __init__(self, worker: ModelWorker, *, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self.limits = worker.limits
        self._worker = worker

    def launch(self, plan: BatchPlan) -> WorkerStep:
        return self._worker.launch(plan)

    def sample(self, handle: WorkerStep, masks: SampleMasks) -> None:
        self._worker.sample(handle, masks)

    def close(self) -> None:
        self._worker.close()


def create(context: ProcessContext, on_wait: Callable[[], None]) -> InprocExecutor:
    """Load the model here; `on_wait` is called while it loads. Raises ModelError or ConfigError."""
    config = context.config
    overlap = not config.disable_overlap_schedule
    device = make_device(config.device, threaded=overlap)
    return InprocExecutor(load_worker(config, device, on_wait), max_in_flight=2 if overlap else 1)
