"""FairThreads: threads of an HTTP process that work for its tenants in turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from carousel.client.core.mailbox import call_in_loop
from carousel.server.tenancy.fair_turns import FairTurns
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
        self._turns = FairTurns(num_threads)
        self._waiting = Shares(MAX_WAITING_CHARS if max_waiting is None else max_waiting, is_divided)
        self._queue = queue

    async def run(self, tenant: str, work: Callable[[], T], size: int) -> T:
        """Return what `work` returns, called in one of the threads. A tenant without waiting calls is let in,
        whatever the size of its call. size: in characters, or in the unit of `max_waiting`.

        Raises: RateLimited if too much of this tenant waits, Overloaded if too much of all waits.
        """
        cost, waiting = size + SIZE_PER_CALL, self._waiting
        if waiting.of(tenant) and not (waiting.has_room(cost) and waiting.may_have(tenant, cost)):
            raise self._refusal(tenant, cost)
        waiting.take(tenant, cost)
        try:
            await self._turns.take(tenant)
            try:
                future = self._threads.submit(work)
            except RuntimeError:  # the system has no thread for it
                self._turns.pass_on()
                raise
            loop = asyncio.get_running_loop()
            # Not at the caller's end: work whose caller has left keeps the thread until it ends.
            future.add_done_callback(lambda _: call_in_loop(loop, FairTurns.pass_on, self._turns))
            return await asyncio.wrap_future(future)
        finally:
            waiting.give_back(tenant, cost)

    def _refusal(self, tenant: str, cost: int) -> Overloaded:
        what, threads = self._queue
        if not self._waiting.may_have(tenant, cost):
            return RateLimited(f"too many {what} of this API key wait for {threads}; try again later")
        return Overloaded(f"too many {what} wait for {threads}; try again later")
