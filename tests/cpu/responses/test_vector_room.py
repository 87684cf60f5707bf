"""VectorRoom: vectors that are kept are bounded, every request comes to its end, and tenants share."""

from __future__ import annotations

import asyncio
import random

from carousel.server.vectors.vector_room import HeldVectors, VectorRoom

SIZE, VECTOR = 1000, 100


def room_of(*, is_divided: bool = False) -> VectorRoom:
    room = VectorRoom(lambda: is_divided, SIZE)
    room.vector_bytes = VECTOR
    return room


async def _take(held: HeldVectors, count: int) -> int:
    """Return how many of so many vectors it had room for."""
    num_taken = 0
    try:
        async with asyncio.timeout(0.02):
            while num_taken < count:
                await held.take()
                num_taken += 1
    except TimeoutError:
        pass
    return num_taken


def test_texts_wait_for_room_and_those_of_the_oldest_request_do_not() -> None:
    async def run() -> None:
        room = room_of()
        with room.held("") as second:
            with room.held("") as third:
                assert await _take(second, 8) == 8
                assert await _take(third, 8) == 2
                assert await _take(second, 8) == 8, "it is the oldest, and comes to its end"
                assert room.num_bytes == 18 * VECTOR
                waiting = asyncio.create_task(third.take())
                await asyncio.sleep(0)
                assert not waiting.done()
                waiting.cancel()
            assert room.num_bytes == 16 * VECTOR
        assert room.num_bytes == 0
        with room.held("") as fourth:
            fourth.note(VECTOR // 2)
            with room.held("") as fifth:
                assert await _take(fourth, 10) == 10
                assert await _take(fifth, 20) == 10, "they count as what they have"

    asyncio.run(run())


def test_every_request_ends_and_the_room_is_exceeded_by_one_of_them_at_most() -> None:
    most, sizes = 0, [25] * 30

    async def run() -> None:
        nonlocal most
        room, rng = room_of(), random.Random(7)

        async def ask(count: int) -> None:
            nonlocal most
            with room.held("") as held:
                async with asyncio.TaskGroup() as group:
                    for _ in range(count):
                        group.create_task(held.take())
                        most = max(most, room.num_bytes)
                        if not rng.randrange(4):
                            await asyncio.sleep(0)

        async with asyncio.timeout(20):
            await asyncio.gather(*map(ask, sizes))
        assert room.num_bytes == 0

    asyncio.run(run())
    assert SIZE <= most <= SIZE + max(sizes) * VECTOR


def test_who_leaves_while_it_waits_takes_nothing() -> None:
    async def run() -> None:
        room = room_of()
        with room.held("") as oldest:
            with room.held("") as other:
                assert await _take(oldest, 10) == 10
                waiting = [asyncio.create_task(other.take()) for _ in range(3)]
                await asyncio.sleep(0)
                for each in waiting:
                    each.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
            assert room.num_bytes == 10 * VECTOR
            assert await _take(oldest, 1) == 1
        assert room.num_bytes == 0

    asyncio.run(run())


def test_another_tenants_request_waits_for_none_of_a_flood() -> None:
    async def run() -> None:
        room = room_of(is_divided=True)
        with room.held("flood") as first, room.held("flood") as second:
            assert await _take(first, 30) == 30
            assert await _take(second, 1) == 0
            with room.held("other") as other:
                assert await _take(other, 30) == 30

    asyncio.run(run())
