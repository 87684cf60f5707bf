"""Merges the deltas of several streams, one for each prompt of a request, in the order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import TypeAlias

from carousel.client.core.result import Delta
from carousel.client.core.streams import AsyncResultStream

DELTAS_OF_EACH = 2
"""Number of deltas of each stream that wait for the reader here. Further ones wait where they are counted."""

DeltaBatch: TypeAlias = list[tuple[int, Delta]]
"""Pairs of a stream's number and a delta: all that are there at one time."""


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
            await begin(number)
            async for delta in stream:
                if news.full():
                    await news.put((number, delta))
                else:
                    news.put_nowait((number, delta))
            await news.put(None)
        except Exception as error:
            await news.put(error)

    async with AsyncExitStack() as stack:
        for stream in streams:
            await stack.enter_async_context(stream)
        pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
        for task in pumps:
            stack.callback(task.cancel)
        num_live = len(pumps)
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
