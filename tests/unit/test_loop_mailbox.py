"""Who waits in an event loop for what arrives, and in which turn of the loop it is woken."""

from __future__ import annotations

import asyncio
from typing import Any

from client.loop_mailbox import WAKES_PER_TURN, LoopMailbox, Waker


async def woken_in_turns(num_waiters: int, leaving: frozenset[int] = frozenset()) -> list[list[int]]:
    """For whom something arrives at once; `leaving` give up before they are woken."""
    loop = asyncio.get_running_loop()
    waker, turns = Waker(loop), [list[int]()]
    mailboxes = [LoopMailbox(loop, waker) for _ in range(num_waiters)]

    async def wait(number: int) -> None:
        items: list[Any] = await mailboxes[number].take()
        assert items == [number, "more"]
        turns[-1].append(number)

    tasks = [asyncio.ensure_future(wait(number)) for number in range(num_waiters)]
    await asyncio.sleep(0)
    for number, mailbox in enumerate(mailboxes):
        mailbox.put(number)  # type: ignore[arg-type]
        mailbox.put("more")  # type: ignore[arg-type]
    for number in leaving:
        tasks[number].cancel()
    while not all(task.done() for task in tasks):
        turns.append([])
        await asyncio.sleep(0)
    return [turn for turn in turns if turn]


def test_a_crowd_is_woken_a_part_in_each_turn_in_the_order_of_arrival() -> None:
    turns = asyncio.run(woken_in_turns(2 * WAKES_PER_TURN + 1))
    assert [len(turn) for turn in turns] == [WAKES_PER_TURN, WAKES_PER_TURN, 1]
    assert [number for turn in turns for number in turn] == list(range(2 * WAKES_PER_TURN + 1))


def test_who_has_left_takes_nobodys_place() -> None:
    leaving = frozenset(range(WAKES_PER_TURN, 3 * WAKES_PER_TURN))
    turns = asyncio.run(woken_in_turns(4 * WAKES_PER_TURN, leaving))
    assert [len(turn) for turn in turns] == [WAKES_PER_TURN, WAKES_PER_TURN]
