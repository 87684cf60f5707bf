"""A higher priority takes rows and pages from a lower one, and no output shows it."""

from __future__ import annotations

import pytest

from runtime.base.errors import ConfigError
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running

LOW = [message(i, [i + 1] * 6, max_tokens=20) for i in range(4)]
HIGH = message(9, [9] * 6, max_tokens=4, priority=5)


def undisturbed() -> list[list[int]]:
    with running() as system:
        run_until_idle(system, *LOW, HIGH)
        return [system.detokenizer.tokens[r.handle] for r in (*LOW, HIGH)]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_higher_priority_gets_a_row_of_a_full_batch_at_once(depth: int) -> None:
    with running(policy="priority", depth=depth) as system:
        for item in LOW:
            assert system.inbox.send(item)
        for _ in range(5):
            system.step()
        assert system.inbox.send(HIGH)
        system.step()
        assert 5 in [req.seq for req in system.rows.running_requests()]
        assert [req.seq for req in system.lifecycle.waiting] == [4], "the latest started gives way"
        run_until_idle(system)
        assert system.lifecycle.num_retracted == 1
        assert next(iter(system.detokenizer.closed)) == HIGH.handle
        assert [system.detokenizer.tokens[r.handle] for r in (*LOW, HIGH)] == undisturbed()


def test_it_gets_pages_too_and_from_the_lowest_first() -> None:
    with running(policy="priority", num_pages=14, max_len=56, conservativeness=1.0) as system:
        middle = message(1, [1] * 12, max_tokens=8, priority=1)
        low = message(2, [2] * 12, max_tokens=8)
        for item in (middle, low):
            assert system.inbox.send(item)
        system.step()
        assert system.rows.num_running == 2
        high = message(3, [3] * 30, max_tokens=4, priority=2)
        assert system.inbox.send(high)
        system.step()
        assert [req.seq for req in system.rows.running_requests()] == [1, 3]
        run_until_idle(system)
        assert system.lifecycle.num_retracted == 1


def test_an_equal_priority_takes_nothing() -> None:
    with running(policy="priority", max_rows=1) as system:
        run_until_idle(system, *LOW)
        assert not system.lifecycle.num_retracted


def test_nothing_is_taken_that_would_not_be_enough() -> None:
    with running(policy="priority", num_pages=14, max_len=56) as system:
        old = message(1, [1] * 30, max_tokens=6, priority=5)
        low = message(2, [2] * 4, max_tokens=4)
        for item in (old, low):
            assert system.inbox.send(item)
        system.step()
        assert system.rows.num_running == 2
        assert system.inbox.send(message(3, [3] * 40, max_tokens=4, priority=5))
        system.step()
        assert system.rows.num_running == 2
        run_until_idle(system)
        assert not system.lifecycle.num_retracted


def test_without_the_policy_nobody_is_preempted() -> None:
    with running(policy="fcfs") as system:
        for item in LOW:
            assert system.inbox.send(item)
        system.step()
        run_until_idle(system, HIGH)
        assert not system.lifecycle.num_retracted


@pytest.mark.parametrize("capacity", ["guaranteed_no_evict", "static_batch"])
def test_who_never_takes_a_row_back_cannot_preempt(capacity: str) -> None:
    with pytest.raises(ConfigError, match="preempts"), running(policy="priority", capacity=capacity):
        raise AssertionError("started")
