"""ProcessExecutor: the scheduler's side of a worker in a process of its own. Imports no torch.

Plans and masks go out to all ranks. Results come back on step_results from the rank that samples. Both keep
their order. Ranks of other nodes answer on a socket of their own. Nothing here waits for ever: a wait is a
poll over results and the ranks' pidfds, and `on_wait` is called whenever nothing comes for WAIT_S.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from model_worker.executors.adapter_loads import AdapterLoads
from model_worker.executors.ranks import Ranks
from runtime.base.errors import ExecutorError
from runtime.ring.nodes import open_answers_inbox
from runtime.ring.process import ProcessContext
from runtime.wire.format import Message
from runtime.wire.plan import (
    AdapterAnswer,
    AdapterFailed,
    AdapterLoaded,
    AdapterRef,
    BatchPlan,
    CallRank,
    DropAdapter,
    MasksAwaited,
    RankAnswer,
    SampleMasks,
    StepResult,
    WorkerFailed,
    WorkerReady,
)
from runtime.wire.transport import HIGH_WATER_MARK, Frame, Framed, ZmqInbox

WAIT_S = 0.1


class RemoteStep:
    """A step that was sent to the worker."""

    __slots__ = ("_executor", "_result", "frames", "step")

    def __init__(self, executor: ProcessExecutor, step: int) -> None:
        self.frames: tuple[Frame, ...] = ()
        """Raw logits, one frame for each of the result's `tensors`. Set once `result` has returned."""
        self._executor = executor
        self.step = step
        self._result: StepResult | None = None

    def done(self) -> bool:
        self._executor.receive()
        return self._result is not None or self._executor.error is not None

    def waits_for_masks(self) -> bool:
        return self.done() or self._executor.awaiting_masks == self.step

    def result(self) -> StepResult:
        """Return the step's result, waiting for it. Raises ExecutorError when the worker failed or died."""
        while self._result is None:
            self._executor.wait()
        return self._result

    def fulfil(self, result: StepResult, frames: tuple[Frame, ...]) -> None:
        self._result = result
        self.frames = frames


class ProcessExecutor:
    def __init__(
        self,
        ranks: Ranks,
        results: ZmqInbox,
        *,
        limits: WorkerReady,
        max_in_flight: int,
        feeds_back: bool = True,
        on_wait: Callable[[], None],
        from_others: ZmqInbox | None = None,
    ) -> None:
        """limits: reported by the worker when it became ready. from_others: inbox for answers of ranks on
        other nodes.
        """
        self.max_in_flight = max_in_flight
        self.feeds_back = feeds_back
        self.limits = limits
        self.error: ExecutorError | None = None
        self.awaiting_masks = 0
        """Number of the last step for whose masks the worker has waited, once it has said so."""
        self._ranks = ranks
        self._results = results
        self._inboxes = [results] if from_others is None else [results, from_others]
        self._on_wait = on_wait
        self._loads = AdapterLoads(ranks.count)
        self._answers: list[RankAnswer] = []
        self._unfinished: deque[RemoteStep] = deque()
        self._poller = zmq.Poller()
        for inbox in self._inboxes:
            self._poller.register(inbox.socket, zmq.POLLIN)
        ranks.register(self._poller)

    def launch(self, plan: BatchPlan) -> RemoteStep:
        step = RemoteStep(self, plan.step)
        self._unfinished.append(step)
        self._ranks.send(plan, self.wait)
        return step

    def sample(self, handle: RemoteStep, masks: SampleMasks) -> None:
        self._ranks.send(masks, self.wait)

    def load_adapter(self, slot: int, ref: AdapterRef) -> None:
        self._ranks.send(self._loads.begin(slot, ref), self.wait)

    def drop_adapter(self, slot: int) -> None:
        self._loads.forget(slot)
        self._ranks.send(DropAdapter(slot), self.wait)

    def adapter_answers(self) -> list[AdapterAnswer]:
        self.receive()
        return self._loads.answers()

    @property
    def num_ranks(self) -> int:
        return self._ranks.count

    def call(self, call: CallRank, ranks: Sequence[int]) -> None:
        self._ranks.send(call, self.wait, ranks)

    def rank_answers(self) -> list[RankAnswer]:
        self._look(0)
        if self.error is not None:
            raise self.error
        answers, self._answers = self._answers, []
        return answers

    def receive(self, most: int = HIGH_WATER_MARK) -> None:
        """Assign the messages that have arrived, at most `most` of each inbox, to their steps. Never
        blocks.
        """
        for inbox in self._inboxes:
            for arrived in inbox.drain(most):
                self._take(arrived, inbox)

    def _take(self, arrived: Message | Framed, inbox: ZmqInbox) -> None:
        message, frames = arrived if isinstance(arrived, Framed) else (arrived, ())
        if isinstance(message, StepResult):
            self._take_result(message if inbox is self._results else _by_clock_here(message), frames)
        elif isinstance(message, MasksAwaited):
            self.awaiting_masks = message.step
        elif isinstance(message, AdapterLoaded | AdapterFailed):
            self._loads.take(message)
        elif isinstance(message, RankAnswer):
            self._answers.append(message)
        elif isinstance(message, WorkerFailed):
            self.error = ExecutorError(f"the model worker failed: {message.message}")

    def _take_result(self, result: StepResult, frames: tuple[Frame, ...]) -> None:
        """Take a result. Results come in the order of the plans; any other was not sent by our worker and is
        dropped.
        """
        if not self._unfinished or result.step != self._unfinished[0].step:
            self._results.bad_frames.add(ValueError(f"a result of step {result.step}, which is not the next"))
            return
        self._unfinished.popleft().fulfil(result, frames)

    def wait(self) -> None:
        """Wait briefly for the worker. Raises ExecutorError when it failed or died."""
        if self.error is not None:
            raise self.error
        # To ask for more than one message takes longer, and the next poll returns at once if there are any.
        if not self._look(WAIT_S, 1):
            self._on_wait()

    def _look(self, wait_s: float, most: int = HIGH_WATER_MARK) -> bool:
        """Take the messages that arrive within wait_s, as `receive` does, and note ranks that have died.
        Returns False if nothing came.
        """
        fired: dict[Any, int] = dict(self._poller.poll(int(wait_s * 1000)))
        if not fired:
            return False
        self.receive(most)
        if self._results.socket not in fired and self.error is None:
            name = self._ranks.died(fired)
            if name is not None:
                self.error = ExecutorError(f"{name} has died")
        return True

    def close(self) -> None:
        """Ask the ranks to end; their processes belong to the launcher. May be called again."""
        self._ranks.close()
        for inbox in self._inboxes:
            inbox.close()


def create(context: ProcessContext, on_wait: Callable[[], None]) -> ProcessExecutor:
    """Wait until the worker is ready, and return the executor. Raises ExecutorError when it fails or this
    process is to stop.
    """
    inboxes = [context.inbox("step_results", context.endpoints.step_results)]
    from_others = None
    try:
        from_others = open_answers_inbox(context)
        if from_others is not None:
            inboxes.append(from_others)
        limits = _wait_ready(context, inboxes, on_wait)
        ranks = Ranks(context, range(context.config.num_ranks))
    except BaseException:
        for inbox in inboxes:
            inbox.close()
        raise
    return ProcessExecutor(
        ranks,
        inboxes[0],
        limits=limits,
        max_in_flight=context.config.max_steps_in_flight,
        feeds_back=not context.config.disable_overlap_schedule,
        on_wait=on_wait,
        from_others=from_others,
    )


def _by_clock_here(result: StepResult) -> StepResult:
    """Return the result of a rank on another machine with its times on this machine's clock: its last timed
    work ends when the result arrives.
    """
    if not result.spans:
        return result
    ahead_ns = time.monotonic_ns() - max(span.end_ns for span in result.spans)
    spans = tuple(
        msgspec.structs.replace(span, begin_ns=span.begin_ns + ahead_ns, end_ns=span.end_ns + ahead_ns)
        for span in result.spans
    )
    return msgspec.structs.replace(result, spans=spans)


def _wait_ready(
    context: ProcessContext, inboxes: Sequence[ZmqInbox], on_wait: Callable[[], None]
) -> WorkerReady:
    poller = zmq.Poller()
    for inbox in inboxes:
        poller.register(inbox.socket, zmq.POLLIN)
    while not context.stop.is_set():
        poller.poll(int(WAIT_S * 1000))
        on_wait()
        for message in [message for inbox in inboxes for message in inbox.drain()]:
            if isinstance(message, WorkerReady):
                return message
            if isinstance(message, WorkerFailed):
                raise ExecutorError(f"the model worker failed: {message.message}")
    raise ExecutorError("asked to stop before the model worker was ready")
