"""The bytes that large request bodies may take together."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from carousel.server.http import body_pool
from carousel.server.http.body_pool import SMALL_BYTES, BodyPool, BodyShare
from runtime.base.errors import Overloaded

KIB = 1 << 10
LARGEST = 1024 * KIB
SIZE = 4 * LARGEST


def run(work: Callable[[BodyPool], Awaitable[None]]) -> None:
    async def main() -> None:
        pool = BodyPool(LARGEST, SIZE)
        await work(pool)
        assert not pool.num_bytes

    asyncio.run(main())


def test_bodies_that_are_read_half_and_wait_all_come_to_their_end() -> None:
    """Together they have five times what there is, and none gives back anything before it has all."""
    most = 0

    async def read(pool: BodyPool, rng: random.Random) -> None:
        nonlocal most
        share, size = pool.share(), 0
        while size < LARGEST:
            size = min(LARGEST, size + rng.randint(1, 320 * KIB))
            await share.grow_to(size)
            most = max(most, pool.num_bytes)
            await asyncio.sleep(0)
        share.release()

    async def work(pool: BodyPool) -> None:
        await asyncio.gather(*(read(pool, random.Random(seed)) for seed in range(20)))

    run(work)
    assert SIZE - LARGEST < most <= SIZE


def test_a_body_that_gets_no_room_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_pool, "WAIT_S", 0.01)

    async def work(pool: BodyPool) -> None:
        shares = [pool.share() for _ in range(4)]
        for share in shares[:3]:
            await share.grow_to(LARGEST)
        with pytest.raises(Overloaded) as refused:
            await shares[3].grow_to(LARGEST)
        assert refused.value.code == "bodies_overloaded"
        # What is small is not counted.
        await pool.share().grow_to(SMALL_BYTES)
        shares[1].release()
        await shares[3].grow_to(LARGEST)
        for share in shares:
            share.release()

    run(work)


def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_pool, "MAX_WAITING", 2)

    async def work(pool: BodyPool) -> None:
        full = [pool.share() for _ in range(3)]
        for share in full:
            await share.grow_to(LARGEST)
        waiting = [pool.share() for _ in range(2)]
        tasks = [asyncio.create_task(share.grow_to(LARGEST)) for share in waiting]
        await asyncio.sleep(0)
        refused = pool.share()
        with pytest.raises(Overloaded):
            await refused.grow_to(LARGEST)
        # Who is cancelled, because its client has left, holds nothing and stands in nobody's way.
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        waiting[0].release()
        refused.release()
        full[0].release()
        await tasks[1]
        for share in (*full, *waiting):
            share.release()

    run(work)


def test_a_share_is_given_back_once() -> None:
    async def work(pool: BodyPool) -> None:
        share: BodyShare = pool.share()
        await share.grow_to(LARGEST)
        share.release()
        share.release()

    run(work)
