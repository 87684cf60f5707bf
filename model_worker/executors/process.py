"""ProcessExecutor: the scheduler's end of a worker that is a process of its own. Imports no torch.

Plans and masks go out on rank_in, results come back on step_results, both in order. Nothing here waits for
ever: a wait is a poll over results and the worker's pidfd, in which `on_wait` runs at least every WAIT_S.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from runtime.errors import ExecutorError
from runtime.plan import BatchPlan, SampleMasks, StepResult, WorkerCommand, WorkerFailed, WorkerReady
from runtime.process import ProcessContext
from runtime.transport import Frame, Framed, ZmqInbox, ZmqOutbox
from runtime.wire import Message

WAIT_S = 0.1
SHUTDOWN_LINGER_MS = 200


class RemoteStep:
    """One step that was sent to the worker."""

    __slots__ = ("_executor", "_result", "_step", "frames")

    def __init__(self, executor: ProcessExecutor, step: int) -> None:
        self.frames: tuple[Frame, ...] = ()
        """Raw logits, one frame for each of the result's `tensors`; there once `result` has returned."""
        self._executor = executor
        self._step = step
        self._result: StepResult | None = None

    def done(self) -> bool:
        self._executor.receive()
        return self._result is not None or self._executor.error is not None

    def result(self) -> StepResult:
        """Wait for the step. Raises ExecutorError when the worker failed or died."""
        while self._result is None:
            self._executor.wait()
        return self._result

    def fulfil(self, result: StepResult, frames: tuple[Frame, ...]) -> None:
        assert result.step == self._step, "results come in the order of the plans"
        self._result = result
        self.frames = frames


class ProcessExecutor:
    feeds_back = True

    def __init__(
        self,
        rank_in: ZmqOutbox,
        results: ZmqInbox,
        *,
        limits: WorkerReady,
        worker_pid: int,
        max_in_flight: int,
        on_wait: Callable[[], None],
    ) -> None:
        """`limits`: what the worker said when it got ready. Raises ExecutorError when it is gone already."""
        self.max_in_flight = max_in_flight
        self.limits = limits
        self.error: ExecutorError | None = None
        self._rank_in = rank_in
        self._results = results
        self._on_wait = on_wait
        self._unfinished: deque[RemoteStep] = deque()
        try:
            self._pidfd = os.pidfd_open(worker_pid)
        except ProcessLookupError as error:
            raise ExecutorError("the model worker has died") from error
        self._poller = zmq.Poller()
        self._poller.register(results.socket, zmq.POLLIN)
        self._poller.register(self._pidfd, zmq.POLLIN)

    def launch(self, plan: BatchPlan) -> RemoteStep:
        step = RemoteStep(self, plan.step)
        self._unfinished.append(step)
        self._send(plan)
        return step

    def sample(self, handle: RemoteStep, masks: SampleMasks) -> None:
        self._send(masks)

    def _send(self, message: Message) -> None:
        while not self._rank_in.send(message):
            self.wait()

    def receive(self) -> None:
        """Hand what has arrived to the steps it belongs to. Never blocks."""
        for arrived in self._results.drain():
            message, frames = arrived if isinstance(arrived, Framed) else (arrived, ())
            if isinstance(message, StepResult):
                self._unfinished.popleft().fulfil(message, frames)
            elif isinstance(message, WorkerFailed):
                self.error = ExecutorError(f"the model worker failed: {message.message}")

    def wait(self) -> None:
        """Wait a moment for the worker. Raises ExecutorError when it failed or died."""
        if self.error is not None:
            raise self.error
        fired: dict[Any, int] = dict(self._poller.poll(int(WAIT_S * 1000)))
        self._on_wait()
        self.receive()
        if self._pidfd in fired and self.error is None and self._results.socket not in fired:
            self.error = ExecutorError("the model worker has died")

    def close(self) -> None:
        """Ask the worker to end; its process belongs to the launcher. May be repeated."""
        if self._pidfd < 0:
            return
        self._rank_in.send(WorkerCommand("shutdown"))
        self._rank_in.close()
        self._results.close()
        os.close(self._pidfd)
        self._pidfd = -1


def create(context: ProcessContext, on_wait: Callable[[], None]) -> ProcessExecutor:
    """Wait until the worker is ready. Raises ExecutorError when it fails or this process is to stop."""
    results = context.inbox("step_results", context.endpoints.step_results)
    try:
        limits = _wait_ready(context, results, on_wait)
    except BaseException:
        results.close()
        raise
    rank_in = ZmqOutbox(
        context.zmq, context.endpoints.rank_in(0), context.epoch, linger_ms=SHUTDOWN_LINGER_MS
    )
    return ProcessExecutor(
        rank_in,
        results,
        limits=limits,
        worker_pid=context.status.read("worker").pid,
        max_in_flight=1 if context.config.disable_overlap_schedule else 2,
        on_wait=on_wait,
    )


def _wait_ready(context: ProcessContext, results: ZmqInbox, on_wait: Callable[[], None]) -> WorkerReady:
    while not context.stop.is_set():
        results.socket.poll(int(WAIT_S * 1000))
        on_wait()
        for message in results.drain():
            if isinstance(message, WorkerReady):
                return message
            if isinstance(message, WorkerFailed):
                raise ExecutorError(f"the model worker failed: {message.message}")
    raise ExecutorError("asked to stop before the model worker was ready")
