"""How large bodies and all else divide the time of an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from itertools import count

import pytest

from carousel.server.http.body_pace import LEAST_REST_S, MAX_PIECES, MAX_REST_S, REST_RATIO, BodyPace
from tests.harness.http.loop_turns import gone_on_in_turns


def pace_beside_a_stream(*, cost_s: float = 0.0) -> BodyPace:
    """Return a pace of large bodies of which MAX_PIECES together take so much CPU time."""
    times = count()
    pace = BodyPace(lambda: 1, cpu_time=lambda: next(times) * cost_s)
    pace.requests = ["a large body", "a stream"]
    return pace


async def taken_in_turns(
    pace: BodyPace, tenants: Sequence[str], leaving: Collection[int] = ()
) -> list[list[int]]:
    """Which of so many pieces, that come together, are handled in each turn."""
    return await gone_on_in_turns(map(pace.take_piece, tenants), leaving)


def seconds_of(run: Callable[[], Awaitable[object]]) -> float:
    async def main() -> float:
        began_s = time.monotonic()
        await run()
        return time.monotonic() - began_s

    return asyncio.run(main())


def test_beside_others_a_few_pieces_are_handled_at_a_time_in_the_order_in_which_they_came() -> None:
    turns = asyncio.run(taken_in_turns(pace_beside_a_stream(), ["alice"] * (2 * MAX_PIECES + 1)))
    assert [len(turn) for turn in turns] == [MAX_PIECES, MAX_PIECES, 1]
    assert [number for turn in turns for number in turn] == list(range(2 * MAX_PIECES + 1))


def test_while_nothing_else_is_served_nobody_waits() -> None:
    async def main() -> None:
        pace = BodyPace(lambda: 2)
        pace.requests = ["a large body", "another one"]
        assert pace.is_alone
        for _ in range(10 * MAX_PIECES):
            with pytest.raises(StopIteration):  # as a coroutine does that has not waited
                pace.take_piece().send(None)

    asyncio.run(main())


@pytest.mark.parametrize("cost_s", [0.004, LEAST_REST_S / REST_RATIO / 4])
def test_the_rest_is_three_times_as_long_as_the_work(cost_s: float) -> None:
    """Those that are shorter than a timer can be are added up."""
    pieces = ["alice"] * (MAX_PIECES * 16 + 1)
    taken_s = seconds_of(partial(taken_in_turns, pace_beside_a_stream(cost_s=cost_s), pieces))
    assert taken_s >= 16 * REST_RATIO * cost_s - LEAST_REST_S


def test_no_rest_is_longer_than_the_longest() -> None:
    rests: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def noted(delay_s: float, *call: Callable[[], None]) -> asyncio.TimerHandle:
            rests.append(delay_s)
            return call_later(delay_s, *call)

        setattr(loop, "call_later", noted)  # noqa: B010  (the loop is this test's)
        await taken_in_turns(pace_beside_a_stream(cost_s=30.0), ["alice"] * (4 * MAX_PIECES))

    asyncio.run(main())
    assert rests
    assert max(rests) <= MAX_REST_S


def test_the_rest_is_over_when_the_others_are_done() -> None:
    async def main() -> None:
        pace = pace_beside_a_stream(cost_s=1.0)
        for _ in range(MAX_PIECES):
            await pace.take_piece()
        piece = asyncio.create_task(pace.take_piece())
        await asyncio.sleep(0)
        pace.requests = ["a large body"]
        for _ in range(4):
            await asyncio.sleep(0)
        assert piece.done()

    asyncio.run(main())


def test_one_tenants_pieces_are_not_all_before_anothers() -> None:
    crowd = 5 * MAX_PIECES
    tenants = ["alice"] * crowd + ["bob", "bob", "carol"]
    turns = asyncio.run(taken_in_turns(pace_beside_a_stream(), tenants))
    assert turns[0] == list(range(MAX_PIECES)), "when they came nobody else was there"
    assert [[number for number in turn if number >= crowd] for turn in turns[1:3]] == [
        [crowd, crowd + 2],
        [crowd + 1],
    ]
    assert sorted(number for turn in turns for number in turn) == list(range(crowd + 3))


def test_who_has_left_or_has_nothing_to_do_holds_up_nobody() -> None:
    leaving = frozenset(range(MAX_PIECES, 3 * MAX_PIECES))
    turns = asyncio.run(taken_in_turns(pace_beside_a_stream(), ["alice"] * (4 * MAX_PIECES), leaving))
    assert [len(turn) for turn in turns] == [MAX_PIECES, MAX_PIECES]
    assert not leaving & set(turns[1])


def test_who_fails_holds_up_nobody() -> None:
    async def main() -> list[int]:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        pace, done = pace_beside_a_stream(), list[int]()

        def fail() -> None:
            raise RuntimeError("a connection fails")

        for number in range(MAX_PIECES):
            pace.wait(fail)
            pace.wait(partial(done.append, number))
        for _ in range(4 * MAX_PIECES):
            await asyncio.sleep(0)
        return done

    assert asyncio.run(main()) == list(range(MAX_PIECES))
