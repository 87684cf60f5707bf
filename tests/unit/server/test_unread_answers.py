"""UnreadAnswers: answers that nobody reads are bounded, at the cost of those who do not read."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, cast
from unittest.mock import Mock

import pytest

from carousel.server.answer.sse import AnswerWriter
from carousel.server.http.piece_writer import PieceWriter
from carousel.server.tenancy import unread_answers
from carousel.server.tenancy.entrance import Entrance
from carousel.server.tenancy.unread_answers import CLOSED_AT_ONCE, KeptAnswer, UnreadAnswers

SIZE = 100


class JumpingSelector(selectors.DefaultSelector):
    """Selector that never waits for a time to come: its clock goes there instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout is not None:
            self.now_s += max(timeout, 0.0)
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """Event loop of a test that waits for timers alone: no time passes, however long they are."""

    def __init__(self) -> None:
        self._clock = JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**given: Any) -> None:
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            runner.run(test(**given))

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
async def test_when_twice_the_limit_is_unread_the_oldest_who_read_nothing_are_closed_soon() -> None:
    """They had a quarter of a second, in which thousands of connections were written 50 MB more."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(unread_answers, "GRACE_S", 60.0)
        patched.setattr(unread_answers, "SHORT_GRACE_S", 60.0)
        unread = UnreadAnswers(SIZE)
        reading, *flood = (paused(unread, "", 10) for _ in range(3 * SIZE // 10))
        reading.num_bytes = 5
        assert not any(each.is_closed for each in flood)
        await _end_of(flood[0])
        assert unread.num_bytes <= 3 * SIZE // 2
        num_closed = sum(each.is_closed for each in flood)
        assert [each.is_closed for each in flood] == [True] * num_closed + [False] * (len(flood) - num_closed)
        assert not reading.is_closed
        assert not paused(unread, "", 10).is_closed


@in_a_loop
async def test_what_is_unread_within_the_limit_stays() -> None:
    unread = UnreadAnswers(SIZE)
    transport = paused(unread, "", SIZE)
    await asyncio.sleep(0.1)
    assert not transport.is_closed
    unread.resume(cast(Any, transport))
    assert unread.num_bytes == 0


class Kept(KeptAnswer):
    """An answer of so many bytes that waits from now on."""

    def __init__(self, unread: UnreadAnswers, num_bytes: int, tenant: str = "") -> None:
        super().__init__(unread, cast(Any, Transport(0)), tenant, lambda: num_bytes)

    @property
    def is_closed(self) -> bool:
        return cast(Transport, self.transport).is_closed

    async def write(self, num_bytes: int, seconds: float) -> None:
        """Write a piece for which its caller has room only after so many seconds."""
        with self.waits():
            await asyncio.sleep(seconds)
        self.note(num_bytes)


@in_a_loop
async def test_an_answer_that_is_kept_until_it_is_read_counts_while_it_waits() -> None:
    unread = UnreadAnswers(SIZE)
    kept = Kept(unread, SIZE)
    writing = asyncio.create_task(kept.write(1, 0.02))
    await asyncio.sleep(0)
    assert unread.num_bytes == SIZE
    await writing
    assert unread.num_bytes == 0
    assert not kept.is_closed


@in_a_loop
async def test_who_reads_little_of_an_answer_that_is_kept_is_closed() -> None:
    """It reads a piece now and then, each time before it would have been closed for reading nothing."""
    unread = UnreadAnswers(SIZE)
    kept, fast = Kept(unread, SIZE), Kept(unread, SIZE)

    async def trickle() -> None:
        while not kept.is_closed:
            await kept.write(1, 0.02)

    async def read() -> None:
        while not kept.is_closed:
            await fast.write(100, 0.02)

    async with asyncio.timeout(10):
        await asyncio.gather(trickle(), read())
    assert not fast.is_closed


@in_a_loop
async def test_who_reads_little_at_a_time_may_be_closed_whenever_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its waits counted from zero again and again, so that few of many looks found it slow."""
    now_s = 0.0
    monkeypatch.setattr(unread_answers, "_now_s", lambda: now_s)
    monkeypatch.setattr(unread_answers, "GRACE_S", 5.0)
    kept = Kept(UnreadAnswers(SIZE), 1)
    for number in range(40):
        with kept.waits():
            assert kept.waited_s(now_s) >= min(number, 5.0)
            assert kept.rate(now_s) <= 1.0
            now_s += 1.0
        kept.note(1)
    for _ in range(40):
        with kept.waits():
            now_s += 1.0
        kept.note(100)
    assert kept.rate(now_s) > 80.0, "what it read long ago counts little"


@in_a_loop
async def test_events_that_are_written_without_waiting_are_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a stream's are, so that a caller who read it fast was closed as one who did not."""
    now_s, is_full = 0.0, False
    monkeypatch.setattr(unread_answers, "_now_s", lambda: now_s)

    async def send(message: Any) -> None:
        nonlocal now_s
        now_s += message["type"] == "http.response.body"

    kept = Kept(UnreadAnswers(SIZE), SIZE)
    state: dict[str, Any] = {
        "send_body": send,
        "write_chunk": lambda _: not is_full,
        "can_write": lambda: not is_full,
    }
    state["transport"] = Mock(PieceWriter)
    writer = AnswerWriter(send, state, kept, Entrance(), [])
    for is_full in (True, False) * 10:
        data = b"x" if is_full else b"x" * 100
        if not writer.try_write(data):
            await writer.write(data)
    with kept.waits():
        assert kept.rate(now_s) > 80.0


@in_a_loop
async def test_a_connection_with_a_kept_answer_is_closed_once() -> None:
    """The written part of a kept answer counts beside it. Others were closed for bytes of a closed one."""
    unread = UnreadAnswers(SIZE)
    answers = [Kept(unread, 30) for _ in range(2)]
    writing = [asyncio.create_task(each.write(1, 60)) for each in answers]
    await asyncio.sleep(0)
    for each in answers:
        cast(Transport, each.transport).num_bytes = 30
        unread.pause(each.transport, "")
    async with asyncio.timeout(10):
        while not any(each.is_closed for each in answers):
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert sum(each.is_closed for each in answers) == 1
    assert unread.num_bytes == 60
    for task in writing:
        task.cancel()


@in_a_loop
async def test_what_was_read_long_ago_does_not_keep_an_answer_that_is_read_no_more() -> None:
    unread = UnreadAnswers(SIZE)
    kept = Kept(unread, 2 * SIZE)
    kept.note(1_000_000)
    writing = asyncio.create_task(kept.write(1, 60))
    async with asyncio.timeout(10):
        while not kept.is_closed:
            await asyncio.sleep(0.01)
    writing.cancel()


@in_a_loop
async def test_while_far_too_much_is_unread_callers_have_less_time_to_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unread_answers, "GRACE_S", 3600.0)
    monkeypatch.setattr(unread_answers, "SHORT_GRACE_S", 0.05)
    unread = UnreadAnswers(SIZE)
    transports = [paused(unread, "", 60) for _ in range(2)]
    await asyncio.sleep(0.1)
    assert not any(each.is_closed for each in transports)
    transports.append(paused(unread, "", 60))
    await _end_of(transports[0])
    await asyncio.sleep(0.1)
    assert sum(each.is_closed for each in transports) == 1, "the others have their time"


def test_of_many_that_do_not_read_a_few_are_closed_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """All were looked at again for each one that was closed: 45 ms in one turn for 500."""
    num_connections, num_rated = 10 * CLOSED_AT_ONCE, 0
    rate = unread_answers._Written.rate

    def counted(self: unread_answers._Written, now_s: float) -> float:
        nonlocal num_rated
        num_rated += 1
        return rate(self, now_s)

    monkeypatch.setattr(unread_answers._Written, "rate", counted)

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
    assert num_rated <= 11 * num_connections
