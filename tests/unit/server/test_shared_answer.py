"""The answer that many ask for: it is made once for all of them, and not too often."""

from __future__ import annotations

import asyncio

import pytest

from carousel.server.admin.shared_answer import SharedAnswer
from runtime.base.errors import RequestError

INTERVAL_S = 0.25


class Scheduler:
    """Answers as they are asked for, at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_asked = 0
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def ask(self) -> bytes:
        self.num_asked += 1
        number = self.num_asked
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return b"%d" % number


def test_an_answer_is_shared_until_it_is_old() -> None:
    async def look() -> None:
        scheduler = Scheduler()
        shared = SharedAnswer(scheduler.ask, INTERVAL_S, lambda: scheduler.now)
        assert await shared.read() == b"1"
        scheduler.now = INTERVAL_S * 0.9
        assert await shared.read() == b"1"
        scheduler.now = INTERVAL_S
        assert await shared.read() == b"2"

    asyncio.run(look())


def test_who_asks_while_a_question_is_under_way_waits_for_it() -> None:
    async def look() -> None:
        scheduler = Scheduler()
        scheduler.may_answer.clear()
        shared = SharedAnswer(scheduler.ask, INTERVAL_S, lambda: scheduler.now)
        readers = [asyncio.create_task(shared.read()) for _ in range(5)]
        await asyncio.sleep(0)
        scheduler.now = 100.0
        readers.append(asyncio.create_task(shared.read()))
        await asyncio.sleep(0)
        readers[0].cancel()  # the others still get it
        scheduler.may_answer.set()
        assert await asyncio.gather(*readers[1:]) == [b"1"] * 5
        assert scheduler.num_asked == 1

    asyncio.run(look())


def test_a_failure_is_asked_again_no_sooner_than_an_answer() -> None:
    async def look() -> None:
        scheduler = Scheduler()
        scheduler.error = RequestError("no", status=503)
        shared = SharedAnswer(scheduler.ask, INTERVAL_S, lambda: scheduler.now)
        for _ in range(3):
            with pytest.raises(RequestError):
                await shared.read()
        assert scheduler.num_asked == 1
        scheduler.error, scheduler.now = None, 1.0
        assert await shared.read() == b"2"

    asyncio.run(look())


def test_without_an_interval_only_those_who_ask_meanwhile_share_an_answer() -> None:
    async def look() -> None:
        scheduler = Scheduler()
        shared = SharedAnswer(scheduler.ask)
        assert await asyncio.gather(*[shared.read() for _ in range(5)]) == [b"1"] * 5
        assert await shared.read() == b"2"

    asyncio.run(look())
