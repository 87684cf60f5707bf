"""Mailbox: output that has arrived for one waiter, which may be a thread or a task of an event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias

from runtime.base.errors import CarouselError
from runtime.base.paced_line import PacedLine
from runtime.wire.messages import ControlReply, SequenceOutput, TensorEntry
from runtime.wire.transport import Frame

WAKES_PER_TURN = 64
"""Waiters that are woken in one turn of the loop, among those for which a step has output: about 5 ms of work
if each writes an event to its connection.
"""
CHARS_PER_WAKE = 16 << 10
"""Characters of an output that count as one more waiter."""
ITEM_BYTES = 280
"""Bytes that an output of one token has as objects, without logprobs."""


class TensorPart(NamedTuple):
    """Some rows of a tensor, as they arrived."""

    entry: TensorEntry
    data: Frame


class HandedOver(NamedTuple):
    """Mark behind messages that were handed to another thread: they have `num_bytes`."""

    num_bytes: int
    give_back: Callable[[int], None]
    """Function to be called with them once all waiters of these messages have been woken."""


Item: TypeAlias = SequenceOutput | TensorPart | ControlReply | CarouselError
Put: TypeAlias = Callable[[Item], None]
"""Function that keeps an item and wakes the waiter. Called where a session delivers."""


def deadline_after(timeout: float | None, now: float) -> float | None:
    """Return the time `timeout` seconds after `now`; None for no limit, and for a time beyond the range of
    clocks.
    """
    return None if timeout is None or timeout >= threading.TIMEOUT_MAX else now + timeout


class Mailbox:
    """Queue of items for one waiter. It is filled where a session delivers: for `take` in any thread, for
    `take_async` in the waiter's loop.
    """

    __slots__ = ("_items", "_line", "_waiter")

    def __init__(self, line: PacedLine | None = None) -> None:
        """line: shared by all mailboxes of an event loop, with a budget of WAKES_PER_TURN."""
        # SimpleQueue may be used from a destructor that interrupts another call of it; Queue may not.
        self._items: SimpleQueue[Item] = SimpleQueue()
        self._line = line
        self._waiter: asyncio.Future[None] | None = None

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the items that wait, beside their texts and logprobs."""
        return ITEM_BYTES * self._items.qsize()

    def put(self, item: Item) -> None:
        self._items.put(item)
        if self._waiter is not None and self._line is not None:
            cost = 1 + len(item.text) // CHARS_PER_WAKE if isinstance(item, SequenceOutput) else 1
            self._line.wake(self._waiter, cost)
            self._waiter = None

    def take_now(self) -> list[Item]:
        """Return all items that are there, possibly none. Only for one reader at a time."""
        return [self._items.get_nowait() for _ in range(self._items.qsize())]

    def take(self, deadline: float | None) -> list[Item]:
        """Wait for at least one item, and return all that are there. Raises TimeoutError at the deadline."""
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            first = self._items.get(timeout=remaining)
        except Empty:
            raise TimeoutError("the time limit of the call is over") from None
        return [first, *self.take_now()]

    async def take_async(self) -> list[Item]:
        """Wait for at least one item, and return all that are there."""
        if self._items.empty():
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        first = self._items.get_nowait()
        return [first] if self._items.empty() else [first, *self.take_now()]


class Mailboxes:
    """Factory of mailboxes for one event loop, which share its budget of wake-ups."""

    def __init__(self) -> None:
        self._line = PacedLine(WAKES_PER_TURN)

    def __call__(self) -> Mailbox:
        return Mailbox(self._line)

    def after_wakes(self, function: Callable[[], None]) -> None:
        """Call a function once all waiters have been woken for whom there is output now."""
        if self._line.is_empty:
            function()
            return
        last = asyncio.get_running_loop().create_future()
        last.add_done_callback(lambda _: function())
        self._line.wake(last)


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], argument: Any) -> None:
    """Call a function in an event loop from another thread, unless the loop has been closed."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        if not loop.is_closed():
            raise
        # The loop is closed, so no caller can wait there any more.
