"""Deadlines and arrival times: what ends when, and what waiting is counted as."""

from __future__ import annotations

import math

import pytest

from runtime.wire.messages import AbortRequest
from scheduler_proc.core.request import Request
from scheduler_proc.loop import RETRY_S, SchedulerLoop
from scheduler_proc.observe.queue_times import BOUNDS_S
from scheduler_proc.waiting.deadlines import SLACK, Deadlines
from tests.harness.scheduler.scheduler_parts import manager, message, request, run_until_idle, running
from tests.harness.simulation.sim_system import STEP_S, System

PROMPT = [1, 2, 3, 4, 6]


def steps(system: System, n: int) -> None:
    for _ in range(n):
        system.step()


# -- deadlines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_a_running_request_ends_at_the_first_turn_after_its_deadline_and_keeps_its_tokens(depth: int) -> None:
    with running(depth=depth) as system:
        expiring = message(1, PROMPT, max_tokens=50, deadline_s=system.now + 5.5 * STEP_S)
        other = message(2, [9] * 5, max_tokens=20)
        whole = message(3, PROMPT, max_tokens=50)
        run_until_idle(system, expiring, other)
        run_until_idle(system, whole)
        closed, tokens = system.detokenizer.closed[expiring.handle], system.detokenizer.tokens
        assert (closed.reason, closed.error) == ("timeout", None)
        assert system.detokenizer.closed_at[expiring.handle] == pytest.approx(1.0 + 6 * STEP_S)
        num_kept = len(tokens[expiring.handle])
        assert num_kept == 6 - depth
        assert tokens[expiring.handle] == tokens[whole.handle][:num_kept]
        assert system.detokenizer.closed[other.handle].reason == "length"
        system.check_empty()


def test_a_waiting_request_ends_at_its_deadline() -> None:
    with running(max_rows=1) as system:
        first = message(1, PROMPT, max_tokens=40)
        waiting = message(2, PROMPT, deadline_s=system.now + 4 * STEP_S)
        run_until_idle(system, first, waiting)
        assert system.detokenizer.closed[waiting.handle].reason == "timeout"
        assert system.detokenizer.tokens[waiting.handle] == []
        assert system.detokenizer.closed[first.handle].reason == "length"


def test_a_retracted_request_keeps_its_deadline() -> None:
    with running(num_pages=14, conservativeness=0.01, max_len=56) as system:
        requests = [
            message(i, [i + 1] * 10, max_tokens=40, deadline_s=system.now + 200 * STEP_S) for i in range(3)
        ]
        for each in requests:
            system.inbox.send(each)
        while not system.lifecycle.num_retracted:
            system.step()
        retracted = next(req for req in system.lifecycle.waiting if req.num_retractions)
        system.now = retracted.deadline_s
        system.step()
        assert {closed.reason for closed in system.detokenizer.closed.values()} == {"timeout"}
        system.step()
        system.check_empty()


@pytest.mark.parametrize("deadline_s", [0.5, -1.0, math.nan, -math.inf])
def test_what_arrives_expired_is_refused_and_computes_nothing(deadline_s: float) -> None:
    with running() as system:
        late = message(1, PROMPT, deadline_s=deadline_s)
        run_until_idle(system, late)
        assert system.detokenizer.closed[late.handle].reason == "timeout"
        assert system.executor.num_computed == 0
        system.check_empty()


def test_no_deadline_is_ever_reached_that_is_infinite_or_none() -> None:
    with running() as system:
        requests = [message(1, PROMPT, deadline_s=math.inf), message(2, PROMPT)]
        run_until_idle(system, *requests)
        assert {closed.reason for closed in system.detokenizer.closed.values()} == {"length"}


def test_a_deadline_passes_while_the_detokenizer_has_no_room() -> None:
    with running() as system:
        expiring = message(1, PROMPT, max_tokens=50, deadline_s=system.now + 4 * STEP_S)
        system.inbox.send(expiring)
        steps(system, 2)
        system.outbox.refuses = lambda: True
        steps(system, 4)
        assert not system.lifecycle.requests
        assert system.rows.num_running == 0
        system.outbox.refuses = lambda: False
        steps(system, 1)
        assert system.detokenizer.closed[expiring.handle].reason == "timeout"


def test_while_anything_lives_the_loop_sleeps_no_longer_than_a_deadline_may_be_late() -> None:
    with running() as system:
        system.outbox.refuses = lambda: True
        system.inbox.send(message(1, PROMPT, deadline_s=system.now + 1.0))
        loop = SchedulerLoop(system.scheduler)
        while (sleep_s := loop.turn()) == 0.0:
            pass
        assert 0.0 < sleep_s <= RETRY_S


def live_requests(num: int) -> dict[bytes, Request]:
    kv = manager()
    requests = [request(kv, number, PROMPT, deadline_s=float(number)) for number in range(1, num + 1)]
    return {req.key: req for req in requests}


def test_deadlines_come_in_their_order_and_once() -> None:
    live = live_requests(5)
    deadlines = Deadlines(live)
    for req in reversed(live.values()):
        deadlines.add(req)
    assert [req.seq for req in deadlines.take_passed(3.0)] == [1, 2, 3]
    assert deadlines.take_passed(3.5) == []
    del live[next(req.key for req in live.values() if req.seq == 4)]
    assert [req.seq for req in deadlines.take_passed(9.0)] == [5], "who has ended is not named"
    assert len(deadlines) == 0


def test_ended_sequences_with_deadlines_far_away_do_not_pile_up() -> None:
    live: dict[bytes, Request] = {}
    deadlines = Deadlines(live)
    kept = live_requests(3)
    live |= kept
    for req in kept.values():
        deadlines.add(req)
    for req in live_requests(50 * SLACK).values():
        if req.key not in kept:
            live[req.key] = req
            deadlines.add(req)
            del live[req.key]
    assert len(deadlines) <= 2 * (len(kept) + 1) + SLACK
    assert [req.seq for req in deadlines.take_passed(1e9)] == [1, 2, 3]


def test_an_ended_request_is_not_kept_for_its_deadline() -> None:
    with running() as system:
        first = message(1, PROMPT, deadline_s=system.now + 1e6)
        run_until_idle(system, first, AbortRequest((first.handle,)))
        assert all(isinstance(handle, bytes) for _, _, handle in system.lifecycle.deadlines._heap)


# -- arrival -----------------------------------------------------------------------------------------------


def waited(arrived_s: float) -> list[float]:
    """Upper bounds of the times that one request is counted to have waited."""
    with running() as system:
        system.now = 100.0
        run_until_idle(system, message(1, PROMPT, arrived_s=arrived_s))
        times = system.lifecycle.queue_times
        assert times.sum_s >= 0.0
        return [bound for bound, n in zip(BOUNDS_S, times.counts, strict=False) for _ in range(n)]


def test_waiting_is_counted_from_when_the_caller_asked() -> None:
    assert waited(0.0) == [BOUNDS_S[0]]
    assert waited(98.5) == [3.0]


@pytest.mark.parametrize("arrived_s", [1e9, math.nan, math.inf, -5.0])
def test_an_arrival_that_cannot_be_counts_as_now(arrived_s: float) -> None:
    assert waited(arrived_s) == [BOUNDS_S[0]]


def test_an_earlier_arrival_by_the_callers_account_does_not_jump_the_queue() -> None:
    with running(max_rows=1) as system:
        system.now = 100.0
        requests = [message(1, [1] * 5), message(2, [2] * 5, arrived_s=1.0)]
        run_until_idle(system, *requests)
        assert list(system.detokenizer.closed) == [each.handle for each in requests]
