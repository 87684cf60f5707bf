"""FairThreads: threads of an HTTP process that work for its tenants in turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from carousel.client.core.mailbox import call_in_loop
from carousel.server.tenancy.shares import Shares
from runtime.base.errors import Overloaded, RateLimited

T = TypeVar("T")

MAX_WAITING_CHARS = 1 << 24
"""Maximum number of characters, or ids, that wait for threads by default; further calls are refused. The
number of prompts is not limited: a thousand short ones at once are a usual load and take no time.
"""
SIZE_PER_CALL = 1 << 10
"""Cost of a call in addition to the size of its work."""


class FairThreads:
    """Threads of one event loop. The calls of one tenant keep their order, and tenants take turns."""

    def __init__(
        self,
        num_threads: int,
        name: str,
        is_divided: Callable[[], bool],
        *,
        max_waiting: int | None = None,
        queue: tuple[str, str] = ("prompts", "the tokenizer of the HTTP server"),
    ) -> None:
        """`is_divided` returns True if there are several tenants. `max_waiting` is the limit of the
        sizes that wait, in any unit; None: MAX_WAITING_CHARS. `queue` names, for errors, the calls that wait
        and the threads.
        """
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._num_free = num_threads
        self._lanes: dict[str, deque[asyncio.Future[None]]] = {}
        """Calls that wait for a thread, by tenant; the tenant whose turn it is comes first."""
        self._waiting = Shares(MAX_WAITING_CHARS if max_waiting is None else max_waiting, is_divided)
        self._queue = queue

    async def run(self, tenant: str, work: Callable[[], T], size: int) -> T:
        """Do the work in one of the threads. A tenant without waiting calls is let in, whatever the size of
        its call. size: in characters, or in the unit of `max_waiting`.

        Raises: RateLimited if too much of this tenant waits, Overloaded if too much of all waits.
        """
        cost, waiting = size + SIZE_PER_CALL, self._waiting
        if waiting.of(tenant) and not (waiting.has_room(cost) and waiting.may_have(tenant, cost)):
            raise self._refusal(tenant, cost)
        waiting.take(tenant, cost)
        try:
            await self._turn_of(tenant)
            future = self._threads.submit(work)
            loop = asyncio.get_running_loop()
            # Not at the caller's end: work whose caller has left keeps the thread until it ends.
            future.add_done_callback(lambda _: call_in_loop(loop, self._pass_on, None))
            return await asyncio.wrap_future(future)
        finally:
            waiting.give_back(tenant, cost)

    def _refusal(self, tenant: str, cost: int) -> Overloaded:
        what, threads = self._queue
        if not self._waiting.may_have(tenant, cost):
            return RateLimited(f"too many {what} of this API key wait for {threads}; try again later")
        return Overloaded(f"too many {what} wait for {threads}; try again later")

    async def _turn_of(self, tenant: str) -> None:
        """Wait for a thread."""
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._lanes.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._pass_on()  # the thread had just been assigned to it
            raise

    def _pass_on(self, _: object = None) -> None:
        """Give a free thread to the next call."""
        while self._lanes:
            tenant, line = next(iter(self._lanes.items()))
            del self._lanes[tenant]
            turn = line.popleft()
            if line:
                self._lanes[tenant] = line
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
