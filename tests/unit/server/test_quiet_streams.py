"""QuietStreams: which streams get a line, when, and how many at a time."""

from __future__ import annotations

import asyncio
import weakref
from contextlib import ExitStack
from typing import Any, cast
from unittest.mock import Mock

from carousel.server.answer.quiet_streams import AT_ONCE, QuietStreams
from carousel.server.answer.sse import EVENT_HEADERS, AnswerWriter
from carousel.server.http.piece_writer import PieceWriter
from carousel.server.tenancy.entrance import Entrance
from carousel.server.tenancy.unread_answers import UnreadAnswers

SHORT_S = 0.002
WAIT_S = 10.0


class Writer:
    def __init__(self) -> None:
        self.num_written = 0
        self.num_lines = 0

    def write_now(self, line: bytes) -> None:
        self.num_lines += 1


class Caller:
    """Caller whose connection takes the head of an answer and then, until `reads` is set, nothing more."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.reads = asyncio.Event()

    def can_write(self) -> bool:
        return not self.received or self.reads.is_set()

    async def send(self, message: Any) -> None:
        if not self.can_write():
            await self.reads.wait()
        self.received.append(message["type"])

    def writer(self) -> AnswerWriter:
        state: dict[str, Any] = {
            "send_body": self.send,
            "write_chunk": lambda _: False,
            "can_write": self.can_write,
        }
        state["transport"] = Mock(PieceWriter)
        kept = UnreadAnswers().kept(cast(asyncio.Transport, None), "", lambda: 0)
        return AnswerWriter(self.send, state, kept, cast(Entrance, None), EVENT_HEADERS)


class Failing(Writer):
    def write_now(self, line: bytes) -> None:
        super().write_now(line)
        raise ValueError("a fault of this stream")


def writer_of(fake: Writer) -> AnswerWriter:
    return cast(AnswerWriter, fake)


def test_only_a_stream_that_waits_and_says_nothing_gets_lines() -> None:
    asyncio.run(_watch_three())


async def _watch_three() -> None:
    quiet = QuietStreams(SHORT_S)
    silent, spelling, speaking = Writer(), Writer(), Writer()
    with ExitStack() as stack:
        watched = [stack.enter_context(quiet.watched(writer_of(each), b"x")) for each in (silent, spelling)]
        watched[1].is_between = False
        stack.enter_context(quiet.watched(writer_of(speaking), b"x"))
        while silent.num_lines < 3:
            speaking.num_written += 1
            await asyncio.sleep(0)
    assert (spelling.num_lines, speaking.num_lines) == (0, 0)


def test_after_its_end_a_stream_gets_nothing() -> None:
    asyncio.run(_end_one_of_two())


async def _end_one_of_two() -> None:
    quiet, ended, other = QuietStreams(SHORT_S), Writer(), Writer()
    with quiet.watched(writer_of(other), b"x"):
        with quiet.watched(writer_of(ended), b"x"):
            while not ended.num_lines:
                await asyncio.sleep(0)
        num_lines = ended.num_lines, other.num_lines
        while other.num_lines < num_lines[1] + 2:
            await asyncio.sleep(0)
    assert ended.num_lines == num_lines[0]


def test_a_caller_who_takes_the_head_alone_gets_the_line_later() -> None:
    asyncio.run(asyncio.wait_for(_keep_open_without_room(), WAIT_S))


async def _keep_open_without_room() -> None:
    quiet, caller, other = QuietStreams(SHORT_S), Caller(), Writer()
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    with quiet.watched(caller.writer(), b"x"), quiet.watched(writer_of(other), b"x"):
        while other.num_lines < 3:
            await asyncio.sleep(SHORT_S)
        assert caller.received == ["http.response.start"]
        caller.reads.set()
        while len(caller.received) < 2:
            await asyncio.sleep(SHORT_S)
    assert not faults
    assert set(caller.received[1:]) == {"http.response.body"}


def test_others_are_looked_at_when_the_line_of_one_fails() -> None:
    asyncio.run(asyncio.wait_for(_fail_beside_another(), WAIT_S))


async def _fail_beside_another() -> None:
    quiet, failing, other = QuietStreams(SHORT_S), Failing(), Writer()
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    with quiet.watched(writer_of(failing), b"x"), quiet.watched(writer_of(other), b"x"):
        while other.num_lines < 3:
            await asyncio.sleep(SHORT_S)
    assert len(faults) == failing.num_lines


def test_streams_that_have_ended_are_let_go() -> None:
    asyncio.run(_end_within_a_round())


async def _end_within_a_round() -> None:
    quiet, writers = QuietStreams(SHORT_S), [Writer() for _ in range(3 * AT_ONCE)]
    seen = [weakref.ref(each) for each in writers]
    with ExitStack() as stack:
        for each in writers:
            stack.enter_context(quiet.watched(writer_of(each), b"x"))
        while not any(each.num_lines for each in writers):
            await asyncio.sleep(0)
    del stack, each
    writers.clear()
    await asyncio.sleep(5 * SHORT_S)
    assert not [each for each in seen if each() is not None]


def test_a_turn_of_the_loop_serves_a_few_streams() -> None:
    asyncio.run(_watch_many())


async def _watch_many() -> None:
    quiet, writers = QuietStreams(SHORT_S), [Writer() for _ in range(3 * AT_ONCE)]
    most = num_before = 0
    with ExitStack() as stack:
        for each in writers:
            stack.enter_context(quiet.watched(writer_of(each), b"x"))
        while not all(each.num_lines for each in writers):
            await asyncio.sleep(0)
            num_lines = sum(each.num_lines for each in writers)
            most, num_before = max(most, num_lines - num_before), num_lines
    assert 0 < most <= AT_ONCE
