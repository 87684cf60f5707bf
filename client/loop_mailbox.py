"""LoopMailbox: what has arrived for one waiter in an event loop; Waker: who is woken when."""

from __future__ import annotations

import asyncio
from collections import deque

from client.session import Item

WAKES_PER_TURN = 64
"""Waiters woken in one turn of the loop: about 5 ms of work where each writes an event to its connection."""


class Waker:
    """Of one event loop. A step's output for a thousand streams is served in several turns, so that whatever
    else happens in the loop does not wait for all of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._line: deque[asyncio.Future[None]] = deque()
        self._num_woken = 0
        """In this turn."""

    def wake(self, waiter: asyncio.Future[None]) -> None:
        """In this turn, or in the order of the calls in the next ones."""
        if self._num_woken < WAKES_PER_TURN:
            self._wake_now(waiter)
        else:
            self._line.append(waiter)

    def _wake_now(self, waiter: asyncio.Future[None]) -> None:
        if not waiter.done():  # woken before, or its task was cancelled
            if not self._num_woken:
                self._loop.call_soon(self._begin_turn)
            self._num_woken += 1
            waiter.set_result(None)

    def _begin_turn(self) -> None:
        self._num_woken = 0
        while self._line and self._num_woken < WAKES_PER_TURN:
            self._wake_now(self._line.popleft())


class LoopMailbox:
    """A waiter's list, filled and emptied in the event loop."""

    __slots__ = ("_items", "_loop", "_waiter", "_waker")

    def __init__(self, loop: asyncio.AbstractEventLoop, waker: Waker) -> None:
        self._loop = loop
        self._waker = waker
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        self._items.append(item)
        if self._waiter is not None:
            self._waker.wake(self._waiter)
            self._waiter = None

    async def take(self) -> list[Item]:
        """Everything that is there, at least one item."""
        if not self._items:
            self._waiter = self._loop.create_future()
            await self._waiter
        items = self._items
        self._items = []
        return items
