"""The scheduler's process switches the collector off: nothing that comes and goes may end in a cycle."""

from __future__ import annotations

import gc
import logging

import pytest

from tests.harness.simulation.simulation import Simulation

OURS = ("scheduler_proc", "tests.harness.models.stand_ins", "runtime")


def test_traffic_leaves_no_cycles(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    gc.collect()
    gc.freeze()  # what tests before this one have left, and let go of meanwhile, is not looked at
    gc.disable()
    try:
        # Kept until after the collection: a scheduler and its tree are cycles and live with the process.
        simulations = [Simulation(seed) for seed in range(6)]
        for simulation in simulations:
            simulation.run()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = {type(x).__name__ for x in gc.garbage if type(x).__module__.startswith("scheduler_proc")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()
    assert len(simulations) == 6
    assert not left
