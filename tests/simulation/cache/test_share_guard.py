"""ShareGuard: pages that a tenant beyond its share may not take from others, through the whole scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from runtime.wire.format import pack_ids
from runtime.wire.messages import TokenizedRequest
from scheduler_proc.batching import admission
from scheduler_proc.capacity.max_utilization import MaxUtilization
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running
from tests.harness.simulation.sim_system import System

A, B = b"tenant-A", b"tenant-B"
HOT = [7] * 33
"""A's prompt: eight full pages of four, within its half of the pool."""


@contextmanager
def with_hot_prefix(num_pages: int = 32, **changes: Any) -> Iterator[System]:
    """A system in which A has asked once, and is gone."""
    changes = {"page_size": 4, "max_rows": 8, "max_len": 4 * num_pages, "budget": 512} | changes
    with running(num_pages=num_pages, **changes) as system:
        run_until_idle(system, message(900, HOT, max_tokens=1, namespace=A))
        assert cached(system) == 32
        yield system


def cached(system: System) -> int:
    """Tokens of A's prompt that are in the cache."""
    return system.kv.cache.match_len(pack_ids(HOT), 32, A)


def of_b(number: int, num_tokens: int, max_tokens: int, **fields: Any) -> TokenizedRequest:
    return message(number, [40 + number] * num_tokens, max_tokens, namespace=B, **fields)


def send(system: System, *messages: TokenizedRequest) -> None:
    for each in messages:
        assert system.inbox.send(each)


def who_runs(system: System) -> list[int]:
    """Numbers of the requests that hold rows, in the order of admission; A's first one was 1."""
    return [req.seq for req in system.rows.running_requests()]


@pytest.mark.parametrize("capacity", ["max_utilization", "guaranteed_no_evict"])
def test_a_second_row_beyond_the_share_waits_and_holds_up_nobody_else(capacity: str) -> None:
    with with_hot_prefix(capacity=capacity) as system:
        send(system, *(of_b(n, 38, 2) for n in (2, 3, 4)), message(5, [*HOT, 1, 2], 2, namespace=A))
        system.step()
        assert who_runs(system) == [2, 3, 5], "ten pages each, 24 are not A's"
        assert cached(system) == 32
        run_until_idle(system)
        assert not system.lifecycle.num_retracted
        closed = {each.cached_tokens for each in system.detokenizer.closed.values()}
        assert closed == {0, 32}
        assert len(system.detokenizer.closed) == 5


@pytest.mark.parametrize("capacity", ["max_utilization", "guaranteed_no_evict"])
def test_the_only_row_of_a_tenant_may_take_everything(capacity: str) -> None:
    with with_hot_prefix(capacity=capacity) as system:
        run_until_idle(system, of_b(2, 100, 20))
        assert cached(system) < 32
        assert [each.reason for each in system.detokenizer.closed.values()] == ["length"] * 2


@pytest.mark.parametrize("capacity", ["max_utilization", "guaranteed_no_evict"])
def test_the_only_row_of_a_tenant_is_not_held_back_while_others_run(capacity: str) -> None:
    with with_hot_prefix(capacity=capacity) as system:
        send(system, message(2, [2] * 4, 12, namespace=A))
        system.step()
        send(system, of_b(3, 90, 4))
        system.step()
        assert who_runs(system) == [2, 3]
        assert cached(system) < 32


def test_rows_that_grow_beyond_the_share_give_way_to_each_other() -> None:
    with with_hot_prefix(conservativeness=0.05) as system:
        send(system, of_b(2, 8, 60), of_b(3, 8, 60))
        for _ in range(40):
            system.step()
        assert who_runs(system) == [2, 3]
        run_until_idle(system)
        assert system.lifecycle.num_retracted == 1
        assert cached(system) == 32
        assert [len(tokens) for tokens in system.detokenizer.tokens.values()] == [1, 60, 60]


def test_nobody_gives_up_a_row_for_a_tenant_that_is_beyond_its_share() -> None:
    with with_hot_prefix(conservativeness=0.05) as system:
        send(system, of_b(2, 8, 60), of_b(3, 8, 60))
        for _ in range(25):
            system.step()
        send(system, message(4, [*HOT, 1, 2, 3], 40, namespace=A))
        while not system.lifecycle.num_retracted:
            system.step()
        assert who_runs(system) == [2, 4], "A's is the one that started last"
        run_until_idle(system)
        assert max(req.cached_tokens for req in system.detokenizer.closed.values()) == 32


def test_a_tenant_that_has_just_its_share_gives_way_itself() -> None:
    with with_hot_prefix(conservativeness=0.05) as system:
        send(system, of_b(2, 8, 60), of_b(3, 8, 60), message(4, [4] * 8, 60, namespace=A))
        while not system.lifecycle.num_retracted:
            system.step()
        assert who_runs(system) == [2, 4]
        assert system.lifecycle.num_retracted == 1, "A's is the one that started last"


def test_a_tenant_below_its_share_takes_from_whoever_is_there() -> None:
    with with_hot_prefix() as system:
        run_until_idle(system, *(of_b(n, 29, 4) for n in (2, 3, 4)))
        send(system, message(11, [11] * 30, 3, namespace=A))
        system.step()
        assert system.kv.counts.num_evicted == 8, "of B, which had 24 of 16"
        assert cached(system) == 32
        send(system, message(12, [12] * 21, 2, namespace=A))
        system.step()
        assert who_runs(system) == [5, 6]
        assert cached(system) == 8, "its own, since it has all of its share"


def fill_with_long_outputs(system: System) -> MaxUtilization:
    """Run four long outputs of tenant B until one is retracted. Returns the capacity policy."""
    send(system, *(of_b(number, 8, 80) for number in (2, 3, 4, 5)))
    while not system.lifecycle.num_retracted:
        system.step()
    capacity = system.scheduler.capacity
    assert isinstance(capacity, MaxUtilization)
    return capacity


def test_what_others_may_still_take_beyond_their_share_keeps_nobody_from_its_own() -> None:
    """After a retraction, rows of long outputs are expected to take more pages than there are. A tenant
    within its share waited for one of them to end, though it needed three pages and nineteen were there.
    """
    with with_hot_prefix(num_pages=64, conservativeness=0.3) as system:
        capacity = fill_with_long_outputs(system)
        assert capacity.pages_wanted() > system.kv.num_available - 3 == 16
        send(system, message(6, [*HOT, 1, 2], 4, namespace=A))
        system.step()
        assert who_runs(system) == [2, 3, 4, 6]
        run_until_idle(system)
        assert sorted(map(len, system.detokenizer.tokens.values())) == [1, 4, 80, 80, 80, 80]


@pytest.mark.parametrize(("capacity", "num_rows"), [("max_utilization", 4), ("guaranteed_no_evict", 2)])
def test_who_waits_for_rows_of_its_own_tenant_holds_up_nobody_else(capacity: str, num_rows: int) -> None:
    """The tenant is within its share, of which its rows may still take more than all."""
    with with_hot_prefix(num_pages=64, capacity=capacity) as system:
        flood = [of_b(2 + n, 8, 80) for n in range(num_rows + 2)]
        send(system, *flood, message(20, [*HOT, 1, 2], 4, namespace=A))
        system.step()
        assert who_runs(system) == [*range(2, 2 + num_rows), 4 + num_rows]
        run_until_idle(system)
        assert len(system.detokenizer.closed) == num_rows + 4


def test_a_tenant_whose_rows_may_take_all_of_its_share_waits_for_them() -> None:
    """Else it would give up rows again and again, and each time more is expected of the rows of all."""
    with with_hot_prefix(num_pages=64, conservativeness=0.3) as system:
        capacity = fill_with_long_outputs(system)
        capacity.new_token_ratio = 1.0
        send(system, message(6, [6] * 4, 60, namespace=A), message(7, [7] * 4, 64, namespace=A))
        system.step()
        assert who_runs(system) == [2, 3, 4, 6], "16 and 17 pages, of which 32 are its half"
        run_until_idle(system)


def test_a_higher_priority_takes_from_its_own_tenant_alone_beyond_the_share() -> None:
    with with_hot_prefix(policy="priority") as system:
        send(system, of_b(2, 34, 4), of_b(3, 34, 4), message(4, [*HOT, 1], 4, namespace=A))
        system.step()
        assert who_runs(system) == [2, 3, 4]
        send(system, of_b(5, 34, 4, priority=9))
        system.step()
        assert who_runs(system) == [2, 4, 5], "A's is the one that started last"
        run_until_idle(system)
        assert system.lifecycle.num_retracted == 1


def test_a_higher_priority_counts_only_pages_that_are_there_for_it() -> None:
    with with_hot_prefix(policy="priority") as system:
        send(system, of_b(2, 34, 4), of_b(3, 34, 4))
        system.step()
        send(system, of_b(5, 34, 4, priority=9))
        system.step()
        assert who_runs(system) == [2, 4], "it is the fourth that came"
        assert cached(system) == 32


def test_a_higher_priority_beyond_the_share_holds_up_nobody_else() -> None:
    with with_hot_prefix(policy="priority", max_rows=3) as system:
        send(system, *(of_b(n, 34, 9, priority=9) for n in (2, 3)), message(4, [4], 9, namespace=b"tenant-C"))
        system.step()
        send(system, of_b(5, 34, 9, priority=9), message(6, HOT, 4, namespace=A, priority=9))
        system.step()
        assert who_runs(system) == [2, 3, 6]


def test_shares_of_ones_own_count() -> None:
    with with_hot_prefix() as system:
        system.kv.guard.shares.set(A, 0.125)
        send(system, *(of_b(n, 38, 2) for n in (2, 3, 4)))
        system.step()
        run_until_idle(system)
        assert cached(system) == 16, "four pages of the eight"


def test_those_held_back_are_skipped_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_SKIPPED", 3)
    for num_waiting, runs in ((3, True), (5, False)):
        with with_hot_prefix() as system:
            send(system, of_b(2, 38, 9), of_b(3, 38, 9), *(of_b(4 + n, 38, 9) for n in range(num_waiting)))
            send(system, message(20, [*HOT, 1, 2], 2, namespace=A))
            system.step()
            assert (len(who_runs(system)) == 3) is runs


def test_with_one_tenant_nothing_is_counted() -> None:
    with running(num_pages=32, max_len=128) as system:
        run_until_idle(system, *(message(n, [n] * 40, 4) for n in range(6)))
        assert system.kv.counts.num_evicted
        assert not system.kv.guard.is_needed
        assert not system.kv.guard.is_counted
        assert not system.scheduler.capacity.guards_growth


def test_several_pages_at_once_count_as_one_after_the_other() -> None:
    """A chunk or guesses may begin within the share and end beyond it."""
    with with_hot_prefix(num_pages=20, conservativeness=0.05) as system:
        send(system, *(of_b(n, 13, 20) for n in (2, 3)), message(4, [4] * 3, 20, namespace=A))
        system.step()
        guard, running = system.kv.guard, system.rows.running_requests()
        assert who_runs(system) == [2, 3, 4]
        first, second, of_a = running
        assert system.kv.num_pages[[first.row, second.row]].tolist() == [4, 4], "of the ten that are B's"
        assert guard.may_grow(second.row, 24), "ten, of which two are free"
        assert guard.victim_candidates([first, of_a], second, 2) == [first, of_a]
        assert guard.may_grow(of_a.row, 40), "its only row"
        assert not guard.may_grow(second.row, 40)
        assert guard.victim_candidates([first, of_a], second, 6) == [first]
