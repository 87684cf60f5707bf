"""Waiting for what arrives: a thread until a deadline; in an event loop, in which turn it is woken."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection

import pytest

from carousel.client.core.mailbox import WAKES_PER_TURN, Item, Mailbox
from runtime.base.errors import RingClosed
from runtime.base.paced_line import PacedLine
from tests.harness.http.loop_turns import gone_on_in_turns

ARRIVED: list[Item] = [RingClosed("first"), RingClosed("second")]


async def woken_in_turns(num_waiters: int, leaving: Collection[int] = ()) -> list[list[int]]:
    """Return the numbers of the waiters that go on in each turn, after something has arrived for all at once.
    Those of `leaving` give up before they are woken.
    """
    line = PacedLine(WAKES_PER_TURN)
    mailboxes = [Mailbox(line) for _ in range(num_waiters)]

    async def wait(mailbox: Mailbox) -> None:
        assert await mailbox.take_async() == ARRIVED

    def arrive() -> None:
        for mailbox in mailboxes:
            for item in ARRIVED:
                mailbox.put(item)

    return await gone_on_in_turns(map(wait, mailboxes), leaving, when_all_wait=arrive)


def test_a_crowd_is_woken_a_part_in_each_turn_in_the_order_of_arrival() -> None:
    turns = asyncio.run(woken_in_turns(2 * WAKES_PER_TURN + 1))
    assert [len(turn) for turn in turns] == [WAKES_PER_TURN, WAKES_PER_TURN, 1]
    assert [number for turn in turns for number in turn] == list(range(2 * WAKES_PER_TURN + 1))


def test_who_has_left_takes_nobodys_place() -> None:
    leaving = frozenset(range(WAKES_PER_TURN, 3 * WAKES_PER_TURN))
    turns = asyncio.run(woken_in_turns(4 * WAKES_PER_TURN, leaving))
    assert [len(turn) for turn in turns] == [WAKES_PER_TURN, WAKES_PER_TURN]
    assert not leaving & set(turns[1])


def test_a_thread_gets_all_that_is_there_and_waits_no_longer_than_its_deadline() -> None:
    mailbox = Mailbox()
    assert mailbox.take_now() == []
    with pytest.raises(TimeoutError, match="time limit"):
        mailbox.take(time.monotonic() + 0.01)
    thread = threading.Thread(target=mailbox.put, args=(ARRIVED[0],))
    thread.start()
    assert mailbox.take(None) == ARRIVED[:1]
    thread.join()
    for item in ARRIVED:
        mailbox.put(item)
    assert mailbox.take(None) == ARRIVED
