"""HandshakeTurns: few in a turn of the event loop, at least one, and networks in turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from carousel.server.http.tls.handshake_turns import TURN_S, HandshakeTurns, network_of
from tests.harness.cases import for_each

EACH_S = 0.4 * TURN_S


def made_in_turns(waiting: list[tuple[str, str]], each_s: float = EACH_S) -> list[list[str]]:
    """Return the names of the handshakes that each turn made, for pairs of an address and a name."""
    now_s = 0.0
    made: list[str] = []

    def make(name: str) -> Callable[[], None]:
        def go_on() -> None:
            nonlocal now_s
            now_s += each_s
            made.append(name)

        return go_on

    async def serve() -> list[list[str]]:
        turns = HandshakeTurns(clock=lambda: now_s)
        for address, name in waiting:
            turns.wait(address, make(name))
        each: list[list[str]] = []
        for _ in range(2 * len(waiting)):
            await asyncio.sleep(0)
            each.append(list(made))
            made.clear()
        return [turn for turn in each if turn]

    return asyncio.run(serve())


def test_a_turn_begins_no_further_one_when_its_time_is_over() -> None:
    names = [f"{number}" for number in range(7)]
    assert made_in_turns([("192.0.2.1", name) for name in names]) == [names[:3], names[3:6], names[6:]]


def test_one_that_takes_longer_has_a_turn_of_its_own() -> None:
    assert made_in_turns([("192.0.2.1", "a"), ("192.0.2.1", "b")], 9 * TURN_S) == [["a"], ["b"]]


def test_a_flood_of_one_address_is_not_before_another_address() -> None:
    flood = [("192.0.2.1", f"flood {number}") for number in range(100)]
    first, *_ = made_in_turns([*flood, ("192.0.2.2", "other"), ("2001:db8::1", "third")])
    assert first == ["flood 0", "other", "third"]


def test_one_that_waits_again_goes_on_behind_what_it_has_scheduled() -> None:
    """It went on in the same turn, before the connection above had been made."""
    made: list[str] = []

    async def serve() -> None:
        turns = HandshakeTurns(clock=lambda: 0.0)

        def make() -> None:
            turns.wait("192.0.2.1", lambda: made.append("rest"))
            turns.wait("192.0.2.3", lambda: made.append("other"))
            asyncio.get_running_loop().call_soon(made.append, "secure")

        turns.wait("192.0.2.1", make)
        turns.wait("192.0.2.2", lambda: turns.wait("192.0.2.2", lambda: made.append("first")))
        await asyncio.sleep(0.01)

    asyncio.run(serve())
    assert made[0] == "secure"
    assert sorted(made[1:]) == ["first", "other", "rest"]


def test_a_turn_that_fails_leaves_the_others_theirs() -> None:
    made: list[str] = []

    def fail() -> None:
        raise ValueError("x")

    async def serve() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        turns = HandshakeTurns()
        turns.wait("192.0.2.1", fail)
        turns.wait("192.0.2.1", lambda: made.append("next"))
        await asyncio.sleep(0.01)

    asyncio.run(serve())
    assert made == ["next"]


@for_each(
    ("address", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_a_network_is_what_one_caller_can_have(address: str, network: str) -> None:
    assert network_of(address) == network
