"""Turns of an event loop in which many waiting tasks go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable


async def gone_on_in_turns(
    waits: Iterable[Awaitable[object]],
    leaving: Collection[int] = (),
    *,
    when_all_wait: Callable[[], object] = lambda: None,
) -> list[list[int]]:
    """The numbers of those that are past their wait, for each turn in which there were any. All have begun to
    wait when `when_all_wait` is called and `leaving` are cancelled.
    """
    turns = [list[int]()]
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))

    async def go_on_after(number: int, wait: Awaitable[object]) -> None:
        await wait
        turns[-1].append(number)

    tasks = [asyncio.ensure_future(go_on_after(number, wait)) for number, wait in enumerate(waits)]
    await asyncio.sleep(0)
    when_all_wait()
    for number in leaving:
        tasks[number].cancel()
    while not all(task.done() for task in tasks):
        turns.append([])
        await asyncio.sleep(0)
    assert not raised, "in a call of the loop's, which nobody awaits"
    return [turn for turn in turns if turn]
