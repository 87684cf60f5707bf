"""Batching types and capacity policies: what each of them looks like, and that no output shows it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from runtime.wire.format import unpack_ids
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running
from tests.harness.simulation.sim_system import System

CAPACITIES = ["max_utilization", "guaranteed_no_evict", "static_batch"]
BATCHINGS = ["inflight_fused", "inflight", "static"]


def watch(system: System) -> list[tuple[int, int]]:
    """(prompts, decodes) of every step from now on."""
    seen: list[tuple[int, int]] = []
    check = system.executor.watch

    def note(plan: Any) -> None:
        check(plan)
        are_prompts = unpack_ids(plan.starts) < system.rows.num_given[unpack_ids(plan.rows)]
        seen.append((int(are_prompts.sum()), int((~are_prompts).sum())))

    system.executor.watch = note
    return seen


def busy_steps(batching: str, capacity: str) -> list[tuple[int, int]]:
    """Steps of one short and one long prompt that come while a request decodes."""
    with running(batching=batching, capacity=capacity, budget=8) as system:
        assert system.inbox.send(message(1, [1] * 4, max_tokens=12))
        system.step()
        system.step()
        seen = watch(system)
        run_until_idle(system, message(2, [2] * 4, max_tokens=3), message(3, [3] * 20, max_tokens=3))
    return seen


def test_fused_steps_hold_prompts_and_decodes() -> None:
    steps = busy_steps("inflight_fused", "max_utilization")
    assert any(prompts and decodes for prompts, decodes in steps)


def test_unfused_steps_take_turns() -> None:
    steps = busy_steps("inflight", "max_utilization")
    assert not any(prompts and decodes for prompts, decodes in steps)
    kinds = ["p" if prompts else "d" for prompts, _ in steps]
    assert "pd" in "".join(kinds)
    assert "pp" not in "".join(kinds), "a decode never waits for more than one step of prompts"


@pytest.mark.parametrize("batching", BATCHINGS)
def test_a_closed_batch_is_not_joined(batching: str) -> None:
    with running(batching=batching, capacity="static_batch", max_rows=4) as system:
        first = [message(i, [i + 1] * 5, max_tokens=n) for i, n in enumerate((2, 9))]
        for item in first:
            assert system.inbox.send(item)
        system.step()
        late = message(8, [8] * 5, max_tokens=2)
        run_until_idle(system, late)
        closed = list(system.detokenizer.closed)
        assert closed == [first[0].handle, first[1].handle, late.handle], "two rows were free all the time"


def test_in_a_static_batch_decodes_wait_for_all_prompts() -> None:
    with running(batching="static", capacity="static_batch", budget=8) as system:
        seen = watch(system)
        run_until_idle(system, *(message(i, [i + 1] * 20, max_tokens=3) for i in range(3)))
        kinds = "".join("p" if prompts else "d" for prompts, _ in seen)
        assert kinds == "p" * kinds.count("p") + "d" * kinds.count("d")
        assert kinds.count("p") > 3, "more prompts than one step can hold are one batch"


def test_equal_prompts_are_in_one_closed_batch() -> None:
    with running(batching="static", capacity="static_batch") as system:
        for i in range(3):
            assert system.inbox.send(message(i, [7] * 12, max_tokens=2))
        system.step()
        assert system.rows.num_running == 3, "nobody waits for another's page: it would miss the batch"
        run_until_idle(system)


def test_output_and_logprobs_are_the_same_in_every_mode_and_under_pauses() -> None:
    requests = [
        message(i, [i % 3 + 1] * (6 + i), max_tokens=24, sampling={"logprobs": 2} if i % 2 else {})
        for i in range(6)
    ]
    outputs = []
    for batching, capacity in itertools.product(BATCHINGS, CAPACITIES):
        settings = {"num_pages": 18, "conservativeness": 0.01, "max_len": 64, "budget": 16}
        with running(batching=batching, capacity=capacity, **settings) as system:
            run_until_idle(system, *requests)
            assert (system.lifecycle.num_retracted > 0) == (capacity == "max_utilization")
            detokenizer = system.detokenizer
            outputs.append([(detokenizer.tokens[r.handle], detokenizer.logprobs[r.handle]) for r in requests])
    assert all(output == outputs[0] for output in outputs)


def test_in_flight_batching_takes_less_than_half_the_steps_of_static_when_lengths_differ() -> None:
    lens = [60 if i % 4 == 0 else 4 for i in range(32)]
    num_steps = {}
    for batching, capacity in (("inflight_fused", "max_utilization"), ("static", "static_batch")):
        with running(batching=batching, capacity=capacity, num_pages=400) as system:
            run_until_idle(system, *(message(i, [i] * 6, max_tokens=n) for i, n in enumerate(lens)))
            num_steps[batching] = system.scheduler.num_steps
    assert 2 * num_steps["inflight_fused"] <= num_steps["static"], num_steps


# -- limits of a step --------------------------------------------------------------------------------------


def test_with_fewer_requests_a_step_than_run_all_take_turns() -> None:
    with running(max_requests=2, depth=2, feeds_back=False) as system:  # two run, two are in flight
        requests = [message(i, [i + 1] * 4, max_tokens=20) for i in range(4)]
        for item in requests:
            assert system.inbox.send(item)
        for _ in range(12):
            system.step()
        assert system.rows.num_running == 4
        lens = [len(system.detokenizer.tokens[r.handle]) for r in requests]
        assert min(lens) >= 4
        assert max(lens) - min(lens) <= 2, lens
        run_until_idle(system)


def test_the_limit_of_requests_counts_newcomers() -> None:
    with running(max_requests=1) as system:
        seen = watch(system)
        run_until_idle(system, *(message(i, [i + 1] * 6, max_tokens=3) for i in range(3)))
        assert {sum(step) for step in seen} == {1}
