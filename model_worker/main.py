"""The worker process: executes the plans that arrive on rank_in, answers on step_results. One poll.

The scheduler may have a plan queued here while another runs, so a forward starts when the last one ends.
"""

from __future__ import annotations

import gc
import logging
from collections import deque

import torch

from model_worker.device import make_device
from model_worker.worker import ModelWorker, WorkerStep, load_worker
from runtime.errors import ExecutorError
from runtime.plan import BatchPlan, SampleMasks, WorkerCommand, WorkerFailed
from runtime.process import HEARTBEAT_S, ProcessContext, run_process
from runtime.transport import Waiter, ZmqInbox, ZmqOutbox

logger = logging.getLogger(__name__)

SEND_RETRY_S = 0.01


class WorkerLoop:
    def __init__(
        self, worker: ModelWorker, inbox: ZmqInbox, outbox: ZmqOutbox, context: ProcessContext
    ) -> None:
        self._worker = worker
        self._inbox = inbox
        self._outbox = outbox
        self._context = context
        self._waiter = Waiter([inbox.socket])
        self._steps: deque[WorkerStep] = deque()
        self._stopping = False

    def run(self) -> None:
        """Serve until the scheduler says so or the launcher does. Raises ExecutorError when a step fails."""
        while not self._stopping and not self._context.stop.is_set():
            # One at a time: on a CPU a plan is computed in here, and its result should leave before the next.
            messages = self._inbox.drain(limit=1)
            for message in messages:
                self._receive(message)
            self._context.beat()
            while self._steps and self._steps[0].done():
                self._answer()
            if not messages:
                self._wait()

    def _wait(self) -> None:
        """Everything that has arrived is launched: wait for the device, or for something to do."""
        if self._steps and not self._steps[0].awaits_masks:
            self._answer()
        else:
            self._waiter.wait(HEARTBEAT_S / 2)

    def _receive(self, message: BatchPlan | SampleMasks | WorkerCommand) -> None:
        match message:
            case BatchPlan():
                self._steps.append(self._worker.launch(message))
            case SampleMasks():
                self._worker.sample(self._steps[-1], message)
            case WorkerCommand():
                self._stopping = True

    def _answer(self) -> None:
        """Wait for the oldest step and send its result."""
        step = self._steps.popleft()
        result = step.result()
        while not self._outbox.send(result, step.frames) and not self._context.stop.wait(SEND_RETRY_S):
            self._context.beat()


def main(context: ProcessContext) -> None:
    config = context.config
    torch.set_num_threads(config.cpu_threads)
    inbox = context.inbox("rank_in", context.endpoints.rank_in(0))
    outbox = context.outbox(context.endpoints.step_results)
    worker = load_worker(config, make_device(config.device, threaded=False), context.beat)
    limits = worker.limits
    outbox.send(limits)
    context.ready(num_pages=limits.num_pages, page_size=limits.page_size, device=limits.device)
    gc.collect()
    gc.freeze()
    try:
        WorkerLoop(worker, inbox, outbox, context).run()
    except ExecutorError as error:
        outbox.send(WorkerFailed(str(error)[:1000]))
        raise
    finally:
        worker.close()


if __name__ == "__main__":
    run_process("worker", main)
