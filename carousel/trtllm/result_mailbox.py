"""ResultMailbox: what has come for a GenerationResult and was not looked at yet; who waits is woken.

Filled by the I/O thread, read by any thread and any event loop. Knows when something ends, not what it means.
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
    """Mailbox that counts what it is given, so that a waiter can ask for more than it has seen, whoever else
    looks meanwhile.
    """

    __slots__ = ("_changed", "_listeners", "has_failed", "num_ended", "num_put")

    def __init__(self) -> None:
        super().__init__()
        self.num_put = 0
        self.num_ended = 0
        """Sequences whose terminal has come."""
        self.has_failed = False
        """One of them was an error, or an error has come instead of them: nothing follows."""
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
        """Wait until `condition` of this mailbox holds. Raises TimeoutError at the deadline."""
        with self._changed:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(condition, remaining):
                raise TimeoutError("the time limit of the call is over")

    async def wait_async(self, condition: Callable[[], bool]) -> None:
        """Await what `wait` waits for, from any event loop; a wait that is cancelled takes nothing away."""
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
        """Return a condition to wait for: more has been put in than these."""
        return lambda: self.num_put > num_seen

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Have `listener` called after each item from now on, in the I/O thread."""
        with self._changed:
            self._listeners.append(listener)
