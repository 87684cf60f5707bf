"""The bytes that large request bodies may take together."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from carousel.server.http import body_pool
from carousel.server.http.body_pool import SMALL_BYTES, BodyPool, BodyShare
from runtime.base.errors import Overloaded, RateLimited

KIB = 1 << 10
LARGEST = 1024 * KIB
SIZE = 4 * LARGEST


def run(work: Callable[[BodyPool], Awaitable[None]]) -> None:
    async def main() -> None:
        pool = BodyPool(lambda: False, largest=LARGEST, size=SIZE)
        await work(pool)
        assert not pool.num_bytes

    asyncio.run(main())


def test_bodies_that_are_read_half_and_wait_all_come_to_their_end() -> None:
    """Together they have five times what there is, and none gives back anything before it has all."""
    most = 0

    async def read(pool: BodyPool, rng: random.Random) -> None:
        nonlocal most
        share, size = pool.share(""), 0
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
        shares = [pool.share("") for _ in range(4)]
        for share in shares[:3]:
            await share.grow_to(LARGEST)
        with pytest.raises(Overloaded) as refused:
            await shares[3].grow_to(LARGEST)
        assert refused.value.code == "bodies_overloaded"
        # What is small is not counted.
        await pool.share("").grow_to(SMALL_BYTES)
        shares[1].release()
        await shares[3].grow_to(LARGEST)
        for share in shares:
            share.release()

    run(work)


def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_pool, "MAX_WAITING", 2)

    async def work(pool: BodyPool) -> None:
        full = [pool.share("") for _ in range(3)]
        for share in full:
            await share.grow_to(LARGEST)
        waiting = [pool.share("") for _ in range(2)]
        tasks = [asyncio.create_task(share.grow_to(LARGEST)) for share in waiting]
        await asyncio.sleep(0)
        refused = pool.share("")
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


@pytest.mark.parametrize("num_alices", [4, 40])
def test_half_bodies_of_one_tenant_leave_room_for_anothers(
    monkeypatch: pytest.MonkeyPatch, num_alices: int
) -> None:
    """However many they are, the oldest of them comes to its end, and the others get no more than a share."""
    monkeypatch.setattr(body_pool, "WAIT_S", 0.05)
    monkeypatch.setattr(body_pool, "MAX_WAITING", 16)

    async def main() -> None:
        pool = BodyPool(lambda: True, largest=LARGEST, size=SIZE)
        half = [pool.share("alice") for _ in range(num_alices)]
        tasks = [asyncio.create_task(share.grow_to(LARGEST * 3 // 4)) for share in half]
        await asyncio.sleep(0)
        for _ in range(10):
            bob = pool.share("bob")
            growing = asyncio.create_task(bob.grow_to(LARGEST // 2))
            await asyncio.sleep(0)
            assert growing.done(), "it waits"
            await growing
            bob.release()
        await half[0].grow_to(LARGEST)
        refused = [error for error in await asyncio.gather(*tasks, return_exceptions=True) if error]
        assert refused
        assert {type(error) for error in refused} == {RateLimited}
        for share in half:
            share.release()
        assert not pool.num_bytes

    asyncio.run(main())


def test_who_waits_for_its_own_bodies_holds_up_nobody_younger() -> None:
    async def main() -> None:
        pool = BodyPool(lambda: True, largest=LARGEST, size=SIZE)
        alices = [pool.share("alice") for _ in range(4)]
        for share, size in zip(alices, (LARGEST, LARGEST, LARGEST // 4), strict=False):
            await share.grow_to(size)
        carol, bob = pool.share("carol"), pool.share("bob")
        await carol.grow_to(LARGEST // 2)
        tasks = [asyncio.create_task(share.grow_to(LARGEST // 2)) for share in (alices[3], bob)]
        await asyncio.sleep(0)
        assert (alices[3].held, bob.held) == (0, 0)
        carol.release()
        await tasks[1]
        assert (alices[3].held, bob.held) == (0, LARGEST // 2)
        for share in (*alices[:3], bob):
            share.release()
        await tasks[0]
        alices[3].release()

    asyncio.run(main())


def test_a_share_is_given_back_once() -> None:
    async def work(pool: BodyPool) -> None:
        share: BodyShare = pool.share("")
        await share.grow_to(LARGEST)
        share.release()
        share.release()

    run(work)
