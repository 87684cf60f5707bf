"""LoopMailbox: what has arrived for one waiter in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from carousel.client.core.open_request import Item
from runtime.base.paced_line import PacedLine

WAKES_PER_TURN = 64
"""Of the waiters that a step's output wakes, how many in one turn of the loop: about 5 ms of work
where each writes an event to its connection."""


class LoopMailbox:
    """A waiter's list, filled and emptied in the event loop."""

    __slots__ = ("_items", "_line", "_loop", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop, line: PacedLine) -> None:
        """line: of all mailboxes of the loop, with a budget of WAKES_PER_TURN."""
        self._loop = loop
        self._line = line
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        self._items.append(item)
        if self._waiter is not None:
            self._line.wake(self._waiter)
            self._waiter = None

    async def take(self) -> list[Item]:
        """Everything that is there, at least one item."""
        if not self._items:
            self._waiter = self._loop.create_future()
            await self._waiter
        items = self._items
        self._items = []
        return items


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], argument: Any) -> None:
    """Call a function of an event loop from another thread, unless the loop has been closed."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        if not loop.is_closed():
            raise
        # With the loop everybody has gone who could wait for this.
