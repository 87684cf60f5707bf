"""Statistics as a client reads them: a reader's position in the scheduler's records, and streams that advance
it. Readers are independent. A slow reader misses the oldest records and is told how many; the scheduler never
waits for a reader.
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
"""Function from (operation, number of the last iteration seen) to the body of the answer."""


class StatsPlace(Generic[R]):
    """Position of a reader in the scheduler's records."""

    def __init__(self, op: StatsOp, page: Any, after: int = 0) -> None:
        self.op: StatsOp = op
        self.after = after
        self.num_dropped = 0
        """Number of iterations that were dropped before they were read, not counting those before the first
        call.
        """
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
        """Return the records of an answer, and move the position behind them."""
        page = msgspec.convert(body, self._page)
        if page.newest < self.after:  # the scheduler was restarted and counts from the beginning
            self.after = 0
        elif self._has_begun:
            self.num_dropped += page.num_dropped
        self._has_begun = True
        if page.records:
            self.after = page.records[-1].iter
        self.is_at_end = self.after == page.newest
        return list(page.records)

    def read(self, ask: AskNow) -> list[R]:
        """Return all records that are available now."""
        records = self.take(ask(self.op, self.after))
        while not self.is_at_end:
            records += self.take(ask(self.op, self.after))
        return records


class _Unread:
    """Records that have arrived and were not read yet."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._place = StatsPlace.of_iterations()
        self._records: deque[IterationStats] = deque()

    @property
    def num_dropped(self) -> int:
        """Number of iterations that were missed by reading too slowly."""
        return self._place.num_dropped


class StatsStream(_Unread):
    """Iterator over the records of iterations: first those that are kept, then each new one. It ends when
    none has arrived for `timeout` seconds; None: never.
    """

    def __init__(self, ask: Callable[[int, float | None], Any], timeout: float | None) -> None:
        """ask: waits up to a number of seconds for records after an iteration, or raises TimeoutError."""
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
