"""Concurrent calls or streams for the prompts of one request: begun one after another, ended a few at a time.

A request may have two thousand prompts. To begin a task for each of them, or to cancel them all when one has
failed or the caller has left, would hold up the event loop for 15 to 30 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeAlias, TypeVar

from carousel.client.core.result import Delta
from carousel.client.core.streams import AsyncResultStream

T = TypeVar("T")

DeltaBatch: TypeAlias = list[tuple[int, Delta]]
"""Pairs of a stream's number and a delta: all that are there at one time."""
DELTAS_OF_EACH = 2
"""Number of deltas of each stream that wait for the reader here. Further ones wait where they are counted."""
ENDED_AT_ONCE = 64
"""Maximum number of calls that are cancelled in one turn of the event loop: about 1 ms."""


def merged(
    streams: Sequence[AsyncResultStream], begin: Callable[[int], Awaitable[None]]
) -> AsyncGenerator[DeltaBatch]:
    """Yield batches until all streams have ended. Raises the first error of any. Closing it closes all
    streams. `begin` is awaited before a request of several is sent, with its number.
    """
    return _of_one(streams[0]) if len(streams) == 1 else _of_several(streams, begin)


async def _of_one(stream: AsyncResultStream) -> AsyncGenerator[DeltaBatch]:
    async with stream:
        batch: DeltaBatch = []
        async for delta in stream:
            batch.append((0, delta))
            if not stream.has_news:
                yield batch
                batch = []


async def _of_several(
    streams: Sequence[AsyncResultStream], begin: Callable[[int], Awaitable[None]]
) -> AsyncGenerator[DeltaBatch]:
    news: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(DELTAS_OF_EACH * len(streams))

    async def pump(number: int, stream: AsyncResultStream) -> None:
        try:
            async for delta in stream:
                if news.full():
                    await news.put((number, delta))
                else:
                    news.put_nowait((number, delta))
            await news.put(None)
        except Exception as error:
            await news.put(error)

    async def begin_all() -> None:
        try:
            for number, stream in enumerate(streams):
                await begin(number)
                pumps.append(asyncio.create_task(pump(number, stream)))
        except Exception as error:
            await news.put(error)

    pumps: list[asyncio.Task[None]] = []
    beginning = asyncio.create_task(begin_all())
    try:
        num_live = len(streams)
        while num_live:
            batch: DeltaBatch = []
            items = [await news.get()]
            while not news.empty():
                items.append(news.get_nowait())
            for item in items:
                if isinstance(item, Exception):
                    if batch:
                        yield batch
                    raise item
                if item is None:
                    num_live -= 1
                else:
                    batch.append(item)
            if batch:
                yield batch
    finally:
        await end_tasks([beginning])
        await end_tasks(pumps)
        for stream in streams:
            await stream.aclose()


async def all_results(
    count: int, begin: Callable[[int], Awaitable[None]], call: Callable[[int], Coroutine[Any, Any, T]]
) -> list[T]:
    """Await so many calls concurrently. `begin` is awaited before each is made, with its number. Raises the
    first error of any, and cancels the others.
    """
    if count == 1:
        await begin(0)
        return [await call(0)]
    tasks: list[asyncio.Task[T]] = []
    news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    num_left = count
    failure: BaseException | None = None

    def note(error: BaseException | None) -> None:
        nonlocal failure
        if not news.done() and (error is not None or not num_left):
            failure = error
            news.set_result(None)

    def note_end(task: asyncio.Task[T]) -> None:
        nonlocal num_left
        num_left -= 1
        note(None if task.cancelled() else task.exception())

    async def begin_all() -> None:
        try:
            for number in range(count):
                await begin(number)
                tasks.append(asyncio.create_task(call(number)))
                tasks[-1].add_done_callback(note_end)
        except Exception as error:
            note(error)

    beginning = asyncio.create_task(begin_all())
    try:
        await news
    finally:
        await end_tasks([beginning])
        await end_tasks(tasks)
    if failure is None:
        return [task.result() for task in tasks]
    try:
        raise failure
    finally:
        # The error refers to this frame: a cycle for the collector.
        failure = None
        tasks.clear()


async def end_tasks(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks that have not ended, a few in a turn of the event loop, and wait for their end."""
    left = [task for task in tasks if not task.done()]
    try:
        while left:
            some = left[-ENDED_AT_ONCE:]
            for task in some:
                task.cancel()
            await asyncio.wait(some)
            del left[-ENDED_AT_ONCE:]
    finally:
        for task in left:  # there is no time for turns: this process is about to end
            task.cancel()
