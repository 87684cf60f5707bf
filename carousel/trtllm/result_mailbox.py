"""ResultMailbox: items for a GenerationResult that were not read yet; it wakes those who wait.

The I/O thread fills it, and any thread and event loop may read it. It notices ends, but does not interpret
items.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

from carousel.client.core.mailbox import Item, Mailbox
from runtime.base.errors import CarouselError
from runtime.wire.messages import SequenceOutput


class ResultMailbox(Mailbox):
    """Mailbox that counts its items, so that a waiter can wait for more than it has seen, regardless of other
    readers.
    """

    __slots__ = ("_changed", "_listeners", "has_failed", "num_ended", "num_put")

    def __init__(self) -> None:
        super().__init__()
        self.num_put = 0
        self.num_ended = 0
        """Number of sequences whose terminal has come."""
        self.has_failed = False
        """True after an error, of a sequence or instead of all; nothing follows."""
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []

    def put(self, item: Item) -> None:
        with self._changed:
            super().put(item)
            self.num_put += 1
            if isinstance(item, CarouselError):
                self.has_failed = True
            elif isinstance(item, SequenceOutput) and item.finish is not None:
                self.num_ended += 1
                self.has_failed = self.has_failed or item.finish.reason == "error"
            self._changed.notify_all()
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()

    def wait(self, condition: Callable[[], bool], deadline: float | None) -> None:
        """Wait until `condition` of this mailbox is true. Raises TimeoutError at the deadline."""
        with self._changed:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(condition, remaining):
                raise TimeoutError("the time limit of the call is over")

    async def wait_async(self, condition: Callable[[], bool]) -> None:
        """Await what `wait` waits for, from any event loop. A cancelled wait takes no item away."""
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def wake() -> None:
            # A loop that has been closed has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(changed.set)

        self.add_listener(wake)
        try:
            while not condition():
                await changed.wait()
                changed.clear()
        finally:
            with self._changed:
                self._listeners.remove(wake)

    def has_more_than(self, num_seen: int) -> Callable[[], bool]:
        """Return a condition for `wait`: more than `num_seen` items were put in."""
        return lambda: self.num_put > num_seen

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the I/O thread after each item from now on."""
        with self._changed:
            self._listeners.append(listener)
