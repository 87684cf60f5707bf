"""Sequences under which the engine died before: how long they keep others out, what clears them, and whose
requests are not served.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from runtime.ring.suspects.roster import ALWAYS_ALONE, Suspects, suspect_of, tenant_mark
from runtime.wire.handle import NO_HANDLE, sequence_key
from runtime.wire.messages import AbortRequest, TokenizedRequest
from scheduler_proc.core.solitary import MAX_HOLD_S, RETURN_S
from tests.harness.scheduler.scheduler_parts import SETTING, message, run_until_idle, running
from tests.harness.scheduler.tenant_parts import a, b, error_of, limited, send
from tests.harness.simulation.sim_system import STEP_S, System

LONG = 60
REACHED = 12
"""Number of tokens that each suspect had: a prompt of 3, and some output."""


def suspect(system: System, requests: list[TokenizedRequest], until: int = REACHED) -> None:
    keys = dict.fromkeys([suspect_of(each.handle) for each in requests], until)
    system.scheduler.intake.suspects = Suspects(alone=keys, watched=dict.fromkeys(keys, REACHED))


def texts(system: System, requests: list[TokenizedRequest]) -> list[list[int]]:
    return [system.detokenizer.tokens[each.handle] for each in requests]


@pytest.mark.parametrize("changes", [{}, {"cache": "none"}, {"capacity": "guaranteed_no_evict"}])
def test_suspects_keep_others_out_only_until_they_are_past_the_death(changes: dict[str, Any]) -> None:
    """Eight of them, each of which goes on for 60 tokens."""
    requests = [message(number, [1, 2, number], max_tokens=LONG) for number in range(8)]
    other = message(9, [3, 4], max_tokens=4)
    with running(**changes, num_pages=256, max_len=96, max_rows=8) as undisturbed:
        run_until_idle(undisturbed, *requests)
        expected = texts(undisturbed, requests)
    with running(**changes, num_pages=256, max_len=96, max_rows=8) as system:
        suspect(system, requests)
        send(system, *requests, other)
        most_beside = 0
        while system.lifecycle.solitary:
            system.step()
            if system.lifecycle.solitary.shown != NO_HANDLE:
                most_beside = max(most_beside, system.rows.num_running)
        assert most_beside == 1
        run_until_idle(system)
        assert texts(system, requests) == expected
        waited_s = system.detokenizer.closed_at[other.handle] - 1.0
        assert waited_s < 8 * (REACHED + 6) * STEP_S
        assert system.lifecycle.roster.read().past == {suspect_of(each.handle) for each in requests}
        system.check_empty()


def test_the_next_one_starts_when_no_step_of_the_one_before_is_in_flight() -> None:
    """Otherwise it would be to blame for what the one before does in its last step."""
    requests = [message(number, [1, 2, number], max_tokens=LONG) for number in range(4)]
    with running(depth=4, feeds_back=True, num_pages=256, max_len=96) as system:
        suspect(system, requests)
        send(system, *requests)
        shown = system.lifecycle.solitary.shown
        while system.lifecycle.solitary:
            system.step()
            newest = system.lifecycle.solitary.shown
            if newest not in (shown, NO_HANDLE):
                assert not system.scheduler.in_flight
            shown = newest
        run_until_idle(system)


def test_one_that_is_to_stay_alone_does_until_its_end() -> None:
    requests = [message(number, [1, 2, number], max_tokens=LONG) for number in range(2)]
    with running(num_pages=256, max_len=96) as system:
        suspect(system, requests, ALWAYS_ALONE)
        run_until_idle(system, *requests)
        ends = [system.detokenizer.closed_at[each.handle] for each in requests]
        assert abs(ends[1] - ends[0]) > LONG * STEP_S
        assert not system.lifecycle.num_retracted


def test_who_comes_to_its_end_is_past_the_death_and_who_is_aborted_is_not() -> None:
    short, left = message(1, [1, 2, 3], max_tokens=2), message(2, [1, 2, 4], max_tokens=LONG)
    with running() as system:
        keys = {suspect_of(each.handle): 50 for each in (short, left)}
        system.scheduler.intake.suspects = Suspects(watched=keys)
        send(system, short, left)
        for _ in range(3):
            system.step()
        run_until_idle(system, AbortRequest((left.handle,)))
        assert system.lifecycle.roster.read().past == {suspect_of(short.handle)}
        assert not system.lifecycle.suspicions


def test_who_comes_to_its_end_under_the_name_of_a_suspect_with_something_else_clears_nobody() -> None:
    """A caller over TCP names its requests itself, and could so make all deaths look like the machine's."""
    harmless = message(1, [1, 2, 3], max_tokens=2)
    poison = suspect_of(harmless.handle, b"poison!!")
    with running() as system:
        lifecycle = system.lifecycle
        system.scheduler.intake.suspects = Suspects(
            alone={poison: 50}, watched={poison: 50}, guilty=frozenset([poison])
        )
        send(system, harmless)
        assert lifecycle.roster.suspects() == {suspect_of(harmless.handle)}
        assert not lifecycle.suspicions
        assert not lifecycle.solitary
        run_until_idle(system)
        assert system.detokenizer.closed[harmless.handle].error is None
        assert not lifecycle.roster.read().past


def test_the_roster_shows_who_has_a_row_and_how_far_it_is() -> None:
    with running(max_rows=2, num_pages=256) as system:
        requests = [message(number, [1, 2, number], max_tokens=20) for number in range(4)]
        send(system, *requests)
        for _ in range(8):
            system.step()
        seen = system.lifecycle.roster.read()
        keys = [suspect_of(each.handle) for each in requests]
        assert seen.present.keys() == set(keys)
        assert seen.running.keys() == set(keys[:2]), "those that wait cannot have done it"
        for key in keys[:2]:
            num_tokens = system.lifecycle.requests[sequence_key(key)].num_tokens
            assert num_tokens <= seen.running[key] + 1 <= num_tokens + system.setting.depth
        run_until_idle(system)


def test_who_was_there_goes_first_in_a_new_engine() -> None:
    """A newcomer that ends it each time would otherwise hide behind those who never come past the death."""
    requests = [message(number, [1, 2, number], max_tokens=LONG) for number in range(2)]
    new = message(9, [3, 4], max_tokens=4)
    with running(num_pages=256) as system:
        keys = {suspect_of(each.handle): REACHED for each in requests}
        system.scheduler.intake.suspects = Suspects(watched=keys)
        system.lifecycle.suspicions.expect(keys)
        send(system, new)
        system.step()
        assert not system.rows.num_running, "it waits for the others"
        send(system, *requests)
        while system.lifecycle.suspicions:
            assert new.handle not in [req.handle for req in system.rows.running_requests()]
            system.step()
        run_until_idle(system)
        ends = system.detokenizer.closed_at
        assert ends[new.handle] < min(ends[each.handle] for each in requests)


def test_suspects_give_way_to_no_higher_priority_before_they_are_past() -> None:
    """It could not start, so their rows would be taken back in each step."""
    requests = [message(number, [1, 2, number], max_tokens=LONG) for number in range(4)]
    with running(policy="priority", num_pages=256, max_len=96) as system:
        system.scheduler.intake.suspects = Suspects(
            watched={suspect_of(each.handle): REACHED for each in requests}
        )
        send(system, *requests)
        send(system, message(9, [3, 4], max_tokens=4, priority=5))
        while system.lifecycle.suspicions:
            assert not system.lifecycle.num_retracted
            system.step()
        run_until_idle(system)
        assert system.lifecycle.num_retracted == 1


def test_nobody_is_waited_for_for_long() -> None:
    gone, slow, new = (message(number, [1, 2, number], max_tokens=80) for number in range(3))
    with running(num_pages=256, max_len=96) as system:
        suspicions = system.lifecycle.suspicions
        suspicions.expect([suspect_of(gone.handle)])
        send(system, new)
        began = system.now
        while not system.rows.num_running:
            system.step()
        assert system.now - began == pytest.approx(RETURN_S, abs=3 * STEP_S)
        run_until_idle(system)
    with running(num_pages=256, max_len=96) as system:
        system.scheduler.intake.suspects = Suspects(watched={suspect_of(slow.handle): 1000})
        send(system, slow, new)
        began = system.now
        system.now += MAX_HOLD_S
        for _ in range(3):
            system.step()
        assert system.rows.num_running == 2
        run_until_idle(system)


def test_those_of_a_death_long_ago_are_not_waited_for() -> None:
    """The file of suspects stays as it is when an engine is ended from outside."""
    old, there = (suspect_of(message(number, [1]).handle) for number in range(2))
    suspects = Suspects(watched={old: REACHED, there: REACHED})
    system = System(SETTING, random.Random(1), suspects=suspects, interrupted=[there])
    try:
        assert system.lifecycle.suspicions._missing == {there}
    finally:
        system.executor.close()


# -- tenants -----------------------------------------------------------------------------------------------


def test_nothing_is_served_of_a_tenant_that_is_suspended_until_its_time_is_over() -> None:
    with limited() as system:
        system.scheduler.intake.suspects = Suspects(suspended={tenant_mark("a"): system.now + 1.0})
        mine, others, owners = a(1), b(2), message(3, [1, 2, 3], max_tokens=2)
        run_until_idle(system, mine, others, owners)
        error = error_of(system, mine)
        assert error is not None
        assert (error.code, error.status) == ("key_suspended", 429)
        assert 0 < (error.retry_after_s or 0) <= 1.0
        assert error_of(system, others) is error_of(system, owners) is None
        system.now += 1.0
        later = a(4)
        run_until_idle(system, later)
        assert error_of(system, later) is None


def test_the_only_tenant_is_not_suspended() -> None:
    with running() as system:
        system.scheduler.intake.suspects = Suspects(suspended={tenant_mark(""): 1e9})
        request = message(1, [1, 2, 3], max_tokens=2)
        run_until_idle(system, request)
        assert system.detokenizer.closed[request.handle].error is None


def test_an_abort_during_a_step_leaves_the_sequence_in_the_roster_until_its_end() -> None:
    requests = [message(number, [1, 2, number], max_tokens=LONG) for number in range(3)]
    with running(depth=4, feeds_back=True, num_pages=256, max_len=96) as system:
        send(system, *requests)
        for _ in range(8):
            system.step()
        assert system.scheduler.in_flight
        roster, key = system.lifecycle.roster, suspect_of(requests[0].handle)
        system.lifecycle.finish(system.lifecycle.requests[sequence_key(key)], "abort")
        seen = roster.read()
        assert seen.left.keys() == {key}
        assert key not in seen.present
        run_until_idle(system)
        assert roster.read().left == {}
        system.check_empty()
