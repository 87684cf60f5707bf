"""Main program of one rank's worker process: executes the plans that arrive on rank_in, with a single poll.
Rank 0 answers on step_results; the others only report failures. The scheduler may queue a plan while another
runs, so a forward starts when the last one ends.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import deque

import torch

from model_worker.device import make_device
from model_worker.device.cpu import keep_freed_memory
from model_worker.load_worker import load_worker
from model_worker.membership import join_ranks
from model_worker.rank_methods import RankMethods, RankView, load_methods
from model_worker.worker import ModelWorker, WorkerStep
from runtime.base.errors import ExecutorError
from runtime.base.wake import Wake
from runtime.ring.nodes import open_rank_answers, open_rank_inbox
from runtime.ring.process import HEARTBEAT_S, ProcessContext, run_process
from runtime.wire.messages import FromRank, ToRank
from runtime.wire.plan import (
    BatchPlan,
    CallRank,
    DropAdapter,
    LoadAdapter,
    MasksAwaited,
    SampleMasks,
    WorkerCommand,
    WorkerFailed,
)
from runtime.wire.transport import Frame, Waiter, ZmqInbox, ZmqOutbox

logger = logging.getLogger(__name__)

SEND_RETRY_S = 0.01


class WorkerLoop:
    def __init__(
        self,
        worker: ModelWorker,
        inbox: ZmqInbox,
        outbox: ZmqOutbox | None,
        context: ProcessContext,
        answers_out: ZmqOutbox | None = None,
        methods: RankMethods | None = None,
    ) -> None:
        """outbox: for results; None: this rank sends none. answers_out: for answers about adapters and calls,
        which all ranks send; None: `outbox`. methods: methods that may be called.
        """
        self._worker = worker
        self._inbox = inbox
        self._outbox = outbox
        self._answers_out = answers_out or outbox
        self._methods = methods
        self._context = context
        self._news = Wake()
        worker.on_adapter_news(self._news.set)
        self._waiter = Waiter([inbox.socket, self._news.fd, context.stop_wake.fd])
        self._steps: deque[WorkerStep] = deque()
        self._num_steps = 0
        self._num_told = 0
        """Number of the last step for which MasksAwaited was sent."""
        self._stopping = False

    def run(self) -> None:
        """Serve until the scheduler or the launcher ends it. Raises ExecutorError when a step fails."""
        while not self._stopping and not self._context.stop.is_set():
            # One at a time: on a CPU a plan is computed in this call, and its result should be sent before
            # the next.
            messages = self._inbox.drain(limit=1)
            for message in messages:
                self._receive(message)
            self._context.beat()
            self._send_news()
            while self._steps and self._steps[0].done():
                self._answer()
            if not messages:
                self._wait()

    def _wait(self) -> None:
        """Wait for the device, or for a message, when everything that has arrived is launched.

        A rank that sends no results does not wait for the device: a plan that arrives meanwhile would be
        launched so late that the other ranks' devices wait for this one in its first collective operation.
        """
        if self._outbox is not None and self._steps and not self._steps[0].awaits_masks:
            self._answer()
        else:
            self._say_that_masks_are_awaited()
            self._waiter.wait(HEARTBEAT_S / 2)

    def _say_that_masks_are_awaited(self) -> None:
        """Tell the scheduler once that only the masks of the newest step are missing."""
        if self._outbox is None or self._num_told == self._num_steps or not self._steps:
            return
        if self._steps[-1].waits_for_masks():
            self._num_told = self._num_steps
            self._send(self._outbox, MasksAwaited(self._num_steps))

    def _receive(self, message: ToRank) -> None:
        match message:
            case BatchPlan(step) if step == self._num_steps + 1:
                self._num_steps = step
                self._steps.append(self._worker.launch(message))
            case SampleMasks(step) if step == self._num_steps and self._awaits_masks:
                self._worker.sample(self._steps[-1], message)
            case BatchPlan() | SampleMasks():
                # The scheduler numbers its steps, so the message did not come from the scheduler.
                out_of_order = f"{type(message).__name__} of step {message.step} after step {self._num_steps}"
                self._inbox.bad_frames.add(ValueError(out_of_order))
            case LoadAdapter():
                self._worker.load_adapter(message)
            case DropAdapter(slot):
                self._worker.drop_adapter(slot)
            case CallRank() if self._methods is not None and self._answers_out is not None:
                self._send(self._answers_out, self._methods.run(message, self._num_steps))
            case WorkerCommand():
                self._stopping = True

    @property
    def _awaits_masks(self) -> bool:
        return bool(self._steps) and self._steps[-1].awaits_masks

    def _answer(self) -> None:
        """Wait for the oldest step and send its result."""
        step = self._steps.popleft()
        result = step.result()
        if self._outbox is None:
            return
        self._send(self._outbox, result, step.frames)

    def _send_news(self) -> None:
        """Send the results of loading adapters."""
        if self._answers_out is not None and self._news.take():
            for answer in self._worker.adapter_answers():
                self._send(self._answers_out, answer)

    def _send(self, outbox: ZmqOutbox, message: FromRank, frames: tuple[Frame, ...] = ()) -> None:
        while not outbox.send(message, frames) and not self._context.stop.wait(SEND_RETRY_S):
            self._context.beat()


def main(context: ProcessContext) -> None:
    config = context.config
    torch.set_num_threads(config.cpu_threads)
    rank = context.index
    inbox = open_rank_inbox(context, rank)
    outbox = open_rank_answers(context)
    local_rank = rank % config.ranks_per_node
    device = make_device(config.device, threaded=False, index=local_rank)
    member = join_ranks(context, device, context.beat)
    layout = member.layout
    if config.device == "cpu":
        pin_to_share(local_rank, config.ranks_per_node)  # the group counts all cores
    worker = load_worker(config, device, context.beat, member, context.note_loaded)
    if config.device == "cpu":
        keep_freed_memory()  # the memory that loading freed has been returned by now
    view = RankView(rank, layout.num_ranks, worker.model, context.beat)
    methods = load_methods(config.worker_extension_cls, view)
    limits = worker.limits
    if layout.answers:
        outbox.send(limits)
    context.ready(num_pages=limits.num_pages, page_size=limits.page_size, device=limits.device)
    gc.collect()
    gc.freeze()
    try:
        WorkerLoop(worker, inbox, outbox if layout.answers else None, context, outbox, methods).run()
    except ExecutorError as error:
        outbox.send(WorkerFailed(str(error)[:1000]))
        raise
    finally:
        worker.close()
        member.close()


def pin_to_share(rank: int, num_ranks: int) -> None:
    """Restrict a rank to its share of the cores, because two ranks on one core would wait for each other in
    every layer.
    """
    cores = sorted(os.sched_getaffinity(0))
    if 1 < num_ranks <= len(cores):
        os.sched_setaffinity(0, cores[len(cores) * rank // num_ranks : len(cores) * (rank + 1) // num_ranks])


if __name__ == "__main__":
    run_process("worker", main)
