"""RuntimeQuestions: the part of GenerationExecutor that asks its runtime for statistics and for calls of
ranks. Thread-safe.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from carousel.client.control_calls import CALL_GRACE_S, CONTROL_TIMEOUT_S, ControlCalls
from carousel.client.core.control import check_call, control_result, documented_as
from carousel.client.core.mailbox import deadline_after
from carousel.client.core.session import Session
from carousel.client.core.stats import AskNow, AsyncStatsStream, StatsOp, StatsPlace, StatsStream
from carousel.trtllm.result_mailbox import ResultMailbox
from runtime.wire.stats import IterationStats, RequestStatsPerIteration


@dataclass(frozen=True, slots=True)
class ExecutorStats:
    """Figures of the scheduler, at most one step old."""

    num_active_requests: int
    """Number of requests that are admitted and not finished."""
    num_queued_requests: int
    """Number of requests that wait to be admitted, for the first time or after a retraction."""
    num_received_requests: int
    """Number of requests that the scheduler has received since its start."""
    current_batch_size: int
    """Number of sequences in the latest step; 0 if there was nothing to compute."""
    num_free_pages: int
    num_pages: int


class RuntimeQuestions:
    def __init__(self, session: Session[ResultMailbox]) -> None:
        self._asked = session
        self._stats_lock = threading.Lock()
        self._iterations = StatsPlace.of_iterations()
        self._requests = StatsPlace.of_requests()

    def get_latest_iteration_stats(self, timeout: float = CONTROL_TIMEOUT_S) -> list[IterationStats]:
        """Return the statistics of the iterations since this executor's last call; the first call returns all
        that are kept.

        Raises: RequestError (stats_off if none are kept), RingClosed, TimeoutError.
        """
        with self._stats_lock:
            return self._iterations.read(self.ask_stats(timeout))

    def get_latest_request_stats(self, timeout: float = CONTROL_TIMEOUT_S) -> list[RequestStatsPerIteration]:
        """Return what `get_latest_iteration_stats` does, for each live request. Needs
        `request_stats_max_iterations`.
        """
        with self._stats_lock:
            return self._requests.read(self.ask_stats(timeout))

    def get_stats(self, timeout: float | None = None) -> StatsStream:
        """Return an iterator over the statistics of each iteration as it ends, for one thread. It stops when
        none has come for `timeout` seconds.
        """
        return StatsStream(
            lambda after, limit: self._ask("iteration_stats", after, limit, wait=True), timeout
        )

    def aget_stats(self, timeout: float | None = None) -> AsyncStatsStream:
        """Return an async iterator like that of `get_stats`."""

        async def ask(after: int, limit: float | None) -> Any:
            deadline = deadline_after(limit, asyncio.get_running_loop().time())
            with self._asked.asking_stats("iteration_stats", after, wait=True) as mailbox:
                async with asyncio.timeout_at(deadline):
                    await mailbox.wait_async(lambda: mailbox.num_put > 0)
                return control_result(mailbox.take_now()[0])

        return AsyncStatsStream(ask, timeout)

    @documented_as(ControlCalls.collective_rpc)
    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float = CONTROL_TIMEOUT_S,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        call = check_call(method, args, kwargs, timeout, ranks)
        deadline = deadline_after(timeout + CALL_GRACE_S, time.monotonic())
        values: list[Any] = _answer(self._asked.asking("collective_rpc", call=call), deadline)
        return values

    def ask_stats(self, timeout: float) -> AskNow:
        """Return a call that asks for statistics, for a StatsPlace of the caller's own."""
        return lambda op, after: self._ask(op, after, timeout)

    def _ask(self, op: StatsOp, after: int, timeout: float | None, *, wait: bool = False) -> Any:
        deadline = deadline_after(timeout, time.monotonic())
        return _answer(self._asked.asking_stats(op, after, wait=wait), deadline)


def _answer(asking: AbstractContextManager[ResultMailbox], deadline: float | None) -> Any:
    """Return the body of the one reply. Raises the error that the reply carries, or TimeoutError at the
    deadline.
    """
    with asking as mailbox:
        mailbox.wait(lambda: mailbox.num_put > 0, deadline)
        return control_result(mailbox.take_now()[0])
