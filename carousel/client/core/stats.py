"""Statistics as a client reads them: a place in the scheduler's records, and streams that move it forward.

Each reader has a place of its own, so none takes anything away from another. Who reads slowly misses the
oldest records, and is told how many; the scheduler waits for nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Literal, Self, TypeAlias, TypeVar

import msgspec

from runtime.wire.stats import IterationStats, IterationStatsPage, RequestStatsPage, RequestStatsPerIteration

StatsOp: TypeAlias = Literal["iteration_stats", "request_stats"]
R = TypeVar("R", IterationStats, RequestStatsPerIteration)

AskNow: TypeAlias = Callable[[StatsOp, int], Any]
"""Function of (operation, number of the last iteration seen) to the body of the answer."""


class StatsPlace(Generic[R]):
    """Place of a reader in the scheduler's records."""

    def __init__(self, op: StatsOp, page: Any, after: int = 0) -> None:
        self.op: StatsOp = op
        self.after = after
        self.num_dropped = 0
        """Iterations that were gone when they were asked for, but for those before the first question."""
        self.is_at_end = False
        self._page = page
        self._has_begun = after > 0

    @staticmethod
    def of_iterations(after: int = 0) -> StatsPlace[IterationStats]:
        return StatsPlace("iteration_stats", IterationStatsPage, after)

    @staticmethod
    def of_requests(after: int = 0) -> StatsPlace[RequestStatsPerIteration]:
        return StatsPlace("request_stats", RequestStatsPage, after)

    def take(self, body: Any) -> list[R]:
        """Return the records of an answer; the place is then behind them."""
        page = msgspec.convert(body, self._page)
        if page.newest < self.after:  # the scheduler was started again and counts anew
            self.after = 0
        elif self._has_begun:
            self.num_dropped += page.num_dropped
        self._has_begun = True
        if page.records:
            self.after = page.records[-1].iter
        self.is_at_end = self.after == page.newest
        return list(page.records)

    def read(self, ask: AskNow) -> list[R]:
        """Return all records that there are now."""
        records = self.take(ask(self.op, self.after))
        while not self.is_at_end:
            records += self.take(ask(self.op, self.after))
        return records


class _Unread:
    """The records of iterations that have come and are still to be read."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._place = StatsPlace.of_iterations()
        self._records: deque[IterationStats] = deque()

    @property
    def num_dropped(self) -> int:
        """Iterations that were missed because they were read too slowly."""
        return self._place.num_dropped


class StatsStream(_Unread):
    """Iterator over the records of iterations: those that are kept, then each new one. It ends when none has
    come for `timeout` seconds; never when that is None.
    """

    def __init__(self, ask: Callable[[int, float | None], Any], timeout: float | None) -> None:
        """Begin at a place. `ask` waits for something newer than an iteration, for so many seconds; it raises
        TimeoutError.
        """
        super().__init__(timeout)
        self._ask = ask

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> IterationStats:
        while not self._records:
            try:
                body = self._ask(self._place.after, self._timeout)
            except TimeoutError:
                raise StopIteration from None
            self._records.extend(self._place.take(body))
        return self._records.popleft()


class AsyncStatsStream(_Unread):
    """Async iterator over the records of iterations, like StatsStream."""

    def __init__(self, ask: Callable[[int, float | None], Awaitable[Any]], timeout: float | None) -> None:
        super().__init__(timeout)
        self._ask = ask

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> IterationStats:
        while not self._records:
            try:
                body = await self._ask(self._place.after, self._timeout)
            except TimeoutError:
                raise StopAsyncIteration from None
            self._records.extend(self._place.take(body))
        return self._records.popleft()
