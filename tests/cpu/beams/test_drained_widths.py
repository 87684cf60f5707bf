"""Requests of several beam widths, by turns and together: the same comes of both."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from runtime.settings.config import DEMO_MODEL, RuntimeConfig
from tests.harness.ring.beam_draws import Draw, Found, found_by
from tests.harness.ring.serving_ring import Ring, Setting
from tests.harness.simulation.group_simulation import GroupSimulation

WIDTHS = (4, 4, 2, 4)
NUM_TOKENS = 8


class WidthsRing(Ring):
    batching: Literal["mixed", "drain"]

    def settings(self, config: RuntimeConfig) -> RuntimeConfig:
        return msgspec.structs.replace(config, beam_batching=self.batching)


class Draining(WidthsRing):
    batching = "drain"


class Mixing(WidthsRing):
    batching = "mixed"


def run(kind: type[WidthsRing]) -> tuple[list[list[Found]], set[tuple[int, ...]], WidthsRing]:
    """Return what is found, and which widths ran together in a step."""
    ring = kind(DEMO_MODEL, Setting(beams=4))
    draws = [
        Draw([5 + number, 6, 7], width, 1.0, 0, NUM_TOKENS, (), 2) for number, width in enumerate(WIDTHS)
    ]
    together: set[tuple[int, ...]] = set()
    try:
        handles = [ring.submit(draw.prompt, draw.sampling) for draw in draws]
        for _ in range(4 * NUM_TOKENS):
            running = ring.lifecycle.kv.rows.running_requests()
            together.add(tuple(sorted(req.group.width for req in running if req.group is not None)))
            ring.scheduler.step([])
        generated = ring.run()
    finally:
        ring.close()
    return [found_by(generated, handle, 2) for handle in handles], together, ring


def test_widths_run_by_turns_or_together_with_the_same_results() -> None:
    drained, by_turns, ring = run(Draining)
    assert by_turns <= {(), (2,), (4,), (4, 4)}
    assert {(2,), (4, 4)} <= by_turns
    gate = ring.lifecycle.room.width_gate
    assert gate is not None
    assert gate.num_changes == 2
    assert gate.change_s > 0.0
    mixed, together, ring = run(Mixing)
    assert (2, 4, 4, 4) in together
    assert ring.lifecycle.room.width_gate is None
    assert mixed == drained


@pytest.mark.parametrize("num_requests", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_many_arrivals_of_several_widths_keep_their_order(num_requests: int) -> None:
    """The simulation looks at it in every step, and at its end nobody is left."""
    counts = GroupSimulation(8, num_requests, drains_widths=True).run()
    assert counts["width changes"] > num_requests / 10
    assert counts["searches"] > num_requests / 4
