"""The snapshot that many look at: one question to the scheduler for all of them, and not too often."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from carousel.server.admin.snapshot import INTERVAL_S, SharedSnapshot
from runtime.base.errors import RequestError


class Scheduler:
    """Snapshots as they are asked for, at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_asked = 0
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def ask(self) -> dict[str, Any]:
        self.num_asked += 1
        number = self.num_asked
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return {"number": number}


def test_an_answer_is_shared_until_it_is_old() -> None:
    async def look() -> None:
        scheduler = Scheduler()
        shared = SharedSnapshot(scheduler.ask, lambda: scheduler.now)
        assert await shared.read() == b'{"number":1}'
        scheduler.now = INTERVAL_S * 0.9
        assert await shared.read() == b'{"number":1}'
        scheduler.now = INTERVAL_S
        assert await shared.read() == b'{"number":2}'

    asyncio.run(look())


def test_who_asks_while_a_question_is_under_way_waits_for_it() -> None:
    async def look() -> None:
        scheduler = Scheduler()
        scheduler.may_answer.clear()
        shared = SharedSnapshot(scheduler.ask, lambda: scheduler.now)
        readers = [asyncio.create_task(shared.read()) for _ in range(5)]
        await asyncio.sleep(0)
        scheduler.now = 100.0
        readers.append(asyncio.create_task(shared.read()))
        await asyncio.sleep(0)
        readers[0].cancel()  # the others still get it
        scheduler.may_answer.set()
        assert await asyncio.gather(*readers[1:]) == [b'{"number":1}'] * 5
        assert scheduler.num_asked == 1

    asyncio.run(look())


def test_a_failure_is_asked_again_no_sooner_than_an_answer() -> None:
    async def look() -> None:
        scheduler = Scheduler()
        scheduler.error = RequestError("no", status=503)
        shared = SharedSnapshot(scheduler.ask, lambda: scheduler.now)
        for _ in range(3):
            with pytest.raises(RequestError):
                await shared.read()
        assert scheduler.num_asked == 1
        scheduler.error, scheduler.now = None, 1.0
        assert await shared.read() == b'{"number":2}'

    asyncio.run(look())
