"""QuietStreams: which streams get a line, when, and how many at a time."""

from __future__ import annotations

import asyncio
import weakref
from contextlib import ExitStack
from typing import cast

from carousel.server.request.quiet_streams import AT_ONCE, QuietStreams
from carousel.server.request.sse import AnswerWriter

SHORT_S = 0.002


class Writer:
    def __init__(self) -> None:
        self.num_written = 0
        self.num_lines = 0

    def write_now(self, line: bytes) -> None:
        self.num_lines += 1


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
