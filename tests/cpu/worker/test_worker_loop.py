"""The loop of a worker process, with a worker that the test holds back."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_worker.main import WorkerLoop
from runtime.wire.plan import BatchPlan, MasksAwaited, SampleMasks, StepResult, WorkerCommand
from runtime.wire.transport import ZmqOutbox
from tests.cpu.worker.test_executors import make_config, scheduler_context
from tests.harness.models.plans import PlanWriter

RANK = 1
EPOCH = 1


class Step:
    frames = ()
    awaits_masks = False
    is_computed = False

    def __init__(self, log: list[str], number: int) -> None:
        self._log, self._number = log, number

    def done(self) -> bool:
        return False

    def waits_for_masks(self) -> bool:
        return self.awaits_masks and self.is_computed

    def result(self) -> StepResult:
        self._log.append(f"result {self._number}")
        return StepResult(self._number, b"")


class SlowWorker:
    """Its device has finished nothing before it is waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def on_adapter_news(self, callback: object) -> None:
        """It has no adapters."""

    def launch(self, plan: BatchPlan) -> Step:
        self.log.append(f"launch {plan.step}")
        return Step(self.log, plan.step)


def test_a_follower_takes_the_next_plan_while_its_device_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for what it returns; rank 0's device waits for it in the next step's first collective."""
    plans, worker = PlanWriter(4), SlowWorker()
    plans.open_row(0, [1, 2], [1])
    with scheduler_context(tmp_path / "run", make_config(Path("nowhere"), tp_size=2)) as context:
        address = context.endpoints.rank_in(RANK)
        inbox, outbox = context.inbox("rank_in", address), ZmqOutbox(context.zmq, address, EPOCH)
        loop = WorkerLoop(worker, inbox, None, context)  # type: ignore[arg-type]
        first, second = plans.plan(chunks=[(0, [1, 2], True)]), plans.plan(decodes=[(0, 1)])
        later = [second, WorkerCommand("shutdown")]
        wait = loop._waiter.wait

        def send_and_wait(timeout_s: float) -> bool:
            if later:
                assert outbox.send(later.pop(0))
            return wait(timeout_s)

        monkeypatch.setattr(loop._waiter, "wait", send_and_wait)
        assert outbox.send(first)
        loop.run()
        inbox.close()
        outbox.close()
    assert worker.log == ["launch 1", "launch 2"]


class DeferringWorker(SlowWorker):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def launch(self, plan: BatchPlan) -> Step:
        step = super().launch(plan)
        step.awaits_masks = plan.defer_sampling
        self.steps.append(step)
        return step

    def sample(self, step: Step, masks: SampleMasks) -> None:
        step.awaits_masks = False


def test_the_scheduler_is_told_once_that_only_masks_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while the device computes: nobody waits for masks then."""
    plans, worker, sent = PlanWriter(4), DeferringWorker(), list[object]()

    class Recorder:
        def send(self, message: object, frames: object = ()) -> bool:
            sent.append(message)
            return True

    plans.open_row(0, [1, 2], [1])
    with scheduler_context(tmp_path / "run", make_config(Path("nowhere"))) as context:
        address = context.endpoints.rank_in(0)
        inbox, outbox = context.inbox("rank_in", address), ZmqOutbox(context.zmq, address, EPOCH)
        loop = WorkerLoop(worker, inbox, Recorder(), context)  # type: ignore[arg-type]
        wait, num_sent = loop._waiter.wait, []

        def turn(timeout_s: float) -> bool:
            if worker.steps:
                num_sent.append(len(sent))
                worker.steps[0].is_computed = True
                if len(num_sent) == 4:
                    assert outbox.send(SampleMasks(1, ()))
                    assert outbox.send(WorkerCommand("shutdown"))
                return wait(timeout_s) if len(num_sent) >= 4 else True
            return wait(timeout_s)

        monkeypatch.setattr(loop._waiter, "wait", turn)
        assert outbox.send(plans.plan(chunks=[(0, [1, 2], True)], defer_sampling=True))
        loop.run()
        inbox.close()
        outbox.close()
    assert num_sent[:4] == [0, 1, 1, 1]
    assert [message for message in sent if not isinstance(message, StepResult)] == [MasksAwaited(1)]
