"""The loop of a worker process, with a worker that the test holds back."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_worker.main import WorkerLoop
from runtime.wire.plan import BatchPlan, StepResult, WorkerCommand
from runtime.wire.transport import ZmqOutbox
from tests.cpu.worker.test_executors import make_config, scheduler_context
from tests.harness.models.plans import PlanWriter

RANK = 1
EPOCH = 1


class Step:
    awaits_masks = False
    frames = ()

    def __init__(self, log: list[str], number: int) -> None:
        self._log, self._number = log, number

    def done(self) -> bool:
        return False

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
