"""A slice of the simulation: `python -m tests.harness.simulation.simulation --runs 1000` runs more of it."""

from __future__ import annotations

import logging
import random
from collections import Counter

import pytest

from scheduler_proc.waiting.waiting_room import Patience
from tests.harness.simulation import simulation
from tests.harness.simulation.sim_system import SHARES, Setting
from tests.harness.simulation.sim_tenants import tenants_with
from tests.harness.simulation.simulation import setting_of

NUM_SLICES = 2
RUNS_PER_SLICE = 10


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """The random policy raises on purpose, and every such step is logged."""
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("number", range(NUM_SLICES))
def test_random_traffic_comes_out_as_the_reference_says(number: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(number * RUNS_PER_SLICE, (number + 1) * RUNS_PER_SLICE):
        counts += simulation.run(seed)
    for what in (
        *("retracted", "resumed", "drafted", "evicted pages", "overloaded"),
        *("abort", "stop", "length", "timeout", "stop_string", "invalid_grammar"),
    ):
        assert counts[what], f"the traffic has no {what}: it tests less than it says"


def test_logits_processors_see_all_tokens_before_the_one_that_is_drawn() -> None:
    counts: Counter[str] = Counter()
    for seed in range(12):
        counts += simulation.run(seed, processed=0.5)
    for what in ("processed", "processors that raised", "retracted", "abort", "stop"):
        assert counts[what], f"the traffic has no {what}: it tests less than it says"


def test_additional_outputs_are_the_rows_of_the_tokens_that_came() -> None:
    counts: Counter[str] = Counter()
    for seed in range(10):
        counts += simulation.run(seed, tapped=0.5)
    for what in ("tapped", "retracted", "drafted", "abort", "stop"):
        assert counts[what], f"the traffic has no {what}: it tests less than it says"


@pytest.mark.parametrize("number", [0, 1, pytest.param(2, marks=pytest.mark.full)])
def test_hostile_tenants_wait_share_and_are_refused_as_their_limits_say(number: int) -> None:
    """Three tenants with limits, shares of the cache and little patience: everything is watched at once."""
    counts: Counter[str] = Counter()
    for seed in range(8 * number, 8 * number + (8 if number < 2 else 120)):
        rng = random.Random(seed)
        setting = setting_of(
            seed,
            num_requests=40,
            turbulence=1.0,
            expiring=0.2,
            cache="radix",
            capacity="max_utilization",
            batching="inflight_fused",
            request_scheduler="",
            policy=rng.choice(["priority", "shortest-first", "lof", "lpm"]),
            max_live=rng.choice([9, 24, 1000]),
            num_tenants=3,
            shares=rng.choice(SHARES[1:]),
            tenants=tenants_with(rng),
            patience=Patience(rng.choice([0.055, 0.155]), rng.choice([0.0, 0.455])),
            guided=0.0,
        )
        counts += simulation.run(seed, setting)
    for what in (
        *("refused for max_waiting", "queue_timeout", "retracted", "resumed", "abort", "timeout"),
        *("steps that somebody starved", "steps that somebody was held back", "evictions by share"),
    ):
        assert counts[what], f"the traffic has no {what}: it tests less than it says"


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("feeds_back", [True, False])
def test_output_is_the_same_at_every_depth(depth: int, feeds_back: bool) -> None:
    setting = Setting(
        page_size=4,
        num_pages=24,
        max_rows=6,
        max_len=96,
        depth=depth,
        feeds_back=feeds_back,
        budget=24,
        policy="fcfs",
        cache="radix",
        conservativeness=0.05,
        num_slots=1,
        refusal=0.0,
        num_requests=12,
        max_output=40,
        turbulence=0.0,
    )
    assert simulation.run(depth, setting)["runs"] == 1
