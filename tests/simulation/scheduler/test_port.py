"""The scheduler's time: read when a turn begins and when a step's result has come, and at no other moment."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.ring.tenants import Tenant, TenantLimits, Tenants
from runtime.wire.handle import make_handle
from runtime.wire.plan import StepResult
from runtime.wire.transport import MemoryChannel
from scheduler_proc.loop import SchedulerLoop
from scheduler_proc.port import Port
from tests.harness.scheduler.scheduler_parts import message, running
from tests.harness.simulation.sim_system import System

FORWARD_S = 2.5


class SlowWorker:
    """Stands before the executor; each result comes so much later than it is asked for."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._launch = system.executor.launch
        system.executor.launch = self.launch  # type: ignore[method-assign]

    def launch(self, plan: Any) -> Any:
        handle = self._launch(plan)
        result = handle.result

        def late() -> StepResult:
            self._system.now += FORWARD_S
            return result()

        handle.result = late  # type: ignore[method-assign]
        return handle


def test_time_stands_still_between_two_readings() -> None:
    times = iter([1.0, 2.0, 3.0])
    port = Port(MemoryChannel("scheduler_in"), [], clock=lambda: next(times), wall_clock=lambda: 100.0)
    assert (port.now_s(), port.now_s(), port.wall_s()) == (1.0, 1.0, 100.0)
    port.read_time()
    assert port.now_s() == 2.0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_token_is_as_old_as_its_result_and_a_step_takes_as_long_as_its_forward(depth: int) -> None:
    with running(depth=depth) as system:
        SlowWorker(system)
        asking = message(1, [1] * 8, max_tokens=3, sampling={"return_perf_metrics": True})
        assert system.inbox.send(asking)
        loop = SchedulerLoop(system.scheduler)
        while loop.turn() == 0.0:
            system.deliver()
        metrics = system.detokenizer.closed[make_handle(1, 1)].perf_metrics
        assert metrics is not None
        times = metrics.timing_metrics
        assert times.first_scheduled_time == 1.0, "when the turn began"
        assert times.first_token_time == 1.0 + FORWARD_S
        assert times.last_token_time == 1.0 + 3 * FORWARD_S
        steps = system.stats.iterations_after(0, 10).records
        assert [each.iter_latency_ms for each in steps[:3]] == [FORWARD_S * 1e3] * 3


def test_the_loop_takes_the_table_of_tenants_at_the_start_and_twice_a_heartbeat() -> None:
    tables = [Tenants((Tenant("a", "user", TenantLimits(max_running=most)),)) for most in (3, 5)]
    with running() as system:
        system.port._new_tenants = lambda: tables.pop(0) if tables else None
        loop = SchedulerLoop(system.scheduler)
        accounts = system.lifecycle.accounts
        assert accounts.of("a").max_running == 3
        loop.turn()
        assert accounts.of("a").max_running == 3
        system.now += 1.0
        loop.turn()
        assert accounts.of("a").max_running == 5
