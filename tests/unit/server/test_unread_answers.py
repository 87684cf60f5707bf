"""UnreadAnswers: answers that nobody reads are bounded, at the cost of those who do not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from carousel.server.tenancy import unread_answers
from carousel.server.tenancy.unread_answers import (
    CLOSED_AT_ONCE,
    MAX_WAITING,
    VALUES_OF_PLACE,
    UnreadAnswers,
)
from runtime.base.errors import Overloaded

SIZE = 100


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    return run


class Transport:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.is_closed = False

    def get_write_buffer_size(self) -> int:
        return self.num_bytes

    def abort(self) -> None:
        self.is_closed = True


def paused(unread: UnreadAnswers, tenant: str, num_bytes: int) -> Transport:
    transport = Transport(num_bytes)
    unread.pause(cast(Any, transport), tenant)
    return transport


@pytest.fixture(autouse=True)
def _in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_answers, "GRACE_S", 0.05)
    monkeypatch.setattr(unread_answers, "CHECK_S", 0.01)
    monkeypatch.setattr(unread_answers, "LEAST_RATE", 100.0)


async def _end_of(transport: Transport) -> None:
    async with asyncio.timeout(10):
        while not transport.is_closed:
            await asyncio.sleep(0.01)


@in_a_loop
async def test_who_reads_nothing_is_closed_and_who_reads_is_not() -> None:
    unread = UnreadAnswers(SIZE)
    slow, reading = paused(unread, "", 60), paused(unread, "", 60)
    assert not slow.is_closed, "it has time to begin"
    reading.num_bytes = 55
    await _end_of(slow)
    assert not reading.is_closed
    assert unread.num_bytes == 55


@in_a_loop
async def test_the_tenant_with_the_most_loses_its_connection() -> None:
    unread = UnreadAnswers(SIZE)
    other = paused(unread, "other", 20)
    flood = [paused(unread, "flood", 30) for _ in range(3)]
    for each in flood:
        each.num_bytes -= 1
    await _end_of(next(iter(flood)))
    await asyncio.sleep(0.05)
    assert not other.is_closed, "it reads nothing, but has only a fifth"
    assert [each.is_closed for each in flood] == [True, False, False]


@in_a_loop
async def test_who_reads_fast_enough_stays_however_much_is_unread() -> None:
    unread = UnreadAnswers(SIZE)
    transport = paused(unread, "", 100_000)
    for _ in range(20):
        transport.num_bytes -= 1000
        await asyncio.sleep(0.01)
    assert not transport.is_closed
    assert unread.num_bytes > SIZE


@in_a_loop
async def test_what_is_unread_within_the_limit_stays() -> None:
    unread = UnreadAnswers(SIZE)
    transport = paused(unread, "", SIZE)
    await asyncio.sleep(0.1)
    assert not transport.is_closed
    unread.resume(cast(Any, transport))
    assert unread.num_bytes == 0


@in_a_loop
async def test_a_long_answer_waits_for_room_but_not_for_that_of_another_tenant() -> None:
    unread = UnreadAnswers(SIZE)
    transport = paused(unread, "flood", SIZE + 1)
    begun: list[str] = []

    async def answer(tenant: str) -> None:
        async with unread.turn(tenant, 1):
            begun.append(tenant)

    own = asyncio.create_task(answer("flood"))
    await asyncio.create_task(answer("other"))
    assert begun == ["other"]
    await _end_of(transport)
    await own
    assert begun == ["other", "flood"]
    assert not unread._lines


@in_a_loop
async def test_of_one_tenant_one_long_answer_is_formatted_at_a_time_and_few_wait() -> None:
    unread = UnreadAnswers(SIZE)
    end = asyncio.Event()
    most, now = 0, 0

    async def answer() -> None:
        nonlocal most, now
        async with unread.turn("a", VALUES_OF_PLACE):
            now += 1
            most = max(most, now)
            await end.wait()
            now -= 1

    tasks = [asyncio.create_task(answer()) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="long answers"):
        await answer()
    end.set()
    await asyncio.gather(*tasks)
    assert most == 1


@in_a_loop
async def test_answers_that_wait_are_counted_by_what_they_hold() -> None:
    """Two thousand embeddings may hold eight times as much as the most logprobs."""
    unread = UnreadAnswers(SIZE)
    end = asyncio.Event()

    async def answer(num_places: int) -> None:
        async with unread.turn("a", num_places * VALUES_OF_PLACE):
            await end.wait()

    # One alone is always taken.
    tasks = [asyncio.create_task(answer(2 * MAX_WAITING))]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await answer(1)
    end.set()
    await tasks[0]
    end.clear()
    tasks = [asyncio.create_task(answer(MAX_WAITING // 2)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await answer(1)
    end.set()
    await asyncio.gather(*tasks)
    assert not unread._lines


@in_a_loop
async def test_one_that_leaves_while_it_waits_holds_up_no_other() -> None:
    unread = UnreadAnswers(SIZE)
    transport = paused(unread, "a", SIZE + 1)

    async def answer() -> None:
        async with unread.turn("a", 1):
            pass

    tasks = [asyncio.create_task(answer()) for _ in range(3)]
    await asyncio.sleep(0)
    for each in tasks[:2]:  # the first waits for room, the others for their turn
        each.cancel()
    await _end_of(transport)
    await tasks[2]
    assert all(each.cancelled() for each in tasks[:2])
    assert not unread._lines


def test_of_many_that_do_not_read_a_few_are_closed_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """All were looked at again for each one that was closed: 45 ms in one turn for 500."""
    num_connections, num_rated = 10 * CLOSED_AT_ONCE, 0
    rate = unread_answers._Reader.rate

    def counted(self: Any, now_s: float) -> float:
        nonlocal num_rated
        num_rated += 1
        return rate(self, now_s)

    monkeypatch.setattr(unread_answers._Reader, "rate", counted)

    async def run() -> None:
        unread = UnreadAnswers(SIZE)
        transports = [paused(unread, "", SIZE) for _ in range(num_connections)]
        num_closed = 0
        async with asyncio.timeout(10):
            while unread.num_bytes > SIZE:
                await asyncio.sleep(0)
                before, num_closed = num_closed, sum(each.is_closed for each in transports)
                assert num_closed - before <= CLOSED_AT_ONCE
        assert num_closed == num_connections - 1

    asyncio.run(run())
    assert num_rated <= 10 * num_connections
