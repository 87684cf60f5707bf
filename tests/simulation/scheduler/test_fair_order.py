"""FairOrder: tenants take turns at rows, however many requests each has waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from runtime.ring.tenants import Tenants
from runtime.wire.handle import sequence_key
from runtime.wire.messages import AbortRequest, TokenizedRequest
from scheduler_proc.core.request import Request
from scheduler_proc.waiting.waiting_room import Patience, WaitingRoom
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running
from tests.harness.scheduler.tenant_parts import PROMPT, a, b, limited, of, send
from tests.harness.simulation.sim_system import STEP_S, System

ONE_ROW = {"max_rows": 1}
NUM_TOP = 40
"""Most likely tokens that the worker names for a search."""


def some(make: Any, numbers: Sequence[int], **fields: Any) -> list[TokenizedRequest]:
    return [make(number, max_tokens=2, **fields) for number in numbers]


def order_of(system: System, *requests: TokenizedRequest) -> list[int]:
    """Positions of the requests in the order in which they end."""
    run_until_idle(system, max_steps=2000)
    return [requests.index(req) for key in system.detokenizer.closed for req in requests if req.handle == key]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_flood_is_passed_by_who_comes_after_it(policy: str) -> None:
    with limited(changes=ONE_ROW | {"policy": policy}) as system:
        flood, late = some(a, range(6)), some(b, range(10, 12))
        send(system, *flood)
        send(system, *late)
        assert order_of(system, *flood, *late) == [0, 6, 1, 7, 2, 3, 4, 5]


def test_who_asks_for_much_waits_for_those_who_ask_for_little() -> None:
    with limited(changes=ONE_ROW) as system:
        flood = [a(number, max_tokens=40) for number in range(3)]
        late = some(b, range(10, 16))
        send(system, *flood)
        send(system, *late)
        assert order_of(system, *flood, *late) == [0, 3, 4, 5, 6, 7, 8, 1, 2]


def test_output_that_did_not_come_is_not_held_against_a_tenant() -> None:
    with limited(changes=ONE_ROW) as system:
        for number in range(3):
            much = a(number, max_tokens=50)
            send(system, much, AbortRequest((much.handle,), tenant="a"))
            run_until_idle(system)
        others, again = some(b, range(60, 65)), some(a, range(70, 73))
        send(system, *others)
        send(system, *again)
        order = order_of(system, *others, *again)
        assert order.index(5) <= 3, "after three prompts, not after 150 tokens that it might have had"


def test_three_tenants_take_turns_and_one_alone_goes_first_come_first_served() -> None:
    with limited(changes=ONE_ROW) as system:
        system.lifecycle.room.change_tenants(Tenants((of("a"), of("b"), of("c"))))
        requests = [
            *some(a, range(4)),
            *some(b, range(10, 13)),
            *(message(20 + number, PROMPT, max_tokens=2, tenant="c", client=1) for number in range(2)),
        ]
        send(system, *requests)
        assert order_of(system, *requests) == [0, 4, 7, 1, 5, 8, 2, 6, 3]


def test_who_was_away_has_saved_nothing_up() -> None:
    with limited(changes=ONE_ROW) as system:
        run_until_idle(system, *some(a, range(20)))
        busy, back = some(a, range(30, 33)), some(b, range(50, 54))
        send(system, *busy)
        send(system, *back)
        assert order_of(system, *busy, *back) == [0, 3, 1, 4, 2, 5, 6]


def test_turns_that_were_given_up_are_not_held_against_a_tenant() -> None:
    with limited(changes=ONE_ROW) as system:
        given_up = some(a, range(50))
        send(system, *given_up)
        send(system, AbortRequest(tuple(each.handle for each in given_up), tenant="a"))
        run_until_idle(system)
        others, again = some(b, range(60, 63)), some(a, range(70, 73))
        send(system, *others)
        send(system, *again)
        # The first of those given up had its row for a step, and its prompt counts.
        assert order_of(system, *others, *again) == [0, 3, 1, 4, 2, 5]


def test_giving_up_the_last_of_its_queue_gains_a_tenant_nothing() -> None:
    with limited(changes=ONE_ROW) as system:
        others, taken = some(b, range(60, 66)), some(a, range(70, 74))
        send(system, *others)
        for number, each in enumerate(taken):
            send(system, each)
            while each.handle not in [req.handle for req in system.rows.running_requests()]:
                system.step()
            bait = a(80 + number)
            send(system, bait, AbortRequest((bait.handle,), tenant="a"))
        assert order_of(system, *others, *taken) == [0, 6, 1, 7, 2, 8, 3, 9, 4, 5]


def test_a_flood_that_has_waited_for_too_long_goes_before_nobody_else() -> None:
    with limited(changes=ONE_ROW | {"patience": Patience(20.5 * STEP_S, 0.0)}) as system:
        flood = some(a, range(100))
        send(system, *flood)
        for _ in range(60):
            system.step()
        late = some(b, range(200, 203))
        send(system, *late)
        num_before = len(system.detokenizer.closed)
        order = order_of(system, *flood, *late)
        assert [order.index(number) - num_before for number in (100, 101, 102)] == [0, 2, 4]


def test_tenants_without_a_section_take_turns_with_who_has_waited_for_too_long_too() -> None:
    """Keys over TCP need no section in the table, which may be empty."""
    with limited(changes=ONE_ROW | {"patience": Patience(20.5 * STEP_S, 0.0)}) as system:
        system.lifecycle.room.change_tenants(Tenants())
        flood = [message(number, PROMPT, max_tokens=2, tenant="far", client=1) for number in range(100)]
        send(system, *flood)
        for _ in range(60):
            system.step()
        late = [message(200 + each, PROMPT, max_tokens=2, tenant="near", client=2) for each in range(3)]
        send(system, *late)
        num_before = len(system.detokenizer.closed)
        order = order_of(system, *flood, *late)
        assert [order.index(number) - num_before for number in (100, 101, 102)] == [0, 2, 4]


def test_who_is_passed_by_later_turns_of_another_tenant_starves() -> None:
    changes = ONE_ROW | {"patience": Patience(20.5 * STEP_S, 0.0)}
    with limited(changes=changes) as system:
        system.lifecycle.room.change_tenants(Tenants((of("a", max_priority=9), of("b"))))
        late = b(500, max_tokens=2)
        for number in range(60):
            send(system, *some(a, [2 * number, 2 * number + 1], priority=9))
            if number == 1:
                system.inbox.send(late)
        assert late.handle in system.detokenizer.closed
        assert len(system.lifecycle.room) > 60
        run_until_idle(system, max_steps=2000)


def test_priorities_and_keys_of_a_policy_go_before_turns() -> None:
    with limited(changes=ONE_ROW, max_priority=9) as system:
        flood, late = some(a, range(3), priority=5), some(b, range(10, 12))
        send(system, *flood)
        send(system, *late)
        assert order_of(system, *flood, *late) == [0, 1, 2, 3, 4]
    with limited(changes=ONE_ROW | {"policy": "shortest-first"}) as system:
        first = b(1, [*PROMPT, 7], max_tokens=2)
        short, long = some(a, range(10, 13)), b(20, PROMPT * 2, max_tokens=2)
        send(system, first)
        send(system, long, *short)
        assert order_of(system, first, long, *short) == [0, 2, 3, 4, 1]


def test_a_search_costs_its_tenant_all_of_its_rows() -> None:
    with limited(changes={"max_rows": 4}) as system:
        system.executor.num_top = NUM_TOP
        searches = some(a, range(3), sampling={"use_beam_search": True, "beam_width": 4})
        plain = some(b, range(10, 16))
        send(system, *searches)
        send(system, *plain)
        assert order_of(system, *searches, *plain) == [0, 3, 4, 5, 6, 1, 7, 8, 2]


def test_what_was_paused_and_is_given_up_costs_no_more_than_it_has_had() -> None:
    with limited(changes=ONE_ROW) as system:
        for number in range(3):
            much = a(number, max_tokens=50)
            send(system, much)
            system.lifecycle.retract(system.lifecycle.requests[sequence_key(much.handle)])
            send(system, b(10 + number, max_tokens=2), AbortRequest((much.handle,), tenant="a"))
            run_until_idle(system)
        others, again = some(b, range(60, 65)), some(a, range(70, 73))
        send(system, *others)
        send(system, *again)
        order = order_of(system, *others, *again)
        assert order.index(5) <= 4, "after three prompts, not after 150 tokens that it might have had"


LONG = {"max_rows": 4, "num_pages": 2000, "max_len": 512, "budget": 32}


def _long_prompt(number: int) -> list[int]:
    return [1 + (number * 7 + at * at) % 31 for at in range(400)]


def test_prompts_that_have_to_be_computed_count_as_turns() -> None:
    """Without that, a tenant with long prompts and a token of output for each has many turns for one of
    another tenant's, which ends a thirteenth of what it ends beside a tenant like itself.
    """
    with limited(changes=LONG) as system:
        flood: dict[bytes, TokenizedRequest] = {}
        small: dict[bytes, TokenizedRequest] = {}
        num_sent = num_ended = 0
        for _ in range(800):
            num_ended += sum(handle in system.detokenizer.closed for handle in small)
            flood, small = (
                {key: req for key, req in each.items() if key not in system.detokenizer.closed}
                for each in (flood, small)
            )
            for own, most in ((flood, 8), (small, 4)):
                while len(own) < most:
                    num_sent += 1
                    req = (
                        a(num_sent, _long_prompt(num_sent), max_tokens=1)
                        if own is flood
                        else b(num_sent, max_tokens=12)
                    )
                    own[req.handle] = req
                    system.inbox.send(req)
            system.step()
        assert num_ended > 100


def test_of_a_prompt_only_what_is_not_cached_counts() -> None:
    with limited(changes=LONG | {"max_rows": 1}) as system:
        run_until_idle(system, a(1, _long_prompt(0), max_tokens=1))
        hot, others = [a(10 + n, _long_prompt(0), max_tokens=2) for n in range(3)], some(b, range(20, 23))
        send(system, *hot)
        send(system, *others)
        assert order_of(system, *hot, *others) == [0, 3, 1, 4, 2, 5]


def test_who_gets_a_prompt_from_the_cache_after_all_is_given_back_what_it_costs() -> None:
    with limited(changes=LONG | {"max_rows": 1}) as system:
        send(system, b(1, max_tokens=2), *(a(10 + n, _long_prompt(0), max_tokens=2) for n in range(3)))
        run_until_idle(system)
        accounts = system.lifecycle.accounts
        assert accounts.of("a").next_tag < 400 // 8 + 4 * 5


@pytest.mark.parametrize("num_tenants", [1, 2])
def test_a_prompt_is_looked_up_for_its_cost_only_where_there_are_turns(
    monkeypatch: pytest.MonkeyPatch, num_tenants: int
) -> None:
    """A single tenant has no turns, and paid for a lookup with each request."""
    weighed = list[Request]()
    weigh_prompt = WaitingRoom.weigh_prompt

    def noted(room: WaitingRoom, req: Request, match_len: Callable[[Request], int]) -> None:
        weighed.append(req)
        weigh_prompt(room, req, match_len)

    monkeypatch.setattr(WaitingRoom, "weigh_prompt", noted)
    with running(**ONE_ROW) as system:
        system.lifecycle.room.change_tenants(Tenants((of("a"), of("b"))[:num_tenants]))
        run_until_idle(system, a(1, max_tokens=2), a(2, max_tokens=2))
        assert len(weighed) == (2 if num_tenants > 1 else 0)
        if num_tenants == 1:
            run_until_idle(system, b(3, max_tokens=2))  # over TCP: there are two from now on
            assert len(weighed) == 1
