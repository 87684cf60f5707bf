"""WaitingRoom: who starves goes first in any policy; who cannot begin is told so; pauses do not count."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.ring.tenants import Tenant, TenantLimits, Tenants
from runtime.wire.messages import ControlRequest, ErrorInfo, TokenizedRequest
from scheduler_proc.waiting.serving_time import ServingTime
from scheduler_proc.waiting.waiting_room import MAX_STARVED_AT_ONCE, Patience
from tests.harness.scheduler.scheduler_parts import message, request, run_until_idle, running
from tests.harness.simulation.sim_system import STEP_S, System

POLICIES = [
    *("fcfs", "priority", "lpm", "dfs-weight", "shortest-first", "lof", "random"),
    "tests.simulation.batching.test_policies:LastFirst",
]
PATIENCE = Patience(30.5 * STEP_S, 0.0)
PROMPT = [1, 2, 3, 4, 6]


def steps(system: System, n: int) -> None:
    for _ in range(n):
        system.step()


def flood(system: System, numbers: range, **fields: Any) -> None:
    """Send as many requests in every step as rows come free in it, each of them for one step."""
    for number in numbers:
        for index in range(4):
            system.inbox.send(message(4 * number + index, [number % 50], max_tokens=1, **fields))
        system.step()


def begins_at(system: System, slow: TokenizedRequest) -> float:
    return system.detokenizer.closed_at.get(slow.handle, 0.0)


# -- who starves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flood_of_any_priority_holds_up_nobody_for_longer_than_may_be(policy: str) -> None:
    with running(policy=policy, patience=PATIENCE, max_len=96, num_pages=256) as system:
        flood(system, range(3), priority=1000)
        # Neither the shortest, nor the longest, nor of a prefix that is known.
        slow = message(5000, [53] * 8, max_tokens=3, priority=-1000)
        system.inbox.send(slow)
        flood(system, range(3, 60), priority=1000)
        assert begins_at(system, slow) == pytest.approx(1.0 + (4 + 31 + 2) * STEP_S)
        run_until_idle(system)


def test_with_0_it_waits_for_as_long_as_there_are_others() -> None:
    with running(policy="priority", patience=Patience(0.0, 0.0), num_pages=256) as system:
        flood(system, range(3), priority=1000)
        slow = message(5000, [53] * 8, max_tokens=3, priority=-1000)
        system.inbox.send(slow)
        flood(system, range(3, 103), priority=1000)
        assert not begins_at(system, slow)
        run_until_idle(system)
        assert begins_at(system, slow)


def test_who_has_starved_keeps_its_row() -> None:
    with running(policy="priority", patience=PATIENCE, max_rows=1) as system:
        system.inbox.send(message(1, [1] * 4, max_tokens=35, priority=5))
        slow = message(2, [2] * 4, max_tokens=60)
        system.inbox.send(slow)
        steps(system, 36)
        assert [req.handle for req in system.rows.running_requests()] == [slow.handle]
        system.inbox.send(message(3, [3] * 4, max_tokens=4, priority=1000))
        run_until_idle(system)
        assert not system.lifecycle.num_retracted
        assert list(system.detokenizer.closed)[1] == slow.handle


def test_who_has_waited_in_pieces_starves_and_is_taken_back_no_more() -> None:
    """A high priority comes every now and then: each time it takes the row, and gives it back."""
    with running(policy="priority", patience=PATIENCE, max_rows=1) as system:
        low = message(1, [1] * 4, max_tokens=60)
        system.inbox.send(low)
        for number in range(2, 30):
            system.step()
            system.inbox.send(message(number, [number], max_tokens=3, priority=5))
            steps(system, 6)
        run_until_idle(system)
        assert 31 / 4 < system.lifecycle.num_retracted <= 31 / 3 + 1
        assert len(system.detokenizer.tokens[low.handle]) == 60


def test_who_starves_takes_no_row_from_its_own_priority() -> None:
    with running(policy="priority", patience=PATIENCE, max_rows=1) as system:
        run_until_idle(
            system,
            message(1, [1] * 4, max_tokens=80),
            message(2, [2] * 4, max_tokens=4),
        )
        assert system.lifecycle.num_retracted == 0


def test_what_starves_has_what_a_higher_priority_takes_and_then_comes_the_higher_one() -> None:
    with running(policy="priority", patience=PATIENCE, max_rows=2) as system:
        system.inbox.send(message(1, [1] * 4, max_tokens=80, priority=1))
        system.inbox.send(message(2, [2] * 4, max_tokens=80, priority=1))
        low = message(3, [3] * 4, max_tokens=30)
        system.inbox.send(low)
        steps(system, 33)
        assert system.lifecycle.waiting[0].is_starved
        high = message(4, [4] * 4, max_tokens=4, priority=5)
        system.inbox.send(high)
        system.step()
        assert {req.handle for req in system.rows.running_requests()} == {low.handle, high.handle}
        run_until_idle(system)


def test_many_that_starve_at_once_are_put_forward_in_their_order_a_part_in_each_step() -> None:
    num = 3 * MAX_STARVED_AT_ONCE
    with running(patience=PATIENCE, max_rows=1, max_live=2 * num) as system:
        system.inbox.send(message(0, [1] * 4, max_tokens=90))
        system.step()
        for number in range(num):
            system.inbox.send(message(1 + number, [2, 3, 4], max_tokens=1, priority=number % 3))
        steps(system, 31)
        assert system.lifecycle.waiting.num_starved == 0
        system.pass_time(STEP_S)
        for turn in range(1, 4):
            system.lifecycle.tick()
            assert system.lifecycle.waiting.num_starved == turn * MAX_STARVED_AT_ONCE
        assert [req.seq for req in system.lifecycle.waiting] == list(range(2, num + 2))
        system.scheduler.fail_all(ErrorInfo("the end"))


def test_a_policy_is_not_shown_who_starves() -> None:
    with running(patience=PATIENCE, max_rows=1, policy=f"{__name__}:Reverse") as system:
        system.inbox.send(message(0, [1] * 4, max_tokens=40))
        system.step()
        for number in range(1, 4):
            system.inbox.send(message(number, [2] * 3, max_tokens=2))
        steps(system, 25)
        for number in range(4, 7):
            system.inbox.send(message(number, [2] * 3, max_tokens=2))
        steps(system, 10)
        Reverse.seen.clear()
        run_until_idle(system)
        assert [handle[8] for handle in system.detokenizer.closed] == [0, 1, 2, 3, 6, 5, 4]
        assert max(map(len, Reverse.seen)) == 3


class Reverse:
    seen: list[list[int]] = []  # noqa: RUF012

    def order(self, waiting: Any) -> list[int]:
        self.seen.append([each.seq for each in waiting[:]])
        assert [each.seq for each in waiting] == self.seen[-1]
        assert not waiting or waiting[-1].seq == self.seen[-1][-1]
        return list(range(len(waiting)))[::-1]


def test_the_cache_goes_by_the_priority_that_was_asked_for() -> None:
    with running() as system:
        req = request(system.kv, 1, PROMPT, priority=-3, is_starved=True)
        assert (req.priority, req.urgency > 1000) == (-3, True)
        assert request(system.kv, 1, PROMPT, priority=-3).urgency == -3


def test_who_is_held_back_in_the_turn_in_which_it_came_has_not_waited_yet() -> None:
    with running(patience=Patience(0.5, 0.0), max_rows=1) as system:
        system.now = 50.0
        system.lifecycle.room.change_tenants(Tenants((Tenant("a", "user", TenantLimits(max_running=1)),)))
        system.inbox.send(message(0, PROMPT, max_tokens=30))
        for number in range(1, 4):
            system.inbox.send(message(number, PROMPT, priority=number - 9, tenant="a"))
        steps(system, 5)
        assert not any(req.is_starved for req in system.lifecycle.requests.values())
        run_until_idle(system)
        assert [handle[8] for handle in system.detokenizer.closed] == [0, 3, 2, 1]


# -- who cannot begin --------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_who_has_not_begun_by_the_queue_timeout_is_told_in_the_first_turn_after_it(depth: int) -> None:
    patience = Patience(0.0, 10.5 * STEP_S)
    with running(max_rows=1, depth=depth, patience=patience) as system:
        first, late = message(1, PROMPT, max_tokens=40), message(2, PROMPT)
        run_until_idle(system, first, late)
        closed = system.detokenizer.closed[late.handle]
        assert closed.error is not None
        assert (closed.error.code, closed.error.status) == ("queue_timeout", 503)
        assert closed.error.retry_after_s > 0.0
        assert "0.105 s" in closed.error.message
        assert system.detokenizer.closed_at[late.handle] == pytest.approx(1.0 + 12 * STEP_S)
        assert system.detokenizer.closed[first.handle].reason == "length"
        system.check_empty()


def test_who_has_begun_is_never_given_up() -> None:
    with running(policy="priority", max_rows=1, patience=Patience(0.0, 5.5 * STEP_S)) as system:
        low = message(1, PROMPT, max_tokens=20)
        system.inbox.send(low)
        steps(system, 2)
        run_until_idle(system, message(2, PROMPT, max_tokens=60, priority=1))
        assert system.lifecycle.num_retracted == 1
        assert system.detokenizer.closed[low.handle].reason == "length"


def test_a_sequence_that_is_made_again_waits_anew() -> None:
    with running(max_rows=1, patience=Patience(0.0, 10.5 * STEP_S)) as system:
        system.inbox.send(message(1, PROMPT, max_tokens=60))
        system.inbox.send(message(2, PROMPT))
        steps(system, 8)
        again = message(2, PROMPT, attempt=1, is_again=True)
        run_until_idle(system, again)
        assert system.detokenizer.closed_at[again.handle] == pytest.approx(1.0 + (8 + 1 + 11) * STEP_S)


def test_what_has_ended_is_not_kept_for_its_timeout() -> None:
    with running(patience=Patience(1e6, 1e6)) as system:
        for number in range(1000):
            system.inbox.send(message(number, PROMPT, max_tokens=1))
        run_until_idle(system, max_steps=2000)
        room = system.lifecycle.room
        assert len(room._starving) == len(room._not_begun) == 0


# -- pauses ------------------------------------------------------------------------------------------------


def test_pauses_are_left_out_of_both() -> None:
    with running(max_rows=1, patience=Patience(5.5 * STEP_S, 10.5 * STEP_S), policy="lof") as system:
        run_until_idle(system, message(0, PROMPT, max_tokens=1))
        began_at = system.now + STEP_S
        first, late = message(1, PROMPT, max_tokens=60), message(2, PROMPT)
        system.inbox.send(first)
        system.inbox.send(late)
        steps(system, 3)
        for op in ("pause_generation", "continue_generation"):
            system.inbox.send(ControlRequest(7, 1, op))
            steps(system, 50)
            waiting = list(system.lifecycle.waiting)
            assert [req.is_starved for req in waiting] == ([False] if op == "pause_generation" else [])
        assert system.detokenizer.closed_at[late.handle] == pytest.approx(began_at + (11 + 50) * STEP_S)
        run_until_idle(system)


def test_serving_time_stands_still_while_paused() -> None:
    clock = [5.0]
    serving = ServingTime(lambda: clock[0])
    start = serving.now()
    for paused_s in (2.0, 30.0):
        clock[0] += 1.0
        serving.pause()
        clock[0] += paused_s
        assert serving.is_paused
        serving.pause()
        clock[0] += paused_s
        before = serving.now()
        serving.resume()
        serving.resume()
        assert serving.now() == pytest.approx(before)
        assert not serving.is_paused
    assert serving.now() - start == pytest.approx(2.0)


def test_an_engine_that_starts_in_a_pause_waits_for_its_end() -> None:
    with running(patience=Patience(1.0, 10.5 * STEP_S)) as system:
        system.lifecycle.serving.pause()
        system.inbox.send(message(1, PROMPT))
        steps(system, 100)
        assert system.scheduler.controls.is_paused
        run_until_idle(system, ControlRequest(7, 1, "continue_generation"))
        assert [closed.reason for closed in system.detokenizer.closed.values()] == ["length"]
