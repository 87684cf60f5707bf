"""Limits of a tenant, what it is told beyond them, and that no other tenant feels it."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from runtime.ring.suspects.roster import ALWAYS_ALONE, Suspects, suspect_of
from runtime.ring.tenants import OWNER, Tenant, TenantLimits, Tenants
from runtime.wire.handle import sequence_key, sibling
from runtime.wire.messages import AbortRequest, ControlRequest, TokenizedRequest
from scheduler_proc.intake.intake import MAX_MADE_AGAIN
from scheduler_proc.intake.limits import QueueShare
from scheduler_proc.intake.tenant_limits import SIBLING_S
from scheduler_proc.waiting.account import MINUTE_S, TokenBucket
from tests.harness.scheduler.scheduler_parts import message, run_until_idle
from tests.harness.scheduler.tenant_parts import PROMPT, a, b, error_of, limited, of, refused, send
from tests.harness.simulation.sim_system import STEP_S
from tests.harness.simulation.sim_traffic import stream_open

# -- who may wait ------------------------------------------------------------------------------------------


def test_one_more_that_waits_than_may_is_refused_with_the_name_of_the_limit() -> None:
    with limited(max_waiting=2) as system:
        send(system, *[b(number, max_tokens=20) for number in range(4)])
        requests = [a(number) for number in range(10, 13)]
        send(system, *requests)
        assert refused(system, *requests) == [False, False, True]
        error = error_of(system, requests[2])
        assert error is not None
        assert "max_waiting" in error.message
        assert "2 sequences of this key wait" in error.message
        run_until_idle(system)
        later = [a(number) for number in range(20, 24)]
        run_until_idle(system, *later)
        assert not any(refused(system, *later)), "on an idle server they do not wait"
        system.check_empty()


def test_who_finds_a_free_row_does_not_wait() -> None:
    with limited(max_waiting=1) as system:
        first, second = ([a(10 * time + number, max_tokens=9) for number in range(6)] for time in (1, 2))
        send(system, *first)
        assert refused(system, *first) == [False] * 5 + [True], "4 rows, and one waits"
        send(system, *second)
        assert all(refused(system, *second))
        run_until_idle(system)


def test_rows_that_are_free_for_want_of_pages_let_nobody_wait() -> None:
    with limited(max_waiting=1, changes={"num_pages": 24, "max_len": 96}) as system:
        send(system, b(1, [1] * 60, max_tokens=30))
        assert system.rows.num_free == 3
        requests = [a(number, [2] * 60, max_tokens=9) for number in range(10, 16)]
        send(system, *requests[:3])
        num_waiting = system.lifecycle.accounts.of("a").num_waiting
        assert num_waiting <= 3, "there were rows for them"
        send(system, *requests[3:])
        assert refused(system, *requests[3:]) == [True] * 3
        run_until_idle(system)


def test_a_tenant_leaves_room_for_others_that_come_by_the_same_client() -> None:
    share = QueueShare(76, 100, 100)
    with limited(share=share, changes={"max_live": 100}) as system:
        intake = system.scheduler.intake
        # The client's share would be used up by the first tenant.
        intake.maker.limits = dataclasses.replace(intake.maker.limits, client_share=share)
        flood = [b(number, max_tokens=1) for number in range(90)]
        for each in flood:
            intake.receive(each)
        system.step()
        assert sum(refused(system, *flood)) == 14
        other = a(100)
        owners = [a(200 + number, tenant=OWNER) for number in range(2)]
        for each in (other, *owners):
            intake.receive(each)
        assert system.lifecycle.accounts.of("a").num_live == 1
        assert system.lifecycle.accounts.of(OWNER).num_live == 2
        system.lifecycle.check()
        run_until_idle(system)
        assert not refused(system, other)[0]


def test_a_share_of_clients_that_the_operator_has_set_holds_for_each_tenant_of_a_client() -> None:
    with limited(changes={"max_live": 100}) as system:
        intake = system.scheduler.intake
        share = QueueShare(10, 100, 10, is_set=True)
        intake.maker.limits = dataclasses.replace(intake.maker.limits, client_share=share)
        for request in (a, b):
            for number in range(20):
                intake.receive(request(number + 50 * (request is b), max_tokens=1))
        counts = [system.lifecycle.accounts.of(name).num_live for name in "ab"]
        assert counts == [10, 9], "the first one's lower what is free"
        run_until_idle(system)


def test_alone_a_tenant_may_have_everything_and_the_owner_always() -> None:
    lifted = QueueShare(76, 100, 100, is_lifted=lambda: True)
    with limited(share=lifted, changes={"max_live": 100}) as system:
        for number in range(100):
            system.scheduler.intake.receive(b(number, max_tokens=1))
        assert system.lifecycle.accounts.of("b").num_live == 100
        run_until_idle(system)
    with limited(share=QueueShare(76, 100, 100), changes={"max_live": 100}) as system:
        for number in range(100):
            system.scheduler.intake.receive(b(number, max_tokens=1, tenant=OWNER))
        assert system.lifecycle.accounts.of(OWNER).num_live == 100
        run_until_idle(system)


def test_no_more_is_made_again_than_a_tenant_can_have_had() -> None:
    share = QueueShare(76, 100, 100)
    with limited(share=share, max_running=3, max_waiting=5, changes={"max_live": 100}) as system:
        again = [a(number, max_tokens=1, is_again=True) for number in range(20)]
        again += [b(number + 50, max_tokens=1, is_again=True) for number in range(120)]
        system.scheduler.intake.interrupted.update(sequence_key(each.handle) for each in again)
        for each in again:
            system.scheduler.intake.receive(each)
        counts = [system.lifecycle.accounts.of(name).num_live for name in "ab"]
        assert counts == [3 + 5, 100]
        system.setting = dataclasses.replace(system.setting, max_live=200)
        run_until_idle(system)
        assert sum(refused(system, *again)) == 12 + 20


# -- who may run -------------------------------------------------------------------------------------------


def test_what_is_beyond_max_running_is_in_nobodys_way_and_costs_a_step_nothing() -> None:
    num = 4096
    with limited(max_running=2, changes={"max_live": 2 * num, "num_pages": 256}) as system:
        for number in range(num):
            system.scheduler.intake.receive(a(number, [5, 6, 7], max_tokens=20))
        looked_at: list[int] = []
        admission = system.scheduler.builder.admission
        may_start = admission.prefix_if_it_may_start

        def noted(req: Any) -> Any:
            looked_at.append(req.seq)
            return may_start(req)

        admission.prefix_if_it_may_start = noted  # type: ignore[method-assign]
        system.scheduler.step([])
        room = system.lifecycle.room
        assert (system.rows.num_running, len(room.queue), room.num_held, len(room)) == (
            2,
            0,
            num - 2,
            num - 2,
        )
        system.scheduler.step([b(num, max_tokens=20)])
        assert system.rows.num_running == 3
        for _ in range(10):
            system.scheduler.step([])
        assert len(looked_at) == 3
        assert system.lifecycle.room.num_tokens() == 3 * (num - 2)
        system.scheduler.step([ControlRequest(7, 1, "pause_generation", mode="abort")])
        assert len(room) == room.num_held == 0
        system.lifecycle.check()


def test_it_goes_on_in_order_as_others_of_the_tenant_end() -> None:
    with limited(max_running=1) as system:
        requests = [a(number, max_tokens=3, priority=-(number % 2)) for number in range(5)]
        run_until_idle(system, *requests)
        assert [handle[8] for handle in system.detokenizer.closed] == [0, 2, 4, 1, 3]


def test_a_tenants_own_later_one_of_a_higher_priority_goes_first() -> None:
    """Also where none of the tenant's has got a row yet."""
    with limited(max_running=2) as system:
        send(system, *[b(number, max_tokens=10) for number in range(4)])
        send(system, *[a(number, max_tokens=2, priority=-5) for number in range(10, 14)])
        urgent = a(20, max_tokens=2)
        send(system, urgent)
        assert [req.handle[8] for req in system.lifecycle.waiting] == [20, 10]
        run_until_idle(system)
        ended = [handle[8] for handle in system.detokenizer.closed if handle[8] >= 10]
        assert ended == [20, 10, 11, 12, 13]


def test_a_retracted_one_may_be_overtaken_by_its_tenants_higher_priority() -> None:
    with limited(max_running=1, max_priority=9, changes={"policy": "priority", "max_rows": 1}) as system:
        low, high = a(1, max_tokens=20), a(2, max_tokens=2, priority=5)
        send(system, low)
        send(system, high)
        assert system.lifecycle.room.num_held == 1
        send(system, b(3, max_tokens=2, priority=0))
        system.inbox.send(message(4, PROMPT, max_tokens=2, priority=3))
        run_until_idle(system)
        assert [handle[8] for handle in system.detokenizer.closed] == [2, 4, 1, 3]


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
def test_pauses_deadlines_and_aborts_reach_who_is_held_back(mode: str) -> None:
    with limited(max_running=1) as system:
        requests = [a(number, max_tokens=8) for number in range(4)]
        requests.append(a(4, deadline_s=system.now + 5 * STEP_S))
        send(system, *requests)
        send(system, ControlRequest(7, 1, "pause_generation", mode=mode))  # type: ignore[arg-type]
        system.lifecycle.check()
        send(system, AbortRequest((requests[2].handle,)))
        for _ in range(5):
            system.step()
        run_until_idle(system, ControlRequest(7, 1, "continue_generation"))
        reasons = [system.detokenizer.closed[each.handle].reason for each in requests]
        gone = "abort" if mode == "abort" else "length"
        assert reasons == [gone, gone, "abort", gone, "abort" if mode == "abort" else "timeout"]
        system.check_empty()


def test_who_has_to_run_alone_does_though_its_tenant_has_others_in_the_queue() -> None:
    with limited(max_running=1) as system:
        requests = [a(number, max_tokens=4) for number in range(4)]
        alone = suspect_of(requests[3].handle)
        system.scheduler.intake.suspects = Suspects({alone: ALWAYS_ALONE})
        run_until_idle(system, *requests)
        assert [handle[8] for handle in system.detokenizer.closed] == [3, 0, 1, 2]
        system.check_empty()


def test_limits_change_without_a_restart() -> None:
    with limited(max_running=1, changes={"max_rows": 6}) as system:
        send(system, *[a(number, max_tokens=20) for number in range(6)])
        room, rows = system.lifecycle.room, system.rows
        for limits, num_running in (
            ({"max_running": 3}, 3),
            ({"max_running": 1}, 3),  # who runs goes on
            ({}, 6),
        ):
            room.change_tenants(Tenants((of("a", **limits), of("b"))))
            system.step()
            assert rows.num_running == num_running
        room.change_tenants(Tenants((of("a", max_running=2), of("b"))))
        system.lifecycle.check()
        send(system, a(7), a(8))
        assert room.num_held == 2
        run_until_idle(system)


def test_a_key_that_is_taken_away_keeps_its_limits_for_what_it_has_here() -> None:
    with limited(max_running=1, max_waiting=8, tokens_per_minute=1000, changes={"max_rows": 6}) as system:
        send(system, *[a(number, max_tokens=20) for number in range(9)])
        room, rows = system.lifecycle.room, system.rows
        for _ in range(2):
            room.change_tenants(Tenants((of("b"),)))
            system.step()
            assert (rows.num_running, room.num_held) == (1, 8), "its flood runs all at once"
        account = system.lifecycle.accounts.of("a")
        assert account.bucket is not None
        run_until_idle(system)
        system.lifecycle.accounts.settle()
        system.pass_time(2 * MINUTE_S)
        system.lifecycle.accounts.settle()
        assert system.lifecycle.accounts.of("a").limits == TenantLimits(), "it is known no longer"


# -- tokens ------------------------------------------------------------------------------------------------


def test_a_bucket_holds_a_minutes_worth_and_fills_in_a_minute() -> None:
    bucket = TokenBucket(60, 100.0)
    assert not bucket.seconds_until_one()
    bucket.take(59, 200.0)
    assert bucket.level == pytest.approx(1.0)
    assert not bucket.seconds_until_one()
    bucket.take(31, 200.0)
    assert bucket.seconds_until_one() == pytest.approx(31.0)
    bucket.take(0, 230.5)
    assert bucket.seconds_until_one() == pytest.approx(0.5)
    bucket.take(0, 1000.0)
    assert bucket.level == 60.0


def test_who_has_used_his_tokens_is_told_when_there_are_some_again() -> None:
    with limited(tokens_per_minute=12) as system:
        first = a(1, [1] * 9, max_tokens=10)
        run_until_idle(system, first)
        assert not refused(system, first)[0], "it may go into debt by what runs"
        second = a(2)
        send(system, second)
        error = error_of(system, second)
        assert error is not None
        assert (error.status, error.code) == (429, "rate_limit_exceeded")
        assert "12 tokens a minute (tokens_per_minute)" in error.message
        # 19 were used of 12, and there has to be one.
        assert error.retry_after_s == pytest.approx(8 * MINUTE_S / 12, abs=1.0)
        system.now += error.retry_after_s - 2 * STEP_S
        again = a(3)
        send(system, again)
        assert refused(system, again)[0]
        system.now += 2 * STEP_S
        run_until_idle(system, third := a(4))
        assert not refused(system, third)[0]
        run_until_idle(system, *[b(number + 50, [1] * 9) for number in range(9)])


def test_what_runs_is_counted_before_it_ends() -> None:
    with limited(tokens_per_minute=30) as system:
        long = a(1, [1] * 9, max_tokens=60)
        send(system, long)
        for _ in range(10):
            system.step()
        send(system, early := a(2, [2]))
        for _ in range(20):
            system.step()
        send(system, late := a(3, [3]))
        assert refused(system, early, late) == [False, True]
        run_until_idle(system)
        assert system.lifecycle.accounts.of("a").num_used == 9 + 60 + 1 + 4


def test_what_is_cached_is_charged_and_what_is_made_again_is_not() -> None:
    with limited(tokens_per_minute=1000) as system:
        account = system.lifecycle.accounts.of("a")
        run_until_idle(system, a(1, [1] * 9))
        run_until_idle(system, a(2, [1] * 9))
        assert account.num_used == 2 * (9 + 4)
        account.bucket = TokenBucket(1, 0.0)
        account.bucket.take(10**6, 0.0)
        again = a(3, [1] * 9, attempt=1, is_again=True)
        system.scheduler.intake.interrupted.add(sequence_key(again.handle))
        run_until_idle(system, again)
        assert not refused(system, again)[0]
        assert account.num_used == 2 * (9 + 4) + 4
        # An engine had each of them once.
        run_until_idle(system, more := a(3, [1] * 9, attempt=2, is_again=True))
        assert refused(system, more)[0]


def test_who_says_that_requests_are_made_again_pays_for_them() -> None:
    """A client can come back at any time, and claim that of requests that nobody has seen. What a tokenizer
    has lost is not known here either, so a minute's tokens are given in advance.
    """
    with limited(tokens_per_minute=130) as system:
        claimed = [a(number, [1] * 9, attempt=1, is_again=True) for number in range(60)]
        for each in claimed:
            run_until_idle(system, each)
        taken = refused(system, *claimed).count(False)
        assert 2 * 130 // (9 + 4) <= taken <= 2 * 130 // (9 + 4) + 2
        account = system.lifecycle.accounts.of("a")
        assert account.num_used == taken * (9 + 4)
        error = error_of(system, claimed[-1])
        assert error is not None
        assert "tokens_per_minute" in error.message


def test_who_says_that_requests_are_made_again_leaves_room_for_others() -> None:
    """A client can come back at any time. With 108 such claims one key had every place of 108."""
    with limited(share=QueueShare(76, 100, 100), changes={"max_live": 100}) as system:
        intake = system.scheduler.intake
        claimed = [b(number, max_tokens=1, attempt=1, is_again=True) for number in range(100)]
        were_here = claimed[90:]
        intake.interrupted.update(sequence_key(each.handle) for each in were_here)
        others = [a(200 + number, max_tokens=1) for number in range(4)]
        for each in (*claimed, *others):
            intake.receive(each)
        assert system.lifecycle.accounts.of("b").num_live == 76 + len(were_here)
        assert system.lifecycle.accounts.of("a").num_live == len(others)
        run_until_idle(system)
        assert not any(refused(system, *were_here, *others))
        error = error_of(system, claimed[80])
        assert error is not None
        assert error.status == 429
    lifted = QueueShare(76, 100, 100, is_lifted=lambda: True)
    with limited(share=lifted, changes={"max_live": 100}) as system:
        for each in claimed:
            system.scheduler.intake.receive(each)
        assert system.lifecycle.accounts.of("b").num_live == 100
        run_until_idle(system)


def test_another_prompt_under_the_name_of_one_that_runs_is_paid_for() -> None:
    with limited(tokens_per_minute=1000) as system:
        send(system, a(1, [1] * 9, max_tokens=20))
        for attempt in range(1, 5):
            send(system, a(1, [attempt + 1] * 9, max_tokens=20, attempt=attempt, is_again=True))
        run_until_idle(system)
        assert system.lifecycle.accounts.of("a").num_used >= 5 * 9 + 20


def test_who_says_that_requests_are_made_again_does_not_come_before_others() -> None:
    """Neither with such that nobody has seen, nor with such as wait here already."""
    with limited(changes={"max_rows": 1}) as system:
        send(system, b(1, max_tokens=5))
        waiting = [a(number) for number in range(10, 13)]
        send(system, *waiting, other := b(2))
        claimed = [a(number, attempt=1, is_again=True) for number in range(20, 23)]
        again = [a(number, attempt=1, is_again=True) for number in range(10, 13)]
        send(system, *claimed, *again)
        run_until_idle(system)
        ends = list(system.detokenizer.closed)
        assert ends.index(other.handle) <= 2, "behind one of each tenant at most"
    with limited(changes={"max_rows": 1}) as system:
        send(system, b(1, max_tokens=5), b(2))
        was_there = a(20, attempt=1, is_again=True)
        system.scheduler.intake.interrupted.add(sequence_key(was_there.handle))
        send(system, was_there)
        run_until_idle(system)
        assert list(system.detokenizer.closed)[1] == was_there.handle


def test_what_is_here_is_made_again_for_nothing() -> None:
    """Its client has lost sight of it, since a detokenizer was replaced."""
    with limited(tokens_per_minute=1000) as system:
        send(system, a(1, [1] * 9, max_tokens=20))
        for _ in range(3):
            system.step()
        run_until_idle(system, a(1, [1] * 9, max_tokens=20, attempt=1, is_again=True))
        used = system.lifecycle.accounts.of("a").num_used
        assert 9 + 20 <= used <= 9 + 20 + 5, "its prompt once, and the output that is made twice"


def test_what_runs_keeps_others_out_only_so_often_by_being_made_again() -> None:
    """A client may come back at any time, and make again what it has running just before that ends."""
    with limited(tokens_per_minute=1000, changes={"max_rows": 2}) as system:
        send(system, *(a(number, [number] * 40, max_tokens=20) for number in (1, 2)), waiting := b(3))
        for attempt in range(1, 9):
            for _ in range(15):
                system.step()
            send(system, *(a(n, [n] * 40, max_tokens=20, attempt=attempt, is_again=True) for n in (1, 2)))
        assert waiting.handle in system.detokenizer.closed
        run_until_idle(system)
        used = system.lifecycle.accounts.of("a").num_used
        assert used >= 2 * (9 - MAX_MADE_AGAIN) * 40, "the prompts of most attempts"


def test_what_is_made_again_with_another_salt_is_paid_for() -> None:
    """It is computed from the beginning."""
    with limited(tokens_per_minute=1000) as system:
        send(system, a(1, [1] * 40, max_tokens=20, namespace=b"a-one"))
        system.step()
        run_until_idle(system, a(1, [1] * 40, max_tokens=20, namespace=b"a-two", attempt=1, is_again=True))
        assert system.lifecycle.accounts.of("a").num_used >= 2 * 40 + 20


def test_the_sequences_of_a_request_are_let_in_together_for_a_moment() -> None:
    with limited(tokens_per_minute=3) as system:
        first = a(1)
        parts = [first, *(msgspec.structs.replace(first, handle=sibling(first.handle, i)) for i in (1, 2, 3))]
        parts = [
            msgspec.structs.replace(each, stream_open=stream_open(each.handle, len(PROMPT))) for each in parts
        ]
        send(system, *parts[:3], other := a(2))
        assert refused(system, *parts[:3], other) == [False, False, False, True]
        system.now += SIBLING_S
        send(system, parts[3])
        assert refused(system, parts[3]) == [True]
        run_until_idle(system)


def test_a_higher_priority_than_a_tenant_may_ask_for_is_wrong() -> None:
    with limited(max_priority=3) as system:
        requests = [a(1, priority=4), b(2, priority=1), a(3, priority=3), a(4, priority=-1000)]
        requests += [a(5, priority=1000, tenant=OWNER), a(6, priority=1000, tenant="key:1")]
        key = Tenant("key:1", "admin", None)
        system.lifecycle.room.change_tenants(Tenants((of("a", max_priority=3), of("b"), key)))
        run_until_idle(system, *requests)
        errors = [error_of(system, each) for each in requests]
        assert [error is None for error in errors] == [False, False, True, True, True, True]
        assert errors[0] is not None
        assert (errors[0].status, errors[0].param, errors[0].code) == (400, "priority", "invalid_value")
        assert "4 is above 3, the highest that this key may ask for (max_priority)" in errors[0].message


def test_what_is_made_again_has_the_highest_priority_that_is_left() -> None:
    with limited(max_priority=3) as system:
        system.scheduler.intake.receive(a(1, priority=1000, attempt=1, is_again=True))
        assert [req.priority for req in system.lifecycle.waiting] == [3]
        run_until_idle(system)


def test_the_cache_learns_what_share_a_tenant_has() -> None:
    with limited(cache_share=0.25) as system:
        shares = system.kv.guard.shares
        send(system, a(0, namespace=b"tenant-a"), b(1, namespace=b"tenant-b"))
        assert (shares.get(b"tenant-a"), shares.get(b"tenant-b")) == (0.25, None)
        system.lifecycle.room.change_tenants(Tenants((of("a"), of("b", cache_share=0.5))))
        send(system, a(2, namespace=b"tenant-a"), b(3, namespace=b"tenant-b"))
        assert (shares.get(b"tenant-a"), shares.get(b"tenant-b")) == (None, 0.5)


# -- beam searches -----------------------------------------------------------------------------------------


def search(number: int, width: int, **fields: Any) -> TokenizedRequest:
    return a(number, sampling={"use_beam_search": True, "beam_width": width}, **fields)


def test_a_search_runs_as_many_sequences_as_it_has_rows() -> None:
    with limited(max_running=4, changes={"max_rows": 8}) as system:
        system.executor.num_top = 40
        account = system.lifecycle.accounts.of("a")
        requests = [search(1, 3), search(2, 3), a(3), a(4), a(5), search(6, 4)]
        send(system, *requests)
        num_rows = []
        while not system.scheduler.is_idle:
            num_rows.append(account.num_rows)
            system.lifecycle.check()
            system.step()
        assert max(num_rows) == 4
        ended = list(system.detokenizer.closed)
        assert sorted(ended) == sorted(each.handle for each in requests)
        assert ended.index(requests[1].handle) < ended.index(requests[3].handle), "passed by a narrower one"
        assert not any(refused(system, *requests))
        system.check_empty()


def test_a_search_wider_than_may_run_is_refused_and_runs_alone_if_it_was_let_in_before() -> None:
    with limited(max_running=2, changes={"max_rows": 8}) as system:
        system.executor.num_top = 40
        send(system, wide := search(1, 3))
        error = error_of(system, wide)
        assert error is not None
        assert (error.status, error.param) == (400, "beam_width")
        assert "max_running" in error.message
        send(system, again := search(2, 3, is_again=True), first := a(3), second := a(4))
        run_until_idle(system)
        assert not any(refused(system, again, first, second))
        assert list(system.detokenizer.closed)[1] == again.handle
        system.check_empty()


def test_a_search_waits_as_as_many_sequences_as_it_has_rows() -> None:
    with limited(max_waiting=4) as system:
        system.executor.num_top = 40
        send(system, *[b(number, [number + 10] * 5, max_tokens=30) for number in range(4)])
        assert not system.rows.num_free
        requests = [search(11, 3), a(12), a(13), search(14, 2)]
        send(system, *requests)
        assert refused(system, *requests) == [False, False, True, True]
        error = error_of(system, requests[2])
        assert error is not None
        assert "4 sequences of this key wait already, and 4 may (max_waiting)" in error.message
        run_until_idle(system)
        system.check_empty()


def test_a_search_that_is_wider_than_may_wait_may_if_nothing_else_does() -> None:
    with limited(max_waiting=2) as system:
        system.executor.num_top = 40
        send(system, *[b(number, [number + 10] * 5, max_tokens=30) for number in range(4)])
        requests = [search(11, 3), search(12, 2), a(13)]
        send(system, *requests)
        assert refused(system, *requests) == [False, True, True]
        run_until_idle(system)
        system.check_empty()


def test_a_search_is_charged_with_the_output_of_all_its_rows_also_when_it_begins_again() -> None:
    with limited(tokens_per_minute=1000) as system:
        system.executor.num_top = 40
        account = system.lifecycle.accounts.of("a")
        send(system, asked := search(1, 3, max_tokens=6))
        for _ in range(3):
            system.step()
        system.lifecycle.accounts.settle()
        num_before = account.num_used
        assert num_before > len(PROMPT) + 3
        system.lifecycle.retract(system.lifecycle.requests[sequence_key(asked.handle)])
        system.lifecycle.accounts.settle()
        assert account.num_used == num_before
        run_until_idle(system)
        assert account.num_used == len(PROMPT) + 3 * 6
