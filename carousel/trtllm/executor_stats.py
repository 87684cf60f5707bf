"""StatsReader: the part of a GenerationExecutor that reads statistics. Any thread may call it."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import Any

from carousel.client.control_calls import CONTROL_TIMEOUT_S
from carousel.client.core.session import Session, control_result, deadline_after
from carousel.client.core.stats import AskNow, AsyncStatsStream, StatsOp, StatsPlace, StatsStream
from carousel.trtllm.result_mailbox import ResultMailbox
from runtime.wire.stats import IterationStats, RequestStatsPerIteration


@dataclass(frozen=True, slots=True)
class ExecutorStats:
    """Figures of the scheduler, at most a step old."""

    num_active_requests: int
    """Number of requests that are admitted and not finished."""
    num_queued_requests: int
    """Number of requests that wait to be admitted, for the first time or after a retraction."""
    num_received_requests: int
    """Number of requests that the scheduler has received since its start."""
    current_batch_size: int
    """Sequences in the newest step; 0 when there was nothing to compute."""
    num_free_pages: int
    num_pages: int


class StatsReader:
    def __init__(self, session: Session[ResultMailbox]) -> None:
        self._stats_session = session
        self._stats_lock = threading.Lock()
        self._iterations = StatsPlace.of_iterations()
        self._requests = StatsPlace.of_requests()

    def get_latest_iteration_stats(self, timeout: float = CONTROL_TIMEOUT_S) -> list[IterationStats]:
        """Return statistics of the iterations since the last call of this executor; the first time, of all
        that are kept.

        Raises: RequestError (stats_off when none are kept), RingClosed, TimeoutError.
        """
        with self._stats_lock:
            return self._iterations.read(self.ask_stats(timeout))

    def get_latest_request_stats(self, timeout: float = CONTROL_TIMEOUT_S) -> list[RequestStatsPerIteration]:
        """Same as `get_latest_iteration_stats`, for each live request. Kept with
        `request_stats_max_iterations`.
        """
        with self._stats_lock:
            return self._requests.read(self.ask_stats(timeout))

    def get_stats(self, timeout: float | None = None) -> StatsStream:
        """Return an iterator over each iteration's statistics as it ends, for one thread; it ends when none
        has come for `timeout` seconds.
        """
        return StatsStream(
            lambda after, limit: self._ask("iteration_stats", after, limit, wait=True), timeout
        )

    def aget_stats(self, timeout: float | None = None) -> AsyncStatsStream:
        """Return an async iterator like that of `get_stats`."""

        async def ask(after: int, limit: float | None) -> Any:
            deadline = deadline_after(limit, asyncio.get_running_loop().time())
            with self._stats_session.asking_stats("iteration_stats", after, wait=True) as mailbox:
                async with asyncio.timeout_at(deadline):
                    await mailbox.wait_async(lambda: mailbox.num_put > 0)
                return control_result(mailbox.take_now()[0])

        return AsyncStatsStream(ask, timeout)

    def ask_stats(self, timeout: float) -> AskNow:
        """Ask for statistics from a StatsPlace of the caller's own."""
        return lambda op, after: self._ask(op, after, timeout)

    def _ask(self, op: StatsOp, after: int, timeout: float | None, *, wait: bool = False) -> Any:
        deadline = deadline_after(timeout, time.monotonic())
        with self._stats_session.asking_stats(op, after, wait=wait) as mailbox:
            mailbox.wait(lambda: mailbox.num_put > 0, deadline)
            return control_result(mailbox.take_now()[0])
