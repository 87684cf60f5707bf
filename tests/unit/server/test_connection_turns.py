"""How much connections do in a turn of the event loop, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from carousel.server.http.connection_turns import (
    ACCEPTED_IN_TURN,
    MAX_WAITING_REQUESTS,
    TURN_COST,
    ConnectionTurns,
)

MANY = 40


class Worker:
    """Does as many things of one cost as it is told, whenever there is room, like a connection."""

    def __init__(self, turns: ConnectionTurns, cost: int, count: int, done: list[str], name: str) -> None:
        self._turns = turns
        self._cost = cost
        self._count = count
        self._done = done
        self._name = name

    def begin(self) -> None:
        if self._turns.has_room():
            self.go_on()
        else:
            self._turns.wait(self.go_on)

    def go_on(self) -> None:
        self._turns.spend(self._cost)
        self._done.append(self._name)
        self._count -= 1
        if self._count:
            self._turns.wait(self.go_on)


async def done_in_turns(begin: Callable[[ConnectionTurns, list[str]], None]) -> list[list[str]]:
    """Return what is done in each turn."""
    turns, done, each = ConnectionTurns(), list[str](), list[list[str]]()
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    begin(turns, done)
    for _ in range(MANY):
        each.append(done[:])
        done.clear()
        await asyncio.sleep(0)
    return [turn for turn in each if turn]


def begin_all(cost: int, counts: list[int], turns: ConnectionTurns, done: list[str]) -> None:
    for number, count in enumerate(counts):
        Worker(turns, cost, count, done, "abcdef"[number]).begin()


def test_a_turn_ends_when_its_cost_is_spent_and_who_came_first_goes_first() -> None:
    begin = partial(begin_all, TURN_COST // 2, [2, 1, 2, 1, 1])
    assert asyncio.run(done_in_turns(begin)) == [["a"], ["a", "b"], ["c", "d"], ["e", "c"]]


def test_what_costs_more_than_a_turn_has_one_of_its_own() -> None:
    begin = partial(begin_all, 3 * TURN_COST, [1, 1, 1])
    assert asyncio.run(done_in_turns(begin)) == [["a"], ["b"], ["c"]]


def test_who_has_nothing_to_do_any_more_or_fails_holds_up_nobody() -> None:
    """Those who were before it in the line may all have left."""

    def begin(turns: ConnectionTurns, done: list[str]) -> None:
        def fail() -> None:
            raise RuntimeError("a connection fails")

        turns.spend(TURN_COST)
        for nothing in (lambda: None, fail, lambda: turns.wait(lambda: None), fail):
            turns.wait(nothing)
        begin_all(TURN_COST, [1, 1], turns, done)

    assert asyncio.run(done_in_turns(begin)) == [["a"], ["b"]]


def test_who_waits_has_a_turn_though_nobody_else_does_anything() -> None:
    """A connection that is read again had none: its data had come in another turn."""
    assert asyncio.run(done_in_turns(lambda turns, done: turns.wait(lambda: done.append("a")))) == [["a"]]


def begin_requests(turns: ConnectionTurns, done: list[str]) -> None:
    """Read data, requests and a probe behind them, in a turn that has room for nothing more."""

    def do(name: str) -> None:
        turns.spend(TURN_COST // 4)
        done.append(name)

    turns.spend(TURN_COST)
    for name in "abc":
        turns.begin(partial(do, name), is_probe=False)
        turns.wait(partial(do, "data"))
    turns.begin(partial(do, "probe"), is_probe=True)


def test_a_probe_is_begun_before_requests_and_data_and_requests_take_turns() -> None:
    expected = [["probe", "data", "a", "data"], ["data", "b", "c"]]
    assert asyncio.run(done_in_turns(begin_requests)) == expected


def test_data_of_a_new_connection_is_parsed_before_that_of_many_others() -> None:
    """A probe came behind 415 connections that sent more behind requests whose answers they did not read."""

    def begin(turns: ConnectionTurns, done: list[str]) -> None:
        def do(name: str) -> None:
            turns.spend(TURN_COST // 4)
            done.append(name)

        turns.spend(TURN_COST)
        for number in range(4):
            turns.wait(partial(do, f"old {number}"))
        for number in range(4):
            turns.wait(partial(do, f"new {number}"), is_new=True)

    first, second = asyncio.run(done_in_turns(begin))
    assert first == ["new 0", "old 0", "new 1", "old 1"]
    assert second == ["new 2", "old 2", "new 3", "old 3"]


def test_one_request_is_begun_in_a_turn_while_as_many_connections_are_accepted_as_can_be() -> None:
    def begin(turns: ConnectionTurns, done: list[str]) -> None:
        for _ in range(ACCEPTED_IN_TURN):
            turns.note_accepted()
        turns.spend(TURN_COST)
        for name in "abc":
            turns.begin(partial(done.append, name), is_probe=False)

    assert asyncio.run(done_in_turns(begin)) == [["a"], ["b", "c"]]


def test_requests_do_not_pile_up_while_connections_come_without_end() -> None:
    """Clients that left at once could have any number of requests come before those of who stayed."""

    async def most_waiting() -> int:
        turns, most = ConnectionTurns(), 0
        for _ in range(2 * MAX_WAITING_REQUESTS):
            turns.spend(TURN_COST)
            for _ in range(ACCEPTED_IN_TURN):
                turns.note_accepted()
                turns.begin(lambda: None, is_probe=False)
            await asyncio.sleep(0)
            most = max(most, len(turns._requests))
        return most

    assert asyncio.run(most_waiting()) <= MAX_WAITING_REQUESTS + ACCEPTED_IN_TURN


def test_who_is_accepted_alone_has_its_request_begun_at_once() -> None:
    def begin(turns: ConnectionTurns, done: list[str]) -> None:
        turns.note_accepted()
        turns.begin(partial(done.append, "a"), is_probe=False)
        assert done == ["a"]

    assert asyncio.run(done_in_turns(begin)) == [["a"]]
